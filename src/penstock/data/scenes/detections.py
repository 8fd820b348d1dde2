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


def coco_ap(
    results: Iterable[ImageResult], *, max_dets: int | None = None
) -> dict[str, float | None]:
    """COCO's average precision of boxes, which are all of one class.

    Args:
        results: the predicted and the true boxes, each image once.
        max_dets: most boxes in an image that count, the surest first; all by default.
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
        _entry(number, box) | {"iscrowd": 0}
        for number, image in enumerate(images, 1)
        for box in image.true_boxes
    ]
    boxes = [
        _entry(number, box) | {"score": float(score)}
        for number, image in enumerate(images, 1)
        for box, score in zip(image.boxes, image.scores, strict=True)
    ]
    for entries in (truths, boxes):
        for number, entry in enumerate(entries, 1):
            entry["id"] = number
    document = {
        "images": [{"id": number} for number in range(1, len(images) + 1)],
        "annotations": truths,
        "categories": [{"id": 1, "name": "object"}],
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


def _entry(image: int, box: Any) -> dict[str, Any]:
    x0, y0, x1, y1 = (float(side) for side in box)
    return {
        "image_id": image,
        "category_id": 1,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "area": (x1 - x0) * (y1 - y0),
    }
