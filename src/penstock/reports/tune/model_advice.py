"""Recommend settings of a model for a job, with the reasons, from the cells of a sweep.

    latency      the smallest median time of a step
    throughput   the smallest tile x batch on the plateau, which is within 5 % of the best in useful
                 pixels per second, or not distinguishable from it
    training     the most useful pixels per second of whole steps; a batch that does not fit is made
                 of several steps

A case is chosen only if all its launches were ok and its peak leaves the margin free. If its peak
or the memory is not known, the sentence says so and claims nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...base import format_bytes, format_count, format_seconds, group_by, plural
from ...bench import pixels_of
from ...instruments import Record
from ..cell import cell_ratio, speed_up
from ..model.cell import VARIANTS, ModelCell, model_cells
from ..table import bracket
from .settings_advice import write_settings_yaml

_Goal = Literal["latency", "throughput", "training"]

PLATEAU = 0.05
"""A rate that is less than this below the best is as good, and takes less memory."""


@dataclass(frozen=True)
class Choice:
    """One case for one goal."""

    goal: _Goal
    cell: ModelCell
    settings: dict[str, Any]
    """The settings of a job in YAML."""
    sentence: str
    """The reason, with a count and an interval."""


@dataclass(frozen=True)
class Recommendation:
    """The choices that a sweep supports."""

    choices: tuple[Choice, ...]
    """A choice of throughput and one of latency for each model, or one of training."""
    notes: tuple[str, ...] = ()
    """Sentences on the cases that were left out."""

    @property
    def lines(self) -> list[str]:
        return [choice.sentence for choice in self.choices] + list(self.notes)


def recommend(
    records: Iterable[Record], budget_bytes: int | None = None, margin: float = 0.1
) -> Recommendation:
    """Choose settings for each model, mode, device and machine of the records.

    Args:
        records: The launches of one or more benchmarks of models.
        budget_bytes: The memory that there is. None is the budget of the case, or without one all
            memory of the device, or of the host for a CPU.
        margin: The share of that memory that stays free.

    Returns:
        The choices, and notes on the cases that were left out.
    """
    names = ("model", "mode", "device", "weights")
    sweeps = group_by(
        model_cells(records),
        lambda cell: (*map(cell.case.get, names), cell.environment("machine_key")),
    )
    choices: list[Choice] = []
    notes: list[str] = []
    for about, sweep in sweeps.items():
        left, noted = _candidates(sweep, ceiling := Ceiling(budget_bytes, margin))
        prefix = f"{', '.join(about[:3])}: " if len(sweeps) > 1 else ""
        notes += [prefix + note for note in noted]
        if left:
            if sweep[0].case["mode"] == "train":
                choices.append(_for_training(left, max(cell.batch for cell in sweep), ceiling))
            else:
                choices += _for_inference(left, ceiling)
    return Recommendation(tuple(choices), tuple(notes))


@dataclass(frozen=True)
class Ceiling:
    """The memory that a peak must stay below."""

    budget: int | None
    margin: float

    def memory(self, cell: ModelCell) -> int | None:
        """The bytes that there are for a cell; None if they are not known."""
        if self.budget or cell.case.get("budget"):
            return self.budget or int(cell.case["budget"])
        if cell.case["device"] == "cpu":
            machine = (cell.environment("machine") or {}).get("memory_bytes")
            limited = (cell.environment("limits") or {}).get("cgroup_memory_bytes")
            sizes = [machine, limited]
        else:
            sizes = [cell.fact("device_memory")]
        return min((size for size in sizes if size is not None), default=None)

    def holds(self, cell: ModelCell) -> bool | None:
        """Whether the peak leaves the margin free; None if peak or memory is not known."""
        memory = self.memory(cell)
        if memory is None or cell.memory is None:
            return None
        return cell.memory <= (1 - self.margin) * memory

    def said(self, cell: ModelCell) -> str:
        share = f"{100 * (1 - self.margin):.3g} % of"
        return f"{share} {format_bytes(self.memory(cell) or 0)}"


def _candidates(sweep: Sequence[ModelCell], ceiling: Ceiling) -> tuple[list[ModelCell], list[str]]:
    """The cells to choose from, and sentences on the cells that were left out."""
    left = [cell for cell in sweep if cell.status == "ok"]
    reasons = {"a launch failed": [cell for cell in sweep if cell.status != "ok"]}

    def leave_out(reason: str, out: Callable[[ModelCell], bool]) -> None:
        reasons[reason] = [cell for cell in left if out(cell)]
        left[:] = [cell for cell in left if not out(cell)]

    if sweep[0].case["mode"] != "train":
        leave_out(
            "penstock infer keeps weights in float32",
            lambda cell: cell.case.get("dtype", "float32") != "float32",
        )
    leave_out("short of memory by allocator retries", lambda cell: bool(cell.peak("alloc_retries")))
    least = min(left, key=lambda cell: cell.memory or 0, default=None)
    if least is not None:
        peak = f"the peak is above {ceiling.said(least)}"
        leave_out(peak, lambda cell: ceiling.holds(cell) is False)
    notes = [
        f"Left out, {reason}: {'; '.join(cell.name for cell in out)}."
        for reason, out in reasons.items()
        if out
    ]
    if not left:
        notes.append("No case is left to recommend.")
        if least is not None:
            notes[-1] += f" The least peak is {format_bytes(least.memory or 0)} ({least.name})."
    return left, notes


def _for_inference(left: Sequence[ModelCell], ceiling: Ceiling) -> list[Choice]:
    fast = min(left, key=_seconds)
    alike = sum(1 for cell in left if cell is not fast and not _slower(fast, cell))
    why = f"the shortest step of {plural(len(left), 'case')}"
    if alike:
        why += f", not distinguishable from {plural(alike, 'other')}"
    latency = Choice(
        "latency", fast, infer_settings(fast), _sentence("latency", fast, why, ceiling)
    )

    best = max(left, key=_rate)
    plateau = [cell for cell in left if _on_plateau(cell, best)]
    small = min(plateau, key=lambda cell: (pixels_of(cell.tile) * cell.batch, cell.memory or 0))
    why = f"the most of {plural(len(left), 'case')}"
    if small is not best:
        why = (
            f"the smallest of {plural(len(plateau), 'case')} on the plateau, "
            f"whose best is {best.name} with {format_count(_rate(best))}"
        )
    throughput = Choice(
        "throughput", small, infer_settings(small), _sentence("throughput", small, why, ceiling)
    )
    return [throughput, latency]


def _for_training(left: Sequence[ModelCell], largest: int, ceiling: Ceiling) -> Choice:
    """The choice for training, of several steps if the batch ``largest`` does not fit."""
    best = max(left, key=_rate)
    steps = math.ceil(largest / best.batch)
    why = f"the most of {plural(len(left), 'case')}"
    if steps > 1:
        why += f", and {steps} accumulated steps make a batch of {steps * best.batch}"
    sentence = _sentence("training", best, why, ceiling)
    return Choice("training", best, train_settings(best, steps), sentence)


def _seconds(cell: ModelCell) -> float:
    assert cell.time is not None
    return cell.time.value


def _rate(cell: ModelCell) -> float:
    return cell.rate("useful_pixels") or 0.0


def _on_plateau(cell: ModelCell, best: ModelCell) -> bool:
    if _rate(cell) >= (1 - PLATEAU) * _rate(best):
        return True
    gain = speed_up(cell_ratio(best, cell), best, cell, "useful_pixels")
    return gain is not None and gain.low is not None and not gain.excludes(1)


def _slower(a: ModelCell, b: ModelCell) -> bool:
    """Whether ``b`` surely takes longer than ``a``. True for single launches, without intervals."""
    time = cell_ratio(a, b)
    return time.low is None or time.excludes(1)


def _sentence(goal: _Goal, cell: ModelCell, why: str, ceiling: Ceiling) -> str:
    time, rate = cell.time, cell.rate("useful_pixels")
    assert time is not None
    ends = bracket(time, plural(cell.launches, "launch"))
    useful = "useful pixels" if cell.case.get("halo") else "pixels"
    speed = f", {format_count(rate)} {useful} per second" if rate else ""
    memory = "nothing is known of its memory, so nothing is said of the margin"
    if ceiling.holds(cell):
        memory = f"its peak, {format_bytes(cell.memory or 0)}, is within {ceiling.said(cell)}"
    elif cell.memory is not None:
        memory = f"its peak is {format_bytes(cell.memory)}, of a memory whose size is not known"
    return (
        f"For {goal}: {cell.case['model']}, tile {cell.name}: "
        f"{format_seconds(time.value)} a step {ends}{speed}: {why}; {memory}.{_doubt(cell)}"
    )


def _doubt(cell: ModelCell) -> str:
    """A sentence on the reasons not to rely on a choice; empty if there are none."""
    doubts = []
    if cell.launches == 1:
        doubts.append("it was measured in one launch, and another may differ")
    if unsettled := sum(record.warmup.settled is False for record in cell.measured):
        launches = plural(cell.launches, "launch")
        doubts.append(f"it was still unsteady after warm-up in {unsettled} of {launches}")
    return f" But {', and '.join(doubts)}: measure again before relying on it." if doubts else ""


def infer_settings(cell: ModelCell) -> dict[str, Any]:
    """The settings of ``penstock infer``. The overlap is the halos of two neighbours."""
    case = cell.case
    amp = "off" if not case.get("amp") else "fp16" if "cuda" in case["device"] else "bf16"
    settings = {
        "model_type": case["model"],
        "weights": case.get("weights"),
        "in_channels": case.get("channels"),
        "patch": cell.fact("tile_shape") or [int(side) for side in cell.tile.split("x")],
        "overlap": 2 * case.get("halo", 0),
        "batch": cell.batch,
        "devices": [case["device"]],
        "amp": amp,
        "tf32": case.get("tf32"),
        "compile": case.get("compile", False),
        "threads": case.get("threads"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def train_settings(cell: ModelCell, grad_accum_steps: int) -> dict[str, Any]:
    """The settings of ``penstock train pairs``."""
    case = cell.case
    settings = {
        "model": case["model"],
        "weights": case.get("weights"),
        "channels": case.get("channels"),
        "tile_size": int(cell.tile) if cell.tile.isdigit() else cell.tile,
        "batch_size": cell.batch,
        "grad_accum_steps": grad_accum_steps,
        "device": case["device"].partition(":")[0],
        **{name: case.get(name) for name in ("dtype", *VARIANTS)},
    }
    return {name: value for name, value in settings.items() if value is not None}


_USE = {
    "training": "penstock train pairs --config {file} --in-spec INPUT --target-spec TARGET",
    "throughput": "penstock infer --config {file} --in-spec INPUT --out-spec OUTPUT",
}
"""The command line that uses a file of settings, by its goal."""


def write_model_yaml(
    recommendation: Recommendation, path: Path, replace: bool = False
) -> list[Path]:
    """Write settings as YAML, with all reasons as comments.

    The first model's settings for throughput or for training count.

    Args:
        recommendation: What `recommend` returned.
        path: The file.
        replace: Replace a file that Penstock did not write.

    Returns:
        The file; none if nothing is recommended.

    Raises:
        UsageError: The file cannot be written.
    """
    counts = next((c for c in recommendation.choices if c.goal in _USE), None)
    if counts is None:
        return []
    others = [choice.sentence for choice in recommendation.choices if choice is not counts]
    use = _USE[counts.goal].format(file=path.name)
    sentences = (use, counts.sentence, *others, *recommendation.notes)
    write_settings_yaml("--recommend", counts.settings, sentences, path, replace)
    return [path]
