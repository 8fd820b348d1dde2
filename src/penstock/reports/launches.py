"""Runs as launches: the folder of a run, or of a training, as the record of one launch.

A run of infer is one step: ``step`` is the seconds of the run, and each stage adds the seconds for
which its threads worked and waited. A training has as many steps as were timed, each the mean over
ranks, and ``sample`` is a step's seconds over the samples of all ranks, so that trainings of other
batch sizes can be compared. So ``compare`` takes runs as it takes records.

The settings of a run are not a case yet. Which settings tell cases apart is decided when the runs
of both sides are known (`run_settings.cases_of_sides`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..base import RUN_FILE, STEPS, UsageError, redacted
from ..inference import is_label_run
from ..instruments import PHASES, Record, case_key, read_ledger
from .infer.job_files import InferenceRun
from .places import RecordPlace, places_of, reading
from .training.fit_files import TrainingFolder


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
        with reading(place):
            launches += _READERS[place.kind](place.path)
    return launches


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


def _of_inference(folder: Path) -> Record:
    run = InferenceRun.read(folder)
    summary = run.summary
    if not run.seconds:
        labels = is_label_run(run.content)
        why = (
            "of label, which keeps no times" if labels else "that is not done, and has no times yet"
        )
        raise UsageError(f"{run.folder} is of a run {why}")
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


def _of_training(folder: Path) -> Record:
    run = TrainingFolder.read(folder)
    results = run.results
    if not results.get("epoch_times_s"):
        raise UsageError(f"{run.folder} is a training in which no epoch has ended")
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
        memory={
            name: run.peaks[name] for name in ("host_peak", "device_peak") if name in run.peaks
        },
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


_READERS: dict[str, Callable[[Path], list[Record]]] = {
    "ledger": read_ledger,
    "training": lambda path: [_of_training(path)],
    "inference": lambda path: [_of_inference(path)],
}
"""The reader of each kind of place."""


def launches_named(name: str) -> list[Record]:
    """The launches of a side that a user named.

    Args:
        name: A ledger, the output or folder of a run, or a folder of these.

    Returns:
        The launches.

    Raises:
        UsageError: There is no such path, or no launch of Penstock's in it.
    """
    path = Path(name)
    if not path.exists() and not path.with_name(f"{path.name}.penstock").exists():
        raise UsageError(f"{name} is no file or folder")
    if not (launches := launches_of(places_of(path))):
        raise UsageError(f"{name} holds no launch")
    return launches
