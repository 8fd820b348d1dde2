"""A job that a worker of a cluster has opened, and which worker that is. Its paths are absolute, as
workers may run in other folders."""

from __future__ import annotations

import contextlib
import platform
from collections import Counter
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
from ..run_folder.folder import read_run
from ..run_folder.journal import differing
from ..run_folder.reader import run_folder_of
from . import on_worker as worker_side
from .on_worker import Opened

ASK_S = 30.0
"""Seconds within which a worker must answer what its arithmetic is. It loads torch first."""
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
    leave_out_odd(workers, config)
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


def leave_out_odd(workers: Workers, config: InferConfig) -> None:
    """Leave out workers that would compute other bits than most, or, where a run goes on, other
    bits than the workers that began it. The first to come would else decide for all."""
    if str(config.cluster).startswith("local"):
        return
    maker = _maker(config)
    threads = config.threads or maker.get("threads")
    asked = worker_side.arithmetic_of_worker, config.devices, threads
    answers = workers.ask_each(*asked, within_s=ASK_S, of=[*workers.fit])
    # Those that do not answer are judged when they open the job.
    made = {address: each for address, each in answers.items() if isinstance(each, dict)}
    if threads is None:  # then each worker takes as many as the one that plans
        made = {address: {**each, "threads": None} for address, each in made.items()}
    if not maker and len(made) > 2:  # of two workers, neither is in the majority
        texts = Counter(map(repr, made.values())).most_common(1)
        maker = next(each for each in made.values() if repr(each) == texts[0][0])
    unlike = {address: differing(maker, each) for address, each in made.items() if maker}
    odd = {address: name for address, name in unlike.items() if name is not None}
    if len(odd) < len(made):
        for address, name in odd.items():
            theirs, ours = made[address][name], maker.get(name)
            workers.leave_out(
                address,
                f"it has {name} {theirs!r}, and the run was made with {ours!r}, which may change "
                "voxels",
            )


def _maker(config: InferConfig) -> dict[str, Any]:
    """What made the blocks of the run that is resumed; empty if there is none."""
    if config.resumes:
        with contextlib.suppress(UsageError):  # there is no run yet
            run = read_run(config.run_dir or run_folder_of(str(config.out_spec[0])))
            return dict(run.get("maker", {}))
    return {}


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
