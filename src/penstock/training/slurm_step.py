"""A training as a step of a SLURM job: started, stopped in time and requeued."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ..base import (
    ARGS,
    Incomplete,
    PenstockError,
    TrainConfig,
    UsageError,
    death_signal,
    write_json,
)
from ..cluster import ask_slurm, complaint_of, find_place, job_of, with_job_number

WAIT_S = 60
"""When one rank has ended, the others have so long. They may have to write what became of it."""
REQUEUED = "requeued.json"
"""In the folder of a run: the last life that was put back into the queue with nothing saved."""


def time_of_last_checkpoint(out: Path) -> int | None:
    """When a run's last checkpoint was written, in nanoseconds; None where there is none."""
    try:
        return (out / "checkpoints" / "last.pt").stat().st_mtime_ns
    except OSError:
        return None


def run_in_step(
    words: Sequence[str], config: TrainConfig, environ: Mapping[str, str], *, requeue: bool
) -> int:
    if "SLURM_JOB_ID" not in environ:
        raise UsageError(
            "launch slurm runs inside a job, and SLURM_JOB_ID is not set; penstock slurm submit "
            "makes a job, salloc an interactive one"
        )
    if (place := find_place(environ)).world_size > 1:
        raise UsageError(
            f"launch slurm starts the ranks, and this is rank {place.rank} of "
            f"{place.world_size} already: leave out srun"
        )
    job, out = job_of(environ), _folder(config, environ)
    command = [*srun(environ), sys.executable, "-m", "penstock", *words, *added(config, environ)]
    settings = {"OMP_NUM_THREADS": environ.get("SLURM_CPUS_PER_TASK", "1"), "PYTHONUNBUFFERED": "1"}
    before = time_of_last_checkpoint(out)
    code, was_told = _supervise(command, {**settings, **environ})
    if was_told and requeue and _was_stopped(code):
        _requeue(job, out, saved=time_of_last_checkpoint(out) not in (None, before))
    return code


def _requeue(job: str, out: Path, *, saved: bool) -> None:
    """Put a job back into the queue, unless the life before it got no further either."""
    became = "has saved" if saved else "was stopped before it had saved anything new"
    if not saved:
        now = {"job_id": job, "checkpoint": time_of_last_checkpoint(out)}
        if _read(out / REQUEUED) == now:
            raise PenstockError(
                f"job {job} {became}, as in an earlier life: it is not put back into the queue, or "
                "that might go on for ever; give it more --time"
            )
        try:
            write_json(out / REQUEUED, now)
        except OSError as error:
            raise PenstockError(
                f"job {job} {became} and is not put back into the queue: {out / REQUEUED} cannot "
                f"be written: {error.strerror}"
            ) from error
    # Said before it is asked for: SLURM ends the job at once, and nothing that follows is sure.
    sys.stderr.write(f"penstock launch: job {job} {became} and goes back into the queue\n")
    sys.stderr.flush()
    ended = ask_slurm(["scontrol", "requeue", job])
    if ended.returncode:
        raise PenstockError(f"job {job} {became} and was not requeued: {complaint_of(ended)}")


def srun(environ: Mapping[str, str]) -> list[str]:
    """The job's nodes and tasks, which srun knows, and what it would do otherwise."""
    flags = ["srun", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={WAIT_S}"]
    if "SLURM_CPUS_PER_TASK" in environ:  # which srun no longer takes from the job since 22.05
        flags.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    return flags


def added(config: TrainConfig, environ: Mapping[str, str]) -> list[str]:
    """What a job knows beyond the words that it was given: its number, and its life."""
    out = _folder(config, environ)
    words = ["--distributed"]
    if out != config.output_dir:
        words += ["--output-dir", str(out)]
    if int(environ.get("SLURM_RESTART_COUNT") or 0) > 0:
        words += _again(config, out, job_of(environ))
    return words


def _folder(config: TrainConfig, environ: Mapping[str, str]) -> Path:
    """Of the run, with the number of its job."""
    return Path(with_job_number(str(config.output_dir), job_of(environ)))


def _again(config: TrainConfig, out: Path, job: str) -> list[str]:
    """How a later life of a job goes on with a run in its folder, if that is its own."""
    asked = _read(out / ARGS)
    launch = asked.get("launch") if isinstance(asked, dict) else None
    owner = launch.get("job_id") if isinstance(launch, dict) else None
    if owner == job:
        # Killed before its first checkpoint, it begins again, over what it had begun.
        saved = time_of_last_checkpoint(out) is not None
        return ["--resume", "--no-overwrite"] if saved else ["--no-resume", "--overwrite"]
    if asked is not None and not (config.resume or config.overwrite):
        raise UsageError(
            f"--output-dir {out} holds a run of {f'job {owner}' if owner else 'no job'}, and job "
            f"{job} had not begun its own when it was restarted: say --resume or --overwrite, or "
            "put %j, the number of a job, into --output-dir"
        )
    return []  # it begins as it was asked to


def _read(path: Path) -> Any:
    """A file of JSON; None where there is none that is whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _supervise(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, bool]:
    """Run srun; its exit code, and whether it was told to save and go back into the queue.

    From then on the process is deaf to both signals, and so are the commands that it starts:
    `scontrol requeue` has SLURM send SIGTERM to all of the job, scontrol itself included.
    """
    heard: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def tell(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if process is not None:
            process.send_signal(signal.SIGUSR1)  # srun hands this one on, and dies of others

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, tell)
    try:
        process = subprocess.Popen(
            command, env=dict(environ), preexec_fn=death_signal(signal.SIGTERM)
        )
        if heard:
            process.send_signal(signal.SIGUSR1)
        code = process.wait()
    except FileNotFoundError as error:
        raise UsageError("SLURM's srun is not on PATH") from error
    finally:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return (code if code >= 0 else 128 - code), signal.SIGUSR1 in heard


def _was_stopped(code: int) -> bool:
    """By the signal: at the boundary of a step, or so early that nobody could listen yet."""
    return code in (Incomplete.exit_code, 128 + signal.SIGUSR1)


@contextmanager
def signals_handled(handlers: Mapping[int, object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
