"""The states of jobs, from SLURM's commands and from the list of their study.

    squeue ──▶ sacct
    waits, runs, has just ended    accounting, where there is some

The second is asked about what the first does not know any more. Their rows are parsed, because not
every SLURM in use writes JSON. A job that was preempted or requeued has not ended: it starts again
under the same number. Accounting has a row for each start of a job; the last row counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base import RESULTS, Incomplete, PenstockError, UsageError, array_ranges, number_ranges
from .batch_script import with_job_number
from .slurm_jobs import SlurmJob, ask_slurm, complaint_of, read_study

ENDS = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY REVOKED TIMEOUT".split()
)
"""The states after which a job does not start again. After PREEMPTED and REQUEUED it does."""


AGAIN = "it was stopped, and --resume continues it"
PART = "it was stopped; the log of the finish job says how to do its part again"
FINISH = "parts are missing, and its log names them"


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job, or of one job of an array."""

    id: str
    """The number: 12, or 12_3 for one job of an array."""
    state: str
    reason: str | None = None
    """The reason why it waits or has failed; None if SLURM gives none."""
    exit_code: int | None = None
    signal: int | None = None
    """The number of the signal that ended it; None if it ended by itself."""
    restarts: int | None = None
    nodes: str | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    @property
    def ok(self) -> bool:
        return self.state == "COMPLETED"

    def words(self, incomplete: str | None = AGAIN) -> str:
        """The state, its reason and the exit code as text.

        Args:
            incomplete: The meaning of exit code 3 for its command; None if it has no special
                meaning.

        Returns:
            Phrases, separated by commas.
        """
        words = [self.state]
        if self.exit_code == Incomplete.exit_code and self.ended and incomplete:
            words.append(f"exit code {self.exit_code}: {incomplete}")
        elif self.exit_code:
            words.append(f"exit code {self.exit_code}")
        if self.signal:
            words.append(f"killed by signal {self.signal}")
        if self.reason is not None and not self.exit_code:  # else the reason is NonZeroExitCode
            words.append(self.reason)
        if self.restarts:
            words.append(f"{self.restarts} restart{'s' if self.restarts > 1 else ''}")
        return ", ".join(words)


def job_states(jobs: Sequence[str]) -> dict[str, list[JobState]]:
    """The states of jobs: one for a job, one for each element of an array, none if unknown.

    Args:
        jobs: Numbers of jobs.

    Returns:
        The states by number.

    Raises:
        PenstockError: SLURM does not answer.
    """
    if not jobs:
        return {}
    rows = _of_each(jobs, _controlled(jobs))
    # The controller forgets an element some minutes after its end, while others still run.
    unsure = [job for job in jobs if [row.id for row in rows[job]] != [job]]
    for job, past in _of_each(unsure, _accounted(unsure) if unsure else ()).items():
        here = {row.id for row in rows[job]}
        rows[job] += [row for row in past if row.id not in here and (row.ended or not here)]
    return rows


def _of_each(jobs: Sequence[str], rows: Iterable[JobState]) -> dict[str, list[JobState]]:
    """The last row of each job, or of each of its elements."""
    last = {row.id: row for row in rows}
    of_each = defaultdict[str, list[JobState]](list)
    for number, row in last.items():
        for job in {number, number.partition("_")[0]}:
            of_each[job].append(row)
    return {job: of_each[job] for job in jobs}


def _controlled(jobs: Sequence[str]) -> list[JobState]:
    command = ["squeue", "--noheader", "--all", "--states=all", "--array"]
    columns = ("jobarrayid", "state", "exit_code", "nodelist", "restartcnt", "reason")
    form = ",".join(f"{column}:|" for column in columns)  # no width, or texts would be cut
    ended = ask_slurm([*command, f"--Format={form}", f"--jobs={','.join(jobs)}"])
    complaint = complaint_of(ended)
    if ended.returncode and "invalid job id" not in complaint.lower():
        raise PenstockError(f"squeue: {complaint}")
    return [] if ended.returncode else list(_rows(ended.stdout))


def _accounted(jobs: Sequence[str]) -> list[JobState]:
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates"]
    columns = "--format=JobID,State,ExitCode,NodeList"
    ended = ask_slurm([*command, columns, f"--jobs={','.join(jobs)}"])
    return [] if ended.returncode else list(_rows(ended.stdout))  # there may be no accounting


def cancel_jobs(jobs: Sequence[str]) -> None:
    """Cancel jobs. Jobs that have ended are ignored.

    Raises:
        UsageError: SLURM refuses.
    """
    ended = ask_slurm(["scancel", *jobs])
    if ended.returncode or "error: " in ended.stderr:
        complaint = complaint_of(ended)
        if "already comp" not in complaint.lower():
            raise UsageError(f"SLURM did not cancel {' '.join(jobs)}: {complaint}")


def _rows(text: str) -> Iterator[JobState]:
    """Parse rows of number, state, exit code, nodes, restarts and reason. The last two may lack:
    then each further row of a job is a restart of it."""
    starts = Counter[str]()
    for line in text.split("\n"):
        number, state, code, nodes, restarts, reason = f"{line.strip()}{'|' * 5}".split("|")[:6]
        if not (re.match(r"\d", number) and state):
            continue
        restarted = int(restarts) if restarts.isdecimal() else starts[number]
        starts[number] += 1
        ending = _exit(code)
        for job in _elements(number):
            word = state.split()[0]
            yield JobState(job, word, _or_none(reason), *ending, restarted, _or_none(nodes))


def _elements(number: str) -> list[str]:
    """The elements of an array that share a row, or the job itself.

    >>> _elements("5_[1,4-6%2]"), _elements("5_3"), _elements("5")
    (['5_1', '5_4', '5_5', '5_6'], ['5_3'], ['5'])
    """
    shared = re.fullmatch(r"(\d+)_\[([\d,:-]+(?:%\d+)?)\]", number)
    if shared is None:
        return [number]
    return [f"{shared[1]}_{element}" for each in array_ranges(shared[2]) for element in each]


def _exit(text: str) -> tuple[int | None, int | None]:
    """Parse an exit code and a signal: ``3:0``, or the status of a process, in which the code is
    the high byte."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        return None, None
    return (int(match[1]), int(match[2])) if match[2] else (int(text) >> 8, int(text) & 127)


def _or_none(text: str) -> str | None:
    """The text; None if it is one of SLURM's words for "no value"."""
    text = text.strip()
    return None if text in ("", "None", "(null)", "None assigned", "Unknown") else text


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
        A row for each job, and for each element of an array.

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


def _forgotten(job: SlurmJob, states: Sequence[JobState]) -> list[str]:
    """The job, or the elements of an array, that SLURM does not know any more."""
    asked = [job.id] if job.array is None else _elements(f"{job.id}_[{job.array}]")
    named = {state.id for state in states}
    return [number for number in asked if number not in named]


def is_job_number(target: str) -> bool:
    """Whether ``target`` is the number of a job or element, and no file has that name."""
    return bool(re.fullmatch(r"\d+(_\d+)?", target, re.ASCII)) and not Path(target).exists()


def in_ranges(numbers: Iterable[str]) -> list[str]:
    """Numbers of jobs, those of an array's elements as one.

    >>> in_ranges(["12_3", "9", "12_4", "12_5"])
    ['12_[3-5]', '9']
    """
    arrays = defaultdict[str, list[str]](list)
    for number in numbers:
        arrays[number.partition("_")[0]].append(number)
    return [
        # SLURM names an array by its own number alone once what still waited is cancelled.
        same[0]
        if len(same) == 1 or array in same
        else f"{array}_[{number_ranges(int(number.partition('_')[2]) for number in same)}]"
        for array, same in arrays.items()
    ]


def table_of(rows: Iterable[JobStatus]) -> list[str]:
    """A line for each job. Elements of an array with the same state share a line.

    Args:
        rows: The jobs.

    Returns:
        The lines, after a line with the names of the columns.
    """
    alike = defaultdict[tuple[str, str], list[JobStatus]](list)
    for row in rows:
        alike[row.id.partition("_")[0], row.words()].append(row)
    table = [("job", "name", "ranks", "nodes", "state")]
    for (_, words), same in alike.items():
        job = same[0].job
        (label,) = in_ranges(row.id for row in same)
        nodes = {row.state.nodes for row in same if row.state is not None and row.state.nodes}
        where = f"{len(nodes)} different" if len(nodes) > 1 else "".join(nodes)
        name, ranks = (job.name, str(job.ranks)) if job is not None else ("", "")
        table.append((label, name, ranks, where, words))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
