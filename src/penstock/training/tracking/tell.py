"""What a training tells those who watch it, and the processes that carry it to its trackers.

    train ──▶ OUT/events.jsonl ──▶ penstock track sync OUT --to mlflow --follow ──▶ a server
                   (`events`)  ──▶ penstock track sync OUT --to comet  --follow ──▶ OUT/track/

For the training a tracker is a file that grows. What a tracker has not taken when the run ends is
counted, and ``penstock track sync OUT`` sends it later; see `follow`.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base import TRAIN_KNOBS, PenstockError, TrainConfig, describe, scrub, scrubbed
from ...instruments import Sampler, TelemetryRow, set_aside
from .events import EVENTS, EventLog, begins_of, read_events
from .follow import LOOK_EVERY_S, Stalled, TrackerProgress
from .protocol import TRACKING_FOLDER

METRICS = "metrics.jsonl"
SYSTEM_EVERY_S = 10.0
STOP_WITHIN_S = 5.0
"""How long one waits that a signal stops: it will go on, and its trackers with it."""


class Untracked:
    """Nobody watches."""

    def step(
        self, step: int, epoch: int, loss: float, rate: float, seconds: Mapping[str, float]
    ) -> None:
        """A step was taken, at a learning rate; seconds of it and of its phases."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch and its validation have ended."""

    def finish(
        self,
        status: str,
        results: Mapping[str, Any],
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> list[dict[str, Any]]:
        """The run has ended; what became of each tracker.

        ``stopped`` says whether to wait no longer for those that are behind, and ``say`` is told
        that there are such.
        """
        return []


class Tracking(Untracked):
    """Of rank 0: tells what happens, and keeps a process for each tracker that is to hear it.

    It may refuse a run that has not begun, one whose file of events cannot be written. From then on
    nothing that is wrong with it, or with a file of it, is the run's.
    """

    def __init__(self, config: TrainConfig, step: int, facts: Mapping[str, Any]) -> None:
        """``run_facts``: project, name, tags, parameters, environment."""
        out = config.output_dir
        self._out, self._every, self._step = out, config.track_every, step
        self._trackers = config.track
        self._outcome: list[dict[str, Any]] | None = None
        self._log = EventLog(out / EVENTS)
        earlier = None
        with contextlib.suppress(OSError):  # `begin` says what is wrong with the file
            earlier = next((event.get("run") for _, event in begins_of(out)), None)
        run = {"run": earlier or uuid.uuid4().hex, "trackers": list(config.track)}
        self._log.begin(event="begin", step=step, **scrubbed({**run, **facts}))
        self._followers = dict[str, subprocess.Popen[bytes]]()
        for name in config.track:
            with contextlib.suppress(OSError):  # no process can be had; the file stays
                self._followers[name] = _follower(out, name)
        rows = out / TRACKING_FOLDER / METRICS
        self._sampler = _TellingSampler(rows, SYSTEM_EVERY_S, dict, {})
        self._sampler.tell = lambda row: self._log.tell(
            "system", self._step, metrics=system_metrics(row)
        )
        with contextlib.suppress(OSError, PenstockError):  # a run without metrics of its machine
            set_aside(rows)
            self._sampler.start()

    def step(
        self, step: int, epoch: int, loss: float, rate: float, seconds: Mapping[str, float]
    ) -> None:
        self._step = step
        if step == 1 or step % self._every == 0:
            times = {f"{phase}_s": spent for phase, spent in seconds.items()}
            metrics = {"train_loss_step": loss, "learning_rate": rate, **times}
            self._log.tell("step", step, epoch=epoch, metrics=metrics)

    def epoch(self, row: Mapping[str, Any]) -> None:
        metrics = {k: v for k, v in row.items() if k not in ("epoch", "step", "learning_rate")}
        self._log.tell("epoch", row["step"], epoch=row["epoch"], metrics=metrics)

    def finish(
        self,
        status: str,
        results: Mapping[str, Any],
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> list[dict[str, Any]]:
        if self._outcome is not None:
            return self._outcome
        self._outcome = []  # one that is interrupted here is not asked again
        with contextlib.suppress(OSError):
            self._sampler.stop()
        self._log.tell("end", self._step, status=status, metrics=_totals(results))
        self._log.close()
        for follower in self._followers.values():
            assert follower.stdin is not None
            with contextlib.suppress(OSError):  # it died before
                follower.stdin.write(b"\n")  # processes that make batches hold the pipe open
                follower.stdin.close()
        until = time.monotonic() + STOP_WITHIN_S
        for name, follower in self._followers.items():
            stalled = Stalled(follower.pid, self._out / TRACKING_FOLDER / f"{name}.json")
            _wait_for(follower, name, until, status == "complete", stalled, stopped, say)
        self._outcome = [self._outcome_of(name) for name in self._trackers]
        return self._outcome

    def _outcome_of(self, name: str) -> dict[str, Any]:
        outcome: dict[str, Any] = {
            "name": name,
            "where": TRACKING_FOLDER,
            "run": None,
            "status": "failed",
        }
        try:
            places = TrackerProgress.load(self._out, name)
            last = places[-1] if places else TrackerProgress(TRACKING_FOLDER)
            missing = sum(1 for place, _ in read_events(self._out / EVENTS) if place >= last.sent)
        except (OSError, PenstockError) as error:
            return {**outcome, "dropped": None, "error": scrub(describe(error))}
        dropped, fault = missing + self._log.lost, last.error or self._log.fault
        status = "ok" if not dropped else "failed" if fault else "behind"
        outcome |= {"where": last.where, "run": last.run, "status": status}
        return {**outcome, "dropped": dropped, "error": fault}


def _wait_for(
    follower: subprocess.Popen[bytes],
    name: str,
    until: float,
    complete: bool,
    stalled: Callable[[], bool],
    stopped: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Wait until a follower has ended, and end it where it gets no further; after ``until`` also
    where the run was not complete, or the user wants to go."""
    said = not complete
    while follower.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            follower.wait(LOOK_EVERY_S)
        late = time.monotonic() > until
        if late and not said:
            say(f"{name} is behind; Ctrl-C leaves what it lacks to penstock track sync")
            said = True
        if stalled() or (late and (not complete or stopped())):
            follower.kill()


class _TellingSampler(Sampler):
    """A sampler that tells each row when it is written."""

    tell: Callable[[TelemetryRow], None]

    def sample(self) -> TelemetryRow:
        row = super().sample()
        self.tell(row)
        return row


def run_facts(workload: str, config: TrainConfig, world_size: int, device: str) -> dict[str, Any]:
    """How a run is called and what it was told, less what says nothing of it."""
    kind = "gpu" if device == "cuda" else device
    label = re.sub(r"\W+", "_", workload.rpartition(":")[2])
    settings = config.model_dump(mode="json", exclude_none=True)
    others = frozenset().union(*TRAIN_KNOBS.values()) - TRAIN_KNOBS.get(workload, frozenset())
    silent = _SILENT if workload not in TRAIN_KNOBS else _SILENT | others
    return {
        "project": config.project,
        "name": config.experiment_name or f"{label}_{world_size}{kind}",
        "tags": [label, f"{world_size}{kind}"],
        "parameters": {
            "workload": workload,
            "world_size": world_size,
            **{name: value for name, value in settings.items() if name not in silent},
        },
    }


_SILENT = frozenset(
    "output_dir resume overwrite track track_every project experiment_name profile "
    "profile_steps".split()
)
"""Knobs that change nothing of what is learned or how fast."""


def system_metrics(row: TelemetryRow) -> dict[str, Any]:
    """A row of `telemetry` as metrics: rank 0's process tree, and its node's disks, network and
    GPUs."""
    names = [name for name in row if name.endswith(("_percent", "_bytes", "_per_s"))]
    metrics = {f"system/{name}": row[name] for name in names}
    for gpu in row["gpus"] or ():
        for name in ("util_percent", "memory_bytes"):
            metrics[f"system/gpu{gpu['index']}_{name}"] = gpu[name]
    return metrics


def _totals(results: Mapping[str, Any]) -> dict[str, Any]:
    totals = {name: results.get(name) for name in ("training_s", "validation_s", "session_s")}
    if results.get("epochs"):
        totals["time_per_epoch_s"] = results["training_s"] / results["epochs"]
    if results.get("best"):
        totals[f"best_{results['judge']}"] = results["best"]["score"]
    return totals


def _follower(out: Path, name: str) -> subprocess.Popen[bytes]:
    """It ends when its standard input has something to say or ends, and so when the run does,
    however that was. What kills the group of the run leaves it alone: it has still to send."""
    where = str(out.resolve())
    command = [sys.executable, "-m", "penstock", "track", "sync", where, "--to", name, "--follow"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
