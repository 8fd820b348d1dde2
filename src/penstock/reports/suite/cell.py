"""One run of a suite with all its launches: the results of its trainings, and its row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from ...base import group_by, plural
from ...bench import launch_folder
from ...instruments import Interval, Record, peak_of_ranks, phases_of_ranks
from ..cell import Cell, bootstrap_ratio, machine_namer, middle

LIMITS = {
    "data": ("data_wait",),
    "transfer": ("transfer",),
    "compute": ("forward", "backward", "optimizer"),
    "communication": ("communication",),
}
"""The possible limits of a training, each with the phases that it takes."""


class SuiteCell(Cell):
    """All launches of one batch size with one number of workers."""

    @property
    def batch(self) -> int:
        return int(self.case["batch_size"])

    @property
    def workers(self) -> int:
        return int(self.case["num_workers"])

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {plural(self.workers, 'worker')}"

    @cached_property
    def trainings(self) -> list[Mapping[str, Any]]:
        """The results of each training that was ok."""
        return [record.facts["training"] for record in self.measured]

    @property
    def rates(self) -> list[float]:
        """Samples a second, by launch."""
        return [training["samples_per_s"] for training in self.trainings]

    @cached_property
    def throughput(self) -> Interval | None:
        """Samples a second."""
        if not self.rates:
            return None
        return bootstrap_ratio([[1.0]] * len(self.rates), [[rate] for rate in self.rates])

    def shares_of(self, limit: str) -> list[float]:
        """The share of a limit in the seconds of each training's epochs.

        If a GPU computes while its host waits for data, both count, and shares may add up to more
        than 1.
        """
        shares = []
        for training in self.trainings:
            phases = phases_of_ranks(training)
            seconds = [phases[name] for name in LIMITS[limit] if name in phases]
            shares += [sum(seconds) / training["training_s"]] * bool(seconds)
        return shares

    @property
    def shares(self) -> dict[str, float | None]:
        return {limit: middle(self.shares_of(limit)) for limit in LIMITS}

    @property
    def limited_by(self) -> str | None:
        """The limit with the largest share of the epochs; None if no phase was timed."""
        shares = {limit: share for limit, share in self.shares.items() if share is not None}
        return max(shares, key=lambda limit: shares[limit], default=None)

    def values(self) -> dict[str, Any]:
        """The row of a report, in plain values."""
        memory, gpu = self.case["profile_memory"], self.case["profile_gpu"]
        rate, finals = self.throughput, [each["final"] or {} for each in self.trainings]
        used = [record.facts["utilisation"] for record in self.measured]
        peaks = {
            name: max(filter(None, (peak_of_ranks(t, name) for t in self.trainings)), default=None)
            for name in ("device_peak", "device_reserved")
        }
        return {
            "preset": self.case["preset"],
            "batch_size": self.batch,
            "num_workers": self.workers,
            "world_size": self.case["world_size"],
            "status": self.status,
            "error": self.failure and self.failure.message,
            "launches": self.launches,
            "failed": len(self.records) - self.launches,
            "samples": self.work("samples"),
            "training_time_s": middle(record.samples_s["step"][0] for record in self.measured),
            "validation_time_s": middle(each["validation_s"] for each in self.trainings),
            "epoch_times_s": [training["epoch_times_s"] for training in self.trainings],
            "throughput_samples_per_s": rate and rate.value,
            "throughput_low": rate and rate.low,
            "throughput_high": rate and rate.high,
            "gpu_memory_peak_bytes": peaks["device_peak"] if memory else None,
            "gpu_memory_reserved_bytes": peaks["device_reserved"] if memory else None,
            "host_memory_peak_bytes": self.host_peak if memory else None,
            "gpu_utilization_percent": middle(u["gpu_percent"] for u in used) if gpu else None,
            "cpu_utilization_percent": middle(u["cpu_percent"] for u in used),
            "map": middle(final.get("val_AP") for final in finals),
            "map50": middle(final.get("val_AP50") for final in finals),
            "loc_fscore": middle(final.get("val_loc_fscore") for final in finals),
            "shares": self.shares,
            "limited_by": self.limited_by,
            "folders": [launch_folder(record.case, record.launch) for record in self.records],
        }


def suite_cells(records: Iterable[Record]) -> list[SuiteCell]:
    """The runs of a suite, sorted by preset, batch size and number of workers."""
    cells = SuiteCell.of_records(records, "train")
    return sorted(cells, key=lambda cell: (cell.case["preset"], cell.batch, cell.workers))


def runs_together(records: Iterable[Record]) -> dict[str, list[SuiteCell]]:
    """The runs that may be compared: those of one preset on one machine.

    Args:
        records: The launches of one or more suites.

    Returns:
        The runs by the name of their preset and, if there are several machines, of their machine.
    """
    cells = suite_cells(records)
    machine = machine_namer(cells)
    return group_by(cells, lambda cell: f"{cell.case['preset']}{machine(cell)}")
