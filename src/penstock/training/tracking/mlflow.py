"""The events of a run as an MLflow run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ...base import replacing, require, scrub
from .events import Event
from .protocol import Keep, flat


class MLflow:
    """A tracker that sends to an MLflow server, or to a database in the run's folder."""

    package = "mlflow"
    durable = True
    MOST_TEXT = 500
    """The most characters of a parameter or a tag: old servers take no more."""

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
            # MLflow cannot use a database if it was killed while it made the tables.
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
        # Also for a run that is there: it may have failed here before, and to send the same again
        # changes nothing.
        tags = flat(begin["environment"]) | {"tags": " ".join(begin["tags"]), "run": begin["run"]}
        params = flat(begin["parameters"])
        client.log_batch(
            run,
            params=[Param(name, value[: self.MOST_TEXT]) for name, value in params.items()],
            tags=[RunTag(name, value[: self.MOST_TEXT]) for name, value in tags.items()],
        )
        return run

    def _experiment(self, project: str) -> str:
        """Make an experiment; artifacts of our database lie beside it."""
        ours = self.where == "mlflow.db"
        artifacts = (self._out / "mlruns").as_uri() if ours else None
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


_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""The variables with which MLflow sends nothing to its makers, prints nothing, and gives up on a
server soon; we try again."""
