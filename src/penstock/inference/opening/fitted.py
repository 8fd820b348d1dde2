"""Puts numbers in place of ``--patch auto`` and ``--batch auto``.

A larger patch computes less context, and takes more memory. The numbers stand in the run's record:
its parts, workers and ``--resume`` obey them, whatever the memory is by then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from ...base import InferConfig, Refused, UsageError
from ...models import placed
from ..tiling.exact import SIDE_STEP

Opener = Callable[[InferConfig], Any]
"""Opens a `Job`, whose room imports this one."""

_MOST_CUTS = 12
"""Most patches along the longest axis of a volume that are tried."""
_WORTH = 0.95
"""Share of the voxels that a larger patch may compute at most, to be worth its memory."""
_BATCHES = (8, 32)
"""Patches of one forward to try on a GPU."""


def fitted(config: InferConfig, opened: Opener) -> InferConfig:
    """The settings with a patch and a batch in numbers.

    Args:
        config: The settings.
        opened: Opens a job of other settings.

    Returns:
        The settings.

    Raises:
        UsageError: What the settings ask for cannot be done.
    """
    asked = [name for name in ("patch", "batch") if getattr(config, name) == "auto"]
    if not asked:
        return config
    plain = config.model_copy(update=dict.fromkeys(asked))
    job = opened(plain)
    if "patch" in asked:
        job = _least_work(job, plain, opened)
    update = {"patch": job.config.patch, "overlap": job.config.overlap}
    plain = plain.model_copy(update=update)
    if "batch" in asked and job.devices[0].type != "cpu":
        plain = plain.model_copy(update={"batch": _fastest(plain, opened)})
    return plain


def _least_work(job: Any, config: InferConfig, opened: Opener) -> Any:
    """The job with the patch that computes the fewest voxels, of those that fit. The job as it is
    if none does: its plan says what would help."""
    best, exact = None, job.tiled.exact
    for patch in _patches(job):
        with suppress(UsageError, Refused):  # the network takes no such patch, or it does not fit
            other = opened(config.model_copy(update={"patch": patch}))
            other.plan.refuse()
            work = other.plan.patch_amplification
            less = best is None or work < _WORTH * best.plan.patch_amplification
            if less and (other.tiled.exact or not exact):
                best = other
    return best or job


def _patches(job: Any) -> Iterator[tuple[int, ...]]:
    """Patches that cut a volume into so many along its longest axis, the smallest first."""
    shape = job.plan.shape
    axes = shape.model_axes
    extent, overlap = job.plan.geometry.domain.shape[-axes:], shape.overlap[-axes:]
    grain = math.lcm(SIDE_STEP, *job.tiled.step)
    for count in range(_MOST_CUTS, 0, -1):
        core = -(-max(extent) // count)
        if core < SIDE_STEP:
            continue
        sides = (
            -(-(-(-n // -(-n // core)) + o) // grain) * grain if n > 1 else n
            for n, o in zip(extent, overlap, strict=True)
        )
        yield tuple(sides)


def _fastest(config: InferConfig, opened: Opener) -> int | None:
    """The batch with the shortest forward for each patch, of those that fit; None if none does."""
    times: dict[int, float] = {}
    for batch in _BATCHES:
        with suppress(UsageError, Refused, torch.OutOfMemoryError):
            job = opened(config.model_copy(update={"batch": batch}))
            job.plan.refuse()
            times[batch] = seconds_of_forward(job) / job.net.forward
    return min(times, key=lambda batch: times[batch], default=None)


def seconds_of_forward(job: Any) -> float:
    """The time of one forward of zeros on the first device, the second of two."""
    net, device = job.net, job.devices[0]
    module = placed(net.model.module, device, net.footprint.channels_last)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        net.forward_zeros(module, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return seconds
