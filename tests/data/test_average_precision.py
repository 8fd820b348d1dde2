"""COCO's average precision, against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.data.scenes.average_precision import ImageResult, coco_ap, distinct


def slow_ap(results: list[ImageResult], threshold: float) -> float:
    """Average precision of one class at one overlap, by its definition: 101 recalls."""

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


def some_results(seed: int, images: int = 6, classes: int = 1) -> list[ImageResult]:
    rng = np.random.default_rng(seed)
    results = []
    for image in range(images):
        count = int(rng.integers(1, 6))
        corner = rng.uniform(0, 200, (count, 2))
        true = np.concatenate((corner, corner + rng.uniform(10, 20, (count, 2))), 1)
        labels = rng.integers(1, classes + 1, count)
        boxes = np.concatenate((true + rng.normal(0, 1.5, true.shape), true[:1] + 50))
        predicted = np.append(labels, 1)
        results.append(ImageResult(image, boxes, rng.random(count + 1), predicted, true, labels))
    return results


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coco_ap_is_the_area_under_the_curve(seed: int) -> None:
    results = some_results(seed)
    precision = coco_ap(results)
    by_hand = [slow_ap(results, threshold) for threshold in np.arange(0.5, 1.0, 0.05)]
    assert precision["AP50"] == pytest.approx(by_hand[0], abs=1e-9)
    assert precision["AP75"] == pytest.approx(by_hand[5], abs=1e-9)
    assert precision["AP"] == pytest.approx(np.mean(by_hand), abs=1e-9)


def test_all_boxes_count_unless_it_is_said_how_many() -> None:
    """250 objects, each detected perfectly."""
    corner = 20.0 * np.stack(np.divmod(np.arange(250), 25), 1)
    boxes, one = np.concatenate((corner, corner + 10), 1), np.ones(250, int)
    result = ImageResult(0, boxes, np.linspace(1, 0.5, 250), one, boxes, one)
    assert coco_ap([result]) == {"AP": 1, "AP50": 1, "AP75": 1, "AR": 1}
    capped = coco_ap([result], max_dets=100)
    assert capped["AR100"] == pytest.approx(100 / 250)
    assert capped["AP"] == pytest.approx(41 / 101)  # of 101 recalls, those up to 0.40
    assert coco_ap([result], max_dets=3)["AR3"] == pytest.approx(3 / 250)


def test_images_that_two_ranks_saw_count_once() -> None:
    results = some_results(3, images=7)
    ranks = [results[0::2], results[1::2] + results[:1]]  # padded to one length
    gathered = [result for rank in ranks for result in rank]
    assert [result.image for result in distinct(gathered)] == list(range(7))
    assert coco_ap(gathered) == coco_ap(results)


def test_coco_ap_by_class_and_of_any() -> None:
    results = some_results(5, classes=3)
    wrong = [
        ImageResult(r.image, r.true_boxes, np.ones(len(r.true_boxes)), r.true_labels + 1,
                    r.true_boxes, r.true_labels)
        for r in results
    ]  # fmt: skip
    assert coco_ap(wrong)["AP"] == 0
    assert coco_ap(wrong, by_class=False)["AP"] == pytest.approx(1.0)


def test_coco_ap_of_nothing() -> None:
    none = np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64)
    one = np.array([[1.0, 1, 9, 9]]), np.array([1])
    assert coco_ap([]) == coco_ap([ImageResult(0, one[0], np.ones(1), one[1], *none[::2])])
    assert set(coco_ap([]).values()) == {None}
    assert set(coco_ap([ImageResult(0, *none, *one)]).values()) == {0.0}
