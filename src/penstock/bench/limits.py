"""The largest batches of a model: each trial is a launch, a fresh process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..instruments import (
    Ledger,
    Record,
    available_memory,
)
from .boundary import Limit, Trial, find_limits, pixels_of
from .launch.request import Launch
from .launch.supervisor import run_launch

TOLERANCE = 0.01
"""The share of a batch by which the largest that fits may be too small: each launch takes time."""
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
    run: Callable[[Launch], Record] = run_launch,
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
        launch = Launch(
            "model",
            {**case, "tile": tile, "batch": batch, "budget": budget},
            timeout_s,
            rules=_TRY,
            memory_limit=budget if on_cpu else None,
        )
        record = ledger.append(run(launch))
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
