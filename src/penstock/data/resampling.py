"""Voxels of one grid, made of those of another grid that lies over the same box.

    of   │     0     │     1     │     2     │   3 voxels, and 4 over the same length
    to   │   0    │   1    │   2    │   3    │   the centre of 1: (2 * 1 + 1) * 3 / 8 - 1/2 = 0.625

Places are computed from the number of a voxel in the whole grid, and sums are taken voxel by voxel
in one order. So a voxel has the same bits in any box. Beyond its edge a grid goes on with its last
voxel. This is `scipy.ndimage.zoom` with ``grid_mode=True`` and ``mode="nearest"``.

MONAI's grids begin at the centre of one voxel instead, and are `centred` here:

    of   │     0     │     1     │     2     │   the centre of 1, whose voxels are 3/4 as long:
    to     │   0    │   1    │   2    │   3      1 * 3/4 = 0.75
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .box import Box

_REACH = 12
"""Voxels on each side that count in a coefficient of the cubic spline. The filter falls by 3.7 from
voxel to voxel, so what is cut off is less than 3e-6 of the range in 3-D."""
_POLE = math.sqrt(3) - 2
_FILTER = [math.sqrt(3) * _POLE**distance for distance in range(_REACH + 1)]
_WHOLE = _FILTER[0] + 2 * sum(_FILTER[1:])
_FILTER = [value / _WHOLE for value in _FILTER]
"""The share of a voxel at each distance in a coefficient. A constant stays as it is."""


@dataclass(frozen=True, slots=True)
class Resampling:
    """How the voxels of the grid ``to`` are made of those of ``of``. Boxes are z y x."""

    of: Box
    to: Box
    order: int
    """0: the nearest voxel, 1: linear, 3: cubic spline."""
    nearest: int | None = None
    """The axis, 0 to 2, along which the nearest voxel is taken whatever the order."""
    inner: tuple[Box, Box] | None = None
    """A box of ``of`` and the one of ``to`` that lies over it, where this is done as if ``of`` were
    no more than that box; None if the whole grids lie over each other."""
    centred: tuple[Fraction, ...] | None = None
    """Voxels of ``of`` in one of ``to`` along each axis, where the centres of the first voxels lie
    over each other; None if their edges do, and those of the last."""

    def of_order(self, order: int) -> Resampling:
        return replace(self, order=order)

    def back(self, order: int) -> Resampling:
        """The way from ``to`` to ``of``."""
        inner = self.inner and self.inner[::-1]
        centred = self.centred and tuple(1 / step for step in self.centred)
        return Resampling(self.to, self.of, order, self.nearest, inner, centred)

    @property
    def over(self) -> tuple[Box, Box]:
        """The boxes that lie over each other."""
        return self.inner or (self.of, self.to)

    @property
    def steps(self) -> tuple[float, ...]:
        """Voxels of ``of`` in one voxel of ``to``, along each axis."""
        return tuple(n / m for _, _, n, m, _ in map(self._line, range(3)))

    @property
    def begins(self) -> tuple[float, ...]:
        """Where the centre of voxel 0 of ``to`` lies, in voxels of ``of``."""
        lines = map(self._line, range(3))
        return tuple(low + (since / 2 - n * begin) / m for low, begin, n, m, since in lines)

    def beyond(self, box: Box) -> NDArray[np.bool_]:
        """The voxels of a box of ``to`` that do not lie over ``inner``."""
        outside = np.ones(box.shape, np.bool_)
        outside[(box & self.over[1]).within(box)] = False
        return outside

    def needed(self, box: Box) -> Box:
        """The voxels of ``of`` that a box of ``to`` is made of."""
        return _by_axis(self.needed_along, box)

    def needed_along(self, axis: int, start: Any, stop: Any) -> tuple[Any, Any]:
        """`needed` along one axis: of integers, or of arrays of integers."""
        low, high, order = self.of.start[axis], self.of.stop[axis], self._order(axis)
        reach = _REACH if order == 3 else 0
        first = np.clip(self._first(axis, start) - reach, low, high - 1)
        last = np.clip(self._first(axis, stop - 1) + order + reach, low, high - 1)
        return first, last + 1

    def given(self, box: Box) -> Box:
        """The voxels of ``to`` to which a box of ``of`` contributes, where order is 0 or 1."""
        return _by_axis(self.given_along, box)

    def given_along(self, axis: int, start: Any, stop: Any) -> tuple[Any, Any]:
        """`given` along one axis: of integers, or of arrays of integers."""
        of, to, order = self.of, self.to, self._order(axis)
        low = np.where(start <= of.start[axis], to.start[axis], self._since(axis, start - order))
        high = np.where(stop >= of.stop[axis], to.stop[axis], self._since(axis, stop))
        return low, high

    def slices(self, box: Box) -> NDArray[np.int64]:
        """The slice of ``of``, counted from 0, that each voxel of a box of ``to`` is made of, where
        the nearest one is taken along an axis; else 0. In a shape that fits the box."""
        shape = [1, 1, 1]
        if (axis := self.nearest) is None:
            return np.zeros(shape, np.int64)
        shape[axis] = -1
        of = self.over[0]
        first = self._first(axis, np.arange(box.start[axis], box.stop[axis])) - of.start[axis]
        return np.asarray(first.clip(0, of.shape[axis] - 1).reshape(shape))

    def apply(self, array: NDArray[Any], held: Box, box: Box) -> NDArray[Any]:
        """The voxels of a box of ``to``.

        Args:
            array: The voxels of ``held``, shape (channels, z, y, x). Floats, unless order is 0.
            held: A box of ``of``. Where it lacks a voxel that is needed, the voxel counts as 0.
            box: The box of ``to``.

        Returns:
            An array of the same dtype, maybe the same array.
        """
        for axis in sorted(range(3), key=lambda axis: -self.steps[axis]):  # small arrays soonest
            place = np.arange(box.start[axis], box.stop[axis])
            array = self._along(axis, array, held.start[axis], place)
        return array

    def most_needed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what a box of ``to`` of a shape is made of, at most."""
        return tuple(map(min, self._taken(shape), self.of.shape))

    def bytes_for(self, shape: tuple[int, ...], itemsize: int) -> int:
        """The most bytes of arrays while a box of ``to`` of a shape is made. They are the voxels
        that are needed, as stored and as copies, and what is made of them. A value has ``itemsize``
        bytes."""
        sides = zip(self._taken(shape), shape, self.to.shape, strict=True)
        return 4 * itemsize * math.prod(max(taken, min(n, to)) for taken, n, to in sides)

    def _taken(self, shape: tuple[int, ...]) -> Iterator[int]:
        """The sides of what a box is made of, with those beyond the edge, at most."""
        margin = self.order + 1 + 2 * (_REACH if self.order == 3 else 0)
        sides = zip(shape, self.to.shape, self.steps, self.of.shape, strict=True)
        return (min(math.ceil(min(side, to) * step), of) + margin for side, to, step, of in sides)

    def _line(self, axis: int) -> tuple[int, int, int, int, int]:
        """Numbers a, b, n, m and c: voxel b + i of ``to`` lies at a + (2ni + c) / 2m of ``of``."""
        of, to = self.over
        n, m = of.shape[axis], to.shape[axis]
        since = n - m
        if self.centred is not None:
            (n, m), since = self.centred[axis].as_integer_ratio(), 0
        return of.start[axis], to.start[axis], n, m, since

    def _order(self, axis: int) -> int:
        _, _, n, m, _ = self._line(axis)
        return 0 if n == m or axis == self.nearest else self.order

    def _first(self, axis: int, place: Any) -> Any:
        """The first voxel of ``of`` that voxels of ``to`` are interpolated between."""
        (low, begin, n, m, since), order = self._line(axis), self._order(axis)
        if order == 0:  # a place in the middle of two is rounded as scipy or torch rounds it
            at, scipy = place - begin, self.centred is None
            at = np.floor(n / m * (at + 0.5) - 0.5 + 0.5) if scipy else np.rint(n / m * at)
            return low + at.astype(np.int64)
        return low + (2 * (place - begin) * n + since) // (2 * m) - order // 2

    def _since(self, axis: int, voxel: Any) -> Any:
        """The first voxel of ``to`` that is interpolated from ``voxel`` on, or from a later one."""
        return self.to.start[axis] + np.searchsorted(_firsts(self, axis), voxel)

    def _along(
        self, axis: int, array: NDArray[Any], held: int, place: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Resample one axis, from the voxel ``held`` on."""
        (low, _, n, m, _), order = self._line(axis), self._order(axis)
        high = self.over[0].stop[axis] - 1
        first, last = self._first(axis, place), held + array.shape[axis + 1] - 1
        if self.inner is None and n == m:
            kept = slice(first[0] - held, first[-1] + 1 - held)
            return array[(slice(None),) * (axis + 1) + (kept,)]
        if order == 0:
            return array.take(first.clip(low, high).clip(held, last) - held, axis + 1)
        if order == 3:
            seen = np.arange(first[0] - _REACH, first[-1] + 4 + _REACH)
            array = array.take(seen.clip(low, high).clip(held, last) - held, axis + 1)
            array = _coefficients(array, axis)
            low = held = first[0]
            last = high = first[-1] + 3
        made = None
        for tap, weights in enumerate(self._weights(axis, place, array.dtype)):
            voxels = np.clip(first + tap, low, high)
            weights[(voxels < held) | (voxels > last)] = 0
            taken = array.take(np.clip(voxels, held, last) - held, axis + 1)
            taken *= weights.reshape([-1 if each == axis else 1 for each in range(3)])
            made = taken if made is None else np.add(made, taken, out=made)
        assert made is not None
        return made

    def _weights(
        self, axis: int, place: NDArray[np.int64], dtype: np.dtype[Any]
    ) -> Iterator[NDArray[Any]]:
        """The weight of each voxel, the first to the last, between which is interpolated."""
        _, begin, n, m, since = self._line(axis)
        after = (2 * (place - begin) * n + since) % (2 * m) / (2 * m)
        before = 1 - after
        weights = [before, after]
        if self.order == 3:
            inner = [(4 - 6 * t * t + 3 * t * t * t) / 6 for t in (after, before)]
            weights = [before * before * before / 6, *inner, after * after * after / 6]
        return (each.astype(dtype) for each in weights)


@lru_cache(maxsize=12)
def _firsts(way: Resampling, axis: int) -> NDArray[np.int64]:
    """`Resampling._first` of all voxels along an axis."""
    made: NDArray[np.int64] = way._first(axis, np.arange(way.to.start[axis], way.to.stop[axis]))
    return made


def _by_axis(along: Callable[[int, Any, Any], tuple[Any, Any]], box: Box) -> Box:
    """The box whose ends a function gives for each axis, of the ends of another box."""
    spans = [along(axis, box.start[axis], box.stop[axis]) for axis in range(3)]
    return Box(tuple(int(a) for a, _ in spans), tuple(int(b) for _, b in spans))


def _coefficients(array: NDArray[Any], axis: int) -> NDArray[Any]:
    """The coefficients of cubic splines along an axis, of all but the outer voxels.

    Plane by plane, since the sums of one plane stay in the cache.
    """
    moved = np.moveaxis(array, axis + 1, 0)
    count = len(moved) - 2 * _REACH
    made = np.empty_like(array[(slice(None),) * (axis + 1) + (slice(0, count),)])
    out = np.moveaxis(made, axis + 1, 0)
    for plane in np.ndindex(moved.shape[1:3]):
        line, target = moved[:, *plane], out[:, *plane]
        np.multiply(line[_REACH : _REACH + count], _FILTER[0], out=target)
        for distance in range(1, _REACH + 1):
            low, high = _REACH - distance, _REACH + distance
            pair = line[low : low + count] + line[high : high + count]
            pair *= _FILTER[distance]
            target += pair
    return made
