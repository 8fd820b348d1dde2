"""A grid that has more or fewer voxels than another by a constant factor, from one corner on.

domain   │ 0 │ 1 │ 2 │ 3 │ 4 │
1/2      │   0   │   1   │   2   │   the last voxel may reach past the domain
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .box import Box

SAME = (Fraction(1),) * 3


@dataclass(frozen=True, slots=True)
class ScaledGrid:
    """A grid with so many voxels for one of the domain, along z y x."""

    factors: tuple[Fraction, ...] = SAME
    origin: tuple[int, ...] = (0, 0, 0)
    """The corner of the domain, where a voxel of both grids begins. It has the same coordinates in
    both."""

    def box(self, box: Box) -> Box:
        """A box of the domain as a box of this grid."""
        axes = zip(box.start, box.stop, self.factors, self.origin, strict=True)
        ends = [(o + math.floor((a - o) * f), o + math.ceil((b - o) * f)) for a, b, f, o in axes]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def back(self) -> ScaledGrid:
        """The way from this grid to the domain."""
        return ScaledGrid(tuple(1 / factor for factor in self.factors), self.origin)

    def sides(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Numbers of voxels of the domain, as numbers of voxels here."""
        return tuple(math.ceil(n * f) for n, f in zip(lengths, self.factors, strict=True))

    def mask(self, mask: NDArray[np.bool_], box: Box) -> NDArray[np.bool_]:
        """What is true of voxels of a box of the domain (its last three axes), for the voxels here
        that have their centres in them."""
        if self.factors == SAME:
            return mask
        places = []
        for length, side, factor in zip(self.box(box).shape, box.shape, self.factors, strict=True):
            p, q = factor.as_integer_ratio()
            places.append(np.minimum((2 * np.arange(length) + 1) * q // (2 * p), side - 1))
        z, y, x = np.ix_(*places)
        return mask[..., z, y, x]

    def density(self, domain: Box, stride: Sequence[int]) -> float:
        """Most voxels here for a voxel of a brick. One voxel at an edge may be cut."""
        axes = zip(self.factors, domain.shape, stride, strict=True)
        return math.prod(float(max(f, f + (1 - f) / min(n, step))) for f, n, step in axes)
