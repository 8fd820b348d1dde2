"""The phases of a training step, on the clock of whoever does the work.

    │ data_wait │ transfer │ forward │ backward │ communication │ optimizer │
    begin      lap        lap       lap        lap             lap        lap

A *lap* ends a phase: all since the lap before belongs to it, so the phases of a step add up to the
step and nothing is counted twice. `communication` is what of it is exposed: from the moment when
the last gradients were computed to that when all ranks had their sum; what is summed while other
gradients are still being computed costs nothing and is not seen.

On a CPU a lap reads the clock. On a GPU it records an event on the stream, which costs a few
microseconds and makes nobody wait; the times are read when `drain` is called, outside of the
steps. There the wait for data is the host's and is read from its clock, and the other phases are
the device's, so their sum may differ from ``step``, the host's, by what the host ran ahead.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .probe import Clock

PHASES = ("data_wait", "transfer", "forward", "backward", "communication", "optimizer")

Seconds = dict[str, float]
"""Of one step: ``step`` and those of its phases that it had."""


class Laps:
    """For work that has ended when its call returns."""

    drain_every = 1
    """Steps after which to ask for their times."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: list[Seconds] = []
        self._now: Seconds = {}

    def begin(self) -> None:
        """A step begins."""
        self._now, self._began = {}, self._clock()
        self._last = self._began

    def lap(self, phase: str) -> None:
        """A phase ends."""
        now = self._clock()
        self._now[phase] = self._now.get(phase, 0.0) + now - self._last
        self._last = now

    def end(self) -> None:
        """The step ends, with its last lap."""
        self._steps.append({"step": self._last - self._began, **self._now})

    def drain(self) -> list[Seconds]:
        """The steps since the last call."""
        steps, self._steps = self._steps, []
        return steps


class DeviceLaps:
    """For work that is queued on a CUDA device."""

    drain_every = 50

    def __init__(self, clock: Clock, backend: Any) -> None:
        self._clock, self._backend = clock, backend
        self._steps: list[tuple[Seconds, list[tuple[str, Any]]]] = []

    def begin(self) -> None:
        self._began = self._last = self._clock()
        self._host: Seconds = {}
        self._marks: list[tuple[str, Any]] = []

    def lap(self, phase: str) -> None:
        now = self._clock()
        if phase == "data_wait":
            self._host[phase] = self._host.get(phase, 0.0) + now - self._last
        self._last = now
        event = self._backend.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def end(self) -> None:
        self._host["step"] = self._clock() - self._began
        self._steps.append((self._host, self._marks))

    def drain(self) -> list[Seconds]:
        if not self._steps:
            return []
        self._backend.synchronize()
        steps, self._steps = self._steps, []
        for seconds, marks in steps:
            for (_, before), (phase, after) in pairwise(marks):
                if phase != "data_wait":
                    seconds[phase] = seconds.get(phase, 0.0) + before.elapsed_time(after) / 1e3
        return [seconds for seconds, _ in steps]
