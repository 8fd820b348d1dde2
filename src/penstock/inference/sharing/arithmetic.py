"""The arithmetic of the workers of a cluster: a worker of the kind that most are opens the job."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...base import InferConfig
from ...cluster import Workers

ASK_S = 30.0
"""Seconds within which a worker must have loaded torch, to be counted."""


def odd_workers(workers: Workers, config: InferConfig) -> dict[str, str]:
    """The workers that others outnumber whose arithmetic is another one, by address.

    Args:
        workers: The workers that are there.
        config: The settings of the job.

    Returns:
        Each with the reason why it is not to open the job: all others would be left out.
    """
    asked = workers.hosts().keys() - workers.strangers().keys()
    alike = str(config.cluster).startswith("local") or config.mixed_arithmetic
    if alike or len(asked) < 3:  # of two none is odd
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
    """The address of a worker, and its arithmetic as text. It goes on working meanwhile."""
    return dask_worker.address, await asyncio.to_thread(_here, devices, threads)


def _here(devices: Sequence[str], threads: int | None) -> str:
    from ...models import find_devices
    from ..opening.identity import maker

    return json.dumps(maker((), find_devices(devices), threads))
