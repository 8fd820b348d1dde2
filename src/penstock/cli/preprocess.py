"""``penstock preprocess``: cut satellite scenes into chips to train on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from ..base import PreprocessConfig, UsageError, add_flags, check_folder, from_flags, plural
from ..cluster import Workers, connect
from ..data import (
    CHIP_LIBRARIES,
    Done,
    Objects,
    channels_of,
    check_chips_output,
    preprocess_scenes,
    read_labels,
    scene_folders,
)
from .one_launch import keep_launch
from .progress import counted_progress, say

SPLITS: tuple[tuple[Literal["train", "validation"], str], ...] = (
    ("train", "train"),
    ("validation", "val"),
)
"""Each split's folder of scenes and its folder of chips."""
SplitWork = tuple[Literal["train", "validation"], str, Path, dict[str, Path], Mapping[str, Objects]]
"""Folders of a split, its file of labels, and by scene the folder and the labels."""


EXAMPLES = r"""
penstock preprocess --data-root scenes --train-label-file scenes/labels/train.csv \
    --val-label-file scenes/labels/validation.csv --output-dir chips
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, PreprocessConfig)


def run(args: argparse.Namespace) -> int:
    config = from_flags(PreprocessConfig, args)
    channels = channels_of(config.channels)
    check_folder(config.output_dir, "--output-dir")
    # Check both splits before any pixel is read.
    work: list[SplitWork] = []
    for split, name in SPLITS:
        file = config.train_label_file if split == "train" else config.val_label_file
        folders, labels = scene_folders(config.data_root, split), read_labels(file, print)
        _check_apart(config.output_dir, folders)
        folders = _matched(folders, labels, file, config.partial)
        check_chips_output(
            config.output_dir / name, folders, config.overwrite_preproc, config.overwrite
        )
        work.append((split, name, file, folders, labels))
    named = config.cluster is not None
    connected = connect(config, say, libraries=CHIP_LIBRARIES) if named else nullcontext()
    with connected as cluster:
        cut = {each[1]: _cut(each, config, channels, cluster) for each in work}
        for note in cluster.notes("scene") if cluster else ():
            print(note)
    if not any(done.resumed for done, _ in cut.values()):  # else the seconds are of some scenes
        seconds = {name: took for name, (_, took) in cut.items()}
        seconds = {"step": sum(seconds.values()), **seconds}
        chips = {"chips": sum(done.chips for done, _ in cut.values())}
        keep_launch(config.output_dir, "preprocess", config, seconds, chips)
    return 0


def _cut(
    work: SplitWork,
    config: PreprocessConfig,
    channels: tuple[str, ...],
    cluster: Workers | None,
) -> tuple[Done, float]:
    """Cut the scenes of a split and print a summary. Returns the counts and the seconds."""
    split, name, file, folders, labels = work
    began = time.perf_counter()
    with counted_progress(len(folders), "scene", f"cutting {split}") as progress:
        done = preprocess_scenes(
            folders,
            labels,
            file,
            config.output_dir / name,
            channels=channels,
            chip_size=config.chip_size,
            overlap=config.overlap,
            workers=config.num_workers,
            overwrite=config.overwrite_preproc,
            replace=config.overwrite,
            dtype=config.dtype,
            cluster=cluster,
            progress=progress,
        )
    took = time.perf_counter() - began
    print(
        f"{config.output_dir / name}: {plural(done.chips, 'chip')} of "
        f"{plural(done.scenes, 'scene')}, {plural(done.labels, 'label')}, in {took:.1f} s"
        + (f"; done before: {plural(done.resumed, 'scene')}" if done.resumed else "")
    )
    for line in summary_lines(done):
        print(f"{config.output_dir / name}: {line}")
    return done, took


def summary_lines(done: Done) -> list[str]:
    """Lines on the values and the labels of a split."""
    shares = ", ".join(f"{name} {100 * share:.4g} %" for name, share in done.valid.items())
    lines = [f"pixels with a value: {shares}"]
    if done.empty_chips:
        without = plural(done.empty_scenes, "scene")
        bare = f", with {without} without a label" * bool(done.empty_scenes)
        lines.append(f"{done.empty_chips} of {done.chips} chips hold no object{bare}: background")
    if done.labels_unseen:
        lines.append(f"{done.labels_unseen} of {done.labels} labels lie where radar has no value")
    if done.rounded:
        lines.append(
            f"the rasters of {plural(done.rounded, 'scene')} have more digits than float16, to "
            "which chips round them (about 3 digits); --dtype float32 keeps more (with "
            "--overwrite-preproc if chips exist)"
        )
    of = f"of {plural(done.scenes, 'scene')}"
    return [*lines, *(f"{scenes} {of}: {note}" for note, scenes in done.notes.items())]


def _check_apart(out: Path, scenes: Mapping[str, Path]) -> None:
    """Refuse to write chips into the folder of a scene. A scene's chips go to OUT/SPLIT/SCENE."""
    for scene in scenes.values():
        into = [out.resolve(), *((out / name / scene.name).resolve() for _, name in SPLITS)]
        if any(place.is_relative_to(scene.resolve()) for place in into):
            raise UsageError(f"--output-dir {out}: chips would go into {scene}, which is the input")


def _matched(
    folders: Mapping[str, Path], labels: Mapping[str, Objects], file: Path, partial: bool
) -> dict[str, Path]:
    """Folders of the scenes to cut. One without labels is background; each label must have a
    folder. With ``partial`` only scenes with both are cut."""
    both = {name: path for name, path in folders.items() if name in labels}
    lacking = sorted(labels.keys() - folders.keys())
    if lacking and not partial:
        raise UsageError(
            f"scene {lacking[0]} of {file} has no folder with a raster ({len(lacking)} of "
            f"{plural(len(labels), 'scene')}); --partial takes only scenes with both"
        )
    if not both:
        raise UsageError(f"no scene has both a folder and labels in {file}")
    return both if partial else dict(folders)
