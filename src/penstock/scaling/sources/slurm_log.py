"""Runs from the output of SLURM jobs, of Penstock's trainings and of the seed's.

    Job ID: 13   Job Name: ...   Number of tasks: 2   ──┐
    Batch size (per GPU): 32 | Effective ...: 64         │
    \\rEpoch 2: 100%|███| 110/110 [..., val_acc=0.542]    ├──▶ one Run
    Total training time: 7.40 seconds  (rank 0)          │
    Total training time: 7.77 seconds  (rank 1)        ──┘
    Job ID: 13   (the same job, requeued)              ─────▶ another

A file is read once, line by line, in little memory; a carriage return ends a line as well. Under
srun every rank prints: the slowest counts, and all are kept. Where two ranks print at once, one
line may hold the words of both. ``WORLD_SIZE`` is 1 under srun, so tasks and batches count first.
A job that did not end well gives a run with what it printed so far, and with how it ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...base import system_errors
from ...instruments import PHASES
from ..runs import A_GPU, Rank, Status, TrainingRun
from .settings import settings_of

_CHUNK = 1 << 20
_LONGEST = 1 << 14
"""The most bytes of a line that are read."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escapes that move a cursor, and all other control characters."""
_FIELDS = re.compile(r"\s{2,}|\s\|\s|\t")
_ASIDE = re.compile(r"\([^()]*\)")
_ACCUMULATED = re.compile(r"x (\d{1,6}) accumulated")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LABEL = re.compile(r"\A\s*\d{1,6}: ?")
"""The number of the task that ``srun --label`` puts before a line."""
_GLUED = re.compile(
    r"(?<=[\w.)\]=])(?=(?:Job (?:ID|Name)|Node\(s\)|Number of [A-Za-z]+|Max (?:epochs|steps)"
    r"|Workload|(?:Batch|Effective batch) size|Learning rate|Hidden dimensions|Dropout|Noise level"
    r"|Total training time|Time per epoch|Epochs done|(?:Samples|Steps) per epoch"
    r"|Best (?:checkpoint|validation loss|validation accuracy))(?: ?\([^()]{1,60}\))?:)"
)
"""The place where a rank's line begins within the line of another."""
_ANEW = re.compile(r"\s*(?:Max epochs|SLURM_JOB_ID):")
"""The first line of a training without a job's header."""
_OURS = re.compile(r"[^:]+: [\d,]+ parameters, \d+ x ([^,]+), (\d{1,15}) steps of \d+ samples$")
_STEP = re.compile(r"rank (\d{1,6}): ([\d.,]+) (m?)s a step: ")
_SHARE = re.compile(rf"({'|'.join(PHASES)}) (\d{{1,3}})%")
_COUNT = re.compile(r"\d{1,15}")
_PROGRESS = re.compile(r"Epoch (\d{1,9})(?:/(\d{1,9}))?: .*?(\d{1,9})/(\d{1,9}) \[")
_OUR_EPOCH = re.compile(r"epoch (\d{1,9}), step \d+ of \d+: ")
_SCORE = re.compile(r"\b(val_loss|val_acc)[= ]([-+0-9.e]+|nan|inf)")
_DIVERGED = re.compile(r"\b(?:\w+_)?loss(?:_step|_epoch)?[= ][-+]?(?:nan|inf)\b", re.IGNORECASE)
"""A loss that is not finite, in a bar of progress or a line of an epoch."""
_IN_NAME = re.compile(r"([\w-]*?)-epoch=\d+")
_GLOO = re.compile(r"distributed_backend=gloo$")
_FIELD = re.compile(r"[^:]*:")
_SMI_ROW = re.compile(r"MiB\s*/\s*\d+MiB\s*\|\s*(\d{1,3})%")
_SMI_CSV = re.compile(r"\d{1,3}, *(\d{1,3}) ?%, *\d{1,3} ?%")
_ENDS: tuple[tuple[str, Status], ...] = (
    ("DUE TO PREEMPTION", "preempted"),
    ("DUE TO JOB REQUEUE", "preempted"),  # SLURM requeues these as well
    ("DUE TO NODE FAIL", "preempted"),
    ("DUE TO TIME LIMIT", "timeout"),
    (" CANCELLED AT ", "cancelled"),
    ("penstock train: stopped by ", "stopped"),
    ("Traceback (most recent call last)", "crashed"),
    ("Segmentation fault", "crashed"),
    ("oom-kill event", "crashed"),
    ("oom_kill event", "crashed"),
    ("Out Of Memory", "crashed"),
    ("xited with exit code", "crashed"),
)
"""Signs of a bad end. The first that fits counts, as a cancelled job also prints tracebacks."""
_OF_THE_JOB = frozenset({
    "job id", "slurm_job_id", "job name", "slurm_job_name", "number of nodes", "slurm_nnodes",
    "number of tasks", "slurm_ntasks", "total gpus", "number of gpus", "gpu 0", "cuda available",
})  # fmt: skip
"""Fields that hold for all attempts of a job."""


@dataclass
class _Attempt:
    """The lines of a job since its header, as numbers and fields."""

    fields: dict[str, str] = field(default_factory=dict)
    """The first value of each field, by its name in small letters."""
    totals: list[float] = field(default_factory=list)
    """Training time of each rank that printed one, in seconds."""
    per_epoch: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    diverged: bool = False
    """True if a loss was not finite."""
    accuracies: list[float] = field(default_factory=list)
    epochs: set[int] = field(default_factory=set)
    """The epochs that came to their end, from 0."""
    first_epoch: int | None = None
    steps: int | None = None
    workload: str | None = None
    utilisation: list[float] = field(default_factory=list)
    device: str | None = None
    """The device as our own training names it."""
    all_steps: int | None = None
    """The steps of all epochs."""
    phases: dict[int, tuple[float, dict[str, int]]] = field(default_factory=dict)
    """The median step of each rank in seconds, and the percents that its phases took."""
    end: Status | None = None

    @property
    def trained(self) -> bool:
        """Whether it printed anything of a training, or of its end."""
        asked = {"max epochs", "effective batch size", "batch size", "batch size per gpu"}
        return bool(self.fields.keys() & asked or self.totals or self.epochs or self.end)

    def count(self, *names: str) -> int | None:
        """The first of these fields that holds a whole number above 0."""
        texts = (_without_commas(self.fields.get(name, "")) for name in names)
        counts = (int(number[0]) for number in map(_COUNT.search, texts) if number)
        return next((count for count in counts if count > 0), None)


def read_log(path: Path) -> list[TrainingRun]:
    """The runs in the output of a job, one for each attempt; none where it holds no training."""
    attempts = [_Attempt()]
    for line in lines_of(path):
        for piece in _GLUED.split(_LABEL.sub("", line)):
            # A script and its program may both print the header of a job.
            if piece.lstrip().startswith("Job ID:") and attempts[-1].trained:
                attempts.append(_Attempt())
            elif attempts[-1].end not in (None, "crashed") and _ANEW.match(piece):
                before = attempts[-1].fields
                attempts.append(_Attempt({k: v for k, v in before.items() if k in _OF_THE_JOB}))
            _take(attempts[-1], piece)
    last = attempts[-1]
    if len(attempts) == 1 and not last.totals and path.suffix != ".err":
        last.end = _end_in(path.with_suffix(".err")) or last.end
    # Our own training names its device at its end, which not every attempt reaches.
    devices = {_job(path, attempt): attempt.device for attempt in attempts if attempt.device}
    runs: list[TrainingRun] = []
    for attempt in attempts:
        attempt.device = attempt.device or devices.get(_job(path, attempt))
        if attempt.trained or "job id" in attempt.fields:
            job = _job(path, attempt)
            broken = [run for run in runs if run.job == job and run.status != "complete"]
            runs.append(_run(path, attempt, len(broken)))
    return runs


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file without escapes, whatever its bytes are."""
    with system_errors(f"{path} cannot be read"), path.open("rb") as file:
        rest = b""
        while chunk := file.read(_CHUNK):
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            # A file without an end of line would else take quadratic time.
            rest = rest[:_LONGEST]
            yield from map(_text, lines)
        yield _text(rest)


def _text(line: bytes) -> str:
    text = line[:_LONGEST].decode("utf-8", "replace")
    return text if text.isprintable() else _ESCAPE.sub("", text)


def _take(attempt: _Attempt, line: str) -> None:
    """Keep the content of a line by its kind, and how the job ended where the line says so."""
    for match, keep in _KINDS:
        if said := match(line):
            keep(attempt, said)
            break
    if end := _end(line):
        # A job that is stopped or cancelled also ends with an error. SLURM's own word counts.
        before = attempt.end
        if before in (None, "crashed") or (before == "stopped" and end != "crashed"):
            attempt.end = end


def _take_progress(attempt: _Attempt, bar: re.Match[str]) -> None:
    number, of, done, steps = bar.groups()
    epoch = int(number) - (of is not None)  # "Epoch 50/50" counts from 1, "Epoch 49" from 0
    attempt.steps = int(steps) or attempt.steps
    if attempt.first_epoch is None:
        attempt.first_epoch = epoch
    if done == steps:
        attempt.epochs.add(epoch)
    _take_scores(attempt, bar.string)


def _take_our_epoch(attempt: _Attempt, line: re.Match[str]) -> None:
    attempt.epochs.add(int(line[1]))
    _take_scores(attempt, line.string)


def _take_our_device(attempt: _Attempt, line: re.Match[str]) -> None:
    attempt.device, attempt.all_steps = line[1], int(line[2])


def _take_phases(attempt: _Attempt, line: re.Match[str]) -> None:
    shares = {name: int(percent) for name, percent in _SHARE.findall(line.string)}
    for seconds in _number(line[2]):
        if seconds and sum(shares.values()):
            attempt.phases[int(line[1])] = (seconds / (1000 if line[3] else 1), shares)


def _take_scores(attempt: _Attempt, line: str) -> None:
    attempt.diverged |= _DIVERGED.search(line) is not None
    for name, value in _SCORE.findall(line):
        (attempt.losses if name == "val_loss" else attempt.accuracies).extend(_number(value))


def _take_fields(attempt: _Attempt, line: re.Match[str]) -> None:
    for piece in _FIELDS.split(line.string):
        name, colon, value = piece.partition(":")
        if accumulated := colon and _ACCUMULATED.search(name):
            attempt.fields.setdefault("accumulated", accumulated[1])
        if colon:
            _take_field(attempt, _ASIDE.sub("", name).strip().lower(), value.strip())


_NUMBERS = {
    "total training time": "totals",
    "time per epoch": "per_epoch",
    "best validation loss": "best",
    "best validation accuracy": "accuracies",
}
"""Fields that hold a number, each with the list of an attempt that keeps it."""


def _take_field(attempt: _Attempt, name: str, value: str) -> None:
    if name in _NUMBERS:
        getattr(attempt, _NUMBERS[name]).extend(_number(value))
    elif name == "best checkpoint":
        in_name = _IN_NAME.match(value.rpartition("/")[2])
        attempt.workload = in_name[1] if in_name else attempt.workload
    else:
        attempt.fields.setdefault(name, value)


_Known = Callable[[str], re.Match[str] | None]
_KINDS: tuple[tuple[_Known, Callable[[_Attempt, re.Match[str]], object]], ...] = (
    (_PROGRESS.match, _take_progress),
    (_SMI_ROW.search, lambda attempt, row: attempt.utilisation.append(float(row[1]))),
    (_SMI_CSV.match, lambda attempt, row: attempt.utilisation.append(float(row[1]))),
    (_OUR_EPOCH.match, _take_our_epoch),
    (_OURS.match, _take_our_device),
    (_STEP.match, _take_phases),
    # Gloo is for CPUs, where no line names a GPU.
    (_GLOO.match, lambda attempt, line: attempt.fields.setdefault("cuda available", "False")),
    (_FIELD.match, _take_fields),
)
"""Each kind of line: how it is known and how it is kept. The first that fits counts."""


def _number(text: str) -> list[float]:
    """The number that a text begins with, in a list; none where it begins with something else."""
    number = _NUMBER.match(_without_commas(text))
    return [float(number[0])] if number else []


def _without_commas(text: str) -> str:
    """The text with 1295.23 for 1,295.23."""
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text) if "," in text else text


def _end(line: str) -> Status | None:
    return next((status for sign, status in _ENDS if sign in line), None)


def _end_in(path: Path) -> Status | None:
    """How a job ended by its file of errors; the last attempt counts."""
    if not path.is_file():
        return None
    end: Status | None = None
    for line in lines_of(path):
        if (status := _end(line)) and (status not in ("crashed", "stopped") or end is None):
            end = status
    return end


def _job(path: Path, attempt: _Attempt) -> str:
    in_name = re.search(r"(\d+(?:_\d+)?)(?:\.\w+)?$", path.name)
    numbers = (attempt.fields.get("job id") or attempt.fields.get("slurm_job_id") or "").split()
    if numbers:
        return numbers[0][:40]
    # A run of ours without a job is named by its folder, and so is its log.
    out = attempt.fields.get("output directory", "") if "workload" in attempt.fields else ""
    return Path(out).name or (in_name[1] if in_name else path.stem)


def _run(path: Path, attempt: _Attempt, before: int) -> TrainingRun:
    fields = attempt.fields
    batch = attempt.count("batch size", "batch size per gpu")
    total = _COUNT.findall(_without_commas(fields.get("effective batch size", "")))
    global_batch = int(total[-1]) if total and int(total[-1]) > 0 else None
    devices = _devices(attempt, batch, global_batch)
    # With a limit of steps, only the log's own count tells how many epochs were done.
    planned = None if attempt.count("max steps") else attempt.count("max epochs")
    # Our own times are of all attempts. A log without a bar of progress shows only its end.
    all_done = attempt.count("epochs done") if attempt.totals else None
    done = all_done or (planned if attempt.totals else None)
    if attempt.epochs and all_done is None:  # from where this attempt began
        done = max(attempt.epochs) + 1 - min(attempt.first_epoch or 0, *attempt.epochs)
    status: Status = "complete" if attempt.totals else attempt.end or "unfinished"
    best, losses, accuracies = map(_finite, (attempt.best, attempt.losses, attempt.accuracies))
    on_cpu = fields.get("cuda available", "").startswith("False")
    device = attempt.device or ("cpu" if on_cpu else fields.get("gpu 0"))
    settings = settings_of(fields) | ({"device": device} if device else {})
    if not device and _on_gpus(attempt):
        device = A_GPU
    if attempt.workload:
        settings.setdefault("workload", attempt.workload)
    restarts = _COUNT.match(fields.get("restarts") or fields.get("slurm_restart_count") or "")
    return TrainingRun(
        source=str(path),
        job=_job(path, attempt),
        name=fields.get("job name") or fields.get("slurm_job_name") or path.stem,
        devices=devices,
        nodes=attempt.count("number of nodes", "slurm_nnodes"),
        seconds=max(attempt.totals, default=None),
        epochs=done,
        planned_epochs=planned,
        epoch_seconds=max(attempt.per_epoch, default=None),
        # Ours counts the training samples; the seed's counts validation and test as well.
        samples=attempt.count("samples per epoch", "number of samples"),
        batch=batch,
        global_batch=global_batch or (batch * devices if batch else None),
        steps=attempt.steps or attempt.count("steps per epoch"),
        val_loss=min(best or losses, default=None),
        val_acc=max(accuracies, default=None),
        diverged=attempt.diverged or len(best) < len(attempt.best),
        status=status,
        restarts=int(restarts[0]) if restarts else before,
        device=device or None,
        rank_seconds=tuple(attempt.totals),
        ranks=tuple(_ranks(attempt)) if attempt.all_steps else (),
        utilisation=tuple(attempt.utilisation),
        settings=settings,
    )


def _finite(scores: list[float]) -> list[float]:
    return [score for score in scores if math.isfinite(score)]


def _on_gpus(attempt: _Attempt) -> bool:
    """Whether a log that names no device shows that it used GPUs."""
    available = attempt.fields.get("cuda available", "").startswith("True")
    return bool(available or attempt.utilisation or attempt.count("total gpus", "number of gpus"))


def _ranks(attempt: _Attempt) -> Iterator[Rank]:
    """The phases of ranks, from whole percents, which are too coarse to name a slow rank."""
    for number, (seconds, shares) in sorted(attempt.phases.items()):
        whole = seconds * (attempt.all_steps or 0)
        each = whole / sum(shares.values())
        yield Rank(number, {name: each * n for name, n in shares.items()} | {"step": whole})


def _devices(attempt: _Attempt, batch: int | None, global_batch: int | None) -> int:
    """The number of devices by the batches, else by SLURM's tasks, else by variables."""
    each = (batch or 0) * (attempt.count("accumulated") or 1)
    if each and global_batch and global_batch % each == 0:
        return global_batch // each
    return (
        attempt.count("slurm_ntasks", "number of tasks")
        or attempt.count("total gpus", "world_size", "number of gpus")
        or 1
    )
