"""``penstock launch``: start the ranks of a training, or another verb in a job of SLURM.

The batch script becomes this process (``exec``), so SLURM sends its signals here. In a training:

    SIGUSR1   the time is nearly up ──▶ srun ──▶ every rank: save at a step's end, exit code 3
              ──▶ scontrol requeue, at which SLURM ends the ranks and the launcher
    SIGTERM   SLURM ends the job: the ranks save; SLURM decides whether it starts again
    SLURM_RESTART_COUNT > 0 ──▶ --resume, if this job left a checkpoint

Progress of a start is judged by its last checkpoint, not by an exit code: a rank that must stop
while it still starts has nothing to save. After a first start without progress the job goes back
into the queue. A job that was started again and saved nothing new ends, because otherwise it could
come back for ever.

Another verb gets the same SIGUSR1 and writes its complete blocks. Its job then goes back into the
queue, a bounded number of times.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Sequence

from ..base import (
    TRAIN_DEFAULTS,
    Incomplete,
    SlurmConfig,
    TrainConfig,
    UsageError,
    add_kinds,
    plural,
    signals_handled,
)
from ..cluster import own_job, requeue_job, restarts_of
from ..training import run_in_step
from . import VERBS, dashed, main, parser_of, train

KINDS = {
    "slurm": "ranks on the nodes of the job in which this runs, or another verb in it",
}


EXAMPLES = r"""
penstock launch slurm -- train spiral                         # inside a job of SLURM
penstock launch slurm --requeue -- infer --in-spec noisy.ome.zarr \
    --out-spec denoised.ome.zarr --model-type denoise-tiny    # another verb, in this process
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = add_kinds(parser, KINDS, metavar="HOW")
    kinds["slurm"].add_argument(
        "--requeue",
        action="store_true",
        help="put the job back into the queue after the signal to save (SIGUSR1)",
    )
    kinds["slurm"].add_argument(
        "--max-requeues",
        type=int,
        default=SlurmConfig().max_requeues,
        metavar="N",
        help="most restarts of a verb other than train (default: %(default)s)",
    )
    about = "what each rank runs, with the flags of penstock train; or another verb"
    add_command(kinds["slurm"], "-- train WORKLOAD ...", about)


def run(args: argparse.Namespace) -> int:
    if not hasattr(signal, "SIGUSR1"):
        raise UsageError(
            "penstock launch needs signals that this system does not have; it runs on Linux and "
            "macOS, and penstock train trains on one device anywhere"
        )
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    verb = command[0] if command else None
    if verb in VERBS and verb != "train":
        return _in_job(command, args.max_requeues if args.requeue else 0)
    words, config = training(command)
    return run_in_step(words, config, os.environ, requeue=args.requeue)


def add_command(parser: argparse.ArgumentParser, metavar: str, help: str) -> None:
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar=metavar, help=help)


def training(command: Sequence[str]) -> tuple[list[str], TrainConfig]:
    """The words of a command, and the training that they ask for.

    Raises `UsageError` if ``penstock train`` would refuse the words.
    """
    words = [dashed(word) for word in command]
    if words[:1] != ["train"]:
        raise UsageError("put the command to run after the flags: -- train WORKLOAD ...")
    args = parser_of(words).parse_args(words)
    if ":" not in args.workload and args.workload not in TRAIN_DEFAULTS:
        raise UsageError(
            f"there is no workload {args.workload!r}; there are {', '.join(TRAIN_DEFAULTS)}, and "
            "package.module:Class"
        )
    return words, train.config_of(args)


def _in_job(words: Sequence[str], most: int) -> int:
    """Run a verb in this process. If SIGUSR1 ends it after it wrote its complete blocks, put the
    job back into the queue, up to ``most`` times."""
    job, restarts = own_job(os.environ), restarts_of(os.environ)
    received, sender = socket.socketpair()  # the wakeup pipe sees every signal, whoever handles it
    with received, sender, signals_handled({signal.SIGUSR1: signal.default_int_handler}):
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno())
        try:
            code = main(words)
        finally:
            signal.set_wakeup_fd(before)
            for number in (signal.SIGUSR1, signal.SIGTERM):  # SLURM also sends them to scontrol
                signal.signal(number, signal.SIG_IGN)
            sender.close()
        was_warned = signal.SIGUSR1 in received.recv(4096)
        if was_warned and code == Incomplete.exit_code and most:
            if restarts >= most:
                raise Incomplete(
                    f"job {job} was started again {plural(restarts, 'time')} and does not go back "
                    f"into the queue (--max-requeues {most}); submit it again"
                )
            requeue_job(job, "has written its complete blocks")
    return code
