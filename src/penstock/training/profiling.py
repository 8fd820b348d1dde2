"""Some steps of a training under torch's profiler: a trace, its operators, the time of each phase.

    step    1  2  3      4  5        6  …  10        11  …
            as usual     warm up     recorded        as usual

    OUT/profile/rank0.json       a trace that Perfetto and chrome://tracing open, of each rank
    OUT/profile/operators.txt    the slowest operators, and the phases of a step; of rank 0

Phases are annotations in the trace. The name of a phase is known only at its end, but an annotation
needs a name at its begin: so it gets a number first, and its name when the file is written.

    annotation 7    ├───────────────────────────────────┤   begun and ended by the main thread
    phases end                          ▲ backward        ▲ communication
                                       ended by autograd's thread

With several ranks on GPUs, a thread of autograd ends the backward pass. It cannot end an annotation
of another thread, so the annotation goes on until the gradients are summed. On the host's clock it
is cut in two where the backward pass ended. On the device's clock this moment is not known, so
there, and in the table of operators, the annotation is called ``backward + communication``.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..base import UsageError, format_seconds, replacing
from ..instruments import Clock, PhaseTimer, Seconds

PROFILE_FOLDER = "profile"
USUAL_STEPS, WARM_STEPS = 3, 2
MOST_ROWS = 30
"""The number of rows of the table."""
MOST_TOLD = 5
"""The number of operators in the lines for the user."""
_MARK = "penstock phase "
_BY = ("self_cpu_time_total", "self_device_time_total")
"""The attributes with an operator's own time, on the host and on a GPU."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of a trace's events that a GPU works on."""

Part = tuple[str, float]


def check_profiling(profiled: int, left: int) -> None:
    """Refuse a run that is too short to be profiled."""
    needed = USUAL_STEPS + WARM_STEPS + profiled
    if left < needed:
        raise UsageError(
            f"--profile-steps {profiled} come after {USUAL_STEPS + WARM_STEPS} others, "
            f"and this run has {left} steps of the {needed}"
        )


class ProfiledTimer(PhaseTimer):
    """A timer that also names the annotations of the profiler's trace."""

    def __init__(
        self, timer: PhaseTimer, out: Path, rank: int, steps: int, cuda: bool, clock: Clock
    ) -> None:
        self._timer, self.drain_every, self._clock = timer, timer.drain_every, clock
        self._folder, self._rank, self._profiled = out / PROFILE_FOLDER, rank, steps
        self._cuda = cuda
        self.profile: dict[str, Any] | None = None
        """The profile, None until all its steps are done."""
        self._thread = threading.get_ident()
        self._parts: dict[str, list[Part]] = {}
        """The phases in each annotation and their fractions of its time."""
        self._mark: Any = None
        self._ended: list[tuple[str, float]] = []
        """The names and end times of the phases since the annotation began."""
        self._number = 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=USUAL_STEPS, warmup=WARM_STEPS, active=steps, repeat=1
            ),
            on_trace_ready=self._save,
        )
        self._runs = False

    def begin(self) -> None:
        if not self._number:  # the run begins
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints its start and its end
            self._profiler.start()
            self._runs = True
        self._timer.begin()
        self._open()

    def end_phase(self, phase: str) -> None:
        self._timer.end_phase(phase)
        self._ended.append((phase, self._clock()))
        if threading.get_ident() == self._thread:
            self._close()
            self._open()

    def end(self) -> None:
        self._close()
        self._timer.end()
        if self._runs:
            self._profiler.step()

    def drain(self) -> list[Seconds]:
        return self._timer.drain()

    def close(self) -> None:
        """Stop the profiler if the run ends before the steps that it was to record."""
        if self._runs:
            self._runs = False
            self._profiler.stop()

    # --- annotations ----------------------------------------------------------------------------

    def _open(self) -> None:
        self._ended, self._since = [], self._clock()
        if self._runs:
            self._number += 1
            self._mark = torch.profiler.record_function(f"{_MARK}{self._number}")
            self._mark.__enter__()

    def _close(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
            if self._ended:
                self._parts[f"{_MARK}{self._number}"] = _shares(self._since, self._ended)

    # --- what is written ------------------------------------------------------------------------

    def _save(self, profiler: torch.profiler.profile) -> None:
        """Write the trace and the table, unless the run ended within the steps to record."""
        if not self._runs:
            return
        self._runs = False
        path = self._folder / f"rank{self._rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
        trace["traceEvents"] = [e for event in trace["traceEvents"] for e in self._named(event)]
        with replacing(path) as draft:
            draft.write_text(json.dumps(trace, separators=(",", ":")))
        host, device = self._phases(trace["traceEvents"])

        events: Any = profiler.events()
        for event in events:
            if event.name in self._parts:
                event.name = _joined(self._parts[event.name])
        averages = events.key_averages()
        averages[:] = [row for row in averages if not row.key.startswith(_MARK)]  # between steps
        whole, operators = busiest(trace["traceEvents"], averages, self._cuda)
        self.profile = {
            "trace": f"{PROFILE_FOLDER}/rank{self._rank}.json",
            "steps": self._profiled,
            "phases_s": host,
            "device_phases_s": device or None,
            "self_s": whole,
            "operators": operators[:MOST_ROWS],
        }
        if self._rank == 0:
            table = averages.table(
                sort_by=_BY[self._cuda], row_limit=MOST_ROWS, max_name_column_width=60
            )
            text = "\n".join([*profile_lines(self.profile), "", table, ""])
            (self._folder / "operators.txt").write_text(text)

    def _named(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An event of the trace, with an annotation renamed to its phases, or cut into them. An
        annotation between two steps has no phase and is left out."""
        name = str(event.get("name", ""))
        if not name.startswith(_MARK):
            yield event
        elif name in self._parts and event.get("cat") != "user_annotation":
            yield {**event, "name": _joined(self._parts[name])}
        elif name in self._parts:
            begins = event["ts"]
            for phase, share in self._parts[name]:
                lasts = event["dur"] * share
                yield {**event, "name": phase, "ts": begins, "dur": lasts}
                begins += lasts

    def _phases(
        self, events: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The seconds of each phase in a step, by the clocks of the host and of a GPU."""
        clocks: dict[str, dict[str, float]] = {"user_annotation": {}, "gpu_user_annotation": {}}
        names = {phase for parts in self._parts.values() for phase, _ in parts}
        names |= set(map(_joined, self._parts.values()))
        for event in events:
            seconds = clocks.get(event.get("cat", ""))
            if seconds is not None and event["name"] in names:
                spent = event["dur"] / 1e6 / self._profiled
                seconds[event["name"]] = seconds.get(event["name"], 0.0) + spent
        return clocks["user_annotation"], clocks["gpu_user_annotation"]


def busiest(
    events: Sequence[Mapping[str, Any]], averages: Sequence[Any], cuda: bool
) -> tuple[float, list[dict[str, Any]]]:
    """The total seconds, and each operator's own seconds in descending order, on the device if
    there is one, else on the host.

    ``averages`` counts a kernel several times: by itself, with its operator, and with each
    annotation around it, such as the optimizer's. The total counts it once, from the trace.
    """
    by = _BY[cuda]
    if cuda:
        whole = sum(event["dur"] for event in events if event.get("cat") in _ON_DEVICE)
    else:
        whole = sum(getattr(row, by) for row in averages if not row.key.startswith("ProfilerStep"))
    operators = {event["name"] for event in events if event.get("cat") == "cpu_op"}
    return whole / 1e6, [
        {"name": row.key, "calls": row.count, "self_s": getattr(row, by) / 1e6}
        for row in sorted(averages, key=lambda row: -getattr(row, by))
        if row.key in operators
    ]


def _shares(began: float, phases: Sequence[tuple[str, float]]) -> list[Part]:
    """Phases that ended since a moment, as fractions of the time until the last.

    >>> _shares(1.0, [("backward", 4.0), ("communication", 5.0)])
    [('backward', 0.75), ('communication', 0.25)]
    """
    moments = [began, *(moment for _, moment in phases)]
    whole = moments[-1] - began
    return [
        (phase, (after - before) / whole if whole else 1 / len(phases))
        for (phase, _), (before, after) in zip(phases, pairwise(moments), strict=True)
    ]


def _joined(parts: Sequence[Part]) -> str:
    return " + ".join(phase for phase, _ in parts)


def profile_lines(profile: dict[str, Any]) -> list[str]:
    """A profile as lines of text: the phases of a step, then the slowest operators."""
    said = []
    clocks = (("phases_s", "the host"), ("device_phases_s", "the device"))
    for phases, whose in ((profile[key], whose) for key, whose in clocks if profile[key]):
        step = sum(phases.values())
        parts = ", ".join(
            f"{name} {format_seconds(seconds)} ({seconds / step:.0%})"
            for name, seconds in phases.items()
        )
        said.append(
            f"{profile['steps']} steps profiled, {format_seconds(step)} each on {whose}: {parts}"
        )
    for row in profile["operators"][:MOST_TOLD]:
        share = row["self_s"] / profile["self_s"] if profile["self_s"] else 0.0
        calls = row["calls"] / profile["steps"]
        said.append(f"  {share:4.0%}  {row['name']}, {calls:.3g} times a step")
    return said
