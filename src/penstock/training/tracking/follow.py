"""A training that is watched: it tells, and processes beside it carry that to its trackers.

    train ──▶ OUT/events.jsonl ──▶ penstock track sync OUT --to mlflow --follow ──▶ a server
                   (`events`)  ──▶ penstock track sync OUT --to comet  --follow ──▶ OUT/track/

For the training a tracker is a file that grows. A tracker that fails is tried again, later and
later, and told of once. What it has not taken when the run ends is counted, and ``penstock track
sync OUT`` sends it: the same code, with nobody to wait for. How far it came stands in
OUT/track/NAME.json, so nothing is sent twice, and a run that goes on goes on there too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from ...base import (
    TRAIN_KNOBS,
    PenstockError,
    TrainConfig,
    UsageError,
    describe,
    lock_file,
    replacing,
    scrub,
    scrubbed,
)
from ...instruments import Sampler, TelemetryRow, set_aside
from .events import EVENTS, Event, EventLog, Taken, read_events, read_from
from .protocol import TRACKING_FOLDER
from .trackers import TRACKERS, check_trackers

METRICS = "metrics.jsonl"
SYSTEM_EVERY_S = 10.0
LOOK_EVERY_S = 1.0
TRY_AGAIN_WITHIN_S = 60.0
IDLE_WITHIN_S = 60.0
"""How long a run that is complete waits for a tracker that gets no further. What gets on may take
longer, on a machine that is busy or to a server that is slow."""
STOP_WITHIN_S = 5.0
"""How long one waits that a signal stops: it will go on, and its trackers with it."""
LEAST_WORK_S = 0.1
"""Processor time. A process that waits in vain takes less of it meanwhile, and one that imports a
library more."""
_MOST_DOUBLINGS = 10
"""Of the wait for a tracker that fails. A run may go on for weeks without it."""


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
        self._told: list[dict[str, Any]] | None = None
        self._log = EventLog(out / EVENTS)
        known = None
        with contextlib.suppress(OSError):  # `begin` says what is wrong with the file
            known = next((event.get("run") for _, event in _begins(out)), None)
        run = {"run": known or uuid.uuid4().hex, "trackers": list(config.track)}
        self._log.begin(event="begin", step=step, **scrubbed({**run, **facts}))
        self._followers = dict[str, subprocess.Popen[bytes]]()
        for name in config.track:
            with contextlib.suppress(OSError):  # no process can be had; the file stays
                self._followers[name] = _follower(out, name)
        rows = out / TRACKING_FOLDER / METRICS
        self._sampler = _Telling(rows, SYSTEM_EVERY_S, dict, {})
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
        told = {k: v for k, v in row.items() if k not in ("epoch", "step", "learning_rate")}
        self._log.tell("epoch", row["step"], epoch=row["epoch"], metrics=told)

    def finish(
        self,
        status: str,
        results: Mapping[str, Any],
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> list[dict[str, Any]]:
        if self._told is not None:
            return self._told
        self._told = []  # one that is interrupted here is not asked again
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
            waits = status == "complete"
            while follower.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    follower.wait(LOOK_EVERY_S)
                late = time.monotonic() > until
                if late and waits:
                    say(f"{name} is behind; Ctrl-C leaves what it lacks to penstock track sync")
                    waits = False
                if stalled() or (late and (status != "complete" or stopped())):
                    follower.kill()
        self._told = [self._became(name) for name in self._trackers]
        return self._told

    def _became(self, name: str) -> dict[str, Any]:
        told: dict[str, Any] = {
            "name": name,
            "where": TRACKING_FOLDER,
            "run": None,
            "status": "failed",
        }
        try:
            deliveries = Delivery.load(self._out, name)
            last = deliveries[-1] if deliveries else Delivery(TRACKING_FOLDER)
            missing = sum(1 for place, _ in read_events(self._out / EVENTS) if place >= last.sent)
        except (OSError, PenstockError) as error:
            return {**told, "dropped": None, "error": scrub(describe(error))}
        dropped = missing + self._log.lost
        status = "ok" if not dropped else "failed" if last.error or self._log.fault else "behind"
        told |= {"where": last.where, "run": last.run, "status": status}
        return {**told, "dropped": dropped, "error": last.error or self._log.fault}


class Stalled:
    """Whether a follower has got no further for `IDLE_WITHIN_S`: has neither worked nor had
    anything taken."""

    def __init__(self, pid: int, delivery: Path) -> None:
        self._delivery = delivery
        self._worked, self._saved, self._since = 0.0, 0, time.monotonic()
        self._process = None
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid)

    def __call__(self) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            times = self._process.cpu_times() if self._process else None
            worked = times.user + times.system if times else 0.0
            saved = self._delivery.stat().st_mtime_ns if self._delivery.exists() else 0
            if worked >= self._worked + LEAST_WORK_S or saved != self._saved:
                self._worked, self._saved, self._since = worked, saved, time.monotonic()
        return time.monotonic() - self._since > IDLE_WITHIN_S


class _Telling(Sampler):
    """A sampler that tells each row when it is written."""

    tell: Callable[[TelemetryRow], None]

    def sample(self) -> TelemetryRow:
        row = super().sample()
        self.tell(row)
        return row


def outcome_of_tracker(told: Mapping[str, Any], out: Path) -> str:
    """What became of a tracker, in a sentence."""
    name, where = told["name"], told["where"]
    where = where if "://" in where else str(out / where)
    if told["status"] == "ok":
        later = f"; with a key and a network, penstock track sync {out} uploads it"
        return f"{name}: all is in {where}" + later * (name == "comet" and "://" not in where)
    why = f" ({told['error']})" if told["error"] else ""
    if told["dropped"] is None:
        return f"{name}: nobody knows what it has taken{why}"
    return (
        f"{name}: {told['dropped']} events are missing in {where}{why}; "
        f"penstock track sync {out} --to {name} sends them"
    )


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
    told = {f"system/{name}": row[name] for name in names}
    for gpu in row["gpus"] or ():
        for name in ("util_percent", "memory_bytes"):
            told[f"system/gpu{gpu['index']}_{name}"] = gpu[name]
    return told


def _totals(results: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: results.get(name) for name in ("training_s", "validation_s", "session_s")}
    if results.get("epochs"):
        told["time_per_epoch_s"] = results["training_s"] / results["epochs"]
    if results.get("best"):
        told[f"best_{results['judge']}"] = results["best"]["score"]
    return told


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


@dataclass
class Delivery:
    """How far a tracker has come with the events of a run."""

    where: str
    run: str | None = None
    sent: int = 0
    """The place in the file of events before which it has all."""
    error: str | None = None
    """Why it has no more."""

    @staticmethod
    def load(out: Path, name: str) -> list[Delivery]:
        """To every place where this tracker of a run ever was, the newest last."""
        path = out / TRACKING_FOLDER / f"{name}.json"
        try:
            found = [Delivery(**told) for told in json.loads(path.read_text())]
            if not all(isinstance(each.sent, int) for each in found):
                raise ValueError("it does not say how far its tracker has come")
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is none of ours: {describe(error)}") from error
        return found

    def save(self, out: Path, name: str) -> None:
        others = [other for other in Delivery.load(out, name) if other.where != self.where]
        path = out / TRACKING_FOLDER / f"{name}.json"
        told = json.dumps([asdict(each) for each in (*others, self)], indent=1)
        with replacing(path) as draft:
            draft.write_text(told + "\n")


def deliver_events(
    out: Path,
    name: str,
    goes_on: Callable[[float], bool] = lambda seconds: False,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Delivery:
    """Send a tracker the events that it lacks; where it failed, `Delivery.error` says why.

    ``goes_on(seconds)`` waits at most so long, and says whether more events may come. While they
    may, a failure is told once and tried again. Raises `UsageError` where there is no run, and
    where another process sends its events.
    """
    begins = list(_begins(out))
    if not begins:
        raise UsageError(f"{out} holds no {EVENTS} of a run; train with --track {name}")
    check_trackers([name])
    (out / TRACKING_FOLDER).mkdir(exist_ok=True)
    with (
        (out / TRACKING_FOLDER / f"{name}.lock").open("a") as lock,
        (out / EVENTS).open("rb") as known,
    ):
        while not lock_file(lock):
            if not goes_on(LOOK_EVERY_S):
                raise UsageError(f"another process sends the events of {out} to {name} now")
        return _Sending(out, name, known, begins).run(goes_on, tell)


class _Sending:
    """What `deliver_events` does, when nobody else does it."""

    def __init__(
        self, out: Path, name: str, known: IO[bytes], begins: list[tuple[int, Event]]
    ) -> None:
        self._out, self._name, self._known, self._begin = out, name, known, begins[0][1]
        deliveries = Delivery.load(out, name)
        self._tracker = TRACKERS[name](out, [each.where for each in deliveries if each.run])
        where = self._tracker.where
        own = [each for each in deliveries if each.where == where]
        self._delivery = own[0] if own else Delivery(where)
        self._taken = Taken([(place, event["step"]) for place, event in begins])
        self._run, self._place = "", self._delivery.sent
        self._save()

    def run(self, goes_on: Callable[[float], bool], tell: Callable[[str], None]) -> Delivery:
        delivery, wait, failures = self._delivery, 0.0, 0
        while True:
            going = goes_on(wait)  # asked first, so that all that was told before the end is read
            found, place = read_from(self._out / EVENTS, self._place)
            if not (self._run or found or going):
                return delivery  # it had all
            try:
                over = self._send(found, place, going)
                failures = 0
            except Exception as error:  # theirs have no type in common
                delivery.error = scrub(f"{type(error).__name__}: {describe(error)}")
                if not failures:
                    tell(f"{self._name} at {delivery.where}: {delivery.error}")
                self._run, self._place = "", delivery.sent
                failures, over = failures + 1, not going
            if found or over or failures:
                self._save()
            if over:
                return delivery
            longer = 2 ** min(failures, _MOST_DOUBLINGS)
            wait = min(LOOK_EVERY_S * longer, TRY_AGAIN_WITHIN_S)
            if not going or (found and not failures):
                wait = 0.0

    def _send(self, found: list[tuple[int, Event]], place: int, going: bool) -> bool:
        """Whether that was all."""
        tracker, delivery = self._tracker, self._delivery
        if not self._run:
            self._run = tracker.open(self._begin, delivery.run, self._keep)
            delivery.run = self._run if tracker.durable else delivery.run
        tracker.send([event for at, event in found if not self._taken.again(at, event)])
        self._place = place
        over = not found and not going
        if over:
            tracker.close()
        if over or tracker.durable:
            delivery.run, delivery.sent = self._run, place
        delivery.error = None
        return over

    def _keep(self, number: str) -> None:
        self._delivery.run = number
        self._save()

    def _save(self) -> None:
        """Unless another run has taken the place of this one: it is told of from its beginning."""
        if not os.path.samestat(os.fstat(self._known.fileno()), (self._out / EVENTS).stat()):
            raise PenstockError(f"{self._out / EVENTS} is of another run now")
        self._delivery.save(self._out, self._name)


def trackers_of(out: Path) -> list[str]:
    """The trackers that a run was started with."""
    names = [name for _, event in _begins(out) for name in event.get("trackers", ())]
    if not names:
        raise UsageError(f"{out} holds no {EVENTS} of a run; train with --track")
    return list(dict.fromkeys(names))


def _begins(out: Path) -> Iterator[tuple[int, Event]]:
    with contextlib.suppress(FileNotFoundError):
        yield from (
            (at, event) for at, event in read_events(out / EVENTS) if event["event"] == "begin"
        )
