"""Jobs of SLURM: submitted, and listed in a folder.

Step ──slurm_script()──▶ text ──submit_steps()──▶ sbatch ──▶ number ──▶ FOLDER/study.json
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ..base import (
    PenstockError,
    SlurmConfig,
    UsageError,
    check_ends,
    check_folder,
    check_local,
    lock_file,
    write_json,
)
from .batch_script import log_of, slurm_script
from .slurm_steps import Command, Kind, Step

STUDY_FILE = "study.json"
TARGETS = f"a folder that jobs were submitted from, its {STUDY_FILE}, or numbers of jobs"
"""The jobs that a command may look at, in words."""
SAY_WITHIN_S = 60.0
"""Most seconds that a command of SLURM may take. A busy controller answers late."""


class SlurmJob(BaseModel):
    """A job as it was submitted. Relative paths start from the folder of the study."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    ranks: int
    nodes: int
    command: tuple[str, ...]
    kind: Kind = "ranks"
    array: str | None = None
    """Its elements, as sbatch takes them; None if it is no array."""
    waits_for: str | None = None
    """The job that it waits for in a chain, such as ``afterok:12``."""


def read_study(path: Path) -> list[SlurmJob]:
    """The jobs that were submitted from one folder, from the folder or its file.

    Raises `UsageError` if the file cannot be read.
    """
    path = path / STUDY_FILE if path.is_dir() else path
    check_ends(path, str(path))
    try:
        return TypeAdapter(list[SlurmJob]).validate_json(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give {TARGETS}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not a list of jobs that penstock slurm submit wrote"
        ) from error


def slurm_scripts(steps: Sequence[Step], python: str) -> list[str]:
    """The scripts of a submission. Numbers of earlier jobs are not known yet: JOB_1, JOB_2 ...

    Args:
        steps: The jobs, in order.
        python: The interpreter to use if a job activates no environment.

    Returns:
        A text for sbatch for each.
    """
    return [
        slurm_script(step.config, step.command, python, step.after and f"{step.after}:JOB_{number}")
        for number, step in enumerate(steps)
    ]


def submit_steps(steps: Sequence[Step], python: str) -> Iterator[SlurmJob]:
    """Submit jobs one after the other, and add each to the list in its folder.

    Args:
        steps: The jobs, in order.
        python: The interpreter to use if a job activates no environment.

    Yields:
        Each job, with its number.

    Raises:
        UsageError: SLURM is not installed or refuses a job, or the folder cannot be used. If one
            job of a chain is refused, the whole chain is cancelled.
    """
    chain: list[str] = []
    for step in steps:
        waits_for = step.after and f"{step.after}:{chain[-1]}"
        try:
            job = submit_job(step.config, step.command, python, waits_for)
        except PenstockError as error:
            if waits_for:
                refused = ask_slurm(["scancel", *reversed(chain)]).returncode
                fate = "must be cancelled by hand" if refused else "are cancelled again"
                error.args = (f"{error}; the jobs before it ({', '.join(chain)}) {fate}",)
            raise
        chain.append(job.id)
        yield job


def check_places(config: SlurmConfig) -> None:
    """Check the folder of a job and those of its logs. Nothing is created.

    Raises:
        UsageError: A folder cannot be written to, or lies inside an array.
    """
    check_folder(Path(config.folder), "--folder")
    for flag, path in (("--output", config.output), ("--error", config.error)):
        if path is not None:  # % stands for a number that is not known yet
            check_local(Path(path), flag)
            check_folder(Path(f"{path.partition('%')[0]}_").parent, flag)


def submit_job(
    config: SlurmConfig, command: Command, python: str, waits_for: str | None = None
) -> SlurmJob:
    """Submit one job and add it to the list in its folder. See `submit_steps`."""
    _need("sbatch")
    text = slurm_script(config, command, python, waits_for)
    folder = Path(config.folder)
    # SLURM creates no folders, and would lose the logs.
    for place in (folder, *(Path(log).parent for log in (log_of(config), config.error) if log)):
        if "%" not in str(place):
            place.mkdir(parents=True, exist_ok=True)
    if (folder / STUDY_FILE).exists():
        read_study(folder)  # refuse before the job is submitted
    ended = ask_slurm(["sbatch", "--parsable"], text)
    number = ended.stdout.strip().partition(";")[0]
    if ended.returncode or not re.fullmatch(r"\d+", number):
        raise UsageError(f"SLURM refused the job {config.job_name}: {complaint_of(ended)}")
    job = SlurmJob(
        id=number,
        name=config.job_name,
        ranks=config.nodes * config.tasks if command.kind == "ranks" else 1,
        nodes=config.nodes,
        command=command.words,
        kind=command.kind,
        array=config.array,
        waits_for=waits_for,
    )
    # Other processes may add a job to the list at the same time.
    with (folder / f".{STUDY_FILE}.lock").open("a") as lock:
        lock_file(lock, wait=True)
        jobs = read_study(folder) if (folder / STUDY_FILE).exists() else []
        write_json(folder / STUDY_FILE, [each.model_dump() for each in (*jobs, job)])
    return job


def ask_slurm(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands.

    Args:
        command: The command and its arguments.
        text: Its standard input.

    Returns:
        The ended command, with its exit code, output and errors.

    Raises:
        UsageError: The command is not on PATH.
        PenstockError: The command did not answer in time.
    """
    _need(command[0])
    # sbatch would pass these on, and the new job believe that it is an element, or a restart.
    ours = re.compile("SLURM_ARRAY_|SLURM_RESTART_COUNT$")
    inherited = {name: text for name, text in os.environ.items() if not ours.match(name)}
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            stdin=subprocess.DEVNULL if text is None else None,
            # 0 means no limit: the row of an array then names all waiting elements.
            env={**inherited, "SLURM_BITSTR_LEN": "0"},
            timeout=SAY_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PenstockError(f"{command[0]} did not answer within {SAY_WITHIN_S:g} s") from error


def requeue_job(job: str, became: str) -> None:
    """Put the job in which this process runs back into the queue.

    Args:
        job: Its number.
        became: What it has done, such as ``has saved``.

    Raises:
        PenstockError: SLURM refused.
    """
    # Printed before SLURM is asked, because SLURM ends the job at once.
    sys.stderr.write(f"penstock launch: job {job} {became} and goes back into the queue\n")
    sys.stderr.flush()
    ended = ask_slurm(["scontrol", "requeue", job])
    if ended.returncode:
        raise PenstockError(f"job {job} {became} and was not requeued: {complaint_of(ended)}")


def _need(name: str) -> None:
    if shutil.which(name) is None:
        hint = "; --dry-run prints the script" if name == "sbatch" else ""
        raise UsageError(f"SLURM's {name} is not on PATH{hint}")


def complaint_of(ended: subprocess.CompletedProcess[str]) -> str:
    """The error that a command printed, without the name of the command."""
    text = (ended.stderr or ended.stdout).strip()
    error = re.search(r".*error: (.*)", text) or re.search(r"(.*)$", text)
    return (error[1].strip() if error else "") or f"exit code {ended.returncode}"
