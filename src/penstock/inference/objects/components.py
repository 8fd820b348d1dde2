"""The connected components of a block, numbered from 1 in the order of their first voxels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, require
from ...data import Box, Source
from .voxel_runs import Runs, runs_of

Matter = Literal["mask", "scores", "labels"]
"""The voxels that are labelled: all but 0, those above a threshold, or each value but 0."""
REACH = {4: 1, 8: 2, 6: 1, 18: 2, 26: 3}
"""Axes along which neighbours may differ at once, by connectivity."""
COMPLEMENT = {4: 8, 8: 4, 6: 26, 18: 6, 26: 6}
"""The connectivity of the background that objects of a connectivity enclose."""


class LocalLabels(NamedTuple):
    """The objects in one block."""

    array: NDArray[Any]
    """Along z y x, 0 where there is none, else numbers from 1 in the order of first voxels."""
    first: NDArray[np.int64]
    """The place of the first voxel of each object, in the flattened block."""
    runs: Runs
    plain: NDArray[Any]
    """See `runs_of`."""
    keys: NDArray[np.int64] | None = None
    """The object that each is a part of, if that is known; else blocks are joined by faces."""
    values: NDArray[Any] | None = None
    """The value of each object, if only neighbours of equal value are the same; else None."""


@dataclass(frozen=True)
class ComponentRule:
    """The components of a source: which voxels, and which of them are neighbours."""

    matter: Matter
    connectivity: int
    threshold: float = 0.0
    inverted: bool = False
    """True to label what is no object."""
    holes: HoleTable | None = None
    """The background that counts as object, if holes are filled."""

    def labels_of(self, source: Source, box: Box, number: int) -> LocalLabels:
        """Label a block.

        Args:
            source: The source.
            box: The block: one time, one channel.
            number: The number of the block.

        Returns:
            Its objects.

        Raises:
            UsageError: A score is NaN.
        """
        array = source.read(box)[0, 0]
        if self.matter == "scores":
            if array.dtype.kind == "f" and np.isnan(array.max()):
                at = np.argwhere(np.isnan(array))[0] + box.start[2:]
                raise UsageError(
                    f"IN {source.name}: the score at z y x = {' '.join(map(str, at))} is NaN, and "
                    "is neither above nor below --threshold"
                )
            array = array > self.threshold
        elif self.matter == "mask":
            array = array != 0
        if self.inverted:
            array = ~array
        if self.holes is not None:
            array |= self.holes.of_block(array, number)
        labels = _components(array, self.connectivity)
        values = array.reshape(-1)[labels.first] if self.matter == "labels" else None
        return labels._replace(values=values)

    def background(self) -> ComponentRule:
        """The rule for all that is no object."""
        return replace(self, inverted=True, connectivity=COMPLEMENT[self.connectivity])


class HoleTable(NamedTuple):
    """Which components of the background are holes."""

    connectivity: int
    is_hole: NDArray[np.bool_]
    """A row for each component: those of block 0, those of block 1, and so on."""
    starts: NDArray[np.int64]
    """The number of the first component of each block."""

    def of_block(self, inside: NDArray[np.bool_], number: int) -> NDArray[np.bool_]:
        """Where the holes of a block are, given where its objects are."""
        labels = _components(~inside, self.connectivity)
        holes = self.is_hole[self.starts[number] :][: len(labels.first)]
        return np.concatenate([[False], holes])[labels.array]


def labelled(array: NDArray[Any], connectivity: int) -> tuple[NDArray[Any], int]:
    """The components of an array that has the axes of a connectivity, and their number.

    cc3d 4.1.1 is wrong for some arrays of bool, by diagonal neighbours: it labels voxels that are
    false, joins two, or ends with an error. As bytes they are right.
    """
    plain = array.view(np.uint8) if array.dtype == np.bool_ else array
    labels, count = require("cc3d", "label").connected_components(
        plain, connectivity=connectivity, return_N=True
    )
    return labels, count


def _components(array: NDArray[Any], connectivity: int) -> LocalLabels:
    plain = array.view(np.uint8) if array.dtype == np.bool_ else array
    plane = plain[0] if connectivity in (4, 8) else plain
    labels, count = labelled(plane, connectivity)
    return in_order_of_first(labels.reshape(array.shape), count, plain)


def in_order_of_first(labels: NDArray[Any], count: int, plain: NDArray[Any]) -> LocalLabels:
    """Number objects in the order of their first voxels.

    Args:
        labels: Along z y x, with the numbers from 0 to ``count``.
        count: The number of objects.
        plain: See `runs_of`.

    Returns:
        The objects.
    """
    runs = runs_of(labels, plain)
    first = runs.firsts(count)
    order = np.argsort(first)
    if not np.array_equal(order, np.arange(count)):
        numbers = np.zeros(count + 1, labels.dtype)
        numbers[order + 1] = np.arange(1, count + 1)
        labels, first = numbers[labels], first[order]
        runs = runs._replace(numbers=numbers[runs.numbers])
    return LocalLabels(labels, first, runs, plain)


def matter_of(source: Source, threshold: float | None, equal: bool | None) -> Matter:
    """What there is to label in an array.

    Args:
        source: The array.
        threshold: The threshold that the user gives.
        equal: What the user says on labels.

    Returns:
        The kind.

    Raises:
        UsageError: The array has floats, and there is no threshold.
    """
    if threshold is not None:
        return "scores"
    if source.dtype.kind == "f":
        raise UsageError(
            f"IN {source.name}: holds {source.dtype}; --threshold X says above which score an "
            "object is"
        )
    if equal is None:
        equal = source.dtype.kind != "b" and source.dtype != np.uint8
    return "labels" if equal else "mask"


def checked_connectivity(said: int | None, axes: Sequence[str]) -> int:
    """The connectivity that fits the axes of an array.

    Args:
        said: What the user says.
        axes: The axes of the array.

    Returns:
        What is said, else neighbours by faces.

    Raises:
        UsageError: It does not fit.
    """
    fit = (6, 18, 26) if "z" in axes else (4, 8)
    if said is not None and said not in fit:
        words = " or ".join(map(str, fit))
        raise UsageError(
            f"--connectivity {said} does not fit the axes {' '.join(axes)}; give {words}"
        )
    return said or fit[0]
