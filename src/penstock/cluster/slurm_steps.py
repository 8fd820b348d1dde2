"""The command of a job, and the jobs of one submission, which wait for each other.

infer, --array 64    ──▶    prepare ─▶ twice 64 shares of statistics ─▶ 64 parts ─▶ finish
label, --array 64    ──▶    prepare ─▶ for each round 64 parts ─▶ finish
anything else        ──▶    one job, or one array

The statistics are percentiles of the whole volume, if they are asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..base import SlurmConfig, UsageError

ELEMENT = "%a"
"""Placeholder for the number of an array's element, as in ``--part %a/64``."""
STEPS = frozenset(("--prepare", "--statistics", "--part", "--finish"))
"""Flags of infer and label, each of which does one step of a job that several processes share."""
ROUNDS = 2
"""Passes over values of more than 16 bits for exact percentiles. Values of up to 16 bits need one
pass; the second then has nothing to do."""

CUT = ("infer", "label")
"""The verbs whose work an array shares."""

Kind = Literal["ranks", "verb", "program"]


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a job."""

    words: tuple[str, ...]
    """The words of the command. Those of ``ranks`` and ``verb`` do not begin with ``penstock``."""
    kind: Kind = "ranks"
    """``ranks``: a training on all tasks of the job. ``verb``: a verb of Penstock in one process.
    ``program``: any other program."""
    output_dir: str | None = None
    """The folder of a training; %j may stand for the number of its job."""
    resumes: bool = False
    """True if the verb takes ``--resume``, with which a restarted job continues."""
    goes_on: bool = False
    """True if the verb continues where an earlier start of its job ended, so that the job may go
    back into the queue."""
    counts: bool = False
    """True for an infer with percentiles of the whole volume, which an array counts first."""
    rounds: int = 0
    """The rounds of a label, in each of which every block is done once."""


@dataclass(frozen=True, slots=True)
class Step:
    """One job of a submission."""

    config: SlurmConfig
    command: Command
    after: Literal["afterok", "afterany"] | None = None
    """Condition on the step before it, such as ``afterok``; None if it does not wait."""


def is_share(word: str) -> bool:
    """Whether a word is an element's share of a job, such as ``%a/64``."""
    return re.fullmatch(rf"{ELEMENT}/\d+", word) is not None


def check_command(config: SlurmConfig, command: Command) -> None:
    """Refuse a job whose resources its command cannot use.

    Args:
        config: The resources.
        command: What is to run.

    Raises:
        UsageError: A verb of one process is given several nodes, or an element's number without an
            array.
    """
    if command.kind != "verb":
        return
    if config.array is None and (numbered := [w for w in command.words if is_share(w)]):
        raise UsageError(
            f"{numbered[0]}: {ELEMENT} is the number of an array's element; give --array, such as "
            "--array 3,7"
        )
    if config.nodes > 1:
        apart = "; --array N cuts it into N jobs" if command.words[0] in CUT else ""
        raise UsageError(
            f"--nodes {config.nodes}: penstock {command.words[0]} runs on one node{apart}"
        )


def steps_of(config: SlurmConfig, command: Command) -> list[Step]:
    """The jobs of a submission, in order.

    Args:
        config: The resources.
        command: What is to run.

    Returns:
        A single job or array, or the steps of an infer or label that an array cuts into parts.

    Raises:
        UsageError: The array cannot number the parts.
    """
    check_command(config, command)
    verb = command.words[0]
    is_cut = config.array is not None and command.kind == "verb" and verb in CUT
    if not is_cut or STEPS & {word.partition("=")[0] for word in command.words}:
        return [Step(config, command)]
    if numbered := [word for word in command.words if "%j" in word]:
        raise UsageError(f"{numbered[0]}: the parts of {verb} are several jobs, so do not use %j")
    if config.parts is None:
        raise UsageError(
            f"--array {config.array}: the parts of {verb} are counted from 1; --array 64 makes 64, "
            f"and -- {verb} ... --part {ELEMENT}/64 does some of them again"
        )
    share, elements = f"{ELEMENT}/{config.parts}", str(config.parts)
    counting = SlurmConfig.model_validate(_on_one_gpu(config))
    counted = Step(_named(counting, "statistics"), _with(command, "--statistics", share), "afterok")
    parts = Step(_named(config, "parts"), _with(command, "--part", share), "afterok")
    finish = Step(_alone(config, "finish"), _with(command, "--finish"), "afterany")
    return [
        Step(_alone(config, "prepare"), _with(command, "--prepare", "--workers", elements)),
        *[counted] * (ROUNDS if command.counts else 0),
        *[parts, finish] * (command.rounds or 1),
    ]


def _with(command: Command, *words: str) -> Command:
    # Later steps join the run that --prepare began, without being asked to resume it.
    return replace(command, words=(*command.words, *words), resumes=words[0] == "--prepare")


def _named(config: SlurmConfig, step: str) -> SlurmConfig:
    return config.model_copy(update={"job_name": f"{config.job_name}-{step}"})


def _alone(config: SlurmConfig, step: str) -> SlurmConfig:
    """The resources of a step before or after the array."""
    logs: dict[str, Any] = {
        name: path.replace("%A", "%j").replace("%a", step)
        for name in ("output", "error")
        if (path := getattr(config, name)) is not None
    }
    changes = {**_on_one_gpu(config), **logs, "array": None}
    return _named(SlurmConfig.model_validate(changes), step)


def _on_one_gpu(config: SlurmConfig) -> dict[str, Any]:
    """The settings of a step that computes no blocks: those of an element, but with a single GPU.

    It plans the job, and the plan depends on the kind of device, on the memory, and, for a CPU, on
    the cores.
    """
    changes = config.model_dump(exclude_unset=True)
    if config.gpus > 1:
        changes["gpus_per_node"] = re.sub(r"\d+$", "1", str(config.gpus_per_node))
    return changes
