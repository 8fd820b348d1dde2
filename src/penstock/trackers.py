"""Comet, MLflow and TensorBoard: what each makes of the events of a run, offline first.

    comet         the experiment at comet.com, with a key and a network; else OUT/track/comet/*.zip
    mlflow        the server of MLFLOW_TRACKING_URI; else OUT/mlflow.db
    tensorboard   OUT/track/tensorboard

All of them run in a process that does nothing else (`tracking`), so what they import, patch or wait
for is no part of a training. They read keys from their own environment variables. Whatever is told
of a tracker, where it is or why it failed, goes through `keys.scrub` first.

They hear of rank 0: its steps, the scores of all ranks, and as metrics of the system those of its
process tree and of its node, GPUs included. Of the others, OUT/steps/ and the results tell.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from .errors import MissingDependency, PenstockError, missing, require
from .events import Event
from .files import replacing
from .keys import learn, scrub

Keep = Callable[[str], None]

FOLDER = "track"
"""In a run's folder: what trackers keep there, and how far each has come."""


class Tracker(Protocol):
    """Takes the events of one run. Every method may raise anything."""

    package: str
    where: str
    """For people: a path within the run's folder, or a URL without its login."""
    durable: bool
    """Whether what was sent is there at once, and not only when the tracker was closed."""

    def __init__(self, out: Path, before: Sequence[str] = ()) -> None:
        """``before``: every ``where`` at which the run has begun."""
        ...

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        """Begin a run, or go on with one that began here before; its name at the tracker.

        ``keep`` hears that name as soon as there is one: what fails after it goes on with it.
        """
        ...

    def send(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


def check(trackers: Sequence[str]) -> None:
    """Refuse what is not installed, without importing what is."""
    for name in trackers:
        package = TRACKERS[name].package
        if find_spec(package) is None:
            raise MissingDependency(f"--track {name}: {missing(package, 'track')}")


# --- settings as texts -------------------------------------------------------------------------


def flat(value: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as texts by dotted names; what is not known is left out.

    >>> flat({"launch": {"job_id": "7", "hosts": ["a", "b"]}, "git": None})
    {'launch.job_id': '7', 'launch.hosts': 'a b'}
    """
    told: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            told |= flat(item, f"{before}{key}.")
        elif isinstance(item, list | tuple):
            told[before + key] = " ".join(map(str, item))
        elif item is not None:
            told[before + key] = str(item)
    return told


# --- the trackers ------------------------------------------------------------------------------


class TensorBoard:
    """Files of events, as TensorBoard reads them; torch is not needed."""

    package = "tensorboard"
    durable = True

    def __init__(self, out: Path, before: Sequence[str] = ()) -> None:
        self.where = f"{FOLDER}/tensorboard"
        self._folder = out / self.where

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        require("tensorboard", "track")
        from tensorboard.plugins.hparams import summary_v2 as hparams
        from tensorboard.plugins.text import summary_v2 as text
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder))
        if run is None:
            environment = flat(begin["environment"])
            table = "\n".join(f"    {name}: {value}" for name, value in environment.items())
            for summary in (
                hparams.hparams_pb(flat(begin["parameters"]), trial_id=begin["name"]),
                text.text_pb("environment", table),
            ):
                self._add(begin, summary)
        return str(begin["name"])

    def send(self, events: Sequence[Event]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for event in events:
            values = event.get("metrics", {}).items()
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in values]
            if values:
                self._add(event, Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Event, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Entry

        self._writer.add_event(Entry(wall_time=event["time"], step=event["step"], summary=summary))


class MLflow:
    """A server, or a database in the run's folder."""

    package = "mlflow"
    durable = True
    MOST_METRICS, MOST_PARAMETERS, MOST_TEXT = 1000, 100, 500
    """Of a request; the last in characters, as its oldest servers take them."""

    def __init__(self, out: Path, before: Sequence[str] = ()) -> None:
        given = os.environ.get("MLFLOW_TRACKING_URI")
        self._out = out.resolve()
        self._uri = given or f"sqlite:///{self._out / 'mlflow.db'}"
        self.where = "mlflow.db"
        if given:
            parts = urlsplit(given)
            self.where = scrub(parts._replace(query="", fragment="").geturl())
        self._last: Event | None = None

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        for name, value in _MLFLOW.items():
            os.environ.setdefault(name, value)
        require("mlflow", "track")
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        database = self._out / "mlflow.db"
        if self.where == database.name and not database.exists():
            # Whole or not at all: killed while it makes its tables, MLflow cannot go on with them.
            with replacing(database) as draft:
                MlflowClient(f"sqlite:///{draft}").search_experiments()
        self._client = client = MlflowClient(self._uri)
        if run is None:
            experiment = client.get_experiment_by_name(begin["project"])
            number = experiment.experiment_id if experiment else self._experiment(begin["project"])
            made = client.create_run(number, round(begin["time"] * 1000), run_name=begin["name"])
            run = str(made.info.run_id)
            keep(run)
        self._run = run
        # Of a run that is known, too: it may have failed here when it was made. The same again
        # changes nothing.
        tags = flat(begin["environment"]) | {"tags": " ".join(begin["tags"]), "run": begin["run"]}
        texts = {"params": (Param, flat(begin["parameters"])), "tags": (RunTag, tags)}
        for what, (kind, pairs) in texts.items():
            entries = [kind(name, value[: self.MOST_TEXT]) for name, value in pairs.items()]
            for part in _parts(entries, self.MOST_PARAMETERS):
                client.log_batch(self._run, **{what: part})
        return self._run

    def _experiment(self, project: str) -> str:
        """In a database of ours, artifacts lie beside it, and not where somebody happens to be."""
        ours = self.where == "mlflow.db"
        artifacts = (self._out / "mlruns").as_uri() if ours else None
        return str(self._client.create_experiment(project, artifact_location=artifacts))

    def send(self, events: Sequence[Event]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for event in events:
            moment = round(event["time"] * 1000)
            for name, value in event.get("metrics", {}).items():
                metrics.append(Metric(name, value, moment, event["step"]))
        for part in _parts(metrics, self.MOST_METRICS):
            self._client.log_batch(self._run, metrics=part)
        for event in events:
            self._last = event
            if event["event"] == "begin":
                self._client.update_run(self._run, status="RUNNING")
            elif event["event"] == "end":
                self._end({"complete": "FINISHED", "stopped": "KILLED"}.get(event["status"]))

    def close(self) -> None:
        if self._last is not None and self._last["event"] != "end":  # it was cut short
            self._end(None)

    def _end(self, status: str | None) -> None:
        assert self._last is not None
        self._client.set_terminated(self._run, status or "FAILED", round(self._last["time"] * 1000))


_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""It sends nothing to its makers, prints nothing, and gives up on a server soon: we try again."""


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))


class Comet:
    """The experiment at comet.com where there is a key and a network, else an archive of it.

    A run stays what it began as: one that is live goes on live, or waits, and one that is an
    archive goes on as one. Only so is it one experiment, with its parts in order.

    The time of a metric at Comet is that of its sending: its `log_metric` knows no other. Live that
    is a second late; the true ones stand in OUT/events.jsonl.
    """

    package = "comet_ml"

    def __init__(self, out: Path, before: Sequence[str] = ()) -> None:
        for name, value in _COMET.items():
            os.environ.setdefault(name, value)
        self._comet = require("comet_ml", "track")
        self._folder = out.resolve() / FOLDER / "comet"
        self._key, address = _comet_account()
        there = scrub(origin(address))
        archived = any(self._folder.rglob("*.zip"))
        reached = bool(self._key) and not archived and _answers(address)
        self.durable = reached or there in before
        self.where = there if self.durable else f"{FOLDER}/comet"
        self._address = address
        self._experiment: Any = None

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        comet, key = self._comet, str(begin["run"])
        if self.durable and not self._key:
            raise PenstockError("the run is there, and there is no key of Comet's to go on with it")
        if self.durable and not _answers(self._address):  # Comet itself would wait for minutes
            raise PenstockError("it does not answer")
        self._forget()
        silent = (
            "log_code log_graph auto_param_logging auto_metric_logging parse_args log_env_details "
            "auto_output_logging log_git_metadata log_git_patch display_summary_level".split()
        )
        options = {**dict.fromkeys(silent, False), "project_name": begin["project"]}
        if self.durable:
            kind = comet.Experiment if run is None else comet.ExistingExperiment
            # For what Comet would keep of a connection that breaks: events.jsonl has it.
            self._spare = tempfile.TemporaryDirectory(prefix="penstock-")
            options["offline_directory"] = self._spare.name
        else:
            kind = comet.OfflineExperiment if run is None else comet.ExistingOfflineExperiment
            self._folder.mkdir(parents=True, exist_ok=True)
            options["offline_directory"] = str(self._folder)
        self._experiment = experiment = kind(experiment_key=key, **options)
        if not experiment.alive:
            raise PenstockError("it began no experiment")
        if self.durable:
            keep(key)
        if self.durable or run is None:  # of one that is known, too: it may have failed here
            experiment.set_name(begin["name"])
            experiment.add_tags(begin["tags"])
            experiment.log_parameters(flat(begin["parameters"]))
            experiment.log_others(flat(begin["environment"]))
        self._times = [begin["time"]]
        return key

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            self._times.append(event["time"])
            for name, value in event.get("metrics", {}).items():
                self._experiment.log_metric(
                    name, value, step=event["step"], epoch=event.get("epoch")
                )
        # Of a server that has gone, flush says nothing.
        if self.durable and not (self._experiment.flush() and _answers(self._address)):
            raise PenstockError("it did not take the metrics in time")

    def close(self) -> None:
        if not self.durable:
            lasted = self._times[-1] - self._times[0]
            self._experiment.start_time = round((time.time() - lasted) * 1000)
        self._experiment.end()
        if self.durable:
            self._spare.cleanup()
        elif not any(map(_is_whole, self._folder.glob("*.zip"))):
            raise PenstockError(f"it left no archive in {self.where}")

    def _forget(self) -> None:
        """An experiment that failed would leave half an archive as it ends."""
        if self._experiment is not None:
            self._experiment.alive = False
            if self.durable:
                self._spare.cleanup()


_COMET = {
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_DISABLE_ANNOUNCEMENT": "true",
    "COMET_ERROR_TRACKING_ENABLE": "false",
    "COMET_INTERNAL_REPORTING": "false",
    "COMET_LOGGING_CONSOLE": "CRITICAL",
    "COMET_TIMEOUT_CLEANING": "60",
}
"""It patches no other library, reports nothing of itself to its makers, prints nothing, and gives
up on a server soon: we try again."""
_REACHED_WITHIN_S = 10.0


def _comet_account() -> tuple[str | None, str]:
    """A key and the address that it is for, as Comet's own client finds them: from variables, from
    its files or from the key; what Comet says of the key afterwards is told without it."""
    from comet_ml import config as comet

    settings = comet.get_config()
    learn(settings["comet.api_key"])
    key: str | None = comet.get_api_key(None, settings)
    learn(key)
    return key, str(comet.get_comet_url_override(comet.get_config()))


def origin(address: str) -> str:
    """A URL without its path.

    >>> origin("https://www.comet.com/clientlib/")
    'https://www.comet.com'
    """
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"


def _answers(address: str) -> bool:
    """By the way that Comet's client takes, through a proxy where there is one. Somebody whose
    certificate is not trusted answers: what is wrong with it, Comet says."""
    requests = require("requests", "track")
    try:
        requests.head(address, timeout=_REACHED_WITHIN_S, allow_redirects=False).close()
    except requests.exceptions.SSLError:
        return True
    except requests.RequestException:
        return False
    return True


def _is_whole(archive: Path) -> bool:
    """Comet leaves an empty archive where it only tries whether it may write one."""
    return zipfile.is_zipfile(archive) and "experiment.json" in zipfile.ZipFile(archive).namelist()


def upload(out: Path) -> list[str]:
    """Send the archives of a run to comet.com, as ``comet upload`` does; their names. Without a key
    there is nothing that could be done."""
    folder = out / FOLDER / "comet"
    archives = [path for path in folder.glob("*.zip") if _is_whole(path)]
    archives.sort(key=lambda path: path.stat().st_mtime)  # a run's first part comes first
    require("comet_ml", "track")
    key, address = _comet_account() if archives else (None, "")
    if not key:
        return []
    if not _answers(address):
        host = urlsplit(address).hostname
        raise PenstockError(f"comet: {host} does not answer; {folder} holds the run")
    command = [sys.executable, "-m", "comet_ml.scripts.comet_upload", *map(str, archives)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COMET_LOGGING_CONSOLE": "INFO"}
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        why = scrub(lines[0].partition("ERROR:")[2].strip()) if lines else "it does not say why"
        raise PenstockError(f"comet upload of {folder} failed: {why}")
    (folder / "uploaded").mkdir(exist_ok=True)
    return [path.rename(folder / "uploaded" / path.name).name for path in archives]


TRACKERS: dict[str, type[Tracker]] = {"comet": Comet, "mlflow": MLflow, "tensorboard": TensorBoard}
