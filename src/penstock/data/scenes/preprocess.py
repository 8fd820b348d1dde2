"""Scenes cut into chips: all of them at once, each whole or not at all.

Threads take one scene each, or the workers of a cluster do. A scene that an earlier run finished is
left as it is; an unfinished one is cut again. The index of all scenes is written last. `chips`
describes the files.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...base import (
    Incomplete,
    UsageError,
    absolute,
    check_folder,
    check_outputs,
    check_replaceable,
    is_draft,
    json_text,
    plural,
    remove,
    write_output,
)
from ...cluster import Workers, share_pieces
from ..packed.data_folder import check_strangers
from .chips import ARRAY, DTYPE, FORMAT, INDEX, MANIFEST, VERSION, Chips, read_document
from .cutting import SceneJob, cut_task
from .objects import Objects
from .scene import CHANNELS
from .windows import ChipRecord

CHIP_LIBRARIES = ("penstock-dl", "numpy", "rasterio", "numcodecs")
"""The distributions that decide the bytes of chips."""
OURS = {ARRAY, MANIFEST, *(f"{name}.npy" for name in CHANNELS)}
"""The names in a scene's folder of chips."""
SEEN_S = 30.0
"""Seconds within which a worker's files become visible here on a network file system."""


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
        name: SceneJob(folder, labels[name], label_file, out / name, record)
        for name, folder in folders.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    _remove_drafts(out)
    anew = [name for name in jobs if overwrite or not (out / name / MANIFEST).exists()]
    remove(out / name for name in anew if (out / name).exists())
    manifests = [*_cut_all(jobs, out, workers, cluster, progress).values()]
    if not any(np.any(manifest["valid_pixels"]) for manifest in manifests):
        raise UsageError(
            f"no chip of {plural(len(manifests), 'scene')} under {out} has a valid pixel"
        )
    index = {"format": FORMAT, "version": VERSION, **record.as_document(), "scenes": sorted(jobs)}
    write_output("--output-dir", out / INDEX, json_text(index, None), replace=replace)
    return _done(manifests, len(jobs) - len(anew), Chips(out))


def _cut_all(
    jobs: Mapping[str, SceneJob],
    out: Path,
    workers: int,
    cluster: Workers | None,
    progress: Callable[[int], None],
) -> dict[str, dict[str, Any]]:
    """The manifest of each scene, in the order of their names."""
    manifests: dict[str, dict[str, Any]] = {}

    def note(name: str, manifest: dict[str, Any]) -> None:
        manifests[name] = manifest
        progress(len(manifests))

    try:
        if cluster is None:
            _cut_here(jobs, workers, note)
        else:
            there = {
                name: replace(job, folder=absolute(job.folder), out=absolute(job.out))
                for name, job in jobs.items()
            }
            for cut in share_pieces(
                cluster, cut_task, sorted(there), "scene", "run again to cut the rest",
                work_of=there.__getitem__,
            ):  # fmt: skip
                note(*cut)
    finally:
        _remove_drafts(out)
    if cluster is not None:
        _check_seen(jobs, manifests)
    return dict(sorted(manifests.items()))


def _cut_here(
    jobs: Mapping[str, SceneJob], workers: int, note: Callable[[str, dict[str, Any]], None]
) -> None:
    """Cut scenes in threads. The first error is raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(workers, thread_name_prefix="preprocess") as pool:
        cuts = {pool.submit(cut_task, jobs[name], stop): name for name in sorted(jobs)}
        try:
            for cut in as_completed(cuts):
                note(cuts[cut], cut.result())
        finally:  # after an error or Ctrl-C, the others end at their next row
            stop.set()
            pool.shutdown(cancel_futures=True)


def _remove_drafts(out: Path) -> None:
    """Remove what was left of scenes that were being cut as a process died."""
    for path in out.glob(".penstock-*.part"):
        if is_draft(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _check_seen(jobs: Mapping[str, SceneJob], manifests: Mapping[str, dict[str, Any]]) -> None:
    """Raise `Incomplete` unless this machine sees the chips that the workers wrote."""
    end = time.monotonic() + SEEN_S
    for name, job in jobs.items():
        path = job.out / MANIFEST
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.5)
        if not path.exists() or read_document(path) != manifests[name]:
            raise Incomplete(
                f"{job.out} does not hold the chips that a worker wrote there; --output-dir must "
                "be a folder that all workers share"
            )


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
    for folder in () if replace else (out / name for name in names):
        done = (folder / MANIFEST).exists()
        if not done:
            check_replaceable(folder, "--output-dir")
        elif overwrite:
            read_document(folder / MANIFEST)
        if folder.is_dir() and (overwrite or not done):
            strangers = {path.name for path in folder.iterdir()} - OURS
            check_strangers(f"--output-dir {folder}", strangers, "its chips")
