"""The status of submitted jobs: from the list of their study, and from SLURM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base import RESULTS, UsageError, array_ranges, number_ranges
from .batch_script import with_job_number
from .slurm_jobs import SlurmJob, read_study
from .slurm_states import JobState, job_states, waits_in

AGAIN = "it was stopped, and --resume continues it"
PART = "it was stopped; the log of the finish job says how to do its part again"
FINISH = "parts are missing, and its log names them"


@dataclass(frozen=True)
class JobStatus:
    """The state of a job, or of one element of an array."""

    id: str
    state: JobState | None
    """Its state in SLURM; None if SLURM does not know it any more."""
    job: SlurmJob | None = None
    """The job as it was submitted; None if its study is not known."""
    folder: Path = Path()
    """Folder of the study."""

    @property
    def training(self) -> str | None:
        """The status of its training, from its results; None if there are none."""
        if self.job is None or self.job.output_dir is None:
            return None
        path = self.folder / with_job_number(self.job.output_dir, self.id) / RESULTS
        try:
            return str(json.loads(path.read_text())["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def words(self) -> str:
        if self.state is not None:
            words = self.state.words(self._incomplete())
            follows = self.job.waits_for if self.job is not None else None
            return f"{words} {follows}" if follows and words.endswith("Dependency") else words
        if self.job is None or self.job.kind == "ranks":
            return f"unknown to SLURM; its training is {self.training or 'not begun'}"
        return "unknown to SLURM"

    def _incomplete(self) -> str | None:
        """The meaning of exit code 3."""
        if self.job is None or self.job.kind == "ranks":
            return AGAIN
        if self.job.kind == "program":
            return None
        return FINISH if "--finish" in self.job.command else PART if self.job.array else AGAIN

    def code(self) -> int:
        """The exit code: 0 done, 1 failed, 3 not ended."""
        if self.state is None:
            return 0 if self.training == "complete" else 1
        return 0 if self.state.ok else 1 if self.state.ended else 3


def job_statuses(targets: Sequence[str]) -> list[JobStatus]:
    """The jobs of studies, and jobs by number.

    Args:
        targets: Folders, files of studies, and numbers.

    Returns:
        A row for each job, and for each element of an array. Waiting elements share one row.

    Raises:
        UsageError: SLURM does not know a number, or a study cannot be read.
    """
    submitted: dict[str, tuple[SlurmJob, Path]] = {}
    numbers = list[str]()
    for target in targets:
        if is_job_number(target):
            numbers.append(target)
            continue
        path = Path(target)
        folder = path if path.is_dir() else path.parent
        submitted |= {job.id: (job, folder) for job in read_study(path).jobs}
    states = job_states([*submitted, *numbers])
    for number in numbers:
        if not states[number]:
            raise UsageError(f"SLURM knows no job {number}")
    rows = [JobStatus(state.id, state) for number in numbers for state in states[number]]
    for number, (job, folder) in submitted.items():
        rows += [JobStatus(state.id, state, job, folder) for state in states[number]]
        rows += [
            JobStatus(element, None, job, folder) for element in _forgotten(job, states[number])
        ]
    return rows


def _forgotten(job: SlurmJob, states: Sequence[JobState]) -> Iterator[str]:
    """Yield the job, or the elements of an array, that SLURM does not know any more."""
    if job.array is None:
        yield from [job.id] * (not states)
        return
    named = {state.id for state in states}
    shared = [state.id for state in states if "[" in state.id]
    for number in (n for each in array_ranges(job.array) for n in each):
        element = f"{job.id}_{number}"
        if element not in named and not any(waits_in(element, row) for row in shared):
            yield element


def is_job_number(target: str) -> bool:
    """Whether ``target`` is the number of a job or element, and no file has that name."""
    return bool(re.fullmatch(r"\d+(_\d+)?", target, re.ASCII)) and not Path(target).exists()


def table_of(rows: Iterable[JobStatus]) -> list[str]:
    """A line for each job. Elements of an array with the same state share a line.

    Args:
        rows: The jobs.

    Returns:
        The lines, after a line with the names of the columns.
    """
    alike: dict[tuple[str, str, str], list[JobStatus]] = {}
    for row in rows:
        array, _, element = row.id.partition("_")
        which = "" if element.isdecimal() else row.id
        alike.setdefault((array, which, row.words()), []).append(row)
    table = [("job", "name", "ranks", "nodes", "state")]
    for (array, which, words), same in alike.items():
        job = same[0].job
        elements = [int(row.id.partition("_")[2]) for row in same] if not which else []
        label = f"{array}_[{number_ranges(elements)}]" if len(elements) > 1 else same[0].id
        nodes = {row.state.nodes for row in same if row.state is not None and row.state.nodes}
        where = f"{len(nodes)} different" if len(nodes) > 1 else "".join(nodes)
        name, ranks = (job.name, str(job.ranks)) if job is not None else ("", "")
        table.append((label, name, ranks, where, words))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
