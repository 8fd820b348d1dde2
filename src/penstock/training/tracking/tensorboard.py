"""The events of a run as TensorBoard's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base import require
from .events import Event
from .protocol import TRACKING_FOLDER, Keep, flat


class TensorBoard:
    """A tracker that writes TensorBoard's files; it needs no torch."""

    package = "tensorboard"
    durable = True

    def __init__(self, out: Path, before: Sequence[str] = (), store: Path | None = None) -> None:
        self.where = f"{TRACKING_FOLDER}/tensorboard"
        self._folder = out / self.where

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        require("tensorboard", "track")
        from tensorboard.plugins.hparams import summary_v2 as hparams
        from tensorboard.plugins.text import summary_v2 as text
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder))
        if run is None:
            environment = flat(begin["environment"])
            parameters = flat({**begin["parameters"], "tag": begin["user_tags"]})
            table = "\n".join(f"    {name}: {value}" for name, value in environment.items())
            for summary in (
                hparams.hparams_pb(parameters, trial_id=begin["name"]),
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
