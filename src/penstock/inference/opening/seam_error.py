"""How far tiles are from a larger input, measured on the user's data where no overlap is exact.

A patch is computed as the job would, and again in the middle of a window that is half as long
again. A patch of three quarters shows how the difference falls with the side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...base import plural, significant, trim_heap
from ...data import Source
from ..planning.memory import resident_bytes
from ..planning.plan import Plan
from ..tiling.exact import SIDE_STEP
from .head_kinds import seen_patches
from .net import Net
from .normalisation import ValuesPlan
from .selection import Volume

_SHARE = 0.05
"""The most voxels to compute for this, as a share of those of the job."""
_PLACES = 3
"""The most places to measure at."""
_FALLS = 1.1
"""Least difference of a patch of three quarters, in those of the patch, for larger ones to pay."""


@dataclass(frozen=True, slots=True)
class SeamError:
    """The difference between tiles and larger inputs."""

    by_distance: tuple[float, ...]
    """Mean difference of the voxels at 0, 1, 2 ... voxels from a seam: a share of the range of the
    output, or of labels the share that is another."""
    places: int
    """Number of places on the data."""
    halving: int | None
    """Side of a patch at which the difference at seams would be half; None if larger patches are
    little better."""

    def line(self) -> str:
        """The same in words."""
        at_seams = f"about {significant(100 * self.by_distance[0])} % at seams"
        cure = "larger patches are little better"
        if self.halving is not None:
            cure = f"--patch {self.halving} would about halve it"
        return f"{at_seams} (on {plural(self.places, 'place')} of the data); {cure}"


def with_seam_error(
    plan: Plan, scaled: ValuesPlan, net: Net, source: Source, volume: Volume
) -> Plan:
    """Measure the difference at seams for a plan, where the job runs on the CPU.

    Args:
        plan: The plan of the job.
        scaled: How values are scaled.
        net: The model as the job runs it.
        source: The input.
        volume: The volume to look at.

    Returns:
        The plan with what was measured, or as it was.
    """
    if not plan.facts.on_host:
        return plan
    free = plan.memory_limit - resident_bytes()
    error = seam_error(scaled, net, source, volume, plan.num_patches, free)
    if error is None:
        return plan
    line = f"{plan.facts.seams}; {error.line()}"
    return replace(plan, facts=replace(plan.facts, seams=line, seam_error=error.by_distance))


def seam_error(
    scaled: ValuesPlan, net: Net, source: Source, volume: Volume, num_patches: int, free_bytes: int
) -> SeamError | None:
    """Measure how far tiles are from larger inputs.

    Args:
        scaled: How values are scaled.
        net: The model as the job runs it; it is run on the CPU.
        source: The input.
        volume: The volume to look at.
        num_patches: Patches that the job computes.
        free_bytes: Bytes that this may take.

    Returns:
        What was measured; None where that would take more than a twentieth of the job, or more
        memory than there is.
    """
    shape = net.shape
    window = tuple(p if p == 1 else p * 3 // 2 for p in shape.patch)
    times = math.prod(window) / math.prod(shape.patch)
    cost = times + 1 + 0.75**shape.model_axes  # in patches: window, patch, smaller patch
    places = min(_PLACES, int(_SHARE * num_patches / cost))
    peak = net.footprint.peak_bytes
    if not places or peak is None or times * peak / net.forward > free_bytes:
        return None
    each, smaller = [], []
    for seen in islice(seen_patches(scaled, source, volume, window, net.clip), places):
        values = seen.shown.reshape(net.model.in_channels, *window[3 - shape.model_axes :])
        try:
            whole = _output(net, values)
            each.append(_differences(net, values, whole, shape.seen, shape.overlap))
            small = [p if p == 1 else p * 3 // 4 for p in shape.seen]
            smaller.append(_differences(net, values, whole, small, shape.overlap)[0])
        except Exception:  # of a user's network, which takes no such window
            return None
    trim_heap()
    by_distance = np.mean(each, axis=0)
    falls = float(np.mean(smaller)) / (float(by_distance[0]) or math.inf)
    halving = None
    if falls > _FALLS:
        power = math.log(falls) / math.log(4 / 3)
        halving = SIDE_STEP * math.ceil(max(shape.seen) * 2 ** (1 / power) / SIDE_STEP)
    return SeamError(tuple(map(float, by_distance)), places, halving)


def _output(net: Net, values: NDArray[Any]) -> NDArray[Any]:
    """The first head of one window, shape (channels, spatial...)."""
    batch = torch.from_numpy(values).to(net.model.dtype)[None].contiguous(memory_format=net.layout)
    with torch.no_grad():
        output = next(iter(net.model.heads(net.model.module(batch)).values()))[0]
    return np.asarray(output)


def _differences(
    net: Net,
    values: NDArray[Any],
    whole: NDArray[Any],
    patch: Sequence[int],
    overlap: Sequence[int],
) -> NDArray[np.float64]:
    """Mean difference between the core of a patch and the window around it, by the distance from a
    seam."""
    axes = len(patch)
    starts = [(n - p) // 2 for n, p in zip(values.shape[1:], patch, strict=True)]
    box = tuple(slice(start, start + p) for start, p in zip(starts, patch, strict=True))
    tile, part = _output(net, values[(slice(None), *box)]), whole[(slice(None), *box)]
    if tile.dtype.kind == "f":
        difference = np.abs(tile - part).mean(0) / (float(np.ptp(whole)) or 1.0)
    else:
        difference = (tile != part).mean(0)
    core = tuple(
        slice(o // 2, p - (o - o // 2)) for p, o in zip(patch, overlap[-axes:], strict=True)
    )
    difference = difference[core]
    cut = [n for n in range(axes) if difference.shape[n] > 1]
    distance = np.full(difference.shape, max(difference.shape))
    for axis in cut:
        along = np.arange(difference.shape[axis])
        near = np.minimum(along, along[::-1])
        distance = np.minimum(distance, near.reshape([-1 if n == axis else 1 for n in range(axes)]))
    counts = np.bincount(distance.ravel())
    sums = np.bincount(distance.ravel(), weights=difference.ravel().astype(np.float64))
    return np.asarray(sums / np.maximum(counts, 1))
