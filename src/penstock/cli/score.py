"""``penstock score xview3``: the score of the xView3 challenge."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np

from ..base import (
    ScoreConfig,
    UsageError,
    add_flags,
    check_outputs,
    from_flags,
    plural,
    write_output,
)
from ..data import (
    Objects,
    XView3Score,
    read_labels,
    read_predictions,
    read_shoreline,
    score_xview3,
    shoreline_path,
)

EXAMPLES = r"""
penstock score xview3 --inference-file predictions.csv \
    --label-file scenes/labels/validation.csv --shore-root scenes/shoreline
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("score", choices=["xview3"], help="score to compute")
    add_flags(parser, ScoreConfig)


def run(args: argparse.Namespace) -> int:
    config = from_flags(ScoreConfig, args)
    read = (config.inference_file, config.label_file)
    check_outputs(("--output", config.output), replace=config.overwrite, inputs=read)

    predicted = read_predictions(config.inference_file)
    of_scenes = read_labels(config.label_file, print, once=not config.strict_official)
    labels = Objects.join(of_scenes.values())
    if config.scene_id is not None:
        predicted, labels = _of_scenes(config.scene_id, predicted, labels)
    if not len(labels):
        raise UsageError(f"--label-file {config.label_file} holds no labels to score against")
    root = config.shore_root
    score = score_xview3(
        predicted,
        labels,
        config,
        None if root is None else lambda scene: read_shoreline(shoreline_path(root, scene)),
    )
    if config.output is not None:
        write_output(
            "--output", config.output, json.dumps(score.as_dict()), replace=config.overwrite
        )
    print("\n".join([*lines(score, config), *_scenes_apart(predicted, labels)]))
    return 0


def _scenes_apart(predicted: Objects, labels: Objects) -> list[str]:
    """Say which scenes have predictions and no label."""
    scenes, true = ({*map(str, of.scene)} for of in (predicted, labels))
    if not (apart := sorted(scenes - true)):
        return []
    if len(apart) == len(scenes):
        others = f"{plural(len(true), 'scene')} such as {min(true)}"
        line = f"No scene id of --inference-file, such as {apart[0]}, is in --label-file ({others})"
        return [f"{line}: no prediction can match a label."]
    line = f"{len(apart)} of {plural(len(scenes), 'scene')} of --inference-file have no label"
    return [f"{line}, such as {apart[0]}."]


def _of_scenes(scenes: tuple[str, ...], *sides: Objects) -> list[Objects]:
    for scene in scenes:
        if not any(scene in side.scene for side in sides):
            raise UsageError(f"--scene-id {scene}: there is no such scene in either file")
    return [side[np.isin(side.scene, scenes)] for side in sides]


def lines(score: XView3Score, config: ScoreConfig) -> list[str]:
    """Lines of a table that shows the score."""
    rows = [
        ("localisation F1", score.loc_fscore, score.location),
        ("shore F1", score.loc_fscore_shore, score.shore),
        ("vessel F1", score.vessel_fscore, score.vessel),
        ("fishing F1", score.fishing_fscore, score.fishing),
    ]
    table = [f"{'':<16}  score   right  stray  missed"]
    for name, value, counts in rows:
        line = f"{name:<16}  {_figure(value)}"
        if counts is not None:
            line += (
                f"  {counts.true_positive:>5}  {counts.false_positive:>5}"
                f"  {counts.false_negative:>6}"
            )
        table.append(line)
    table.append(f"{'length accuracy':<16}  {_figure(score.length_acc)}  {score.lengths:>5}")
    table.append(f"{'aggregate':<16}  {_figure(score.aggregate)}")
    if config.strict_official:
        table.append("These are the numbers of the official script, including its quirks.")
    elif score.aggregate is None:
        missing = [key for key, value in score.as_dict().items() if value is None]
        reason = f"nothing to measure {missing[0]} on"
        if score.shore is None:
            reason = "the shore F1 needs --shore-root and a --shore-tolerance above 0"
        table.append(f"There is no aggregate: {reason}.")
    return table


def _figure(value: float | None) -> str:
    return "-     " if value is None or math.isnan(value) else f"{value:.4f}"
