"""The steps of a rank on disk, a row each, and what its process held at most."""

from __future__ import annotations

import csv
import json
import math
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from .laps import PHASES, DeviceLaps, Laps

STEPS = "steps"
_COLUMNS = ("step", "epoch", "samples", "loss", "step_s", *(f"{phase}_s" for phase in PHASES))


class StepLog:
    """The steps of a rank, a row each. A run that goes on drops the rows that it takes again."""

    def __init__(self, out: Path, rank: int, done: int) -> None:
        self.path = out / STEPS / f"rank{rank}.csv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in self._rows() if int(row["step"]) <= done] if done else []
        self._file = self.path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, _COLUMNS)
        self._writer.writeheader()
        self._writer.writerows(kept)

    def add(
        self, step: int, epoch: int, samples: int, loss: float, seconds: Mapping[str, float]
    ) -> None:
        times = {f"{name}_s": f"{value:.9f}" for name, value in seconds.items()}
        row = {"step": step, "epoch": epoch, "samples": samples, "loss": loss}
        self._writer.writerow({**row, **times})

    def summary(self) -> dict[str, dict[str, float] | None]:
        """Of the step and each phase the seconds in all and the median; None where it had none."""
        self._file.flush()
        rows = self._rows()
        told: dict[str, dict[str, float] | None] = {}
        for name in ("step", *PHASES):
            values = [float(row[f"{name}_s"]) for row in rows if row[f"{name}_s"]]
            told[name] = {"total_s": sum(values), "median_s": median(values)} if values else None
        return told

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.is_file():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))


def memory(device: torch.device) -> dict[str, int | None]:
    """Peaks of this process, in bytes: of the host, and of its device where that keeps them."""
    unit = 1 if sys.platform == "darwin" else 1024
    told: dict[str, int | None] = {
        "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device_peak": None,
        "device_reserved": None,
    }
    if device.type == "cuda":
        told["device_peak"] = torch.cuda.max_memory_allocated(device)
        told["device_reserved"] = torch.cuda.max_memory_reserved(device)
    return told


def mark_computed(loss: Tensor, laps: Laps | DeviceLaps) -> None:
    """End the lap of the backward pass when all gradients are computed, before DDP waits for sums.

    Autograd calls back when its work is done, in the order in which that was asked for: DDP asks
    when its last gradient is there, and we ask when the first begins.
    """
    engine = torch.autograd.Variable._execution_engine

    def ask(gradient: Tensor) -> None:
        engine.queue_callback(lambda: laps.lap("backward"))

    loss.register_hook(ask)


def write_json(path: Path, value: Any) -> None:
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")
    part.replace(path)


def _finite(value: Any) -> Any:
    """JSON has no NaN; what is no number is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
