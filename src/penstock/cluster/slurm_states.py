"""The states of jobs, from SLURM's commands and from the list of their study.

    squeue ──▶ sacct
    waits, runs, has just ended    accounting, where there is some

The second is asked about what the first does not know any more. Their rows are parsed, because not
every SLURM in use writes JSON. A job that was preempted or requeued has not ended: it starts again
under the same number. Accounting has a row for each start of a job; the last row counts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..base import (
    Incomplete,
    PenstockError,
    UsageError,
    array_ranges,
    group_by,
    number_ranges,
    plural,
)
from .slurm_jobs import TARGETS, SlurmJob, ask_slurm, complaint_of, read_study

UNKNOWN = "unknown to SLURM: its log says how it ended"
"""The state of a job that SLURM has forgotten."""
ENDS = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY REVOKED TIMEOUT".split()
) | {UNKNOWN}
"""The states after which a job does not start again. After PREEMPTED and REQUEUED it does."""


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
    job: SlurmJob | None = None
    """The job as it was submitted; None if its study is not known."""

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    @property
    def code(self) -> int:
        """The exit code of ``penstock slurm status``: 0 done, 1 failed, 3 not ended."""
        return 0 if self.state == "COMPLETED" else 1 if self.ended else 3

    def words(self) -> str:
        """The state, its reason and the exit code as text, separated by commas."""
        words = [self.state]
        if self.exit_code:
            is_ours = self.job is None or self.job.kind != "program"
            stopped = self.exit_code == Incomplete.exit_code and self.ended and is_ours
            words.append(f"exit code {self.exit_code}{': its log says how to go on' * stopped}")
        if self.signal:
            words.append(f"killed by signal {self.signal}")
        if self.reason is not None and not self.exit_code:  # else the reason is NonZeroExitCode
            waits = self.reason == "Dependency" and self.job is not None and self.job.waits_for
            words.append(f"{self.reason} {waits}" if waits else self.reason)
        if self.restarts:
            words.append(plural(self.restarts, "restart"))
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
    # No width, or texts would be cut.
    columns = "--Format=jobarrayid:|,state:|,exit_code:|,nodelist:|,restartcnt:|,reason:|"
    ended = ask_slurm([*command, columns, f"--jobs={','.join(jobs)}"])
    if ended.returncode and "invalid job id" not in complaint_of(ended).lower():
        raise PenstockError(f"squeue: {complaint_of(ended)}")
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
    complaint, refused = complaint_of(ended), ended.returncode or "error: " in ended.stderr
    if refused and "already comp" not in complaint.lower():
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
        facts = state.split()[0], _or_none(reason), *_exit(code), restarted, _or_none(nodes)
        yield from (JobState(job, *facts) for job in _elements(number))


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
    code, _, number = text.partition(":")
    if not code.isdecimal():
        return None, None
    return (int(code), int(number)) if number else (int(code) >> 8, int(code) & 127)


def _or_none(text: str) -> str | None:
    """The text; None if it is one of SLURM's words for "no value"."""
    nothing = ("", "None", "(null)", "None assigned", "Unknown")
    return None if text.strip() in nothing else text.strip()


def job_statuses(targets: Sequence[str]) -> list[JobState]:
    """The jobs of studies, and jobs by number.

    Args:
        targets: Folders, files of studies, and numbers.

    Returns:
        A row for each job, and for each element of an array.

    Raises:
        UsageError: There is no target, SLURM does not know a number, or a study cannot be read.
    """
    if not targets:
        raise UsageError(f"no job is named; give {TARGETS}")
    submitted: dict[str, SlurmJob | None] = {}
    for target in targets:
        # A file may have a number for its name.
        if re.fullmatch(r"\d+(_\d+)?", target, re.ASCII) and not Path(target).exists():
            submitted.setdefault(target)
        else:
            submitted |= {job.id: job for job in read_study(Path(target))}
    rows = list[JobState]()
    for number, states in (job_states([*submitted]) if submitted else {}).items():
        job = submitted[number]
        if job is None and not states:
            raise UsageError(f"SLURM knows no job {number}")
        asked = [] if job is None else _elements(f"{number}_[{job.array}]" if job.array else number)
        forgotten = [each for each in asked if each not in {state.id for state in states}]
        rows += [replace(state, job=job) for state in states]
        rows += [JobState(each, UNKNOWN, job=job) for each in forgotten]
    return rows


def in_ranges(numbers: Iterable[str]) -> list[str]:
    """Numbers of jobs, those of an array's elements as one.

    >>> in_ranges(["12_3", "9", "12_4", "12_5"])
    ['12_[3-5]', '9']
    """
    arrays = group_by(numbers, lambda number: number.partition("_")[0])
    return [
        # SLURM names an array by its own number alone once what still waited is cancelled.
        same[0]
        if len(same) == 1 or array in same
        else f"{array}_[{number_ranges(int(number.partition('_')[2]) for number in same)}]"
        for array, same in arrays.items()
    ]


def table_of(rows: Iterable[JobState]) -> list[str]:
    """A line for each job. Elements of an array with the same state share a line.

    Args:
        rows: The jobs.

    Returns:
        The lines, after a line with the names of the columns.
    """
    alike = group_by(rows, lambda row: (row.id.partition("_")[0], row.words()))
    table = [("job", "name", "ranks", "nodes", "state")]
    for (_, words), same in alike.items():
        job = same[0].job
        (label,) = in_ranges(row.id for row in same)
        nodes = {row.nodes for row in same if row.nodes}
        where = f"{len(nodes)} different" if len(nodes) > 1 else "".join(nodes)
        named = (job.name, str(job.ranks)) if job is not None else ("", "")
        table.append((label, *named, where, words))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
