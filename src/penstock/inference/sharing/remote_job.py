"""A job that a worker of a cluster has opened, and which worker that is. Its paths are absolute, as
workers may run in other folders."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base import InferConfig, UsageError
from ...cluster import FailedItem, Workers, share
from ...data import Sink
from ..opening.outputs import open_outputs
from ..opening.selection import open_input
from ..planning.plan import Plan
from ..run_folder.ending import EndRequest
from . import on_worker as worker_side
from .on_worker import Opened

OPENERS = 3
"""Number of workers that fail to open the job before it is given up: the fault may be the user's,
and a cluster may have a thousand workers."""


@dataclass(frozen=True)
class RemoteJob:
    """A job that a worker has opened, with the outputs opened here."""

    config: InferConfig
    opened: Opened

    @property
    def plan(self) -> Plan:
        """The plan that the worker has made."""
        return self.opened.plan

    @property
    def run_dir(self) -> Path | str | None:
        return self.opened.run_dir

    @cached_property
    def sinks(self) -> list[Sink]:
        """The outputs, opened here with what the worker has found out about the model's heads."""
        opened, config = self.opened, self.config
        source = open_input(config)
        outputs = open_outputs(
            self.config, source, opened.selected, opened.at_once, opened.head_parts, opened.kinds
        )
        return [output.sink for output in outputs]

    def fingerprint(self) -> dict[str, Any]:
        return self.opened.fingerprint

    def maker(self) -> dict[str, Any]:
        return self.opened.maker


def opened_on(workers: Workers, config: InferConfig, request: EndRequest) -> RemoteJob:
    """The job, opened by a worker. Raises the error of a worker if none can open it."""
    order = config, workers.peers(), platform.node()
    shared = share(
        workers, worker_side.open_job, [order],
        progress=lambda: request.check(0), most_unfit=OPENERS + len(workers.left_out),
    )  # fmt: skip
    ((_, opened),) = shared
    if isinstance(opened, FailedItem):
        raise opened.error()
    assert isinstance(opened, Opened)
    # To plan a job is not to do a share of it: the only worker may not see the run or the weights.
    workers.served = False
    return RemoteJob(config, opened)


def settled(config: InferConfig) -> InferConfig:
    """The settings with all paths made absolute.

    Raises `UsageError` for a model, input or output in memory, which no other process can open.
    """
    if not isinstance(config.model_type, str):
        raise UsageError("--cluster needs a model by name, reference or file, not a module")
    specs = [config.in_spec, *config.out_spec]
    if any(not isinstance(spec, str | Path | dict) for spec in specs):
        raise UsageError("--cluster needs an input and outputs that workers open, not arrays")
    name, colon, function = config.model_type.rpartition(":")
    file = Path(name if colon else function)
    model = config.model_type
    if file.is_file():
        model = f"{file.absolute()}{colon}{function if colon else ''}"
    folders = {name: whole(getattr(config, name)) for name in ("weights", "run_dir")}
    return config.model_copy(
        update={
            **folders,
            "in_spec": _absolute(config.in_spec),
            "out_spec": tuple(map(_absolute, config.out_spec)),
            "model_type": model,
        }
    )


def _absolute(spec: Any) -> Any:
    """Make a path absolute. Return URLs and TensorStore's JSON as they are."""
    text = str(spec)
    if isinstance(spec, dict) or "://" in text or text.lstrip().startswith("{"):
        return spec
    return str(Path(text).absolute())


def whole(path: Path | str | None) -> Path | str | None:
    """Make a local path absolute. Return a URL as it is."""
    return path.absolute() if isinstance(path, Path) else path
