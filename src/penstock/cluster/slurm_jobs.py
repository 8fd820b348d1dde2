"""Jobs of SLURM: the script of one, a study of several sizes, and the list of what was submitted.

    SlurmConfig ──script()──▶ text ──submit()──▶ sbatch ──▶ number ──▶ FOLDER/study.json
                                                                           │
    FOLDER/slurm-12.out, FOLDER/12/training_results.json ◀──collect()──────┘

A script ends by becoming ``penstock launch slurm``, which starts the ranks, hears SLURM's signals
and goes on after a restart; see `cli.launch`. No shell reads a user's words unquoted, no value
holds a newline, behind which sbatch could find directives, and none a login: SLURM keeps scripts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ..base import (
    ARGS,
    RESULTS,
    SLURM_PRESETS,
    STEPS,
    PenstockError,
    SlurmConfig,
    UsageError,
    check_folder,
    check_local,
    check_outputs,
    has_login,
    lock_file,
    scrub,
    write_json,
    writing_output,
)

STUDY_FILE, JOBS = "study.json", "jobs.json"
SAY_WITHIN_S = 60.0
"""A controller that is busy answers late; one that is gone would never."""


def slurm_script(config: SlurmConfig, words: Sequence[str], python: str) -> str:
    """The text of a job that trains, ``words`` being ``train spiral ...``.

    ``python`` is the interpreter where no environment is activated.
    """
    _check_words(words)
    variables = (variable.partition("=") for variable in config.env)
    exports = [f"export {name}={shlex.quote(value)}" for name, _, value in variables]
    environment: list[str] = []
    if config.modules:
        environment += ["module purge", f"module load {shlex.join(config.modules)}"]
    if config.venv is not None:
        environment.append(f"source {shlex.quote(f'{config.venv}/bin/activate')}")
        python = "python"
    launch = [python, "-m", "penstock", "launch", "slurm", *["--requeue"] * config.requeue]
    lines = [
        "#!/bin/bash -l" if config.modules else "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _resources(config)),
        "",
        "set -e",
        *environment,
        *exports,
        # exec, so that SLURM's signals to the script reach the launcher.
        f"exec {shlex.join([*launch, '--', *words])}",
    ]
    return "\n".join(lines) + "\n"


def log_of(config: SlurmConfig) -> str:
    """The pattern, for sbatch, of the file of a job's output."""
    return config.output or f"{config.folder}/slurm-{'%A_%a' if config.array else '%j'}.out"


def with_job_number(pattern: str, job: str) -> str:
    """A pattern with the number of a job: 12, or 12_3 of an array, which is %A_%a.

    >>> with_job_number("runs/%j", "12"), with_job_number("slurm-%A_%a.out", "12_3")
    ('runs/12', 'slurm-12_3.out')
    >>> with_job_number("%j", "12_3")
    '12_3'
    """
    array, _, task = job.partition("_")
    return pattern.replace("%A", array).replace("%a", task).replace("%j", job)


def _check_words(words: Iterable[str]) -> None:
    for word in words:
        if re.search(r"[\x00-\x1f\x7f]", word):
            raise UsageError(f"{word!r} holds a control character, which no job script may")
        if has_login(word):
            raise UsageError(
                f"{scrub(word)} was given with a login, which does not belong in a job script: "
                "SLURM keeps that, and others may read it"
            )


def _resources(config: SlurmConfig) -> Iterator[str]:
    """Options of sbatch that were asked for; True is one without a value."""
    gpus, signal = config.gpus_per_node, config.signal
    options = {
        "job-name": config.job_name,
        "nodes": config.nodes,
        "ntasks-per-node": config.tasks,
        "cpus-per-task": config.cpus_per_task,
        "mem": config.mem,
        "time": config.time,
        "constraint": config.constraint,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "gres": None if gpus is None else f"gpu:{gpus}",
        "array": config.array,
        "dependency": config.dependency,
        "exclusive": config.exclusive or None,
        "output": log_of(config),
        "error": config.error,
        "open-mode": "append",  # what a job said before a restart stays
        "requeue" if config.requeue else "no-requeue": True,
        "signal": f"B:USR1@{signal}" if signal else None,
    }
    for name, value in options.items():
        if value is not None:
            yield f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def slurm_preset(name: str | None) -> Mapping[str, Any]:
    if name is None:
        return {}
    if name not in SLURM_PRESETS:
        raise UsageError(
            f"--preset {name}: there is none of that name; there are {', '.join(SLURM_PRESETS)}"
        )
    return SLURM_PRESETS[name]


def parse_sizes(text: str) -> list[int]:
    """Numbers of ranks from ``1,4,8``."""
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text, re.ASCII):
        raise UsageError(f"--study {text!r} is not a list of numbers of devices such as 1,4,8")
    sizes = [int(number) for number in text.split(",")]
    if len(set(sizes)) < len(sizes):
        raise UsageError(f"--study {text} names a size twice")
    return sizes


def with_ranks(config: SlurmConfig, ranks: int) -> SlurmConfig:
    """The same job on so many ranks: part of a node, or whole nodes.

    A node takes as many as it has GPUs or was said to take, and any number where nothing was said.
    Of a node that is used in part it asks for its share of memory.
    """
    full = ranks if config.on_one_node else config.tasks
    nodes = -(-ranks // full)
    if ranks > full and ranks % full:
        raise UsageError(
            f"--study {ranks}: {ranks} ranks do not fill {nodes} nodes of {full} each; take a "
            f"multiple of {full}"
        )
    tasks = min(ranks, full)
    changes: dict[str, Any] = {
        "job_name": f"{config.job_name}-{ranks}",
        "nodes": nodes,
        "ntasks_per_node": tasks,
    }
    if config.gpus_per_node is not None:
        kind, colon, _ = config.gpus_per_node.rpartition(":")
        changes["gpus_per_node"] = f"{kind}{colon}{tasks}"
    if config.mem is not None and tasks < full:
        number, unit = re.fullmatch(r"(\d+)([KMGT]?)", config.mem).groups()  # type: ignore[union-attr]
        changes["mem"] = f"{-(-int(number) * tasks // full)}{unit}"
    return SlurmConfig.model_validate({**config.model_dump(exclude_unset=True), **changes})


class SlurmJob(BaseModel):
    """A job as it was submitted. Paths are as seen from the folder of the study."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    ranks: int
    nodes: int
    log: str
    """%j and %A_%a stand for its number."""
    error: str | None = None
    output_dir: str
    """Of the training; likewise."""
    command: tuple[str, ...]
    submitted: str


class SlurmStudy(BaseModel):
    """What was submitted from one folder."""

    model_config = ConfigDict(frozen=True)

    format: str = "penstock-study"
    version: int = 1
    jobs: tuple[SlurmJob, ...] = ()


def read_study(path: Path) -> SlurmStudy:
    """The study in a file, or in a folder."""
    path = path / STUDY_FILE if path.is_dir() else path
    try:
        study = SlurmStudy.model_validate_json(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no list of jobs that penstock slurm submit wrote") from error
    if (study.format, study.version) != ("penstock-study", 1):
        raise UsageError(f"{path} is {study.format} {study.version}, not penstock-study 1")
    return study


def submit_job(config: SlurmConfig, words: Sequence[str], output_dir: str, python: str) -> SlurmJob:
    """Submit one job and enter it in the folder's list. What SLURM refuses is a `UsageError`."""
    _need("sbatch")
    text = slurm_script(config, words, python)
    folder = Path(config.folder)
    check_folder(folder, "--folder")
    for path in (log_of(config), config.error):
        check_local(Path(path or ""), "--output and --error")
    folder.mkdir(parents=True, exist_ok=True)
    for path in (log_of(config), config.error):  # SLURM makes no folders, and loses what has none
        if path is not None and "%" not in str(Path(path).parent):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    if (folder / STUDY_FILE).exists():
        read_study(folder)  # what cannot be added to is no place to submit from
    ended = ask_slurm(["sbatch", "--parsable"], text)
    number = ended.stdout.strip().partition(";")[0]
    if ended.returncode or not re.fullmatch(r"\d+", number):
        raise UsageError(f"SLURM refused the job {config.job_name}: {complaint_of(ended)}")
    job = SlurmJob(
        id=number,
        name=config.job_name,
        ranks=config.nodes * config.tasks,
        nodes=config.nodes,
        log=_seen_from(folder, log_of(config)),
        error=None if config.error is None else _seen_from(folder, config.error),
        output_dir=_seen_from(folder, output_dir),
        command=tuple(words),
        submitted=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    _enter(folder, job)
    return job


def _enter(folder: Path, job: SlurmJob) -> None:
    """Add a job to the folder's list, to which others may be adding theirs."""
    with (folder / f".{STUDY_FILE}.lock").open("a") as lock:
        lock_file(lock, wait=True)
        before = read_study(folder) if (folder / STUDY_FILE).exists() else SlurmStudy()
        write_json(folder / STUDY_FILE, SlurmStudy(jobs=(*before.jobs, job)).model_dump())


def _seen_from(folder: Path, path: str) -> str:
    return path if Path(path).is_absolute() else os.path.relpath(path, folder)


def collect_job(
    job: SlurmJob, element: str, source: Path, target: Path, replace: bool = False
) -> dict[str, bool]:
    """Bring one job's log and results to TARGET/slurm-ID.out and TARGET/ID/; what was there.

    ``element`` is the job's number, or that of one of its array.
    """
    log = target / f"slurm-{element}.out"
    results = target / element / RESULTS
    copies = copies_of(job, element, source, target)
    for old, new in copies:
        if not (new.exists() and new.samefile(old)):
            with writing_output(new, replace=replace) as draft:
                shutil.copyfile(old, draft)
    copied = {new for _, new in copies}
    return {"log": log in copied, "results": results in copied}


def copies_of(job: SlurmJob, element: str, source: Path, target: Path) -> list[tuple[Path, Path]]:
    """What there is of a job, and where each file of it goes, which may be where it is."""
    run = source / with_job_number(job.output_dir, element)
    logs = {"out": job.log, "err": job.error}
    copies = [
        (source / with_job_number(log, element), target / f"slurm-{element}.{kind}")
        for kind, log in logs.items()
        if log is not None
    ]
    names = [ARGS, RESULTS]
    names += [f"{STEPS}/{path.name}" for path in sorted(run.glob(f"{STEPS}/rank*.csv"))]
    copies += [(run / name, target / element / name) for name in names]
    return [(old, new) for old, new in copies if old.is_file()]


def check_copies(places: Sequence[tuple[Path, Path]], target: Path, replace: bool) -> None:
    """Raise `UsageError` where collecting would replace what is not ours."""
    moved = [new for old, new in places if not (new.exists() and new.samefile(old))]
    check_outputs(*(("--into", new) for new in (*moved, target / JOBS)), replace=replace)


def write_jobs(target: Path, rows: Sequence[Mapping[str, Any]], replace: bool = False) -> Path:
    with writing_output(target / JOBS, replace=replace) as draft:
        write_json(draft, {"format": "penstock-jobs", "version": 1, "jobs": list(rows)})
    return target / JOBS


def ask_slurm(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands, ``text`` on its standard input."""
    _need(command[0])
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            stdin=subprocess.DEVNULL if text is None else None,
            # Of an array those that wait are told in a row, all of them.
            env={**os.environ, "SLURM_BITSTR_LEN": "0"},
            timeout=SAY_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PenstockError(f"{command[0]} did not answer within {SAY_WITHIN_S:g} s") from error


def _need(name: str) -> None:
    if shutil.which(name) is None:
        hint = "; --dry-run prints the script" if name == "sbatch" else ""
        raise UsageError(f"SLURM's {name} is not on PATH{hint}")


def complaint_of(ended: subprocess.CompletedProcess[str]) -> str:
    """What a command complained of, without its own name."""
    lines = [line for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
    for line in lines:
        if "error: " in line:
            return line.rpartition("error: ")[2].strip()
    return lines[-1].strip() if lines else f"exit code {ended.returncode}"
