"""``penstock launch``: start the ranks of a training.

penstock launch torchrun --nproc-per-node 4 -- train spiral     on this machine, or on several
penstock launch slurm -- train spiral                           inside a job of SLURM

In a job, the launcher is the batch script's own process, so it hears what SLURM says to it:

    SIGUSR1   the time is nearly up ──▶ srun ──▶ every rank: save at a step's boundary, exit code 3
              ──▶ scontrol requeue, at which SLURM ends this life, the launcher too
    SIGTERM   SLURM ends the job: the ranks save; whether it comes back is SLURM's business
    SLURM_RESTART_COUNT > 0 ──▶ --resume, if this job has left a checkpoint

What became of a life is seen by its last checkpoint, not by an exit code: a rank that is told to
stop while it still starts has nothing to save. Such a life is put back into the queue once;
OUT/requeued.json notes it, and the next of them ends the job, which would come back for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ..config import TRAIN_DEFAULTS, TorchrunConfig, TrainConfig, add_flags, from_flags
from ..errors import Incomplete, PenstockError, UsageError, require
from ..files import write_json
from ..flow import usable_cores
from ..orphans import death_signal, for_children
from . import train as train_verb

WAIT_S = 60
"""When one rank has ended, the others have so long. They may have to write what became of it."""
REQUEUED = "requeued.json"
"""In the folder of a run: the last life that was put back into the queue with nothing saved."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="HOW", required=True)
    about = "ranks on this machine, or on each of several"
    torchrun = kinds.add_parser("torchrun", help=about, description=about, allow_abbrev=False)
    add_flags(torchrun, TorchrunConfig)
    about = "ranks on the nodes of the job in which this runs"
    slurm = kinds.add_parser("slurm", help=about, description=about, allow_abbrev=False)
    slurm.add_argument(
        "--requeue",
        action="store_true",
        help="put the job back into the queue when it was told to save (SIGUSR1)",
    )
    for kind in (torchrun, slurm):
        add_command(kind)


def run(args: argparse.Namespace) -> int:
    if not hasattr(signal, "SIGUSR1"):
        raise UsageError(
            "penstock launch needs signals that this system does not have; it runs on Linux and "
            "macOS, and penstock train trains on one device anywhere"
        )
    words, config = training(args.command)
    if args.kind == "torchrun":
        return _torchrun(from_flags(TorchrunConfig, args), words, config.output_dir)
    return _step(words, config, os.environ, requeue=args.requeue)


# --- the training that is started ----------------------------------------------------------------


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- train WORKLOAD ...",
        help="what each rank runs, with the flags of penstock train",
    )


def training(command: Sequence[str]) -> tuple[list[str], TrainConfig]:
    """The words after ``--`` and what they say; what `penstock train` would refuse is refused."""
    words = list(command[1:] if command[:1] == ["--"] else command)
    if words[:1] != ["train"]:
        raise UsageError("say what is to run behind the flags: -- train WORKLOAD ...")
    parser = argparse.ArgumentParser(prog="penstock train", allow_abbrev=False)
    train_verb.add_arguments(parser)
    args = parser.parse_args(words[1:])
    if ":" not in args.workload and args.workload not in TRAIN_DEFAULTS:
        raise UsageError(
            f"there is no workload {args.workload!r}; there are {', '.join(TRAIN_DEFAULTS)}, and "
            "package.module:Class"
        )
    return words, train_verb.config_of(args)


def _checkpoint(out: Path) -> int | None:
    """When a run's last checkpoint was written, in nanoseconds; None where there is none."""
    try:
        return (out / "checkpoints" / "last.pt").stat().st_mtime_ns
    except OSError:
        return None


# --- torchrun ------------------------------------------------------------------------------------


def _torchrun(config: TorchrunConfig, words: Sequence[str], out: Path) -> int:
    """Exit code 3 where the ranks were stopped and have saved; else that of the first to fail."""
    require("torch", "train")
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ranks = config.nproc_per_node or torch.cuda.device_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    flags = [f"--nproc-per-node={ranks}", f"--nnodes={config.nnodes}", "--rdzv-backend=c10d"]
    if config.rdzv_endpoint is None:  # nobody else is to reach it
        flags += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    else:
        flags += [f"--rdzv-endpoint={config.rdzv_endpoint}", "--rdzv-id=penstock"]

    def as_term(number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # which torchrun hands to its ranks

    before = _checkpoint(out)
    os.environ |= for_children()
    with _handling({signal.SIGUSR1: as_term}):
        try:
            torchrun.main([*flags, "-m", "penstock", *words, "--distributed"])
        except ChildFailedError as error:
            code: int = error.get_first_failure()[1].exitcode
            return code if code > 0 else 1
        except SignalException as error:
            if _checkpoint(out) not in (None, before):
                return Incomplete.exit_code
            name = signal.Signals(error.sigval).name
            print(
                f"penstock launch: {name} ended the ranks, and they saved nothing in {out}",
                file=sys.stderr,
            )
            return 128 + error.sigval
    return 0


# --- a step of SLURM -----------------------------------------------------------------------------


def _step(
    words: Sequence[str], config: TrainConfig, environ: Mapping[str, str], *, requeue: bool
) -> int:
    from ..place import find
    from ..trainlog import job_of

    if "SLURM_JOB_ID" not in environ:
        raise UsageError(
            "launch slurm runs inside a job, and SLURM_JOB_ID is not set; penstock slurm submit "
            "makes a job, salloc an interactive one"
        )
    if (place := find(environ)).world_size > 1:
        raise UsageError(
            f"launch slurm starts the ranks, and this is rank {place.rank} of "
            f"{place.world_size} already: leave out srun"
        )
    job, out = job_of(environ), _folder(config, environ)
    command = [*srun(environ), sys.executable, "-m", "penstock", *words, *added(config, environ)]
    settings = {"OMP_NUM_THREADS": environ.get("SLURM_CPUS_PER_TASK", "1"), "PYTHONUNBUFFERED": "1"}
    before = _checkpoint(out)
    code, told = _supervise(command, {**settings, **environ})
    if told and requeue and _was_stopped(code):
        _requeue(job, out, saved=_checkpoint(out) not in (None, before))
    return code


def _requeue(job: str, out: Path, *, saved: bool) -> None:
    """Put a job back into the queue, unless the life before it got no further either."""
    from ..slurm import ask, said

    became = "has saved" if saved else "was stopped before it had saved anything new"
    if not saved:
        now = {"job_id": job, "checkpoint": _checkpoint(out)}
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
    told = f"penstock launch: job {job} {became} and goes back into the queue"
    print(told, file=sys.stderr, flush=True)
    ended = ask(["scontrol", "requeue", job])
    if ended.returncode:
        raise PenstockError(f"job {job} {became} and was not requeued: {said(ended)}")


def srun(environ: Mapping[str, str]) -> list[str]:
    """The job's nodes and tasks, which srun knows, and what it would do otherwise."""
    flags = ["srun", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={WAIT_S}"]
    if "SLURM_CPUS_PER_TASK" in environ:  # which srun no longer takes from the job since 22.05
        flags.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    return flags


def added(config: TrainConfig, environ: Mapping[str, str]) -> list[str]:
    """What a job knows beyond the words that it was given: its number, and its life."""
    from ..trainlog import job_of

    out = _folder(config, environ)
    words = ["--distributed"]
    if out != config.output_dir:
        words += ["--output-dir", str(out)]
    if int(environ.get("SLURM_RESTART_COUNT") or 0) > 0:
        words += _again(config, out, job_of(environ))
    return words


def _folder(config: TrainConfig, environ: Mapping[str, str]) -> Path:
    """Of the run, with the number of its job."""
    from ..slurm import numbered
    from ..trainlog import job_of

    return Path(numbered(str(config.output_dir), job_of(environ)))


def _again(config: TrainConfig, out: Path, job: str) -> list[str]:
    """How a later life of a job goes on with a run in its folder, if that is its own."""
    from ..trainlog import ARGS

    asked = _read(out / ARGS)
    launch = asked.get("launch") if isinstance(asked, dict) else None
    owner = launch.get("job_id") if isinstance(launch, dict) else None
    if owner == job:
        # Killed before its first checkpoint, it begins again, over what it had begun.
        saved = _checkpoint(out) is not None
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
def _handling(handlers: Mapping[int, object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
