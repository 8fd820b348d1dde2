"""Values on their way out of a net: floats rounded, clipped and counted, labels copied and checked.

A tally of four integers goes with each head of a block, on the device that computes it, so that
nothing waits for a GPU; it is judged on the host when the block is there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import PenstockError
from .heads import HeadPlan, float_range, whole_range

LOW, HIGH, CLIPPED, SPOILT = range(4)
"""Of a head's tally: the least and the largest label, how many values were clipped to the range of
the output, how many patches hold what may not be: labels that are no whole numbers, else values
that are not finite."""
NOTHING = (torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min, 0, 0)


def check_labels(head: HeadPlan, low: int, high: int, spoilt: int) -> None:
    """Raise `PenstockError` for labels that the output's dtype cannot hold."""
    if spoilt:
        raise PenstockError(
            f"head {head.name} is of labels but has values that are no whole numbers; "
            "give --head-kind scores or intensity"
        )
    least, most = whole_range(head.dtype)
    if low <= high and (low < least or high > most):
        wide = np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))
        raise PenstockError(
            f"head {head.name} has labels from {low} to {high}, which {head.dtype} does not hold; "
            f"give --out-dtype {wide}"
        )


def note_labels(labels: Tensor, dtype: torch.dtype, tally: Tensor) -> Tensor:
    """Labels as integers that can be copied into a tensor of ``dtype``; their range is noted."""
    if labels.dtype == dtype and not labels.is_floating_point():
        return labels
    if labels.is_floating_point():
        whole = (labels == labels.round()) & (labels.abs() < 2.0**63)
        tally[SPOILT] += ~whole.all()
    # Of 64 bits without a sign, the larger half is negative here: no other dtype holds it.
    labels = labels.view(torch.int64) if labels.dtype == torch.uint64 else labels.to(torch.int64)
    low, high = torch.aminmax(labels)
    tally[LOW] = torch.minimum(tally[LOW], low)
    tally[HIGH] = torch.maximum(tally[HIGH], high)
    return labels


def count_clipped(
    values: Tensor, low: Tensor, high: Tensor, dtype: np.dtype[Any], count: Tensor
) -> None:
    """Add to ``count`` how many of ``values`` a dtype cannot hold; they lie from ``low`` to
    ``high``."""
    limits = float_range(dtype)
    # A GPU is not waited for: there all are counted.
    if limits is None or (values.device.type == "cpu" and limits[0] <= low and high < limits[1]):
        return
    count += ((values < limits[0]) | (values >= limits[1])).sum()


def to_range_(values: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Round (half to even) where ``dtype`` is of integers, and clip to its range, in place.

    The largest integers of 32 bits are no float32, and those of 64 no float64: the nearest one
    below stands for them.
    """
    if dtype.kind == "f":
        info = np.finfo(dtype)
        return values if dtype.itemsize > 2 else values.clamp_(float(info.min), float(info.max))
    if dtype.kind == "b":
        return values.round_().clamp_(0, 1)
    own = np.float64 if values.dtype == torch.float64 else np.float32
    low, high = whole_range(dtype)
    most = own(high)
    if int(most) > high:
        most = np.nextafter(most, own(0))
    return values.round_().clamp_(low, float(most))


def cast(sums: NDArray[Any], out: NDArray[Any]) -> int:
    """A blended sum into an array of the dtype of its sink; ``sums`` is used up.

    Returns how many values were clipped to the range of that dtype.
    """
    values, count = torch.from_numpy(sums), torch.zeros((), dtype=torch.int64)
    if float_range(out.dtype) is not None:
        count_clipped(values, *torch.aminmax(values), out.dtype, count)
    torch.from_numpy(out).copy_(to_range_(values, out.dtype))
    return int(count)
