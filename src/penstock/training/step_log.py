"""The times of a rank's steps on disk, one row each, and the peak memory of its process."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch

from ..base import STEPS, replacing
from ..instruments import PHASES, peak_rss

_COLUMNS = ("step", "epoch", "samples", "loss", "step_s", *(f"{phase}_s" for phase in PHASES))


class StepLog:
    """The CSV of a rank's steps, one row each. A resumed run drops the rows of steps that it
    repeats."""

    def __init__(self, out: Path, rank: int, done: int) -> None:
        self.path = out / STEPS / f"rank{rank}.csv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in self._rows() if int(row["step"]) <= done] if done else []
        with replacing(self.path) as draft, draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        self._file = self.path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, _COLUMNS)

    def add(
        self, step: int, epoch: int, samples: int, loss: float, seconds: Mapping[str, float]
    ) -> None:
        """Add the row of a step; ``seconds`` holds the times of ``step`` and of its phases."""
        times = {f"{name}_s": f"{value:.9f}" for name, value in seconds.items()}
        row = {"step": step, "epoch": epoch, "samples": samples, "loss": loss}
        self._writer.writerow({**row, **times})

    def flush(self) -> None:
        """Write the rows to the file, so that they are kept if the process is killed."""
        try:
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)
            raise

    def summary(self) -> dict[str, dict[str, float] | None]:
        """The total and median seconds of the step and of each phase; None for a phase without
        times."""
        self.flush()
        rows = self._rows()
        totals: dict[str, dict[str, float] | None] = {}
        for name in ("step", *PHASES):
            values = [float(row[f"{name}_s"]) for row in rows if row[f"{name}_s"]]
            totals[name] = {"total_s": sum(values), "median_s": median(values)} if values else None
        return totals

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.is_file():
            return []
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]  # a killed process may leave half a row
        return list(csv.DictReader(whole.splitlines()))


def memory(device: torch.device) -> dict[str, int | None]:
    """The peaks of memory of this process in bytes: on the host, and on a CUDA device."""
    on_cuda = device.type == "cuda"
    return {
        "host_peak": peak_rss(),
        "device_peak": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "device_reserved": torch.cuda.max_memory_reserved(device) if on_cuda else None,
    }
