"""The model as a job runs it: dtypes, patches at a time, memory, and the kind of each of its heads.

A run on shapes sees the tensors of a net. On a CUDA device cuDNN takes workspaces besides, which no
shape shows, so there the memory of one forward is counted by the device's allocator.

The kind of a head of which nobody says anything is found by running the model on one patch of the
input. Integers and booleans are labels. Floats are assumed to be intensities, and the plan says so.
But floats that lie within [0, 1], or sum to 1 over their channels, look like probabilities if the
input does neither. They could come from a denoiser or from a classifier, so the user must name the
kind. A patch of zeros shows nothing, so a patch is searched in which the input varies.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...base import (
    HEAD_KINDS,
    HeadKind,
    InferConfig,
    Undecided,
    UsageError,
    cuda_flags_kept,
    plural,
)
from ...data import Box, Source, normalised, reflect
from ...models import (
    CHANNELS_LAST,
    Footprint,
    Model,
    error_in_user_code,
    measure_footprint,
    placed,
    set_cuda_flags,
)
from ..planning.memory import CPU_FORWARD, resident_bytes
from ..tiling.geometry import PatchShape
from .as_its_makers import ValuesPlan
from .heads import HeadFacts, Origin, is_long, is_wide, said_kinds
from .selection import Volume

GPU_BATCH = 16
"""Number of patches of 64 cubed in one forward on a GPU, without --batch. Of larger ones, fewer."""

_PLACES = (1 / 2, 1 / 4, 3 / 4)
"""Positions along each axis, as fractions of the volume, that are tried until a patch varies."""
_STRIDE = 7
"""The step through these positions, which has no factor with their number: the first few lie at
different places along all axes."""
_SUM_TOLERANCE = 1e-2
"""The largest difference of a sum from 1. Probabilities in half precision are off by less."""


@dataclass(frozen=True)
class Net:
    """A model fitted to a job."""

    model: Model
    shape: PatchShape
    amp: torch.dtype | None
    """The dtype of autocast; None if it is off."""
    carrier: torch.dtype
    """Dtype in which patches are normalised: float32, float64 if the input needs it, or that of an
    input of 64-bit integers if they pass as they are, because a float64 holds only 53 bits."""
    clip: tuple[float, float] | None
    """Range that normalised values are clipped to; None for no clipping."""
    batch: int
    """Number of patches of a batch."""
    forward: int
    """Number of patches in one forward. On a CPU a batch is run in several forwards."""
    footprint: Footprint

    @property
    def layout(self) -> torch.memory_format:
        """Memory layout of batches."""
        axes = 2 + self.shape.model_axes
        return CHANNELS_LAST[axes] if self.footprint.channels_last else torch.contiguous_format

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context of a forward: half precision where `amp` says so."""
        return torch.autocast(device.type, self.amp, self.amp is not None)

    def forward_zeros(self, module: torch.nn.Module, device: torch.device) -> None:
        """Run the module, which lies on a device, once on zeros in the layout of batches."""
        shape = (self.forward, self.model.in_channels, *self.shape.seen)
        batch = torch.empty(shape, dtype=self.model.dtype, device=device, memory_format=self.layout)
        with torch.no_grad(), self.autocast(device):
            module(batch.zero_())


def fit_net(
    config: InferConfig,
    devices: Sequence[torch.device],
    model: Model,
    shape: PatchShape,
    dtype: np.dtype[Any],
) -> Net:
    """Fit a model to the patches of an input of ``dtype``, and to its devices.

    All CUDA devices count as alike.

    Raises `UsageError` if the model does not take such a batch.
    """
    assert config.batch != "auto"  # by now it is a number
    on_cpu = all(device.type == "cpu" for device in devices)
    amp = choose_amp(config, devices, model.dtype)
    # A Mac's GPU has no float64.
    fine = is_wide(dtype) and all(device.type != "mps" for device in devices)
    carrier = torch.float64 if fine else torch.float32
    as_it_is = config.normalize == "none" and config.clip_norm is None
    if on_cpu and as_it_is and is_long(dtype) and isinstance(model.module, torch.nn.Identity):
        carrier = getattr(torch, dtype.name)
    if fine and not model.weight_bytes:
        with contextlib.suppress(UsageError):  # a net that makes float32 tensors itself fails
            wide = replace(model, weightless_dtype=carrier)
            fit_batch(wide, shape, config.batch, on_cpu=on_cpu)
            model = wide
    forward, footprint = fit_batch(model, shape, config.batch, on_cpu=on_cpu)
    # All lanes on the CPU share this one.
    module = placed(model.module, torch.device("cpu"), footprint.channels_last)
    net = Net(
        model=replace(model, module=module),
        shape=shape,
        amp=amp,
        carrier=carrier,
        clip=None if config.clip_norm is None else config.clip_norm or (0.0, 1.0),
        batch=-(-(config.batch or CPU_FORWARD) // forward) * forward if on_cpu else forward,
        forward=forward,
        footprint=footprint,
    )
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return net
    with cuda_flags_kept():
        set_cuda_flags(config.tf32)
        return with_peak_on(net, gpus[0], torch.cuda)


def fit_batch(
    model: Model, shape: PatchShape, batch: int | None, *, on_cpu: bool
) -> tuple[int, Footprint]:
    """The number of patches in one forward, and its footprint. ``batch`` is that of --batch."""
    # A net that was exported for one batch size takes no other.
    if on_cpu:
        # Tried in this order. The last one is not caught: its error is what the user is told.
        *sizes, last = (CPU_FORWARD, 1, batch) if batch else (CPU_FORWARD, 1)
    else:
        most = max(1, GPU_BATCH * 64**3 // max(64**3, math.prod(shape.patch)))
        *sizes, last = (batch,) if batch else (most, 1)
    patch = (model.in_channels, *shape.seen)
    for size in sizes:
        with contextlib.suppress(UsageError):
            return size, measure_footprint(model, (size, *patch))
    return last, measure_footprint(model, (last, *patch))


def choose_amp(
    config: InferConfig, devices: Sequence[torch.device], dtype: torch.dtype
) -> torch.dtype | None:
    """The dtype of autocast for a net of ``dtype``; None if it is off.

    By default it is fp16 on CUDA, which keeps 11 bits of an intensity where bf16 keeps 8. But fp16
    ends at 65,504, so it is used only for values that are normalised to a range, and only for a net
    of float32.
    """
    chosen = config.amp
    if chosen == "auto":
        ranged = config.normalize in ("percentile", "global") or (
            config.normalize == "fixed" and config.clip_norm is not None
        )
        on_cuda = all(device.type == "cuda" for device in devices)
        chosen = "fp16" if on_cuda and ranged and dtype == torch.float32 else "off"
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[chosen]


def spoilt_masks(net: Net, config: InferConfig) -> int:
    """Masks of what is not finite: one for all channels, or one for each if none are mixed."""
    alone = config.model_type == "identity" and config.reduce is None
    return net.model.in_channels if alone else 1


def with_peak_on(net: Net, device: torch.device, allocator: Any) -> Net:
    """The net with the most bytes that one forward of zeros takes on a device, if that is more than
    its tensors take.

    Input and output are included, and the weights that autocast keeps in half precision.

    Args:
        net: The net as the job runs it. It is not compiled for this.
        device: The device.
        allocator: The functions that count its memory: `torch.cuda`, or one with the same names.

    Returns:
        The net. It is as it was if it fails on zeros, or the device has no memory for it: the run,
        which meets the same on its input, says so.
    """
    module = None
    try:
        module = placed(net.model.module, device, net.footprint.channels_last)
        allocator.reset_peak_memory_stats(device)
        before = allocator.memory_allocated(device)
        net.forward_zeros(module, device)
        allocator.synchronize(device)
        peak = int(allocator.max_memory_allocated(device)) - int(before)
    except Exception:  # of a user's net
        return net
    finally:
        del module  # its memory is free before the plan asks how much is
        allocator.empty_cache()
    peak = max(peak, net.footprint.peak_bytes or 0)
    return replace(net, footprint=replace(net.footprint, peak_bytes=peak))


@dataclass(frozen=True)
class Seen:
    """A patch of the input, shape (channels, z, y, x)."""

    stored: NDArray[Any]
    shown: NDArray[np.float64]
    """The same patch normalised and clipped: the input of the net."""


def with_kinds(
    config: InferConfig,
    heads: Sequence[HeadFacts],
    net: Net,
    values: ValuesPlan,
    source: Source,
    volume: Volume,
) -> tuple[list[HeadFacts], int]:
    """The heads, each with its kind and who says so, and the bytes that the test of the heads left
    in the heap. Later forwards use these bytes again, and the plan counts the forwards.

    Patches of the input are read only if a kind is neither given by the user nor known.
    Raises `UsageError` for a head that looks like probabilities.
    """
    kinds, unknown = list[tuple[HeadKind, Origin]](), list[str]()
    for head, said in zip(heads, said_kinds(config.head_kind, heads), strict=True):
        trained = head.recipe.kind if head.recipe is not None else net.model.kind
        if config.reduce is not None:
            kinds.append(("scores" if head.name.endswith(".scores") else "labels", "said"))
        elif said is not None:
            kinds.append((said, "said"))
        elif trained is not None:
            kinds.append((trained, "known"))
        elif "float" not in head.returned:
            kinds.append(("labels", "assumed"))
        else:
            kinds.append((config.floats_are, "assumed"))
            unknown.append(head.name)
    left = 0
    if unknown and config.floats_are == "intensity":
        before = resident_bytes()
        seen = _varied(seen_patches(values, source, volume, net.shape.patch, net.clip))
        outputs = _returned(net, seen)
        for name in unknown:
            answers = _answers(config, name if len(heads) > 1 else "")
            _refuse_probabilities(name, outputs[name].numpy(), seen, net.model.name, answers)
        left = max(0, resident_bytes() - before)
    pairs = zip(heads, kinds, strict=True)
    return [replace(head, kind=kind, origin=origin) for head, (kind, origin) in pairs], left


def seen_patches(
    values: ValuesPlan,
    source: Source,
    volume: Volume,
    shape: Sequence[int],
    clip: tuple[float, float] | None,
) -> Iterator[Seen]:
    """Patches from the middle of a volume and around it, as stored and as the net sees them.

    Each is normalised by its own numbers, which stand for those of its block or volume.
    """
    for patch in _patches(source, volume, shape):
        shown = normalised(patch, values.each)
        yield Seen(patch, shown.clip(*clip) if clip else shown)


def _patches(source: Source, volume: Volume, shape: Sequence[int]) -> Iterator[NDArray[Any]]:
    """Patches of shape (channels, z, y, x), reflected where the volume is thinner."""
    domain, before = source.domain[2:], set()
    grid = [*zip(source.chunks[2:], source.grid_origin[2:], strict=True)]
    everywhere = list(itertools.product(_PLACES, repeat=3))
    for number in range(len(everywhere)):
        places = everywhere[_STRIDE * number % len(everywhere)]
        axes: list[NDArray[Any]] = []
        sides = zip(domain.start, domain.stop, shape, places, grid, strict=True)
        for low, high, side, place, (chunk, origin) in sides:
            start = max(low, min(int(low + (high - low) * place) - side // 2, high - side))
            # In as few chunks as can be: to read them may take longer than the network.
            within = (start - origin) % chunk
            start = max(low, start - (within if side > chunk else max(0, within + side - chunk)))
            axes.append(reflect(np.arange(start, start + side), low, high))
        box = Box(tuple(int(a.min()) for a in axes), tuple(int(a.max()) + 1 for a in axes))
        if box in before:
            continue
        before.add(box)
        array = volume.array(source, box)
        inside = (a - start for a, start in zip(axes, box.start, strict=True))
        yield array[np.ix_(np.arange(len(array)), *inside)]


def _varied(candidates: Iterator[Seen]) -> Seen:
    """The first patch that holds more than one value, or else the first patch."""
    first = next(candidates)
    varied = (seen for seen in itertools.chain([first], candidates) if np.ptp(seen.shown) > 0)
    return next(varied, first)


def _returned(net: Net, seen: Seen) -> dict[str, Tensor]:
    """The heads of one patch in float64, shape (channels, spatial...); run on the CPU."""
    model = net.model
    patch = torch.from_numpy(seen.shown).to(model.dtype).reshape(model.in_channels, *net.shape.seen)
    # A program that was exported for one batch size takes no other.
    fixed = isinstance(model.module, torch.fx.GraphModule)
    failed: Exception | None = None
    # Two rows take less than a full batch. A net that takes no other number gets its own.
    for rows in (net.forward,) if fixed else (min(2, net.forward), net.forward):
        batch = patch.expand(rows, *patch.shape).contiguous(memory_format=net.layout)
        try:
            with torch.no_grad():  # a training may use what the net caches
                heads = model.heads(model.module(batch))
            return {name: head[0].double() for name, head in heads.items()}
        except Exception as error:
            failed = error
    assert failed is not None
    raise UsageError(
        f"model {model.name} fails on a patch of the input: {error_in_user_code(failed)}"
    ) from failed


def _refuse_probabilities(
    name: str, values: NDArray[Any], seen: Seen, model: str, answers: Sequence[str]
) -> None:
    inputs = (seen.stored, seen.shown)
    if _within_one(values) and not any(map(_within_one, inputs)):
        what = f"lies between {values.min():.3g} and {values.max():.3g}"
    elif _sums_to_one(values) and not any(map(_sums_to_one, inputs)):
        what = f"sums to 1 over its {plural(len(values), 'channel')}"
    else:
        return
    low, high = seen.shown.min(), seen.shown.max()
    raise Undecided(
        f"model {model}: head {name} {what} on a patch with normalised values from "
        f"{low:.3g} to {high:.3g}; say what it is: --head-kind scores for probabilities, labels "
        "for classes, intensity for an image (see penstock infer --help-all)",
        answers,
    )


def _answers(config: InferConfig, name: str) -> list[str]:
    """The flags that say the kind of one head, by its name if there are others, and keep what was
    said of those."""
    said = config.head_kind or ()
    named = f"{name}=" if name else ""
    return [shlex.join(("--head-kind", *said, f"{named}{kind}")) for kind in HEAD_KINDS]


def _within_one(values: NDArray[Any]) -> bool:
    return bool(values.min() >= 0 and values.max() <= 1)


def _sums_to_one(values: NDArray[Any]) -> bool:
    """Whether several channels sum to 1 at every voxel."""
    return len(values) > 1 and bool(
        np.all(np.abs(values.astype(np.float64).sum(axis=0) - 1) < _SUM_TOLERANCE)
    )
