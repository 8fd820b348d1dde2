"""Clocks: the work of each stage of a job, the item that it was on, and the waits.

A stage wraps its work in ``with probe.span("read", brick)`` and its waiting in ``with
probe.waiting("read")``. The probe keeps totals for each stage, and every span only where a trace
file was asked for. The trace is written while the job runs and opens in Perfetto or
chrome://tracing. Stages of a job read no clock of their own.

The phases of a training step, timed on the device that computes.

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

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from ..base import begin_output, end_output, plural

Clock = Callable[[], float]


@dataclass(slots=True)
class StageTotals:
    """One stage of a job, all its threads added up."""

    busy: float = 0.0
    """Seconds of work, summed over threads."""
    waited: float = 0.0
    """Seconds of waiting for input, for room or for a neighbour, summed over threads."""
    count: int = 0
    threads: int = 0


class Probe:
    """Collects spans from any number of threads.

    Args:
        trace: the file for a trace; None for totals alone.
        clock: reads seconds.
    """

    def __init__(self, trace: Path | None = None, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.started = clock()
        self.stages: dict[str, StageTotals] = {}
        self._lock = threading.Lock()
        self._threads: dict[str, set[str]] = {}
        self._trace: IO[str] | None = None
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            begin_output(trace)
            self._trace = trace.open("w")
            self._trace.write("[\n")

    @contextlib.contextmanager
    def span(self, stage: str, what: object = "", *, waiting: bool = False) -> Iterator[None]:
        """Time one piece of work.

        Args:
            stage: the stage that does it.
            what: the item that it is done on, for the trace.
            waiting: whether the stage only waits.
        """
        start = self.clock()
        yield
        self.record(stage, start, self.clock(), what, waiting=waiting)

    def waiting(self, stage: str) -> AbstractContextManager[None]:
        """Time a wait of a stage."""
        return self.span(stage, waiting=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the probe was made."""
        return self.clock() - self.started

    def totals(self) -> dict[str, StageTotals]:
        """The totals of each stage so far."""
        with self._lock:
            return {
                name: StageTotals(s.busy, s.waited, s.count, len(self._threads[name]))
                for name, s in self.stages.items()
            }

    def close(self) -> None:
        """End the trace; later spans are only counted."""
        with self._lock:
            end = {"name": "end", "ph": "i", "ts": 0, "pid": 1, "tid": 0, "s": "g"}
            self._write(json.dumps(end) + "\n]\n", last=True)

    def record(
        self,
        stage: str,
        start: float,
        end: float,
        what: object,
        *,
        waiting: bool,
        track: int = 0,
    ) -> None:
        """Count a span that is over.

        Args:
            stage: the stage that did it.
            start: its first second, by the probe's clock.
            end: its last second.
            what: the item that it was done on, for the trace.
            waiting: whether it was a wait.
            track: the track of the thread in the trace: spans that overlap need several.
        """
        thread = threading.get_ident() + track
        with self._lock:
            totals = self.stages.setdefault(stage, StageTotals())
            # By name, so that the threads of a second pipeline are not counted beside the first's.
            self._threads.setdefault(stage, set()).add(threading.current_thread().name)
            if waiting:
                totals.waited += end - start
            else:
                totals.busy += end - start
                totals.count += 1
            if self._trace is not None and end > start:
                event = {
                    "name": f"{stage} (waits)" if waiting else stage,
                    "cat": "wait" if waiting else "busy",
                    "ph": "X",
                    "ts": round((start - self.started) * 1e6, 1),
                    "dur": round((end - start) * 1e6, 1),
                    "pid": 1,
                    "tid": thread,
                    "args": {"item": str(what)},
                }
                self._write(json.dumps(event) + ",\n")

    def _write(self, text: str, *, last: bool = False) -> None:
        """Add to the trace, if there still is one: a full disk costs the trace, not the job."""
        trace = self._trace
        if trace is None:
            return
        try:
            trace.write(text)
            if last:
                self._trace = None
                trace.close()
                end_output(Path(trace.name))
        except OSError as error:
            self._trace = None
            with contextlib.suppress(OSError):  # what is still to be flushed has no room either
                trace.close()
            reason = error.strerror or error
            warnings.warn(f"--trace ends early: {reason}", RuntimeWarning, stacklevel=2)


def bottleneck(
    stages: Mapping[str, StageTotals], seconds: float, cpu_seconds: float, cores: int,
    workers: int = 1,
) -> str:  # fmt: skip
    """The bottleneck of a job, in one sentence with its numbers.

    Where the processor was nearly full, stages that compete for it cannot be told apart by their
    times. So the processor is named, and the stage that worked most.

    Args:
        stages: the totals of each stage.
        seconds: the time of the job.
        cpu_seconds: the processor time of the job.
        cores: the cores that it may use.
        workers: the processes that did it, whose times are added up.

    Returns:
        The sentence.
    """
    if not any(stage.busy for stage in stages.values()):
        return "There was nothing left to do."
    most = max(stages, key=lambda name: stages[name].busy)
    share = stages[most].busy / sum(stage.busy for stage in stages.values())
    of_all = f"{plural(cores, 'core')}{' of each worker' * (workers > 1)}"
    if cpu_seconds >= 0.85 * cores * seconds:
        return (
            f"Bound by the processor: {cpu_seconds / seconds:.1f} of {of_all} were busy; "
            f"{share:.0%} of all work was in {most}."
        )
    fullest = max(stages, key=lambda name: stages[name].busy / stages[name].threads)
    stage = stages[fullest]
    busy = stage.busy / stage.threads / seconds
    threads = "its thread was" if stage.threads == 1 else f"its {stage.threads} threads were"
    return (
        f"Bound by {fullest}: {threads} busy {busy:.0%} of the time; "
        f"{cpu_seconds / seconds:.1f} of {of_all} were in use."
    )


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
