"""The events of a run as an offline run of Weights & Biases."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base import require
from .events import Event
from .protocol import TRACKING_FOLDER, Keep, words_of


class WeightsAndBiases:
    """A tracker that writes W&B's own files and sends nothing; ``wandb sync`` uploads them.

    A resumed run leaves another folder with the same id; ``wandb sync`` puts the parts together.
    """

    package = "wandb"
    durable = False
    MOST_TAG = 64
    """The maximum length of a tag at W&B."""

    def __init__(self, out: Path, before: Sequence[str] = (), store: Path | None = None) -> None:
        self.where = f"{TRACKING_FOLDER}/wandb"
        self._folder = out.resolve() / TRACKING_FOLDER
        self._run: Any = None
        self._status = ""

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # before it is imported
        wandb = require("wandb", "track")
        self._forget()
        words = [*begin["tags"], *words_of(begin["user_tags"])]
        self._run = wandb.init(
            mode="offline",
            dir=self._folder,
            id=begin["run"],
            name=begin["name"],
            project=begin["project"],
            tags=[word[: self.MOST_TAG] for word in words],
            config={
                **begin["parameters"],
                "tag": begin["user_tags"],
                "environment": begin["environment"],
            },
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return str(begin["run"])

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            self._status = event.get("status", "")
            if metrics := event.get("metrics"):
                epoch = {"epoch": event["epoch"]} if "epoch" in event else {}
                row = {**metrics, **epoch, "_timestamp": event["time"]}
                self._run.log(row, step=event["step"])

    def close(self) -> None:
        part = Path(self._run.dir).parent
        self._run.finish(exit_code=int(self._status != "complete"))
        (part / WHOLE).touch()
        self._run = None

    def _forget(self) -> None:
        """Remove unfinished parts, which are then written again from their begin."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None
        for part in (self._folder / "wandb").glob("offline-run-*"):
            if not (part / WHOLE).exists():
                shutil.rmtree(part, ignore_errors=True)


WHOLE = "penstock-whole"
"""The file that marks a complete part in its folder."""
