"""What a training tells its trackers, and the processes that do it.

    train ──▶ bounded queue ──▶ thread ──▶ pipe ──▶ process of a tracker (`trackers`) ──▶ a logger

Each tracker has a process of its own, as its library imports, patches, draws random numbers and
waits. So it changes neither the steps nor the memory that are measured, and one that hangs is
killed at the end. A metric costs the training one small dict. What finds the queue full, because
the tracker is too slow, is dropped, and that is said; steps/rank0.csv has every step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..base import (
    MissingDependency,
    PenstockError,
    TrainConfig,
    missing,
    read_json,
    scrubbed,
    set_aside,
    write_json,
)
from ..instruments import Sampler, TelemetryRow, read_rows

TRACKING_FOLDER = "track"
"""The folder in a run's folder with the files of trackers and the metrics of the machine."""
MACHINE_METRICS = f"{TRACKING_FOLDER}/metrics.jsonl"
"""Written by the sampler; a resumed run renames the file of its earlier part."""
SYSTEM_EVERY_S = 10.0


class MachineSampler(Sampler):
    """Samples the machine, and calls ``tell`` with the metrics of each row."""

    def __init__(
        self, out: Path, step: Callable[[], int], tell: Callable[[dict[str, Any]], None]
    ) -> None:
        """``step()`` is the number of steps done."""
        self._rows, self._tell_metrics = out / MACHINE_METRICS, tell
        super().__init__(self._rows, SYSTEM_EVERY_S, lambda: {"step": step()}, {})

    def start(self) -> None:
        """Begin, if there is room; a training goes on without metrics of its machine."""
        with contextlib.suppress(OSError, PenstockError):
            set_aside(self._rows)
            super().start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            super().stop()

    def sample(self) -> TelemetryRow:
        row = super().sample()
        self._tell_metrics(system_metrics(row))
        return row


def system_metrics(row: TelemetryRow) -> dict[str, Any]:
    """A row of telemetry as metrics: of rank 0's process tree, and of its node's disks, network and
    GPUs."""
    names = [name for name in row if name.endswith(("_percent", "_bytes", "_per_s"))]
    metrics = {f"system/{name}": row[name] for name in names}
    for gpu in row["gpus"] or ():
        for name in ("util_percent", "memory_bytes"):
            metrics[f"system/gpu{gpu['index']}_{name}"] = gpu[name]
    return metrics


def read_machine_metrics(out: Path) -> list[tuple[float, float, dict[str, Any]]]:
    """The metrics of the machine of a tracked run, in all its parts.

    Args:
        out: The folder of the run.

    Returns:
        Of each row the step, the time (unix) and the metrics, in the order of time; none if the run
        was not tracked.
    """
    rows: list[TelemetryRow] = []
    for path in (out / TRACKING_FOLDER).glob("metrics*.jsonl"):
        with contextlib.suppress(PenstockError, OSError):
            rows += read_rows(path)[1]
    points = [(row["gauges"]["step"], row["time"], system_metrics(row)) for row in rows]
    return sorted(points, key=lambda point: point[1])


ROOM = 4096
"""The messages that wait for a tracker at most, about 2 MB. It imports its library meanwhile."""
COMPLETE_WITHIN_S, STOP_WITHIN_S = 120.0, 10.0
"""The seconds that a complete run, and one that was stopped or failed, waits for its trackers. A
batch system kills a job about 30 s after its signal."""
LOOK_EVERY_S = 0.1
QUIET = {
    "COMET_DISABLE_ANNOUNCEMENT": "true",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_ERROR_TRACKING_ENABLE": "false",
    "COMET_INTERNAL_REPORTING": "false",
    "COMET_LOGGING_CONSOLE": "CRITICAL",
    "COMET_TIMEOUT_CLEANING": "60",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "OMP_NUM_THREADS": "1",
    "WANDB_ERROR_REPORTING": "false",
}
"""Variables of the processes, where the user has not set them: report nothing to the makers of a
library, and give up on a server before the run ends its wait."""
PACKAGES = {
    "comet": ("comet_ml", "pytorch_lightning"),
    "mlflow": ("mlflow", "pytorch_lightning"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb", "pytorch_lightning"),
}
"""The packages that a tracker needs."""


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers that are not installed, without importing those that are."""
    for name in names:
        for package in PACKAGES[name]:
            if find_spec(package) is None:
                extra = "train" if name == "tensorboard" else "track"
                raise MissingDependency(f"--track {name}: {missing(package, extra)}")


@dataclass
class TrackerState:
    """Where a run is at a tracker. A resumed run goes on in it."""

    where: str = TRACKING_FOLDER
    """A path (absolute, or relative to the run's folder), or a URL without login."""
    run: str | None = None
    """The tracker's name of the run, None if it has not begun there."""
    error: str | None = None
    """The first error since the run began or was resumed; metrics are missing then."""

    @staticmethod
    def load(out: Path, name: str) -> TrackerState:
        """The state in the run's folder; that of a run that has not begun if there is none."""
        with contextlib.suppress(PenstockError, TypeError):
            return TrackerState(**read_json(out / TRACKING_FOLDER / f"{name}.json"))
        return TrackerState()

    def save(self, out: Path, name: str) -> None:
        write_json(out / TRACKING_FOLDER / f"{name}.json", asdict(self))


class Tracking:
    """Tells the trackers of a run; nothing without ``facts``, as on all ranks but the first."""

    def __init__(self, config: TrainConfig, facts: Mapping[str, Any] | None) -> None:
        """``facts`` describe the run, see `results.run_facts`."""
        self._out, self._every, self._step = config.output_dir, config.track_every, 0
        self._outcome: list[dict[str, Any]] | None = None
        names = config.track if facts else ()
        clean = scrubbed(facts)
        self._processes = [_TrackerProcess(self._out, name, clean) for name in names]
        self._sampler: MachineSampler | None = None
        if names:
            self._sampler = MachineSampler(
                self._out, lambda: self._step, lambda metrics: self._tell(self._step, metrics)
            )
            self._sampler.start()

    def step(
        self, step: int, epoch: int, loss: float, rate: float, seconds: Mapping[str, float]
    ) -> None:
        """Tell a step: its loss, its learning rate, and the seconds of it and of its phases."""
        self._step = step
        if self._processes and (step == 1 or step % self._every == 0):
            times = {f"{phase}_s": spent for phase, spent in seconds.items()}
            metrics = {"epoch": epoch, "train_loss_step": loss, "learning_rate": rate}
            self._tell(step, metrics | times)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Tell an epoch that was trained and validated; ``row`` has its numbers."""
        metrics = {name: row[name] for name in row if name not in ("step", "learning_rate")}
        self._tell(row["step"], metrics)

    def _tell(self, step: int, metrics: Mapping[str, Any]) -> None:
        for process in self._processes:
            process.tell(step, metrics)

    def finish(
        self,
        status: str,
        results: Mapping[str, Any],
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> list[dict[str, Any]]:
        """Tell the end of the run, and wait for its trackers; a second call does neither.

        Args:
            status: How the run ended: complete, stopped or failed.
            results: The document `training_results.json`.
            stopped: Whether to wait no longer.
            say: Called with a sentence for each tracker that is waited for.

        Returns:
            The outcome of each tracker.
        """
        if self._outcome is None:
            self._outcome = []  # if it is interrupted here, it is not called again
            if self._sampler is not None:
                self._sampler.stop()
            self._tell(self._step, _totals(results))
            within, stop_waiting = STOP_WITHIN_S, lambda: False
            if status == "complete":
                within, stop_waiting = COMPLETE_WITHIN_S, stopped
            until = time.monotonic() + within
            for process in self._processes:
                process.end(status)
            for process in self._processes:
                process.wait(until, stop_waiting, say)
            self._outcome = [process.outcome() for process in self._processes]
        return self._outcome


class _TrackerProcess:
    """The process of one tracker, as the training sees it. No method raises or waits, but `wait`
    until its moment."""

    def __init__(self, out: Path, name: str, facts: Mapping[str, Any]) -> None:
        self._out, self._name = out, name
        self._fault: str | None = None
        before = TrackerState.load(out, name)
        TrackerState(before.where, before.run).save(out, name)
        self._queue: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
        self._queue.put(facts)
        command = [sys.executable, "-P", "-m", "penstock.training.trackers", str(out), name]
        self._process = subprocess.Popen(
            command,
            env={**QUIET, **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A signal to the run's group must not end it: it still has to take the end.
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._write, name=f"{name} tracker", daemon=True)
        self._thread.start()

    def tell(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue the metrics that are finite numbers, if there is room for them."""
        if self._queue.qsize() >= ROOM:
            self._fault = "it did not take metrics as fast as they came"
            return
        numbers = {
            key: float(value)
            for key, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self._queue.put({"step": step, "metrics": numbers})

    def end(self, status: str) -> None:
        """Queue the end, for which there is always room."""
        self._queue.put({"status": status})

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # the process has ended, which its outcome tells
            message: Mapping[str, Any] = {}
            while "status" not in message:
                message = self._queue.get()
                pipe.write(json.dumps(message).encode() + b"\n")
                pipe.flush()
        with contextlib.suppress(OSError):  # half a line may be left in it
            pipe.close()

    def wait(
        self, until: float, stop_waiting: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        """Wait until a moment, or until the user ends the wait, then kill the process."""
        said = time.monotonic() + 2.0
        while self._process.poll() is None:
            if time.monotonic() > until or stop_waiting():
                self._fault = "it was not done in time"
                self._process.kill()
                self._process.wait()
            elif time.monotonic() > said:
                say(f"waiting for {self._name}; Ctrl-C ends the wait")
                said = math.inf
            time.sleep(LOOK_EVERY_S)
        self._thread.join(1.0)  # it has nobody left to write to

    def outcome(self) -> dict[str, Any]:
        state = TrackerState.load(self._out, self._name)
        error = state.error or self._fault
        if error is None and self._process.returncode:
            error = "its process ended early"
        return {
            "name": self._name,
            "where": state.where,
            "run": state.run,
            "status": "failed" if error else "ok",
            "error": error,
        }


def outcome_of_tracker(outcome: Mapping[str, Any], out: Path) -> str:
    """A sentence about a tracker at the end of a run.

    Args:
        outcome: The tracker's entry in `training_results.json`.
        out: The folder of the run.

    Returns:
        Where the metrics are, or why some are missing there.
    """
    name, where = outcome["name"], outcome["where"]
    where = where if "://" in where else str(out / where)
    if outcome["status"] == "ok":
        command = UPLOADS.get(name, "").format(where) if "://" not in where else ""
        return f"{name}: all is in {where}" + (f"; {command} uploads it" if command else "")
    return (
        f"{name}: metrics are missing in {where} ({outcome['error']}); {out / 'steps'} has all "
        "steps"
    )


UPLOADS = {"comet": "comet upload {}/*.zip", "wandb": "wandb sync {}/offline-run-*"}
"""The commands of the vendors that upload what was kept without a network."""


def _totals(results: Mapping[str, Any]) -> dict[str, Any]:
    totals = {name: results.get(name) for name in ("training_s", "validation_s", "session_s")}
    if results.get("epochs"):
        whole = results["training_s"] + results["validation_s"]  # as the log's own line
        totals["time_per_epoch_s"] = whole / results["epochs"]
    if results.get("best"):
        totals[f"best_{results['judge']}"] = results["best"]["score"]
    return totals
