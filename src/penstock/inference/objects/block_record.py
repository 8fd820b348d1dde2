"""What is counted of one block: a file of its own, from which blocks are joined.

Whoever counts a block writes the same file, whole or not at all. So blocks may be counted by any
process, in any order and more than once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.typing import NDArray

from ...base import replacing
from ...data import Box
from .components import LocalLabels
from .object_measures import Measures

_MEASURE, _FACE = "measure-", "face-"
"""The beginnings of names of arrays in a file."""


@dataclass(frozen=True)
class BlockRecord:
    """What is counted of the objects of a block, a row for each."""

    first: NDArray[np.int64]
    """The place of the first voxel in the flattened volume, t c z y x."""
    voxels: NDArray[np.int64]
    at_border: NDArray[np.bool_]
    """True if the object touches a face of the volume."""
    keys: NDArray[np.int64] | None
    """See `LocalLabels`, as for ``values``."""
    values: NDArray[Any] | None
    faces: dict[str, NDArray[Any]]
    """The labels at the faces that have a block behind them, named ``0-`` to ``2+`` for the lower
    and the upper face along z y x. The axis of a face has length 1."""
    measures: Measures = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of objects."""
        return len(self.first)

    def save(self, path: Path) -> None:
        """Write the file."""
        arrays: dict[str, Any] = {"first": self.first, "voxels": self.voxels,
                                  "at_border": self.at_border}  # fmt: skip
        arrays |= {
            name: getattr(self, name)
            for name in ("keys", "values")
            if getattr(self, name) is not None
        }
        arrays |= {f"{_FACE}{name}": face for name, face in self.faces.items()}
        arrays |= {f"{_MEASURE}{name}": column for name, column in self.measures.items()}
        # numpy's own level of compression takes longer than to count the block.
        with replacing(path) as draft, ZipFile(draft, "w", ZIP_DEFLATED, compresslevel=1) as file:
            for name, array in arrays.items():
                with file.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> BlockRecord:
        """Read the file."""
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        parts = {
            prefix: {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            for prefix in (_FACE, _MEASURE)
        }
        return cls(
            arrays["first"], arrays["voxels"], arrays["at_border"], arrays.get("keys"),
            arrays.get("values"), parts[_FACE], parts[_MEASURE],
        )  # fmt: skip


Table = TypeVar("Table", bound=NamedTuple)


def save_table(path: Path, table: NamedTuple) -> None:
    """Write a tuple of arrays and numbers to a file, whole or not at all."""
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez(file, **table._asdict())


def load_table(path: Path, kind: type[Table]) -> Table:
    """Read the file of a tuple of this kind."""
    of: Callable[..., Table] = kind
    with np.load(path, allow_pickle=False) as file:
        return of(**{name: array if array.ndim else array.item() for name, array in file.items()})


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
    for axis in range(1 if flat else 0, 3):
        ends = (box.start[axis + 2], domain.start[axis + 2]), (box.stop[axis + 2],
                                                               domain.stop[axis + 2])  # fmt: skip
        for sign, (end, last), place in zip("-+", ends, (0, -1), strict=True):
            face = np.take(labels.array, [place], axis)
            if end == last:
                at_border[np.unique(face)] = True
            else:
                faces[f"{axis}{sign}"] = face
    within = np.unravel_index(labels.first, labels.array.shape)
    offsets = np.subtract(box.start, domain.start)
    places = [part.astype(np.int64) + at for part, at in zip(within, offsets[2:], strict=True)]
    lead = [np.full_like(labels.first, at) for at in offsets[:2]]
    first = np.ravel_multi_index((*lead, *places), domain.shape).astype(np.int64)
    return BlockRecord(first, voxels, at_border[1:], labels.keys, labels.values, faces, measures)
