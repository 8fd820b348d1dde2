"""One case of a model benchmark with all its launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...bench import pixels_of
from ...instruments import Interval, Record
from ..cell import Cell
from ..table import MB, Columns, scaled

SEED_COLUMNS = tuple(
    "timestamp mode tile_size batch_size device model_params model_size_mb avg_time_ms std_time_ms "
    "throughput_samples_per_sec memory_allocated_mb memory_reserved_mb memory_peak_mb "
    "forward_time_ms backward_time_ms total_time_ms error".split()
)
"""The first columns of every file. Forward, backward and total times, the last with the optimizer,
are of mode train."""

MODEL_COLUMNS = Columns(
    SEED_COLUMNS
    + tuple(
        "model weights channels dtype amp compile channels_last tf32 checkpointing halo threads "
        "seed budget_mb status launches failed samples unsettled median_time_ms low_time_ms "
        "high_time_ms optimizer_time_ms pixels_per_sec useful_pixels_per_sec host_peak_mb "
        "host_counted_mb memory_driver_mb alloc_retries structure "
        "machine_key commit key".split()
    ),
    ("tile_size", "batch_size"),
    tuple(
        "model weights mode device dtype channels amp compile channels_last tf32 checkpointing "
        "halo threads seed budget_mb machine_key".split()
    ),
)

PHASES = ("forward", "backward", "optimizer")
VARIANTS = ("amp", "compile", "channels_last", "tf32", "checkpointing")

THROTTLES = {
    0x04: "its power cap",
    0x08: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "a power brake",
}
"""NVML's reasons for slow clocks that mean trouble, by bit. An idle GPU and user-set clocks are
none."""

_FAILURES = {
    "oom_device": "OOM",
    "oom_host": "OOM host",
    "wrong_result": "wrong",
    "unsupported": "n/a",
}
"""Labels of failures in figures. A status that is not listed is its own label."""


class ModelCell(Cell):
    """All launches of one model with one tile and batch."""

    columns = MODEL_COLUMNS

    @property
    def tile(self) -> str:
        return str(self.case["tile"])

    @property
    def name(self) -> str:
        """The tile, the batch and the options that are switched on."""
        switched = [name.replace("_", " ") for name in VARIANTS if self.case.get(name)]
        if halo := self.case.get("halo"):
            switched.append(f"halo {halo}")
        return ", ".join([self.tile, f"batch {self.batch}", *switched])

    @property
    def error(self) -> str:
        """``OOM``, as in the seed's files, or the status and the message; empty if all is well."""
        if self.status.startswith("oom"):
            return "OOM"
        return "" if self.status == "ok" else f"{self.status}: {super().error}".strip()

    @property
    def throttled(self) -> list[str]:
        """The reasons for which the GPU's clocks were held down at any reading."""
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
        """The standard deviation over all samples of all launches."""
        samples = np.concatenate(self.times) if self.times else np.empty(0)
        return float(samples.std()) if len(samples) > 1 else None

    def mean_rate(self, quantity: str) -> float | None:
        """Total work over total time, in units a second."""
        work, seconds = self.work(quantity), self.mean()
        return work / seconds if work is not None and seconds else None

    @property
    def memory(self) -> int | None:
        """The peak in bytes that decides whether a case fits.

        It is the driver's count, or the allocator's if the driver gives none. On a CPU it is the
        host's, and under a budget the count that the budget limits.
        """
        if self.case["device"] == "cpu":
            counted = self.peak("host_counted") if self.case.get("budget") else None
            return self.host_peak if counted is None else counted
        peaks = map(self.peak, ("device_driver", "device_reserved", "device_peak"))
        return next((peak for peak in peaks if peak is not None), None)

    @property
    def about(self) -> dict[str, Any]:
        return super().about | {
            "tile_size": self.tile,
            "budget_mb": scaled(self.case.get("budget"), 1 / MB),
            "structure": self.fact("structure"),
        }

    def values(self) -> dict[str, Any]:
        time = self.time or Interval(np.nan, None, None, 0)
        mean_ms = {phase: scaled(self.mean(phase), 1e3) for phase in ("step", *PHASES)}
        peaks = ("device_allocated", "device_reserved", "device_peak", "device_driver")
        allocated, reserved, peak, driver = (scaled(self.peak(name), 1 / MB) for name in peaks)
        return {
            "model_params": self.fact("parameters"),
            "model_size_mb": scaled(self.fact("model_bytes"), 1 / MB),
            "avg_time_ms": mean_ms["step"],
            "std_time_ms": scaled(self.std, 1e3),
            "throughput_samples_per_sec": self.mean_rate("samples"),
            "memory_allocated_mb": allocated,
            "memory_reserved_mb": reserved,
            "memory_peak_mb": peak,
            **{f"{phase}_time_ms": mean_ms[phase] for phase in PHASES},
            "total_time_ms": mean_ms["step"] if self.case["mode"] == "train" else None,
            "samples": sum(map(len, self.times)),
            "unsettled": sum(record.warmup.settled is False for record in self.measured),
            "median_time_ms": scaled(time.value, 1e3),
            "low_time_ms": scaled(time.low, 1e3),
            "high_time_ms": scaled(time.high, 1e3),
            "pixels_per_sec": self.mean_rate("pixels"),
            "useful_pixels_per_sec": self.mean_rate("useful_pixels"),
            "host_peak_mb": scaled(self.host_peak, 1 / MB),
            "host_counted_mb": scaled(self.peak("host_counted"), 1 / MB),
            "memory_driver_mb": driver,
            "alloc_retries": self.peak("alloc_retries"),
        }

    # Figures draw the following, which come from the row, so that the records or the CSV will do.
    # NaN is a missing number.

    @property
    def failed_word(self) -> str:
        """The failure in a word; empty if the case was measured."""
        status = self.row.get("status", "")
        return self.row.get("error", "") if status in ("", "ok") else _FAILURES.get(status, status)

    @property
    def haloed(self) -> bool:
        """Whether fewer pixels are useful than are computed."""
        return int(self.row.get("halo") or 0) > 0

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step: the median, or the mean of the seed's rows."""
        return self.number("median_time_ms", "avg_time_ms", "total_time_ms")

    @property
    def ends_ms(self) -> tuple[float, float]:
        """The interval of `step_ms`."""
        return self.number("low_time_ms"), self.number("high_time_ms")

    @property
    def phases_ms(self) -> dict[str, float]:
        """The mean milliseconds of each phase that was measured."""
        times = {phase: self.number(f"{phase}_time_ms") for phase in PHASES}
        return {phase: time for phase, time in times.items() if np.isfinite(time)}

    @property
    def samples_per_s(self) -> float:
        """Samples a second of the median step, or of the mean step if a row has no median."""
        if self.row.get("median_time_ms"):
            return 1e3 * self.batch / self.number("median_time_ms")
        return self.number("throughput_samples_per_sec")

    @property
    def pixels_of_sample(self) -> float:
        """Useful pixels of one sample."""
        useful = self.number("useful_pixels_per_sec")
        rate = self.number("throughput_samples_per_sec")
        if useful > 0 and rate > 0:
            return useful / rate
        return np.nan if self.haloed else pixels_of(self.tile)  # tiles of the seed are squares

    @property
    def pixels_per_s(self) -> float:
        """Useful pixels a second."""
        return self.pixels_of_sample * self.samples_per_s

    @property
    def budget_bytes(self) -> float:
        return self.number("budget_mb") * MB

    def peak_bytes(self, on_host: bool) -> float:
        """Peak memory in bytes, of the host or of the device. Under a budget of the host, it is the
        count that the budget limits.

        NaN for a failed case: its true peak may be higher than what was read. Files of the seed
        hold 0 for a device if there is no GPU; this is NaN, too.
        """
        counted = ("host_counted_mb",) if on_host and np.isfinite(self.budget_bytes) else ()
        names = (*counted, "host_peak_mb") if on_host else ("memory_peak_mb",)
        peak = self.number(*names) * MB
        return peak if np.isfinite(self.step_ms) and (on_host or peak > 0) else np.nan


UNTIMED = dict.fromkeys(
    "avg_time_ms std_time_ms throughput_samples_per_sec forward_time_ms backward_time_ms "
    "total_time_ms samples unsettled median_time_ms low_time_ms high_time_ms optimizer_time_ms "
    "pixels_per_sec useful_pixels_per_sec".split(),
    "",
)
"""The columns that stay empty if a launch only tried whether a case fits into memory."""


def model_cells(records: Iterable[Record]) -> list[ModelCell]:
    """The launches of scenario ``model``, by case and machine; small tiles and batches first."""
    cells = ModelCell.of_records(records, "model")
    return sorted(cells, key=lambda cell: (pixels_of(cell.tile), cell.tile, cell.batch))
