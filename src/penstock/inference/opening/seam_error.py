"""How far tiles are from a larger input, measured on the user's data where no overlap is exact.

A patch is computed as the job would, on its device, and again within a window that is half as long
again, or twice as long where that fits. It does not lie in the middle of the window, where a slope
of the data would cancel. A patch of about three quarters shows how the difference falls with the
side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...base import cuda_flags_kept, trim_heap
from ...data import Source
from ...models import Reduction, placed, set_cuda_flags
from ..planning.memory import LIBRARY_BYTES, resident_bytes
from ..planning.plan import Plan
from ..tiling.differences import (
    ENOUGH_PLACES,
    MOST_PLACES,
    SeamError,
    by_distance,
    label_f1,
    seam_error_of,
)
from .head_kinds import seen_patches
from .net import Net
from .normalisation import ValuesPlan
from .selection import Volume

_SHARE = 0.05
"""The most voxels to compute for this, as a share of those of the job."""
_WINDOWS = (2.0, 1.5)
"""Sides of windows that are tried, in those of a patch: the first that fits at enough places."""
_SMALLER = 0.75
"""Side of the smaller patch, in those of a patch."""


@dataclass(frozen=True, slots=True)
class SeamTrial:
    """Tiles and windows on the data of a job."""

    net: Net
    """The model as the job runs it."""
    values: ValuesPlan
    source: Source
    volume: Volume
    device: torch.device
    """The device of the job."""
    labels: bool = False
    """True if the first output is labels."""
    later: Reduction | None = None
    """The reduction that makes labels of its scores, if the network has none in it."""
    tf32: bool = False

    def measured(self, plan: Plan) -> Plan:
        """Measure the difference at seams for a plan.

        Args:
            plan: The plan of the job.

        Returns:
            The plan with what was measured; as it was where that would take more than a twentieth
            of the job, or more memory than there is.
        """
        free = plan.memory_limit - resident_bytes()
        if plan.facts.device_bytes is not None:
            taken = plan.facts.weight_bytes + plan.facts.cast_bytes + LIBRARY_BYTES
            free = plan.facts.device_bytes - taken
        error = self.error(plan.num_patches, free)
        if error is None:
            return plan
        line = f"{plan.facts.seams}; {error.line()}"
        return replace(plan, facts=replace(plan.facts, seams=line, seam_error=error))

    def error(self, num_patches: int, free_bytes: int) -> SeamError | None:
        """Measure how far tiles are from larger inputs.

        Args:
            num_patches: Patches that the job computes.
            free_bytes: Bytes of the device that this may take.

        Returns:
            What was measured, or None.
        """
        affordable = self._affordable(num_patches, free_bytes)
        if affordable is None:
            return None
        window, places = affordable
        try:
            with cuda_flags_kept():
                set_cuda_flags(self.tf32)
                each_place = [*islice(self._differences(window), places)]
        except Exception:  # of a user's network, which takes no such window, or of a full device
            return None
        finally:
            trim_heap()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        each, smaller, scores = zip(*each_place, strict=True)
        sides = max(self._sides(_SMALLER)), max(self.net.shape.seen), max(self._sides(window))
        return seam_error_of(each, smaller, scores, sides, labels=self.labels)

    def _affordable(self, num_patches: int, free_bytes: int) -> tuple[float, int] | None:
        """The window and the number of places."""
        peak = self.net.footprint.peak_bytes
        if peak is None:
            return None
        fits = []
        for window in _WINDOWS:
            times, smaller = (
                math.prod(self._sides(each)) / math.prod(self.net.shape.patch)
                for each in (window, _SMALLER)
            )
            cost = times + 1 + smaller  # in patches
            places = min(MOST_PLACES, int(_SHARE * num_patches / cost))
            if places and times * peak / self.net.forward <= free_bytes:
                fits.append((window, places))
        return next((each for each in fits if each[1] >= ENOUGH_PLACES), fits[-1] if fits else None)

    def _sides(self, times: float) -> tuple[int, ...]:
        """A patch so many times as long, with sides that a network which takes the patch's is
        likely to take."""
        grains = [math.gcd(p, 16 if p >= 64 else 4) for p in self.net.shape.patch]
        each = zip(self.net.shape.patch, grains, strict=True)
        return tuple(p if p == 1 else int(p * times) // grain * grain for p, grain in each)

    def _differences(
        self, times: float
    ) -> Iterator[tuple[NDArray[np.float64], float, float | None]]:
        """For each place: the difference by distance, that at seams of a smaller patch, and F1."""
        net, window = self.net, self._sides(times)
        module = placed(net.model.module, self.device, net.footprint.channels_last)
        sides, small = (s[3 - net.shape.model_axes :] for s in (window, self._sides(_SMALLER)))
        for seen in seen_patches(self.values, self.source, self.volume, window, net.clip):
            values = seen.shown.reshape(net.model.in_channels, *sides)
            whole = self._output(module, values)
            tile, part = self._cores(module, values, whole, net.shape.seen)
            near = self._between(tile, part, whole)
            score = label_f1(tile, part) if self.labels else None
            tile, part = self._cores(module, values, whole, small)
            yield near, float(self._between(tile, part, whole)[0]), score

    def _output(self, module: torch.nn.Module, values: NDArray[Any]) -> NDArray[Any]:
        """The first head of one window, shape (channels, spatial...)."""
        net, device = self.net, self.device
        batch = torch.from_numpy(values).to(net.model.dtype)[None]
        batch = batch.contiguous(memory_format=net.layout).to(device)
        with torch.no_grad(), torch.autocast(device.type, net.amp, net.amp is not None):
            name, head = next(iter(net.model.heads(module(batch)).items()))
        if self.later is not None:
            head = self.later.of(next(iter(self.later.heads(name, head.shape[1]))), head, 1)
        # numpy has no bfloat16
        return np.asarray((head.float() if head.dtype.itemsize == 2 else head)[0].cpu())

    def _cores(
        self,
        module: torch.nn.Module,
        values: NDArray[Any],
        whole: NDArray[Any],
        patch: Sequence[int],
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The core of a patch within a window, computed by itself and in the window."""
        overlap = self.net.shape.overlap[-len(patch) :]
        starts = [(n - p) // 4 for n, p in zip(values.shape[1:], patch, strict=True)]
        box = tuple(slice(start, start + p) for start, p in zip(starts, patch, strict=True))
        core = tuple(slice(o // 2, p - (o - o // 2)) for p, o in zip(patch, overlap, strict=True))
        tile = self._output(module, values[(slice(None), *box)])
        return tile[(slice(None), *core)], whole[(slice(None), *box)][(slice(None), *core)]

    def _between(
        self, tile: NDArray[Any], part: NDArray[Any], whole: NDArray[Any]
    ) -> NDArray[np.float64]:
        """The difference of two cores by distance. ``whole`` has the range of the output."""
        if self.labels:
            return by_distance((tile != part).mean(0))
        return by_distance(np.abs(tile - part).mean(0) / (float(np.ptp(whole)) or 1.0))
