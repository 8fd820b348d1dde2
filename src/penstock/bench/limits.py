"""Measures the limits of a machine: its noise, and the largest batches of a model.

The noise floor is the difference between two measurements of the same work (A/A): launches of one
case in the order A B B A, compared as if A and B were two cases. A difference that is not larger
than the noise says nothing.

    noise   the 95 % interval of the ratio A/A; its farther end from 1 is the threshold

Its launches are kept as records in a ledger in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..base import cache_folder
from ..instruments import (
    Ledger,
    Record,
    available_memory,
    hierarchical_bootstrap_ratio,
    launch_medians,
)
from .boundary import Limit, Trial, find_limits, pixels_of
from .launch.launcher import in_turn
from .launch.request import LaunchRequest
from .launch.supervisor import run_launch
from .launch.sweep import run_sweep

Runner = Callable[..., Record]
"""A function with the arguments of `run_launch`."""

RULES: Mapping[str, float] = {"seconds": 0.5, "warmup_seconds": 0.5, "precision": 0.01}
"""The rules of a launch."""
LAUNCHES = 6
"""The launches of an A/A run, of both sides."""
TIMEOUT_S = 120.0
TOLERANCE = 0.01
"""The share of a batch by which the largest that fits may be too small: each launch takes time."""
DRAWS = 10_000
SEED = 0


def default_ledger() -> Ledger:
    """The ledger in the user's cache."""
    return Ledger(cache_folder() / "doctor.ledger")


def noise_floor(
    device: str,
    ledger: Ledger,
    run: Runner = run_launch,
) -> dict[str, Any]:
    """Measure the difference between launches of the same work on this machine.

    Args:
        device: ``cpu``, ``cuda:0`` or ``mps``.
        ledger: takes the records.
        run: runs one launch.

    Returns:
        ``n``, the number of launches; ``disturbed``, the number of those that began beside busy
        processes of others; ``spread``, slowest over fastest minus 1; ``ratio``, ``low`` and
        ``high`` of A over A; ``threshold``; and a ``note`` on why these are None.
    """
    # A product that takes some milliseconds, like a step of a small network.
    case = {"device": device, "dtype": "float32", "size": 512 if device == "cpu" else 4096}
    records = run_sweep(
        "matmul",
        [case],
        LAUNCHES,
        ledger,
        rules=RULES,
        timeout_s=TIMEOUT_S,
        memory_limit=None,
        seed=SEED,
        resume=False,
        launcher=partial(in_turn, run=run),
    )
    return _noise(records)


def _noise(records: Sequence[Record]) -> dict[str, Any]:
    a, b = (  # by turns A B B A
        [r.samples_s["step"] for r in records if r.ok and r.launch % 4 in turns]
        for turns in ((0, 3), (1, 2))
    )
    loads = (record.environment.get("load", {}) for record in records)
    disturbed = sum(bool(load.get("busy_processes")) for load in loads)
    if min(len(a), len(b)) < 2:
        failure = next((record.error for record in records if record.error), None)
        why = failure.message if failure else f"{len(a) + len(b)} launches cannot tell"
        empty = dict.fromkeys(("spread", "ratio", "low", "high", "threshold"))
        return empty | {"n": len(a) + len(b), "disturbed": disturbed, "note": why}
    medians = launch_medians([*a, *b])
    ratio = hierarchical_bootstrap_ratio(a, b, DRAWS, np.random.default_rng(SEED))
    assert ratio.low is not None and ratio.high is not None  # two launches on each side
    return {
        "n": len(medians),
        "disturbed": disturbed,
        "spread": float(medians.max() / medians.min()) - 1,
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "threshold": max(ratio.high, 1 / ratio.low) - 1,
        "note": "",
    }


_TRY = {
    "seconds": 1e-6, "precision": 0.5, "min_samples": 1, "warmup_seconds": 1e-6, "warmup_samples": 1
}  # fmt: skip
"""Rules of three steps: the state of an optimizer, and with it the peak, is there at the second."""


def model_limits(
    case: Mapping[str, Any],
    tiles: Sequence[str],
    axes: int,
    max_batch: int,
    budget: int | None,
    ledger: Ledger,
    *,
    timeout_s: float,
    device_memory: int | None = None,
    run: Runner = run_launch,
    report: Callable[[Record], None] = lambda record: None,
) -> list[Limit]:
    """Find the largest batch of each tile of a model; each trial is a fresh process.

    Without a budget the limit is the host's free memory, or all memory of the GPU. `budget_note`
    says what a budget counts.

    Args:
        case: a case of scenario ``model`` that `check` has resolved; its tile, batch and budget are
            replaced.
        tiles: the tiles, the smallest first.
        axes: the axes of a tile that is given by one side.
        max_batch: the largest batch that may be tried.
        budget: the bytes that a launch may use; None for all there is.
        ledger: takes the records; a separate one, because a trial is no measurement.
        timeout_s: the seconds of a trial after which it is killed.
        device_memory: the bytes of the GPU, for margins without a budget; it is not a limit.
        run: runs one launch.
        report: is called with each record.

    Returns:
        The limit of each tile.
    """
    on_cpu = case["device"] == "cpu"
    if on_cpu and budget is None:
        budget = available_memory()

    def fits(tile: str, batch: int) -> Trial:
        request = LaunchRequest(
            scenario="model",
            case={**case, "tile": tile, "batch": batch, "budget": budget},
            rules=_TRY,
            memory_limit=budget if on_cpu else None,
        )
        record = run(request, launch=0, order=None, timeout_s=timeout_s)
        record = ledger.append(record)
        report(record)
        return _trial(record, budget or device_memory)

    return find_limits(tiles, fits, max_batch, lambda tile: pixels_of(tile, axes), TOLERANCE)


def budget_note(device: str) -> str:
    """The memory that a budget and a peak count on such a device, in words."""
    if device == "cpu":
        return (
            "The kernel enforces the budget on all that a launch maps for itself: the interpreter "
            "and torch's own heap as well as the model, touched or not, but not the pages of "
            "shared libraries. The peak is what it counted of that, and the margin is what it left."
        )
    return (
        "The budget is that of torch's allocator; the context and the libraries of the device come "
        "on top. The peak is what was alive in tensors."
    )


def _trial(record: Record, budget: int | None) -> Trial:
    memory = record.memory
    if record.case["device"] == "cpu":
        peak = memory.host_counted or memory.host_peak_kernel or memory.host_peak
    else:
        peak = memory.device_peak
    if record.ok:
        return Trial("ok", peak, budget, memory.alloc_retries)
    if record.status in ("oom_host", "oom_device"):
        return Trial("oom", peak, budget)
    return Trial("failed", reason=record.error.message if record.error else record.status)
