"""The table of objects: a row for each, by number, as Parquet or CSV.

id  t c            the number; the time and the channel that it lies in
z0 y0 x0 z1 y1 x1  its box, half-open, in voxels
z y x              its centroid in the world: of the centres of its voxels; in a raster's CRS
voxels volume      how many there are, and their volume in the world
surface            the area of its faces in the world (in a plane: the length of its sides)
mean_0 max_0       of channel 0 of --intensity
at_border          true if it touches a face of the volume
block              the chunk of the output that has its first voxel, counted from 0
ambiguous          of a decoder: true if it is in doubt, by the rule of `decoded_views`

Beside it, what tells that blocks may have done harm: pictures of objects in doubt, and how many
objects end at the planes of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import plural, require, writing_output
from ...data import Box, Georeference, Grid, Sink, Source
from .block_record import Measures, add_measures, empty_measures, numbers_of_cells
from .block_work import BlockWork
from .face_joins import Contacts, Numbering

_SIDES = (64, 256, 256)
"""The most voxels of a cutout, z y x."""
_MARGIN = 16
"""Voxels around an object."""
_SHOWN = 6
"""Objects that a picture shows."""


def write_table(
    path: Path, columns: Mapping[str, NDArray[Any]], source: Source, *, replace: bool
) -> None:
    """Write rows of objects.

    Args:
        path: The file: ``.parquet`` or ``.csv``.
        columns: The columns by name.
        source: The input, whose axes have units.
        replace: Whether a file that is not ours may be replaced.
    """
    arrow = require("pyarrow", "label")
    units = {axis: unit for axis, unit in zip("tczyx", source.units, strict=True) if unit}
    table = arrow.table({name: _arrow(column) for name, column in columns.items()})
    table = table.replace_schema_metadata({f"unit of {k}": v for k, v in units.items()})
    with writing_output(path, replace=replace) as draft:
        if path.suffix == ".csv":
            require("pyarrow.csv", "label").write_csv(table, draft)
        else:
            require("pyarrow.parquet", "label").write_table(table, draft)


def _arrow(column: NDArray[Any]) -> Any:
    """A column for Arrow. `pyarrow.array` would import pandas, which takes longer than a table."""
    arrow = require("pyarrow", "label")
    values = np.packbits(column, bitorder="little") if column.dtype.kind == "b" else column
    buffer = arrow.py_buffer(np.ascontiguousarray(values))
    kind = arrow.from_numpy_dtype(column.dtype)
    return arrow.Array.from_buffers(kind, len(column), [None, buffer])


def merged_measures(work: BlockWork, numbering: Numbering, contacts: list[Contacts]) -> Measures:
    """Merge what was measured in blocks.

    Args:
        work: The blocks, all of them counted.
        numbering: The numbers of objects.
        contacts: The faces between objects of neighbouring blocks.

    Returns:
        The measures of all objects, in the order of their numbers.
    """
    total: Measures = {}
    for number in range(len(work.grid)):
        record = work.load(number, "faces")
        part = {name: getattr(record, name) for name in ("first", "voxels", "at_border")}
        part |= record.measures
        total = total or empty_measures(part, numbering.kept)
        add_measures(total, numbering.of_block(number), part)
    for axis, pairs, faces in contacts:
        ids = numbering.ids[pairs]
        one = (ids[:, 0] == ids[:, 1]) & (ids[:, 0] > 0)
        # Each of the two blocks has counted the faces between them as outer ones.
        np.subtract.at(total["faces"][:, axis], ids[one, 0] - 1, 2 * faces[one])
    return total


def object_columns(
    total: Measures, source: Source, sink: Sink, work: BlockWork, raster: Georeference | None
) -> dict[str, NDArray[Any]]:
    """The columns of a table.

    Args:
        total: What is measured of all objects.
        source: The input, whose voxels have a size.
        sink: The output.
        work: The blocks.
        raster: The place of the input in the world, if it is a raster.

    Returns:
        The columns by name.
    """
    # Volumes are positive. Places in the world need the sign, as an axis may run backwards.
    scale = np.abs(source.scale[2:] if source.scale else (1.0,) * 3)
    signed = np.array(source.scale[2:] if source.scale else (1.0,) * 3)
    domain = work.grid.domain
    voxels, count = total["voxels"], len(total["voxels"])
    columns: dict[str, NDArray[Any]] = {"id": np.arange(1, count + 1)}
    first = np.stack(np.unravel_index(total["first"], domain.shape), axis=1) + domain.start
    columns |= {"t": first[:, 0], "c": first[:, 1]}
    for name, ends in (("0", total["low"]), ("1", total["high"])):
        columns |= {f"{axis}{name}": ends[:, n] for n, axis in enumerate("zyx")}
    centroids = total["sums"] / voxels[:, None]
    if raster is None or raster.crs is None:
        centroids = centroids * signed + source.translation[2:]
    else:
        # A transform is from the corners of pixels.
        (a, b, c, d, e, f), (y, x) = raster.transform, centroids.T[1:] + 0.5
        centroids[:, 1:] = np.stack([d * x + e * y + f, a * x + b * y + c], axis=1)
    columns |= {axis: centroids[:, n] for n, axis in enumerate("zyx")}
    real = [axis for axis in range(3) if axis or "z" in source.axes]
    size = float(np.prod(scale[real]))
    columns |= {"voxels": voxels, "volume": voxels * size}
    areas = [size / scale[axis] for axis in real]
    columns["surface"] = total["faces"][:, real] @ np.array(areas)
    for place, channel in enumerate(work.image_channels):
        columns[f"mean_{channel}"] = total["sum"][:, place] / voxels
        columns[f"max_{channel}"] = total["max"][:, place]
    cells = Grid(domain, sink.write_grid, sink.grid_origin)
    columns["at_border"] = total["at_border"]
    columns["block"] = numbers_of_cells(cells, first)
    if "ambiguous" in total:
        columns["ambiguous"] = total["ambiguous"]
    return columns


class PlaneEnds(NamedTuple):
    """Sides of objects' boxes in planes where blocks end, and in planes between these."""

    planes: int
    at_planes: int
    controls: int
    at_controls: int

    @property
    def ratio(self) -> float | None:
        """How many times as many end at a plane of blocks, which is near 1 if blocks cut nothing.
        None if nothing ends at the planes of blocks, or at those between."""
        if not (self.at_planes and self.at_controls):
            return None
        return (self.at_planes / self.planes) / (self.at_controls / self.controls)

    def sentence(self) -> str:
        """The counts in words."""
        verdict = ""
        if self.ratio is not None:
            verdict = f": {self.ratio:.2f} times as many at each, 1 is good"
        elif self.at_controls:
            verdict = ": blocks cut nothing"
        elif self.at_planes:
            verdict = ": blocks may cut objects, as none ends between"
        return (
            f"{plural(self.at_planes, 'side')} of objects at {plural(self.planes, 'plane')} of "
            f"blocks, {self.at_controls:,} at {plural(self.controls, 'plane')} between{verdict}"
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
