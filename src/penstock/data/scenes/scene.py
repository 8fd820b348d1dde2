"""The xView3 data set on disk: a scene is a folder of rasters.

    ROOT/train/05bc615a9b0e1159t/VH_dB.tif          10 m, sigma0 in dB, UTM
                                 VV_dB.tif
                                 bathymetry.tif     500 m, metres
                                 owiWindSpeed.tif, owiWindDirection.tif, ...
    ROOT/validation/590dd08f71056cacv/...
    ROOT/05bc615a9b0e1159t_shoreline.npy            contours of (row, column), see `shoreline`
    train.csv                                       a point for each object, see `objects`

A `Scene` reads windows: its 655 megapixels are never in memory at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...base import UsageError, as_usage_error, require
from .coarse import Coarse, read_coarse
from .rasters import Pixels, Values, check_raster, check_same_grid, is_placed, pixel_metres

PIXEL_M, COARSE_M = 10, 500


@dataclass(frozen=True, slots=True)
class Raster:
    """One channel: its file, and how it is scaled for a model."""

    file: str
    kind: Literal["radar", "linear", "nearest", "degrees"]
    """The way its values reach a window of 10 m pixels: as they are, or interpolated."""
    offset: float
    scale: float
    """A model sees ``(value - offset) / scale``: the same in every scene and chip."""
    units: tuple[str, ...] = ()
    """The unit of its values as a file may spell it, in small letters."""
    zero_is_missing: bool = False


DB = ("db", "decibel", "decibels")
METRES = ("m", "metre", "metres", "meter", "meters")
SPEED = ("m/s", "m s-1", "m.s-1", "ms-1", "m s**-1", "m s^-1")
DEGREES = ("degrees", "degree", "deg", "°")
CHANNELS = {
    "vh": Raster("VH_dB.tif", "radar", -40, 15, DB),
    "vv": Raster("VV_dB.tif", "radar", -40, 15, DB),
    "bathymetry": Raster("bathymetry.tif", "linear", 0, 1000, METRES),
    "wind_speed": Raster("owiWindSpeed.tif", "linear", 0, 20, SPEED, zero_is_missing=True),
    "wind_direction": Raster("owiWindDirection.tif", "degrees", 0, 360, DEGREES),
    "wind_quality": Raster("owiWindQuality.tif", "nearest", 0, 3),
    "mask": Raster("owiMask.tif", "nearest", 0, 1),
}


def channels_of(text: str) -> tuple[str, ...]:
    """The names in ``vh,vv,bathymetry``.

    Raises:
        UsageError: There is no such channel, one is given twice, or no radar is among them.
    """
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
    """The channels of 10 m among these."""
    return tuple(name for name in channels if CHANNELS[name].kind == "radar")


class Scene(AbstractContextManager["Scene"]):
    """The rasters of one scene, opened; reads windows. One thread at a time.

    Raises `UsageError`, naming the file, for a raster that is missing, corrupt or of another size.
    """

    def __init__(self, folder: Path, channels: Sequence[str]) -> None:
        self.folder, self.name, self.channels = folder, folder.name, tuple(channels)
        self._files: dict[str, Any] = {}
        self.radar: dict[str, Pixels] = {}
        """The rasters of 10 m, which are read by windows."""
        # The radar gives the 10 m grid, even if only 500 m rasters are asked for.
        radar = radar_of(channels) or ("vh",)
        try:
            names = dict.fromkeys([*radar, *channels])
            paths = {name: folder / CHANNELS[name].file for name in names}
            for name, path in paths.items():
                self._files[name] = self._open(path)
                check_raster(path, self._files[name], CHANNELS[name].units)
            first_path, first = paths[radar[0]], self._files[radar[0]]
            self.size: tuple[int, int] = (first.height, first.width)
            """Rows and columns of 10 m."""
            for name in radar:
                check_same_grid(paths[name], self._files[name], first_path, first)
                self.radar[name] = Pixels(paths[name], self._files[name])
            self.notes = _notes(first)
            """Things to know of the scene, in words."""
            self.coarse: dict[str, Coarse] = {
                name: read_coarse(
                    paths[name],
                    self._files[name],
                    first_path,
                    first,
                    kind=CHANNELS[name].kind,
                    zero_is_missing=CHANNELS[name].zero_is_missing,
                )
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
        with (
            as_usage_error(
                f"{path} is not a raster that can be read", rasterio.errors.RasterioIOError
            ),
            warnings.catch_warnings(),
        ):
            # `_notes` says it.
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            return rasterio.open(path)

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Values:
        """A channel's values in a window of 10 m pixels; NaN where they are missing.

        Args:
            name: a channel of this scene.
            rows: half-open, inside the scene.
            columns: half-open, inside the scene.

        Returns:
            Values in the channel's unit, shape (rows, columns).

        Raises:
            UsageError: the raster cannot be read there.
        """
        if CHANNELS[name].kind == "radar":
            return self.radar[name].read(rows, columns)
        return self.coarse[name].read(rows, columns)

    def close(self) -> None:
        """Close the files."""
        self.radar.clear()
        for file in self._files.values():
            file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def _notes(radar: Any) -> list[str]:
    """What a user should know of the place of a scene."""
    if not is_placed(radar):
        return ["the rasters have no place on Earth and are taken to cover the same ground"]
    if not radar.crs:
        return ["the rasters name no coordinate system (CRS), and are taken to share one"]
    sides = pixel_metres(radar)
    if sides is None or all(abs(side / PIXEL_M - 1) < 0.02 for side in sides):
        return []
    grid = f"{sides[0]:.3g} x {sides[1]:.3g} m"
    return [f"pixels are {grid}; boxes, distances and scores count {PIXEL_M} m for each"]


Split = Literal["train", "validation"]

SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "val"),
}
"""Names that the folder of a split may have."""


def split_folder(data_root: Path, split: Split) -> Path:
    """The folder of a split: ROOT/train or ROOT/training, ROOT/validation or ROOT/val.

    Args:
        data_root: the folder of the data set.
        split: ``train`` or ``validation``.

    Returns:
        The folder.

    Raises:
        UsageError: there is none.
    """
    names = SPLITS[split]
    for name in names:
        if (data_root / name).is_dir():
            return data_root / name
    raise UsageError(f"--data-root {data_root} has no folder {' or '.join(names)}")


def scene_folders(data_root: Path, split: Split) -> dict[str, Path]:
    """The scenes of a split.

    Args:
        data_root: the folder of the data set.
        split: ``train`` or ``validation``.

    Returns:
        The folder of each scene by its name, sorted.

    Raises:
        UsageError: there is no folder of this split.
    """
    return scenes_in(split_folder(data_root, split))


def scenes_in(folder: Path) -> dict[str, Path]:
    """The scenes of a folder by name, sorted: all folders in it that have a raster."""
    files = [channel.file for channel in CHANNELS.values()]
    scenes = (path for path in folder.iterdir() if any((path / file).is_file() for file in files))
    return {path.name: path for path in sorted(scenes)}
