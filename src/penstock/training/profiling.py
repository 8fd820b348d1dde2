"""Some steps of a training under torch's profiler: a trace, its operators, the phases of the steps.

    step    1  2  3      4  5        6  …  10        11  …
            as usual     warm up     recorded        as usual

    OUT/profile/rank0.json       a trace that Perfetto and chrome://tracing open, of each rank
    OUT/profile/operators.txt    the slowest operators of rank 0

Phases are written into the trace from their ends on the host's clock. They are no annotations of
the profiler's: it needs a name at the start of one, and the name of a phase is known at its end,
which may be in autograd's thread. The trace and the host's clock meet at the end of each step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..base import UsageError, replacing
from ..instruments import Clock, PhaseTimer, Seconds

PROFILE_FOLDER = "profile"
USUAL_STEPS, WARM_STEPS = 3, 2
MOST_ROWS = 30
"""The number of rows of the table."""
MOST_TOLD = 5
"""The number of operators in the lines for the user."""
_STEP = "ProfilerStep#"
"""The names of the profiler's own annotations of steps begin with this."""
_BY = ("self_cpu_time_total", "self_device_time_total")
"""The attributes with an operator's own time, on the host and on a GPU."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of a trace's events that a GPU works on."""


def check_profiling(profiled: int, left: int) -> None:
    """Refuse a run that is too short to be profiled."""
    needed = USUAL_STEPS + WARM_STEPS + profiled
    if left < needed:
        raise UsageError(
            f"--profile-steps {profiled} come after {USUAL_STEPS + WARM_STEPS} others, "
            f"and this run has {left} steps of the {needed}"
        )


class ProfiledTimer(PhaseTimer):
    """A timer that also writes the phases of the profiled steps into the profiler's trace."""

    def __init__(
        self, timer: PhaseTimer, out: Path, rank: int, steps: int, cuda: bool, clock: Clock
    ) -> None:
        self._timer, self.drain_every, self._clock = timer, timer.drain_every, clock
        self._folder, self._rank, self._profiled = out / PROFILE_FOLDER, rank, steps
        self._cuda = cuda
        self.profile: dict[str, Any] | None = None
        """The profile, None until all its steps are done."""
        self._steps_done: list[list[tuple[str, float]]] = []
        """The names and end times of the phases of each step; the first and last have no name, and
        are the moments at which the step began and ended."""
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
        self._runs: bool | None = None
        """None before the first step."""

    def begin(self) -> None:
        if self._runs is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints its start and its end
            self._profiler.start()
            self._runs = True
        self._timer.begin()
        self._ends = [("", self._clock())]

    def end_phase(self, phase: str) -> None:
        self._timer.end_phase(phase)
        self._ends.append((phase, self._clock()))

    def end(self) -> None:
        self._timer.end()
        if self._runs:
            # The clock is read right before the profiler ends its step: that is where both meet.
            self._steps_done.append([*self._ends, ("", self._clock())])
            self._profiler.step()

    def drain(self) -> list[Seconds]:
        return self._timer.drain()

    def close(self) -> None:
        """Stop the profiler if the run ends before the steps that it was to record."""
        if self._runs:
            self._runs = False
            self._profiler.stop()

    def _save(self, profiler: torch.profiler.profile) -> None:
        """Write the trace and the table, unless the run ended within the steps to record."""
        if not self._runs:
            return
        self._runs = False
        path = self._folder / f"rank{self._rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
        trace["traceEvents"] += list(self._phases(trace["traceEvents"]))
        with replacing(path) as draft:
            draft.write_text(json.dumps(trace, separators=(",", ":")))
        averages = profiler.key_averages()
        whole, operators = busiest(trace["traceEvents"], averages, self._cuda)
        self.profile = {
            "trace": f"{PROFILE_FOLDER}/rank{self._rank}.json",
            "steps": self._profiled,
            "self_s": whole,
            "operators": operators[:MOST_ROWS],
        }
        if self._rank == 0:
            table = averages.table(
                sort_by=_BY[self._cuda], row_limit=MOST_ROWS, max_name_column_width=60
            )
            text = "\n".join([*profile_lines(self.profile), "", table, ""])
            (self._folder / "operators.txt").write_text(text)

    def _phases(self, events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The phases of the recorded steps as events of the trace, within those of the steps."""
        steps = [
            event
            for event in events
            if event.get("cat") == "user_annotation" and event["name"].startswith(_STEP)
        ]
        steps.sort(key=lambda event: event["ts"])
        pairs = list(zip(steps, self._steps_done[-len(steps) :], strict=True))
        # Of all steps the least: elsewhere the host may have been interrupted between the clocks.
        apart = min(step["ts"] + step["dur"] - 1e6 * ends[-1][1] for step, ends in pairs)
        for step, ends in pairs:
            for (_, before), (phase, after) in pairwise(ends[:-1]):
                begins, lasts = 1e6 * before + apart, 1e6 * (after - before)
                yield {**step, "name": phase, "ts": begins, "dur": lasts, "args": {}}


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


def profile_lines(profile: dict[str, Any]) -> list[str]:
    """The slowest operators of a profile as lines of text."""
    said = [f"{profile['steps']} steps profiled; the operators that took most of their time:"]
    for row in profile["operators"][:MOST_TOLD]:
        share = row["self_s"] / profile["self_s"] if profile["self_s"] else 0.0
        calls = row["calls"] / profile["steps"]
        said.append(f"  {share:4.0%}  {row['name']}, {calls:.3g} times a step")
    return said
