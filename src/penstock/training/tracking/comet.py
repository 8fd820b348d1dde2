"""The events of a run as a Comet experiment, live or uploaded later."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from ...base import PenstockError, learn_secret, require, scrub
from .events import Event
from .protocol import TRACKING_FOLDER, Keep, flat, words_of


class Comet:
    """A tracker that sends to comet.com with a key and a network, and else writes an archive.

    A run that began live stays live (and waits for the network), and one that began as an archive
    stays an archive. Otherwise it would not be one experiment with its parts in order.

    Comet's `log_metric` has no argument for the time, so a metric gets the time at which it was
    sent: about a second late for a live run. OUT/events.jsonl has the true times.
    """

    package = "comet_ml"

    def __init__(self, out: Path, before: Sequence[str] = (), store: Path | None = None) -> None:
        for name, value in _COMET.items():
            os.environ.setdefault(name, value)
        self._comet = require("comet_ml", "track")
        self._folder = out.resolve() / TRACKING_FOLDER / "comet"
        self._key, address = comet_account()
        there = scrub(urljoin(address, "/").rstrip("/"))
        archived = any(self._folder.rglob("*.zip"))
        reached = bool(self._key) and not archived and _answers(address)
        self.durable = reached or there in before
        self.where = there if self.durable else f"{TRACKING_FOLDER}/comet"
        self._address = address
        self._experiment: Any = None

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        key = str(begin["run"])
        if self.durable and not self._key:
            raise PenstockError("the run is at comet.com, and there is no key to go on with it")
        if self.durable and not _answers(self._address):  # Comet would wait for minutes
            raise PenstockError("it does not answer")
        self._forget()
        silent = (
            "log_code log_graph auto_param_logging auto_metric_logging parse_args log_env_details "
            "auto_output_logging log_git_metadata log_git_patch display_summary_level".split()
        )
        options = {**dict.fromkeys(silent, False), "project_name": begin["project"]}
        folder = self._folder
        if self.durable:  # Comet's spare copy is not kept, because events.jsonl has all events
            self._spare = tempfile.TemporaryDirectory(prefix="penstock-")
            folder = Path(self._spare.name)
        folder.mkdir(parents=True, exist_ok=True)
        existing = "" if run is None else "Existing"
        kind = getattr(self._comet, f"{existing}{'' if self.durable else 'Offline'}Experiment")
        options |= {"experiment_key": key, "offline_directory": str(folder)}
        self._experiment = experiment = kind(**options)
        if not experiment.alive:
            raise PenstockError("it began no experiment")
        if self.durable:
            keep(key)
        if self.durable or run is None:  # again for an existing run, which may have failed here
            experiment.set_name(begin["name"])
            experiment.add_tags([*begin["tags"], *words_of(begin["user_tags"])])
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
        # flush does not notice that a server is gone.
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
        """Drop an experiment that failed, so that it does not leave half an archive."""
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
"""Variables for Comet: patch no other library, report nothing to its makers, print nothing, and
give up on a server soon, because `follow` tries again."""
_REACHED_WITHIN_S = 10.0


def comet_account() -> tuple[str | None, str]:
    """The key (None if there is none) and the server's address, as Comet's own client finds them:
    in variables, in its files, or in the key. Later messages are printed without the key."""
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
        requests.head(address, timeout=_REACHED_WITHIN_S, allow_redirects=False).close()
    except requests.exceptions.SSLError:
        return True
    except requests.RequestException:
        return False
    return True


def _is_whole(archive: Path) -> bool:
    """Whether an archive is complete. Comet leaves an empty file when it tests a folder."""
    return zipfile.is_zipfile(archive) and "experiment.json" in zipfile.ZipFile(archive).namelist()


def upload_to_comet(out: Path) -> list[str]:
    """Send the archives of a run to comet.com, as ``comet upload`` does.

    Returns:
        Their names; none if there is no key.

    Raises:
        PenstockError: The server does not answer, or the upload failed.
    """
    folder = out / TRACKING_FOLDER / "comet"
    archives = [path for path in folder.glob("*.zip") if _is_whole(path)]
    archives.sort(key=lambda path: path.stat().st_mtime)  # the oldest part of a run first
    require("comet_ml", "track")
    key, address = comet_account() if archives else (None, "")
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
