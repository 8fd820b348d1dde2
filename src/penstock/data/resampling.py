"""Voxels of one grid, made of those of another grid that lies over the same box.

    of   │     0     │     1     │     2     │   3 voxels, and 4 over the same length
    to   │   0    │   1    │   2    │   3    │   the centre of 1: (2 * 1 + 1) * 3 / 8 - 1/2 = 0.625

Places are computed from the number of a voxel in the whole grid, and sums are taken voxel by voxel
in one order. So a voxel has the same bits in any box. Beyond its edge a grid goes on with its last
voxel. This is `scipy.ndimage.zoom` with ``grid_mode=True`` and ``mode="nearest"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

    def of_order(self, order: int) -> Resampling:
        return replace(self, order=order)

    def back(self, order: int) -> Resampling:
        """The way from ``to`` to ``of``."""
        inner = self.inner and self.inner[::-1]
        return Resampling(self.to, self.of, order, self.nearest, inner)

    @property
    def over(self) -> tuple[Box, Box]:
        """The boxes that lie over each other."""
        return self.inner or (self.of, self.to)

    @property
    def steps(self) -> tuple[float, ...]:
        """Voxels of ``of`` in one voxel of ``to``, along each axis."""
        of, to = self.over
        return tuple(n / m for n, m in zip(of.shape, to.shape, strict=True))

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
        start, length, _, _ = self._row(axis)
        first = self._first(axis, np.arange(box.start[axis], box.stop[axis])) - start
        return np.asarray(first.clip(0, length - 1).reshape(shape))

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

    def bytes_for(self, shape: tuple[int, ...], held: tuple[int, ...], itemsize: int) -> int:
        """The most bytes of arrays while a box of ``to`` of a shape is made of one of ``of``, which
        has the shape ``held`` at most. They are the voxels that are needed, as stored and as
        copies, and what is made of them. A value has ``itemsize`` bytes."""
        margin = self.order + 1 + 2 * (_REACH if self.order == 3 else 0)
        voxels = 1
        for side, most, step, to in zip(shape, held, self.steps, self.to.shape, strict=True):
            made = min(side, to)
            voxels *= max(made, min(math.ceil(made * step), most) + margin)
        return 4 * itemsize * voxels

    def _row(self, axis: int) -> tuple[int, int, int, int]:
        """Start and length of `over` along an axis, in ``of`` and in ``to``."""
        of, to = self.over
        return of.start[axis], of.shape[axis], to.start[axis], to.shape[axis]

    def _order(self, axis: int) -> int:
        _, n, _, m = self._row(axis)
        return 0 if n == m or axis == self.nearest else self.order

    def _first(self, axis: int, place: Any) -> Any:
        """The first voxel of ``of`` that voxels of ``to`` are interpolated between."""
        (low, n, begin, m), order = self._row(axis), self._order(axis)
        if order == 0:  # a place in the middle of two is rounded as scipy rounds it
            return low + np.floor(n / m * (place - begin + 0.5) - 0.5 + 0.5).astype(np.int64)
        return low + ((2 * (place - begin) + 1) * n - m) // (2 * m) - order // 2

    def _since(self, axis: int, voxel: Any) -> Any:
        """The first voxel of ``to`` that is interpolated from ``voxel`` on, or from a later one."""
        (low, n, begin, m), order = self._row(axis), self._order(axis)
        since = voxel - low
        twice = -(-2 * m * since // n) if order == 0 else -(-m * (2 * since + 1) // n)
        place = begin + twice // 2
        if order == 0:
            place = place + (self._first(axis, place) < voxel)
        return np.clip(place, self.to.start[axis], self.to.stop[axis])

    def _along(
        self, axis: int, array: NDArray[Any], held: int, place: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Resample one axis, from the voxel ``held`` on."""
        (start, length, _, _), order = self._row(axis), self._order(axis)
        low, high = start, start + length - 1
        first, last = self._first(axis, place), held + array.shape[axis + 1] - 1
        if self.inner is None and self.of.shape[axis] == self.to.shape[axis]:
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
        _, n, begin, m = self._row(axis)
        twice = 2 * (place - begin) + 1
        after = (twice * n - m) % (2 * m) / (2 * m)
        before = 1 - after
        weights = [before, after]
        if self.order == 3:
            inner = [(4 - 6 * t * t + 3 * t * t * t) / 6 for t in (after, before)]
            weights = [before * before * before / 6, *inner, after * after * after / 6]
        return (each.astype(dtype) for each in weights)


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
