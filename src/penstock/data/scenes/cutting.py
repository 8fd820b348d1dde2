"""One scene cut into chips, whole or not at all: they are written into a draft of its folder, which
is moved into place once it is whole. So a worker that only seemed dead and goes on does no harm."""

from __future__ import annotations

import itertools
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import StageError, Stopped, UsageError, begin_output, require, write_json
from .chips import (
    ARRAY,
    FORMAT,
    MANIFEST,
    VERSION,
    metadata,
    read_chunk,
    read_document,
    shard_path,
    synced,
    write_shard,
)
from .objects import Objects
from .rasters import is_missing
from .scene import CHANNELS, Scene, radar_of
from .windows import ChipRecord, Cut, read_row


@dataclass(frozen=True, slots=True)
class SceneJob:
    """One scene, and how it is cut."""

    folder: Path
    labels: Objects
    label_file: Path
    """The file that the labels are from."""
    out: Path
    """The folder of its chips, which is absent or has chips."""
    record: ChipRecord

    def run(self, stop: threading.Event) -> dict[str, Any]:
        """Cut the scene, unless that was done before.

        Args:
            stop: once it is set, the cut ends at its next row.

        Returns:
            The manifest of the scene.

        Raises:
            UsageError: the labels, or existing chips, do not fit.
            Stopped: the cut was stopped.
        """
        env = require("rasterio", "scenes").Env
        # GDAL would keep a twentieth of the memory in blocks that are never read again.
        with env(GDAL_CACHEMAX=64), Scene(self.folder, self.record.channels) as scene:
            self.labels.check_inside(scene.size, self.label_file)
            manifest = _manifest(scene, self.labels, self.record)
            earlier = earlier_manifest(self.out / MANIFEST, manifest)
            if earlier is None:
                return self._cut(scene, manifest, stop)
            if earlier["inputs"] != manifest["inputs"]:  # of another time
                if not _holds(self.out, earlier, scene, self.record, stop):
                    raise UsageError(_other("inputs", self.out))
                earlier["inputs"] = manifest["inputs"]
                write_json(self.out / MANIFEST, earlier, indent=None)
            return earlier

    def _cut(self, scene: Scene, manifest: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        draft = self.out.with_name(f".penstock-{secrets.token_hex(8)}.part")
        try:
            draft.mkdir(parents=True)
            begin_output(draft)
            return moved(draft, self.out, _cut_scene(scene, self, manifest, draft, stop))
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def cut_task(job: SceneJob, stop: threading.Event | None = None) -> dict[str, Any]:
    """Cut one scene, in a thread or on a worker of a cluster.

    Args:
        job: the scene.
        stop: once it is set, the cut ends at its next row.

    Returns:
        Its manifest.

    Raises:
        UsageError: an input does not fit.
        Stopped: the cut was stopped.
        StageError: the scene failed.
    """
    try:
        return job.run(stop or threading.Event())
    except (UsageError, Stopped):
        raise
    except Exception as error:
        raise StageError("preprocess", f"scene {job.out.name}", error) from error


def moved(draft: Path, out: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Move a scene's chips into place, unless another worker was first; the manifest of those that
    are there. A folder is renamed in one step, and onto no other that has files."""
    try:
        draft.rename(out)
    except OSError:
        if (earlier := earlier_manifest(out / MANIFEST, manifest)) is None:
            raise
        return earlier
    return manifest


def _manifest(scene: Scene, labels: Objects, record: ChipRecord) -> dict[str, Any]:
    """Everything that a scene's chips depend on. The cut adds what it counts."""
    stats = {name: (scene.folder / CHANNELS[name].file).stat() for name in scene.channels}
    return {
        "format": FORMAT,
        "version": VERSION,
        "scene": scene.name,
        "size": list(scene.size),
        **record.as_document(),
        "inputs": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "labels": labels.as_lists(),
    }


def earlier_manifest(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of an earlier run, if there is one.

    Args:
        path: the path of the manifest.
        manifest: that of this run, without what the cut adds.

    Returns:
        The manifest; None if the scene is to be cut.

    Raises:
        UsageError: it is of other settings, or of inputs of other sizes.
    """
    if not path.exists():
        return None
    earlier = read_document(path)
    before, now = (
        {**of, "inputs": {name: size for name, (size, _) in of["inputs"].items()}}
        for of in (earlier, manifest)
    )
    if differing := [key for key in now if before.get(key) != now[key]]:
        raise UsageError(_other(differing[0], path.parent))
    return earlier


def _other(what: str, out: Path) -> str:
    return f"{out} was made with other {what}; use --overwrite-preproc to replace it"


def _holds(
    out: Path, earlier: Mapping[str, Any], scene: Scene, record: ChipRecord, stop: threading.Event
) -> bool:
    """Whether existing chips have the values that the scene's rasters have now."""
    rows, columns = record.cuts(scene.size)
    band = record.empty_band(columns)
    for index in _rows(rows.num, stop):
        read_row(scene, rows, index, columns, band)
        shard = shard_path(out / ARRAY, index)
        if any(chip.tobytes() != read_chunk(shard, i, columns.num) for i, chip in enumerate(band)):
            return False
    return all(
        earlier["coarse"][name] == [*raster.origin, *raster.step]
        and np.array_equal(np.load(out / f"{name}.npy"), raster.values, equal_nan=True)
        for name, raster in scene.coarse.items()
    )


def _cut_scene(
    scene: Scene, job: SceneJob, manifest: dict[str, Any], out: Path, stop: threading.Event
) -> dict[str, Any]:
    """Write one scene's chips and its manifest."""
    radar, record = radar_of(scene.channels), job.record
    rows, columns = record.cuts(scene.size)
    (out / ARRAY).mkdir()
    # Two, so that one is written while the other is filled.
    bands = [record.empty_band(columns) for _ in range(min(2, rows.num))]
    shape = (rows.num, *bands[0].shape)
    write_json(out / ARRAY / "zarr.json", metadata(shape, record.dtype), indent=None)
    valid, of_channels, unseen = np.zeros(shape[:2], np.int64), np.zeros(len(radar), np.int64), 0
    below, written = np.zeros(len(radar), np.bool_), list[Future[None]]()
    with ThreadPoolExecutor(1, thread_name_prefix="write") as writer:
        for index in _rows(rows.num, stop):
            if index > 1:
                written[index - 2].result()
            band = bands[index % 2]
            valid[index], here = read_row(scene, rows, index, columns, band)
            of_channels += here
            if not below.all():
                below |= np.signbit(band).any(axis=(0, 2, 3))
            unseen += _unseen(job.labels, rows, index, columns, band)
            written.append(writer.submit(write_shard, shard_path(out / ARRAY, index), band))
    for write in written:
        write.result()
    for name, raster in scene.coarse.items():
        with synced(out / f"{name}.npy") as file:
            np.save(file, raster.values)
    places = {name: [*raster.origin, *raster.step] for name, raster in scene.coarse.items()}
    by_channel = dict(zip(radar, of_channels.tolist(), strict=True))
    by_channel |= {name: of.count_valid(scene.size) for name, of in scene.coarse.items()}
    manifest |= {
        "valid_pixels": valid.tolist(),
        "valid_by_channel": {name: by_channel[name] for name in scene.channels},
        "labels_unseen": unseen,
        "notes": [*scene.notes, *_not_decibels(radar, (of_channels > 0) & ~below)],
        "coarse": places,
    }
    if any(scene.radar[name].dtype.itemsize > np.dtype(record.dtype).itemsize for name in radar):
        manifest["rounded"] = True
    write_json(out / MANIFEST, manifest, indent=None)
    return manifest


def _not_decibels(radar: Sequence[str], positive: NDArray[Any]) -> Iterator[str]:
    """Notes on the radar channels of which no value is below 0."""
    for name in itertools.compress(radar, positive):
        yield f"{CHANNELS[name].file} has no value below 0, as the sea has in dB: is it in dB?"


def _unseen(labels: Objects, rows: Cut, index: int, columns: Cut, band: NDArray[Any]) -> int:
    """The labels in the cores of a row of windows at whose pixel the radar has no value."""
    first, stop = rows.core(index)
    points = labels.points[(labels.points[:, 0] >= first) & (labels.points[:, 0] < stop)]
    down, right = points.astype(np.intp).T
    begins = np.array([columns.core(number)[0] for number in range(columns.num)])
    window = np.searchsorted(begins, right, "right") - 1
    starts = np.array([columns.start(number) for number in range(columns.num)])
    values = band[window, :, down - rows.start(index), right - starts[window]]
    return int(is_missing(values).any(axis=1).sum())


def _rows(num: int, stop: threading.Event) -> Iterator[int]:
    for index in range(num):
        if stop.is_set():
            raise Stopped
        yield index
