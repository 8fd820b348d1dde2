"""The connected components of a block, numbered from 1.

They are counted and measured by runs of voxels of one object along x: there are far fewer runs than
voxels, and their ends are found where neighbours differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, require
from ...data import Box, Source

Matter = Literal["mask", "scores", "labels"]
"""The voxels that are labelled: all but 0, those above a threshold, or each value but 0."""
REACH = {4: 1, 8: 2, 6: 1, 18: 2, 26: 3}
"""Axes along which neighbours may differ at once, by connectivity."""
_AT_A_TIME = 2**20
"""Voxels in which runs are sought at once: what is found of them stays in the cache."""
COMPLEMENT = {4: 8, 8: 4, 6: 26, 18: 6, 26: 6}
"""The connectivity of the background that objects of a connectivity enclose."""


class Runs(NamedTuple):
    """The runs of objects in an array, in the order of their first voxels."""

    starts: NDArray[np.int64]
    """The places of first voxels in the flattened array."""
    lengths: NDArray[np.int32]
    numbers: NDArray[np.integer]
    """The object of each, from 1."""

    def voxels(self, count: int) -> NDArray[np.int64]:
        """The number of voxels of each of so many objects."""
        return np.bincount(self.numbers, self.lengths, count + 1)[1:].astype(np.int64)

    def firsts(self, count: int) -> NDArray[np.int64]:
        """The place of the first voxel of each of so many objects."""
        first = np.zeros(count, np.int64)
        first[self.numbers[::-1] - 1] = self.starts[::-1]  # of several, the last one stays
        return first


def runs_of(labels: NDArray[np.integer]) -> Runs:
    """Find the runs of objects.

    Args:
        labels: Along z y x, 0 for none.

    Returns:
        The runs.
    """
    parts = [_runs_within(here, z * labels[0].size) for z, here in _slabs(labels)]
    return Runs(*map(np.concatenate, zip(*parts, strict=True)))


def _slabs(labels: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Some planes after others, few enough to stay in the cache, with the place of the first."""
    step = max(1, _AT_A_TIME // labels[0].size)
    return ((z, labels[z : z + step]) for z in range(0, len(labels), step))


def _runs_within(labels: NDArray[np.integer], before: int) -> Runs:
    """The runs in some planes, which have so many voxels before them."""
    ends = np.flatnonzero(_ends_along(labels, 2))
    numbers = labels.reshape(-1)[ends]
    inside = np.flatnonzero(numbers)
    lengths = np.diff(ends, prepend=-1)[inside].astype(np.int32)
    return Runs(ends[inside] + (before + 1) - lengths, lengths, numbers[inside])


def _ends_along(labels: NDArray[np.integer], axis: int) -> NDArray[np.bool_]:
    """Whether the label changes after a voxel along an axis, or the array ends; flattened."""
    flat, ahead = labels.reshape(-1), int(np.prod(labels.shape[axis + 1 :]))
    ends = np.empty(labels.size, bool)
    np.not_equal(flat[ahead:], flat[:-ahead], out=ends[:-ahead])
    # The last ones were compared to the first of another line.
    ends.reshape(-1, labels.shape[axis], ahead)[:, -1] = True
    return ends


def faces_along(labels: NDArray[np.integer], axis: int, count: int) -> NDArray[np.int64]:
    """Faces of each of so many objects along an axis, those on the faces of the array among them.

    Args:
        labels: See `runs_of`.
        axis: The place of the axis.
        count: The number of objects.

    Returns:
        The number for each.
    """
    leaving = []
    for z, here in _slabs(labels):
        seen = labels[z : z + len(here) + (axis == 0)]  # along z the next voxel is in another plane
        leaving.append(here.reshape(-1)[_ends_along(seen, axis)[: here.size]])
    # A line that leaves an object has entered it.
    return 2 * np.bincount(np.concatenate(leaving), minlength=count + 1)[1:]


def has_nan(array: NDArray[Any]) -> bool:
    """Whether a value is NaN."""
    return array.dtype.kind == "f" and bool(np.isnan(array.max()))


@dataclass(frozen=True)
class LocalLabels:
    """The objects in one block. Whoever finds them again numbers them alike."""

    array: NDArray[Any]
    """Along z y x, 0 where there is none, else numbers from 1."""
    count: int
    key_of: NDArray[np.int64] | None = None
    """The object that each voxel is in over all blocks, if that is known; else blocks are joined by
    faces."""
    value_of: NDArray[Any] | None = None
    """The value of each voxel, if only neighbours of equal value are the same; else None."""

    @cached_property
    def runs(self) -> Runs:
        """The runs of the objects."""
        return runs_of(self.array)

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """The place of the first voxel of each object, in the flattened block."""
        return self.runs.firsts(self.count)

    def firsts_of(self, voxels: NDArray[Any] | None) -> NDArray[Any] | None:
        """What an array has at the first voxel of each object."""
        return None if voxels is None else voxels.reshape(-1)[self.first]

    def as_numbered(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """The array with other numbers for objects 1, 2 and so on."""
        of_label = np.concatenate([np.zeros(1, numbers.dtype), numbers])
        # Both as unsigned numbers of one width: numpy would make an index of 64 bits of each voxel.
        width = np.dtype(f"u{max(self.array.itemsize, numbers.itemsize)}")
        labels = self.array.reshape(-1).astype(width)
        mapped = require("fastremap", "label").remap_from_array(labels, of_label.astype(width))
        return mapped.astype(numbers.dtype, copy=False).reshape(self.array.shape)


@dataclass(frozen=True)
class ComponentRule:
    """The components of a source: which voxels, and which of them are neighbours."""

    matter: Matter
    connectivity: int
    threshold: float = 0.0
    nan_background: bool = False
    """True if a score may be NaN; it is no object."""
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
            if not self.nan_background and has_nan(array):
                at = np.argwhere(np.isnan(array))[0] + box.start[2:]
                raise UsageError(
                    f"IN {source.name}: the score at z y x = {' '.join(map(str, at))} is NaN, "
                    "neither above nor below --threshold; --nan-background takes it for background"
                )
            array = array > self.threshold
        elif self.matter == "mask":
            array = array != 0
        if self.inverted:
            array = ~array
        if self.holes is not None:
            array |= self.holes.of_block(array, number)
        labels = _components(array, self.connectivity)
        return replace(labels, value_of=array) if self.matter == "labels" else labels

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
        holes = self.is_hole[self.starts[number] :][: labels.count]
        return labels.as_numbered(holes.view(np.uint8)).view(bool)


def labelled(array: NDArray[Any], connectivity: int) -> tuple[NDArray[Any], int]:
    """The components of an array that has the axes of a connectivity, and their number.

    cc3d 4.1.1 is wrong for some arrays of bool, by diagonal neighbours: it labels voxels that are
    false, joins two, or ends with an error. As bytes they are right. It also ends with an error for
    some arrays of numbers from 2**63 on.
    """
    right = {"bool": np.uint8, "uint64": np.int64}.get(array.dtype.name)
    plain = array if right is None else array.view(right)
    labels, count = require("cc3d", "label").connected_components(
        plain, connectivity=connectivity, return_N=True
    )
    return labels, count


def _components(array: NDArray[Any], connectivity: int) -> LocalLabels:
    labels, count = labelled(array[0] if connectivity in (4, 8) else array, connectivity)
    return compact(labels.reshape(array.shape), count)


def compact(labels: NDArray[np.integer], count: int) -> LocalLabels:
    """The objects of an array along z y x, with the numbers from 0 to ``count``. It keeps few
    bytes, which are faster."""
    return LocalLabels(labels.astype(np.min_scalar_type(count), copy=False), count)


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
