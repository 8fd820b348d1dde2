"""The measuring loop: times the steps of a scenario until their time is known well enough.

    first call | warm-up . . . . . . . . | window  window  window  window ...
                 until settled or capped   until precise, noise stable, or out of time

A **window** is a block of steps between two readings of the clock. It gives one sample: its seconds
divided by its steps. On a device it begins with an empty queue and ends with its only
synchronisation, so that the host can run ahead within it, as in a program. ``step`` is the wall
clock of the host over the window. ``device`` and the phases are read from events on the current
stream, and on a CPU from the same clock. What a step does after its last phase is in none of them.

Everything else happens between windows: statistics, readings of the driver, reports. Python's
garbage collector stays on, as in a program, so that cycles that hold tensors are freed. Objects
that are alive when sampling begins are frozen, so that a full collection does not walk through
torch.

Peaks of memory are over the life of the process. A launch is a fresh process, so nothing is reset.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..base import frozen_garbage
from ..instruments import (
    Clock,
    DevicePhaseTimer,
    Gpu,
    PhaseTimer,
    StopRule,
    WarmupRule,
    block_size,
    kernel_memory,
)
from .scenarios import Scenario, WrongResult, backend_of

CLOCKS_EVERY_S = 0.5
"""Seconds between readings of a GPU's clocks; a reading takes about a millisecond."""


class Rules(BaseModel):
    """Rules for when sampling begins and ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    """The maximum seconds of sampling."""
    precision: float
    """The half width of the median's 95 % interval, as a fraction of the median, that ends
    sampling."""
    min_samples: int = 10
    warmup_seconds: float = 5.0
    """The maximum seconds of warm-up after the first call; a case that has not settled by then is
    unstable."""
    warmup_samples: int = 300
    series: int | None = None
    """The exact number of steps, each one sample, after ``warmup_samples`` of warm-up. It is for
    steps that differ from each other and must be the same for every contender, such as waits for
    batches."""


def measure_scenario(
    scenario: Scenario,
    rules: Rules,
    report: Callable[[str], None],
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Measure a scenario that is set up.

    Args:
        scenario: its steps are timed.
        rules: when sampling begins and ends.
        report: is called with the name of each stage when it begins.
        clock: returns seconds.

    Returns:
        The fields of a record that this process can fill in.

    Raises:
        WrongResult: a step did another amount of work than the first.
    """
    windows = Windows(scenario, clock, backend_of(scenario.device))
    device = Device(scenario, clock)

    report("warmup")
    first_s = windows.sample(1)["step"]
    warmup, settled = _warm_up(windows, rules)

    report("measure")
    gc.collect()
    with frozen_garbage():
        steps = 1
        if rules.series is None:
            steps = block_size(statistics.median(warmup[-rules.min_samples :]), windows.overhead())
        samples, stop = _sample(windows, steps, rules, device)
    if (verify := getattr(scenario, "verify", None)) is not None:
        report("verify")
        verify()
    return {
        "work": dict(windows.work),
        "steps_per_sample": steps,
        "samples_s": samples,
        "stop": stop,
        "warmup": {
            "first_s": first_s,
            "compile_s": getattr(scenario, "compile_s", None),
            "samples_s": warmup,
            "settled": settled,
        },
        "memory": {**host_memory(), **device.memory()},
        "clocks": device.clocks,
        "facts": dict(scenario.facts),
    }


def _warm_up(windows: Windows, rules: Rules) -> tuple[list[float], bool | None]:
    """The seconds of the steps of the warm-up, one window each, and whether they settled."""
    if rules.series is not None:
        return [windows.sample(1)["step"] for _ in range(rules.warmup_samples)], None
    rule = WarmupRule(rules.warmup_seconds, rules.warmup_samples)
    samples = []
    while not rule.done:
        samples.append(windows.sample(1)["step"])
        rule.add(samples[-1])
    return samples, rule.settled


def _sample(
    windows: Windows, steps: int, rules: Rules, device: Device
) -> tuple[dict[str, list[float]], str | None]:
    """The seconds of a step in each window, by name, and why sampling ended."""
    rule = StopRule(rules.precision, rules.min_samples, rules.seconds)
    samples = defaultdict[str, list[float]](list)
    done = False
    device.look()
    while not done:
        seconds = windows.sample(steps)
        rule.add(seconds["step"] * steps)
        for name, value in seconds.items():
            samples[name].append(value)
        count = len(samples["step"])
        done = rule.done is not None if rules.series is None else count == rules.series
        if done or device.due():
            device.look()
    return dict(samples), rule.done if rules.series is None else None


class Windows:
    """The steps of a scenario, in windows of any length."""

    def __init__(self, scenario: Scenario, clock: Clock, backend: Any) -> None:
        """``backend`` is ``torch.cuda`` or ``torch.mps``; None for work of the CPU."""
        self._scenario, self._clock, self._backend = scenario, clock, backend
        self._timer = PhaseTimer(clock) if backend is None else DevicePhaseTimer(backend)
        self._has_phases = False
        self.work: Mapping[str, float] = {}
        """The work of each step."""

    def sample(self, steps: int) -> dict[str, float]:
        """Run a window of this many steps, and return the seconds of one step by name: ``step``,
        each phase, and ``device`` where the work is queued on one."""
        return {name: value / steps for name, value in self._window(steps).items()}

    def overhead(self) -> float:
        """The seconds of an empty window."""
        return statistics.median(self._window(0)["step"] for _ in range(20))

    def _window(self, steps: int) -> dict[str, float]:
        step, end_phase, has_phases = self._scenario.step, self._timer.end_phase, self._has_phases
        if self._backend is not None:
            self._backend.synchronize()
        began = self._clock()
        self._timer.begin()
        for _ in range(steps):
            work = step(end_phase)
            if work != self.work:
                if self.work:
                    raise WrongResult(
                        f"a step did {dict(work)} and the first did {dict(self.work)}"
                    )
                self.work = dict(work)
            if has_phases:
                end_phase("")  # what follows the last phase of a step is in none
        end_phase("")
        self._timer.end()
        if self._backend is not None:
            self._backend.synchronize()
        took = self._clock() - began
        (seconds,) = self._timer.drain()
        del seconds[""]
        self._has_phases = has_phases or len(seconds) > 1
        if self._backend is not None:
            seconds["device"] = seconds["step"]
        return {**seconds, "step": took}


class Device:
    """The memory and the clocks of a device; empty for the CPU."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self.clocks: list[dict[str, Any]] = []
        self._clock = clock
        self._began = clock()
        self._looked = -math.inf
        self._before: int | None = getattr(scenario, "driver_before", None)
        self._most: int | None = None
        self._gpu: Gpu | None = None
        self._backend = backend_of(scenario.device)
        if scenario.device.startswith("cuda"):
            import torch

            self._gpu = Gpu(torch.device(scenario.device))

    def due(self) -> bool:
        return self._gpu is not None and self._clock() - self._looked >= CLOCKS_EVERY_S

    def look(self) -> None:
        """Read clocks and memory from the driver. The allocator returns no memory unless it runs
        out, so a reading between windows is also that within them.
        """
        if self._gpu is None:
            return
        self._looked = self._clock()
        self.clocks.append({"t": round(self._looked - self._began, 4), **self._gpu.clocks()})
        used = self._gpu.used()
        if used is not None:
            self._most = max(used, self._most or 0)

    def memory(self) -> dict[str, int | None]:
        """The fields of `record.Memory` that are about the device."""
        if self._backend is None:
            return {}
        if self._gpu is None:  # MPS keeps no peaks
            return {"device_allocated": int(self._backend.current_allocated_memory())}
        grown = None
        if self._before is not None and self._most is not None:
            grown = max(0, self._most - self._before)
        return {
            "device_allocated": int(self._backend.memory_allocated()),
            "device_peak": int(self._backend.max_memory_allocated()),
            "device_reserved": int(self._backend.max_memory_reserved()),
            "device_driver": grown,
            "alloc_retries": int(self._backend.memory_stats().get("num_alloc_retries", 0)),
        }


def host_memory() -> dict[str, int | None]:
    """The fields of `record.Memory` that Linux counts for this process; null elsewhere."""
    try:
        held = kernel_memory()
    except OSError:
        return {"host_peak_kernel": None, "host_shared": None, "host_counted": None}
    # The kernel keeps a peak of all mappings, and none of private ones. Mappings that are not
    # private, such as the code of libraries, are never released, so they are subtracted.
    not_private = held.get("VmSize", 0) - held.get("VmData", 0)
    return {
        "host_peak_kernel": held.get("VmHWM"),
        "host_shared": held.get("RssFile", 0) + held.get("RssShmem", 0),
        "host_counted": held["VmPeak"] - not_private if "VmPeak" in held else None,
    }
