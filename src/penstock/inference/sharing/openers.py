"""Choose the worker of a cluster that opens a job: one whose arithmetic most workers share, or, for
a run that goes on, one that computes like those that began it."""

from __future__ import annotations

import asyncio
import json
import platform
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...base import Incomplete, InferConfig, PenstockError, UsageError
from ...cluster import TaskFailure, Tasks, Workers
from ..run_folder.ending import EndRequest
from ..run_folder.files import read_document
from ..run_folder.journal import differing
from ..run_folder.local import folder_at
from . import station

ASK_S = 30.0
"""Seconds within which a worker must answer to be counted. It loads torch first."""
OPENERS = 3
"""Number of workers that fail to open the job before it is given up."""


def opened_on(
    workers: Workers, config: InferConfig, peers: int, request: EndRequest
) -> station.Opened:
    """Let a worker open the job. Raises the error of a worker if none can.

    A run that is resumed is opened by a worker like those that began it, if there is one.
    """
    opened = _opened_on(workers, config, peers, request, odd_workers(workers, config))
    makers = [] if config.resume_anyway or config.mixed_arithmetic else _makers(config, opened)

    def like(made_by: Mapping[str, Any]) -> bool:
        return any(differing(maker, made_by) is None for maker in makers)

    if not makers or like(opened.maker):
        return opened
    threads = config.threads or opened.maker["threads"]  # each worker takes those of the run
    answers = _arithmetics(workers, config.model_copy(update={"threads": threads}))
    unlike = {
        address: "it does not compute like the workers that began the run"
        for address, made in answers
        if not like(json.loads(made))
    }
    if len(unlike) == len(answers):
        return opened  # who begins the job says that none may go on with it
    return _opened_on(workers, config, peers, request, unlike)


def _opened_on(
    workers: Workers, config: InferConfig, peers: int, request: EndRequest, odd: dict[str, str]
) -> station.Opened:
    """Let a worker that is not ``odd`` open the job."""
    order = config, peers, platform.node()
    tasks = Tasks(workers, station.open_task, order, f"open-{uuid.uuid4().hex[:12]}", 0)
    tasks.placement.unfit |= odd

    def tick(word: object) -> None:
        request.check(0)
        lacking = tasks.placement.unfit.keys() - odd.keys() - workers.strangers().keys()
        if len(lacking) >= OPENERS:
            raise UsageError(tasks.placement.unfit[min(lacking)])

    (outcome,) = tasks.run([0], tick)
    if isinstance(outcome.result, TaskFailure):
        raise error_of(outcome.result)
    opened: station.Opened = outcome.result
    return opened


def _makers(config: InferConfig, opened: station.Opened) -> list[dict[str, Any]]:
    """What made the units of the run that is resumed; empty if there is none."""
    if not config.resumes or opened.run_dir is None:
        return []
    run = read_document(folder_at(opened.run_dir), "run.json")
    makers: list[dict[str, Any]] = (run or {}).get("makers", [])
    return makers


def error_of(failure: TaskFailure) -> PenstockError:
    """A worker's error as an exception of this process, so that its exit code is the same."""
    kinds = {2: UsageError, 3: Incomplete}
    return kinds.get(failure.exit_code, PenstockError)(failure.sentence)


def odd_workers(workers: Workers, config: InferConfig) -> dict[str, str]:
    """The workers whose arithmetic differs from that of most workers, by address.

    Args:
        workers: The workers that are present.
        config: The settings of the job.

    Returns:
        The reason why each must not open the job: all others would then be left out.
    """
    alike = str(config.cluster).startswith("local") or config.mixed_arithmetic
    if alike or len(_asked(workers)) < 3:  # of two workers, neither is in the majority
        return {}
    answers = _arithmetics(workers, config)
    most = Counter(made for _, made in answers).most_common(1)
    return {
        address: "most workers have another arithmetic"
        for address, made in answers
        if made != most[0][0]
    }


def _arithmetics(workers: Workers, config: InferConfig) -> list[tuple[str, str]]:
    """The address of each worker that answers, and its arithmetic as text."""
    asked = _asked(workers)
    return workers.ask(arithmetic, config.devices, config.threads, within_s=ASK_S, of=asked)


def _asked(workers: Workers) -> set[str]:
    """The addresses of the workers that may take part."""
    return workers.hosts().keys() - workers.strangers().keys()


async def arithmetic(
    devices: Sequence[str], threads: int | None, dask_worker: Any
) -> tuple[str, str]:
    """The address of a worker, and its arithmetic as text. The worker goes on working meanwhile."""
    return dask_worker.address, await asyncio.to_thread(_here, devices, threads)


def _here(devices: Sequence[str], threads: int | None) -> str:
    from ...models import find_devices
    from ..opening.identity import maker

    return json.dumps(maker((), find_devices(devices), threads))
