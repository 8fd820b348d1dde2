"""A training as a step of a SLURM job: started, stopped before the time limit, and requeued."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from ..base import (
    ARGS,
    CHECKPOINTS,
    Incomplete,
    PenstockError,
    TrainConfig,
    UsageError,
    death_signal,
    read_json,
)
from ..cluster import find_place, job_of, own_job, requeue_job, restarts_of, with_job_number

WAIT_S = 60
"""The seconds that the other ranks may run after one has ended: they may have to write results."""


def time_of_last_checkpoint(out: Path) -> int | None:
    """The time of a run's last checkpoint in nanoseconds, None if there is none."""
    try:
        return (out / CHECKPOINTS / "last.pt").stat().st_mtime_ns
    except OSError:
        return None


def run_in_step(
    words: Sequence[str], config: TrainConfig, environ: Mapping[str, str], *, requeue: bool
) -> int:
    """Run a training on all tasks of this SLURM job by srun.

    Args:
        words: The command after ``penstock``, such as ``train spiral ...``.
        config: The settings of the training.
        environ: Variables of the environment, those of the job among them.
        requeue: Put the job back into the queue after SLURM's signal stopped it.

    Returns:
        The exit code.

    Raises:
        UsageError: This process is in no job, or is a rank already; or the folder is another job's.
        PenstockError: The job could not be requeued, or makes no progress between requeues.
    """
    job = own_job(environ)
    if (place := find_place(environ)).world_size > 1:
        raise UsageError(
            f"launch slurm starts the ranks, and this is rank {place.rank} of "
            f"{place.world_size} already: leave out srun"
        )
    out = _folder(config, environ)
    command = [*srun(environ), sys.executable, "-m", "penstock", *words, *added(config, environ)]
    settings = {"OMP_NUM_THREADS": environ.get("SLURM_CPUS_PER_TASK", "1"), "PYTHONUNBUFFERED": "1"}
    before = time_of_last_checkpoint(out)
    code, was_asked = _supervise(command, {**settings, **environ})
    # At the end of a step, or before the handler of the signal, which Windows lacks, was set.
    if was_asked and requeue and code in (Incomplete.exit_code, 128 + signal.SIGUSR1):
        saved = time_of_last_checkpoint(out) not in (None, before)
        became = "has saved" if saved else "was stopped before it had saved anything new"
        if not saved and restarts_of(environ):
            raise PenstockError(
                f"job {job} {became}, though it was started again: it is not put back into the "
                "queue, or that might go on for ever; give it more --time"
            )
        requeue_job(job, became)
    return code


def srun(environ: Mapping[str, str]) -> list[str]:
    """The command srun with its options. It takes the nodes and tasks from the job's variables."""
    flags = ["srun", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={WAIT_S}"]
    if "SLURM_CPUS_PER_TASK" in environ:  # since 22.05 srun does not take it from the job
        flags.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    return flags


def added(config: TrainConfig, environ: Mapping[str, str]) -> list[str]:
    """The arguments that a job adds to the command: its folder, and how a restarted job resumes."""
    out = _folder(config, environ)
    words = ["--distributed"]
    if out != config.output_dir:
        words += ["--output-dir", str(out)]
    if restarts_of(environ):
        words += _again(config, out, job_of(environ))
    return words


def _folder(config: TrainConfig, environ: Mapping[str, str]) -> Path:
    """The folder of the run, with the number of its job."""
    return Path(with_job_number(str(config.output_dir), job_of(environ)))


def _again(config: TrainConfig, out: Path, job: str) -> list[str]:
    """The arguments with which a restarted job resumes the run in its folder, if that is its own
    run."""
    asked = None
    with contextlib.suppress(UsageError):  # there is none, or it is not whole
        asked = read_json(out / ARGS)
    launch = asked.get("launch") if isinstance(asked, dict) else None
    owner = launch.get("job_id") if isinstance(launch, dict) else None
    if owner == job:
        # A run that was killed before its first checkpoint begins again.
        saved = time_of_last_checkpoint(out) is not None
        return ["--resume", "--no-overwrite"] if saved else ["--no-resume", "--overwrite"]
    if asked is not None and not (config.resume or config.overwrite):
        raise UsageError(
            f"--output-dir {out} holds a run of {f'job {owner}' if owner else 'no job'}, and job "
            f"{job} had not begun its own when it was restarted: say --resume or --overwrite, or "
            "put %j, the number of a job, into --output-dir"
        )
    return []  # the run begins as the user asked


def _supervise(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, bool]:
    """Run srun. Returns its exit code, and whether SLURM sent SIGUSR1, the signal to save.

    Afterwards this process and the commands that it starts ignore both signals: after `scontrol
    requeue` SLURM sends SIGTERM to all processes of the job, scontrol among them.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(signal.SIGUSR1)  # srun passes this one on, and ends at others

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, pass_on)
    try:
        process = subprocess.Popen(
            command, env=dict(environ), preexec_fn=death_signal(signal.SIGTERM)
        )
        # It may have come before there was a process to tell.
        if received:
            process.send_signal(signal.SIGUSR1)
        code = process.wait()
    except FileNotFoundError as error:
        raise UsageError("SLURM's srun is not on PATH") from error
    finally:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return (code if code >= 0 else 128 - code), signal.SIGUSR1 in received
