"""Detections in images that overlap: of one object the strongest, and COCO's average precision of
boxes, which are matched in faster-coco-eval.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import require


def keep_strongest(
    points: NDArray[np.float64], scores: NDArray[np.float64], radius: float
) -> NDArray[np.intp]:
    """Points without those that lie near a stronger one. An object that two overlapping chips
    detected is kept once.

    Args:
        points: rows and columns, shape (n, 2).
        scores: the strength of each point, shape (n,).
        radius: points closer than this to a stronger one that is kept are left out.

    Returns:
        Indices of the points that are kept, strongest first.

    >>> keep_strongest(np.array([[0.0, 0], [0, 3], [0, 6]]), np.array([0.5, 0.9, 0.4]), 4)
    array([1])
    """
    if not len(points):
        return np.empty(0, np.intp)
    cKDTree = require("scipy.spatial", "train").cKDTree
    order = np.argsort(-scores, kind="stable")
    near = cKDTree(points[order]).query_ball_point(points[order], radius, return_sorted=True)
    place = np.arange(len(order))
    gone = np.zeros(len(order), bool)
    for index in place:
        if not gone[index]:
            others = np.asarray(near[index])
            gone[others[others > index]] = True
    return order[~gone]


@dataclass(frozen=True, slots=True, eq=False)
class ImageResult:
    """The boxes predicted in one image, and the true ones. Boxes are (n, 4): x0, y0, x1, y1."""

    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    true_boxes: NDArray[np.float64]
    labels: NDArray[np.int64] | None = None
    """The class of each predicted box, which counts where scores are asked for by class."""
    true_labels: NDArray[np.int64] | None = None
    image: int | str = ""
    """The image's name."""


def coco_ap(
    results: Iterable[ImageResult], *, by_class: bool = False, max_dets: int | None = None
) -> dict[str, float | None]:
    """COCO's average precision of boxes.

    Args:
        results: the predicted and the true boxes, each image once.
        by_class: the mean over the classes; else a box of any class matches any object.
        max_dets: most boxes of a class in an image that count, the surest first; all by default.
            COCO's own scores count 100, which is too few where an image has more objects.

    Returns:
        ``AP``, ``AP50``, ``AP75`` and the recall ``AR``, which is named with ``max_dets`` (AR300),
        from 0 to 1; None where there are no objects.
    """
    images, recall = [*results], f"AR{max_dets or ''}"
    nothing: dict[str, float | None] = dict.fromkeys(("AP", "AP50", "AP75", recall))
    if not any(len(image.true_boxes) for image in images):
        return nothing
    if not any(len(image.boxes) for image in images):
        return dict.fromkeys(nothing, 0.0)
    module = require("faster_coco_eval", "train")

    truths = [
        _entry(number, box, label) | {"iscrowd": 0}
        for number, image in enumerate(images, 1)
        for box, label in zip(
            image.true_boxes, _classes(image.true_boxes, image.true_labels, by_class), strict=True
        )
    ]
    boxes = [
        _entry(number, box, label) | {"score": float(score)}
        for number, image in enumerate(images, 1)
        for box, score, label in zip(
            image.boxes, image.scores, _classes(image.boxes, image.labels, by_class), strict=True
        )
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
    most = max_dets or max(len(image.boxes) for image in images)
    evaluation.params.maxDets = [min(1, most), min(10, most), most]
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    stats = evaluation.stats
    values = {"AP": stats[0], "AP50": stats[1], "AP75": stats[2], recall: stats[8]}
    return {key: None if value < 0 else float(value) for key, value in values.items()}


def _classes(
    boxes: NDArray[Any], labels: NDArray[np.int64] | None, by_class: bool
) -> Iterable[int]:
    return map(int, labels) if by_class and labels is not None else [1] * len(boxes)


def _entry(image: int, box: Any, label: int) -> dict[str, Any]:
    x0, y0, x1, y1 = (float(side) for side in box)
    return {
        "image_id": image,
        "category_id": label,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "area": (x1 - x0) * (y1 - y0),
    }
