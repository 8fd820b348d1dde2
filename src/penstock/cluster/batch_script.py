"""The script of a SLURM job: the resources that it asks for, and the command that it runs.

The script of a training ends with ``exec penstock launch slurm``, which starts the ranks, receives
SLURM's signals and resumes after a restart; see `cli.launch`. Another verb that can resume runs
under that launcher, too. Any other command is executed directly, and gets SIGTERM before its time
is up. The user's words are quoted for the shell. No value may hold a newline, after which sbatch
could read directives, or a login, because SLURM keeps scripts.

Settings of jobs have names, too: YAML files that Penstock ships, and those of the user.

    --preset raven          the shipped file of that name
    --preset ./mine.yaml    that file
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base import SlurmConfig, UsageError, at_home, check_file, has_login, plural, read_yaml, scrub
from .slurm_steps import ELEMENT, Command, is_share

SHIPPED = Path(__file__).parent / "presets"


def shipped_presets() -> list[str]:
    """The names of the presets that Penstock ships."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def slurm_preset(name: str) -> Mapping[str, Any]:
    """The settings of a preset.

    Args:
        name: A name, or the path of a YAML file: it ends in .yaml or .yml, or holds a slash.

    Returns:
        Settings of `SlurmConfig` by name, each checked by itself.

    Raises:
        UsageError: There is no such preset, or a setting in it is wrong.
    """
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    if not is_path and name not in (names := shipped_presets()):
        raise UsageError(
            f"--preset {name!r}: no such preset; there are {', '.join(names)}, and any YAML file "
            "by its path, such as ./mine.yaml"
        )
    path = at_home(name) if is_path else SHIPPED / f"{name}.yaml"
    return read_settings(path, "--preset")


def read_settings(path: Path, flag: str) -> dict[str, Any]:
    """Read settings of jobs from a YAML file.

    Args:
        path: The file.
        flag: The flag that names it.

    Returns:
        Settings of `SlurmConfig` by name, each checked by itself.

    Raises:
        UsageError: The file cannot be read, or a setting is wrong.
    """
    settings = read_yaml(path, flag)
    check_file(SlurmConfig, settings, f"{flag} {path}")
    return settings


def slurm_script(
    config: SlurmConfig, command: Command, python: str, waits_for: str | None = None
) -> str:
    """The batch script of a job.

    Args:
        config: Resources, modules and environment of the job.
        command: What it runs.
        python: The interpreter to use if the job activates no environment.
        waits_for: The job that it waits for in a chain, such as ``afterok:12``; None to use the
            ``dependency`` of ``config``.

    Returns:
        The text for sbatch.

    Raises:
        UsageError: A word holds a control character or a login.
    """
    _check_words(command.words)
    variables = (variable.partition("=") for variable in config.env)
    environment: list[str] = []
    if config.modules:
        environment += ["module purge", f"module load {shlex.join(config.modules)}"]
    if config.venv is not None:
        environment.append(f"source {shlex.quote(f'{config.venv}/bin/activate')}")
        python = "python"
    lines = [
        "#!/bin/bash -l" if config.modules else "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _resources(config, command, waits_for)),
        "",
        "set -e",
        *environment,
        *(f"export {name}={shlex.quote(value)}" for name, _, value in variables),
        # exec, so that SLURM's signals to the script reach the command.
        f"exec {_command(config, command, python)}",
    ]
    return "\n".join(lines) + "\n"


def _command(config: SlurmConfig, command: Command, python: str) -> str:
    """The command of a job, quoted for the shell."""
    if command.kind == "program":
        return shlex.join(command.words)
    if command.kind == "ranks":
        launch = [python, "-m", "penstock", "launch", "slurm", *["--requeue"] * config.requeue]
        return shlex.join([*launch, "--", *command.words])
    penstock = [python, "-u", "-m", "penstock"]
    if _goes_back(config, command):
        often = str(config.max_requeues)
        penstock += ["launch", "slurm", "--requeue", "--max-requeues", often, "--"]
    words = [_numbered(word, is_element=config.array is not None) for word in command.words]
    if command.resumes:
        words.append("${SLURM_RESTART_COUNT:+--resume}")
    return " ".join([shlex.join(penstock), *words])


def _goes_back(config: SlurmConfig, command: Command) -> bool:
    """Whether a verb puts its job back into the queue before its time is up."""
    return command.goes_on and config.requeue and config.max_requeues > 0


def _numbered(word: str, is_element: bool) -> str:
    """A word for the shell, with variables for the job's number (%j) and an element's
    (``%a/64``)."""
    if is_element and is_share(word):
        return f'"${{SLURM_ARRAY_TASK_ID}}{word.removeprefix(ELEMENT)}"'
    job = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if is_element else "${SLURM_JOB_ID}"
    return f'"{job}"'.join(shlex.quote(text) if text else "" for text in word.split("%j")) or "''"


def log_of(config: SlurmConfig) -> str:
    """The pattern of the path of a job's output, for sbatch."""
    return config.output or f"{config.folder}/slurm-{'%A_%a' if config.array else '%j'}.out"


def with_job_number(pattern: str, job: str) -> str:
    """A path with the number of a job in the place of %j, or of %A and %a.

    Args:
        pattern: The path as it was given to sbatch.
        job: ``12``, or ``12_3`` for one job of an array, which is ``%A_%a``.

    Returns:
        The path of that job.

    >>> with_job_number("runs/%j", "12"), with_job_number("slurm-%A_%a.out", "12_3")
    ('runs/12', 'slurm-12_3.out')
    >>> with_job_number("%j", "12_3")
    '12_3'
    """
    array, _, task = job.partition("_")
    return pattern.replace("%A", array).replace("%a", task).replace("%j", job)


def _check_words(words: Iterable[str]) -> None:
    for word in words:
        if re.search(r"[\x00-\x1f\x7f]", word):
            raise UsageError(f"{word!r} holds a control character, which a job script must not")
        if has_login(word):
            raise UsageError(
                f"{scrub(word)} was given with a login, which does not belong in a job script: "
                "SLURM keeps that, and others may read it"
            )


def _resources(config: SlurmConfig, command: Command, waits_for: str | None) -> Iterator[str]:
    """The options of sbatch that are set. An option with the value True has no argument."""
    gpus, before = config.gpus_per_node, config.signal
    signal = "USR1" if command.kind == "ranks" or _goes_back(config, command) else "TERM"
    options = {
        "job-name": config.job_name,
        "nodes": config.nodes,
        "ntasks-per-node": config.tasks,
        "cpus-per-task": config.cpus_per_task,
        "mem": config.mem,
        "time": config.time,
        "constraint": config.constraint,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "gres": None if gpus is None else f"gpu:{gpus}",
        "array": config.array,
        "dependency": waits_for or config.dependency,
        # Otherwise a job would wait for ever for a step that has failed.
        "kill-on-invalid-dep": "yes" if waits_for else None,
        "exclusive": config.exclusive or None,
        "output": log_of(config),
        "error": config.error,
        "open-mode": "append",  # keep the output from before a restart
        "requeue" if config.requeue else "no-requeue": True,
        # B, for the script: without it SLURM signals only the steps that a job starts by srun.
        "signal": f"B:{signal}@{before}" if before else None,
    }
    for name, value in options.items():
        if value is not None:
            yield f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def parse_sizes(text: str) -> list[int]:
    """The numbers of ranks in a text such as ``1,4,8``.

    Raises:
        UsageError: The text is no such list.
    """
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text, re.ASCII):
        raise UsageError(f"--study {text!r} is not a list of numbers of devices such as 1,4,8")
    return [int(number) for number in text.split(",")]


def with_ranks(config: SlurmConfig, ranks: int) -> SlurmConfig:
    """The same job with another number of ranks: on part of a node, or on whole nodes.

    A node takes as many ranks as it has GPUs, or as ``config`` says. A job on part of a node asks
    for that share of the node's memory.

    Args:
        config: The job on one full node.
        ranks: The number of ranks.

    Returns:
        The settings of the job.

    Raises:
        UsageError: The ranks do not fill whole nodes.
    """
    full = ranks if config.on_one_node else config.tasks
    nodes = -(-ranks // full)
    if ranks > full and ranks % full:
        raise UsageError(
            f"--study {ranks}: {ranks} ranks do not fill {plural(nodes, 'node')} of {full} each; "
            f"take a multiple of {full}"
        )
    tasks = min(ranks, full)
    changes: dict[str, Any] = {
        "job_name": f"{config.job_name}-{ranks}",
        "nodes": nodes,
        "ntasks_per_node": tasks,
    }
    if config.gpus_per_node is not None:
        changes["gpus_per_node"] = re.sub(r"\d+$", str(tasks), config.gpus_per_node)
    if config.mem is not None and tasks < full:
        whole = int(config.mem.rstrip("KMGT"))
        changes["mem"] = config.mem.replace(str(whole), str(-(-whole * tasks // full)))
    return SlurmConfig.model_validate({**config.model_dump(exclude_unset=True), **changes})
