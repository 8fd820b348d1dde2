"""What tells that blocks may have done harm: objects in doubt, and ends at block planes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import plural
from ...data import Box, Grid, Source
from .object_measures import Measures

_SIDES = (64, 256, 256)
"""The most voxels of a cutout, z y x."""
_MARGIN = 16
"""Voxels around an object."""
_SHOWN = 6
"""Objects that a picture shows."""


class PlaneEnds(NamedTuple):
    """Sides of objects' boxes in planes where blocks end, and in planes between these."""

    planes: int
    at_planes: int
    controls: int
    at_controls: int

    @property
    def ratio(self) -> float | None:
        """How many times as many end at a plane of blocks, which is near 1 if blocks cut nothing.
        None if nothing ends at the planes between."""
        if not self.at_controls:
            return None
        return (self.at_planes / self.planes) / (self.at_controls / self.controls)

    def sentence(self) -> str:
        """The counts in words."""
        times = "" if self.ratio is None else f": {self.ratio:.2f} times as many at each, 1 is good"
        return (
            f"{plural(self.at_planes, 'side')} of objects at {plural(self.planes, 'plane')} of "
            f"blocks, {self.at_controls:,} at {plural(self.controls, 'plane')} between{times}"
        )


class Cutout(NamedTuple):
    """An object and what is around it, seen along z."""

    number: int
    voxels: int
    low: tuple[int, ...]
    """The first voxel of the cutout, z y x."""
    scores: NDArray[Any]
    """The highest along z, shape (y, x)."""
    body: NDArray[np.bool_]
    around: NDArray[np.bool_]


def ends_at_planes(measures: Measures, grid: Grid, halo: Sequence[int]) -> PlaneEnds:
    """Count where objects end. A plane lies before the voxel that has its number.

    Args:
        measures: The boxes of all objects.
        grid: The blocks.
        halo: How far a block sees around itself, z y x; an object may be cut there, too.

    Returns:
        The counts, over all axes.
    """
    counts = np.zeros(4, np.int64)
    for axis in range(3):
        start, stop = grid.domain.start[axis + 2], grid.domain.stop[axis + 2]
        first, last = grid.span(axis + 2)
        cores = grid.anchor[axis + 2] + grid.step[axis + 2] * np.arange(first + 1, last)
        planes = np.unique([cores - halo[axis], cores, cores + halo[axis]])
        planes = planes[(planes > start) & (planes < stop)]
        if not len(planes):
            continue
        bounds = np.concatenate([[start], planes, [stop]])
        controls = np.setdiff1d((bounds[1:] + bounds[:-1]) // 2, bounds)
        ends = np.concatenate([measures["low"][:, axis], measures["high"][:, axis]])
        for place, there in ((0, planes), (2, controls)):
            counts[place : place + 2] += len(there), np.isin(ends, there).sum()
    return PlaneEnds(*counts.tolist())


def worst_first(measures: Measures, doubtful: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The rows of doubtful objects, the largest first."""
    rows = np.flatnonzero(doubtful)
    return rows[np.argsort(-measures["voxels"][rows], kind="stable")]


def cutouts_of(
    measures: Measures, rows: NDArray[np.int64], scores: Source, labels: Source
) -> list[Cutout]:
    """Cut out some objects, the first few of them.

    Args:
        measures: What is measured of all objects.
        rows: The objects.
        scores: What they are made of. Its first channel is shown.
        labels: The output.

    Returns:
        The cutouts: whole if they are not too large, else the middle of the object's box.
    """
    cutouts = []
    for row in rows[:_SHOWN].tolist():
        low, high = measures["low"][row] - _MARGIN, measures["high"][row] + _MARGIN
        side = np.minimum(high - low, _SIDES)
        start = low + (high - low - side) // 2
        time = int(np.unravel_index(measures["first"][row], labels.domain.shape)[0])
        lead = (time + labels.domain.start[0], labels.domain.start[1])
        box = Box.of((*lead, *start.tolist()), (1, 1, *side.tolist())) & labels.domain
        channel = scores.domain.start[1]
        seen = Box((box.start[0], channel), (box.stop[0], channel + 1)) + box[2:]
        values = labels.read(box)[0, 0]
        body = values == row + 1
        around = (values > 0) & ~body
        flat = scores.read(seen)[0, 0].max(axis=0)
        voxels = int(measures["voxels"][row])
        cutouts.append(
            Cutout(row + 1, voxels, box.start[2:], flat, body.any(axis=0), around.any(axis=0))
        )
    return cutouts
