"""Chips on disk, the training data of a detector: a scene is a few files.

    OUT/index.json                    the record of the cut and the list of scenes, written last
    OUT/SCENE/chips.zarr              radar (row, column, channel, y, x), a shard is a row of chips
    OUT/SCENE/bathymetry.npy, ...     the 500 m rasters, in a border of NaN
    OUT/SCENE/manifest.json           written after the chips: a scene without one does not count

`windows` says how a scene is cut, and `preprocess` cuts it. Values are stored as the rasters have
them, unscaled: as 16-bit floats like those of the rasters, or as 32-bit floats on request. A
missing value is NaN.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, as_usage_error, plural, read_json, require
from .coarse import Coarse
from .objects import Objects
from .scene import CHANNELS, radar_of
from .windows import ChipRecord, Cut, Span, model_view

FORMAT, VERSION = "penstock-chips", 3
INDEX, MANIFEST, ARRAY = "index.json", "manifest.json", "chips.zarr"
DTYPE = "float16"
"""The dtype of the values, if no other is asked for."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip and all labels inside it. It owns those in its ``core``."""

    image: NDArray[np.float32]
    """Scaled as the record says, 0 where a value is missing; shape (channels, y, x)."""
    valid: NDArray[np.bool_]
    """Masks of shape (masks, y, x). The first is true where the radar has values, another one where
    other rasters have values. See `windows.model_view`."""
    labels: Objects
    """Points are rows and columns of the chip."""
    core: tuple[int, int, int, int]
    """Half-open rows and columns of the chip: row0, row1, col0, col1."""
    scene: str
    offset: tuple[int, int]
    """Row and column in the scene of the chip's first pixel."""


class Chips:
    """A folder of chips by number: scenes by name, chips by row and column, empty ones left out.

    ``folder`` is one split that ``penstock preprocess`` wrote; any other folder, and an unfinished
    one, raises `UsageError`. The order is the same in every process. No file stays open and no
    thread runs, so it may go to threads, worker processes and forks.
    """

    def __init__(self, folder: Path) -> None:
        index = _read_index(folder)
        self.folder = folder
        self.record = ChipRecord.read(index, str(folder / INDEX))
        self.channels, self.radar = self.record.channels, radar_of(self.record.channels)
        self.scenes = tuple(str(name) for name in index["scenes"])
        self.labels: dict[str, Objects] = {}
        """The labels of each scene, in its own coordinates."""
        self._cuts: dict[str, tuple[Cut, Cut]] = {}
        self._places: list[tuple[str, int, int]] = []
        self._manifests: dict[str, dict[str, Any]] = {}
        for name in self.scenes:
            manifest = read_document(folder / name / MANIFEST)
            if ChipRecord.read(manifest, str(folder / name / MANIFEST)) != self.record:
                raise UsageError(
                    f"{folder / name} is of other settings than {folder / INDEX}: a run that "
                    "replaces them was not finished; run penstock preprocess again"
                )
            self._cuts[name] = self.record.cuts(tuple(manifest["size"]))
            self.labels[name] = Objects.of(name, **manifest.pop("labels"))
            kept = np.argwhere(np.asarray(manifest.pop("valid_pixels")) > 0)
            self._manifests[name] = manifest
            self._places += [(name, int(row), int(column)) for row, column in kept]

    def __len__(self) -> int:
        return len(self._places)

    def scene_of(self, index: int) -> str:
        """The name of the scene that a chip was cut from."""
        return self._places[index][0]

    def input_bytes(self, scene: str) -> dict[str, int]:
        """The size of each channel's raster file when the scene was cut."""
        return {of: size for of, (size, _) in self._manifests[scene]["inputs"].items()}

    @property
    def labels_unseen(self) -> int:
        """The labels at whose pixel the radar has no value."""
        return sum(int(manifest["labels_unseen"]) for manifest in self._manifests.values())

    @cached_property
    def num_points(self) -> NDArray[np.int64]:
        """Labels in the core of each chip: over all chips each label is counted once."""
        counts = np.zeros(len(self), np.int64)
        for index, (name, row, column) in enumerate(self._places):
            rows, columns = self._cuts[name]
            points = self.labels[name].points
            counts[index] = np.count_nonzero(_inside(points, rows.core(row), columns.core(column)))
        return counts

    def read(self, index: int) -> Chip:
        """One chip. Threads may read at once."""
        name, row, column = self._places[index]
        rows, columns = self._cuts[name]
        radar = self._radar(name, row, column)
        coarse = {of: self._coarse(name, of) for of in self.channels if of not in self.radar}
        window = rows.read(row), columns.read(column)
        offset = (rows.start(row), columns.start(column))
        labels = self.labels[name]
        labels = labels[_inside(labels.points, *window)]
        image, valid = model_view(self.record, radar, coarse, *window)
        return Chip(
            image=image,
            valid=valid,
            labels=replace(labels, points=labels.points - np.array(offset)),
            core=(*rows.own(row), *columns.own(column)),
            scene=name,
            offset=offset,
        )

    def _radar(self, name: str, row: int, column: int) -> NDArray[np.floating[Any]]:
        """The radar channels of a chip as they are stored."""
        array = self.folder / name / ARRAY
        shape = (len(self.radar), self.record.chip_size, self.record.chip_size)
        with as_usage_error(
            f"{array} cannot be read at chip {row}, {column}",
            OSError,
            ValueError,
            OverflowError,
            RuntimeError,
        ):
            values = read_chunk(shard_path(array, row), column, self._cuts[name][1].num)
            dtype = np.dtype(self.record.dtype).newbyteorder("<")
            return np.frombuffer(values, dtype).reshape(shape)

    def _coarse(self, name: str, channel: str) -> Coarse:
        path = self.folder / name / f"{channel}.npy"
        with as_usage_error(f"{path} cannot be read", OSError, ValueError):
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        origin_row, origin_column, step_row, step_column = self._manifests[name]["coarse"][channel]
        origin, step = (origin_row, origin_column), (step_row, step_column)
        return Coarse(CHANNELS[channel].kind, values, origin, step)


def seen_again(train: Chips, val: Chips) -> str:
    """A warning if scenes for validation are also trained on, by their names or by their rasters
    and labels.

    Args:
        train: chips that are trained on.
        val: chips that are validated on.

    Returns:
        A sentence, empty where no scene is in both.
    """
    seen = {_identity(train, scene) for scene in train.scenes}
    both = [s for s in val.scenes if s in train.scenes or _identity(val, s) in seen]
    if not both:
        return ""
    return (
        f"trained on too: {len(both)} of {plural(len(val.scenes), 'scene')} of {val.folder}, such "
        f"as {both[0]}; the scores of validation say nothing of scenes that are new"
    )


def _identity(chips: Chips, scene: str) -> str:
    """The sizes of a scene's rasters and its labels; without labels scenes are not told apart."""
    labels = chips.labels[scene]
    facts = [chips.input_bytes(scene), labels.as_lists()] if len(labels) else [scene]
    return json.dumps(facts, sort_keys=True, default=str)


def _inside(points: NDArray[Any], rows: Span, columns: Span) -> NDArray[np.bool_]:
    lower, upper = np.array([rows, columns]).T
    return np.asarray(np.all((points >= lower) & (points < upper), axis=1))


def _read_index(folder: Path) -> dict[str, Any]:
    if not (folder / INDEX).is_file():
        unfinished = any(folder.glob(f"*/{ARRAY}"))
        why = "was not finished; run penstock preprocess again" if unfinished else "has no chips"
        raise UsageError(f"{folder} {why}: there is no {INDEX}")
    index = read_document(folder / INDEX)
    if not index["scenes"]:
        raise UsageError(f"{folder / INDEX} lists no scenes")
    return index


def metadata(shape: Sequence[int], dtype: str = DTYPE) -> dict[str, Any]:
    """The zarr.json of chips: a chip is a chunk, a row of chips is a shard with its index
    at the end.
    """
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    blosc: dict[str, Any] = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
    blosc["typesize"] = np.dtype(dtype).itemsize
    sharding = {
        "chunk_shape": [1, 1, *shape[2:]],
        "codecs": [little, {"name": "blosc", "configuration": blosc}],
        "index_codecs": [little],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "fill_value": "NaN",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, *shape[1:]]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": ["chip_row", "chip_column", "channel", "y", "x"],
        "attributes": {},
    }


def shard_path(array: Path, row: int) -> Path:
    """The file of the shard that holds a row of chips."""
    return array / "c" / str(row) / "0" / "0" / "0" / "0"


def write_shard(path: Path, chips: NDArray[np.floating[Any]]) -> None:
    """Write one row of chips, synced to disk. Only one chip is held encoded at a time."""
    blosc = require("numcodecs", "scenes").Blosc
    codec = blosc("lz4", clevel=5, shuffle=blosc.BITSHUFFLE)
    places = np.empty((len(chips), 2), "<u8")
    path.parent.mkdir(parents=True)
    with synced(path) as file:
        for number, chip in enumerate(chips):
            chunk = codec.encode(chip)
            places[number] = file.tell(), len(chunk)
            file.write(chunk)
        file.write(places.tobytes())


def read_chunk(path: Path, number: int, of: int) -> bytes:
    """One chip as it is stored.

    Args:
        path: the file of a shard.
        number: the number of the chip in it.
        of: the number of its chips.

    Returns:
        The bytes of its values, decoded.
    """
    with path.open("rb") as file:
        file.seek(-16 * of, os.SEEK_END)
        offset, size = np.frombuffer(file.read(), "<u8").reshape(of, 2)[number].tolist()
        file.seek(offset)
        return bytes(require("numcodecs", "scenes").Blosc().decode(file.read(size)))


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and sync it to disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def read_document(path: Path) -> dict[str, Any]:
    """An index or a manifest; `UsageError` if it is none, or of another version."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path} is not of a folder of chips")
    if document.get("version") != VERSION:
        raise UsageError(
            f"{path} is of version {document.get('version')}; this Penstock reads {VERSION}"
        )
    return document
