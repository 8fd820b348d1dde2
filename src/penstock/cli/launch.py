"""``penstock launch``: start the ranks of a training.

penstock launch torchrun --nproc-per-node 4 -- train spiral     on this machine, or on several
penstock launch slurm -- train spiral                           inside a job of SLURM

In a job, the launcher is the process of the batch script, so SLURM sends its signals to it:

    SIGUSR1   the time is nearly up ──▶ srun ──▶ every rank: save at a step's end, exit code 3
              ──▶ scontrol requeue, at which SLURM ends the ranks and the launcher
    SIGTERM   SLURM ends the job: the ranks save; SLURM decides whether it starts again
    SLURM_RESTART_COUNT > 0 ──▶ --resume, if this job left a checkpoint

Whether a start of the job got anywhere is seen by its last checkpoint, not by an exit code: a rank
that must stop while it still starts has nothing to save. After such a start the job goes back into
the queue once, which OUT/requeued.json notes. After a second one it ends, or it would come back
for ever.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ..base import (
    TRAIN_DEFAULTS,
    Incomplete,
    TorchrunConfig,
    TrainConfig,
    UsageError,
    add_flags,
    add_kinds,
    for_children,
    from_flags,
    require,
    usable_cores,
)
from ..training import run_in_step, signals_handled, time_of_last_checkpoint
from . import dashed, train

KINDS = {
    "torchrun": "ranks on this machine, or on each of several",
    "slurm": "ranks on the nodes of the job in which this runs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = add_kinds(parser, KINDS, metavar="HOW")
    add_flags(kinds["torchrun"], TorchrunConfig)
    kinds["slurm"].add_argument(
        "--requeue",
        action="store_true",
        help="put the job back into the queue after the signal to save (SIGUSR1)",
    )
    for kind in kinds.values():
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
    return run_in_step(words, config, os.environ, requeue=args.requeue)


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- train WORKLOAD ...",
        help="what each rank runs, with the flags of penstock train",
    )


def training(command: Sequence[str]) -> tuple[list[str], TrainConfig]:
    """The words behind ``--`` and the training that they ask for.

    Raises `UsageError` for what ``penstock train`` would refuse.
    """
    words = [dashed(word) for word in (command[1:] if command[:1] == ["--"] else command)]
    if words[:1] != ["train"]:
        raise UsageError("say what is to run behind the flags: -- train WORKLOAD ...")
    parser = argparse.ArgumentParser(prog="penstock train", allow_abbrev=False)
    train.add_arguments(parser)
    parser.add_argument("--debug", action="store_true")
    args = parser.parse_args(words[1:])
    if ":" not in args.workload and args.workload not in TRAIN_DEFAULTS:
        raise UsageError(
            f"there is no workload {args.workload!r}; there are {', '.join(TRAIN_DEFAULTS)}, and "
            "package.module:Class"
        )
    return words, train.config_of(args)


def _torchrun(config: TorchrunConfig, words: Sequence[str], out: Path) -> int:
    """Run the ranks. The exit code is 3 where they stopped and saved, else the first failure's."""
    require("torch", "train")
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ranks = config.nproc_per_node or torch.cuda.device_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    flags = [f"--nproc-per-node={ranks}", f"--nnodes={config.nnodes}", "--rdzv-backend=c10d"]
    if config.rdzv_endpoint is None:  # only this machine may reach it
        flags += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    else:
        flags += [f"--rdzv-endpoint={config.rdzv_endpoint}", "--rdzv-id=penstock"]

    def as_term(number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun passes it on to its ranks

    before = time_of_last_checkpoint(out)
    os.environ |= for_children()
    with signals_handled({signal.SIGUSR1: as_term}):
        try:
            torchrun.main([*flags, "-m", "penstock", *words, "--distributed"])
        except ChildFailedError as error:
            code: int = error.get_first_failure()[1].exitcode
            return code if code > 0 else 1
        except SignalException as error:
            if time_of_last_checkpoint(out) not in (None, before):
                return Incomplete.exit_code
            name = signal.Signals(error.sigval).name
            print(
                f"penstock launch: {name} ended the ranks, and they saved nothing in {out}",
                file=sys.stderr,
            )
            return 128 + error.sigval
    return 0
