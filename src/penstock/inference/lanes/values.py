"""The values of a net: its input is normalised and its output scaled back; floats are rounded,
clipped and counted, labels are checked.

Each head of a brick has a tally of four integers on the device that computes it, so nothing waits
for a GPU. The tally is checked on the host once the brick has arrived there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...base import PenstockError
from ...data import Box, Scaling
from ..opening.heads import HeadPlan, float_range, whole_range

LOW, HIGH, CLIPPED, SPOILT = range(4)
"""The entries of a head's tally. They are the least and the largest label, and the number of values
that were clipped to the range of the output. The last one is the number of spoilt patches: their
labels are not whole numbers, or other values are not finite."""
Range = tuple[float, float] | tuple[Tensor, Tensor]
"""The least and the largest of some values. On a GPU they are tensors, so nothing waits for it."""
NOTHING = (torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min, 0, 0)


def normalise_(patch: Tensor, scalings: Sequence[Scaling]) -> None:
    """Normalise a patch (channels, spatial...) in place, by one scaling or by one a channel."""
    for part, scaling in zip([patch] if len(scalings) == 1 else patch, scalings, strict=True):
        # Found before the values change: what becomes 0 by the scaling is not meant.
        zeros = part == 0 if scaling.zeros is not None else None
        if _scales(scaling):
            part.sub_(scaling.lower).div_(scaling.scale)
        if scaling.clip is not None:
            part.clamp_(*scaling.clip)
        if zeros is not None:
            part.masked_fill_(zeros, scaling.zeros or 0)


def fill_beyond_(patch: Tensor, seen: Box, volume: Box, value: float | str | None) -> None:
    """Fill the voxels of a patch (channels, spatial...) that lie beyond a volume, in place. What is
    no number fills nothing. ``seen`` is the box of the patch."""
    if not isinstance(value, float) or seen in volume:
        return
    # Boxes have three axes. The patch of a net of planes lacks z.
    first = 3 - (patch.ndim - 1)
    for axis in range(first, 3):
        side = seen.shape[axis]
        before = min(side, max(0, volume.start[axis] - seen.start[axis]))
        after = min(side, max(0, seen.stop[axis] - volume.stop[axis]))
        patch.narrow(axis - first + 1, 0, before).fill_(value)
        patch.narrow(axis - first + 1, side - after, after).fill_(value)


def denormalised(values_BCZYX: Tensor, scalings: Sequence[Scaling], out: Tensor) -> Tensor:
    """Values scaled back, by one scaling or by one a channel: in ``out``, or themselves if nothing
    is to be scaled."""
    if not any(map(_scales, scalings)):
        return values_BCZYX
    whole = len(scalings) == 1
    parts, made = ([each] if whole else each.unbind(1) for each in (values_BCZYX, out))
    for part, target, scaling in zip(parts, made, scalings, strict=True):
        if _scales(scaling):
            torch.mul(part, scaling.scale, out=target).add_(scaling.lower)
        else:
            target.copy_(part)
    return out


def _scales(scaling: Scaling) -> bool:
    return (scaling.lower, scaling.scale) != (0.0, 1.0)


def check_labels(head: HeadPlan, low: int, high: int, spoilt: int) -> None:
    """Raise `PenstockError` if the output's dtype cannot hold the labels."""
    if spoilt:
        raise PenstockError(
            f"head {head.name} is one of labels, but has values that are not whole numbers; "
            "give --head-kind scores or intensity"
        )
    least, most = whole_range(head.dtype)
    if low <= high and (low < least or high > most):
        wide = np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))
        raise PenstockError(
            f"head {head.name} has labels from {low} to {high}, which {head.dtype} does not hold; "
            f"give --out-dtype {wide.name!r}"
        )


def note_labels(labels: Tensor, dtype: torch.dtype, tally: Tensor) -> Tensor:
    """Labels as integers that can be copied into a tensor of ``dtype``. Notes their range."""
    if labels.dtype == dtype and not labels.is_floating_point():
        return labels
    if labels.is_floating_point():
        whole = (labels == labels.round()) & (labels.abs() < 2.0**63)
        tally[SPOILT] += ~whole.all()
    # Labels of uint64 above 2**63 become negative here; no other dtype can hold them anyway.
    labels = labels.view(torch.int64) if labels.dtype == torch.uint64 else labels.to(torch.int64)
    low, high = torch.aminmax(labels)
    tally[LOW] = torch.minimum(tally[LOW], low)
    tally[HIGH] = torch.maximum(tally[HIGH], high)
    return labels


def note_range(values: Tensor, tally: Tensor) -> Range:
    """The least and the largest value. Notes a value that is not finite."""
    low, high = torch.aminmax(values)  # a NaN anywhere makes both NaN
    if values.device.type != "cpu":
        tally[SPOILT] += low * 0 + high * 0 != 0  # NaN, and infinity times 0, differ from 0
        return low, high
    least, most = low.item(), high.item()
    if not (math.isfinite(least) and math.isfinite(most)):
        tally[SPOILT] += 1
    return least, most


def to_range(
    values: Tensor, span: Range, dtype: np.dtype[Any], tally: Tensor, out: Tensor
) -> Tensor:
    """Values clipped to the range of a dtype, for `copy_rounded`: in ``out``, or themselves if
    nothing is to be done. Counts the values that it cannot hold; ``span`` is the range of all
    values."""
    limits = float_range(dtype)
    if limits is None:
        return values
    # On a GPU, where reading the span would wait, all values are compared.
    if values.device.type != "cpu" or not (limits[0] <= span[0] and span[1] < limits[1]):
        tally[CLIPPED] += ((values < limits[0]) | (values >= limits[1])).sum()
        values = torch.clamp(values, *_clamps(dtype, values.dtype), out=out)
    # On a CPU they are rounded as they are copied.
    rounds = dtype.kind != "f" and values.device.type != "cpu"
    return torch.round(values, out=out) if rounds else values


def copy_rounded(values: Tensor, target: Tensor) -> None:
    """Copy values that `to_range` gave. Those for integers are rounded, half to even."""
    if values.device.type != "cpu" or target.is_floating_point():
        target.copy_(values)
        return
    with np.errstate(invalid="ignore"):  # what is not finite is an error already
        # Not in two steps, as numpy rounds what fits its small buffer, and copies it from there.
        np.rint(values.numpy(), out=target.numpy(), casting="unsafe")


@lru_cache
def _clamps(dtype: np.dtype[Any], floats: torch.dtype) -> tuple[float, float]:
    """The range of ``dtype``, as values of ``floats``.

    A float32 cannot hold the largest 32-bit integers, nor a float64 the largest 64-bit ones. The
    nearest float below is taken instead.
    """
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    low, high = whole_range(dtype)
    kind = np.float64 if floats == torch.float64 else np.float32
    most = kind(high)
    if int(most) > high:
        most = np.nextafter(most, kind(0))
    return float(low), float(most)


def cast(sums: NDArray[Any], out: NDArray[Any]) -> int:
    """Convert blended sums into an array of the sink's dtype. ``sums`` is overwritten.

    Returns how many values were clipped to the range of that dtype.
    """
    values, tally = torch.from_numpy(sums), torch.tensor(NOTHING)
    if float_range(out.dtype) is not None:
        to_range(values, note_range(values, tally), out.dtype, tally, out=values)
    copy_rounded(values, torch.from_numpy(out))
    return int(tally[CLIPPED])
