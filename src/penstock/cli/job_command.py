"""The command that a job of ``penstock slurm`` runs, checked before it waits in a queue."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module

from ..base import (
    InferConfig,
    Knobs,
    PredictConfig,
    PreprocessConfig,
    UsageError,
    from_flags,
)
from ..cluster import Command
from . import VERBS, dashed
from .launch import training

WORK = ("infer", "preprocess", "predict", "bench", "suite", "train")
"""The verbs that a job may run."""
KNOBS: dict[str, type[Knobs]] = {
    "infer": InferConfig,
    "preprocess": PreprocessConfig,
    "predict": PredictConfig,
}
"""The knobs of verbs without kinds, to check a command without running the verb."""


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND ...",
        help=f"what the job runs: {', '.join(WORK)} and their flags, or any program",
    )


def command_of(command: Sequence[str]) -> Command:
    """The command that the words after ``--`` ask for.

    Raises `UsageError` if the verb would refuse the words.
    """
    marked = command[:1] == ["--"]
    words = list(command[1:] if marked else command)
    named = words[:1] == ["penstock"]
    words = words[named:]
    if not words:
        raise UsageError(
            "put the command to run after the flags: -- train WORKLOAD ..., -- infer ..., or any "
            "other command"
        )
    verb = words[0]
    if verb in WORK or (named and verb in VERBS):
        words = [dashed(word) for word in words]
        return _training(words) if verb == "train" else _verb(words)
    if named:
        raise UsageError(f"penstock has no verb {verb!r}; penstock --help lists them")
    if verb in VERBS:
        raise UsageError(
            f"{verb} is not among the verbs that run work ({', '.join(WORK)}); put penstock {verb} "
            "for this verb, or the path of another program of that name"
        )
    if not marked:
        raise UsageError(f"put -- before the command: -- {verb} ...")
    return Command(tuple(words), "program")


def _training(words: Sequence[str]) -> Command:
    words, config = training(words)
    out = str(config.output_dir) if "output_dir" in config.model_fields_set else None
    return Command(tuple(words), output_dir=out)


def _verb(words: Sequence[str]) -> Command:
    """A verb of one process, checked by its parser and its knobs."""
    verb = words[0]
    parser = argparse.ArgumentParser(prog=f"penstock {verb}", allow_abbrev=False)
    import_module(f"{__package__}.{verb}").add_arguments(parser)
    parser.add_argument("--debug", action="store_true")
    asked = [re.sub("^%a/", "1/", word) for word in words[1:]]
    args = parser.parse_args(asked)
    config = from_flags(KNOBS[verb], args, getattr(args, "config", None)) if verb in KNOBS else None
    _, left = parser.parse_known_args([*asked, "--resume"])
    counts = isinstance(config, InferConfig) and config.normalize == "global"
    goes_on = verb in WORK
    return Command(tuple(words), "verb", resumes=not left, goes_on=goes_on, counts=counts)
