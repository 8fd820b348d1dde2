"""The phases of a training step, timed on the device that computes.

    │ data_wait │ transfer │ forward │ backward │ communication │ optimizer │
    begin     end        end       end        end             end        end

All time since the previous phase ended belongs to the phase that ends, so the phases of a step add
up to the step and nothing is counted twice. `communication` is its exposed part: from the moment
when the last gradients were computed to the moment when all ranks had their sum. Gradients that are
summed while others are still being computed cost no time and are not counted.

On a CPU the end of a phase reads the clock. On a GPU it records an event on the stream, which costs
a few microseconds and blocks nothing; `drain` reads the times, outside of the steps. All are times
of the device, `data_wait` too: if the host waits for a batch while the device still computes,
nothing is delayed and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .spans import Clock

PHASES = ("data_wait", "transfer", "forward", "backward", "communication", "optimizer")


Seconds = dict[str, float]
"""The seconds of one step: ``step``, and each phase that it had."""


class PhaseTimer:
    """Times the phases of work that has ended when its call returns, as on a CPU."""

    drain_every = 1
    """The number of steps after which to call `drain`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: list[list[tuple[str, Any]]] = []

    def begin(self) -> None:
        """Begin a step, and its first phase."""
        self._marks = [("", self._mark())]

    def end_phase(self, phase: str) -> None:
        """End a phase, and begin the next one."""
        self._marks.append((phase, self._mark()))

    def end(self) -> None:
        """End the step. It ended with its last phase."""
        self._steps.append(self._marks)

    def drain(self) -> list[Seconds]:
        """The seconds of the steps since the last call."""
        steps, self._steps = self._steps, []
        return [self._seconds(marks) for marks in steps]

    def _seconds(self, marks: list[tuple[str, Any]]) -> Seconds:
        seconds = {"step": self._between(marks[0][1], marks[-1][1])}
        for (_, before), (phase, after) in pairwise(marks):
            seconds[phase] = seconds.get(phase, 0.0) + self._between(before, after)
        return seconds

    def _mark(self) -> Any:
        return self._clock()

    def _between(self, before: Any, after: Any) -> float:
        return float(after - before)


class DevicePhaseTimer(PhaseTimer):
    """Times the phases of work that is queued on a CUDA or MPS device."""

    drain_every = 50

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._steps = []
        self._free: list[Any] = []
        """Events that were read: making one takes longer than recording it."""

    def drain(self) -> list[Seconds]:
        """The seconds of the steps since the last call. Waits for the device."""
        steps = self._steps
        if steps:
            self._backend.synchronize()
        seconds = super().drain()
        self._free += [event for marks in steps for _, event in marks]
        return seconds

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self._backend.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1e3


def phases_of_ranks(results: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each phase of a training over all steps, mean over ranks.

    Args:
        results: The results of a training, which may be unfinished.

    Returns:
        The seconds by phase, without the phases that no rank timed.
    """
    ranks = [rank.get("phases") or {} for rank in results.get("ranks") or ()]
    totals = {name: [r[name]["total_s"] for r in ranks if r.get(name)] for name in PHASES}
    return {name: sum(each) / len(each) for name, each in totals.items() if each}


def peak_of_ranks(results: Mapping[str, Any], name: str) -> int | None:
    """The highest peak of memory of any rank.

    Args:
        results: The results of a training, which may be unfinished.
        name: The peak, such as ``device_peak``.

    Returns:
        Bytes; None if no rank has it.
    """
    memories = (rank.get("memory") or {} for rank in results.get("ranks") or ())
    return max((memory[name] for memory in memories if memory.get(name)), default=None)
