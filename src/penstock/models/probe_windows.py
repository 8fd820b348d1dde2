"""The windows in which the patches of a network are compared with a larger input.

Some networks see farther where their input is of a kind: a filter of peaks where one lies, a layer
that is masked where the input is 0, a program that leaves empty patches out. Others do at a far
index, as a table of positions ends there or a program cuts large inputs itself, by the number of
voxels, or in another dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .registry import Reach

CONTENTS = 5
"""Kinds of contents."""
_BRIGHT = 30.0
"""Largest value around an empty patch."""
_CELL = 8
"""Side of a flat cell."""
_MOST_DRAWS, _CHEAP = 6, 1e4
"""Times that each content is drawn for a network that does at most one operation a voxel, and the
operations at which once is enough. Filters see far at few voxels, and do few operations."""
_MOST_VOXELS = 2**18
"""Most voxels of the window in which all axes are cut at once."""
_FAR = {2: 1280, 3: 320}
"""Length of the longest window, by the number of axes: more than any patch that is chosen has."""
_MOST_WORK = 5e9
"""Floating-point operations of a wide window: seconds of one core."""
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest difference of equal outputs, as a share of their range: kernels round by shape."""
_RARE = 1e-3
"""Share of the values that may differ in the dtype of a job: rounding may change a class."""


@dataclass(frozen=True)
class Compared:
    """Patches of a window, and the window."""

    axes: tuple[int, ...]
    """The axes along which the patches are shorter than the window."""
    window: list[int]
    patches: list[tuple[list[int], list[int]]]
    """The first voxel of each and its sides."""
    kind: int = 0
    """The kind of content."""
    as_run: bool = False
    """True if the network runs in the dtype of a job, and begins anew with the patches."""

    def core(self, sides: Sequence[int], reach: Reach) -> tuple[list[int], list[int]]:
        """The first voxel of the core of a patch of such sides, and its sides."""
        cut = [int(axis in self.axes) for axis in range(len(sides))]
        low = [before * c for before, c in zip(reach.before, cut, strict=True)]
        high = [after * c for after, c in zip(reach.after, cut, strict=True)]
        return low, [n - b - a for n, b, a in zip(sides, low, high, strict=True)]


def comparisons(reach: Reach, side: int, operations: float) -> Iterator[Compared]:
    """All comparisons of a network: small ones by kinds of content, then of large windows.

    Args:
        reach: What it sees, as far as it is known.
        side: A side that it takes.
        operations: Its operations for one voxel.
    """
    each = [(axis,) for axis in range(len(reach.step))]
    for axes in (*each, tuple(range(len(reach.step)))):
        sides = _sides(reach, side, axes, 0)
        if len(axes) > 1 and math.prod(sides) > _MOST_VOXELS:
            continue
        step = [s if axis in axes else 0 for axis, s in enumerate(reach.step)]
        for number in range(CONTENTS * draws_for(operations)):
            # Sides of windows differ by odd and by even steps: some networks pad to a multiple.
            larger = [n + (3 + number % 2) * s for n, s in zip(sides, step, strict=True)]
            corner = [(1 + number % 2) * s for s in step]
            yield Compared(axes, larger, [(corner, sides)], number % CONTENTS)
    for axes in each:
        yield _of_large(reach, side, axes, _FAR[len(each)])
    yield _widest(reach, side, operations)


def _widest(reach: Reach, side: int, operations: float) -> Compared:
    """The widest window that is cut along all axes, or a long one if none is small enough."""
    axes = tuple(range(len(reach.step)))
    most = min(2 * _MOST_VOXELS, _MOST_WORK / (1 + operations))
    wide = _of_large(reach, side, axes, int(most ** (1 / len(axes))), as_run=True)
    if math.prod(wide.window) <= 2 * _MOST_VOXELS:
        return wide
    return _of_large(reach, side, axes[-1:], 0, as_run=True)


def _of_large(
    reach: Reach, side: int, axes: tuple[int, ...], length: int, *, as_run: bool = False
) -> Compared:
    """A window about as long along some axes, with two patches of about half of it and one of the
    least."""
    step = [s if axis in axes else 0 for axis, s in enumerate(reach.step)]
    least = _sides(reach, side, axes, 0)
    half = list(map(max, least, _sides(reach, side, axes, length // 2)))
    more = [n + s for n, s in zip(half, step, strict=True)]
    room = [n + 3 * s for n, s in zip(least, step, strict=True)]
    window = list(map(max, room, _sides(reach, side, axes, length)))
    ends = [[n - m for n, m in zip(window, sides, strict=True)] for sides in (half, least)]
    return Compared(axes, window, [(ends[0], half), (step, more), (ends[1], least)], as_run=as_run)


def _sides(reach: Reach, side: int, axes: tuple[int, ...], length: int) -> list[int]:
    """Sides of a window of about a length along some axes, and more than what is seen there."""
    each = zip(reach.before, reach.after, reach.step, strict=True)
    return [
        step * -(-max(side, before + after + 8, length) // step) if axis in axes else side
        for axis, (before, after, step) in enumerate(each)
    ]


class ProbeWindows:
    """Makes windows of random values, the same in each search."""

    def __init__(self, channels: int) -> None:
        self.channels, self.dtype = channels, torch.float64
        self._random = torch.Generator().manual_seed(0)

    def noise(self, sides: Sequence[int]) -> Tensor:
        """Random values as of normalised data, shape (1, channels, *sides)."""
        shape = (1, self.channels, *sides)
        return torch.rand(shape, generator=self._random, dtype=torch.float64).to(self.dtype)

    def of_kind(self, number: int, sides: Sequence[int], patch: Any) -> Tensor:
        """A window with a kind of content, shaped like `noise`.

        Args:
            number: Of the kind, less than `CONTENTS`. No network refuses the first.
            sides: Sides of the window.
            patch: What takes the patch out of the window.
        """
        values = self.noise(sides)
        if number == 1:  # z-scores
            values = 6 * values - 3
        elif number == 2:
            values = self._mixed(sides)
        elif number > 2:  # around an empty patch, and around one that is not
            values *= _BRIGHT
            values[patch] *= (0, 1 / _BRIGHT)[number - 3]
        return values

    def _mixed(self, sides: Sequence[int]) -> Tensor:
        """Values of all magnitudes, and flat cells of 0, 1 and 2."""
        values = (self.noise(sides) - 0.5).sign() * 10 ** (14 * self.noise(sides) - 9)
        levels = 6 * self.noise([side // _CELL + 2 for side in sides])
        for axis, side in enumerate(sides, 2):
            first = int(torch.randint(_CELL, (), generator=self._random))
            levels = levels.repeat_interleave(_CELL, axis).narrow(axis, first, side)
        return torch.where(levels < 3, levels.floor(), values)


def box_of(corner: Sequence[int], sides: Sequence[int]) -> Any:
    """What takes a box out of a tensor whose last axes are spatial."""
    return (..., *(slice(start, start + n) for start, n in zip(corner, sides, strict=True)))


def draws_for(operations: float) -> int:
    """How often each content is drawn for a network of so many operations a voxel."""
    return max(1, min(_MOST_DRAWS, int(_CHEAP / (1 + operations))))


def same(a: Tensor, b: Tensor, most: float = 0.0) -> Tensor:
    """Where two outputs differ by so much at most."""
    return torch.isclose(a, b, rtol=0, atol=most, equal_nan=True)


def equal(a: Tensor, b: Tensor, dtype: torch.dtype, as_run: bool = False) -> bool:
    """Whether two outputs are equal up to the rounding of a dtype."""
    span = float(torch.nan_to_num(a).abs().max()) or 1.0
    share = float(same(a, b, _TOLERANCE[dtype] * span).double().mean())
    return share >= 1 - _RARE * as_run
