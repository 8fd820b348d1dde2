"""Writes synthetic scenes in the layout of xView3: rasters, shorelines, labels."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...base import require, system_errors
from ..packed.data_folder import check_strangers, names_to_replace, remove
from .labels import COLUMNS, NO_SHORE_KM
from .rasters import NODATA, FloatArray
from .scene import COARSE_M, PIXEL_M
from .shoreline import shoreline_path, write_shoreline
from .synthetic import PITCH, SyntheticScene, Target

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
