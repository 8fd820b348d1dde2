"""The events that a tracked training writes, and the processes that send them to its trackers.

    train ──▶ OUT/events.jsonl ──▶ penstock track sync OUT --to mlflow --follow ──▶ a server
                   (`events`)  ──▶ penstock track sync OUT --to comet  --follow ──▶ OUT/track/

The training only appends to a file. Events that a tracker has not taken when the run ends are
counted, and ``penstock track sync OUT`` sends them later; see `follow`.
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
"""The seconds that a stopped run waits for its trackers; they continue when it resumes."""


class Untracked:
    """A run without trackers."""

    def step(
        self, step: int, epoch: int, loss: float, rate: float, seconds: Mapping[str, float]
    ) -> None:
        """Write the event of a step.

        Args:
            step: The number of steps done.
            epoch: The epoch of the step.
            loss: The loss of the step.
            rate: The learning rate of the step.
            seconds: The seconds of the step and of its phases, by name.
        """

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Write the event of an epoch that was trained and validated; ``row`` has its numbers."""

    def finish(
        self,
        status: str,
        results: Mapping[str, Any],
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> list[dict[str, Any]]:
        """Write the event of the run's end, and wait for its trackers.

        Args:
            status: How the run ended: complete, stopped or failed.
            results: The document `training_results.json`.
            stopped: Whether to stop waiting.
            say: Called with a sentence for each tracker that is waited for.

        Returns:
            The outcome of each tracker.
        """
        return []


class Tracking(Untracked):
    """Writes the events of rank 0, and starts a process for each tracker.

    The constructor raises `UsageError` if the file of events cannot be written. Later errors of
    tracking do not end the run.
    """

    def __init__(self, config: TrainConfig, step: int, facts: Mapping[str, Any]) -> None:
        """``step`` is the number of steps done. ``facts`` are project, name, tags, parameters and
        environment, see `run_facts`."""
        out = config.output_dir
        self._out, self._every, self._step = out, config.track_every, step
        self._trackers = config.track
        self._outcome: list[dict[str, Any]] | None = None
        self._log = EventLog(out / EVENTS)
        earlier = None
        with contextlib.suppress(OSError):  # `begin` raises what is wrong with the file
            earlier = next((event.get("run") for _, event in begins_of(out)), None)
        run = {"run": earlier or uuid.uuid4().hex, "trackers": list(config.track)}
        if config.track_dir is not None:
            run["track_dir"] = str(config.track_dir.expanduser().resolve())
        self._log.begin(event="begin", step=step, **scrubbed({**run, **facts}))
        self._followers = dict[str, subprocess.Popen[bytes]]()
        for name in config.track:
            with contextlib.suppress(OSError):  # without a process the file stays
                self._followers[name] = _follower(out, name)
        rows = out / TRACKING_FOLDER / METRICS
        self._sampler = _TellingSampler(rows, SYSTEM_EVERY_S, dict, {})
        self._sampler.tell = lambda row: self._log.tell(
            "system", self._step, metrics=system_metrics(row)
        )
        with contextlib.suppress(OSError, PenstockError):  # then without metrics of the machine
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
        self._outcome = []  # if it is interrupted here, it is not called again
        with contextlib.suppress(OSError):
            self._sampler.stop()
        self._log.tell("end", self._step, status=status, metrics=_totals(results))
        self._log.close()
        for follower in self._followers.values():
            assert follower.stdin is not None
            with contextlib.suppress(OSError):  # it has ended
                follower.stdin.write(b"\n")  # worker processes hold the pipe open, too
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
    """Wait for the process of a tracker. End it if it makes no progress. After ``until``, end it as
    well if the run was not complete or the user does not want to wait."""
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
    """A sampler that also calls ``tell`` with each row."""

    tell: Callable[[TelemetryRow], None]

    def sample(self) -> TelemetryRow:
        row = super().sample()
        self.tell(row)
        return row


def kind_of_run(workload: str, world_size: int, device: str) -> tuple[str, str]:
    """A word for a workload, and one for its devices, such as ``spiral`` and ``4gpu``."""
    kind = "gpu" if device == "cuda" else device
    return re.sub(r"\W+", "_", workload.rpartition(":")[2]), f"{world_size}{kind}"


def run_facts(
    workload: str, config: TrainConfig, world_size: int, device: str, labels: Mapping[str, Any]
) -> dict[str, Any]:
    """The project, name, tags and parameters of a run, without knobs that do not affect it.

    ``labels`` are its name and its tags. A tracker gets the words ``tags`` beside the user's own.
    """
    settings = config.model_dump(mode="json", exclude_none=True)
    others = frozenset().union(*TRAIN_KNOBS.values()) - TRAIN_KNOBS.get(workload, frozenset())
    silent = _SILENT if workload not in TRAIN_KNOBS else _SILENT | others
    return {
        "project": config.project,
        "name": labels["name"],
        "tags": [*kind_of_run(workload, world_size, device)],
        "user_tags": labels["tags"],
        "parameters": {
            "workload": workload,
            "world_size": world_size,
            **{name: value for name, value in settings.items() if name not in silent},
        },
    }


_SILENT = frozenset(
    "name tag output_dir resume overwrite track track_every track_dir project profile "
    "profile_steps".split()
)
"""The knobs that change neither the trained weights nor the speed."""


def system_metrics(row: TelemetryRow) -> dict[str, Any]:
    """A row of telemetry as metrics: of rank 0's process tree, and of its node's disks, network and
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
    """Start the process that sends events to a tracker. It ends when its standard input has data or
    is closed, so it always notices the end of the run. It has its own session, so that a signal to
    the run's process group does not end it: it still has to send."""
    where = str(out.resolve())
    command = [sys.executable, "-m", "penstock", "track", "sync", where, "--to", name, "--follow"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
