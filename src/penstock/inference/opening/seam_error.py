"""How far tiles are from a larger input, measured on the user's data where no overlap is exact.

A patch is computed as the job would, on its device, and again within a window that is a quarter or
half as long again, or twice as long where that fits. It does not lie in the middle of the window,
where a slope of the data would cancel. A patch of about three quarters shows how the difference
falls with the side.

window  ├────────────────────────────────┤
tile            ├──────────────┤            its core is compared with the middle of the window
tiles       ├──────────────┤                blended ones are joined along the longest side, and
                   ├──────────────┤         compared from the middle of one to that of the next
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...base import cuda_flags_kept, trim_heap
from ...data import Source
from ...models import Sliding, placed, set_cuda_flags, to_probabilities_
from ..planning.memory import LIBRARY_BYTES, resident_bytes
from ..planning.plan import Plan
from ..tiling.stitch import window
from .as_its_makers import ValuesPlan
from .heads import HeadFacts
from .net import Net, seen_patches
from .seam_numbers import (
    ENOUGH_PLACES,
    SeamError,
    by_distance,
    label_f1,
    seam_error_of,
    wider_ends,
)
from .selection import Volume

_MOST_PLACES = 8
"""The most places to measure at."""
_SHARE = 0.02
"""The most voxels to compute for this, as a share of those of the job: at most a twentieth of its
time, as a patch alone takes twice as long as one among many."""
_WINDOWS = {2.0: 1.0, 1.5: 1.0, 1.25: 1.5}
"""Sides of windows that are tried, in those of a patch: the first that fits at enough places. Its
part of the share is larger where a window takes no more memory than the forwards before it, as new
memory is what takes the time."""
_MANY = 10**6
"""Patches of a job so large that no trial costs more than its share."""
_SMALLER = 0.75
"""Side of the smaller patch, in those of a patch."""


def _sides(patch: Sequence[int], times: float) -> tuple[int, ...]:
    """The sides of a patch that is so many times as long. A network that takes the patch is likely
    to take it."""
    each = ((p, math.gcd(p, 16 if p >= 64 else 4)) for p in patch)
    return tuple(p if p == 1 else int(p * times) // grain * grain for p, grain in each)


def _shown(head: HeadFacts, values: NDArray[Any]) -> NDArray[Any]:
    """The values of a head as they are written, where they are finished later."""
    if head.activation is not None:
        to_probabilities_(values := values.copy(), exclusive=head.activation == "softmax")
    if head.reduction is not None:
        return head.reduction.of(head.name, torch.from_numpy(values), 0).numpy()
    return values


class _Context(NamedTuple):
    """A window on the data."""

    values: NDArray[Any]
    whole: NDArray[Any]
    """The output of the window at once."""
    output: Callable[[NDArray[Any]], NDArray[Any]]
    """Gives that of a part of the values."""

    def box(self, patch: Sequence[int]) -> list[slice]:
        """The place of a patch in the window."""
        starts = [(n - p) // 4 for n, p in zip(self.values.shape[1:], patch, strict=True)]
        return [slice(start, start + p) for start, p in zip(starts, patch, strict=True)]


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
    head: HeadFacts
    """The first output."""
    sliding: Sliding | None = None
    """The way in which patches are blended; None if they are trimmed."""
    floor: float = 0.0
    """The least weight of a voxel where they are blended by a cosine."""
    tf32: bool = False

    @property
    def labels(self) -> bool:
        """True if the first output is labels."""
        return self.head.kind == "labels"

    def measured(self, plan: Plan) -> Plan:
        """Measure the difference at seams for a plan.

        Args:
            plan: The plan of the job.

        Returns:
            The plan with what was measured, or why nothing was: that would take more than a
            twentieth of the job, or more memory than there is.
        """
        free = plan.memory_limit - resident_bytes()
        if plan.facts.device_bytes is not None:
            taken = plan.facts.weight_bytes + plan.facts.cast_bytes + LIBRARY_BYTES
            free = plan.facts.device_bytes - taken
        error = self.error(plan.num_patches, free)
        said = error.line() if error is not None else _why_not(self, plan, free)
        line = "; ".join(filter(None, (plan.facts.seams, said)))
        measured = None if error is None else asdict(error)
        return replace(plan, facts=replace(plan.facts, seams=line, seam_error=measured))

    def error(self, num_patches: int, free_bytes: int) -> SeamError | None:
        """Measure how far tiles are from larger inputs.

        Args:
            num_patches: Patches that the job computes.
            free_bytes: Bytes of the device that this may take.

        Returns:
            What was measured, or None.
        """
        affordable = self.affordable(num_patches, free_bytes)
        if affordable is None:
            return None
        longer, places = affordable
        try:
            with cuda_flags_kept():
                set_cuda_flags(self.tf32)
                each_place = [*islice(self._differences(longer), places)]
        except Exception:  # of a user's network, which takes no such window, or of a full device
            return None
        finally:
            trim_heap()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        each, smaller, scores, low, high = zip(*each_place, strict=True)
        patch, blended = self.net.shape.patch, self.sliding is not None
        small, side, large = (max(_sides(patch, t)) for t in (_SMALLER, 1.0, longer))
        scale = 1.0 if self.labels else (max(high) - min(low)) or 1.0
        one = 1.0 if self.labels else float(np.subtract(high, low).mean()) / scale
        seen, whole = len(each) * math.prod(_sides(patch, longer / 2)), self.source.domain[2:]
        wider = wider_ends(one, len(each), whole.size / seen, whole.shape[self._axis], side, large)
        shared = self._overlap(patch)[self._axis] // 2 * blended
        lesser = [float(near[: shared + 1].max()) / scale for near in smaller]
        return seam_error_of(
            [near / scale for near in each], lesser, scores, (small, side, large),
            labels=self.labels, blended=blended, shared=shared, wider=wider,
        )  # fmt: skip

    def affordable(self, num_patches: int, free_bytes: int) -> tuple[float, int] | None:
        """The side of a window, in those of a patch, and the number of places; None if that would
        take too long, or more memory than there is."""
        peak = self.net.footprint.peak_bytes
        if peak is None:
            return None
        patch, fits = self.net.shape.patch, []
        for longer, part in _WINDOWS.items():
            sides = _sides(patch, longer)
            times = math.prod(sides) / math.prod(patch)  # 1 if a small patch has no such side
            both = patch, _sides(patch, _SMALLER)
            tiles = [(each, len(self._row(each, sides))) for each in both]
            cost = times + sum(math.prod(each) / math.prod(patch) * n for each, n in tiles)
            places = min(_MOST_PLACES, int(part * _SHARE * num_patches / cost))
            joined = all(n for _, n in tiles)  # two that are blended fit into the window
            # The peak is that of a forward of several patches, and here each window goes alone.
            if times > 1 and places and joined and times * peak / self.net.forward <= free_bytes:
                fits.append((longer, places))
        return next((each for each in fits if each[1] >= ENOUGH_PLACES), fits[-1] if fits else None)

    @property
    def _axis(self) -> int:
        """The longest axis of a patch, counted from the last one."""
        seen = self.net.shape.seen
        return int(np.argmax(seen)) - len(seen)

    def _row(self, patch: Sequence[int], sides: Sequence[int]) -> range:
        """Where patches of a window of these sides begin along the longest axis: one, or an even
        number whose seam lies in the middle of theirs."""
        room = sides[self._axis] - patch[self._axis]
        stride = max(1, patch[self._axis] - self._overlap(patch)[self._axis])
        count = 1 if self.sliding is None else (1 + room // stride) // 2 * 2
        first = (room - (count - 1) * stride) // 4
        return range(first, first + count * stride, stride)

    def _overlap(self, patch: Sequence[int]) -> list[int]:
        """The overlap of a patch: that of the job, and in proportion where patches are blended."""
        shape, first = self.net.shape, 3 - len(patch)
        each = zip(shape.overlap[first:], patch, shape.patch[first:], strict=True)
        return [o if self.sliding is None else o * p // whole for o, p, whole in each]

    def _differences(
        self, times: float
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64], float | None, float, float]]:
        """For each place: the difference by distance, that of a smaller patch, F1, and the least
        and the largest value of the output in the middle of a window: at its edges many networks
        give values that they give nowhere in a volume."""
        net, large = self.net, _sides(self.net.shape.patch, times)
        module = placed(net.model.module, self.device, net.footprint.channels_last)
        sides, small = large[-net.shape.model_axes :], _sides(net.shape.seen, _SMALLER)
        cut = self._cores if self.sliding is None else self._cells
        for seen in seen_patches(self.values, self.source, self.volume, large, net.clip):
            values = seen.shown.reshape(net.model.in_channels, *sides)
            whole = self._output(module, values)
            context = _Context(values, whole, partial(self._output, module))
            tile, part = cut(context, net.shape.seen)
            near = self._between(tile, part)
            score = label_f1(tile, part) if self.labels else None
            middle = whole[:, *(slice(n // 4, n - n // 4) for n in whole.shape[1:])]
            smaller = self._between(*cut(context, small))
            yield near, smaller, score, float(middle.min()), float(middle.max())

    def _output(self, module: torch.nn.Module, values: NDArray[Any]) -> NDArray[Any]:
        """The first head of one window, shape (channels, spatial...)."""
        net, device = self.net, self.device
        batch = torch.from_numpy(values).to(net.model.dtype)[None]
        if device.type == "cpu" and values[0].size <= math.prod(net.shape.seen):
            # Torch takes five times as long for a small patch alone as for the two of the job.
            batch = batch.expand(net.forward, *values.shape)
        batch = batch.contiguous(memory_format=net.layout).to(device)
        with torch.no_grad(), net.autocast(device):
            head = next(iter(net.model.heads(module(batch)).values()))
        # numpy has no bfloat16
        return np.asarray((head.float() if head.dtype.itemsize == 2 else head)[0].cpu())

    def _cores(self, context: _Context, patch: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The core of a patch within a window, computed by itself and in the window."""
        overlap = self.net.shape.overlap[-len(patch) :]
        box = context.box(patch)
        core = tuple(slice(o // 2, p - (o - o // 2)) for p, o in zip(patch, overlap, strict=True))
        tile, part = context.output(context.values[:, *box]), context.whole[:, *box]
        return _shown(self.head, tile)[:, *core], _shown(self.head, part)[:, *core]

    def _cells(self, context: _Context, patch: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """What lies between the middles of two blended patches of a row, and the window there.

        Voxels behind the seam come first, so that it lies at both ends, as those of a core do.
        """
        assert self.sliding is not None
        values, whole, output = context
        axis, overlap, begins = self._axis, self._overlap(patch), self._row(patch, whole.shape[1:])
        weights = window(self.sliding, 3 + axis, patch[axis], overlap[axis], self.floor)
        weights = weights.reshape([len(weights) if n == axis else 1 for n in range(-len(patch), 0)])
        box, made, total = context.box(patch), np.zeros(whole.shape), np.zeros(whole.shape[1:])
        for begin in begins:
            box[axis] = slice(begin, begin + patch[axis])
            made[:, *box] += weights * output(values[:, *box])
            total[*box] += weights
        # Across, the middle of the patches: further out their neighbours there count, too.
        stride = [p - o for p, o in zip(patch, overlap, strict=True)]
        cell = [slice(side.start + p // 2 - s // 4, side.start + p // 2 - s // 4 + -(-s // 2))
                for side, p, s in zip(box, patch, stride, strict=True)]  # fmt: skip
        first = begins[len(begins) // 2] + overlap[axis] // 2 - stride[axis] // 2
        cell[axis] = slice(first, first + stride[axis])
        made = made[:, *cell] / total[*cell]
        tile, part = _shown(self.head, made), _shown(self.head, whole[:, *cell])
        return np.roll(tile, -(stride[axis] // 2), axis), np.roll(part, -(stride[axis] // 2), axis)

    def _between(self, tile: NDArray[Any], part: NDArray[Any]) -> NDArray[np.float64]:
        """The difference of two cores by distance."""
        apart = (tile != part if self.labels else np.abs(tile - part)).mean(0)
        if self.sliding is not None:
            others = {*range(-apart.ndim, 0)} - {self._axis}
            apart = apart.mean(tuple(others), keepdims=True)
        return by_distance(apart)


def _why_not(trial: SeamTrial, plan: Plan, free_bytes: int) -> str:
    """Why nothing was measured, in words; empty if there is no seam, or none that is known."""
    if plan.num_patches == 1 or not plan.facts.seams:
        return ""
    why = "the network takes no larger input"
    if trial.affordable(_MANY, free_bytes) is None:
        why = "no larger input fits into memory"
    elif trial.affordable(plan.num_patches, free_bytes) is None:
        why = f"for {plan.num_patches} patches that would take more than 5 % of the job"
    return f"the difference at seams was not measured: {why}"
