"""``penstock slurm``: commands as jobs of SLURM."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import (
    InferConfig,
    Knobs,
    LabelConfig,
    PenstockError,
    PredictConfig,
    PreprocessConfig,
    SlurmConfig,
    UsageError,
    add_flags,
    add_kinds,
    array_ranges,
    build,
    from_flags,
    plural,
)
from ..cluster import (
    STUDY_FILE,
    TARGETS,
    Command,
    SlurmJob,
    Step,
    cancel_jobs,
    check_places,
    in_ranges,
    job_statuses,
    parse_sizes,
    read_settings,
    shipped_presets,
    slurm_preset,
    slurm_scripts,
    steps_of,
    submit_steps,
    table_of,
    with_ranks,
)
from . import VERBS, dashed, parser_of, spelled
from .launch import add_command, training

WORK = ("infer", "label", "preprocess", "predict", "bench", "suite", "train")
"""The verbs that a job may run."""
KNOBS: dict[str, type[Knobs]] = {
    "infer": InferConfig,
    "label": LabelConfig,
    "preprocess": PreprocessConfig,
    "predict": PredictConfig,
}
"""The knobs of verbs without kinds, to check a command without running the verb."""
KINDS = {
    "render": "print the scripts of the jobs that submit would submit",
    "submit": "submit a job, an array, or one job for each size of a study",
    "status": "show the states of jobs",
    "cancel": "cancel jobs",
}


EXAMPLES = r"""
penstock slurm render --preset raven-4gpu -- train spiral   # the script
penstock slurm submit --study 1,4,8 --preset raven-4gpu -- train spiral
penstock slurm submit --array 64 --preset ./mine.yaml -- infer --model-type denoise-tiny \
    --in-spec noisy.ome.zarr --out-spec parts.ome.zarr      # one volume in 64 parts
penstock slurm submit --array 8 -- python mine.py           # any command
penstock slurm status outputs                               # the states of the jobs
penstock slurm cancel outputs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = add_kinds(parser, KINDS)
    for kind in (kinds["render"], kinds["submit"]):
        kind.add_argument(
            "--preset",
            metavar="NAME",
            help=f"{', '.join(shipped_presets())}, or a YAML file of settings by its "
            "path; flags win",
        )
        kind.add_argument(
            "--study", metavar="N,N,...", help="one training for each of these numbers of devices"
        )
        add_flags(kind, SlurmConfig, config_file=True)
        about = f"what the job runs: {', '.join(WORK)} and their flags, or any program"
        add_command(kind, "-- COMMAND ...", about)
    kinds["submit"].add_argument(
        "--dry-run", action="store_true", help="print the scripts and submit nothing"
    )
    for name in ("status", "cancel"):
        kinds[name].add_argument("jobs", nargs="*", metavar="JOBS", help=TARGETS)


def run(args: argparse.Namespace) -> int:
    kinds = {"status": _status, "cancel": _cancel}
    return kinds.get(args.kind, _submit)(args)


def _submit(args: argparse.Namespace) -> int:
    command = command_of(args.command)
    config = config_of(args, command)
    if command.kind == "ranks":
        command = _in_a_folder(command, config, args.study)
    steps = _study(config, command, args.study) if args.study else steps_of(config, command)
    if args.kind == "submit":  # a rendered script may be for another machine
        for step in steps:
            check_places(step.config)
    if args.kind == "render" or args.dry_run:
        print("\n".join(slurm_scripts(steps, sys.executable)), end="")
        return 0
    submitted = 0
    try:
        for done in submit_steps(steps, sys.executable):
            submitted += 1
            print(f"job {done.id}: {done.name}, {_extent(done)}", flush=True)
    except PenstockError:
        if submitted:
            print(f"{submitted} of {plural(len(steps), 'job')} were submitted", file=sys.stderr)
        raise
    print(f"Written: {Path(config.folder) / STUDY_FILE}")
    return 0


def _extent(job: SlurmJob) -> str:
    ranks = f"{plural(job.ranks, 'rank')} on " if job.kind == "ranks" else ""
    size = f"{ranks}{plural(job.nodes, 'node')}"
    if job.array is not None:
        size = f"{plural(sum(map(len, array_ranges(job.array))), 'element')} of {size}"
    return size if job.waits_for is None else f"{size}, {job.waits_for}"


def _in_a_folder(command: Command, config: SlurmConfig, study: str | None) -> Command:
    """Give each job of a training its own folder."""
    if command.output_dir is None:
        out = f"{config.folder}/%j"
        return Command((*command.words, "--output-dir", out), output_dir=out)
    several = "--study" if study else "--array" if config.array else None
    if several and "%j" not in command.output_dir:
        raise UsageError(
            f"--output-dir {command.output_dir}: the jobs of {several} need a folder each; put %j, "
            "the number of a job, into it"
        )
    return command


def _study(config: SlurmConfig, command: Command, text: str) -> list[Step]:
    """One job for each size."""
    if command.kind != "ranks":
        raise UsageError(f"--study needs a training; {command.words[0]} is none")
    if config.array is not None:
        raise UsageError("--study submits a job for each size; it does not go with --array")
    for name in ("output", "error"):
        path = getattr(config, name)
        if path is not None and "%j" not in path:
            raise UsageError(
                f"--{name} {path}: the jobs of --study need a file each; put %j, the number of a "
                "job, into it"
            )
    jobs = [with_ranks(config, ranks) for ranks in parse_sizes(text)]
    if config.on_one_node:
        print(
            f"--study {text}: each job has all its ranks on one node, and no GPU; --preset or "
            "--gpus-per-node asks for GPUs, --ntasks-per-node for several nodes",
            file=sys.stderr,
        )
    return [Step(job, command) for job in jobs]


FOREIGN: Mapping[str, Any] = {"requeue": False, "signal": 0}
"""Defaults for programs that are not Penstock: they may fail on a restart or on a signal."""


def config_of(args: argparse.Namespace, command: Command) -> SlurmConfig:
    """The settings of a preset, of a YAML file and of the flags; the later ones win."""
    flags = {key: value for key, value in vars(args).items() if key in SlurmConfig.model_fields}
    settings = read_settings(args.config, "--config") if args.config else {}
    defaults = FOREIGN if command.kind == "program" else {}
    preset = {} if args.preset is None else slurm_preset(args.preset)
    return build(SlurmConfig, defaults, preset, settings, flags)


def _status(args: argparse.Namespace) -> int:
    rows = job_statuses(args.jobs)
    print(*table_of(rows), sep="\n")
    return max((row.code for row in rows), default=0)


def _cancel(args: argparse.Namespace) -> int:
    # Cancel a chain of jobs from its end, because ending a job would start the next one.
    rows = reversed(job_statuses(args.jobs))
    going = in_ranges(row.id for row in rows if not row.ended)
    if going:
        cancel_jobs(going)
    print(f"cancelled: {', '.join(going)}" if going else "none of them is waiting or running")
    return 0


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
        words = spelled([dashed(word) for word in words])
        if verb != "train":
            return _verb(words)
        words, config = training(words)
        out = str(config.output_dir) if "output_dir" in config.model_fields_set else None
        return Command(tuple(words), output_dir=out)
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


def _verb(words: Sequence[str]) -> Command:
    """A verb of one process, checked by its parser and its knobs."""
    verb = words[0]
    parser = parser_of(words)
    asked = [re.sub("^%a/", "1/", word) for word in words]
    args = parser.parse_args(asked)
    config = from_flags(KNOBS[verb], args, getattr(args, "config", None)) if verb in KNOBS else None
    _, left = parser.parse_known_args([*asked, "--resume"])
    counts = isinstance(config, InferConfig) and config.asked_normalization in (None, "global")
    rounds = len(config.rounds) if isinstance(config, LabelConfig) else 0
    if (decoder := getattr(args, "instances", None)) is not None:  # scores, then their labelling
        rounds = 1 + len(LabelConfig.model_construct(decoder=decoder).rounds)
    return Command(
        tuple(words), "verb", resumes=not left, goes_on=verb in WORK, counts=counts, rounds=rounds
    )
