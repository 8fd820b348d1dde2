"""``penstock predict``: run a trained detector over whole scenes; write a submission to xView3."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from ..base import PredictConfig, add_flags, from_flags, plural
from ..cluster import connect
from ..instruments import Nvml
from .one_launch import keep_launch
from .progress import counted_progress, say

EXAMPLES = """
penstock predict run/best_model.pth --data-root scenes/validation --output predictions.csv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "weights", type=Path, metavar="WEIGHTS", help="best_model.pth of a run of penstock train"
    )
    add_flags(parser, PredictConfig)


def run(args: argparse.Namespace) -> int:
    config = from_flags(PredictConfig, args)
    from ..training import DETECTOR_LIBRARIES, predict_scenes

    began = time.perf_counter()
    with contextlib.ExitStack() as stack:

        def begin(total: int) -> Callable[[int], None]:
            return stack.enter_context(counted_progress(total, "window", "looking"))

        workers = None
        if config.cluster is not None:
            gpus = len(Nvml()()) if config.device in ("auto", "cuda") else 0
            connected = connect(config, say, libraries=DETECTOR_LIBRARIES, gpus=gpus)
            workers = stack.enter_context(connected)
        done = predict_scenes(args.weights, config, workers=workers, begin=begin)
        notes = workers.notes("scene") if workers else []
    took = time.perf_counter() - began
    passed = f", {done.empty} without data passed over" if done.empty else ""
    skipped = f", {plural(done.skipped, 'scene')} by an earlier run" if done.skipped else ""
    print(
        f"{config.output}: {plural(len(done.objects), 'object')} in "
        f"{plural(done.scenes + done.skipped, 'scene')}, "
        f"{plural(done.windows, 'window')}{passed}, in {took:.1f} s{skipped}"
    )
    print(f"least score {done.settings.threshold:.3f}, {done.settings.because}")
    for note in (*done.notes, *notes):
        print(note)
    if not done.skipped:  # else the seconds cover only a part of the scenes
        work = {"scenes": done.scenes, "windows": done.windows}
        keep_launch(config.output, "predict", config, {"step": took}, work)
    return 0
