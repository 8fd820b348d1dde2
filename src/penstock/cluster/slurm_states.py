"""The states of jobs, from SLURM's commands and from the list of their study.

    scontrol show job ──▶ sacct
    waits, runs, has just ended    accounting, where there is some

The second is asked about what the first does not know any more. Their text output is parsed,
because not every SLURM in use writes JSON. A job that was preempted or requeued has not ended: it
starts again under the same number. Accounting has a row for each start of a job; the last row
counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    return {job: _states_of(job) for job in jobs}


def _states_of(job: str) -> list[JobState]:
    rows = _pick(job, _scontrol(_answer(["scontrol", "--oneliner", "show", "job", job])))
    if not rows:
        return _pick(job, _accounted(job))
    if "_" in job or "_" not in rows[0].id:
        return rows
    # The controller forgets an element some minutes after its end, while others still run.
    names = {row.id for row in rows}
    return rows + [
        row
        for row in _pick(job, _accounted(job))
        if row.ended and row.id not in names and not any(waits_in(row.id, each) for each in names)
    ]


def _accounted(job: str) -> list[JobState]:
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates"]
    ended = ask_slurm([*command, f"--format={','.join(_FIELDS)}", f"--jobs={job}"])
    return [] if ended.returncode else _sacct(ended.stdout)  # no accounting here


_FIELDS = ("JobID", "State", "ExitCode", "NodeList")


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


def _pick(job: str, rows: Iterable[JobState]) -> list[JobState]:
    """The last row of each element of a job, in order."""
    last = {}
    for row in rows:
        if waits_in(job, row.id):
            row = replace(row, id=job)
        if job in (row.id, row.id.partition("_")[0]):
            last[row.id] = row
    return list(last.values())


def waits_in(job: str, row: str) -> bool:
    """Whether an element of an array is in the row that its waiting elements share.

    >>> waits_in("5_4", "5_[1,4-6%2]"), waits_in("5_4", "5_[0-8:2]"), waits_in("5_4", "5_[5-9]")
    (True, True, False)
    """
    array, _, element = job.partition("_")
    shared = re.fullmatch(rf"{array}_\[([\d,:-]+(%\d+)?)\]", row)
    if shared is None or not element.isdecimal():
        return False
    return any(int(element) in each for each in array_ranges(shared[1]))


def _answer(command: Sequence[str]) -> str:
    """The output of a command about jobs; "" if it does not know them."""
    ended = ask_slurm(command)
    if ended.returncode == 0:
        return ended.stdout
    complaint = complaint_of(ended)
    if "invalid job id" in complaint.lower():
        return ""
    raise PenstockError(f"{command[0]}: {complaint}")


def _scontrol(text: str) -> list[JobState]:
    """Parse lines of ``Key=Value`` pairs, one line for each job."""
    rows = []
    for line in text.split("\n"):
        values = dict(re.findall(r"(\S+?)=(\S*)", line)[::-1])  # the first value of a name counts
        state = re.search(r" JobState=([A-Z_]+) Reason=(.*?) Dependency=", line)
        if "JobId" not in values or state is None:
            continue
        job = values["JobId"]
        if "ArrayJobId" in values:
            tasks = values.get("ArrayTaskId", "")  # elements that wait share one row
            job = f"{values['ArrayJobId']}_{tasks if tasks.isdecimal() else f'[{tasks}]'}"
        code, signal = _exit(values.get("ExitCode", ""))
        restarts = values.get("Restarts", "")
        rows.append(
            JobState(
                job,
                state[1],
                _or_none(state[2]),
                code,
                signal,
                int(restarts) if restarts.isdecimal() else None,
                _or_none(values.get("NodeList", "")),
            )
        )
    return rows


def _sacct(text: str) -> list[JobState]:
    """Parse rows of `_FIELDS`. Each further row of a job is a restart of it."""
    rows: list[JobState] = []
    lives = Counter[str]()
    for line in text.split("\n"):
        cells = defaultdict(str, zip(_FIELDS, line.strip().split("|"), strict=False))
        job, state = cells["JobID"], cells["State"]
        if re.match(r"\d", job) and state:
            code, signal = _exit(cells["ExitCode"])
            nodes = _or_none(cells["NodeList"])
            rows.append(JobState(job, state.split()[0], None, code, signal, lives[job], nodes))
            lives[job] += 1
    return rows


def _exit(text: str) -> tuple[int | None, int | None]:
    """Parse an exit code and a signal, such as ``3:0``."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (None, None)


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
