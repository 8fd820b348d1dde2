"""Some steps of a training under torch's profiler: a trace, and a table of its operators.

step    1  2  3      4  5        6  …  10        11  …
        as usual     warm up     recorded        as usual

OUT/profile/rank0.json       a trace that Perfetto and chrome://tracing open, of each rank
OUT/profile/operators.txt    the slowest operators of rank 0
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from ..base import UsageError, plural

PROFILE_FOLDER = "profile"
USUAL_STEPS, WARM_STEPS = 3, 2
MOST_ROWS = 30
"""The number of rows of the table."""


class StepProfiler:
    """Profiles some steps of a run. A run that ends before them leaves no trace."""

    def __init__(self, out: Path, rank: int, steps: int, left: int, cuda: bool) -> None:
        """Profile ``steps`` of the ``left`` steps of a run, the first of which comes next.

        Raises `UsageError` if the run is too short.
        """
        self._left = USUAL_STEPS + WARM_STEPS + steps
        if left < self._left:
            raise UsageError(
                f"--profile-steps {steps} come after {USUAL_STEPS + WARM_STEPS} others, "
                f"and this run has {plural(left, 'step')} of the {self._left}"
            )
        self._folder, self._rank, self._cuda = out / PROFILE_FOLDER, rank, cuda
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints its start and its end
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            schedule=torch.profiler.schedule(
                wait=USUAL_STEPS, warmup=WARM_STEPS, active=steps, repeat=1
            ),
            on_trace_ready=self._save,
        )
        self._profiler.start()

    def step(self) -> None:
        """Note the end of a step."""
        if self._left:
            self._left -= 1
            self._profiler.step()

    def close(self) -> None:
        """Stop if the run ends before the steps that were to be recorded."""
        if self._left:
            self._profiler.stop()

    def _save(self, profiler: torch.profiler.profile) -> None:
        if self._left:  # the run ended within the steps to record
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"rank{self._rank}.json"))
        if self._rank == 0:
            by = f"self_{'device' if self._cuda else 'cpu'}_time_total"
            table = profiler.key_averages().table(
                sort_by=by, row_limit=MOST_ROWS, max_name_column_width=60
            )
            (self._folder / "operators.txt").write_text(table + "\n")
