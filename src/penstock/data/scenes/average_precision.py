"""COCO's average precision of boxes, by faster-coco-eval, each image counted once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import require


@dataclass(frozen=True, slots=True, eq=False)
class ImageResult:
    """The boxes predicted in one image, and the true ones. Boxes are (n, 4): x0, y0, x1, y1."""

    image: int | str
    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    true_boxes: NDArray[np.float64]
    true_labels: NDArray[np.int64]


def distinct(results: Iterable[ImageResult]) -> list[ImageResult]:
    """One result of each image, in the order of the images.

    Ranks that share a data set pad their shares to one length with images of other ranks. These
    would count twice: https://github.com/pytorch/pytorch/issues/64905.
    """
    first = {result.image: result for result in reversed([*results])}
    return [first[image] for image in sorted(first, key=lambda image: (str(type(image)), image))]


def coco_ap(
    results: Iterable[ImageResult], *, by_class: bool = True, max_dets: int | None = None
) -> dict[str, float | None]:
    """COCO's average precision of boxes, by faster-coco-eval; each image counts once.

    Args:
        results: the predicted and the true boxes, image by image.
        by_class: the mean over the classes; else a box of any class matches any object.
        max_dets: most boxes of a class in an image that count, the surest first; all by default.
            COCO's own scores count 100, which is too few where an image has more objects.

    Returns:
        ``AP``, ``AP50``, ``AP75`` and the recall ``AR``, which is named with ``max_dets`` (AR300),
        from 0 to 1; None where there are no objects.
    """
    images, recall = distinct(results), f"AR{max_dets or ''}"
    nothing: dict[str, float | None] = dict.fromkeys(("AP", "AP50", "AP75", recall))
    if not any(len(result.true_boxes) for result in images):
        return nothing
    if not any(len(result.boxes) for result in images):
        return dict.fromkeys(nothing, 0.0)
    module = require("faster_coco_eval", "train")

    truths = [
        _entry(number, box, label, by_class) | {"iscrowd": 0}
        for number, result in enumerate(images, 1)
        for box, label in zip(result.true_boxes, result.true_labels, strict=True)
    ]
    boxes = [
        _entry(number, box, label, by_class) | {"score": float(score)}
        for number, result in enumerate(images, 1)
        for box, label, score in zip(result.boxes, result.labels, result.scores, strict=True)
    ]
    for entries in (truths, boxes):
        for number, entry in enumerate(entries, 1):
            entry["id"] = number
    classes = sorted({entry["category_id"] for entry in (*truths, *boxes)})
    document = {
        "images": [{"id": number} for number in range(1, len(images) + 1)],
        "annotations": truths,
        "categories": [{"id": label, "name": str(label)} for label in classes],
    }
    truth = module.COCO(document)
    evaluation = module.COCOeval_faster(truth, truth.loadRes(boxes), iouType="bbox")
    # Three numbers, in this order: the last one counts.
    most = max_dets or max(len(result.boxes) for result in images)
    evaluation.params.maxDets = [min(1, most), min(10, most), most]
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    stats = evaluation.stats
    values = {"AP": stats[0], "AP50": stats[1], "AP75": stats[2], recall: stats[8]}
    return {key: None if value < 0 else float(value) for key, value in values.items()}


def _entry(image: int, box: NDArray[Any], label: int, by_class: bool) -> Any:
    x0, y0, x1, y1 = (float(side) for side in box)
    return {
        "image_id": image,
        "category_id": int(label) if by_class else 1,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "area": (x1 - x0) * (y1 - y0),
    }
