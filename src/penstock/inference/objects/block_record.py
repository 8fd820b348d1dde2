"""What is counted of one block: a file of its own, from which blocks are joined.

Whoever counts a block writes the same file, whole or not at all. So blocks may be counted by any
process, in any order and more than once.

What is measured is merged exactly over blocks: counts, sums of coordinates and faces are integers.
Sums of intensities are float64, added in the order of voxels and blocks: exact for integers up to
2**53.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.typing import NDArray

from ...base import replacing
from ...data import Box, Grid, Source
from .components import LocalLabels, Runs, faces_along

Measures = dict[str, NDArray]  # type: ignore[type-arg]
"""Arrays by name, with a row for each object."""
_MERGED_BY = {"low": np.minimum, "first": np.minimum, "high": np.maximum, "max": np.maximum,
              "at_border": np.logical_or}  # fmt: skip
"""The columns that are not added, and their merges."""


class Extents(NamedTuple):
    """Where objects 1, 2 ... of an array are, a row for each and a column for z, y and x."""

    low: NDArray[np.integer]
    """The first coordinates."""
    high: NDArray[np.integer]
    """Those after the last ones."""
    sums: NDArray[np.int64]
    """The sums of the coordinates of voxels."""


def extents_of(runs: Runs, shape: Sequence[int], count: int) -> Extents:
    """Measure where objects are.

    Args:
        runs: The runs of the objects.
        shape: The array's, along z y x.
        count: The number of objects.

    Returns:
        Their extents, in coordinates of the array.
    """
    # Places in fewer bits, and one conversion for all counts: this takes half of the time.
    kind = np.int32 if np.prod(shape) < 2**31 else np.int64
    at, lengths = runs.numbers.astype(np.intp) - 1, runs.lengths.astype(np.float64)
    lines, starts = np.divmod(runs.starts.astype(kind), kind(shape[2]))
    z, y = np.divmod(lines, kind(shape[1]))
    low, high = np.empty((2, 3, count), kind)
    low[0, at[::-1]], high[0, at] = z[::-1], z + 1  # of several, the last one stays
    for axis, places, stops in ((1, y, y + 1), (2, starts, starts + runs.lengths)):
        low[axis], high[axis] = shape[axis], 0
        np.minimum.at(low[axis], at, places)
        np.maximum.at(high[axis], at, stops)
    # The coordinates of a run add up to its middle times its length.
    middles = (z, y, starts + (lengths - 1) / 2)
    sums = [np.bincount(at, middle * lengths, count) for middle in middles]
    return Extents(low.T, high.T, np.stack(sums, axis=1).astype(np.int64))


def measure_block(
    labels: LocalLabels, box: Box, image: Source | None, channels: tuple[int, ...]
) -> Measures:
    """Measure the objects of a block.

    Args:
        labels: The objects.
        box: The block.
        image: The image whose intensities are counted.
        channels: Its channels.

    Returns:
        ``low`` and ``high``, the boxes of objects (z y x, half-open); ``sums`` of the
        coordinates of their voxels; ``faces`` along z y x between an object and what is not in it,
        or not in the block; ``sum`` and ``max`` of each channel.
    """
    count, runs, array = labels.count, labels.runs, labels.array
    low, high, sums = extents_of(runs, array.shape, count)
    origin = np.array(box.start[2:], np.int64)
    faces = [faces_along(array, axis, count) for axis in range(2)]
    faces.append(2 * np.bincount(runs.numbers, minlength=count + 1)[1:])  # each run has two ends
    measures: Measures = {
        "low": low + origin,
        "high": high + origin,
        "sums": sums + runs.voxels(count)[:, None] * origin,
        "faces": np.stack(faces, axis=1),
    }
    if image is not None:
        measures |= _intensities(array, count, box, image, channels)
    return measures


def _intensities(
    labels: NDArray[np.integer], count: int, box: Box, image: Source, channels: tuple[int, ...]
) -> Measures:
    inside = labels.reshape(-1) > 0
    numbers = labels.reshape(-1)[inside]
    total, most = np.zeros((count, len(channels))), np.full((count, len(channels)), -np.inf)
    for place, channel in enumerate(channels):
        there = Box((box.start[0], channel), (box.stop[0], channel + 1)) + box[2:]
        values = image.read(there).reshape(-1)[inside].astype(np.float64)
        total[:, place] = np.bincount(numbers, values, count + 1)[1:]
        np.maximum.at(most[:, place], numbers.astype(np.int64) - 1, values)
    return {"sum": total, "max": most}


def empty_measures(like: Mapping[str, NDArray], count: int) -> Measures:  # type: ignore[type-arg]
    """Measures of objects of which nothing is counted yet."""
    most = np.iinfo(np.int64).max
    start = {"low": most, "first": most, "high": np.iinfo(np.int64).min, "max": -np.inf}
    return {
        name: np.full((count, *part.shape[1:]), start.get(name, 0), part.dtype)
        for name, part in like.items()
    }


def add_measures(total: Measures, ids: NDArray[np.int64], part: Measures) -> None:
    """Merge the measures of a block into those of all objects.

    Args:
        total: The measures of all objects; object 1 is in row 0.
        ids: The numbers of the objects of the block; 0 for those that are left out.
        part: The measures of the block.
    """
    kept = ids > 0
    for name, column in part.items():
        _MERGED_BY.get(name, np.add).at(total[name], ids[kept] - 1, column[kept])


def numbers_of_cells(grid: Grid, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of the cell of a grid in which each voxel lies; t c z y x in each row."""
    index = (places - grid.anchor) // grid.step - grid.cells.start
    return np.ravel_multi_index(tuple(index.T), grid.cells.shape).astype(np.int64)


class BlockRecord(NamedTuple):
    """What is counted of the objects of a block, a row for each."""

    first: NDArray[np.int64]
    """The place of the first voxel in the flattened volume, t c z y x."""
    voxels: NDArray[np.int64]
    at_border: NDArray[np.bool_]
    """True if the object touches a face of the volume."""
    keys: NDArray[np.int64] | None = None
    """See `LocalLabels`, which has them for voxels; as for ``values``."""
    values: NDArray[Any] | None = None
    faces: Mapping[str, NDArray[Any]] = MappingProxyType({})
    """The labels at the faces that have a block behind them, named ``0-`` to ``2+`` for the lower
    and the upper face along z y x. The axis of a face has length 1."""
    measures: Mapping[str, NDArray[Any]] = MappingProxyType({})


Table = TypeVar("Table", bound=NamedTuple)


def save_table(path: Path, table: NamedTuple) -> None:
    """Write a tuple of arrays, numbers and mappings of arrays to a file, whole or not at all. What
    is None is left out."""
    arrays: dict[str, Any] = {}
    for name, value in table._asdict().items():
        if isinstance(value, dict):
            arrays |= {f"{name}/{key}": part for key, part in value.items()}
        elif value is not None:
            arrays[name] = np.asarray(value)
    # numpy's own level of compression takes longer than to count a block.
    with replacing(path) as draft, ZipFile(draft, "w", ZIP_DEFLATED, compresslevel=1) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def load_table(path: Path, kind: type[Table], without: Sequence[str] = ()) -> Table:
    """Read the file of a tuple of this kind, ``without`` mappings that are not needed."""
    made: Callable[..., Table] = kind
    fields: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            field, _, key = name.partition("/")
            if field in without:
                continue
            array = file[name]
            if key:
                fields.setdefault(field, {})[key] = array
            else:
                fields[field] = array if array.ndim else array.item()
    return made(**fields)


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array to a file that can be mapped, whole or not at all."""
    with replacing(path) as draft, draft.open("wb") as file:
        np.save(file, array)


def record_of(
    labels: LocalLabels, box: Box, domain: Box, flat: bool, measures: Measures
) -> BlockRecord:
    """Count the objects of a block.

    Args:
        labels: The objects.
        box: The block: one time, one channel.
        domain: The volume.
        flat: True for a plane: it has no faces along z.
        measures: What is measured besides.

    Returns:
        The record.
    """
    at_border = np.zeros(labels.count + 1, bool)
    faces: dict[str, NDArray[Any]] = {}
    for axis, sign, face, is_outer in faces_of(labels.array, box, domain):
        if not is_outer:
            faces[f"{axis}{sign}"] = face
        elif axis or not flat:
            at_border[np.unique(face)] = True
    within = np.stack(np.unravel_index(labels.first, box.shape), axis=1)
    places = within + np.subtract(box.start, domain.start)
    first = np.ravel_multi_index(tuple(places.T), domain.shape).astype(np.int64)
    keys, values = map(labels.firsts_of, (labels.key_of, labels.value_of))
    return BlockRecord(
        first, labels.runs.voxels(labels.count), at_border[1:], keys, values, faces, measures
    )


def faces_of(
    array: NDArray[Any], box: Box, domain: Box
) -> Iterator[tuple[int, str, NDArray[Any], bool]]:
    """The faces of an array z y x that lies in a box of a volume: the axis, ``-`` or ``+``, the
    voxels, and whether the face is one of the volume's."""
    for axis in range(3):
        for sign, place, end, last in (
            ("-", 0, box.start, domain.start),
            ("+", -1, box.stop, domain.stop),
        ):
            yield axis, sign, np.take(array, [place], axis), end[axis + 2] == last[axis + 2]
