"""One case of a model benchmark with all its launches, and comparisons of two cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bench import pixels_of
from ..instruments import (
    Interval,
    Record,
    commit_of,
    drift,
    hierarchical_bootstrap_ratio,
    median_interval,
)
from .table import MB, Row, csv_field, scaled

SEED_COLUMNS = tuple(
    "timestamp mode tile_size batch_size device model_params model_size_mb avg_time_ms std_time_ms "
    "throughput_samples_per_sec memory_allocated_mb memory_reserved_mb memory_peak_mb "
    "forward_time_ms backward_time_ms total_time_ms error".split()
)
"""First in every file. Forward, backward and total (the optimizer included) are of mode train."""

COLUMNS = SEED_COLUMNS + tuple(
    "model weights channels dtype amp compile channels_last tf32 checkpointing halo threads seed "
    "budget_mb status launches failed samples unsettled median_time_ms low_time_ms high_time_ms "
    "optimizer_time_ms pixels_per_sec useful_pixels_per_sec host_peak_mb host_counted_mb "
    "memory_driver_mb "
    "alloc_retries flops_per_step flops_per_sec structure machine_key commit key".split()
)


VARIANTS = ("amp", "compile", "channels_last", "tf32", "checkpointing")

NOTABLE_DRIFT = 0.02
"""A smaller change within a launch is not worth a word."""


THROTTLES = {
    0x04: "its power cap",
    0x08: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "a power brake",
}
"""Bits of NVML's reasons that slow a GPU down; to be idle, or set so by its user, is no trouble."""


_DRAWS = 2000


@dataclass(frozen=True)
class Cell:
    """All launches of one case on one machine."""

    records: tuple[Record, ...]

    @property
    def case(self) -> Mapping[str, Any]:
        return self.records[0].case

    @property
    def tile(self) -> str:
        return str(self.case["tile"])

    @property
    def batch(self) -> int:
        return int(self.case["batch"])

    @property
    def name(self) -> str:
        """Its tile, its batch and what is switched on."""
        switched = [name.replace("_", " ") for name in VARIANTS if self.case.get(name)]
        if halo := self.case.get("halo"):
            switched.append(f"halo {halo}")
        return ", ".join([self.tile, f"batch {self.batch}", *switched])

    @property
    def status(self) -> str:
        """``ok`` where every launch was; else the failure that most of them met."""
        failures = Counter(record.status for record in self.records if not record.ok)
        return failures.most_common(1)[0][0] if failures else "ok"

    @cached_property
    def measured(self) -> tuple[Record, ...]:
        """The launches that were ok."""
        return tuple(record for record in self.records if record.ok)

    @property
    def launches(self) -> int:
        return len(self.measured)

    @cached_property
    def times(self) -> list[NDArray[np.float64]]:
        """Seconds of each sample of a step, by launch."""
        return [np.asarray(record.samples_s["step"]) for record in self.measured]

    @cached_property
    def time(self) -> Interval | None:
        """Median seconds of a step. With one launch, the interval is of that launch alone."""
        if not self.times:
            return None
        if len(self.times) == 1:
            return median_interval(self.times[0])
        return _bootstrap([np.ones(1), np.ones(1)], self.times)

    @cached_property
    def drifts(self) -> list[float]:
        """How much the time of a step rose within a launch, of those where it surely did."""
        trends = [drift(times) for times in self.times]
        return [t.value for t in trends if t.excludes(0) and abs(t.value) >= NOTABLE_DRIFT]

    @property
    def throttled(self) -> list[str]:
        """Why the GPU's clocks were held down at any reading."""
        bits = 0
        for record in self.measured:
            for reading in record.clocks:
                bits |= reading.get("throttle_reasons") or 0
        return list(dict.fromkeys(why for bit, why in THROTTLES.items() if bits & bit))

    def mean(self, phase: str = "step") -> float | None:
        """Total seconds over total steps."""
        seconds, steps = 0.0, 0
        for record in self.measured:
            samples = record.samples_s.get(phase, ())
            seconds += sum(samples) * record.steps_per_sample
            steps += len(samples) * record.steps_per_sample
        return seconds / steps if steps else None

    @property
    def std(self) -> float | None:
        """Of all samples of all launches."""
        samples = np.concatenate(self.times) if self.times else np.empty(0)
        return float(samples.std()) if len(samples) > 1 else None

    def work(self, quantity: str) -> float | None:
        """Of one step; the same in every launch of a case."""
        return self.measured[0].work.get(quantity) if self.measured else None

    def rate(self, quantity: str) -> float | None:
        """Work of a step over its median time, in units a second."""
        work = self.work(quantity)
        return work / self.time.value if work is not None and self.time else None

    def mean_rate(self, quantity: str) -> float | None:
        """Total work over total time, in units a second."""
        work, seconds = self.work(quantity), self.mean()
        return work / seconds if work is not None and seconds else None

    def peak(self, *names: str) -> int | None:
        """The most that any launch, a failed one too, read of these fields of its memory."""
        read = [getattr(record.memory, name) for record in self.records for name in names]
        return max((value for value in read if value is not None), default=None)

    @property
    def memory(self) -> int | None:
        """The peak that decides whether a case fits: what the driver counted, or the allocator
        where the driver is silent; on a CPU the host's, and under a budget what that counts."""
        if self.case["device"] == "cpu":
            counted = self.peak("host_counted") if self.case.get("budget") else None
            return self.host_peak if counted is None else counted
        for name in ("device_driver", "device_reserved", "device_peak"):
            if (peak := self.peak(name)) is not None:
                return peak
        return None

    @property
    def host_peak(self) -> int | None:
        return self.peak("host_peak", "host_peak_kernel")

    def fact(self, name: str) -> Any:
        return next((r.facts[name] for r in self.records if name in r.facts), None)

    def environment(self, name: str) -> Any:
        return self.records[-1].environment.get(name)

    @cached_property
    def row(self) -> Row:
        """The cell as a row of the CSV."""
        case, training = self.case, self.case["mode"] == "train"
        time = self.time or Interval(np.nan, None, None, 0)
        failure = next((r.error for r in self.records if r.error is not None), None)
        error = (
            "" if self.status == "ok" else f"{self.status}: {failure.message if failure else ''}"
        )
        values = {
            **{name: case.get(name) for name in COLUMNS},
            "timestamp": max(record.time for record in self.records),
            "tile_size": self.tile,
            "batch_size": self.batch,
            "model_params": self.fact("parameters"),
            "model_size_mb": scaled(self.fact("model_bytes"), 1 / MB),
            "avg_time_ms": scaled(self.mean(), 1e3),
            "std_time_ms": scaled(self.std, 1e3),
            "throughput_samples_per_sec": self.mean_rate("samples"),
            "memory_allocated_mb": scaled(self.peak("device_allocated"), 1 / MB),
            "memory_reserved_mb": scaled(self.peak("device_reserved"), 1 / MB),
            "memory_peak_mb": scaled(self.peak("device_peak"), 1 / MB),
            "forward_time_ms": scaled(self.mean("forward"), 1e3),
            "backward_time_ms": scaled(self.mean("backward"), 1e3),
            "optimizer_time_ms": scaled(self.mean("optimizer"), 1e3),
            "total_time_ms": scaled(self.mean(), 1e3) if training else None,
            "error": "OOM" if self.status.startswith("oom") else " ".join(error.split()),
            "budget_mb": scaled(case.get("budget"), 1 / MB),
            "status": self.status,
            "launches": self.launches,
            "failed": len(self.records) - self.launches,
            "samples": sum(map(len, self.times)),
            "unsettled": sum(record.warmup.settled is False for record in self.measured),
            "median_time_ms": scaled(time.value, 1e3),
            "low_time_ms": scaled(time.low, 1e3),
            "high_time_ms": scaled(time.high, 1e3),
            "pixels_per_sec": self.mean_rate("pixels"),
            "useful_pixels_per_sec": self.mean_rate("useful_pixels"),
            "host_peak_mb": scaled(self.host_peak, 1 / MB),
            "host_counted_mb": scaled(self.peak("host_counted"), 1 / MB),
            "memory_driver_mb": scaled(self.peak("device_driver"), 1 / MB),
            "alloc_retries": self.peak("alloc_retries"),
            "flops_per_step": self.work("flops"),
            "flops_per_sec": self.mean_rate("flops"),
            "structure": self.fact("structure"),
            "machine_key": self.environment("machine_key"),
            "commit": commit_of(self.environment("git")),
            "key": self.records[0].key,
        }
        return {name: csv_field(values[name]) for name in COLUMNS}


def model_cells(records: Iterable[Record]) -> list[Cell]:
    """The launches of scenario ``model``, by case and machine; small tiles and batches first."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.scenario == "model":
            machine = record.environment.get("machine_key")
            found.setdefault((record.key, machine), []).append(record)
    all_cells = [Cell(tuple(launches)) for launches in found.values()]
    return sorted(all_cells, key=lambda cell: (pixels_of(cell.tile), cell.tile, cell.batch))


def cell_ratio(a: Cell, b: Cell) -> Interval:
    """The median time of a step of ``b`` over that of ``a``, both measured."""
    return _bootstrap(a.times, b.times)


def speed_up(time: Interval, a: Cell, b: Cell, quantity: str) -> Interval | None:
    """Units a second of ``b`` over those of ``a``, from the ratio of their times; None where
    nobody counted them."""
    before, after = a.work(quantity), b.work(quantity)
    return inverse(time, after / before) if before and after else None


def _bootstrap(a: Sequence[NDArray[np.float64]], b: Sequence[NDArray[np.float64]]) -> Interval:
    # The same seed always: a report drawn twice from the same records is the same to the digit.
    return hierarchical_bootstrap_ratio(a, b, _DRAWS, np.random.default_rng(0))


def inverse(ratio: Interval, work: float = 1.0) -> Interval:
    """The ratio of rates that a ratio of times means, for so many times the work."""
    low, high = (None if end is None else work / end for end in (ratio.high, ratio.low))
    return Interval(work / ratio.value, low, high, ratio.n)
