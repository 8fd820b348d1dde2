"""Synthetic radar scenes: sea, ships, land; written in the layout of xView3.

A stand-in for xView3, so that preprocessing, training and scores can be tried without two
terabytes. One seed always gives the same numbers. The scenes hold what a detector must learn, but
not everything that an oceanographer would expect.

    sigma0 = (sea x texture + hulls  or  land) x speckle + noise of the instrument
             sea:    falls with incidence, varies with the wind, K-distributed: gamma x gamma
             hulls:  bright ellipses, brighter with length; fishing boats are small and depolarise,
                     platforms are round and no vessels

Coordinates are (row, column) of pixels of 10 m. A scene is made strip by strip, so that one of
30,000 x 30,000 pixels needs no more memory than its strips and the maps at `PITCH`.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, plural, remove, require, system_errors
from ..packed.data_folder import check_room, check_strangers, names_to_replace
from .objects import COLUMNS, NO_SHORE_KM
from .rasters import NODATA, FloatArray
from .scene import COARSE_M, PIXEL_M
from .shoreline import shoreline_path, write_shoreline

Kind = Literal["fishing", "vessel", "platform"]

PITCH = 10
"""Pixels along a side of a cell of the maps of elevation and wind."""
STRIP = 256
"""Rows that are made at once."""
LOOKS = 4.4
"""Equivalent number of looks of a Sentinel-1 GRD product: the shape of its gamma speckle."""
REACH = 40
"""Distance in pixels beyond which a target leaves no trace."""
APART = 25
"""Least pixels between two labelled targets."""
_KINDS: tuple[Kind, ...] = ("fishing", "vessel", "platform")
_LENGTHS = {"fishing": (14, 60), "vessel": (50, 380), "platform": (30, 120)}
_VV_DB = {"fishing": -9.0, "vessel": -4.0, "platform": 3.0}
_VH_BELOW_VV = {"fishing": 5.0, "vessel": 8.0, "platform": 13.0}


@dataclass(frozen=True, slots=True)
class Target:
    """Something at sea that has a label."""

    row: float
    column: float
    kind: Kind
    length_m: float
    heading: float
    """Radians, from down the rows towards right along the columns."""
    vv_db: float
    """Peak sigma0, before speckle."""
    vh_db: float
    contrast_db: float
    """Decibels of the peak above the usual sea, in the better channel."""
    shore_km: float
    """Distance to the nearest vertex of the shoreline; infinite where there is none."""


class SyntheticScene:
    """One scene. Its maps and targets are made at once, its pixels by `strips`."""

    def __init__(self, size: tuple[int, int], seed: int, num_targets: int = 40) -> None:
        if min(size) < 4 * PITCH:
            raise UsageError(f"--size {size[0]} {size[1]}: each side must be at least {4 * PITCH}")
        self.size, self.seed = size, seed
        rng = np.random.default_rng([seed, 0])
        cells = (-(-size[0] // PITCH), -(-size[1] // PITCH))
        self.elevation = _elevation(cells, rng)
        """Metres in each cell, above 0 on land, shape (rows / PITCH, columns / PITCH)."""
        self.roughness = _smooth_noise(cells, 1.6, rng).astype(np.float32)
        """The wind's trace on the sea, in dB."""
        self._sea_vv_db = float(rng.uniform(-18, -14))
        self._sea_vh_db = self._sea_vv_db - 10
        self.shoreline = _contours(self.elevation)
        """Arrays of shape (n, 2), row and column; none in open sea."""
        self.targets = self._place(num_targets, rng)

    def strips(self) -> Iterator[tuple[int, FloatArray, FloatArray]]:
        """The first row of each strip, its VH and its VV in dB, shape (rows, columns), from top to
        bottom; NaN outside the swath."""
        for first in range(0, self.size[0], STRIP):
            rows = np.arange(first, min(first + STRIP, self.size[0]))
            yield first, *self._strip(rows, np.random.default_rng([self.seed, 1, first]))

    def _strip(
        self, rows: NDArray[np.intp], rng: np.random.Generator
    ) -> tuple[FloatArray, FloatArray]:
        columns = np.arange(self.size[1])
        cells = np.ix_(rows // PITCH, columns // PITCH)
        land, wind = self.elevation[cells] > 0, self.roughness[cells]
        texture = rng.standard_gamma(8, land.shape, np.float32) / 8
        swath = np.linspace(2.5, -2.5, self.size[1], dtype=np.float32)
        vv = np.where(land, _linear(1.5 * wind - 10), _linear(wind + swath + self._sea_vv_db))
        vh = np.where(land, vv / 5, _linear(wind + swath / 2 + self._sea_vh_db))
        vv, vh = vv * texture, vh * texture
        for target in self.targets:
            self._draw(target, int(rows[0]), vv, vh)
        decibels = []
        for power, floor in ((vh, 10**-3.3), (vv, 10**-3.0)):
            speckle = rng.standard_gamma(LOOKS, land.shape, np.float32) / LOOKS
            values = 10 * np.log10((power + floor) * speckle + 1e-6)
            values[self._outside(rows[:, None], columns)] = np.nan
            decibels.append(values.astype(np.float32))
        return decibels[0], decibels[1]

    def _draw(self, target: Target, first: int, vv: FloatArray, vh: FloatArray) -> None:
        """Add one target to the strip that begins at row ``first``."""
        top, left = int(target.row) - REACH, int(target.column) - REACH
        rows = slice(max(top - first, 0), max(top - first + 2 * REACH + 1, 0))
        columns = slice(max(left, 0), left + 2 * REACH + 1)
        here = np.s_[rows, columns]
        down = np.arange(first, first + len(vv))[rows, None] - target.row
        right = np.arange(vv.shape[1])[columns] - target.column
        along = down * np.cos(target.heading) + right * np.sin(target.heading)
        across = right * np.cos(target.heading) - down * np.sin(target.heading)
        # No hull is thinner than the radar's own resolution.
        slender = 1 if target.kind == "platform" else 5
        half_length, half_beam = (np.hypot(target.length_m / 10 / n, 1.8) / 2 for n in (1, slender))
        hull = np.exp(-(((along / half_length) ** 2 + (across / half_beam) ** 2) ** 2))
        vv[here] += hull * 10 ** (target.vv_db / 10)
        vh[here] += hull * 10 ** (target.vh_db / 10)

    def _place(self, wanted: int, rng: np.random.Generator) -> tuple[Target, ...]:
        """Targets at random places at sea, far enough from each other."""
        targets: list[Target] = []
        for spot in rng.uniform((2, 2), np.array(self.size) - 3, (80 * wanted + 200, 2)):
            apart = (np.hypot(spot[0] - t.row, spot[1] - t.column) for t in targets)
            cell = tuple((spot // PITCH).astype(int))
            at_sea = self.elevation[cell] < -8 and not self._outside(spot[0], spot[1], 4)
            if len(targets) < wanted and at_sea and min(apart, default=np.inf) >= APART:
                targets.append(self._target(float(spot[0]), float(spot[1]), rng))
        return tuple(targets)

    def _target(self, row: float, column: float, rng: np.random.Generator) -> Target:
        kind = _KINDS[rng.choice(3, p=[0.35, 0.45, 0.2])]
        length = float(np.exp(rng.uniform(*np.log(_LENGTHS[kind]))))
        vv = _VV_DB[kind] + 6 * float(np.log10(length / 50)) + float(rng.normal(0, 3))
        vh = vv - _VH_BELOW_VV[kind] + float(rng.normal())
        above_sea = vv - self._sea_vv_db, vh - self._sea_vh_db
        vertices = np.concatenate([np.full((1, 2), np.inf), *self.shoreline])
        shore = float(np.hypot(*(vertices - (row, column)).T).min()) * 0.01
        heading = float(rng.uniform(0, 2 * np.pi))
        return Target(row, column, kind, length, heading, vv, vh, max(above_sea), shore)

    def _outside(self, rows: Any, columns: Any, margin: float = 0) -> Any:
        """Whether pixels lie outside the swath, which leans as an orbit does."""
        height, width = self.size
        wedge = 0.025 * width
        left = wedge * (1 - rows / height) + margin
        return (columns < left) | (columns >= left + width - wedge - 2 * margin)


def _elevation(cells: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    """Land on one side of most scenes, islands in some, open sea in one of five."""
    angle = rng.uniform(0, 2 * np.pi)
    down, right = np.meshgrid(*(np.linspace(-1, 1, side) for side in cells), indexing="ij")
    slope = down * np.cos(angle) + right * np.sin(angle)
    field = 0.6 * _smooth_noise(cells, 2.2, rng) + 1.2 * slope
    dry = rng.uniform(0.05, 0.3)
    sea_level = float(field.max()) + 0.2 if rng.random() < 0.2 else np.quantile(field, 1 - dry)
    metres = (field - sea_level) * 400
    return np.asarray(np.where(metres < 0, 2 * metres, metres), np.float32)


def _smooth_noise(
    cells: tuple[int, int], slope: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Noise whose amplitude falls with wave number to ``slope``; mean 0, standard deviation 1."""
    wave = np.hypot(np.fft.fftfreq(cells[0])[:, None], np.fft.rfftfreq(cells[1]))
    wave[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(rng.standard_normal(cells)) * wave**-slope, s=cells)
    return np.asarray(field / field.std())


def _contours(elevation: FloatArray) -> list[NDArray[np.float64]]:
    """The shores between land and sea, as lines of (row, column) pixels."""
    lines = require("contourpy", "scenes").contour_generator(z=elevation).lines(0.0)
    return [(np.asarray(line, np.float64)[:, ::-1] + 0.5) * PITCH for line in lines]


def _linear(decibels: NDArray[Any]) -> FloatArray:
    return np.asarray(np.power(np.float32(10), decibels / np.float32(10)), np.float32)


TIFF: dict[str, dict[str, Any]] = {
    "strips": {"tiled": False},
    "deflate": {"tiled": False, "compress": "deflate", "zlevel": 1},
    "tiled": {"tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate",
              "zlevel": 1},
}  # fmt: skip
"""Layouts of the 10 m rasters in their files. Descriptions of the real files differ."""
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
    """Write synthetic scenes in the layout of xView3.

    They are ROOT/train, ROOT/validation, ROOT/labels/{train,validation}.csv and ROOT/shoreline/.

    Args:
        root: the folder to write.
        size: rows and columns of a scene.
        scenes: the number of scenes, of both splits.
        validation: the number of scenes for validation.
        objects: the most objects of a scene.
        tiff: the layout of the 10 m rasters, a key of `TIFF`.
        seed: the random seed.
        progress: called with the number of scenes that are done.

    Returns:
        The number of labels of each split.

    Raises:
        UsageError: the folder cannot be written.
    """
    # GDAL does not tell of a full disk if it meets it as it closes a file.
    check_room(root, 4 * scenes * size[0] * size[1], plural(scenes, "scene"), "--scenes or --size")
    with system_errors(f"OUT {root} cannot be written"):
        for folder in _FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
        facts = {"size": size, "scenes": scenes, "validation": validation, "seed": seed}
        (root / SYNTHETIC).write_text(json.dumps(facts) + "\n")
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
"""The file that marks a folder as made here. Only such a folder may be replaced."""


def clear_data_set(root: Path, overwrite: bool) -> None:
    """Make way for synthetic scenes.

    Args:
        root: the folder that they go to.
        overwrite: remove synthetic scenes that are there.

    Raises:
        UsageError: the folder holds something else, or ``overwrite`` is missing.
    """
    there = names_to_replace(root, [SYNTHETIC], "synthetic scenes", overwrite)
    check_strangers(f"OUT {root}", there - {SYNTHETIC, *_FOLDERS}, "its scenes")
    remove(root / name for name in there - {SYNTHETIC})


def write_scene(folder: Path, scene: SyntheticScene, tiff: str = "strips") -> list[dict[str, str]]:
    """Write the rasters of a synthetic scene; return the rows of its labels."""
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
    middles = np.ix_(*(
        np.minimum(np.arange(step // 2, length + step // 2, step), length - 1)
        for length in scene.elevation.shape
    ))  # fmt: skip
    depth, rough = scene.elevation[middles], scene.roughness[middles]
    wind = np.where((depth > 0) | (rough > 1.5), np.float32(np.nan), rough)
    return {
        "bathymetry.tif": depth,
        "owiWindSpeed.tif": np.maximum(7 + wind, np.float32(0.1)),
        "owiWindDirection.tif": (200 + 15 * wind) % 360,
        "owiWindQuality.tif": np.clip(np.floor(wind + 2), 0, 3),
        "owiMask.tif": (depth > 0).astype(np.float32),
    }


def _label_row(
    scene: str,
    number: int,
    target: Target,
    longitude: float,
    latitude: float,
    rng: np.random.Generator,
) -> dict[str, str]:
    """A row of the CSV with the gaps of real ones: AIS knows length and gear, eyes do not."""
    manual, faint = rng.random() < 0.5, target.contrast_db < 9
    vessel, gear = str(target.kind != "platform"), str(target.kind == "fishing")
    shore = target.shore_km if np.isfinite(target.shore_km) else NO_SHORE_KM
    return dict.fromkeys(COLUMNS, "") | {
        "detect_lat": f"{latitude:.6f}",
        "detect_lon": f"{longitude:.6f}",
        "vessel_length_m": "" if manual else f"{target.length_m:.1f}",
        "source": "manual" if manual else "ais",
        "detect_scene_row": str(round(target.row)),
        "detect_scene_column": str(round(target.column)),
        "is_vessel": "" if manual and faint else vessel,
        "is_fishing": "" if manual or target.kind == "platform" else gear,
        "distance_from_shore_km": f"{shore:.2f}",
        "scene_id": scene,
        "confidence": "LOW" if faint else "MEDIUM" if target.contrast_db < 12 else "HIGH",
        "detect_id": f"{scene}_{number:03d}",
    }
