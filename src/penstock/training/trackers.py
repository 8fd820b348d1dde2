"""The process that logs a training at one tracker, by a logger of Lightning.

    comet         the experiment at comet.com, with a key and a network; else OUT/track/comet/*.zip
    mlflow        the server of MLFLOW_TRACKING_URI; else OUT/track/mlflow.db
    tensorboard   OUT/track/tensorboard
    wandb         OUT/track/wandb, offline

``python -m penstock.training.trackers OUT NAME`` reads lines of JSON: the facts of the run, its
metrics, and its end; see `tracking`. If the lines end without the end, the run was killed. Trackers
read keys from their own variables and files; every sentence is scrubbed before it is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..base import (
    MissingDependency,
    PenstockError,
    SafeStream,
    describe,
    learn_secret,
    require,
    scrub,
)
from .tracking import TRACKING_FOLDER, TrackerState

AGAIN_AFTER_S = 30.0
"""The seconds after a failure in which metrics are dropped, not tried: a server that is gone costs
a wait each time, and the run waits for this process at its end."""


class Tracker:
    """Makes the logger of one tracker."""

    folder = ""
    """Its file or folder in OUT/track."""

    def __init__(self, out: Path, facts: Mapping[str, Any], before: TrackerState) -> None:
        """Set ``where``. Nothing is made yet. ``before`` says where the run began, if it did."""
        self._folder = out.resolve() / TRACKING_FOLDER
        self._facts = facts
        self.where = f"{TRACKING_FOLDER}/{self.folder}"

    def open(self, run: str | None) -> Any:
        """Begin a run, or go on in one. Returns the logger."""
        raise NotImplementedError

    def keep_settings(self, logger: Any) -> None:
        """Log the hyperparameters of a new run."""
        logger.log_hyperparams(self._facts["hyperparameters"])

    def close(self, logger: Any, status: str) -> None:
        """End the run. Raises an error if the tracker may not have all of it."""
        logger.finalize("success" if status == "complete" else "failed")

    def _words(self) -> list[str]:
        """Tags as words, for trackers whose tags have no values."""
        return [*self._facts["words"], *(f"{k}={v}" for k, v in self._facts["tags"].items())]


class TensorBoard(Tracker):
    """Files of TensorBoard. A resumed run adds one."""

    folder = "tensorboard"

    def open(self, run: str | None) -> Any:
        from .ranks import torchmetrics_by_version

        with torchmetrics_by_version():  # it takes half of the seconds of Fabric's import
            loggers = require("lightning_fabric.loggers", "train")
        return loggers.TensorBoardLogger(self._folder, self.folder, "", flush_secs=10)

    def keep_settings(self, logger: Any) -> None:
        # The logger keeps none without a metric, and would make one up: hp_metric, which is -1.
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(self._facts["hyperparameters"], {}):
            logger.experiment.file_writer.add_summary(summary)


class WeightsAndBiases(Tracker):
    """W&B's own files, from which ``wandb sync`` uploads the run; nothing is sent. A resumed run
    leaves another folder with the same id."""

    folder = "wandb"
    MOST_TAG = 64
    """The maximum length of a tag at W&B."""

    def open(self, run: str | None) -> Any:
        logger = lightning_loggers().WandbLogger(
            self._facts["name"],
            self._folder,
            run,
            offline=True,
            project=self._facts["project"],
            tags=[word[: self.MOST_TAG] for word in self._words()],
            # Without these, W&B keeps this process's command, its output and its own statistics.
            settings={
                **dict.fromkeys(("silent", "disable_code", "disable_git"), True),
                **dict.fromkeys(("x_disable_meta", "x_disable_stats"), True),
                "console": "off",
                "save_code": False,
                "x_save_requirements": False,
            },
        )
        _ = logger.experiment  # which makes it
        return logger

    def close(self, logger: Any, status: str) -> None:
        logger.experiment.finish(exit_code=int(status != "complete"))


class MLflow(Tracker):
    """A run at an MLflow server, or in a database of its own, which ``mlflow ui`` shows."""

    folder = "mlflow.db"

    def __init__(self, out: Path, facts: Mapping[str, Any], before: TrackerState) -> None:
        super().__init__(out, facts, before)
        self._given = os.environ.get("MLFLOW_TRACKING_URI")
        if self._given:
            self.where = scrub(urlsplit(self._given)._replace(query="", fragment="").geturl())

    def open(self, run: str | None) -> Any:
        name, project, tags = (self._facts[key] for key in ("name", "project", "tags"))
        tags = {**tags, "tags": " ".join(self._facts["words"])}
        uri = self._given or f"sqlite:///{self._folder / self.folder}"
        artifacts = None if self._given else (self._folder / "mlruns").as_uri()
        logger = lightning_loggers().MLFlowLogger(
            project, name, uri, dict(tags), artifact_location=artifacts, run_id=run
        )
        client = logger.experiment  # which makes it
        if run is not None:
            client.update_run(run, "RUNNING", name)
            for key, value in tags.items():
                client.set_tag(run, key, value)
        return logger

    def close(self, logger: Any, status: str) -> None:
        logger.finalize({"complete": "success", "stopped": "KILLED"}.get(status, "failed"))


class Comet(Tracker):
    """An experiment at comet.com, or an archive for ``comet upload``.

    A run that began live stays live, and one that began as an archive stays an archive: otherwise
    it would not be one experiment with its parts in order.
    """

    folder = "comet"

    def __init__(self, out: Path, facts: Mapping[str, Any], before: TrackerState) -> None:
        super().__init__(out, facts, before)
        key, self._address = comet_account()
        there = scrub(urljoin(self._address, "/").rstrip("/"))
        begins_live = before.run is None and key is not None and _answers(self._address)
        self._live = before.where == there or begins_live
        self.where = there if self._live else self.where

    def open(self, run: str | None) -> Any:
        folder = self._folder / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        # With ``online=False``, Lightning makes an experiment that keeps nothing.
        os.environ["COMET_START_ONLINE"] = str(self._live)
        silent = "log_code log_graph parse_args log_git_metadata log_git_patch log_env_details "
        silent += "auto_param_logging auto_metric_logging auto_output_logging auto_log_co2 "
        logger = lightning_loggers().CometLogger(
            project=self._facts["project"],
            experiment_key=run,
            mode="create" if run is None else "get",
            name=self._facts["name"],
            tags=self._words(),
            offline_directory=str(folder),
            display_summary_level=0,
            **dict.fromkeys(silent.split(), False),
        )
        if not logger.experiment.alive:
            raise PenstockError("it began no experiment")
        return logger

    def close(self, logger: Any, status: str) -> None:
        # To flush does not notice that a server is gone.
        arrived = not self._live or (logger.experiment.flush() and _answers(self._address))
        logger.experiment.end()
        if not arrived:
            raise PenstockError("it did not take the metrics in time")
        if not self._live and not any((self._folder / self.folder).glob("*.zip")):
            raise PenstockError(f"it left no archive in {self.where}")


def comet_account() -> tuple[str | None, str]:
    """The key (None if there is none) and the server's address, as Comet's own client finds them:
    in variables, in its files, or in the key. Later messages are printed without the key."""
    require("comet_ml", "track")
    from comet_ml import config as comet

    settings = comet.get_config()
    learn_secret(settings["comet.api_key"])
    key: str | None = comet.get_api_key(None, settings)
    learn_secret(key)
    return key, str(comet.get_comet_url_override(comet.get_config()))


def _answers(address: str) -> bool:
    """Whether a server answers, through the same proxy as for Comet's client. A server whose
    certificate is not trusted counts as answering: Comet's client then explains the error."""
    requests = require("requests", "track")
    try:
        requests.head(address, timeout=10.0, allow_redirects=False).close()
    except requests.exceptions.SSLError:
        return True
    except requests.RequestException:
        return False
    return True


def lightning_loggers() -> Any:
    """Lightning's loggers of the trackers of others. Lightning imports torchvision where it is
    installed, which loads beside a CPU torch only with the stand-ins of `models`."""
    from ..models import import_torchvision

    with contextlib.suppress(MissingDependency):
        import_torchvision()
    return require("pytorch_lightning.loggers", "track")


TRACKERS: dict[str, type[Tracker]] = {
    "comet": Comet,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


class LoggedRun:
    """A run at one tracker. A failure is noted and said once; later metrics are tried again."""

    def __init__(
        self,
        out: Path,
        name: str,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._name, self._facts = out, name, facts
        self._say, self._clock = say, clock
        self.state = TrackerState.load(out, name)
        self._tracker: Tracker | None = None
        self._logger: Any = None
        self._again_at = clock()
        self._new = True

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics."""
        if self._clock() < self._again_at:
            return
        with self._failure_noted():
            self._opened().log_metrics(dict(metrics), step)

    def end(self, status: str) -> None:
        """End the run: complete, stopped or failed."""
        with self._failure_noted():
            logger = self._opened()
            assert self._tracker is not None
            self._tracker.close(logger, status)
        self._save()

    def _opened(self) -> Any:
        if self._logger is None:
            state, facts = self.state, self._facts
            if self._tracker is None:
                self._tracker = TRACKERS[self._name](self._out, facts, state)
                self._new = state.run is None or state.where != self._tracker.where
                state.where = self._tracker.where
                state.run = None if self._new else state.run
            logger = self._tracker.open(state.run)
            # Known from here on: after an error, and after a kill, it goes on in this run.
            state.run = str(logger.version or facts["name"])
            self._save()
            if self._new:  # MLflow refuses to change them
                self._tracker.keep_settings(logger)
            self._logger = logger
        return self._logger

    @contextlib.contextmanager
    def _failure_noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # trackers share no type of error
            sentence = scrub(f"{type(error).__name__}: {describe(error)}")
            if self.state.error is None:
                self.state.error = sentence
                self._say(f"{self._name} at {self.state.where}: {sentence} (the run goes on)")
            self._again_at = self._clock() + AGAIN_AFTER_S
            self._save()

    def _save(self) -> None:
        self.state.save(self._out, self._name)


def log_lines(out: Path, name: str, lines: Iterable[str], say: Callable[[str], None]) -> None:
    """Log what the lines of a training tell, see `tracking`."""
    messages = map(json.loads, lines)
    run = LoggedRun(out, name, next(messages), say)
    for message in messages:
        if "status" in message:
            return run.end(message["status"])
        run.take(message["step"], message["metrics"])
    return run.end("failed")  # it was killed


def main() -> None:
    out, name = sys.argv[1:]
    for word in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        if hasattr(signal, word):  # Windows lacks some
            signal.signal(getattr(signal, word), signal.SIG_IGN)  # they are the training's
    words = SafeStream(os.fdopen(os.dup(2), "w", buffering=1))
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # libraries print much, some of it from C code
        os.dup2(silence, descriptor)
    if hasattr(os, "nice"):
        os.nice(10)  # it takes no time from the training

    def say(sentence: str) -> None:
        words.write(f"penstock train: {sentence}\n")

    log_lines(Path(out), name, sys.stdin, say)


if __name__ == "__main__":
    main()
