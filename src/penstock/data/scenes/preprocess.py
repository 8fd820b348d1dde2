"""Scenes cut into chips: all of them at once, each whole or not at all.

Threads take one scene each, or the workers of a cluster do (`cluster_cut`). A scene that an earlier
run finished is left as it is; an unfinished one is cut again. The index of all scenes is written
last. `chips` describes the files.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
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
    write_json,
    writing_output,
)
from ...cluster import Workers
from .chip_record import ChipRecord
from .chips import DTYPE, FORMAT, INDEX, MANIFEST, VERSION, Chips, read_document
from .cluster_cut import cut_on_cluster
from .cutting import Result, SceneJob
from .objects import Objects


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a split."""

    scenes: int
    chips: int
    """Chips with at least one valid pixel."""
    empty_chips: int
    """Chips among them without an object of their own."""
    empty_scenes: int
    """Scenes without a label."""
    rounded: int
    """Scenes whose rasters have more bits than their chips."""
    resumed: int
    """Scenes that an earlier run had finished."""
    labels: int
    labels_unseen: int
    """Labels at whose pixel the radar has no value."""
    valid: Mapping[str, float]
    """The share of pixels that have a value, by channel."""
    notes: Mapping[str, int]
    """Things to know of scenes, each with the number of scenes."""


def preprocess_scenes(
    folders: Mapping[str, Path],
    labels: Mapping[str, Objects],
    label_file: Path,
    out: Path,
    *,
    channels: Sequence[str],
    chip_size: int,
    overlap: int,
    workers: int,
    overwrite: bool,
    replace: bool = False,
    dtype: str = DTYPE,
    cluster: Workers | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Done:
    """Cut every scene into chips. A scene that is done is not done again.

    Args:
        folders: the folder of each scene.
        labels: the labels of each scene; one without any is background.
        label_file: the file of the labels.
        out: the folder of the split.
        channels: names of `CHANNELS`.
        chip_size: pixels along a side.
        overlap: pixels that neighbours share.
        workers: threads; each takes one scene.
        overwrite: replace chips of other settings.
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
    check_chips_output(out, folders, overwrite, replace)
    record = ChipRecord.of(channels, chip_size, overlap, dtype)
    labels = {name: labels.get(name, Objects.of(name, [])) for name in folders}
    jobs = {
        name: SceneJob(folder, labels[name], label_file, out / name, record, overwrite)
        for name, folder in folders.items()
    }
    manifests, resumed = zip(*_cut_all(jobs, out, workers, cluster, progress), strict=True)
    if not any(np.any(manifest["valid_pixels"]) for manifest in manifests):
        raise UsageError(f"{len(manifests)} scenes under {out} give no chip with a valid pixel")
    index = {"format": FORMAT, "version": VERSION, **record.as_document(), "scenes": sorted(jobs)}
    with writing_output(out / INDEX, replace=replace) as draft:
        write_json(draft, index, indent=None)
    return _done(manifests, sum(resumed), Chips(out))


def _cut_all(
    jobs: Mapping[str, SceneJob],
    out: Path,
    workers: int,
    cluster: Workers | None,
    progress: Callable[[int], None],
) -> list[Result]:
    out.mkdir(parents=True, exist_ok=True)
    for name in jobs:
        (out / name).mkdir(exist_ok=True)
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


def _done(manifests: Sequence[Mapping[str, Any]], resumed: int, chips: Chips) -> Done:
    pixels = sum(math.prod(manifest["size"]) for manifest in manifests)
    return Done(
        scenes=len(manifests),
        chips=len(chips),
        empty_chips=int((chips.num_points == 0).sum()),
        empty_scenes=sum(not len(labels) for labels in chips.labels.values()),
        rounded=sum(bool(manifest.get("rounded")) for manifest in manifests),
        resumed=resumed,
        labels=sum(map(len, chips.labels.values())),
        labels_unseen=sum(manifest["labels_unseen"] for manifest in manifests),
        valid={
            name: sum(manifest["valid_by_channel"][name] for manifest in manifests) / pixels
            for name in chips.channels
        },
        notes=Counter(note for manifest in manifests for note in manifest["notes"]),
    )


def _run_all(
    work: Callable[[str], Result],
    names: Sequence[str],
    workers: int,
    stop: threading.Event,
    progress: Callable[[int], None],
) -> list[Result]:
    """The results of ``work`` for all names, in their order. The first error is raised."""
    with ThreadPoolExecutor(workers, thread_name_prefix="preprocess") as pool:
        jobs = [pool.submit(work, name) for name in names]
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                progress(done)
        finally:  # after an error or Ctrl-C, the others end at their next row
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [job.result() for job in jobs]


def check_chips_output(out: Path, names: Iterable[str], overwrite: bool, replace: bool) -> None:
    """Check that folders of scenes and tables replace no file that Penstock did not write.

    Args:
        out: the folder of a split.
        names: its scenes.
        overwrite: whether chips of other settings may be replaced.
        replace: whether anything may be replaced.

    Raises:
        UsageError: Penstock did not write a file that is there.
    """
    check_folder(out, "--output-dir")
    check_outputs(("--output-dir", out / INDEX), replace=replace)
    for name in () if replace else names:
        if overwrite and (out / name / MANIFEST).exists():
            read_document(out / name / MANIFEST)
        elif not (out / name / MANIFEST).exists():
            check_replaceable(out / name, "--output-dir")
