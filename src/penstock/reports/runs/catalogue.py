"""All runs below the folders that the user names, read again when their files change.

A training, a run of inference and each launch of a ledger is a row of a list, while it goes on and
after its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe, is_locked, well_formed
from ...instruments import PHASES, Record, read_ledger, record_cells
from ...training import TRAIN_LOCK, read_machine_metrics
from ..infer.job_files import InferenceRun
from ..places import RecordPlace, places_at, reading
from ..run_settings import differing_knobs, telling
from ..training.fit_files import TrainingFolder
from ..training.pictures import detection_pictures
from .shown_run import (
    LONGEST_LABEL,
    RunCurve,
    RunDetails,
    ShownRun,
    curve_of,
    curves_of_readings,
    key_of,
    label,
    numbers_of,
    settings_of,
    status_word,
    tags_of,
)

_NOT_MEASURED = "launch world_size batch_size global_batch_size resumed_at_steps tags".split()
"""Results of a training that are settings."""
_NOT_READINGS = ("t", "time", "processes", "threads", "gauges", "gpus")
_OF_THE_MOMENT = ("load", "variables")
"""Parts of an environment that differ between launches, or have many values."""
_NO_METRICS = ("case.", "tags.", "launch", "order", "steps_per_sample")
_NOT_SHOWN = (".low_s", ".high_s", ".n")
"""Ends of the names of intervals, which launches show better, and of counts."""


def shown_training(folder: Path) -> ShownRun:
    """A training as one row.

    Raises `UsageError` if it is not the folder of a training.
    """
    run = TrainingFolder.read(folder)
    settings = _settings(run)
    repeated = {name: text for name, text in settings.items() if name != "seed"}
    seconds = run.results.get("training_s")
    return ShownRun(
        key=key_of(folder.resolve()),
        case=key_of(f"{folder.resolve().parent} {sorted(repeated.items())}"),
        name=label(run.args.get("name") or run.results.get("name") or folder.resolve().name),
        kind="training",
        status=_status(run),
        source=label(folder),
        title=label(folder.resolve().name),
        workload=label(run.workload),
        machine=label(run.results.get("machine_key")),
        model=settings.get("model") or settings.get("backbone") or "",
        began=run.began,
        seconds=seconds if isinstance(seconds, int | float) and seconds else None,
        tags=tags_of(run.args.get("tags") or run.results.get("tags")),
        read=partial(_training_details, folder),
    )


def _status(run: TrainingFolder) -> str:
    lock = run.folder / TRAIN_LOCK
    if lock.is_file() and is_locked(lock):
        return "running"
    status = str(run.results.get("status") or "unfinished")
    return "unfinished" if status == "running" else status_word(status)


def _settings(run: TrainingFolder) -> dict[str, str]:
    """The settings of a training: those of its workload, and what the machine decided."""
    args = telling(run.settings)
    machine = ("device", "world_size", "global_batch_size", "git", "machine_key")
    decided = {name: v for name in machine if (v := run.results.get(name)) is not None}
    if "world_size" in decided:
        decided["devices"] = decided.pop("world_size")
    return settings_of(args | decided)


def _training_details(folder: Path) -> RunDetails:
    run = TrainingFolder.read(folder)
    phases = {f"{phase}_s": seconds for phase, seconds in run.phases.items()}
    measured = {n: v for n, v in run.results.items() if n not in _NOT_MEASURED}
    metrics = numbers_of(measured, {"phases": phases, "memory": run.peaks})
    curves = _epoch_curves(run) | _step_curves(run) | _machine_curves(folder)
    error = label(run.results.get("error"))
    return RunDetails(_settings(run), metrics, curves, detection_pictures(folder), error)


def _machine_curves(folder: Path) -> dict[str, RunCurve]:
    """The metrics of the machine of a tracked training over time."""
    rows = read_machine_metrics(folder)
    return curves_of_readings([(time - rows[0][1], numbers_of(each)) for _, time, each in rows])


def _epoch_curves(run: TrainingFolder) -> dict[str, RunCurve]:
    """The scores of each epoch."""
    rows = [row for row in run.history if isinstance(row.get("epoch"), int)]
    seconds = np.nan_to_num(_column(rows, "train_s")) + np.nan_to_num(_column(rows, "val_s"))
    steps, epochs = _column(rows, "step"), _column(rows, "epoch") + 1
    names = dict.fromkeys(name for row in rows for name in row)
    curves = {
        label(name): curve_of(
            _column(rows, name), step=steps, epoch=epochs, seconds=np.cumsum(seconds)
        )
        for name in names
        if name not in ("epoch", "step", "samples")
    }
    return {name: curve for name, curve in curves.items() if np.isfinite(curve.values).any()}


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    values = (row.get(name) for row in rows)
    return np.array([float(v) if isinstance(v, int | float) else np.nan for v in values])


def _step_curves(run: TrainingFolder) -> dict[str, RunCurve]:
    """The loss and the phases of the steps of the first rank, over the seconds spent in steps."""
    if not run.steps:
        return {}
    steps = run.steps[0]
    numbers = np.arange(1, len(steps.loss) + 1)
    per_epoch = np.unique(steps.epoch, return_counts=True)[1].max()
    places = numbers, numbers / per_epoch, np.cumsum(np.nan_to_num(steps.seconds["step"]))
    values = {"train_loss_step": steps.loss}
    values |= {f"{name}_s": steps.seconds[name] for name in ("step", *PHASES)}
    return {
        name: curve_of(each, step=places[0], epoch=places[1], seconds=places[2])
        for name, each in values.items()
        if np.isfinite(each).any()
    }


def shown_inference(folder: Path) -> ShownRun:
    """A run of inference as one row.

    Raises `UsageError` if it is not the folder of a run of inference.
    """
    run = InferenceRun.read(folder)
    model = run.fingerprint.get("model") or [""]
    return ShownRun(
        key=key_of(folder.resolve()),
        case=key_of(folder.resolve()),
        name=label(run.content.get("name") or run.name),
        kind="inference",
        status=status_word(run.status.state),
        source=label(folder),
        workload=label(run.content.get("verb", "infer")),
        machine=label(run.machine_key),
        model=label(run.settings.get("model_type") or model[0]),
        began=run.began,
        seconds=run.seconds,
        tags=tags_of(run.content.get("tags")),
        read=partial(_inference_details, folder),
    )


def _inference_details(folder: Path) -> RunDetails:
    run = InferenceRun.read(folder)
    devices = run.fingerprint.get("devices") or run.plan.get("devices") or []
    summary = dict(run.summary)
    done = {"blocks done": run.status.blocks_done, "blocks planned": run.status.blocks_planned}
    others = {n: v for n, v in summary.items() if n not in ("workers", "blocks_planned")}
    if run.seconds and summary.get("voxels"):
        others["voxels_per_s"] = summary["voxels"] / run.seconds
    metrics = numbers_of(others, done)
    used = {"devices": len(devices) or None, "device": devices, "cores": run.cores}
    settings = telling(run.settings)
    curves: dict[str, RunCurve] = {}
    for each in run.telemetry:
        readings = curves_of_readings([(float(row["t"]), _readings(row)) for row in each.rows])
        curves |= {f"{each.name}/{n}" if each.name else n: c for n, c in readings.items()}
    why = label(run.status.why)
    return RunDetails(settings_of(used, settings, run.maker), metrics, curves, error=why)


def _readings(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of telemetry."""
    gpus = {
        f"gpu{gpu.get('index')}_{name}": value
        for gpu in row.get("gpus") or ()
        for name, value in gpu.items()
        if name != "index"
    }
    queues = {f"queue/{name}": value for name, value in (row.get("gauges") or {}).items()}
    return numbers_of({n: v for n, v in row.items() if n not in _NOT_READINGS}, gpus, queues)


def runs_of_ledger(place: Path) -> list[ShownRun]:
    """The launches of a ledger, each named by the knobs in which its cases differ.

    Args:
        place: The ledger, a folder or a file.

    Returns:
        A row for each launch.

    Raises:
        UsageError: The file cannot be read, or a line is not a record.
    """
    records = read_ledger(place)
    knobs = differing_knobs(records)
    return [_run_of(record, knobs, str(place)) for record in records]


def _run_of(record: Record, knobs: Sequence[str], source: str) -> ShownRun:
    """A record as a row, named by what it is of and by the values of ``knobs``; ``source`` is the
    place that it is from."""
    step = record.samples_s.get("step")
    named = (f"{name}={record.case[name]}" for name in knobs if name in record.case)
    title = " ".join(map(label, [record.name or record.scenario, *named]))[:LONGEST_LABEL]
    machine = label(record.environment.get("machine_key"))
    return ShownRun(
        key=key_of(f"{source} {record.id}"),
        case=key_of(f"{source} {record.key} {machine} {record.name}"),
        name=f"{title} launch {record.launch + 1}",
        title=title,
        kind=f"bench {record.scenario}",
        status=status_word(record.status),
        source=label(source),
        workload=label(record.case.get("workload") or record.scenario),
        machine=machine,
        model=label(record.case.get("model")),
        began=datetime.fromisoformat(record.time).timestamp(),
        seconds=median(step) if step else None,
        tags=tags_of(record.tags),
        read=partial(_launch_details, record),
    )


def _launch_details(record: Record) -> RunDetails:
    cells = record_cells(record)
    metrics = {
        name: v
        for name, v in cells.items()
        if not (name.startswith(_NO_METRICS) or name.endswith(_NOT_SHOWN))
    }
    kept = {k: v for k, v in record.environment.items() if k not in _OF_THE_MOMENT}
    curves = {
        f"{label(name)}_s": curve_of(
            samples, step=np.arange(1, len(samples) + 1), seconds=np.cumsum(samples)
        )
        for name, samples in record.samples_s.items()
    }
    return RunDetails(
        settings_of(record.case, kept),
        numbers_of(metrics, {"facts": record.facts}),
        curves,
        error=label(record.error.message) if record.error else "",
    )


LOOK_EVERY_S = 2.0
_SHARE = 0.05
"""Largest share of the time that is spent on looking for runs, so slow file systems get less
load."""
_MOST_NOTES = 50
_INSIDE = ("*", "steps/*")
"""The files of a place whose changes are changes of its runs."""

ReadOthers = Callable[[Path], Sequence[ShownRun]]
"""Reads the runs of a file of another program. The command line hands it over."""
_READERS: dict[str, ReadOthers] = {
    "ledger": runs_of_ledger,
    "training": lambda path: [shown_training(path)],
    "inference": lambda path: [shown_inference(path)],
}
"""The reader of each kind of place that is ours."""
_Held = tuple[object, Sequence[ShownRun], Sequence[str]]
"""The stamp of a place, its runs, and a sentence if they cannot be read."""


class Catalogue:
    """The runs. Threads may refresh it and read it at once."""

    def __init__(self, named: Iterable[Path], others: ReadOthers = lambda path: ()) -> None:
        """Read all runs.

        Args:
            named: Files and folders.
            others: Reads the logs of jobs and what trackers kept.

        Raises:
            UsageError: A path is missing, or there are far too many folders.
        """
        self._named, self._others = tuple(named), others
        for path in self._named:
            if not path.exists():
                raise UsageError(f"{path} cannot be read: No such file or directory")
        self._held: dict[RecordPlace, _Held] = {}
        self._next = 0.0
        self._lock = threading.Lock()
        self.runs: Sequence[ShownRun] = ()
        """All runs, the newest first."""
        self.by_key: dict[str, ShownRun] = {}
        self.notes: Sequence[str] = ()
        """Sentences on what cannot be read."""
        self.version = 0
        """A number that grows when runs change."""
        self._read_changes()

    @classmethod
    def holding(cls, runs: Sequence[ShownRun]) -> Catalogue:
        """A catalogue of these runs, in this order, which is never refreshed."""
        catalogue = cls(())
        catalogue.runs, catalogue.by_key = runs, {run.key: run for run in runs}
        return catalogue

    def refresh(self) -> None:
        """Read what has changed, unless that was done a moment ago."""
        with self._lock:
            began = time.monotonic()
            if began < self._next:
                return
            try:
                self._read_changes()
            except (UsageError, OSError) as error:  # the folders may come back
                self.notes = [label(error)]
            now = time.monotonic()
            self._next = now + max(LOOK_EVERY_S, (now - began) / _SHARE)

    def _read_changes(self) -> None:
        held: dict[RecordPlace, _Held] = {}
        for place in (place for path in self._named for place in places_at(path)):
            before, stamp = self._held.get(place), _stamp(place.path)
            # A run that goes on may end without a change of its files: its process is gone.
            goes_on = before is not None and any(run.status == "running" for run in before[1])
            if before is None or before[0] != stamp or goes_on:
                before = (stamp, *self._read(place))
            held[place] = before
        if held == self._held:
            return
        self._held = held
        self.by_key = {run.key: run for _, runs, _ in held.values() for run in runs}
        self.runs = sorted(self.by_key.values(), key=lambda run: -(run.began or 0.0))
        self.notes = [note for *_, notes in held.values() for note in notes][:_MOST_NOTES]
        self.version += 1

    def _read(self, place: RecordPlace) -> tuple[Sequence[ShownRun], Sequence[str]]:
        try:
            with reading(place):
                return _READERS.get(place.kind, self._others)(place.path), ()
        except (UsageError, OSError) as error:
            return (), [f"{label(error)}; it is passed over"]

    def details(self, run: ShownRun) -> RunDetails:
        """All that is known of a run; an error in words if it has been removed since."""
        try:
            with well_formed("it is damaged"):
                return run.read()
        except (UsageError, OSError) as error:
            return RunDetails(error=label(f"{run.source} cannot be read: {describe(error)}"))


def _stamp(path: Path) -> object:
    """The states of the files of a place. Another stamp means that they have changed."""
    try:
        inside = [path, *(file for pattern in _INSIDE for file in path.glob(pattern))]
        states = [(file, file.stat()) for file in inside]
    except OSError:  # a file went away meanwhile
        return object()
    return {(file, state.st_mtime_ns, state.st_size) for file, state in states}
