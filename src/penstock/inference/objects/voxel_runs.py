"""Runs of voxels of one object along x: from them objects are ordered, counted and measured.

There are far fewer runs than voxels, and their ends are found where neighbours differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_AT_A_TIME = 2**20
"""Voxels in which runs are sought at once: what is found of them stays in the cache."""


class Runs(NamedTuple):
    """The runs of objects in an array, in the order of their first voxels."""

    starts: NDArray[np.int64]
    """The places of first voxels in the flattened array."""
    lengths: NDArray[np.int32]
    numbers: NDArray[np.integer]
    """The object of each, from 1."""

    def voxels(self, count: int) -> NDArray[np.int64]:
        """The number of voxels of each of so many objects."""
        return self.sums(self.lengths, count)

    def firsts(self, count: int) -> NDArray[np.int64]:
        """The place of the first voxel of each of so many objects."""
        first = np.zeros(count, np.int64)
        first[self.numbers[::-1] - 1] = self.starts[::-1]  # of several, the last one stays
        return first

    def sums(self, values: NDArray[np.integer], count: int) -> NDArray[np.int64]:
        """The sum over the runs of each object. It is exact up to 2**53."""
        return np.bincount(self.numbers, values, count + 1)[1:].astype(np.int64)


def runs_of(labels: NDArray[np.integer], plain: NDArray[Any]) -> Runs:
    """Find the runs of objects.

    Args:
        labels: Along z y x, 0 for none.
        plain: An array that differs where labels of neighbours by faces do, and is 0 where they
            are. Its bytes are looked at, fewer than those of the labels.

    Returns:
        The runs.
    """
    plane = labels[0].size
    step = max(1, _AT_A_TIME // plane)
    parts = [
        _runs_within(labels[z : z + step], plain[z : z + step], z * plane)
        for z in range(0, len(labels), step)
    ]
    return Runs(*map(np.concatenate, zip(*parts, strict=True)))


def _runs_within(labels: NDArray[np.integer], plain: NDArray[Any], before: int) -> Runs:
    """The runs in some planes, which have so many voxels before them."""
    ends = ends_along(plain, 2)
    numbers = labels.reshape(-1)[ends]
    inside = np.flatnonzero(numbers)
    lengths = np.diff(ends, prepend=-1)[inside].astype(np.int32)
    return Runs(ends[inside] + (before + 1) - lengths, lengths, numbers[inside])


def ends_along(plain: NDArray[Any], axis: int) -> NDArray[np.int64]:
    """The voxels after which the value changes along an axis, or the array ends.

    Args:
        plain: An array along z y x.
        axis: The place of the axis.

    Returns:
        Their places in the flattened array, in order.
    """
    flat, ahead = plain.reshape(-1), int(np.prod(plain.shape[axis + 1 :]))
    ends = np.empty(plain.size, bool)
    np.not_equal(flat[ahead:], flat[:-ahead], out=ends[:-ahead])
    # The last ones were compared to the first of another line.
    ends.reshape(-1, plain.shape[axis], ahead)[:, -1] = True
    return np.flatnonzero(ends)


def faces_along(
    labels: NDArray[np.integer], plain: NDArray[Any], axis: int, count: int
) -> NDArray[np.int64]:
    """Faces of each of so many objects along an axis, those on the faces of the array among them.

    Args:
        labels: See `runs_of`, as for ``plain``.
        plain: See there.
        axis: The place of the axis.
        count: The number of objects.

    Returns:
        The number for each.
    """
    ends, flat = ends_along(plain, axis), labels.reshape(-1)
    ahead = int(np.prod(labels.shape[axis + 1 :]))
    total = np.bincount(flat[:ahead], minlength=count + 1)  # the first layer has nothing behind
    total += np.bincount(flat[ends], minlength=count + 1)
    behind = ends[:-ahead]  # the last layer has nothing ahead
    behind += ahead
    total += np.bincount(flat[behind], minlength=count + 1)
    return total[1:]
