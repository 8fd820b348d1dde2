"""``penstock slurm``: trainings as jobs of SLURM.

penstock slurm render --preset raven-4gpu -- train spiral       the script
penstock slurm submit --study 1,4,8 --preset raven-4gpu -- train spiral
penstock slurm status outputs                                   the states of the jobs
penstock slurm collect outputs --into study                     their logs and results together
penstock slurm cancel outputs
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..base import (
    RESULTS,
    SLURM_PRESETS,
    PenstockError,
    Replacing,
    SlurmConfig,
    UsageError,
    add_flags,
    add_kinds,
    build,
    from_flags,
    plural,
    read_yaml,
)
from ..cluster import (
    STUDY_FILE,
    JobState,
    SlurmJob,
    cancel_jobs,
    check_copies,
    collect_job,
    copies_of,
    job_states,
    parse_sizes,
    read_study,
    slurm_preset,
    slurm_script,
    submit_job,
    with_job_number,
    with_ranks,
    write_jobs,
)
from .launch import add_command, training

KINDS = {
    "render": "print the script of a job",
    "submit": "submit a job, or one for each size of a study",
    "status": "say how jobs stand",
    "collect": "copy the logs and results of a study into one folder",
    "cancel": "cancel jobs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = add_kinds(parser, KINDS)
    for kind in (kinds["render"], kinds["submit"]):
        kind.add_argument("--preset", metavar="NAME", help=", ".join(SLURM_PRESETS))
        kind.add_argument(
            "--study", metavar="N,N,...", help="one job for each of these numbers of devices"
        )
        add_flags(kind, SlurmConfig, config_file=True)
        add_command(kind)
    kinds["submit"].add_argument(
        "--dry-run", action="store_true", help="print the scripts and submit nothing"
    )
    about = "a folder that jobs were submitted from, its study.json, or numbers of jobs"
    for name in ("status", "cancel"):
        kinds[name].add_argument("jobs", nargs="+", metavar="JOBS", help=about)
    kinds["collect"].add_argument("study", type=Path, metavar="STUDY", help=about.split(",")[0])
    kinds["collect"].add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="folder of the copies (default: the study's own)",
    )
    add_flags(kinds["collect"], Replacing)


def run(args: argparse.Namespace) -> int:
    kinds = {"status": _status, "collect": _collect, "cancel": _cancel}
    return kinds.get(args.kind, _submit)(args)


def _submit(args: argparse.Namespace) -> int:
    config = config_of(args)
    words, trained = training(args.command)
    if "output_dir" not in trained.model_fields_set:
        out = f"{config.folder}/%j"
        words = [*words, "--output-dir", out]
    else:
        out = str(trained.output_dir)
        several = "--study" if args.study else "--array" if config.array else None
        if several and "%j" not in out:
            raise UsageError(
                f"--output-dir {out}: the jobs of {several} need a folder each; put %j, the number "
                "of a job, into it"
            )
    jobs = _study(config, args.study) if args.study else [config]
    if args.kind == "render" or args.dry_run:
        print("\n".join(slurm_script(job, words, sys.executable) for job in jobs), end="")
        return 0
    for number, job in enumerate(jobs):
        try:
            done = submit_job(job, words, out, sys.executable)
        except PenstockError:
            if number:
                print(f"{number} of {len(jobs)} jobs were submitted", file=sys.stderr)
            raise
        place = f"{plural(done.ranks, 'rank')} on {plural(done.nodes, 'node')}"
        print(f"job {done.id}: {done.name}, {place}")
    print(f"Written: {Path(config.folder) / STUDY_FILE}")
    return 0


def _study(config: SlurmConfig, text: str) -> list[SlurmConfig]:
    """A job for each size."""
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
    return jobs


def config_of(args: argparse.Namespace) -> SlurmConfig:
    """The settings of a preset, of a YAML file and of the flags; the later ones win."""
    flags = {key: value for key, value in vars(args).items() if key in SlurmConfig.model_fields}
    return build(
        SlurmConfig, slurm_preset(args.preset), read_yaml(args.config) if args.config else {}, flags
    )


@dataclass(frozen=True)
class JobStatus:
    """The state of a job, or of one element of an array."""

    id: str
    state: JobState | None
    """Its state in SLURM, None where SLURM has forgotten it."""
    job: SlurmJob | None = None
    """The job as it was submitted, None where its study is not known."""
    folder: Path = Path()
    """The folder of that study."""

    @property
    def training(self) -> str | None:
        """The status of its training, by its results; None where there are none."""

        if self.job is None:
            return None
        path = self.folder / with_job_number(self.job.output_dir, self.id) / RESULTS
        try:
            return str(json.loads(path.read_text())["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def words(self) -> str:
        if self.state is not None:
            return self.state.words()
        return f"unknown to SLURM; its training is {self.training or 'not begun'}"

    def code(self) -> int:
        """0 done, 1 failed, 3 not ended."""
        if self.state is None:
            return 0 if self.training == "complete" else 1
        return 0 if self.state.ok else 1 if self.state.ended else 3


def _status(args: argparse.Namespace) -> int:
    rows = _rows(args.jobs)
    _show(rows)
    return max((row.code() for row in rows), default=0)


def _collect(args: argparse.Namespace) -> int:
    path, replace = args.study, from_flags(Replacing, args).replace
    if _is_number(str(path)):
        raise UsageError(
            f"collect takes the folder that jobs were submitted from, or its {STUDY_FILE}; {path} "
            "is a job's number"
        )
    source = path if path.is_dir() else path.parent
    target, collected = args.into or source, []
    rows = _rows([str(path)])
    jobs = [(row.job, row.id) for row in rows if row.job is not None]
    places = [pair for job, number in jobs for pair in copies_of(job, number, source, target)]
    check_copies(places, target, replace)
    for row in rows:
        assert row.job is not None  # that of a study is
        copies = collect_job(row.job, row.id, source, target, replace)
        facts = asdict(row.state) if row.state is not None else {"state": None}
        job = {"name": row.job.name, "ranks": row.job.ranks, "nodes": row.job.nodes}
        collected.append({**facts, "id": row.id, **job, **copies, "training": row.training})
    _show(rows)
    for entry in collected:
        missing = [name for name in ("log", "results") if not entry[name]]
        if missing:
            print(f"job {entry['id']} has no {' and no '.join(missing)} yet")
    print(f"Written: {write_jobs(target, collected, replace)}")
    return max((row.code() for row in rows), default=0)


def _cancel(args: argparse.Namespace) -> int:
    # Waiting elements of an array share a row: 12_[3-7%2].
    going = [
        row.id.partition("_[")[0]
        for row in _rows(args.jobs)
        if row.state is not None and not row.state.ended
    ]
    if going:
        cancel_jobs(going)
    print(f"cancelled: {', '.join(going)}" if going else "none of them is waiting or running")
    return 0


def _rows(targets: Sequence[str]) -> list[JobStatus]:
    """The jobs of studies, and jobs by number.

    Raises `UsageError` for a number that SLURM does not know.
    """
    submitted: dict[str, tuple[SlurmJob, Path]] = {}
    numbers = list[str]()
    for target in targets:
        if _is_number(target):
            numbers.append(target)
            continue
        path = Path(target)
        folder = path if path.is_dir() else path.parent
        submitted |= {job.id: (job, folder) for job in read_study(path).jobs}
    states = job_states([*submitted, *numbers])
    for number in numbers:
        if not states[number]:
            raise UsageError(f"SLURM knows no job {number}")
    rows = [JobStatus(state.id, state) for number in numbers for state in states[number]]
    for number, (job, folder) in submitted.items():
        rows += [JobStatus(state.id, state, job, folder) for state in states[number]]
        if not states[number]:
            rows.append(JobStatus(number, None, job, folder))
    return rows


def _is_number(target: str) -> bool:
    """Whether it is the number of a job or of an array's element, and no file of that name."""
    return bool(re.fullmatch(r"\d+(_\d+)?", target, re.ASCII)) and not Path(target).exists()


def _show(rows: Sequence[JobStatus]) -> None:
    table = [("job", "name", "ranks", "nodes", "state")]
    for row in rows:
        job, nodes = row.job, row.state.nodes if row.state is not None else None
        name, ranks = (job.name, str(job.ranks)) if job is not None else ("", "")
        table.append((row.id, name, ranks, nodes or "", row.words()))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
