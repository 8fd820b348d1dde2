"""The events of a run as an MLflow run.

Without a server all runs of a user go into one database, so that ``mlflow ui`` shows them side by
side. Several runs may write to it at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ...base import lock_file, replacing, require, scrub
from .events import Event
from .protocol import Keep, flat


class MLflow:
    """A tracker that sends to an MLflow server, or to a database of the user's."""

    package = "mlflow"
    durable = True
    MOST_TEXT = 500
    """The maximum length of a parameter or a tag: old servers refuse longer ones."""

    def __init__(self, out: Path, before: Sequence[str] = (), store: Path | None = None) -> None:
        given = None if store else os.environ.get("MLFLOW_TRACKING_URI")
        self._store: Path | None = None
        if given:
            self._uri = given
            parts = urlsplit(given)
            self.where = scrub(parts._replace(query="", fragment="").geturl())
        else:
            self._store = (store or default_store()).resolve()
            self.where = str(self._store / DATABASE)
            self._uri = f"sqlite:///{self.where}?timeout={WAIT_S}"
        self._last: Event | None = None

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        for name, value in _MLFLOW.items():
            os.environ.setdefault(name, value)
        require("mlflow", "track")
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        with self._alone():
            self._client = client = MlflowClient(self._uri)
            number = self._experiment(begin["project"])
        if run is None:
            made = client.create_run(number, round(begin["time"] * 1000), run_name=begin["name"])
            run = str(made.info.run_id)
            keep(run)
        else:
            client.update_run(run, name=begin["name"])
        self._run = run
        # Also for an existing run: it may have failed here before, and sending the same again
        # changes nothing.
        tags = flat(begin["environment"]) | begin["user_tags"]
        tags |= {"tags": " ".join(begin["tags"]), "run": begin["run"]}
        params = flat(begin["parameters"])
        client.log_batch(
            run,
            params=[Param(name, value[: self.MOST_TEXT]) for name, value in params.items()],
            tags=[RunTag(name, value[: self.MOST_TEXT]) for name, value in tags.items()],
        )
        return run

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the store's lock, and make its database if there is none. Two processes that make
        tables, or an experiment, at the same time would both fail."""
        if self._store is None:
            yield
            return
        from mlflow.tracking import MlflowClient

        self._store.mkdir(parents=True, exist_ok=True)
        with (self._store / f"{DATABASE}.lock").open("a") as lock:
            lock_file(lock, wait=True)
            if not (self._store / DATABASE).exists():
                # MLflow cannot use a database if it was killed while it made the tables.
                with replacing(self._store / DATABASE) as draft:
                    MlflowClient(f"sqlite:///{draft}").search_experiments()
            yield

    def _experiment(self, project: str) -> str:
        """The number of a project's experiment, which is made if it does not exist. The artifacts
        of our database are beside it."""
        experiment = self._client.get_experiment_by_name(project)
        if experiment is not None:
            return str(experiment.experiment_id)
        artifacts = (self._store / "mlruns").as_uri() if self._store else None
        return str(self._client.create_experiment(project, artifact_location=artifacts))

    def send(self, events: Sequence[Event]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, round(event["time"] * 1000), event["step"])
            for event in events
            for name, value in event.get("metrics", {}).items()
        ]
        self._client.log_batch(self._run, metrics=metrics)
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


DATABASE = "mlflow.db"
WAIT_S = 60
"""The seconds that a write waits while other runs write to the same database."""


def default_store() -> Path:
    """The folder of the user's database, which has all runs without a server."""
    home = os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()
    return Path(home) / "penstock"


_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""Variables for MLflow: send nothing to its makers, print nothing, and give up on a server soon,
because `follow` tries again."""
