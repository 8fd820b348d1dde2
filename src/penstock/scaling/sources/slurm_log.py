"""Runs from the output of SLURM jobs, of Penstock's trainings and of the seed's.

    Job ID: 13   Job Name: ...   Number of tasks: 2   ──┐
    Batch size (per GPU): 32 | Effective ...: 64         │
    \\rEpoch 2: 100%|███| 110/110 [..., val_acc=0.542]    ├──▶ one Run
    Total training time: 7.40 seconds  (rank 0)          │
    Total training time: 7.77 seconds  (rank 1)        ──┘
    Job ID: 13   (the same job, requeued)              ─────▶ another
    Max epochs: 50   (a second training of the job)    ─────▶ another

A file, compressed (``.gz``) or not, is read once, in little memory; a carriage return also ends a
line. Lines that differ only in their digits are read by position; see `digit_places`. Under srun
every rank prints: the slowest counts, and all are kept. If two ranks print at the same time, one
line may have the words of both. ``WORLD_SIZE`` is 1 under srun, so batches count first. A
job that failed gives a run with its output until then, and with how it ended.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from ...base import UsageError, as_usage_error, system_errors
from ..runs import A_GPU, MAY_FOLLOW, Rank, Status, TrainingRun, end_in, is_cause, settings_of
from .attempt import COUNT, FINISHED, Attempt, without_commas
from .digit_places import LABEL, Shapes

_CHUNK = 1 << 20
_LONGEST = 1 << 14
"""The maximum number of bytes that are read of a line."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escapes that move a cursor, and all other control characters."""
_NAMED = (
    r"(?=(?:Job (?:ID|Name)|Node\(s\)|Number of [A-Za-z]+|Max (?:epochs|steps)"
    r"|Workload|(?:Batch|Effective batch) size|Learning rate|Hidden dimensions|Dropout|Noise level"
    r"|Total training time|Time per epoch|Epochs done|(?:Samples|Steps) per epoch"
    r"|CUDA available|`Trainer\.fit` stopped|Initializing distributed"
    r"|Best (?:checkpoint|validation loss|validation accuracy))(?: ?\([^()]{1,60}\))?:)"
)
_LABEL = re.compile(
    r"\A\s*\d{1,6}: ?"
    r"|\A(?=.*?(?:\b(?:DEBUG|INFO|WARNING)\b|\[[^][]+\]|\d:\d\d:\d\d)).{1,200}?[]:|>-] *"
    rf"(?:{_NAMED}|(?=Epoch \d))"
)
"""The labels that ``srun --label``, torchrun, mpirun and loggers put before a line."""
_GLUED = re.compile(rf"(?<=[\w.)\]=]){_NAMED}")
"""The place where a rank's line begins within the line of another."""
_ANEW = re.compile(r"\s*(?:Max epochs|SLURM_JOB_ID):")
"""The first line of a training without a job's header."""
_FIRST_EPOCH = re.compile(LABEL + rb"(?:Epoch 0:|Epoch 1/\d|epoch 0, step )")
"""The start of a line of progress in the first epoch of a training."""
_FIRST_BAR = re.compile(LABEL + rb"Epoch 0: +0%")


def read_log(path: Path) -> list[TrainingRun]:
    """The runs in the output of a job, one for each attempt; none if it has no training.

    Raises `UsageError` if a line has a time whose meaning is not known.
    """
    attempts, shapes = [Attempt()], Shapes()
    for line in raw_lines(path):
        if _begins(line, attempts[-1]):
            attempts.append(attempts[-1].of_the_job())
        if not shapes.take(line, attempts[-1]):
            text = text_of(line)
            try:
                shapes.learn(line, kept=_take(attempts, text))
            except ValueError as error:
                raise UsageError(f"{path}: {text.strip()[:200]}: {error}") from error
    attempts = _with_all_ranks(attempts)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    last = attempts[-1]
    if len(attempts) == 1 and not last.totals and plain.suffix != ".err":
        _take_beside(last, plain.with_suffix(".err"))
    # Our own training names its device at its end, which not every attempt reaches.
    devices = {_job(plain, attempt): attempt.device for attempt in attempts if attempt.device}
    runs: list[TrainingRun] = []
    for attempt in attempts:
        attempt.device = attempt.device or devices.get(_job(plain, attempt))
        job = _job(plain, attempt)
        # A header alone below a training is of what `seff` says of the job.
        if attempt.trained or ("job id" in attempt.fields and not (runs and runs[-1].job == job)):
            broken = [run for run in runs if run.job == job and run.status != "complete"]
            runs.append(_run(path, plain, attempt, len(broken)))
    return runs


def _begins(line: bytes, before: Attempt) -> bool:
    """Whether a line of progress begins a training after the one before."""
    # Lightning prints its last bar again after its end.
    anew = before.finished and _FIRST_BAR.match(line)
    return bool(anew or (before.totals and _FIRST_EPOCH.match(line)))


def _take(attempts: list[Attempt], line: str) -> bool:
    """Take a line into the last attempt, or into a new one that it begins. Returns False if nothing
    of the line is kept."""
    kept = False
    for piece in _GLUED.split(_LABEL.sub("", line)):
        # A script and its program may both print the header of a job.
        if piece.lstrip().startswith("Job ID:") and attempts[-1].trained:
            attempts.append(Attempt())
        elif (attempts[-1].is_over and _ANEW.match(piece)) or (
            attempts[-1].finished and FINISHED.search(piece)
        ):
            attempts.append(attempts[-1].of_the_job())
        kept |= attempts[-1].take(piece)
    return kept


def _with_all_ranks(attempts: list[Attempt]) -> list[Attempt]:
    """The attempts, with those joined that are ranks of one training.

    A rank may keep all its lines until its end. So a header after a total begins another training,
    or is that of another rank. It is another rank's if it says the same, as long as there are no
    more totals than devices.
    """
    joined = attempts[:1]
    for attempt in attempts[1:]:
        before = joined[-1]
        many = len(before.totals) + len(attempt.totals)
        ranks = attempt.same_start and before.totals and attempt.totals
        if ranks and not before.contradicts(attempt) and many <= _devices(before):
            before.add_rank(attempt)
        else:
            joined.append(attempt)
    return joined


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; lines that are too long are cut.

    Raises `UsageError` if the file cannot be read, or is compressed and damaged.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with system_errors(f"{path} cannot be read"), opened(path, "rb") as file:
        rest = b""
        with as_usage_error(f"{path} cannot be read to its end", EOFError, zlib.error):
            while chunk := file.read(_CHUNK):
                *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
                # Otherwise a file without line ends would take quadratic time.
                rest = rest[:_LONGEST]
                yield from lines
        yield rest


def text_of(line: bytes) -> str:
    """A line without escapes, whatever its bytes are."""
    text = line[:_LONGEST].decode("utf-8", "replace")
    return text if text.isprintable() else _ESCAPE.sub("", text)


def _take_beside(attempt: Attempt, path: Path) -> None:
    """Take what a job's error file says of its end and of Lightning's devices; the end of the last
    attempt counts."""
    if not path.is_file():
        path = path.with_name(f"{path.name}.gz")
    if not path.is_file():
        return
    end: Status | None = None
    for line in map(text_of, raw_lines(path)):
        if attempt.take_lightning(line):
            continue
        if (status := end_in(line)) and (is_cause(status, end) or status not in MAY_FOLLOW):
            end = status
    attempt.end = end or attempt.end


def _job(path: Path, attempt: Attempt) -> str:
    in_name = re.search(r"(\d+(?:_\d+)?)(?:\.\w+)?$", path.name)
    numbers = (attempt.fields.get("job id") or attempt.fields.get("slurm_job_id") or "").split()
    if numbers:
        return numbers[0][:40]
    # A run of ours without a job is named by its folder, and so is its log.
    out = attempt.fields.get("output directory", "") if "workload" in attempt.fields else ""
    return Path(out).name or (in_name[1] if in_name else path.stem)


def _run(path: Path, plain: Path, attempt: Attempt, before: int) -> TrainingRun:
    """Make a run of an attempt. ``plain`` is the path without ``.gz``; ``before`` is the number of
    earlier attempts of the job that did not finish."""
    fields = attempt.fields
    (batch, global_batch), devices = _batches(attempt), _devices(attempt)
    # With a limit of steps, only the log's own count tells how many epochs were done.
    planned = None if attempt.count("max steps") else attempt.count("max epochs")
    over = bool(attempt.totals or attempt.finished)
    restarts = COUNT.match(fields.get("restarts") or fields.get("slurm_restart_count") or "")
    restarted = int(restarts[0]) if restarts else before
    done = _epochs_done(attempt, planned if over else None, restarted)
    status: Status = "complete" if over else attempt.end or "unfinished"
    goes_on = restarted or attempt.restored
    if over and done is None and (planned or goes_on):
        status = "unknown"
    part = status == "unknown" or done not in (None, planned)
    on_cpu = fields.get("cuda available", "").startswith("False")
    device = attempt.device or fields.get("gpu 0") or ("cpu" if on_cpu else None)
    settings = settings_of(fields) | ({"device": device} if device else {})
    if not device and _on_gpus(attempt):
        device = A_GPU
    if attempt.workload:
        settings.setdefault("workload", attempt.workload)
    return TrainingRun(
        source=str(path),
        job=_job(plain, attempt),
        name=fields.get("job name") or fields.get("slurm_job_name") or plain.stem,
        devices=devices,
        nodes=attempt.count("number of nodes", "slurm_nnodes"),
        seconds=max(attempt.totals, default=None),
        epochs=done,
        planned_epochs=planned,
        # A script may divide the time of its last attempt by the epochs of all.
        epoch_seconds=None if part else attempt.extremes.get("per_epoch"),
        # Ours counts the training samples; the seed's counts validation and test as well.
        samples=attempt.count("samples per epoch", "number of samples"),
        batch=batch,
        global_batch=global_batch or (batch * devices if batch else None),
        steps=attempt.steps or attempt.count("steps per epoch"),
        val_loss=attempt.extremes.get("best_loss", attempt.extremes.get("val_loss")),
        val_acc=attempt.extremes.get("val_acc"),
        diverged=attempt.diverged,
        status=status,
        restarts=restarted,
        device=device or None,
        rank_seconds=tuple(attempt.totals),
        ranks=tuple(_ranks(attempt)) if attempt.all_steps else (),
        utilisation=tuple(attempt.gpus.percents),
        scores={
            name: tuple((epoch + 1, scores[epoch]) for epoch in sorted(scores))
            for name, scores in attempt.scores.items()
        },
        began=attempt.began,
        settings=settings,
    )


def _epochs_done(attempt: Attempt, planned: int | None, restarts: int) -> int | None:
    """The epochs of the attempt's time; None if the log does not tell.

    ``planned`` is the number of its last epoch if it came to its end, else None.
    """
    all_done = attempt.count("epochs done") if attempt.totals else None
    if all_done is not None:  # our own times are of all attempts
        return all_done
    first = attempt.restored_epoch
    if attempt.done:  # from where this attempt began
        least, greatest = attempt.done
        return greatest + 1 - min(attempt.first_epoch or 0, least)
    # A log without a bar of progress shows only its end.
    if planned is None or "workload" in attempt.fields:
        return planned
    if first is not None:
        return max(planned - first, 0) or None
    return None if restarts or attempt.restored else planned


def _on_gpus(attempt: Attempt) -> bool:
    """Whether a log that names no device shows that it used GPUs."""
    available = attempt.fields.get("cuda available", "").startswith("True")
    return bool(available or attempt.gpus.percents or attempt.count("total gpus", "number of gpus"))


def _ranks(attempt: Attempt) -> Iterator[Rank]:
    """The phases of ranks from whole percentages, which are too coarse to find a slow rank."""
    for number, (seconds, shares) in sorted(attempt.phases.items()):
        whole = seconds * (attempt.all_steps or 0)
        each = whole / sum(shares.values())
        yield Rank(number, {name: each * n for name, n in shares.items()} | {"step": whole})


def _batches(attempt: Attempt) -> tuple[int | None, int | None]:
    """The samples of a batch on a device, and on all."""
    batch = attempt.count("batch size", "batch size per gpu")
    total = COUNT.findall(without_commas(attempt.fields.get("effective batch size", "")))
    return batch, int(total[-1]) if total and int(total[-1]) > 0 else None


def _devices(attempt: Attempt) -> int:
    """The number of devices by Lightning, else by the batches, SLURM's tasks, or variables."""
    if members := attempt.count("members"):
        return members
    batch, global_batch = _batches(attempt)
    each = (batch or 0) * (attempt.count("accumulated") or 1)
    if each and global_batch and global_batch % each == 0:
        return global_batch // each
    tasks = attempt.count("slurm_ntasks", "number of tasks")
    world = attempt.count("world_size") or 1  # under srun 1, and torchrun is one task of many
    return max(tasks or attempt.count("total gpus", "number of gpus") or 1, world)
