"""COCO's average precision, against its definition."""

from typing import Any

import numpy as np
import pytest

from penstock.data.scenes.detections import ImageResult, coco_ap


def slow_ap(results: list[ImageResult], threshold: float) -> float:
    """Average precision at one overlap, by its definition: 101 recalls."""

    def overlap(a: Any, b: Any) -> float:
        width = min(a[2], b[2]) - max(a[0], b[0])
        height = min(a[3], b[3]) - max(a[1], b[1])
        shared = max(width, 0) * max(height, 0)
        areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
        return shared / (sum(areas) - shared)

    marks = []
    for result in results:
        free = set(range(len(result.true_boxes)))
        for index in np.argsort(-result.scores, kind="stable"):
            near = [(overlap(result.boxes[index], result.true_boxes[j]), j) for j in free]
            best = max(near, default=(0.0, -1))
            if best[0] >= threshold:
                free.discard(best[1])
            marks.append((result.scores[index], best[0] >= threshold))
    marks.sort(key=lambda mark: -mark[0])
    right = np.cumsum([hit for _, hit in marks])
    precision = right / np.arange(1, len(marks) + 1)
    recall = right / sum(len(result.true_boxes) for result in results)
    at = [precision[recall >= level] for level in np.linspace(0, 1, 101)]
    return float(np.mean([of.max() if len(of) else 0.0 for of in at]))


def some_results(seed: int) -> list[ImageResult]:
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(6):
        count = int(rng.integers(1, 6))
        corner = rng.uniform(0, 200, (count, 2))
        true = np.concatenate((corner, corner + rng.uniform(10, 20, (count, 2))), 1)
        boxes = np.concatenate((true + rng.normal(0, 1.5, true.shape), true[:1] + 50))
        results.append(ImageResult(boxes, rng.random(count + 1), true))
    return results


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coco_ap_is_the_area_under_the_curve(seed: int) -> None:
    results = some_results(seed)
    precision = coco_ap(results, max_dets=100)
    by_hand = [slow_ap(results, threshold) for threshold in np.arange(0.5, 1.0, 0.05)]
    assert precision["AP50"] == pytest.approx(by_hand[0], abs=1e-9)
    assert precision["AP75"] == pytest.approx(by_hand[5], abs=1e-9)
    assert precision["AP"] == pytest.approx(np.mean(by_hand), abs=1e-9)


def test_all_boxes_count_unless_it_is_said_how_many() -> None:
    """250 objects, each detected perfectly."""
    corner = 20.0 * np.stack(np.divmod(np.arange(250), 25), 1)
    boxes = np.concatenate((corner, corner + 10), 1)
    result = ImageResult(boxes, np.linspace(1, 0.5, 250), boxes)
    assert coco_ap([result]) == {"AP": 1, "AP50": 1, "AP75": 1, "AR": 1}
    capped = coco_ap([result], max_dets=100)
    assert capped["AR100"] == pytest.approx(100 / 250)
    assert capped["AP"] == pytest.approx(41 / 101)  # of 101 recalls, those up to 0.40
    assert coco_ap([result], max_dets=3)["AR3"] == pytest.approx(3 / 250)


def test_coco_ap_of_nothing() -> None:
    none, one = np.zeros((0, 4)), np.array([[1.0, 1, 9, 9]])
    empty, missed = ImageResult(one, np.ones(1), none), ImageResult(none, np.zeros(0), one)
    assert coco_ap([]) == coco_ap([empty])
    assert set(coco_ap([]).values()) == {None}
    assert set(coco_ap([missed]).values()) == {0.0}


def test_a_box_of_any_class_counts_unless_classes_do() -> None:
    """Called as `ap_cap.py` of the reviewers' cases does, and by class."""
    boxes = some_results(5)[0].true_boxes
    labels = np.arange(1, len(boxes) + 1)
    wrong = ImageResult(
        image=0,
        boxes=boxes,
        scores=np.ones(len(boxes)),
        labels=labels + 1,
        true_boxes=boxes,
        true_labels=labels,
    )
    assert coco_ap([wrong], by_class=True)["AP"] == 0
    assert coco_ap([wrong], by_class=False)["AP"] == pytest.approx(1.0)
