"""``penstock launch``: start the ranks of a training.

penstock launch torchrun --nproc-per-node 4 -- train spiral     on this machine, or on several
penstock launch slurm -- train spiral                           inside a job of SLURM

In a job, the launcher is the batch script's own process, so it hears what SLURM says to it:

    SIGUSR1   the time is nearly up ──▶ srun ──▶ every rank: save at a step's boundary, exit code 3
              ──▶ scontrol requeue
    SIGTERM   SLURM ends the job: the ranks save; whether it comes back is SLURM's business
    SLURM_RESTART_COUNT > 0 ──▶ --resume, if there is a checkpoint
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..config import TRAIN_DEFAULTS, TorchrunConfig, TrainConfig, add_flags, from_flags
from ..errors import PenstockError, UsageError, require
from ..flow import usable_cores
from . import train as train_verb

WAIT_S = 60
"""When one rank has ended, the others have so long. They may have to write what became of it."""
SAVED = 3
"""The exit code of a training that was stopped and has saved."""


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
    words, config = training(args.command)
    if args.kind == "torchrun":
        return _torchrun(from_flags(TorchrunConfig, args), words)
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


# --- torchrun ------------------------------------------------------------------------------------


def _torchrun(config: TorchrunConfig, words: Sequence[str]) -> int:
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

    with _handling({signal.SIGUSR1: as_term}):
        try:
            torchrun.main([*flags, "-m", "penstock", *words, "--distributed"])
        except ChildFailedError as error:
            code: int = error.get_first_failure()[1].exitcode
            return code if code > 0 else 1
        except SignalException:
            return SAVED
    return 0


# --- a step of SLURM -----------------------------------------------------------------------------


def _step(
    words: Sequence[str], config: TrainConfig, environ: Mapping[str, str], *, requeue: bool
) -> int:
    from ..place import find
    from ..slurm import ask, said
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
    job = job_of(environ)
    command = [*srun(environ), sys.executable, "-m", "penstock", *words, *added(config, environ)]
    settings = {"OMP_NUM_THREADS": environ.get("SLURM_CPUS_PER_TASK", "1"), "PYTHONUNBUFFERED": "1"}
    code, told = _supervise(command, {**settings, **environ})
    if not (told and requeue and _was_stopped(code)):
        return code
    ended = ask(["scontrol", "requeue", job])
    if ended.returncode:
        raise PenstockError(f"job {job} has saved but was not requeued: {said(ended)}")
    print(f"penstock launch: job {job} has saved and is back in the queue", file=sys.stderr)
    return SAVED


def srun(environ: Mapping[str, str]) -> list[str]:
    """The job's nodes and tasks, which srun knows, and what it would do otherwise."""
    flags = ["srun", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={WAIT_S}"]
    if "SLURM_CPUS_PER_TASK" in environ:  # which srun no longer takes from the job since 22.05
        flags.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    return flags


def added(config: TrainConfig, environ: Mapping[str, str]) -> list[str]:
    """What a job knows beyond the words that it was given: its number, and its life."""
    from ..slurm import numbered
    from ..trainlog import job_of

    out = numbered(str(config.output_dir), job_of(environ))
    words = ["--distributed"]
    if out != str(config.output_dir):
        words += ["--output-dir", out]
    if int(environ.get("SLURM_RESTART_COUNT") or 0) > 0:
        saved = (Path(out) / "checkpoints" / "last.pt").is_file()
        # Killed before its first checkpoint, it begins again, over what it had begun.
        words += ["--resume", "--no-overwrite"] if saved else ["--no-resume", "--overwrite"]
    return words


def _supervise(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, bool]:
    """Run srun; its exit code, and whether it was told to save and go back into the queue."""
    heard: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def tell(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if process is not None:
            process.send_signal(signal.SIGUSR1)  # srun hands this one on, and dies of others

    with _handling({signal.SIGUSR1: tell, signal.SIGTERM: tell}):
        try:
            process = subprocess.Popen(command, env=dict(environ))
        except FileNotFoundError as error:
            raise UsageError("SLURM's srun is not on PATH") from error
        if heard:
            process.send_signal(signal.SIGUSR1)
        code = process.wait()
    return (code if code >= 0 else 128 - code), signal.SIGUSR1 in heard


def _was_stopped(code: int) -> bool:
    """It saved, or was told so early that the signal ended it before it could listen."""
    return code in (SAVED, 128 + signal.SIGUSR1)


@contextmanager
def _handling(handlers: Mapping[int, object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
