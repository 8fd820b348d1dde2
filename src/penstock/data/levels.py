"""The levels of an image: which there are, and each made of the one above it.

An axis is halved from level to level, and its last voxel stands alone where its length is odd. An
axis whose voxels are more than 1.5 times as coarse as the finest waits until the others are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .box import Box, Grid

SMALLEST = 256
"""The side of y and x at which there is no further level."""
_COARSE = 1.5
"""Times as coarse as the finest axis, beyond which an axis waits."""
SPACE = (2, 3, 4)
"""The places of z y x among t c z y x."""
_SLAB = 2**15
"""About the voxels of a level that are made at a time."""
Rule = Literal["mean", "mode"]


@dataclass(frozen=True, slots=True)
class LevelBelow:
    """One level below the first, all along t c z y x."""

    shape: tuple[int, ...]
    halved: tuple[int, ...]
    """2 on each axis that is halved from the level above, 1 on others."""
    factors: tuple[int, ...]
    """Voxels of the first level in one voxel, by axis."""


def levels_below(
    shape: Sequence[int],
    scale: Sequence[float] | None = None,
    count: int | None = None,
    axes: Sequence[int] = SPACE,
) -> list[LevelBelow]:
    """The levels below an array.

    Args:
        shape: Its shape along t c z y x.
        scale: The physical size of its voxels; None for cubes.
        count: The number of levels in all; by default as many as bring y and x down to 256.
        axes: The places of the axes that may be halved.

    Returns:
        The levels, the finest first.
    """
    size = [abs(side) or 1.0 for side in scale or (1.0,) * 5]
    sides, factors, levels = list(shape), [1] * 5, list[LevelBelow]()
    while max(sides[3:]) > SMALLEST if count is None else len(levels) < count - 1:
        longer = [axis for axis in axes if sides[axis] > 1]
        if not longer:
            break
        finest = min(size[axis] * factors[axis] for axis in longer)
        halved = tuple(
            2 if axis in longer and size[axis] * factors[axis] <= _COARSE * finest else 1
            for axis in range(5)
        )
        sides = [-(-side // by) for side, by in zip(sides, halved, strict=True)]
        factors = [factor * by for factor, by in zip(factors, halved, strict=True)]
        levels.append(LevelBelow(tuple(sides), halved, tuple(factors)))
    return levels


def box_above(box: Box, halved: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of the level above, of ``shape``, that a box of a level is made of."""
    sides = zip(box.start, box.stop, halved, shape, strict=True)
    start, stop = zip(*((a * n, min(b * n, end)) for a, b, n, end in sides), strict=True)
    return Box(start, stop)


def reduced(
    array: NDArray[Any], halved: Sequence[int], rule: Rule, nodata: float | None = None
) -> NDArray[Any]:
    """The voxels of a level, from those of the level above.

    Args:
        array: Voxels of the level above, of any number of axes.
        halved: 2 on each axis to halve, 1 on others. An odd length is halved to the next integer.
        rule: ``mean``: in float64, rounded half to even for integers. ``mode``: the most frequent
            value, the smallest of those that are equally frequent.
        nodata: A value that is left out of means, as NaN is. Where nothing is left it stays.

    Returns:
        The voxels, of the same dtype.
    """
    if not any(array.strides):  # one value at all places
        sides = [-(-side // by) for side, by in zip(array.shape, halved, strict=True)]
        return np.broadcast_to(array[(0,) * array.ndim], sides)
    # A voxel that stands alone counts twice, which changes neither a mean nor a mode.
    odd = [(0, side % by) for side, by in zip(array.shape, halved, strict=True)]
    padded = np.pad(array, odd, mode="edge") if any(more for _, more in odd) else array
    shape = tuple(side // by for side, by in zip(padded.shape, halved, strict=True))
    out = np.empty(shape, array.dtype)
    # By some planes at a time, which stay in the cache: several times as fast.
    step = [1] * len(shape)
    step[-2:], step[-3:-2] = shape[-2:], [max(1, _SLAB // math.prod(shape[-2:]))]
    for cell in Grid(Box.of((0,) * len(shape), shape), tuple(step[-len(shape) :])):
        above = padded[box_above(cell, halved, padded.shape).slices]
        if rule == "mode":
            out[cell.slices] = _mode(_parts(above, halved))
        elif array.dtype.kind == "f" or nodata is not None:
            out[cell.slices] = _mean_of_known(above, halved, nodata)
        else:
            out[cell.slices] = _mean_of_integers(above, halved)
    return out


def _parts(array: NDArray[Any], halved: Sequence[int]) -> list[NDArray[Any]]:
    """The voxels at each place of the windows, in the order of their places."""
    starts = itertools.product(*(range(by) for by in halved))
    places = (tuple(map(slice, start, array.shape, halved)) for start in starts)
    return [np.ascontiguousarray(array[place]) for place in places]


def _summed(array: NDArray[Any], halved: Sequence[int]) -> NDArray[Any]:
    """The sums of windows, by pairs along one axis after another."""
    for axis, by in enumerate(halved):
        if by == 2:
            lead = (slice(None),) * axis
            array = array[(*lead, slice(0, None, 2))] + array[(*lead, slice(1, None, 2))]
    return array


def _mean_of_integers(array: NDArray[Any], halved: Sequence[int]) -> NDArray[Any]:
    """The means of windows, in integers: the sum of a power of two of them is divided exactly."""
    shift = sum(by == 2 for by in halved)
    if not shift:
        return array
    # Half to even: a half goes up only where the integer below is odd.
    below_half, below_one = (1 << (shift - 1)) - 1, (1 << shift) - 1
    if array.dtype.itemsize == 8:  # the sum of eight may not fit
        rest = _summed(array & below_one, halved)
        means = _summed(array >> shift, halved) + (rest >> shift)
        return means + (((rest & below_one) + below_half + (means & 1)) >> shift)
    sums = _summed(array.astype(np.int64 if array.dtype.itemsize > 2 else np.int32), halved)
    sums += below_half + ((sums >> shift) & 1)
    sums >>= shift
    return sums


def _mean_of_known(
    array: NDArray[Any], halved: Sequence[int], nodata: float | None
) -> NDArray[Any]:
    """The means of windows, without no-data and NaN, in float64."""
    values = array.astype(np.float64)
    unknown = np.isnan(values) if nodata is None else np.isnan(values) | (array == nodata)
    if not unknown.any():
        means = _summed(values, halved) / math.prod(halved)
        return np.round(means) if array.dtype.kind in "iu" else means
    values[unknown] = 0
    counts = _summed((~unknown).astype(np.int8), halved)
    with np.errstate(invalid="ignore"):
        means = _summed(values, halved) / counts
    nothing = np.nan if nodata is None else nodata
    return np.where(counts > 0, np.round(means) if array.dtype.kind in "iu" else means, nothing)


def _mode(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The most frequent of the values at each place, the smallest of those equally frequent."""
    mixed = np.zeros(parts[0].shape, np.bool_)
    for part in parts[1:]:
        mixed |= part != parts[0]
    best = parts[0].copy()
    best[mixed] = _most_frequent([part[mixed] for part in parts])  # few, where objects are large
    return best


def _most_frequent(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The same, where not all values are equal."""
    counts = [np.zeros(part.shape, np.int8) for part in parts]
    for one, other in itertools.combinations(range(len(parts)), 2):
        same = (parts[one] == parts[other]).view(np.int8)
        counts[one] += same
        counts[other] += same
    best, most = parts[0], counts[0]
    for part, count in zip(parts[1:], counts[1:], strict=True):
        better = (count > most) | ((count == most) & (part < best))
        best, most = np.where(better, part, best), np.maximum(most, count)
    return best
