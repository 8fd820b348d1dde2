"""The knobs of jobs and ranks: SLURM, and the simulation of more devices."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..safe_text import has_login, names_key
from .knobs import Bytes, Knobs, Natural, Overwriting, Positive, flag, listed, many


def _said(kind: str, pattern: str) -> BeforeValidator:
    """A validator of text for a job script: it refuses what the pattern does not match."""

    def check(value: object) -> str:
        is_text = isinstance(value, str | int) and not isinstance(value, bool)
        if not is_text or not re.fullmatch(pattern, str(value), re.ASCII):
            raise ValueError(f"{value!r} is not {kind}")
        return str(value)

    return BeforeValidator(check)


def _duration(value: object) -> object:
    if isinstance(value, int):
        # YAML reads 1:00:00 as the number 3600, which SLURM would take for minutes.
        raise ValueError(f"write {value} in quotes, or YAML makes a number of hours and minutes")
    return value


_UNITS = {"days": 24 * 3600, "hours": 3600, "minutes": 60, "seconds": 1}


def _by_unit(time: str) -> dict[str, str]:
    """The numbers of a time of SLURM, the largest unit first: minutes, unless there are days or two
    colons.

    >>> _by_unit("30"), _by_unit("1-2")
    ({'minutes': '30'}, {'days': '1', 'hours': '2'})
    """
    days, dash, rest = time.rpartition("-")
    numbers = rest.split(":")
    units = list(_UNITS)[1 if dash or len(numbers) == 3 else 2 :]
    return ({"days": days} if dash else {}) | dict(zip(units, numbers, strict=False))


def _seconds(time: str) -> int:
    """The seconds of a time of SLURM.

    >>> _seconds("30"), _seconds("1:30"), _seconds("01:00:00"), _seconds("1-2"), _seconds("1-0:1")
    (1800, 90, 3600, 93600, 86460)
    """
    return sum(int(number) * _UNITS[unit] for unit, number in _by_unit(time).items())


def _in_range(time: str) -> str:
    """Refuse a time with a field that has more than fits, which SLURM would add up."""
    first, *others = _by_unit(time).items()
    for unit, number in others:
        if len(number) > 2 or int(number) >= (24 if unit == "hours" else 60):
            raise ValueError(f"{time!r} has {number} {unit} beside a larger unit")
    if len(first[1]) > 7:
        raise ValueError(f"{time!r} is longer than any job")
    return time


def _settings(value: object) -> object:
    """NAME=VALUE of each entry of a mapping in YAML."""
    if isinstance(value, Mapping):
        return tuple(f"{name}={text}" for name, text in value.items())
    return many(value)


def _variable(value: object) -> str:
    text = str(value)
    if not re.fullmatch(r"[A-Za-z_]\w*=[^\x00-\x1f\x7f]*", text, re.ASCII):
        raise ValueError(f"{text!r} is not NAME=VALUE in one line")
    name, _, value = text.partition("=")
    if names_key(name) or has_login(value):
        what = name if names_key(name) else f"the login in {name}"
        raise ValueError(
            f"{what} does not belong in a job script, which SLURM keeps; export {name} before "
            "submitting, and the job inherits it"
        )
    return text


def _counted(array: str) -> str:
    """An array as sbatch takes it: a bare number of elements, 64, becomes 1-64.

    >>> _counted("64"), _counted("64%8"), _counted("0-7"), _counted("3,5")
    ('1-64', '1-64%8', '0-7', '3,5')
    """
    number, percent, most = array.partition("%")
    if percent and int(most) == 0:
        raise ValueError(f"{array!r} lets no element run: a number of 1 or more stands after %")
    if not number.isdecimal():
        _check_elements(array, number.split(","))
        return array
    if int(number) == 0:
        raise ValueError(f"{array!r} has no elements; 0-0 has one, number 0")
    _check_elements(array, [number])
    return f"1-{number}{percent}{most}"


_LAST_ELEMENT = 4_000_000
"""The largest number of an element that any SLURM takes; a cluster may take fewer."""


def _check_elements(array: str, parts: Sequence[str]) -> None:
    """Refuse an array that sbatch refuses, or in which an element stands twice, which it drops."""
    elements: set[int] = set()
    for part in parts:
        first, last, step = _ends(part)
        if max(first, last) > _LAST_ELEMENT:
            raise ValueError(f"{array!r} goes beyond element {_LAST_ELEMENT:,}, SLURM's last")
        if step == 0 or last < first:
            raise ValueError(f"{array!r}: {part} counts no elements")
        numbers = range(first, last + 1, step)
        if not elements.isdisjoint(numbers):
            raise ValueError(f"{array!r} names element {min(elements & {*numbers})} twice")
        elements.update(numbers)


def array_ranges(array: str) -> list[range]:
    """The numbers of the elements of an array that `SlurmConfig` has taken.

    >>> array_ranges("1,4-6%2"), array_ranges("0-8:2")
    ([range(1, 2), range(4, 7)], [range(0, 9, 2)])
    """
    ends = map(_ends, array.partition("%")[0].split(","))
    return [range(first, last + 1, step) for first, last, step in ends]


def _ends(part: str) -> tuple[int, int, int]:
    """The first and the last element of a part of an array, such as ``0-8:2``, and the step."""
    first, last, step = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part).groups()  # type: ignore[union-attr]
    return int(first), int(last or first), int(step or 1)


# sbatch removes quotes by rules of its own: a backslash escapes even between single quotes.
_ONE_LINE = r"[^-\\\x00-\x1f\x7f][^\\\x00-\x1f\x7f]*"
_Line = Annotated[str, _said("text in one line without \\ and no dash first", _ONE_LINE)]
_Home = AfterValidator(os.path.expanduser)
"""Expands ~, as a shell does; YAML and sbatch do not."""
_OnePath = Annotated[
    str, _said("a path in one line without \\ and no dash first", _ONE_LINE), _Home
]
_Folder = Annotated[
    str,
    _said(
        "a folder in one line without \\ or % and no dash first",
        _ONE_LINE.replace(r"\x7f", r"\x7f%"),
    ),
    _Home,
]
_Name = Annotated[str, _said("a name of SLURM's (letters, digits, . _ + @ : -)", r"\w[\w.+@:-]*")]
_Gpus = Annotated[str, _said("a number of GPUs such as 4 or a100:4", r"(\w[\w.-]*:)?[1-9]\d*")]
_Memory = Annotated[str, _said("memory such as 125000 (MB) or 64G", r"[1-9]\d*[KMGT]?")]
_Time = Annotated[
    str,
    _said("a time such as 30 (minutes), 12:00:00 or 1-12:00:00", r"(\d+-)?\d+(:\d+){0,2}"),
    BeforeValidator(_duration),
    AfterValidator(_in_range),
]
_Features = Annotated[str, _said("a constraint such as gpu or a&b", r"[\w\[(][\w.&|*,()\[\]-]*")]
_RANGE = r"\d{1,10}(-\d{1,10}(:\d{1,10})?)?"
_Array = Annotated[
    str,
    _said("an array such as 64, 0-7 or 1,4,8%2", rf"{_RANGE}(,{_RANGE})*(%\d{{1,10}})?"),
    AfterValidator(_counted),
]
_AFTER = r"[a-z]+(:\d[\w+]*)*"
_After = Annotated[str, _said("a dependency such as afterok:123", rf"{_AFTER}([,?]{_AFTER})*")]
_Module = Annotated[str, _said("a module such as cuda/12.6", r"\w[\w.+/@-]*")]
_Variable = Annotated[str, BeforeValidator(_variable)]


class SlurmConfig(Knobs):
    """The resources of a job, by sbatch's names for them."""

    job_name: _Line = flag("penstock", help="name of the job; a study appends the devices")
    nodes: Positive = flag(1, help="nodes")
    ntasks_per_node: Positive | None = flag(
        None, help="ranks on a node (default: one for each of its GPUs, or one)"
    )
    gpus_per_node: _Gpus | None = flag(None, help="GPUs of a node, of any type or of one: a100:4")
    cpus_per_task: Positive | None = flag(None, help="cores of each rank")
    mem: _Memory | None = flag(None, help="memory of a node, in MB or with a unit: 125000, 64G")
    time: _Time | None = flag(None, help="most time: 30 (minutes), 12:00:00 or 1-12:00:00")
    partition: _Name | None = flag(None, help="partition")
    account: _Name | None = flag(None, help="account")
    qos: _Name | None = flag(None, help="quality of service", group="queue")
    constraint: _Features | None = flag(
        None, help="features that the nodes must have", group="queue"
    )
    exclusive: bool = flag(False, help="share nodes with no other job", group="queue")
    array: _Array | None = flag(
        None,
        help="submit the job so many times: 64, 0-7, 1,4,8, or 64%4, at most 4 at a time; "
        "infer is cut into so many parts",
    )
    dependency: _After | None = flag(
        None, help="begin after other jobs: afterok:123, afterany:123:124, singleton", group="queue"
    )
    requeue: bool = flag(
        True,
        help="begin again after a preemption or a lost node, and go on; also go back into the "
        "queue before the time is up (default: only for commands of Penstock)",
        group="restarts",
    )
    max_requeues: Natural = flag(
        10,
        help="restarts after which a verb other than train no longer goes back into the queue by "
        "itself",
        group="restarts",
    )
    signal: Natural = flag(
        120,
        help="seconds before its end at which the job gets the signal to save; 0: no signal "
        "(default: 120; 0 for a command that is not Penstock's)",
        unit="seconds",
        group="restarts",
    )
    modules: Annotated[tuple[_Module, ...], BeforeValidator(many)] = flag(
        (),
        help="environment modules to load after a purge (default: none)",
        group="environment of the job",
    )
    venv: _OnePath | None = flag(
        None, help="virtual environment to activate", group="environment of the job"
    )
    env: Annotated[tuple[_Variable, ...], BeforeValidator(_settings)] = flag(
        (),
        help="variables to set, NAME=VALUE; a second --env adds to the first (default: none beside "
        "those of the shell)",
        group="environment of the job",
    )
    folder: _Folder = flag(
        "outputs", help="folder of logs, runs and the list of jobs", group="logs"
    )
    output: _OnePath | None = flag(
        None,
        help="file of the job's output (default: FOLDER/slurm-%j.out, for an array "
        "FOLDER/slurm-%A_%a.out)",
        group="logs",
    )
    error: _OnePath | None = flag(
        None, help="file of its errors (default: that of its output)", group="logs"
    )

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return int(self.gpus_per_node.rpartition(":")[2]) if self.gpus_per_node else 0

    @property
    def tasks(self) -> int:
        """Ranks of a node."""
        return self.ntasks_per_node or self.gpus or 1

    @property
    def parts(self) -> int | None:
        """Number of elements of an array that counts from 1; None for any other array, and without
        one."""
        counted = re.fullmatch(r"1-(\d+)(%\d+)?", self.array or "")
        return int(counted[1]) if counted else None

    @property
    def on_one_node(self) -> bool:
        """Whether neither ranks nor GPUs of a node are given. A study then asks for one node with
        all ranks."""
        return self.ntasks_per_node is None and not self.gpus

    @model_validator(mode="after")
    def _goes_together(self) -> SlurmConfig:
        if self.gpus and self.tasks != self.gpus:
            raise ValueError(
                f"a rank uses one GPU: --ntasks-per-node {self.tasks} does not go with "
                f"--gpus-per-node {self.gpus_per_node}"
            )
        for name in ("output", "error"):
            self._check_pattern(name)
        # SLURM may send the signal a minute early.
        least = self.signal + 60 if self.signal else 0
        if self.time is not None and 0 < _seconds(self.time) <= least:
            raise ValueError(
                f"--signal {self.signal}: a job of --time {self.time} would be told to save, and "
                "go back into the queue, as it begins"
            )
        return self

    def _check_pattern(self, name: str) -> None:
        """Refuse a log whose name lacks the number of its job, or of its element of an array."""
        pattern = getattr(self, name) or ""
        allowed = {"A", "a"} if self.array else {"j"}
        asked = set(re.findall(r"%(.?)", pattern))
        if asked - allowed or (self.array and pattern and "a" not in asked):
            numbers = "%A and %a, the numbers of an array and its element" if self.array else "%j"
            raise ValueError(f"--{name} {pattern}: a job's log is found by {numbers}, and no other")


class ScalingConfig(Overwriting):
    """The knobs of ``penstock scaling``, except those of its simulation."""

    output: Path | None = flag(None, help="write scaling.md, CSVs and figures into this folder")
    csv: bool = flag(False, help="print CSV in place of tables")
    metrics: bool = flag(
        False,
        help="print only the total time, best validation loss and GPU-Util of each file",
    )
    machine: str | None = flag(None, help="name of the machine (default: its GPU)")
    anyway: bool = flag(False, help="also compare runs with different settings or work")

    @model_validator(mode="after")
    def _one_table(self) -> ScalingConfig:
        if self.metrics and (more := self.model_fields_set - {"metrics", "overwrite"}):
            raise ValueError(
                f"--metrics prints one table and no more; --{min(more)} does not go with it"
            )
        return self


class SimulateConfig(Knobs):
    """The knobs of ``penstock scaling simulate``."""

    devices: Annotated[tuple[Positive, ...], BeforeValidator(listed), Field(min_length=1)] = flag(
        (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), help="numbers of devices: 8 16, or 8,16"
    )
    gpus_per_node: Positive = flag(4, help="devices of a node")
    inside: Annotated[Bytes, Field(gt=0)] = flag(
        300 * 10**9,
        help="bytes a second and device within a node (default: 300GB, as NVLink 3)",
        unit="bytes a second",
    )
    between: Annotated[Bytes, Field(gt=0)] = flag(
        25 * 10**9,
        help="bytes a second and node between nodes (default: 25GB, as HDR200)",
        unit="bytes a second",
    )
    overlap: Annotated[float, Field(ge=0, le=1)] = flag(
        0.5, help="share of the summing that may run during the backward pass", unit="share"
    )
