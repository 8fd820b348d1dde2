"""The table of objects: a row for each, by number, as Parquet or CSV.

id  t c            the number; the time and the channel that it lies in
z0 y0 x0 z1 y1 x1  its box, half-open, in voxels
z y x              its centroid in the world: of the centres of its voxels
voxels volume      how many there are, and their volume in the world
surface            the area of its faces in the world (in a plane: the length of its sides)
mean_0 max_0       of channel 0 of --intensity
at_border          true if it touches a face of the volume
block              the chunk of the output that has its first voxel, counted from 0
ambiguous          of a decoder: true if it is larger than --object-size, or a view sees two of it
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import require, writing_output
from ...data import Grid, Sink, Source
from .block_work import BlockWork
from .face_joins import Contacts, Numbering
from .object_measures import Measures, add_measures, empty_measures


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
        record = work.load(number)
        part = {name: getattr(record, name) for name in ("first", "voxels", "at_border")}
        part |= record.measures
        total = total or empty_measures(part, numbering.kept)
        add_measures(total, numbering.of_block(number), part)
    for axis, pairs, faces in contacts:
        ids = numbering.ids[pairs]
        one = (ids[:, 0] == ids[:, 1]) & (ids[:, 0] > 0)
        np.subtract.at(total["faces"][:, axis], ids[one, 0] - 1, 2 * faces[one])
    return total


def object_columns(
    total: Measures, source: Source, sink: Sink, work: BlockWork
) -> dict[str, NDArray[Any]]:
    """The columns of a table.

    Args:
        total: What is measured of all objects.
        source: The input, whose voxels have a size.
        sink: The output.
        work: The blocks.

    Returns:
        The columns by name.
    """
    scale = np.abs(source.scale[2:] if source.scale else (1.0,) * 3)
    signed = np.array(source.scale[2:] if source.scale else (1.0,) * 3)
    domain = work.grid.domain
    voxels, count = total["voxels"], len(total["voxels"])
    columns: dict[str, NDArray[Any]] = {"id": np.arange(1, count + 1)}
    first = np.stack(np.unravel_index(total["first"], domain.shape), axis=1) + domain.start
    columns |= {"t": first[:, 0], "c": first[:, 1]}
    for name, ends in (("0", total["low"]), ("1", total["high"])):
        columns |= {f"{axis}{name}": ends[:, n] for n, axis in enumerate("zyx")}
    centroids = total["sums"] / voxels[:, None] * signed + source.translation[2:]
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
    index = (first - cells.anchor) // cells.step - cells.cells.start
    columns["at_border"] = total["at_border"]
    columns["block"] = np.ravel_multi_index(tuple(index.T), cells.cells.shape)
    if "ambiguous" in total:
        columns["ambiguous"] = total["ambiguous"]
    return columns
