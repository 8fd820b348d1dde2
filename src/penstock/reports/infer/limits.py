"""A run compared with the limits of its machine, which ``penstock doctor`` measured."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...base import format_bytes, format_count
from ...bench import known_disk, known_roof
from ..mfu import UNKNOWN
from .record import InferenceRun


def limit_lines(run: InferenceRun) -> list[str]:
    """Say what share of its machine's limits a run reached.

    Args:
        run: The run. Its limits are looked for in the user's cache, by the key of its machine.

    Returns:
        A sentence for each limit that is known, or one that says that none is.
    """
    keys = {key for each in run.telemetry if (key := each.header.get("machine_key"))}
    if len(keys) > 1:
        return ["Several machines shared the run, so it is not compared with the limits of one."]
    lines = [line for key in keys for line in (*_arithmetic(run, key), *_disk(run, key))]
    return lines or [UNKNOWN]


def _arithmetic(run: InferenceRun, key: str) -> Iterator[str]:
    """The rate of the forwards, compared with that of large matrix products."""
    flops, stage, summary = run.plan.get("patch_flops"), run.stages.get("forward"), run.summary
    if not (flops and stage and stage.busy and summary and run.processes == 1):
        return
    if summary["units_written"] != summary["units_planned"]:
        return  # how many patches this process computed is not known
    device, dtype = ("cuda:0" if run.on_gpu else "cpu"), _dtype(run)
    rate = flops * run.plan["num_patches"] * stage.threads / stage.busy
    line = f"While it worked the network computed {format_count(rate)}flop/s"
    roof = known_roof(key, device, dtype)
    if roof is not None:
        lanes = len(run.plan.get("devices") or ()) if run.on_gpu else 1
        line += (
            f", {rate / (roof * lanes):.0%} of the {format_count(roof * lanes)}flop/s that matrix "
            f"products of {dtype} reach here"
        )
    yield f"{line} (products, convolutions and attention are counted)."


def _dtype(run: InferenceRun) -> str:
    """The dtype of its products, as doctor names it."""
    amp, tf32, *_ = run.fingerprint.get("arithmetic") or ("None", False)
    if amp != "None":
        return str(amp).removeprefix("torch.")
    return "tf32" if tf32 and run.on_gpu else "float32"


def _disk(run: InferenceRun, key: str) -> Iterator[str]:
    """The rate of reads from disks, compared with the measured rate of the disk."""
    rates = [rate for each in run.telemetry for rate in each.readings("read_bytes_per_s")]
    roof = known_disk(key)
    if rates and roof:
        mean, most = float(np.mean(rates)), max(rates)
        yield (
            f"It read {format_bytes(mean)}/s from disks in the mean and {format_bytes(most)}/s at "
            f"most; the disk gives {format_bytes(roof)}/s. Reads from the page cache do not count."
        )
