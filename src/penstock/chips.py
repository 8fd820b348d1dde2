"""Scenes cut into chips: what a detector trains on.

    scene   0 ├──────────────────────────────────────────────────┤ rows (and columns likewise)
    chips     ├──────── chip 0 ────────┤                           chip_size pixels
                                ├──────── chip 1 ────────┤         overlap of neighbours
                                         ├──────── chip 2 ───────┤ the last is moved in, not padded
    cores     ├────────── 0 ────────┼──── 1 ────┼──────── 2 ─────┤ each pixel belongs to one chip

An object on the border of one chip lies well inside its neighbour, and belongs to the one in whose
core it is. So nothing is cut in two and nothing is counted twice.

    OUT/index.json                    what is here, written last
    OUT/SCENE/chips.zarr              radar (row, column, channel, y, x), a shard is a row of chips
    OUT/SCENE/bathymetry.npy, ...     the 500 m rasters as they are
    OUT/SCENE/manifest.json           written after the chips: a scene without one is not there

Stored are the values of the rasters, unscaled, in the 16-bit floats that the real ones have; a
missing value is NaN. `Chips.read` interpolates what is coarse, scales all by the constants in
`scenes.CHANNELS` and by nothing that depends on the chip, and tells which pixels are valid.
The other layout, ``reference``, is of files as the xView3 reference wrote them.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import StageError, UsageError, describe, require
from .scenes import (
    CHANNELS,
    COLUMNS,
    NODATA,
    Coarse,
    Labels,
    Scene,
    is_missing,
    label_rows,
    radar_of,
    ternary,
)

FORMAT, VERSION = "penstock-chips", 1
INDEX, MANIFEST, ARRAY, COORDS = "index.json", "manifest.json", "chips.zarr", "coords.json"

Layout = Literal["penstock", "reference"]
Span = tuple[int, int]
"""Half-open."""


# --- geometry --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """How one axis is cut into chips.

    >>> cut = Cut(length=100, chip=40, overlap=10)
    >>> [cut.read(i) for i in range(cut.num)]
    [(0, 40), (30, 70), (60, 100)]
    >>> [cut.core(i) for i in range(cut.num)]
    [(0, 35), (35, 65), (65, 100)]
    """

    length: int
    chip: int
    overlap: int
    padded: bool = False
    """Let the last chip stick out, rather than move it in."""

    @property
    def num(self) -> int:
        return max(1, -(-(self.length - self.overlap) // (self.chip - self.overlap)))

    def start(self, index: int) -> int:
        """First pixel of a chip. A scene that is shorter than a chip begins where its chip does."""
        start = index * (self.chip - self.overlap)
        return start if self.padded else max(0, min(start, self.length - self.chip))

    def read(self, index: int) -> Span:
        """What a chip sees of the scene."""
        return self.start(index), min(self.start(index) + self.chip, self.length)

    def core(self, index: int) -> Span:
        """What a chip owns: up to the middle of what it shares with each neighbour."""
        first = 0 if index == 0 else (self.start(index) + self.read(index - 1)[1]) // 2
        last = index == self.num - 1
        return first, self.length if last else (self.start(index + 1) + self.read(index)[1]) // 2


def cuts_of(size: tuple[int, int], chip: int, overlap: int) -> tuple[Cut, Cut]:
    """The cuts of the rows and of the columns."""
    if not 0 <= overlap < chip:
        raise UsageError(f"--overlap {overlap} must be less than --chip-size {chip}")
    return Cut(size[0], chip, overlap), Cut(size[1], chip, overlap)


# --- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a split."""

    scenes: int
    chips: int
    """Chips with at least one valid pixel."""
    resumed: int
    """Scenes that an earlier run had finished."""
    labels: int


def preprocess(
    folders: Mapping[str, Path],
    labels: Mapping[str, Labels],
    label_file: Path,
    out: Path,
    *,
    channels: Sequence[str],
    chip_size: int,
    overlap: int,
    layout: Layout,
    workers: int,
    overwrite: bool,
    background: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Done:
    """Cut every scene; ``workers`` threads take one each. A scene that is done is not done again.

    ``background`` matters to the reference's layout only: whether some chips without an object are
    annotated. ``progress`` is told how many scenes are done.
    """
    out.mkdir(parents=True, exist_ok=True)
    cut = _cut_scene if layout == "penstock" else _cut_scene_as_the_reference
    settings = {"channels": list(channels), "chip_size": chip_size, "overlap": overlap}
    finished: list[tuple[dict[str, Any], bool]] = []
    lock, stop = threading.Lock(), threading.Event()
    env = require("rasterio", "scenes").Env

    def work(name: str) -> None:
        found = labels[name]
        try:
            # GDAL would keep a twentieth of the memory in blocks that are never asked for again.
            with env(GDAL_CACHEMAX=64), Scene(folders[name], channels) as scene:
                found.check_inside(scene.size, name, label_file)
                manifest = _manifest(scene, found, settings, layout)
                result = cut(scene, manifest, out / name, overwrite, stop)
        except (UsageError, _Stopped):
            raise
        except Exception as error:
            raise StageError("preprocess", f"scene {name}", error) from error
        with lock:
            finished.append(result)
            progress(len(finished))

    with ThreadPoolExecutor(workers, thread_name_prefix="preprocess") as pool:
        jobs = [pool.submit(work, name) for name in sorted(folders)]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # an error, or somebody's Ctrl-C, ends the others at their next row
            stop.set()
            for job in jobs:
                job.cancel()
    for job in jobs:
        if not job.cancelled() and not isinstance(job.exception(), _Stopped):
            job.result()
    manifests = {manifest["scene"]: manifest for manifest, _ in finished}
    chips = sum(_num_valid(manifest) for manifest in manifests.values())
    if not chips:
        raise UsageError(f"{len(folders)} scenes under {out} give no chip with a valid pixel")
    if layout == "penstock":
        index = {"format": FORMAT, "version": VERSION, **settings, "scenes": sorted(manifests)}
        _write_json(out / INDEX, index)
    else:
        _write_annotations(out, label_file, manifests, background)
    resumed = sum(was_done for _, was_done in finished)
    return Done(len(manifests), chips, resumed, sum(len(labels[name]) for name in folders))


class _Stopped(Exception):
    """Another scene failed, and this one was left."""


def _rows(num: int, stop: threading.Event) -> Iterator[int]:
    for index in range(num):
        if stop.is_set():
            raise _Stopped
        yield index


def _manifest(
    scene: Scene, labels: Labels, settings: Mapping[str, Any], layout: Layout
) -> dict[str, Any]:
    """All that a scene's chips depend on. What is found while cutting is added when it is."""
    stats = {name: (scene.folder / CHANNELS[name].file).stat() for name in scene.channels}
    return {
        "format": FORMAT,
        "version": VERSION,
        "layout": layout,
        "scene": scene.name,
        "size": list(scene.size),
        **settings,
        "inputs": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "labels": {field.name: _plain(getattr(labels, field.name)) for field in fields(labels)},
    }


def _plain(values: NDArray[Any]) -> list[Any]:
    """For JSON, which has no NaN."""
    if values.ndim > 1 or values.dtype.kind != "f":
        return list(values.tolist())
    return [None if np.isnan(value) else value for value in values.tolist()]


def _num_valid(manifest: Mapping[str, Any]) -> int:
    return int(np.count_nonzero(manifest["valid_pixels"]))


def _already(path: Path, manifest: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The manifest of an earlier run at ``path``, if it is of the same inputs and settings."""
    if overwrite or not path.exists():
        return None
    known = _read_json(path)
    differing = [key for key in manifest if known.get(key) != manifest[key]]
    if differing:
        raise UsageError(
            f"{path.parent} was made with other {differing[0]}; "
            "use --overwrite-preproc to replace it"
        )
    return known


def _cut_scene(
    scene: Scene, manifest: dict[str, Any], out: Path, overwrite: bool, stop: threading.Event
) -> tuple[dict[str, Any], bool]:
    """One scene to chips and manifest; the manifest, and whether all was there before."""
    known = _already(out / MANIFEST, manifest, overwrite)
    if known is not None:
        return known, True
    # The manifest goes first and comes last: with it a scene is whole, without it, it is not there.
    (out / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(out / ARRAY, ignore_errors=True)
    radar, chip = radar_of(scene.channels), manifest["chip_size"]
    rows, columns = cuts_of(scene.size, chip, manifest["overlap"])
    shape = (rows.num, columns.num, len(radar), chip, chip)
    (out / ARRAY).mkdir(parents=True)
    _write_json(out / ARRAY / "zarr.json", _metadata(shape))
    valid = np.zeros(shape[:2], np.int64)
    # Two, so that one is written while the other is filled.
    bands = [np.full(shape[1:], np.nan, np.float16) for _ in range(min(2, rows.num))]
    written: list[Future[None]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="write") as writer:
        for index in _rows(rows.num, stop):
            if index > 1:
                written[index - 2].result()
            band = bands[index % 2]
            valid[index] = _read_row(scene, radar, rows.read(index), columns, band)
            written.append(writer.submit(_write_shard, _shard(out / ARRAY, index), band))
    for write in written:
        write.result()
    for name, raster in scene.coarse.items():
        with _synced(out / f"{name}.npy") as file:
            np.save(file, raster.values)
    places = {name: [*raster.origin, *raster.step] for name, raster in scene.coarse.items()}
    manifest |= {"valid_pixels": valid.tolist(), "coarse": places}
    _write_json(out / MANIFEST, manifest)
    return manifest, False


def _read_row(
    scene: Scene, channels: Sequence[str], rows: Span, columns: Cut, band: NDArray[Any]
) -> NDArray[np.int64]:
    """Fill ``band``, shape (chips, channels, y, x), from rows of a scene; count valid pixels.

    What lies outside the scene is left alone beside it, and NaN below.
    """
    height = rows[1] - rows[0]
    band[:, :, height:] = np.nan
    spans = [columns.read(index) for index in range(columns.num)]
    windows = [band[i, :, :height, : stop - first] for i, (first, stop) in enumerate(spans)]
    for place, name in enumerate(channels):
        if CHANNELS[name].kind == "radar":  # stored by lines: whole ones, each once
            for first, stop in _slabs(rows, scene.rows_at_once(name)):
                lines = scene.read(name, (first, stop), (0, scene.size[1]))
                for window, span in zip(windows, spans, strict=True):
                    window[place, first - rows[0] : stop - rows[0]] = lines[:, slice(*span)]
        else:
            for window, span in zip(windows, spans, strict=True):
                window[place] = scene.read(name, rows, span)
    radar = [channels.index(name) for name in radar_of(channels)]
    return np.array([valid_pixels(window[radar]).sum() for window in windows])


def _slabs(rows: Span, height: int) -> Iterator[Span]:
    """``rows`` cut at the multiples of ``height``."""
    first = rows[0]
    while first < rows[1]:
        stop = min((first // height + 1) * height, rows[1])
        yield first, stop
        first = stop


def valid_pixels(radar: NDArray[Any]) -> NDArray[np.bool_]:
    """Where every radar channel (channels, y, x) has a value; shape (y, x)."""
    return np.asarray(~np.any([is_missing(channel) for channel in radar], axis=0))


# --- the store: Zarr 3, of which a shard is so simple that it is written and read here ---------


def _metadata(shape: Sequence[int]) -> dict[str, Any]:
    """The zarr.json of chips. A chip is a chunk, a row of chips a shard, its index at its end."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    blosc = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "typesize": 2, "blocksize": 0}
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
        "data_type": "float16",
        "fill_value": "NaN",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, *shape[1:]]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": ["chip_row", "chip_column", "channel", "y", "x"],
        "attributes": {},
    }


def _shard(array: Path, row: int) -> Path:
    return array / "c" / str(row) / "0" / "0" / "0" / "0"


def _write_shard(path: Path, chips: NDArray[np.float16]) -> None:
    """One row of chips, synced to disk. No more than one chip is held encoded."""
    blosc = require("numcodecs", "scenes").Blosc
    codec = blosc("lz4", clevel=5, shuffle=blosc.BITSHUFFLE)
    places = np.empty((len(chips), 2), "<u8")
    path.parent.mkdir(parents=True)
    with _synced(path) as file:
        for number, chip in enumerate(chips):
            chunk = codec.encode(chip)
            places[number] = file.tell(), len(chunk)
            file.write(chunk)
        file.write(places.tobytes())


def _read_chunk(path: Path, number: int, of: int) -> bytes:
    """Chunk ``number`` of a shard that holds so many, decoded."""
    with path.open("rb") as file:
        file.seek(-16 * of, os.SEEK_END)
        offset, size = np.frombuffer(file.read(), "<u8").reshape(of, 2)[number].tolist()
        file.seek(offset)
        return bytes(require("numcodecs", "scenes").Blosc().decode(file.read(size)))


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk, and not only on its way there, when this ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    """All of it or nothing, also when the machine stops."""
    part = path.with_name(path.name + ".part")
    with _synced(part) as file:
        file.write(json.dumps(document, allow_nan=False).encode())
    part.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {describe(error)}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path} is not of a folder of chips")
    if document.get("version") != VERSION:
        raise UsageError(f"{path} is of version {document.get('version')}; known is {VERSION}")
    return document


# --- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip and the labels in it. Points are rows and columns of the chip, and all that it sees:
    those in ``core`` are its own."""

    image: NDArray[np.float32]
    """Scaled by `scenes.CHANNELS`, 0 where a value is missing; shape (channels, y, x)."""
    valid: NDArray[np.bool_]
    """Shape (y, x)."""
    points: NDArray[np.float32]
    """Shape (n, 2)."""
    is_vessel: NDArray[np.int8]
    is_fishing: NDArray[np.int8]
    length_m: NDArray[np.float32]
    confidence: NDArray[np.int8]
    core: tuple[int, int, int, int]
    """Half-open rows and columns of the chip: row0, row1, col0, col1."""
    scene: str
    offset: tuple[int, int]
    """Row and column in the scene of the chip's first pixel."""


class Chips:
    """A folder of chips by number: scenes by name, chips by row and column, empty ones left out.

    The order is the same in every process. Nothing is held open and no thread is kept, so that it
    may go to threads, worker processes and forks alike.
    """

    def __init__(self, folder: Path) -> None:
        index = _read_index(folder)
        self.folder = folder
        self.channels = tuple(str(name) for name in index["channels"])
        self.radar = radar_of(self.channels)
        self.chip_size = int(index["chip_size"])
        self.overlap = int(index["overlap"])
        self.scenes = tuple(str(name) for name in index["scenes"])
        self.labels: dict[str, Labels] = {}
        """Of each scene, in its own coordinates."""
        self._cuts: dict[str, tuple[Cut, Cut]] = {}
        self._places: list[tuple[str, int, int]] = []
        self._coarse_places: dict[str, dict[str, list[float]]] = {}
        for name in self.scenes:
            manifest = _read_json(folder / name / MANIFEST)
            if any(manifest[key] != index[key] for key in ("channels", "chip_size", "overlap")):
                raise UsageError(
                    f"{folder / name} is of other settings than {folder / INDEX}: a run that "
                    "replaces them was not finished; run penstock preprocess again"
                )
            self._cuts[name] = cuts_of(tuple(manifest["size"]), self.chip_size, self.overlap)
            self.labels[name] = _labels_of(manifest["labels"])
            self._coarse_places[name] = manifest["coarse"]
            kept = np.argwhere(np.asarray(manifest["valid_pixels"]) > 0)
            self._places += [(name, int(row), int(column)) for row, column in kept]

    def __len__(self) -> int:
        return len(self._places)

    def scene_of(self, index: int) -> str:
        return self._places[index][0]

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
        image = np.zeros((len(self.channels), *radar.shape[1:]), np.float32)
        window = rows.read(row), columns.read(column)
        inside = tuple(slice(stop - first) for first, stop in window)
        for place, channel in enumerate(self.channels):
            if channel in self.radar:
                image[place] = radar[self.radar.index(channel)]
            else:
                image[place][inside] = self._coarse(name, channel).read(*window)
        offset = (rows.start(row), columns.start(column))
        labels = self.labels[name]
        labels = labels[_inside(labels.points, *window)]
        first, left = rows.core(row), columns.core(column)
        return Chip(
            image=scaled(image, self.channels),
            valid=valid_pixels(radar),
            points=labels.points - np.array(offset, np.float32),
            is_vessel=labels.is_vessel,
            is_fishing=labels.is_fishing,
            length_m=labels.length_m,
            confidence=labels.confidence,
            core=(
                first[0] - offset[0],
                first[1] - offset[0],
                left[0] - offset[1],
                left[1] - offset[1],
            ),
            scene=name,
            offset=offset,
        )

    def _radar(self, name: str, row: int, column: int) -> NDArray[np.float16]:
        """The radar channels of a chip as they are stored."""
        array = self.folder / name / ARRAY
        shape = (len(self.radar), self.chip_size, self.chip_size)
        try:
            values = _read_chunk(_shard(array, row), column, self._cuts[name][1].num)
            return np.frombuffer(values, "<f2").reshape(shape)
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(
                f"{array} cannot be read at chip {row}, {column}: {describe(error)}"
            ) from error

    def _coarse(self, name: str, channel: str) -> Coarse:
        path = self.folder / name / f"{channel}.npy"
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {describe(error)}") from error
        origin_row, origin_column, step_row, step_column = self._coarse_places[name][channel]
        origin, step = (origin_row, origin_column), (step_row, step_column)
        return Coarse(CHANNELS[channel].kind, values, origin, step)


def open_chips(folder: Path) -> Chips:
    """The chips that ``penstock preprocess`` wrote, of one split.

    Raises `UsageError` for a folder that is none, or that was not finished.
    """
    return Chips(folder)


def scaled(image: NDArray[np.float32], channels: Sequence[str]) -> NDArray[np.float32]:
    """What a model sees of values (channels, y, x) in their own units, in place: missing is 0."""
    for place, name in enumerate(channels):
        image[place] -= np.float32(CHANNELS[name].offset)
        image[place] /= np.float32(CHANNELS[name].scale)
    image[np.isnan(image)] = 0
    return image


def _inside(points: NDArray[Any], rows: Span, columns: Span) -> NDArray[np.bool_]:
    lower, upper = np.array([rows, columns]).T
    return np.asarray(np.all((points >= lower) & (points < upper), axis=1))


def _labels_of(columns: Mapping[str, Sequence[Any]]) -> Labels:
    dtypes = {
        "points": np.float32,
        "is_vessel": np.int8,
        "is_fishing": np.int8,
        "length_m": np.float32,
        "confidence": np.int8,
        "shore_km": np.float32,
        "lines": np.int32,
    }
    arrays = {name: np.array(columns[name], dtype) for name, dtype in dtypes.items()}
    return Labels(**{**arrays, "points": arrays["points"].reshape(-1, 2)})


def _read_index(folder: Path) -> dict[str, Any]:
    if not (folder / INDEX).is_file():
        unfinished = any(folder.glob(f"*/{ARRAY}"))
        why = "was not finished; run penstock preprocess again" if unfinished else "has no chips"
        raise UsageError(f"{folder} {why}: there is no {INDEX}")
    index = _read_json(folder / INDEX)
    if not index["scenes"]:
        raise UsageError(f"{folder / INDEX} lists no scenes")
    return index


# --- the layout of the reference -------------------------------------------------------------


def _cut_scene_as_the_reference(
    scene: Scene, manifest: dict[str, Any], out: Path, overwrite: bool, stop: threading.Event
) -> tuple[dict[str, Any], bool]:
    """OUT/SCENE/CHANNEL/<i>_CHANNEL.npy and coords.json: float32, no overlap, row by row, padded
    with 0 below and to the right. Missing stays -32768, which the reference's reader expects."""
    known = _already(out / MANIFEST, manifest, overwrite)
    if known is not None:
        return known, True
    for path in (out / MANIFEST, out / COORDS):
        path.unlink(missing_ok=True)
    for name in scene.channels:
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
    chip = manifest["chip_size"]
    rows, columns = (Cut(length, chip, 0, padded=True) for length in scene.size)
    valid = np.zeros((rows.num, columns.num), np.int64)
    band = np.full((columns.num, len(scene.channels), chip, chip), np.nan, np.float32)
    for row in _rows(rows.num, stop):
        valid[row] = _read_row(scene, scene.channels, rows.read(row), columns, band)
        band[np.isnan(band)] = NODATA
        band[:, :, scene.size[0] - rows.start(row) :] = 0
        band[-1, ..., scene.size[1] - columns.start(columns.num - 1) :] = 0
        for column in range(columns.num):
            for place, name in enumerate(scene.channels):
                number = row * columns.num + column
                np.save(out / name / f"{number}_{name}.npy", band[column, place])
    starts = [
        (columns.start(j), rows.start(i)) for i in range(rows.num) for j in range(columns.num)
    ]
    (out / COORDS).write_text(json.dumps({"offsets": starts}))
    manifest |= {"valid_pixels": valid.tolist()}
    _write_json(out / MANIFEST, manifest)
    return manifest, False


def _write_annotations(
    out: Path, label_file: Path, manifests: Mapping[str, Mapping[str, Any]], background: bool
) -> None:
    """OUT/SPLIT_chip_annotations.csv: the rows of the labels, each with its chip; and for training
    half as many chips without an object as there are objects. The class is 0 background, 1 fishing,
    2 another vessel, 3 no vessel, and empty where the labels do not tell, which the reference took
    for fishing."""
    more = ("vessel_class", "scene_rows", "scene_cols", "rows", "columns", "chip_index")
    rows: list[dict[str, Any]] = []
    for _, cells in label_rows(label_file):
        manifest = manifests.get(cells["scene_id"])
        if manifest is None:
            continue
        chip, width = int(manifest["chip_size"]), int(manifest["size"][1])
        row, column = (float(cells[f"detect_scene_{axis}"]) for axis in ("row", "column"))
        place = int(row // chip) * -(-width // chip) + int(column // chip)
        found = (_class(cells), row, column, row % chip, column % chip, place)
        rows.append({**cells, **dict(zip(more, found, strict=True))})
    for name, manifest in manifests.items() if background else ():
        taken = [row["chip_index"] for row in rows if row["scene_id"] == name]
        empty = np.setdiff1d(np.flatnonzero(manifest["valid_pixels"]), taken)
        wanted = min(int(0.5 * max(len(taken), 3)), len(empty))
        for place in sorted(np.random.default_rng(0).choice(empty, wanted, replace=False).tolist()):
            empty_row = dict.fromkeys((*COLUMNS, *more), -1) | {"source": "background"}
            rows.append(empty_row | {"scene_id": name, "vessel_class": 0, "chip_index": place})
    with (out / f"{out.name}_chip_annotations.csv").open("w", newline="") as file:
        writer = csv.DictWriter(
            file, (*COLUMNS, *more), restval="", extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
    channels = len(next(iter(manifests.values()))["channels"])
    for name, value in (("means", 0.5), ("std", 0.1)):
        np.save(out / f"data_{name}.npy", np.full(channels, value, np.float32))


def _class(cells: Mapping[str, str]) -> int | str:
    vessel, fishing = ternary(cells["is_vessel"]), ternary(cells["is_fishing"])
    if vessel == 1:
        return {1: 1, 0: 2}.get(fishing, "")
    return 3 if vessel == 0 else ""
