"""Runs of voxels of one object along x: from them objects are ordered, counted and measured.

There are far fewer runs than voxels, and their ends are found where neighbours differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Runs(NamedTuple):
    """The runs of objects in an array, in the order of their first voxels."""

    starts: NDArray[np.int64]
    """The places of first voxels in the flattened array."""
    lengths: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """The object of each, from 1."""

    def voxels(self, count: int) -> NDArray[np.int64]:
        """The number of voxels of each of so many objects."""
        return self.sums(self.lengths, count)

    def firsts(self, count: int) -> NDArray[np.int64]:
        """The place of the first voxel of each of so many objects."""
        first = np.zeros(count, np.int64)
        first[self.numbers[::-1] - 1] = self.starts[::-1]  # of several, the last one stays
        return first

    def sums(self, values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
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
    ends = ends_along(plain, 2)
    starts = np.concatenate([[0], ends[:-1] + 1])
    numbers = labels.reshape(-1)[starts]
    inside = np.flatnonzero(numbers)
    starts = starts[inside]
    return Runs(starts, ends[inside] - starts + 1, numbers[inside].astype(np.int64))


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
    # The last layer has nothing ahead, and the first one has nothing behind.
    sides = flat[ends], flat[ends[:-ahead] + ahead], flat[:ahead]
    total = sum(np.bincount(side, minlength=count + 1) for side in sides)
    return np.asarray(total)[1:]
