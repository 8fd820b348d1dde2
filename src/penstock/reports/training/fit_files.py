"""The content of a training's folder. Files may be missing or damaged."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import ARGS, STEPS, UsageError, knobs_of_others
from ...instruments import PHASES, peak_of_ranks, phases_of_ranks
from ...models import read_training_record

MOST_STEPS = 500_000
"""Steps of a rank that a report reads."""


@dataclass(frozen=True)
class Steps:
    """The steps of one rank. Arrays have a value for each step; a step that was not timed is
    NaN."""

    rank: int
    epoch: NDArray[np.float64]
    loss: NDArray[np.float64]
    seconds: Mapping[str, NDArray[np.float64]]
    """Seconds of ``step`` and of each phase."""

    def shares(self, phase: str) -> list[float]:
        """The share of a phase in the seconds of the steps of each epoch in which it was timed."""
        shares = []
        for number in np.unique(self.epoch[np.isfinite(self.epoch)]):
            at = self.epoch == number
            part, whole = (np.nansum(self.seconds[name][at]) for name in (phase, "step"))
            if whole > 0 and np.isfinite(self.seconds[phase][at]).any():
                shares.append(float(part / whole))
        return shares


@dataclass(frozen=True)
class TrainingFolder:
    """A training, finished or not."""

    folder: Path
    args: Mapping[str, Any]
    results: Mapping[str, Any]
    """Content of training_results.json; empty before the end of the first epoch."""

    @classmethod
    def read(cls, folder: Path) -> TrainingFolder:
        """Read the folder of a training.

        Raises `UsageError` if it is none.
        """
        record = read_training_record(folder)
        if not (record.args or record.results):
            raise UsageError(f"{folder} is not the folder of a training")
        return cls(folder, record.args, record.results)

    @cached_property
    def steps(self) -> Sequence[Steps]:
        """The steps of each rank. They are read when they are asked for, because a list of many
        trainings does not show them."""
        paths = sorted((self.folder / STEPS).glob("rank*.csv"))
        steps = [each for path in paths if (each := _steps(path)) is not None]
        return sorted(steps, key=lambda each: each.rank)

    @property
    def began(self) -> float | None:
        """The time at which it was started."""
        file = self.folder / ARGS
        return file.stat().st_mtime if file.is_file() else None

    @property
    def workload(self) -> str:
        return str(self.results.get("workload") or self.args.get("workload") or "training")

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments without those that only other workloads take."""
        others = knobs_of_others(self.workload)
        return {name: value for name, value in self.args.items() if name not in others}

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each epoch."""
        return [row for row in self.results.get("history") or [] if isinstance(row, dict)]

    @cached_property
    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """The values of each score by epoch: losses, accuracies and the like."""
        scores: dict[str, list[tuple[int, float]]] = {}
        values = [(row, name, value) for row in self.history for name, value in row.items()]
        for row, name, value in values:
            timed = name in ("train_s", "val_s") or not name.startswith(("train_", "val_"))
            if not timed and isinstance(value, int | float):
                scores.setdefault(name, []).append((int(row["epoch"]), float(value)))
        return scores

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, the mean over ranks; empty if none was timed."""
        return phases_of_ranks(self.results)

    @property
    def peaks(self) -> dict[str, int]:
        """The largest peak of memory of any rank, in bytes, by its kind; only those measured."""
        names = ("host_peak", "device_peak", "device_reserved")
        peaks = {name: peak_of_ranks(self.results, name) for name in names}
        return {name: peak for name, peak in peaks.items() if peak is not None}


def _steps(path: Path) -> Steps | None:
    """The steps of a file; None if it holds none."""
    names = ("epoch", "loss", *(f"{name}_s" for name in ("step", *PHASES)))
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        steps = islice(csv.DictReader(file), MOST_STEPS)
        rows = [[_number(row.get(name)) for name in names] for row in steps]
    if not rows:
        return None
    arrays = dict(zip(names, np.array(rows).T, strict=True))
    rank = int("".join(filter(str.isdigit, path.stem)) or 0)
    seconds = {name.removesuffix("_s"): arrays[name] for name in names[2:]}
    return Steps(rank, arrays["epoch"], arrays["loss"], seconds)


def _number(text: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return float(text)
    return float("nan")
