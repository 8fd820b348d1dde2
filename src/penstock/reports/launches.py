"""Runs as launches: the folder of a run, or of a training, as the record of one launch.

A run of infer is one step: ``step`` is the seconds of the run, and each stage adds the seconds for
which its threads worked and waited. A training has as many steps as were timed, each the mean over
ranks, and ``sample`` is a step's seconds over the samples of all ranks, so that trainings of other
batch sizes can be compared. So ``compare`` takes runs as it takes records. A side of a comparison
may also be a commit: the launches of a ledger that were made at it.

The settings of a run are not a case yet. Which settings tell cases apart is decided when the runs
of both sides are known (`run_settings.cases_of_sides`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..base import RUN_FILE, STEPS, UsageError, describe, plural, redacted
from ..instruments import (
    PHASES,
    Record,
    case_key,
    commit_named,
    commit_of,
    is_hash,
    read_ledger,
    short_commit,
)
from .infer.job_files import InferenceRun
from .places import RecordPlace, places_of
from .training.fit_files import TrainingFolder
from .words import listed

_SHORTEST = 4
"""Fewest digits of a hash that name a commit."""
_NAMED = 5
"""Most commits that a message names."""


def launches_of(places: Iterable[RecordPlace]) -> list[Record]:
    """The launches at some places, those of run folders too.

    Args:
        places: Ledgers and folders of runs.

    Returns:
        The launches, in the order of the places.

    Raises:
        UsageError: A place cannot be read, or holds a run that is not done.
    """
    launches: list[Record] = []
    for place in places:
        try:
            launches += _launches(place)
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {describe(error)}"
            raise UsageError(f"{place.path} is not what Penstock left there ({what})") from error
    return launches


def _launches(place: RecordPlace) -> list[Record]:
    if place.kind == "ledger":
        return read_ledger(place.path)
    if place.kind == "training":
        return [_of_training(TrainingFolder.read(place.path))]
    return [_of_inference(InferenceRun.read(place.path))]


def _record(
    folder: Path, scenario: str, time: str, settings: Mapping[str, Any], **fields: Any
) -> Record:
    case = {"workload": settings["workload"]} if scenario == "training" else {}
    fields["facts"] = {"settings": redacted(dict(settings)), **fields.get("facts", {})}
    return Record.model_validate(
        {"id": str(folder), "time": time, "scenario": scenario, "case": case, "launch": 0}
        | {"key": case_key(scenario, case), "status": "ok"}
        | fields
    )


def _of_inference(run: InferenceRun) -> Record:
    summary = run.summary
    if summary is None or not run.seconds:
        raise UsageError(f"{run.folder} is of a run that is not done, and has no times yet")
    samples = {"step": (run.seconds,)}
    for name, stage in run.stages.items():
        samples[name] = (stage.busy,)
        samples[f"{name} waits"] = (stage.waited,)
    settings = dict(run.settings) | {
        name: run.fingerprint[name]
        for name in ("patch", "overlap", "devices")
        if name in run.fingerprint
    }
    seconds = run.seconds
    rates = {
        "Mvox/s": summary["voxels"] / seconds / 1e6,
        "MB/s of input": summary["input_bytes"] / seconds / 1e6,
    }
    return _record(
        run.folder,
        "infer",
        _time_of(run.folder / RUN_FILE),
        settings,
        samples_s=samples,
        work={"voxels": summary["voxels"]},
        memory={"host_peak": summary.get("peak_rss")},
        facts={"rates": rates, "scores": {}},
        environment=_made_on(each.header for each in run.telemetry),
    )


def _made_on(headers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The machine and the commit of a run, if all of its processes agree on them."""
    listed = list(headers)
    return {
        name: values[0]
        for name in ("git", "machine_key")
        if (values := [header.get(name) for header in listed])
        and values[0] is not None
        and all(value == values[0] for value in values)
    }


def _of_training(run: TrainingFolder) -> Record:
    results = run.results
    if not results.get("epoch_times_s"):
        raise UsageError(f"{run.folder} is a training in which no epoch has ended")
    ranks = results.get("ranks") or ()
    memory = {
        name: max(peaks)
        for name in ("host_peak", "device_peak")
        if (peaks := [r["memory"][name] for r in ranks if (r.get("memory") or {}).get(name)])
    }
    samples, best = _steps(run), results.get("best") or {}
    if "step" not in samples:
        raise UsageError(f"{run.folder / STEPS} holds no step that was timed")
    if batch := results.get("global_batch_size"):
        samples["sample"] = tuple(seconds / batch for seconds in samples["step"])
    rate = results.get("samples_per_s")
    return _record(
        run.folder,
        "training",
        _time_of(run.folder / "training_results.json"),
        {
            **run.args,
            "workload": run.workload,
            "world_size": results.get("world_size", 1),
            "device": results.get("device"),
        },
        samples_s=samples,
        memory=memory,
        facts={
            "rates": {"samples/s": rate} if rate else {},
            "scores": dict(best.get("scores") or {}),
        },
        environment=_made_on([results]),
    )


def _steps(run: TrainingFolder) -> dict[str, tuple[float, ...]]:
    """Seconds of each step by phase, the mean over ranks; only phases that were timed."""
    if not run.steps:
        return {}
    count = min(len(each.loss) for each in run.steps)
    samples = {}
    for name in ("step", *PHASES):
        values = np.array([each.seconds[name][-count:] for each in run.steps])
        timed = np.isfinite(values).all(axis=0)
        if timed.any():
            samples[name] = tuple(values[:, timed].mean(axis=0).tolist())
    return samples


def _time_of(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")


def launches_named(name: str, ledgers: Sequence[Path]) -> list[Record]:
    """The launches of a side that a user named.

    Args:
        name: A path, or a commit: its hash, the beginning of its hash, or a name that git knows.
        ledgers: Ledgers, or folders of ledgers, that are searched for the launches of a commit.

    Returns:
        The launches; there is at least one.

    Raises:
        UsageError: There are no launches, or the commit is unknown or not unique.
    """
    path = Path(name)
    beside = path.with_name(f"{path.name}.penstock") if path.name else path
    if path.exists() or beside.exists():
        records = launches_of(places_of(path))
        if not records:
            raise UsageError(f"{name} holds no launch")
        return records
    if not ledgers:
        raise UsageError(
            f"{name} is no file or folder; if it is a commit, name its ledger with --ledger"
        )
    records = [r for path in ledgers for r in launches_of(places_of(path))]
    return launches_at(name, records, listed([str(path) for path in ledgers]))


def launches_at(name: str, records: Sequence[Record], source: str) -> list[Record]:
    """The launches that were made at a commit, by the state of git in their records.

    Args:
        name: The commit's hash, its beginning, or what git calls it; with ``+dirty`` behind it,
            the launches made with changes on top of it.
        records: Launches.
        source: Where they are from, for an error.

    Returns:
        The launches.

    Raises:
        UsageError: No launch was made there, or there are several such commits.
    """
    made = [(commit_of(r.environment.get("git")), r) for r in records]
    commits = sorted({commit for commit, _ in made if commit})
    wanted, plus, dirty = name.partition("+")
    matches = _matching(wanted, plus + dirty, commits)
    if not matches and (full := commit_named(wanted)):
        matches = _matching(full, plus + dirty, commits)
    if len(matches) > 1:
        raise UsageError(f"commit {name} is not one but {_some(matches)} in {source}")
    if not matches:
        with_changes = _matching(wanted, "+dirty", commits)
        hint = f"; {name}+dirty names its launches with changes" if with_changes else ""
        at = f"it has launches of {_some(commits)}" if commits else "no launch of it names a commit"
        raise UsageError(f"{name} is no path, and no launch of {source} was made at it: {at}{hint}")
    return [record for commit, record in made if commit == matches[0]]


def _matching(name: str, changes: str, commits: Sequence[str]) -> list[str]:
    """The commits whose hash begins with ``name``, with or without changes on top."""
    if len(name) < _SHORTEST or not is_hash(name):
        return []
    split = (commit.partition("+") for commit in commits)
    return [a + plus + b for a, plus, b in split if a.startswith(name) and plus + b == changes]


def _some(commits: Sequence[str]) -> str:
    shown = [short_commit(commit) for commit in commits[:_NAMED]]
    more = len(commits) - len(shown)
    return listed([*shown, *([plural(more, "other")] * bool(more))])
