"""What is counted of one block: a file of its own, from which blocks are joined.

Whoever counts a block writes the same file, whole or not at all. So blocks may be counted by any
process, in any order and more than once.
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
from ...data import Box
from .components import LocalLabels
from .object_measures import Measures


class BlockRecord(NamedTuple):
    """What is counted of the objects of a block, a row for each."""

    first: NDArray[np.int64]
    """The place of the first voxel in the flattened volume, t c z y x."""
    voxels: NDArray[np.int64]
    at_border: NDArray[np.bool_]
    """True if the object touches a face of the volume."""
    keys: NDArray[np.int64] | None = None
    """See `LocalLabels`, as for ``values``."""
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
    labels: LocalLabels, box: Box, domain: Box, flat: bool, voxels: NDArray[np.int64],
    measures: Measures,
) -> BlockRecord:  # fmt: skip
    """Count the objects of a block.

    Args:
        labels: The objects.
        box: The block: one time, one channel.
        domain: The volume.
        flat: True for a plane: it has no faces along z.
        voxels: The number of voxels of each.
        measures: What is measured besides.

    Returns:
        The record.
    """
    at_border = np.zeros(len(labels.first) + 1, bool)
    faces: dict[str, NDArray[Any]] = {}
    for axis, sign, face, is_outer in faces_of(labels.array, box, domain):
        if not is_outer:
            faces[f"{axis}{sign}"] = face
        elif axis or not flat:
            at_border[np.unique(face)] = True
    within = np.stack(np.unravel_index(labels.first, box.shape), axis=1)
    places = within + np.subtract(box.start, domain.start)
    first = np.ravel_multi_index(tuple(places.T), domain.shape).astype(np.int64)
    return BlockRecord(first, voxels, at_border[1:], labels.keys, labels.values, faces, measures)


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
