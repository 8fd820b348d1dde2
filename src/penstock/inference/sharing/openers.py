"""Choose the worker of a cluster that opens a job: one whose arithmetic most workers share."""

from __future__ import annotations

import asyncio
import json
import platform
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...base import Incomplete, InferConfig, PenstockError, UsageError
from ...cluster import TaskFailure, Tasks, Workers
from ..run_folder.ending import EndRequest
from . import station

ASK_S = 30.0
"""Seconds within which a worker must answer to be counted. It loads torch first."""
OPENERS = 3
"""Number of workers that fail to open the job before it is given up."""


def opened_on(
    workers: Workers, config: InferConfig, peers: int, request: EndRequest
) -> station.Opened:
    """Let a worker open the job. Raises the error of a worker if none can."""
    order, odd = (config, peers, platform.node()), odd_workers(workers, config)
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
    asked = workers.hosts().keys() - workers.strangers().keys()
    alike = str(config.cluster).startswith("local") or config.mixed_arithmetic
    if alike or len(asked) < 3:  # of two workers, neither is in the majority
        return {}
    answers = workers.ask(arithmetic, config.devices, config.threads, within_s=ASK_S, of=asked)
    most = Counter(made for _, made in answers).most_common(1)
    return {
        address: "most workers have another arithmetic"
        for address, made in answers
        if made != most[0][0]
    }


async def arithmetic(
    devices: Sequence[str], threads: int | None, dask_worker: Any
) -> tuple[str, str]:
    """The address of a worker, and its arithmetic as text. The worker goes on working meanwhile."""
    return dask_worker.address, await asyncio.to_thread(_here, devices, threads)


def _here(devices: Sequence[str], threads: int | None) -> str:
    from ...models import find_devices
    from ..opening.identity import maker

    return json.dumps(maker((), find_devices(devices), threads))
