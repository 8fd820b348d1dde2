"""Box: a half-open region of an n-d array in literal coordinates.

A box is independent of arrays, stores and devices. Its origin may be anywhere; ``slices`` and
``within`` turn it into indices of an array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The voxels x with ``start[a] <= x[a] < stop[a]`` on every axis a.

    >>> Box((0, 0), (4, 6)) & Box((2, 5), (9, 9))
    Box((2, 5), (4, 6))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(a > b for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"start {self.start} lies past stop {self.stop}")

    @classmethod
    def of(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        """The box of ``shape`` whose first voxel is ``start``.

        Args:
            start: The first coordinate along each axis.
            shape: The number of voxels along each axis.

        Returns:
            The box.
        """
        return cls(tuple(start), tuple(a + n for a, n in zip(start, shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of voxels along each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of voxels."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices of this box in an array whose origin is zero."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Indices of this box in an array that holds ``outer``."""
        return tuple(
            slice(a - origin, b - origin)
            for a, b, origin in zip(self.start, self.stop, outer.start, strict=True)
        )

    def shift(self, by: Sequence[int]) -> Box:
        """The box moved by so many voxels along each axis."""
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def grow(self, before: Sequence[int], after: Sequence[int]) -> Box:
        """The box with more voxels at each end.

        Args:
            before: how many more at the start of each axis.
            after: how many more at the end of each axis.

        Returns:
            The larger box.
        """
        return Box(
            tuple(a - d for a, d in zip(self.start, before, strict=True)),
            tuple(b + d for b, d in zip(self.stop, after, strict=True)),
        )

    def __and__(self, other: Box) -> Box:
        """The common part. Without one, the result is a box of size 0 somewhere in ``self``."""
        start = tuple(
            min(max(a, c), b) for a, b, c in zip(self.start, self.stop, other.start, strict=True)
        )
        stop = tuple(min(b, d) for b, d in zip(self.stop, other.stop, strict=True))
        return Box(start, tuple(max(a, b) for a, b in zip(start, stop, strict=True)))

    def hull(self, other: Box) -> Box:
        """The smallest box that holds both."""
        return Box(tuple(map(min, self.start, other.start)), tuple(map(max, self.stop, other.stop)))

    def __contains__(self, other: Box) -> bool:
        """Whether the other box lies within this one."""
        return (self & other) == other

    def __add__(self, other: Box) -> Box:
        """The box along the axes of both, those of ``self`` first."""
        return Box(self.start + other.start, self.stop + other.stop)

    def __getitem__(self, axes: slice) -> Box:
        """The box of some of the axes."""
        return Box(self.start[axes], self.stop[axes])

    def __repr__(self) -> str:
        return f"Box({self.start}, {self.stop})"
