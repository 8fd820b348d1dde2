"""The measuring loop: times the steps of a scenario until their time is known well enough.

    first call | warm-up . . . . . . . . | window  window  window  window ...
                 until settled or capped   until precise, noise stable, or out of time

A **window** is a block of steps between two readings of the clock. It gives one sample: its seconds
divided by its steps. On a device it begins with an empty queue and ends with its only
synchronisation, so that the host can run ahead within it, as in a program. ``step`` is the wall
clock of the host over the window. ``device`` and the phases are read from events on the current
stream, and on a CPU from the same clock.

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
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from ..base import frozen_garbage
from ..instruments import Clock, StopRule, WarmupRule, block_size, kernel_memory
from .scenarios import Scenario, WrongResult, backend_of

if TYPE_CHECKING:
    from ..instruments import Gpu

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


class HostTimer:
    """Times a window and its phases, for work that is done when its call returns."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans = defaultdict[str, _HostSpan](lambda: _HostSpan(clock))

    def start(self) -> None:
        for span in self._spans.values():
            span.seconds = 0.0
        self._started = self.clock()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._spans[name]

    def stop(self, steps: int) -> dict[str, float]:
        """The seconds of one of the window's steps: ``step``, and each phase."""
        seconds = {"step": self.clock() - self._started}
        seconds |= {name: span.seconds for name, span in self._spans.items()}
        return {name: value / steps for name, value in seconds.items()}


class _HostSpan:
    """Adds up the times between entering and leaving. It is a class, because that is three times as
    fast as a generator with `contextlib`.
    """

    __slots__ = ("_clock", "_entered", "seconds")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._entered = self._clock()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._clock() - self._entered


class DeviceTimer:
    """Times a window and its phases by events of ``torch.cuda`` or ``torch.mps``."""

    def __init__(self, clock: Clock, backend: ModuleType) -> None:
        self.clock = clock
        self._backend = backend
        self._events: list[Any] = []
        self._used = 0
        self._spans = defaultdict[str, _DeviceSpan](lambda: _DeviceSpan(self))

    def start(self) -> None:
        self._backend.synchronize()
        self._used = 0
        for span in self._spans.values():
            span.edges.clear()
        self._started = self.clock()
        self._begin = self.mark()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._spans[name]

    def stop(self, steps: int) -> dict[str, float]:
        end = self.mark()
        self._backend.synchronize()
        seconds = {"step": self.clock() - self._started}
        seconds["device"] = self._begin.elapsed_time(end) / 1e3
        for name, span in self._spans.items():
            edges = zip(span.edges[::2], span.edges[1::2], strict=True)
            seconds[name] = sum(begin.elapsed_time(end) for begin, end in edges) / 1e3
        return {name: value / steps for name, value in seconds.items()}

    def mark(self) -> Any:
        """Record an event now. Events are made once and reused in the next window."""
        if self._used == len(self._events):
            self._events.append(self._backend.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event


class _DeviceSpan:
    __slots__ = ("_timer", "edges")

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self.edges: list[Any] = []

    def __enter__(self) -> None:
        self.edges.append(self._timer.mark())

    def __exit__(self, *_: object) -> None:
        self.edges.append(self._timer.mark())


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
    windows = Windows(scenario, _timer(scenario.device, clock))
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

    def __init__(self, scenario: Scenario, timer: HostTimer | DeviceTimer) -> None:
        self._scenario = scenario
        self._timer = timer
        self.work: Mapping[str, float] = {}
        """The work of each step."""

    def sample(self, steps: int) -> dict[str, float]:
        """Run a window of this many steps, and return the seconds of one step by name."""
        step, phase = self._scenario.step, self._timer.phase
        self._timer.start()
        for _ in range(steps):
            work = step(phase)
            if work != self.work:
                self._differs(work)
        return self._timer.stop(steps)

    def overhead(self) -> float:
        """The seconds of an empty window."""
        empty = []
        for _ in range(20):
            self._timer.start()
            empty.append(self._timer.stop(1)["step"])
        return statistics.median(empty)

    def _differs(self, work: Mapping[str, float]) -> None:
        if self.work:
            raise WrongResult(f"a step did {dict(work)} and the first did {dict(self.work)}")
        self.work = dict(work)


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

            from ..instruments import Gpu

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


def _timer(device: str, clock: Clock) -> HostTimer | DeviceTimer:
    backend = backend_of(device)
    return HostTimer(clock) if backend is None else DeviceTimer(clock, backend)


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
