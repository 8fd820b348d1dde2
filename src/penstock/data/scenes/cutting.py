"""One scene cut into chips, whole or not at all: its manifest is removed first and written last."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base import Stopped, UsageError, require, write_json
from .chips import (
    ARRAY,
    FORMAT,
    MANIFEST,
    VERSION,
    metadata,
    read_document,
    shard_path,
    synced,
    write_shard,
)
from .objects import Objects
from .scene import CHANNELS, Scene, radar_of
from .windows import cuts_of, read_row

Result = tuple[dict[str, Any], bool]
"""The manifest of a scene, and whether its chips existed before."""


@dataclass(frozen=True, slots=True)
class SceneJob:
    """One scene, and how it is cut."""

    folder: Path
    labels: Objects
    label_file: Path
    """The file that the labels are from."""
    out: Path
    """The folder of its chips."""
    settings: Mapping[str, Any]
    overwrite: bool
    """True if chips of other settings are replaced."""

    def run(self, stop: threading.Event, into: Path | None = None) -> Result:
        """Cut the scene, unless that was done before.

        Args:
            stop: once it is set, the cut ends at its next row.
            into: a folder to write to in place of ``out``.

        Returns:
            The manifest of the scene, and whether its chips existed before.

        Raises:
            UsageError: the labels, or existing chips, do not fit.
            Stopped: the cut was stopped.
        """
        env = require("rasterio", "scenes").Env
        # GDAL would keep a twentieth of the memory in blocks that are never read again.
        with env(GDAL_CACHEMAX=64), Scene(self.folder, self.settings["channels"]) as scene:
            self.labels.check_inside(scene.size, self.label_file)
            manifest = _manifest(scene, self.labels, self.settings)
            earlier = earlier_manifest(self.out / MANIFEST, manifest, self.overwrite)
            if earlier is not None:
                return earlier, True
            return _cut_scene(scene, manifest, into or self.out, stop), False


def _manifest(scene: Scene, labels: Objects, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a scene's chips depend on. The cut adds the numbers of valid pixels."""
    stats = {name: (scene.folder / CHANNELS[name].file).stat() for name in scene.channels}
    return {
        "format": FORMAT,
        "version": VERSION,
        "scene": scene.name,
        "size": list(scene.size),
        **settings,
        "inputs": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "labels": labels.as_lists(),
    }


def earlier_manifest(
    path: Path, manifest: Mapping[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """The manifest of an earlier run, if there is one.

    Args:
        path: the path of the manifest.
        manifest: that of this run, without what the cut adds.
        overwrite: whether chips of other settings are replaced.

    Returns:
        The manifest; None if the scene is to be cut.

    Raises:
        UsageError: it is of other inputs or settings.
    """
    if overwrite or not path.exists():
        return None
    earlier = read_document(path)
    differing = [key for key in manifest if earlier.get(key) != manifest[key]]
    if differing:
        raise UsageError(
            f"{path.parent} was made with other {differing[0]}; "
            "use --overwrite-preproc to replace it"
        )
    return earlier


def _cut_scene(
    scene: Scene, manifest: dict[str, Any], out: Path, stop: threading.Event
) -> dict[str, Any]:
    """Write one scene's chips and its manifest."""
    # The manifest is removed first and written last: a scene without one counts as not cut.
    (out / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(out / ARRAY, ignore_errors=True)
    radar, chip = radar_of(scene.channels), manifest["chip_size"]
    rows, columns = cuts_of(scene.size, chip, manifest["overlap"])
    shape = (rows.num, columns.num, len(radar), chip, chip)
    (out / ARRAY).mkdir(parents=True)
    dtype = manifest["dtype"]
    write_json(out / ARRAY / "zarr.json", metadata(shape, dtype), indent=None)
    valid = np.zeros(shape[:2], np.int64)
    # Two, so that one is written while the other is filled.
    bands = [np.full(shape[1:], np.nan, dtype) for _ in range(min(2, rows.num))]
    written: list[Future[None]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="write") as writer:
        for index in _rows(rows.num, stop):
            if index > 1:
                written[index - 2].result()
            band = bands[index % 2]
            valid[index] = read_row(scene, radar, rows.read(index), columns, band)
            written.append(writer.submit(write_shard, shard_path(out / ARRAY, index), band))
    for write in written:
        write.result()
    for name, raster in scene.coarse.items():
        with synced(out / f"{name}.npy") as file:
            np.save(file, raster.values)
    places = {name: [*raster.origin, *raster.step] for name, raster in scene.coarse.items()}
    manifest |= {"valid_pixels": valid.tolist(), "coarse": places}
    if any(scene.dtype(name).itemsize > np.dtype(dtype).itemsize for name in radar):
        manifest["rounded"] = True
    write_json(out / MANIFEST, manifest, indent=None)
    return manifest


def _rows(num: int, stop: threading.Event) -> Iterator[int]:
    for index in range(num):
        if stop.is_set():
            raise Stopped
        yield index
