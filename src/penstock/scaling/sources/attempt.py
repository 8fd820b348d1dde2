"""One attempt of a training, parsed from the lines of a job. It keeps only the fields of a run, so
a log of any length takes the same memory."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz

from ...base import leading_seconds
from ...instruments import PHASES
from ..runs import COMPARED, Status, end_in, is_cause
from .gpu_readings import GpuReadings

MOST_RANKS = 100_000
"""The maximum number of training times of ranks that are kept; then the last keeps the slowest."""
MOST_EPOCHS = 1 << 16
"""The maximum number of epochs whose scores are kept: those of a week."""

_WITH_COMMA = r"[-+]?\d+,\d+(?![\d.,])"  # such as 0,1187
SCORE = re.compile(rf"\b(val_loss|val_acc)(?:[= ]|: )({_WITH_COMMA}|[-+0-9.e]+|nan|inf)")
COUNT = re.compile(r"(?<!\d)\d{1,15}(?!\d)")
_FIELDS = re.compile(r"(?<![:\s])(?:\s{2,}|\t)(?![:\s])|\s\|\s")
"""The gaps between the fields of a line; names and values that are aligned are no two fields."""
_ASIDE = re.compile(r"\([^()]*\)")
_ACCUMULATED = re.compile(r"x (\d{1,6}) accumulated")
_NUMBER = re.compile(rf"{_WITH_COMMA}|[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)")
_NO_TIME = re.compile(r"[-+]\.?\d|nan|inf")
_RATE = re.compile(r"\s*(?:/|per )\s*(?:it|step|epoch|batch|sample)")
_TIMED = re.compile(r"(?i)\s*(total training time|time per epoch)\s*[(\[]([^()\[\]]*)[)\]]\s*:(.*)")
"""A time with a unit, or a rank, beside its name."""
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_OURS = re.compile(
    r"[^:]+: [\d,]+ parameters?, \d+ x ([^,]+), ([\d,]{1,19}) steps? of [\d,]+ samples?$"
)
_STEP = re.compile(r"rank (\d{1,6}): ([\d.,]+) (m?)s a step: ")
_SHARE = re.compile(rf"({'|'.join(PHASES)}) (\d{{1,3}})%")
_PROGRESS = re.compile(r"Epoch (\d{1,9})(?:/(\d{1,9}))?: .*?(\d{1,9})/(\d{1,9}) \[")
_RICH = re.compile(r"Epoch \d{1,9}/\d{1,9} +[\u2501\u2578\u257a ]+ \d{1,9}/(\d{1,9}) ")
"""The bar that Lightning draws where rich is installed: in a file the last one alone."""
_OUR_EPOCH = re.compile(r"epoch (\d{1,9})( of \d{1,9})?, step \d+ of \d+: ")
"""Epochs count from 1 where their number is said, and from 0 in older logs."""
_DIVERGED = re.compile(
    r"\b(?:\w+_)?loss(?:_step|_epoch)?(?:[= ]|: )[-+]?(?:nan|inf)\b", re.IGNORECASE
)
"""A loss that is not finite, in a bar of progress or a line of an epoch."""
FINISHED = re.compile(r"`Trainer\.fit` stopped: `max_(epochs|steps)=(\d{1,15})` reached")
_MEMBER = re.compile(r"\bMEMBER:? \d+/(\d{1,7})\b|\. Starting with (\d{1,7}) processes")
_ACCELERATOR = re.compile(r"(GPU|TPU|HPU|IPU) available: \w+(?: \(\w+\))?, us(?:ed|ing): (\w+)")
_CUDA = re.compile(r"You are using a CUDA device \('([^']+)'\)")
_RESTORED = re.compile(r"Restor(?:ing|ed all) states from the checkpoint(?: path)? at (.*)")
_EPOCH_IN_NAME = re.compile(r".*\bepoch=(\d{1,9})")
_IN_NAME = re.compile(r"([\w-]*?)-epoch=\d+")
_GLOO = re.compile(r"distributed_backend=gloo$")
_FIELD = re.compile(r"[^:]*:")
_DATE = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
    r"(?: (?![AP]M)[A-Z]{2,5})? \d{4}\b"
)
"""A date as `date` and nvidia-smi print it."""
_OF_A_TRAINING = frozenset({
    "max epochs", "effective batch size", "batch size", "batch size per gpu",
})  # fmt: skip
_PROCESSES = frozenset({"world size", "world_size", "num processes", "number of processes"})
"""Names of the number of processes, as trainings and Accelerate print it."""
_OF_THE_JOB = frozenset({
    "job id", "slurm_job_id", "job name", "slurm_job_name", "number of nodes", "slurm_nnodes",
    "number of tasks", "slurm_ntasks", "total gpus", "number of gpus", "gpu 0", "cuda available",
    "members",
})  # fmt: skip
"""Fields that hold for all attempts of a job."""
_ASKED = _OF_A_TRAINING | _OF_THE_JOB | {
    "output directory", "workload", "max steps", "epochs done", "samples per epoch",
    "number of samples", "steps per epoch", "accumulated", "restarts",
    "slurm_restart_count",
}  # fmt: skip
"""Fields of a `TrainingRun`, beside the settings that runs are compared by."""
AS_ZERO = str.maketrans("123456789", "0" * 9)
_ALIKE = {name.replace(" ", "_").translate(AS_ZERO) for name in _ASKED | COMPARED.keys()}


@dataclass
class Attempt:
    """The lines of a job since its header, as numbers and fields."""

    fields: dict[str, str] = field(default_factory=dict)
    """The first value of each kept field, by its name in small letters."""
    totals: list[float] = field(default_factory=list)
    """Training time of each rank that printed one, in seconds."""
    extremes: dict[str, float] = field(default_factory=dict)
    """The best or the slowest of what was printed several times; see `_LEAST`."""
    scores: dict[str, dict[int, float]] = field(default_factory=dict)
    """The last finite scores of epochs that came to their end, which count from 0."""
    began: float | None = None
    """The first date of a line before its end, as Unix time."""
    diverged: bool = False
    """True if a loss was not finite."""
    first_epoch: int | None = None
    """The epoch of the first bar of progress."""
    done: tuple[int, int] | None = None
    """The first and the last epoch that ended, counted from 0."""
    steps: int | None = None
    workload: str | None = None
    gpus: GpuReadings = field(default_factory=GpuReadings)
    device: str | None = None
    """The device as our own training names it."""
    all_steps: int | None = None
    """The number of steps of all epochs."""
    phases: dict[int, tuple[float, dict[str, int]]] = field(default_factory=dict)
    """The median step of each rank in seconds, and the percentages of its phases."""
    end: Status | None = None
    finished: bool = False
    """True if Lightning said that it has reached its last epoch or step."""
    restored: bool = False
    """True if Lightning said that it went on from a checkpoint."""
    restored_epoch: int | None = None
    """The epoch after that of the checkpoint."""
    later: dict[str, str] = field(default_factory=dict)
    """Devices that were named after the end, where another training or a test may begin."""
    same_start: bool = False
    """True if no header of a job came before it, as after a requeue."""

    @property
    def trained(self) -> bool:
        """Whether it has a line of a training, or of its end."""
        said = self.fields.keys() & (_OF_A_TRAINING | {"members"})
        return bool(said or self.totals or self.done or self.end)

    @property
    def is_over(self) -> bool:
        """Whether a rank has printed its total, or something ended it for good."""
        return bool(self.totals) or self.end not in (None, "crashed", "out_of_memory")

    def of_the_job(self) -> Attempt:
        """A new attempt with the fields of this one's job."""
        fields = {name: text for name, text in self.fields.items() if name in _OF_THE_JOB}
        if self.later:  # a process that says nothing of members is alone
            fields.pop("members", None)
        return Attempt(fields | self.later, gpus=GpuReadings(self.gpus.table), same_start=True)

    def contradicts(self, other: Attempt) -> bool:
        """Whether a field of a training has another value in another attempt."""
        shared = _OF_A_TRAINING & self.fields.keys() & other.fields.keys()
        return any(self.fields[name] != other.fields[name] for name in shared)

    def add_rank(self, other: Attempt) -> None:
        """Take what another rank of the same training printed."""
        self.fields |= {k: text for k, text in other.fields.items() if k not in self.fields}
        for seconds in other.totals:
            _take_total(self, seconds)
        for epoch in other.done or ():
            self.take_end_of_epoch(epoch)
        for name, value in other.extremes.items():
            self.take_extreme(name, value)
        self.diverged |= other.diverged
        self.phases |= other.phases
        self.gpus.percents += other.gpus.percents
        self.end = self.end or other.end

    def count(self, *names: str) -> int | None:
        """The first of these fields that holds a whole number above 0."""
        texts = (without_commas(self.fields.get(name, "")) for name in names)
        counts = (int(number[0]) for number in map(COUNT.search, texts) if number)
        return next((count for count in counts if count > 0), None)

    def take(self, line: str) -> bool:
        """Keep the content of a line by its kind, and how the job ended if the line says so.

        Returns:
            False if nothing of the line is kept, whatever its digits are.

        Raises:
            ValueError: It has a time whose meaning is not known.
        """
        kept = self.take_lightning(line) or self.gpus.take(line) or self._take_kind(line, _KINDS)
        end = end_in(line)
        if end and is_cause(end, self.end):
            self.end = end
        return kept or end is not None

    def take_lightning(self, line: str) -> bool:
        """Keep the content of a line of Lightning's. Returns False if it is none."""
        return self._take_kind(line, _OF_LIGHTNING)

    def _take_kind(self, line: str, kinds: Sequence[_KindOfLine]) -> bool:
        for match, keep in kinds:
            if said := match(line):
                return keep(self, said) is not False
        return False

    def take_progress(self, epoch: int, steps: int, *, ended: bool) -> None:
        """Note a bar of progress: its epoch from 0, the epoch's steps, and whether it ended."""
        self.steps = steps or self.steps
        if self.first_epoch is None:
            self.first_epoch = epoch
        if ended:
            self.take_end_of_epoch(epoch)

    def take_end_of_epoch(self, epoch: int) -> None:
        """Note an epoch that ended, counted from 0."""
        least, greatest = self.done or (epoch, epoch)
        self.done = min(least, epoch), max(greatest, epoch)

    def take_extreme(self, name: str, value: float) -> None:
        """Note a value of which the best or the slowest counts."""
        extreme = self.extremes.get(name)
        # Compared, as `min` and `max` take longer, and a log may have millions of scores.
        if extreme is None or (value < extreme if name in _LEAST else value > extreme):
            self.extremes[name] = value

    def take_score(self, name: str, score: float, ended: int | None) -> None:
        """Note ``val_loss`` or ``val_acc``, if it is finite, and the epoch that ended with it."""
        if not math.isfinite(score):
            return
        self.take_extreme(name, score)
        if ended is not None:
            kept = self.scores.setdefault(name, {})
            if ended in kept or len(kept) < MOST_EPOCHS:
                kept[ended] = score

    def take_device(self, name: str, text: str) -> None:
        """Note a device, or the number of processes, as a training itself tells it."""
        if self.finished or self.totals:
            self.later[name] = text
        else:
            self.fields.setdefault(name, text)


def without_commas(text: str) -> str:
    """The text with 1295.23 for 1,295.23."""
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text) if "," in text else text


def _take_bar(attempt: Attempt, bar: re.Match[str]) -> None:
    number, of, done, steps = bar.groups()
    # "Epoch 50/50" counts from 1, "Epoch 49" from 0.
    epoch, ended = int(number) - (of is not None), done == steps
    attempt.take_progress(epoch, int(steps), ended=ended)
    _take_scores(attempt, bar.string, epoch if ended else None)


def _take_last_bar(attempt: Attempt, bar: re.Match[str]) -> None:
    attempt.steps = int(bar[1])
    _take_scores(attempt, bar.string, None)


def _take_our_epoch(attempt: Attempt, line: re.Match[str]) -> None:
    epoch = int(line[1]) - (line[2] is not None)
    attempt.take_end_of_epoch(epoch)
    _take_scores(attempt, line.string, epoch)


def _take_our_device(attempt: Attempt, line: re.Match[str]) -> None:
    attempt.device, attempt.all_steps = line[1], int(line[2].replace(",", ""))


def _take_phases(attempt: Attempt, line: re.Match[str]) -> None:
    shares = {name: int(percent) for name, percent in _SHARE.findall(line.string)}
    seconds = _number(line[2])
    if seconds and sum(shares.values()):
        attempt.phases[int(line[1])] = (seconds / (1000 if line[3] else 1), shares)


def _take_scores(attempt: Attempt, line: str, ended: int | None) -> None:
    attempt.diverged |= _DIVERGED.search(line) is not None
    for name, text in SCORE.findall(line):
        if (value := _number(text)) is not None:
            attempt.take_score(name, value, ended)


def _take_date(attempt: Attempt, date: re.Match[str]) -> None:
    """Keep when it began. A zone other than that of this machine and UTC is not known."""
    if attempt.began is None and not attempt.totals and (parsed := parsedate_tz(date[0])):
        with contextlib.suppress(ValueError, OverflowError):
            attempt.began = float(mktime_tz(parsed))


def _take_fields(attempt: Attempt, line: re.Match[str]) -> bool:
    kept = False
    for piece in _FIELDS.split(line.string):
        if timed := _TIMED.match(piece):
            _take_time(attempt, timed[1].lower(), timed[3].strip(), timed[2])
            kept = True
            continue
        name, colon, value = piece.partition(":")
        if accumulated := colon and _ACCUMULATED.search(name):
            attempt.fields.setdefault("accumulated", accumulated[1])
            kept = True
        if colon:
            kept |= _take_field(attempt, _ASIDE.sub("", name).strip().lower(), value.strip())
    return kept


def _take_field(attempt: Attempt, name: str, value: str) -> bool:
    if name in _TIMES:
        _take_time(attempt, name, value)
    elif name in _PROCESSES:
        attempt.take_device("world_size", value)
    elif name in _BEST:
        number = _number(value)
        if number is not None and math.isfinite(number):
            attempt.take_extreme(_BEST[name], number)
        elif number is not None:
            attempt.diverged |= "loss" in name
    elif name == "best checkpoint":
        in_name = _IN_NAME.match(value.rpartition("/")[2])
        attempt.workload = in_name[1] if in_name else attempt.workload
    elif name in _ASKED or name.replace(" ", "_") in COMPARED:
        attempt.fields.setdefault(name, value)
    else:  # a line that differs only in its digits may have a kept field
        return name.replace(" ", "_").translate(AS_ZERO) in _ALIKE
    return True


def _take_time(attempt: Attempt, name: str, value: str, beside: str = "") -> None:
    # What is below 0 or not finite is refused with its run.
    seconds = _number(value) if _NO_TIME.match(value) else None
    if seconds is None and COUNT.search(value):
        seconds, rest = leading_seconds(value, beside)
        if name.startswith("total") and _RATE.match(rest):
            raise ValueError("a total training time is no rate")
    if seconds is not None:
        _TIMES[name](attempt, seconds)


def _take_total(attempt: Attempt, seconds: float) -> None:
    if len(attempt.totals) < MOST_RANKS:
        attempt.totals.append(seconds)
    else:
        attempt.totals[-1] = max(attempt.totals[-1], seconds)


_TIMES: dict[str, Callable[[Attempt, float], None]] = {
    "total training time": _take_total,
    "time per epoch": lambda attempt, seconds: attempt.take_extreme("per_epoch", seconds),
}
"""Fields with a time, and the function that keeps its seconds."""
_BEST = {"best validation loss": "best_loss", "best validation accuracy": "val_acc"}
_BEST |= {"val_loss": "val_loss", "val_acc": "val_acc"}
"""Fields with a score, and what it is among the extremes: the losses of epochs and that which a
rank printed as its best are two things."""
_LEAST = frozenset({"val_loss", "best_loss"})
"""Extremes of which the least counts; of the others, such as the seconds of an epoch by the slowest
rank, the greatest does."""


def _take_finished(attempt: Attempt, end: re.Match[str]) -> None:
    attempt.finished = True
    attempt.fields.setdefault(f"max {end[1]}", end[2])


def _take_restored(attempt: Attempt, restored: re.Match[str]) -> None:
    attempt.restored = True
    if attempt.restored_epoch is None and (name := _EPOCH_IN_NAME.match(restored[1])):
        attempt.restored_epoch = int(name[1]) + 1


def _take_accelerator(attempt: Attempt, kind: re.Match[str]) -> None:
    used = kind[2] not in ("False", "0")
    if kind[1] == "GPU":
        attempt.take_device("cuda available", str(used))
    elif used:
        attempt.take_device("gpu 0", kind[1])


_KindOfLine = tuple[
    Callable[[str], re.Match[str] | None], Callable[[Attempt, re.Match[str]], object]
]
"""A pattern of lines, and the function that keeps the content of one."""
_OF_LIGHTNING: tuple[_KindOfLine, ...] = (
    (FINISHED.search, _take_finished),
    (_RESTORED.search, _take_restored),
    (_MEMBER.search, lambda attempt, of: attempt.take_device("members", of[1] or of[2])),
    (_CUDA.search, lambda attempt, cuda: attempt.take_device("gpu 0", cuda[1])),
    (_ACCELERATOR.search, _take_accelerator),
)
"""Lines that Lightning itself prints, such as ``MEMBER: 1/4`` and ``max_epochs=5 reached``."""
_KINDS: tuple[_KindOfLine, ...] = (
    (_PROGRESS.match, _take_bar),
    (_RICH.match, _take_last_bar),
    (_OUR_EPOCH.match, _take_our_epoch),
    (_OURS.match, _take_our_device),
    (_STEP.match, _take_phases),
    # Gloo is for CPUs, where no line names a GPU.
    (_GLOO.match, lambda attempt, line: attempt.fields.setdefault("cuda available", "False")),
    (_DATE.search, _take_date),
    (_FIELD.match, _take_fields),
)
"""All other lines. The first kind that fits counts."""


def _number(text: str) -> float | None:
    """The number that a text begins with."""
    number = _NUMBER.match(without_commas(text))
    return float(number[0].replace(",", ".")) if number else None
