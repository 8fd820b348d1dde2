"""Scenes cut into chips: all of them at once, each whole or not at all.

Threads take one scene each, or the workers of a cluster do (`cluster_cut`). A scene that an earlier
run finished is left as it is; an unfinished one is cut again. The index of all scenes is written
last. `chips` describes the files. The other layout, ``reference``, has the files of the xView3
reference.
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base import (
    StageError,
    Stopped,
    UsageError,
    begin_output,
    check_folder,
    check_outputs,
    check_replaceable,
    to_cell,
    write_json,
    writing_output,
)
from ...cluster import NamedTasks
from .chips import DTYPE, FORMAT, INDEX, MANIFEST, VERSION, read_document
from .cluster_cut import cut_on_cluster
from .cutting import Layout, Result, SceneJob
from .labels import COLUMNS, label_rows, ternary
from .objects import Objects


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a split."""

    scenes: int
    chips: int
    """Chips with at least one valid pixel."""
    rounded: int
    """Scenes whose rasters have more bits than their chips."""
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
    cluster: NamedTasks | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Done:
    """Cut every scene into chips. A scene that is done is not done again.

    Args:
        folders: the folder of each scene.
        labels: the labels of each scene.
        label_file: the file of the labels.
        out: the folder of the split.
        channels: names of `CHANNELS`.
        chip_size: pixels along a side.
        overlap: pixels that neighbours share.
        layout: ``penstock``, or ``reference`` for the files of the xView3 reference.
        workers: threads; each takes one scene.
        overwrite: replace chips of other settings.
        background: annotate some chips without objects, in the layout ``reference``.
        replace: replace files that Penstock did not write.
        dtype: the dtype of the chips, ``float16`` or ``float32``.
        cluster: workers that cut the scenes in place of threads.
        progress: called with the number of scenes that are done.

    Returns:
        The outcome of the split.

    Raises:
        UsageError: an input, or a file in ``out``, does not fit.
        StageError: a scene failed.
        Incomplete: scenes failed on a cluster.
    """
    check_chips_output(out, folders, layout, overwrite, replace)
    settings = {"channels": [*channels], "chip_size": chip_size, "overlap": overlap}
    if dtype != DTYPE and layout == "penstock":  # earlier manifests do not name it
        settings["dtype"] = dtype
    rest = (settings, layout, overwrite)
    jobs = {n: SceneJob(at, labels[n], label_file, out / n, *rest) for n, at in folders.items()}
    finished = _cut_all(jobs, out, workers, cluster, progress)
    manifests = {manifest["scene"]: manifest for manifest, _ in finished}
    done = _done(finished, out)
    if layout == "penstock":
        _write_index(out, settings, manifests, replace)
    else:
        _write_annotations(out, label_file, manifests, background, replace)
    return done


def _cut_all(
    jobs: Mapping[str, SceneJob],
    out: Path,
    workers: int,
    cluster: NamedTasks | None,
    progress: Callable[[int], None],
) -> list[Result]:
    out.mkdir(parents=True, exist_ok=True)
    for name in jobs:
        begin_output(out / name)
    if cluster is not None:
        return cut_on_cluster(cluster, jobs, progress)
    stop = threading.Event()

    def work(name: str) -> Result:
        try:
            return jobs[name].run(stop)
        except (UsageError, Stopped):
            raise
        except Exception as error:
            raise StageError("preprocess", f"scene {name}", error) from error

    return _run_all(work, sorted(jobs), workers, stop, progress)


def _done(finished: Sequence[Result], out: Path) -> Done:
    manifests = [manifest for manifest, _ in finished]
    chips = sum(int(np.count_nonzero(manifest["valid_pixels"])) for manifest in manifests)
    if not chips:
        raise UsageError(f"{len(manifests)} scenes under {out} give no chip with a valid pixel")
    return Done(
        scenes=len(manifests),
        chips=chips,
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
        finally:  # after an error or Ctrl-C, the others end at their next row
            stop.set()
            for job in jobs:
                job.cancel()
    whole = (j for j in jobs if not j.cancelled() and not isinstance(j.exception(), Stopped))
    return [job.result() for job in whole]


def check_chips_output(
    out: Path, names: Iterable[str], layout: Layout, overwrite: bool, replace: bool
) -> None:
    """Check that folders of scenes and tables replace no file that Penstock did not write.

    Args:
        out: the folder of a split.
        names: its scenes.
        layout: ``penstock`` or ``reference``.
        overwrite: whether chips of other settings may be replaced.
        replace: whether anything may be replaced.

    Raises:
        UsageError: Penstock did not write a file that is there.
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


def _write_annotations(
    out: Path,
    label_file: Path,
    manifests: Mapping[str, Mapping[str, Any]],
    background: bool,
    replace: bool,
) -> None:
    """Write OUT/SPLIT_chip_annotations.csv: the rows of the labels, each with its chip; and for
    training half as many chips without an object as there are objects. Classes: 0 background, 1
    fishing, 2 another vessel, 3 no vessel, empty if the labels do not say (the reference reads that
    as fishing).
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
