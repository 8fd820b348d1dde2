"""Scenes cut into chips: all of them at once, each whole or not at all.

Threads take one scene each. A scene that an earlier run finished is left as it is; one that was
left half done is cut again. The index of all scenes is written last. `chips` says what lies where.
The other layout, ``reference``, has the files of the xView3 reference.
"""

from __future__ import annotations

import csv
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...base import (
    StageError,
    Stopped,
    UsageError,
    begin_output,
    check_folder,
    check_outputs,
    check_replaceable,
    require,
    to_cell,
    write_json,
    writing_output,
)
from .chips import (
    ARRAY,
    DTYPE,
    FORMAT,
    INDEX,
    MANIFEST,
    VERSION,
    metadata,
    read_document,
    shard_path,
    synced,
    write_shard,
)
from .labels import COLUMNS, label_rows, ternary
from .objects import Objects
from .rasters import NODATA
from .scene import CHANNELS, Scene, radar_of
from .windows import Cut, cuts_of, read_row

COORDS = "coords.json"
Layout = Literal["penstock", "reference"]
Result = tuple[dict[str, Any], bool]
"""The manifest of a scene, and whether all was there before."""


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a split."""

    scenes: int
    chips: int
    """Chips with at least one valid pixel."""
    rounded: int
    """Scenes whose rasters are of more bits than their chips."""
    resumed: int
    """Scenes that an earlier run had finished."""
    labels: int


def preprocess_scenes(
    folders: Mapping[str, Path],
    labels: Mapping[str, Objects],
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
    replace: bool = False,
    dtype: str = DTYPE,
    progress: Callable[[int], None] = lambda done: None,
) -> Done:
    """Cut every scene into chips. A scene that is done is not done again.

    Args:
        folders: the folder of each scene.
        labels: the labels of each scene.
        label_file: the file that they are from.
        out: the folder of the split.
        channels: names of `CHANNELS`.
        chip_size: pixels along a side.
        overlap: pixels that neighbours share.
        layout: ``penstock``, or ``reference`` for the files of the xView3 reference.
        workers: threads; each takes one scene.
        overwrite: replace chips of other settings.
        background: annotate some chips without objects, in the layout ``reference``.
        replace: replace what is not known as ours.
        dtype: of the chips, ``float16`` or ``float32``.
        progress: called with the number of scenes that are done.

    Returns:
        What became of the split.

    Raises:
        UsageError: an input or what is in ``out`` does not fit.
        StageError: a scene failed.
    """
    check_chips_output(out, folders, layout, overwrite, replace)
    settings = {"channels": list(channels), "chip_size": chip_size, "overlap": overlap}
    if dtype != DTYPE and layout == "penstock":  # earlier manifests do not name it
        settings["dtype"] = dtype
    finished = _cut_all(
        folders, labels, label_file, out, settings, layout, workers, overwrite, progress
    )
    manifests = {manifest["scene"]: manifest for manifest, _ in finished}
    done = _done(finished)
    if not done.chips:
        raise UsageError(f"{len(folders)} scenes under {out} give no chip with a valid pixel")
    if layout == "penstock":
        _write_index(out, settings, manifests, replace)
    else:
        _write_annotations(out, label_file, manifests, background, replace)
    return done


def _cut_all(
    folders: Mapping[str, Path],
    labels: Mapping[str, Objects],
    label_file: Path,
    out: Path,
    settings: Mapping[str, Any],
    layout: Layout,
    workers: int,
    overwrite: bool,
    progress: Callable[[int], None],
) -> list[Result]:
    out.mkdir(parents=True, exist_ok=True)
    for name in folders:
        begin_output(out / name)
    cut = _cut_scene if layout == "penstock" else _cut_scene_as_the_reference
    stop = threading.Event()
    env = require("rasterio", "scenes").Env

    def work(name: str) -> Result:
        of_scene = labels[name]
        try:
            # GDAL would keep a twentieth of the memory in blocks that are never asked for again.
            with env(GDAL_CACHEMAX=64), Scene(folders[name], settings["channels"]) as scene:
                of_scene.check_inside(scene.size, label_file)
                manifest = _manifest(scene, of_scene, settings, layout)
                earlier = _already(out / name / MANIFEST, manifest, overwrite)
                if earlier is not None:
                    return earlier, True
                return cut(scene, manifest, out / name, stop), False
        except (UsageError, Stopped):
            raise
        except Exception as error:
            raise StageError("preprocess", f"scene {name}", error) from error

    return _run_all(work, sorted(folders), workers, stop, progress)


def _done(finished: Sequence[Result]) -> Done:
    manifests = [manifest for manifest, _ in finished]
    return Done(
        scenes=len(manifests),
        chips=sum(int(np.count_nonzero(manifest["valid_pixels"])) for manifest in manifests),
        rounded=sum(bool(manifest.get("rounded")) for manifest in manifests),
        resumed=sum(was_done for _, was_done in finished),
        labels=sum(len(manifest["labels"]["points"]) for manifest in manifests),
    )


def _write_index(
    out: Path, settings: Mapping[str, Any], scenes: Iterable[str], replace: bool
) -> None:
    index = {"format": FORMAT, "version": VERSION, **settings, "scenes": sorted(scenes)}
    with writing_output(out / INDEX, replace=replace) as draft:
        write_json(draft, index, indent=None)


def _run_all(
    work: Callable[[str], Result],
    names: Sequence[str],
    workers: int,
    stop: threading.Event,
    progress: Callable[[int], None],
) -> list[Result]:
    """The results of ``work`` for all names; of several errors the first by name is raised."""
    with ThreadPoolExecutor(workers, thread_name_prefix="preprocess") as pool:
        jobs = [pool.submit(work, name) for name in names]
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                if job.exception() is not None:
                    break
                progress(done)
        finally:  # an error, or somebody's Ctrl-C, ends the others at their next row
            stop.set()
            for job in jobs:
                job.cancel()
    whole = (j for j in jobs if not j.cancelled() and not isinstance(j.exception(), Stopped))
    return [job.result() for job in whole]


def _rows(num: int, stop: threading.Event) -> Iterator[int]:
    for index in range(num):
        if stop.is_set():
            raise Stopped
        yield index


def _manifest(
    scene: Scene, labels: Objects, settings: Mapping[str, Any], layout: Layout
) -> dict[str, Any]:
    """All that a scene's chips depend on. Cutting adds what it finds out."""
    stats = {name: (scene.folder / CHANNELS[name].file).stat() for name in scene.channels}
    return {
        "format": FORMAT,
        "version": VERSION,
        "layout": layout,
        "scene": scene.name,
        "size": list(scene.size),
        **settings,
        "inputs": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "labels": labels.as_lists(),
    }


def check_chips_output(
    out: Path, names: Iterable[str], layout: Layout, overwrite: bool, replace: bool
) -> None:
    """Check that no folder of a scene and no table would replace what Penstock did not write.

    Args:
        out: the folder of a split.
        names: its scenes.
        layout: ``penstock`` or ``reference``.
        overwrite: whether chips of other settings may be replaced.
        replace: whether anything may be replaced.

    Raises:
        UsageError: something there is not known as ours.
    """
    check_folder(out, "--output-dir")
    tables = [INDEX] if layout == "penstock" else _tables(out)
    check_outputs(*(("--output-dir", out / table) for table in tables), replace=replace)
    for name in () if replace else names:
        if overwrite and (out / name / MANIFEST).exists():
            read_document(out / name / MANIFEST)
        elif not (out / name / MANIFEST).exists():
            check_replaceable(out / name, "--output-dir")


def _tables(out: Path) -> list[str]:
    return [f"{out.name}_chip_annotations.csv", "data_means.npy", "data_std.npy"]


def _already(path: Path, manifest: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The manifest of an earlier run at ``path``, if it is of the same inputs and settings."""
    if overwrite or not path.exists():
        return None
    earlier = read_document(path)
    earlier.setdefault("dtype", DTYPE)
    asked = {"dtype": DTYPE, **manifest}
    differing = [key for key in asked if earlier.get(key) != asked[key]]
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
    # The manifest is removed first and written last: a scene without one counts as not there.
    (out / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(out / ARRAY, ignore_errors=True)
    radar, chip = radar_of(scene.channels), manifest["chip_size"]
    rows, columns = cuts_of(scene.size, chip, manifest["overlap"])
    shape = (rows.num, columns.num, len(radar), chip, chip)
    (out / ARRAY).mkdir(parents=True)
    dtype = manifest.get("dtype", DTYPE)
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


def _cut_scene_as_the_reference(
    scene: Scene, manifest: dict[str, Any], out: Path, stop: threading.Event
) -> dict[str, Any]:
    """Write OUT/SCENE/CHANNEL/<i>_CHANNEL.npy and coords.json: float32, without overlap, row by
    row, padded with 0 below and to the right. Missing stays -32768, as the reference's reader
    expects.
    """
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
        valid[row] = read_row(scene, scene.channels, rows.read(row), columns, band)
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
    write_json(out / MANIFEST, manifest, indent=None)
    return manifest


def _write_annotations(
    out: Path,
    label_file: Path,
    manifests: Mapping[str, Mapping[str, Any]],
    background: bool,
    replace: bool,
) -> None:
    """Write OUT/SPLIT_chip_annotations.csv: the rows of the labels, each with its chip; and for
    training half as many chips without an object as there are objects. Classes: 0 background, 1
    fishing, 2 another vessel, 3 no vessel, empty where the labels do not say (fishing, to the
    reference).
    """
    more = ("vessel_class", "scene_rows", "scene_cols", "rows", "columns", "chip_index")
    rows: list[dict[str, Any]] = []
    for _, cells in label_rows(label_file):
        manifest = manifests.get(cells["scene_id"])
        if manifest is None:
            continue
        chip, width = int(manifest["chip_size"]), int(manifest["size"][1])
        row, column = (float(cells[f"detect_scene_{axis}"]) for axis in ("row", "column"))
        place = int(row // chip) * -(-width // chip) + int(column // chip)
        values = (_class(cells), row, column, row % chip, column % chip, place)
        rows.append({**cells, **dict(zip(more, values, strict=True))})
    for name, manifest in manifests.items() if background else ():
        taken = [row["chip_index"] for row in rows if row["scene_id"] == name]
        empty = np.setdiff1d(np.flatnonzero(manifest["valid_pixels"]), taken)
        wanted = min(int(0.5 * max(len(taken), 3)), len(empty))
        for place in sorted(np.random.default_rng(0).choice(empty, wanted, replace=False).tolist()):
            empty_row = dict.fromkeys((*COLUMNS, *more), -1) | {"source": "background"}
            rows.append(empty_row | {"scene_id": name, "vessel_class": 0, "chip_index": place})
    table, *arrays = (out / name for name in _tables(out))
    with writing_output(table, replace=replace) as draft, draft.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, (*COLUMNS, *more), restval="", extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows({name: to_cell(value) for name, value in row.items()} for row in rows)
    channels = len(next(iter(manifests.values()))["channels"])
    for path, value in zip(arrays, (0.5, 0.1), strict=True):
        with writing_output(path, replace=replace) as draft, draft.open("wb") as array:
            np.save(array, np.full(channels, value, np.float32))


def _class(cells: Mapping[str, str]) -> int | str:
    vessel, fishing = ternary(cells["is_vessel"]), ternary(cells["is_fishing"])
    if vessel == 1:
        return {1: 1, 0: 2}.get(fishing, "")
    return 3 if vessel == 0 else ""
