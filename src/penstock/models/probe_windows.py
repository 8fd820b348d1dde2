"""What the windows hold in which the patches of a network are compared with a larger input.

Some networks see farther where their input is of a kind: a filter of peaks where one lies, a layer
that is masked where the input is 0, a program that leaves empty patches out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CONTENTS = 5
"""Kinds of contents."""
_BRIGHT = 30.0
"""Largest value around an empty patch."""
_CELL = 8
"""Side of a flat cell."""
_MOST_DRAWS, _CHEAP = 6, 1e4
"""Times that each content is drawn for a network that does at most one operation a voxel, and the
operations at which once is enough. Filters see far at few voxels, and do few operations."""


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
        values = (self.noise(sides) - 0.5).sign() * 10 ** (8 * self.noise(sides) - 3)
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
