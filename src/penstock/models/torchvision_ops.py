"""Imports torchvision, with stand-ins for operators that do not load.

torchvision's detection models need two operators, ``nms`` and ``roi_align``, that are compiled
against one build of torch. Beside another build (PyPI's torchvision beside a CPU-only torch, say)
they do not load, and ``import torchvision`` ends with "operator torchvision::nms does not exist".
Here the two are then supplied in plain torch, so that the models are built, trained and run. They
are slower, so records of a run say which ones it was measured with.

A room that needs torchvision, or a library that imports it, calls `import_torchvision` first.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import MissingDependency, describe, require

NMS_BLOCK = 1024
"""Boxes whose overlaps are held at once: 1024 x 1024 of them are 4 MiB."""
GATHERED_BYTES = 64 * 2**20
"""Indices and weights of sampling points that are held at once."""


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of boxes (n, 4) that overlap no kept box of a higher score by more than the
    threshold, highest score first. Of equal scores the earlier box counts as the higher.

    The greedy rule goes box by box. Here it goes block by block: boxes that kept boxes of earlier
    blocks suppress are dropped at once, and within the block "kept unless a kept one suppresses it"
    is applied to all boxes together until nothing changes. Each pass settles one more link of every
    chain of suppressions, so the outcome is exactly the greedy one, in as many passes as the
    longest chain has links.
    """
    from torchvision.ops import box_iou

    order = torch.argsort(scores, descending=True, stable=True)
    sorted_boxes = boxes[order].to(torch.promote_types(boxes.dtype, torch.float32))
    kept: list[Tensor] = []
    for start in range(0, len(order), NMS_BLOCK):
        block = torch.arange(start, min(start + NMS_BLOCK, len(order)), device=boxes.device)
        for earlier in kept:
            overlaps = box_iou(sorted_boxes[earlier], sorted_boxes[block]) > iou_threshold
            block = block[~overlaps.any(0)]
        suppresses = (box_iou(sorted_boxes[block], sorted_boxes[block]) > iou_threshold).triu(1)
        keep = torch.ones(len(block), dtype=torch.bool, device=boxes.device)
        while True:
            settled = ~(suppresses & keep[:, None]).any(0)
            if torch.equal(settled, keep):
                break
            keep = settled
        kept.append(block[keep])
    return order[torch.cat(kept)] if kept else order


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Features (N, C, H, W) under regions (K, 5: image, x0, y0, x1, y1) -> (K, C, height, width).

    A region is cut into bins, a bin holds ``sampling_ratio`` squared sampling points (below 1: as
    many as pixels), each read between four pixels; the bin is their mean. So a bin is a weighted
    sum of pixels. ``embedding_bag`` adds up weighted rows, forward and backward, without a copy of
    what it reads.
    """
    batch, channels, height, width = input.shape
    dtype = torch.promote_types(input.dtype, torch.float32)
    table = input.to(dtype).permute(0, 2, 3, 1).reshape(batch * height * width, channels)
    regions = rois.detach().to(dtype)
    image = regions[:, 0].to(torch.int64)
    corners = regions[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    sides = corners[:, 2:] - corners[:, :2]
    if not aligned:
        sides = sides.clamp(min=1.0)

    bins = (pooled_height, pooled_width)
    if sampling_ratio > 0:
        counts = torch.full((len(rois), 2), sampling_ratio, device=rois.device)
    else:  # y, x
        counts = torch.ceil(sides.flip(1) / sides.new_tensor(bins)).to(torch.int64)
    pooled = table.new_zeros(len(rois), pooled_height * pooled_width, channels)
    if not len(rois):
        return input.new_zeros(0, channels, *bins)
    for across in torch.unique(counts, dim=0).tolist():
        if min(across) < 1:
            continue  # a region without area holds no points: zeros
        which = (counts == counts.new_tensor(across)).all(1).nonzero()[:, 0]
        per_region = 4 * across[0] * across[1] * pooled_height * pooled_width * 16
        for part in which.split(max(1, GATHERED_BYTES // per_region)):
            y = _points(corners[part, 1], sides[part, 1], bins[0], across[0], height)
            x = _points(corners[part, 0], sides[part, 0], bins[1], across[1], width)
            indices, weights = _bags(y, x, width)
            indices = indices + (image[part] * height * width)[:, None, None]
            rows = F.embedding_bag(
                indices.flatten(0, 1), table, per_sample_weights=weights.flatten(0, 1), mode="sum"
            )
            pooled = pooled.index_copy(0, part, rows.view(len(part), -1, channels))
    shape = (len(rois), pooled_height, pooled_width, channels)
    return pooled.view(shape).permute(0, 3, 1, 2).to(input.dtype).contiguous()


def _points(
    start: Tensor, side: Tensor, bins: int, points: int, limit: int
) -> tuple[Tensor, Tensor]:
    """The sampling points of each bin along one axis, as pixels and their weights.

    (K) -> both (K, bins, points x 2). A point beyond the edge by more than a pixel weighs nothing,
    a nearer one counts at the edge. The weights of a bin add up to at most 1.
    """
    inner = (torch.arange(bins * points, device=start.device, dtype=start.dtype) + 0.5) / points
    place = start[:, None] + inner * (side / bins)[:, None]
    inside = ((place >= -1) & (place <= limit)).to(place.dtype) / points
    place = place.clamp(0, limit - 1)
    low = place.floor()
    high = (low + 1).clamp(max=limit - 1)
    pixels = torch.stack((low, high), -1).to(torch.int64)
    share = place - low
    weights = torch.stack(((1 - share) * inside, share * inside), -1)
    return pixels.view(len(start), bins, -1), weights.view(len(start), bins, -1)


def _bags(y: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Every row of a bin with every column of it: (K, bins, pixels of a bin)."""
    rows, columns = y[0][:, :, None, :, None], x[0][:, None, :, None, :]
    indices = rows * width + columns
    weights = y[1][:, :, None, :, None] * x[1][:, None, :, None, :]
    return indices.flatten(3).flatten(1, 2), weights.flatten(3).flatten(1, 2)


_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
}
_libraries: list[torch.library.Library] = []
"""Operators live as long as the library that defined them."""


def import_torchvision() -> Any:
    """Import torchvision. Where its compiled operators do not load, register stand-ins and log one
    sentence that says so. Imports of torchvision by others work afterwards.

    Returns:
        The module.

    Raises:
        MissingDependency: It is not installed, or does not load beside this torch.
    """
    try:
        return _import()
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    # Before the import, which needs nms to be declared.
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    try:
        module = _import()
    except RuntimeError as error:
        raise MissingDependency(
            "this torchvision does not load beside this torch, not even without its compiled "
            f"operators ({describe(error)}); install the two from one index, see pytorch.org"
        ) from error
    # After the import, which gives the two kernels of its own for shapes and gradients.
    library.impl("nms", nms, "CompositeExplicitAutograd")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    for holder in ("torchvision.extension", "torchvision.ops.roi_align"):
        sys.modules[holder]._has_ops = lambda: True  # type: ignore[attr-defined]
    logging.getLogger(__name__).warning(
        "torchvision %s does not load its compiled operators beside torch %s: nms and roi_align "
        "are Penstock's in plain torch, which are slower; install torch and torchvision together, "
        "from one index",
        module.__version__,
        torch.__version__,
    )
    return module


def compiled_operators() -> bool:
    """Whether nms and roi_align are torchvision's own. Records of a run say so."""
    return hasattr(torch.ops.torchvision, "_cuda_version")  # the compiled library alone has it


def _import() -> Any:
    with warnings.catch_warnings():  # about image codecs that do not load either
        warnings.simplefilter("ignore")
        return require("torchvision", "train")
