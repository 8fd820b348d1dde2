"""xView3 as it lies on disk: a scene is a folder of rasters, its labels are rows of a CSV.

    ROOT/train/05bc615a9b0e1159t/VH_dB.tif          10 m, sigma0 in dB, UTM
                                 VV_dB.tif
                                 bathymetry.tif     500 m, metres
                                 owiWindSpeed.tif, owiWindDirection.tif, ...
    ROOT/validation/590dd08f71056cacv/...
    ROOT/05bc615a9b0e1159t_shoreline.npy            contours of (row, column)
    train.csv                                       a point for each object; many cells are empty

A `Scene` reads windows: the 10 m rasters as they are, the 500 m ones interpolated for the window
and nowhere else. A scene of 655 megapixels is never in memory, and a raster of 500 m never grows to
it. What a raster has no value for is NaN. What cannot be read is an error, never zeros.

Places on Earth and the small rasters are read by rasterio. The pixels of the large ones come by
tifffile: they are 16-bit floats, and GDAL would widen each, at several times the cost of reading.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError, describe, require
from .shoreline import shoreline_path, write_shoreline
from .synthetic_scenes import PITCH, SyntheticScene, Target

FloatArray = NDArray[np.float32]
Values = NDArray[Any]
"""16-bit floats where the raster holds them, 32-bit ones otherwise; NaN is missing."""

PIXEL_M, COARSE_M = 10, 500
NODATA = -32768.0
NO_SHORE_KM = 9999.99
CONFIDENCE = ("LOW", "MEDIUM", "HIGH")
UNKNOWN = -1

COLUMNS = (
    "detect_lat detect_lon vessel_length_m source detect_scene_row detect_scene_column is_vessel "
    "is_fishing distance_from_shore_km scene_id confidence top left bottom right detect_id"
).split()
"""Of a label CSV, in the order of the real one."""
NEEDED = (
    "scene_id detect_scene_row detect_scene_column is_vessel is_fishing vessel_length_m "
    "confidence distance_from_shore_km"
).split()
_INDEX_COLUMNS = {"", "Unnamed: 0"}
"""What a table library names the row numbers that it writes; they are ignored."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A raster that a model may see."""

    file: str
    kind: Literal["radar", "linear", "nearest", "degrees"]
    """How it reaches a window of 10 m pixels: as it is, or interpolated so."""
    offset: float
    scale: float
    """A model sees ``(value - offset) / scale``: the same in every scene and chip."""
    zero_is_missing: bool = False


CHANNELS = {
    "vh": Channel("VH_dB.tif", "radar", -40, 15),
    "vv": Channel("VV_dB.tif", "radar", -40, 15),
    "bathymetry": Channel("bathymetry.tif", "linear", 0, 1000),
    "wind_speed": Channel("owiWindSpeed.tif", "linear", 0, 20, zero_is_missing=True),
    "wind_direction": Channel("owiWindDirection.tif", "degrees", 0, 360),
    "wind_quality": Channel("owiWindQuality.tif", "nearest", 0, 3),
    "mask": Channel("owiMask.tif", "nearest", 0, 1),
}


def channels_of(text: str) -> tuple[str, ...]:
    """``vh,vv,bathymetry`` as names, or the one that there is not."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in CHANNELS:
            raise UsageError(f"--channels {text}: there is no channel {name!r}; "
                             f"there are {', '.join(CHANNELS)}")  # fmt: skip
        if names.count(name) > 1:
            raise UsageError(f"--channels {text}: {name} is given twice")
    if not radar_of(names):
        raise UsageError(f"--channels {text}: give vh or vv as well, in which the vessels are")
    return names


def radar_of(channels: Sequence[str]) -> tuple[str, ...]:
    """Those of 10 m."""
    return tuple(name for name in channels if CHANNELS[name].kind == "radar")


# --- a scene ---------------------------------------------------------------------------------


class Scene:
    """The rasters of one scene, opened; reads windows. One thread at a time.

    Raises `UsageError`, naming the file, for a raster that is missing, corrupt or of another size.
    """

    def __init__(self, folder: Path, channels: Sequence[str]) -> None:
        self.folder, self.name, self.channels = folder, folder.name, tuple(channels)
        self._files: dict[str, Any] = {}
        self._pixels: dict[str, _Pixels] = {}
        # The 10 m grid is that of the radar, even where only 500 m rasters are asked for.
        radar = radar_of(channels) or ("vh",)
        try:
            for name in dict.fromkeys([*radar, *channels]):
                self._files[name] = self._open(folder / CHANNELS[name].file)
            self._pixels = {name: _Pixels(folder / CHANNELS[name].file) for name in radar}
            first = self._files[radar[0]]
            self.size: tuple[int, int] = (first.height, first.width)
            """Rows and columns of 10 m."""
            for name in radar:
                if (found := self._files[name].shape) != self.size:
                    raise UsageError(
                        f"{folder / CHANNELS[name].file} has {found[0]} x {found[1]} pixels and "
                        f"{CHANNELS[radar[0]].file} {self.size[0]} x {self.size[1]}"
                    )
            self.coarse: dict[str, Coarse] = {
                name: _read_coarse(name, folder / CHANNELS[name].file, self._files[name], first)
                for name in channels
                if CHANNELS[name].kind != "radar"
            }
            """The 500 m rasters, which are small."""
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _open(path: Path) -> Any:
        rasterio = require("rasterio", "scenes")
        if not path.is_file():
            raise UsageError(f"{path} is missing")
        try:
            with warnings.catch_warnings():
                # Rasters without a place on Earth are taken to cover the same ground.
                warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
                return rasterio.open(path)
        except rasterio.errors.RasterioIOError as error:
            raise UsageError(f"{path} is no raster that can be read: {describe(error)}") from error

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Values:
        """A window of a channel in its own unit, NaN where there is no value.

        ``rows`` and ``columns`` are half-open and lie inside the scene.
        """
        if CHANNELS[name].kind == "radar":
            return self._pixels[name].read(rows, columns)
        return self.coarse[name].read(rows, columns)

    def rows_at_once(self, name: str) -> int:
        """Radar is read best by so many whole rows, from a multiple of them on."""
        return self._pixels[name].rows_at_once

    def close(self) -> None:
        for file in (*self._files.values(), *self._pixels.values()):
            file.close()

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


SLAB = 64
"""Rows of a scene that stay in the processor's cache while they are worked on."""
ENDS_EARLY = "the file ends before its pixels do"


class _Pixels:
    """The pixels of a TIFF, in strips or tiles, deflated or not: only those that a window needs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        tifffile = require("tifffile", "scenes")
        self._file = path.open("rb")
        try:
            self._tiff = tifffile.TiffFile(self._file)
            self._page: Any = self._tiff.pages[0]
        except Exception as error:  # a damaged header may raise anything
            self.close()
            raise UsageError(f"{path} is no TIFF that can be read: {describe(error)}") from error
        page = self._page
        if page.samplesperpixel != 1:
            self.close()
            raise UsageError(f"{path} has {page.samplesperpixel} values a pixel; a scene has one")
        self._dtype = np.dtype(np.float16 if page.dtype == np.float16 else np.float32)
        height, self._width = page.imagelength, page.imagewidth
        self._piece = (
            (page.tilelength, page.tilewidth)
            if page.is_tiled
            else (min(page.rowsperstrip, height), self._width)
        )

        tall = self._piece[0]
        self.rows_at_once: int = tall if page.is_tiled else max(1, SLAB // tall) * tall

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Values:
        try:
            if self._page.is_final:
                found = self._lines(rows)[:, slice(*columns)]
            else:
                found = self._pieces(rows, columns)
        except Exception as error:  # as may damaged pixels
            raise UsageError(
                f"{self._path} cannot be read at rows {rows[0]} to {rows[1]}: {describe(error)}"
            ) from error
        return _marked(found.astype(self._dtype, copy=False))

    def _lines(self, rows: tuple[int, int]) -> Values:
        """Whole lines of a raster that lies in its file as it would in memory: one read."""
        stored = self._page.dtype.newbyteorder(self._tiff.byteorder)
        found: Values = np.empty((rows[1] - rows[0], self._width), stored)
        file = self._tiff.filehandle
        file.seek(self._page.dataoffsets[0] + rows[0] * found.strides[0])
        if file.readinto(found) != found.nbytes:
            raise EOFError(ENDS_EARLY)
        return found

    def _pieces(self, rows: tuple[int, int], columns: tuple[int, int]) -> Values:
        """From the strips or tiles that a window touches."""
        (tall, wide), page = self._piece, self._page
        found: Values = np.empty((rows[1] - rows[0], columns[1] - columns[0]), page.dtype)
        across = -(-self._width // wide)
        pieces = [
            down * across + right
            for down in range(rows[0] // tall, -(-rows[1] // tall))
            for right in range(columns[0] // wide, -(-columns[1] // wide))
        ]
        offsets, counts = (
            [of[i] for i in pieces] for of in (page.dataoffsets, page.databytecounts)
        )
        for data, index in self._tiff.filehandle.read_segments(offsets, counts, pieces):
            if data is None or len(data) != page.databytecounts[index]:
                raise EOFError(ENDS_EARLY)
            values, (_, _, top, left, _), (_, height, width, _) = page.decode(data, index)
            first, stop = max(top, rows[0]), min(top + height, rows[1])
            begin, end = max(left, columns[0]), min(left + width, columns[1])
            window = values[0, first - top : stop - top, begin - left : end - left, 0]
            found[first - rows[0] : stop - rows[0], begin - columns[0] : end - columns[0]] = window
        return found

    def close(self) -> None:
        self._file.close()


def _marked(values: Values) -> Values:
    """With NaN, in place, where the raster says that it has no value."""
    if values.dtype == np.float16:  # by its bits, five times as fast
        bits = values.view(np.uint16)
        bits[(bits == _NODATA_BITS) | (bits & _INFINITE == _INFINITE)] = _NAN_BITS
    else:
        values[(values == NODATA) | ~np.isfinite(values)] = np.nan
    return values


def is_missing(values: Values) -> NDArray[np.bool_]:
    """Where values are NaN."""
    if values.dtype == np.float16:
        return np.asarray(values.view(np.uint16) & np.uint16(0x7FFF) > _INFINITE)
    return np.isnan(values)


_NODATA_BITS, _INFINITE, _NAN_BITS = np.array([NODATA, np.inf, np.nan], np.float16).view(np.uint16)


@dataclass(frozen=True, slots=True)
class Coarse:
    """A raster of 500 m, whole, and where the pixels of 10 m lie in it: pixel ``i`` of an axis at
    ``origin + step * i``, counted between the centres of the coarse pixels."""

    kind: str
    values: FloatArray
    origin: tuple[float, float]
    step: tuple[float, float]

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> FloatArray:
        """A window of 10 m pixels."""
        down, right = (
            self.origin[axis] + self.step[axis] * np.arange(*window, dtype=np.float64)
            for axis, window in enumerate((rows, columns))
        )
        # No more than the window lies between.
        top, bottom = _around(down, self.values.shape[0])
        left, end = _around(right, self.values.shape[1])
        values = np.asarray(self.values[top:bottom, left:end])
        down, right = down - top, right - left
        if self.kind == "nearest":
            nearest = [
                np.clip(np.rint(at), 0, length - 1).astype(np.intp)
                for at, length in zip((down, right), values.shape, strict=True)
            ]
            return np.ascontiguousarray(values[nearest[0][:, None], nearest[1]])
        if self.kind == "degrees":  # the way from 350 to 10 leads through 0
            turns = np.deg2rad(values)
            east, north = (_linear(part(turns), down, right) for part in (np.sin, np.cos))
            return np.asarray(np.rad2deg(np.arctan2(east, north)) % 360, np.float32)
        return _linear(values, down, right)


def _read_coarse(name: str, path: Path, coarse: Any, fine: Any) -> Coarse:
    """By the two rasters' places on Earth; without them, both cover the same ground."""
    if fine.crs and coarse.crs:
        if fine.crs != coarse.crs:
            raise UsageError(f"{path} is in {coarse.crs}, and the radar in {fine.crs}")
        ours, theirs = fine.transform, coarse.transform
        if any((ours.b, ours.d, theirs.b, theirs.d)):
            raise UsageError(f"{path} and the radar must both have north at the top")
        origin = ((ours.f - theirs.f) / theirs.e, (ours.c - theirs.c) / theirs.a)
        step = (ours.e / theirs.e, ours.a / theirs.a)
    else:
        origin, step = (0.0, 0.0), (coarse.height / fine.height, coarse.width / fine.width)
    try:
        values = _marked(coarse.read(1, out_dtype=np.float32))
    except require("rasterio.errors", "scenes").RasterioError as error:
        raise UsageError(f"{path} cannot be read: {describe(error.__cause__ or error)}") from error
    if CHANNELS[name].zero_is_missing:
        values[values == 0] = np.nan
    # From edges to centres: pixel i of 10 m has its centre at i + 1/2.
    centres = (origin[0] + step[0] / 2 - 0.5, origin[1] + step[1] / 2 - 0.5)
    return Coarse(CHANNELS[name].kind, values, centres, step)


def _around(at: NDArray[np.float64], length: int) -> tuple[int, int]:
    """The pixels that ``at`` lies between, of the ``length`` that there are."""
    first = min(max(math.floor(at[0]), 0), length - 1)
    return first, max(min(math.floor(at[-1]) + 2, length), first + 1)


def _linear(
    values: FloatArray, down: NDArray[np.float64], right: NDArray[np.float64]
) -> FloatArray:
    """Values between pixels. A missing one is left out of the mean, and is not spread: where it is
    the nearest, the result is missing."""
    missing = np.isnan(values)
    if not missing.any():
        return _between(values, down, right)
    weights = _between((~missing).astype(np.float32), down, right)
    sums = _between(np.where(missing, np.float32(0), values), down, right)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(weights >= 0.5, sums / weights, np.float32(np.nan))


def _between(
    values: FloatArray, down: NDArray[np.float64], right: NDArray[np.float64]
) -> FloatArray:
    """Linear along both axes; beyond the ends, the end."""
    lower, upper, part = _neighbours(right, values.shape[1])
    lines = values[:, lower] + (values[:, upper] - values[:, lower]) * part
    lower, upper, part = _neighbours(down, len(values))
    found = np.empty((len(down), len(right)), np.float32)
    # All lines between the same two at once: they stay in the processor's cache.
    edges = [0, *np.flatnonzero(np.diff(lower)) + 1, len(down)]
    for first, stop in pairwise(edges):
        line, step = lines[lower[first]], lines[upper[first]] - lines[lower[first]]
        found[first:stop] = line + step * part[first:stop, None]
    return found


def _neighbours(
    at: NDArray[np.float64], length: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], FloatArray]:
    """The pixels on both sides of each place, and how far it is from the first to the second."""
    at = np.clip(at, 0, length - 1)
    lower = np.floor(at).astype(np.intp)
    return lower, np.minimum(lower + 1, length - 1), (at - lower).astype(np.float32)


def scene_folders(data_root: Path, split: Literal["train", "validation"]) -> dict[str, Path]:
    """The scenes of a split by name, sorted: the folders of ROOT/train, or ROOT/training."""
    names = {"train": ("train", "training"), "validation": ("validation", "val")}[split]
    folder = next((data_root / name for name in names if (data_root / name).is_dir()), None)
    if folder is None:
        raise UsageError(f"--data-root {data_root} has no folder {' or '.join(names)}")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    return {path.name: path for path in found}


# --- labels ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of one scene, in the order of the file. What the file leaves empty is unknown."""

    points: FloatArray
    """Row and column in the scene, shape (n, 2)."""
    is_vessel: NDArray[np.int8]
    """-1 unknown, 0, 1."""
    is_fishing: NDArray[np.int8]
    """-1 unknown, 0, 1."""
    length_m: FloatArray
    """NaN unknown."""
    confidence: NDArray[np.int8]
    """0 LOW, 1 MEDIUM, 2 HIGH."""
    shore_km: FloatArray
    """Distance from shore; 9999.99 where there is none, NaN unknown."""
    lines: NDArray[np.int32]
    """Line of the file, from 1 with its header."""

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, which: NDArray[Any] | slice) -> Labels:
        return Labels(*(getattr(self, field.name)[which] for field in fields(self)))

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Labels:
        """From rows of row, column, is_vessel, is_fishing, length, confidence, shore, line."""
        table = np.asarray(rows, np.float64).reshape(len(rows), 8)
        return cls(
            table[:, :2].astype(np.float32),
            table[:, 2].astype(np.int8),
            table[:, 3].astype(np.int8),
            table[:, 4].astype(np.float32),
            table[:, 5].astype(np.int8),
            table[:, 6].astype(np.float32),
            table[:, 7].astype(np.int32),
        )

    def check_inside(self, size: tuple[int, int], scene: str, path: Path) -> None:
        """Refuse a point that is not in the scene."""
        outside = np.any((self.points < 0) | (self.points >= np.array(size)), axis=1)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            row, column = self.points[first]
            raise UsageError(
                f"{path} line {self.lines[first]}: row {row:g}, column {column:g} is outside scene "
                f"{scene}, which has {size[0]} x {size[1]} pixels"
            )


def read_labels(path: Path) -> dict[str, Labels]:
    """The labels of every scene that a CSV names, sorted by scene."""
    rows: dict[str, list[list[float]]] = {}
    for line, row in label_rows(path):
        try:
            numbers: list[float] = [
                _number(row, "detect_scene_row"),
                _number(row, "detect_scene_column"),
                ternary(row["is_vessel"]),
                ternary(row["is_fishing"]),
                _number(row, "vessel_length_m", empty=math.nan),
                _one_of(row, "confidence", CONFIDENCE),
                _number(row, "distance_from_shore_km", empty=math.nan),
                line,
            ]
            scene = row["scene_id"]
            if not scene:
                raise ValueError("scene_id is empty")
        except ValueError as error:
            raise UsageError(f"{path} line {line}: {error}") from None
        rows.setdefault(scene, []).append(numbers)
    return {scene: Labels.of(rows[scene]) for scene in sorted(rows)}


def label_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line and cells of each row of a label CSV whose columns are those of labels."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file, restval="")
            names = reader.fieldnames or []
            if unknown := [name for name in names if name not in {*COLUMNS, *_INDEX_COLUMNS}]:
                raise UsageError(f"{path} has a column {unknown[0]!r}, which labels do not have")
            if lacking := [name for name in NEEDED if name not in names]:
                raise UsageError(f"{path} has no column {lacking[0]}")
            for row in reader:
                if None in row:
                    raise UsageError(f"{path} line {reader.line_num} has more cells than columns")
                yield reader.line_num, row
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is no CSV: {describe(error)}") from error


def _number(row: Mapping[str, str], name: str, empty: float | None = None) -> float:
    text = row[name].strip()
    if text.lower() in ("", "nan") and empty is not None:
        return empty
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {text!r}, no number")
    return number


def ternary(text: str) -> int:
    """1, 0 or -1 for True, False or nothing."""
    known = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0, "": UNKNOWN, "nan": UNKNOWN}
    if text.strip().lower() not in known:
        raise ValueError(f"{text!r} may be True, False or empty")
    return known[text.strip().lower()]


def _one_of(row: Mapping[str, str], name: str, words: tuple[str, ...]) -> int:
    text = row[name].strip().upper()
    if text not in words:
        raise ValueError(f"{name} is {row[name]!r}; it may be {', '.join(words)}")
    return words.index(text)


# --- writing scenes that never were ----------------------------------------------------------

TIFF: dict[str, dict[str, Any]] = {
    "strips": {"tiled": False},
    "deflate": {"tiled": False, "compress": "deflate", "zlevel": 1},
    "tiled": {"tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate",
              "zlevel": 1},
}  # fmt: skip
"""How the pixels of the 10 m rasters lie in their files. The accounts of the real ones differ."""
_FOLDERS = ("train", "validation", "labels", "shoreline")


def write_data_set(
    root: Path,
    size: tuple[int, int],
    *,
    scenes: int,
    validation: int,
    objects: int,
    tiff: str,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, int]:
    """Synthetic scenes in the layout of xView3; how many labels each split has.

    ROOT/train, ROOT/validation, ROOT/labels/{train,validation}.csv, ROOT/shoreline/.
    """
    try:
        for folder in _FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
        facts = {"size": size, "scenes": scenes, "validation": validation, "seed": seed}
        (root / SYNTHETIC).write_text(json.dumps(facts) + "\n")
    except OSError as error:
        raise UsageError(f"OUT {root} cannot be written: {error.strerror}") from error
    counts, done = {}, 0
    for split, numbers in (
        ("train", range(scenes - validation)),
        ("validation", range(scenes - validation, scenes)),
    ):
        rows: list[dict[str, str]] = []
        for number in numbers:
            digest = hashlib.sha256(f"{seed} {number}".encode()).hexdigest()
            name, scene_seed = digest[:16] + split[0], int(digest[16:24], 16)
            scene = SyntheticScene(size, scene_seed, objects)
            rows += write_scene(root / split / name, scene, tiff)
            write_shoreline(shoreline_path(root / "shoreline", name), scene.shoreline)
            done += 1
            progress(done)
        counts[split] = len(rows)
        with (root / "labels" / f"{split}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return counts


SYNTHETIC = "synthetic.json"
"""Says of a folder that it was made here and may be replaced; nothing else is ever removed."""


def clear_data_set(root: Path, overwrite: bool) -> None:
    """Make way for synthetic scenes: refuse what is there, or remove it if it may be."""
    if not root.exists():
        return
    if not root.is_dir():
        raise UsageError(f"OUT {root} is not a folder")
    there = {path.name for path in root.iterdir()}
    if not there:
        return
    if SYNTHETIC not in there:
        raise UsageError(f"OUT {root} exists and holds no synthetic scenes; nothing was removed")
    if not overwrite:
        raise UsageError(f"OUT {root} exists; use --overwrite to replace it")
    if strangers := sorted(there - {SYNTHETIC, *_FOLDERS}):
        raise UsageError(f"OUT {root} holds {strangers[0]} beside its scenes; nothing was removed")
    for name in there - {SYNTHETIC}:
        shutil.rmtree(root / name)


def write_scene(folder: Path, scene: SyntheticScene, tiff: str = "strips") -> list[dict[str, str]]:
    """The rasters of a synthetic scene; the rows of its labels are returned."""
    rasterio = require("rasterio", "scenes")
    folder.mkdir(parents=True, exist_ok=True)
    height, width = scene.size
    rng = np.random.default_rng([scene.seed, 2])
    zone, south = int(rng.integers(1, 61)), bool(rng.random() < 0.5)
    crs = f"EPSG:32{7 if south else 6}{zone:02d}"
    west, north = 300_000.0, float(rng.integers(300, 700) * 10_000)
    common = {"driver": "GTiff", "count": 1, "dtype": "float32", "nodata": NODATA, "crs": crs}
    fine = rasterio.Affine(PIXEL_M, 0, west, 0, -PIXEL_M, north)
    # The real rasters hold 16-bit floats, and so do these.
    layout = {**common, **TIFF[tiff], "height": height, "width": width, "transform": fine,
              "nbits": 16, "BIGTIFF": "IF_SAFER"}  # fmt: skip
    with (
        rasterio.open(folder / "VH_dB.tif", "w", **layout) as vh_file,
        rasterio.open(folder / "VV_dB.tif", "w", **layout) as vv_file,
    ):
        for first, vh, vv in scene.strips():
            rows = (first, first + len(vh))
            for file, values in ((vh_file, vh), (vv_file, vv)):
                file.write(np.nan_to_num(values, nan=NODATA), 1, window=(rows, (0, width)))
    layout = {**common, "transform": rasterio.Affine(COARSE_M, 0, west, 0, -COARSE_M, north)}
    for name, values in _coarse_maps(scene).items():
        layout |= {"height": values.shape[0], "width": values.shape[1]}
        with rasterio.open(folder / name, "w", **layout) as file:
            file.write(np.nan_to_num(values, nan=NODATA), 1)
    to_earth = require("rasterio.warp", "scenes").transform
    eastings = [west + PIXEL_M * (target.column + 0.5) for target in scene.targets]
    northings = [north - PIXEL_M * (target.row + 0.5) for target in scene.targets]
    places = to_earth(crs, "EPSG:4326", eastings, northings)
    return [
        _label_row(folder.name, number, target, longitude, latitude, rng)
        for number, (target, longitude, latitude) in enumerate(
            zip(scene.targets, places[0], places[1], strict=True)
        )
    ]


def _coarse_maps(scene: SyntheticScene) -> dict[str, FloatArray]:
    """The 500 m rasters. The wind is known at sea only, and not in all of it."""
    step = COARSE_M // PIXEL_M // PITCH
    rows, columns = (-(-side * PIXEL_M // COARSE_M) for side in scene.size)

    def sampled(nodes: NDArray[Any]) -> FloatArray:
        """Means over each pixel of 500 m, whose corners are nodes."""
        nodes = (nodes[:-1] + nodes[1:]) / 2
        nodes = (nodes[:, :-1] + nodes[:, 1:]) / 2
        padding = [(0, max(0, n * step - have)) for n, have in zip((rows, columns), nodes.shape,
                                                                   strict=True)]  # fmt: skip
        padded = np.pad(nodes, padding, mode="edge")[: rows * step, : columns * step]
        return np.asarray(padded.reshape(rows, step, columns, step).mean((1, 3)), np.float32)

    depth, rough = sampled(scene.elevation), sampled(scene.roughness)
    land = depth > 0
    unknown = np.where(land | (rough > 1.5), np.float32(np.nan), np.float32(0))
    # Averaging degrees is right here: the field is not wrapped before.
    direction = sampled(scene.wind_direction) % 360
    return {
        "bathymetry.tif": depth,
        "owiWindSpeed.tif": np.maximum(sampled(scene.wind_speed), np.float32(0.1)) + unknown,
        "owiWindDirection.tif": direction + unknown,
        "owiWindQuality.tif": np.digitize(rough, [-1, 0, 1]).astype(np.float32) + unknown,
        "owiMask.tif": land.astype(np.float32),
    }


def _label_row(
    scene: str,
    number: int,
    target: Target,
    longitude: float,
    latitude: float,
    rng: np.random.Generator,
) -> dict[str, str]:
    """A row of the CSV with the gaps of real ones: AIS knows length and gear, eyes may not."""
    faint = target.contrast_db < 9
    confidence = "LOW" if faint else "MEDIUM" if target.contrast_db < 12 else "HIGH"
    source = ("ais", "ais/manual", "manual")[rng.choice(3, p=[0.3, 0.3, 0.4])]
    manual = source == "manual"
    vessel, gear = str(target.kind != "platform"), str(target.kind == "fishing")
    chance = rng.random(3)
    if target.kind == "platform" or (manual and chance[0] < 0.6):
        gear = ""
    if manual and faint and chance[1] < 0.4:
        vessel = gear = ""
    length = "" if manual and chance[2] < 0.6 else f"{target.length_m:.1f}"
    shore = target.shore_km if np.isfinite(target.shore_km) else NO_SHORE_KM
    return dict.fromkeys(COLUMNS, "") | {
        "detect_lat": f"{latitude:.6f}",
        "detect_lon": f"{longitude:.6f}",
        "vessel_length_m": length,
        "source": source,
        "detect_scene_row": str(round(target.row)),
        "detect_scene_column": str(round(target.column)),
        "is_vessel": vessel,
        "is_fishing": gear,
        "distance_from_shore_km": f"{shore:.2f}",
        "scene_id": scene,
        "confidence": confidence,
        "detect_id": f"{scene}_{number:03d}",
    }
