"""The memory boundary: the largest batch of each tile that fits, found in few launches.

Only a fresh process can find out whether a batch of a tile fits, so the search keeps trials few.
The peak of a step is nearly a linear function of the pixels in it,

    peak = base + bytes_per_pixel * batch * pixels

so the batches of all tiles that fitted predict the largest one. The search begins there:

    batch   1    2               29   30
            ok   ok   - line ->  ok   oom     29 fits, 30 does not: both were run

With a tolerance, the search ends when the two sides are a small fraction of a batch apart.

A wrong prediction costs launches and never changes the answer: from it the search walks in steps
that double until it has both sides, then bisects. Within a tile, a batch larger than one that fails
is taken to fail too. If noise breaks that rule, the search still ends, because every trial leaves
less to search; the result is then two neighbouring batches that were run.

`find_limits` searches by any trial, and `model_limits` by launches of ``bench model``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any, Literal, NamedTuple

from ..base import UsageError, format_bytes, plural
from ..instruments import (
    Ledger,
    Record,
    available_memory,
)
from .launch.request import Launch
from .launch.supervisor import run_launch

CLIFF_MARGIN = 0.05
"""The margin below which a batch is on the cliff; fragmentation and other tenants vary as much."""


class Trial(NamedTuple):
    """The result of one trial: whether a batch fits."""

    outcome: Literal["ok", "oom", "failed"]
    peak: int | None = None
    """The peak memory of the launch, in bytes."""
    budget: int | None = None
    """The bytes that it was allowed."""
    alloc_retries: int | None = None
    """The number of times that the allocator emptied its cache and tried again."""
    reason: str = ""
    """The cause of a failure other than memory."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory boundary of one tile."""

    tile: str
    batch: int | None
    """The largest batch that fitted; None if none did, or if the search failed."""
    failing_batch: int | None
    """The smallest batch that did not fit; None if the largest allowed batch fitted."""
    peak: int | None
    """The peak memory of the largest batch that fits, in bytes."""
    budget: int | None
    alloc_retries: int | None
    trials: int
    """The number of launches that it took."""
    reason: str = ""
    """The cause of a failure other than memory, for which there is no limit."""

    @property
    def margin(self) -> float | None:
        """The fraction of the budget that is free at the largest batch."""
        if self.peak is None or not self.budget:
            return None
        return 1 - self.peak / self.budget

    @property
    def cliff(self) -> bool:
        """Whether the largest batch only just fits, so that a long run should not use it."""
        return bool(self.alloc_retries) or (
            self.failing_batch is not None
            and self.margin is not None
            and self.margin < CLIFF_MARGIN
        )

    @property
    def sentence(self) -> str:
        """The limit in one sentence."""
        if self.reason:
            return f"Tile {self.tile}: no limit was found: {self.reason}."
        if self.batch is None:
            return f"Tile {self.tile}: not even a batch of 1 fits."
        text = f"Tile {self.tile}: a batch of {self.batch} fits"
        if self.peak is not None and self.budget and self.margin is not None:
            text += (
                f" with a peak of {format_bytes(self.peak)} in {format_bytes(self.budget)}"
                f" (margin {100 * self.margin:.1f} %{', on the cliff' * self.cliff})"
            )
        if self.alloc_retries:
            text += f", and the allocator had to retry {plural(self.alloc_retries, 'time')}"
        if self.failing_batch is None:
            return text + "; no larger one was allowed."
        text += f"; {self.failing_batch} does not"
        if self.failing_batch > self.batch + 1:
            text += ", and what lies between was not tried"
        return text + "."


def pixels_of(tile: str, axes: int = 2) -> int:
    """The pixels of a tile.

    Args:
        tile: its side, such as ``256``, or its sides, such as ``32x256x256``.
        axes: how many axes a tile of one side has.

    Returns:
        Their product.

    >>> pixels_of("256"), pixels_of("64", axes=3), pixels_of("32x256x256")
    (65536, 262144, 2097152)
    """
    sides = [int(side) for side in tile.split("x")]
    return math.prod(sides) if len(sides) > 1 else sides[0] ** axes


def find_limits(
    tiles: Sequence[str],
    fits: Callable[[str, int], Trial],
    max_batch: int,
    pixels: Callable[[str], int] = pixels_of,
    tolerance: float = 0.0,
) -> list[Limit]:
    """The limit of each tile, from the first tile on.

    Each tile costs two launches where the line holds, and the first tile two more.

    Args:
        tiles: the tiles, the smallest first.
        fits: tries a batch of a tile in a fresh process.
        max_batch: the largest batch that may be tried.
        pixels: the pixels of a tile.
        tolerance: the search of a tile ends when the largest batch that fits and the smallest that
            does not are no further apart than this share of the first.

    Returns:
        A `Limit` for each tile.

    Raises:
        UsageError: a ``max_batch`` below 1.

    >>> def fits(tile, batch):
    ...     peak = 1000 + 2 * batch * pixels_of(tile)
    ...     return Trial("ok" if peak <= 10_000 else "oom", peak, 10_000)
    >>> limits = find_limits(["8", "16"], fits, 512)
    >>> [(limit.batch, limit.failing_batch, limit.trials) for limit in limits]
    [(70, 71, 4), (17, 18, 2)]
    """
    if max_batch < 1:
        raise UsageError(f"a largest batch of {max_batch} leaves nothing to search")
    search = _Search(fits, max_batch, tolerance)
    return [search.tile(tile, pixels(tile)) for tile in tiles]


class _Search:
    """The search over all tiles, with the trials so far."""

    def __init__(self, fits: Callable[[str, int], Trial], max_batch: int, tolerance: float) -> None:
        self._fits = fits
        self._tolerance = tolerance
        self._max_batch = max_batch
        self._fitted: list[tuple[int, Trial]] = []
        """Each step that fitted: its pixels, and the answer of its launch."""
        self._bracket: tuple[int, int] | None = None
        """Pixels of the last step that fitted and the first that did not, of the tile before."""

    def tile(self, tile: str, pixels: int) -> Limit:
        """Walk from the expected edge, or from 1, until the answer turns, then halve."""
        low, high = 0, self._max_batch + 1  # 0 fits; batches above the largest are not tried
        batch, step, walk, turned = 1, 1, "", False
        trials, predicted, failed, reason = 0, False, False, ""
        best = Trial("ok")
        # Before the walk turned, the upper side may be untried.
        while high - low > max(1, self._tolerance * low if failed else 0):
            # At first nothing is known of the tile; the second answer may have given the line.
            if not predicted and trials in (0, 2) and (edge := self._edge()) is not None:
                predicted, batch, step, walk = True, math.floor(edge / pixels), 1, ""
            batch = min(max(batch, low + 1), high - 1)
            trial = self._fits(tile, batch)
            trials += 1
            if trial.outcome == "failed":
                reason = f"a batch of {batch} failed, and not for want of memory: {trial.reason}"
                break
            if trial.outcome == "ok":
                low, best = batch, trial
                self._fitted.append((batch * pixels, trial))
            else:
                high, failed = batch, True
            walk = walk or trial.outcome
            turned = turned or trial.outcome != walk
            if turned:
                batch = (low + high) // 2
            else:
                batch = low + step if walk == "ok" else high - step
                step *= 2
        if low and failed:
            self._bracket = low * pixels, high * pixels
        return Limit(
            tile=tile,
            batch=None if reason else low or None,
            failing_batch=high if failed and not reason else None,
            peak=best.peak,
            budget=best.budget,
            alloc_retries=best.alloc_retries,
            trials=trials,
            reason=reason,
        )

    def _edge(self) -> float | None:
        """The pixels of the largest step that fits: where the line meets the budget, clipped to the
        two sides of the tile before. The peak may be resident memory and the budget mapped memory,
        which differ by a constant.
        """
        line = fit([(x, trial.peak) for x, trial in self._fitted if trial.peak is not None])
        budget = self._fitted[-1][1].budget if self._fitted else None
        edge = (budget - line[0]) / line[1] if line and budget else None
        if self._bracket is None:
            return edge
        fitted, failed = self._bracket
        return fitted if edge is None else min(max(edge, fitted), failed - 1)


def fit(points: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """The base and the slope of the least-squares line through points (pixels, peak); None if it
    does not rise.

    >>> fit([(1, 12), (2, 14), (4, 18)])
    (10.0, 2.0)
    """
    if len({x for x, _ in points}) < 2:
        return None
    slope, base = linear_regression(*zip(*points, strict=True))
    return (base, slope) if slope > 0 else None


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
