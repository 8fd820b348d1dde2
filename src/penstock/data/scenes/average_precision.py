"""COCO's average precision of boxes of any class, by faster-coco-eval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...base import require


def coco_ap(images: Iterable[Mapping[str, Any]], max_dets: int) -> dict[str, float | None]:
    """COCO's average precision of boxes: a box matches any object.

    Args:
        images: each image once, with its predicted ``boxes`` (n, 4: x0, y0, x1, y1), their
            ``scores`` (n,) and the ``true_boxes`` (m, 4).
        max_dets: most boxes of an image that count, the surest first. COCO's own scores count 100,
            which is too few where an image has more objects.

    Returns:
        ``AP``, ``AP50``, ``AP75`` and the recall ``AR``, which is named with ``max_dets`` (AR300),
        from 0 to 1; None where there are no objects.
    """
    images, recall = [*images], f"AR{max_dets}"
    nothing: dict[str, float | None] = dict.fromkeys(("AP", "AP50", "AP75", recall))
    if not any(len(image["true_boxes"]) for image in images):
        return nothing
    if not any(len(image["boxes"]) for image in images):
        return dict.fromkeys(nothing, 0.0)
    module = require("faster_coco_eval", "train")

    truths = [
        _entry(number, box) | {"iscrowd": 0}
        for number, image in enumerate(images, 1)
        for box in image["true_boxes"]
    ]
    boxes = [
        _entry(number, box) | {"score": float(score)}
        for number, image in enumerate(images, 1)
        for box, score in zip(image["boxes"], image["scores"], strict=True)
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
    evaluation.params.maxDets = [min(1, max_dets), min(10, max_dets), max_dets]
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
