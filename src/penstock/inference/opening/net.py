"""The model as a job runs it: dtypes, patches at a time, memory.

A run on shapes sees the tensors of a net. On a CUDA device cuDNN takes workspaces besides, which no
shape shows, so there the memory of one forward is counted by the device's allocator.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...base import InferConfig, UsageError, cuda_flags_kept
from ...models import (
    CHANNELS_LAST,
    Footprint,
    Model,
    measure_footprint,
    placed,
    set_cuda_flags,
)
from ..planning.memory import CPU_FORWARD
from ..tiling.geometry import PatchShape
from .heads import is_wide

GPU_BATCH = 16
"""Number of patches of 64 cubed in one forward on a GPU, without --batch. Of larger ones, fewer."""


@dataclass(frozen=True)
class Net:
    """A model fitted to a job."""

    model: Model
    shape: PatchShape
    amp: torch.dtype | None
    """The dtype of autocast; None if it is off."""
    carrier: torch.dtype
    """Dtype in which patches are normalised, float32, or float64 if the input needs it."""
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

    def forward_zeros(self, module: torch.nn.Module, device: torch.device) -> None:
        """Run the module, which lies on a device, once on zeros in the layout of batches."""
        shape = (self.forward, self.model.in_channels, *self.shape.seen)
        batch = torch.empty(shape, dtype=self.model.dtype, device=device, memory_format=self.layout)
        with torch.no_grad(), torch.autocast(device.type, self.amp, self.amp is not None):
            module(batch.zero_())


def fit_net(
    config: InferConfig,
    devices: Sequence[torch.device],
    model: Model,
    shape: PatchShape,
    dtype: np.dtype[np.generic],
) -> Net:
    """Fit a model to the patches of an input of ``dtype``, and to its devices.

    Raises `UsageError` if the model does not take such a batch.
    """
    assert config.batch != "auto"  # by now it is a number
    on_cpu = all(device.type == "cpu" for device in devices)
    amp = choose_amp(config, devices, model.dtype)
    # A Mac's GPU has no float64.
    fine = is_wide(dtype) and all(device.type != "mps" for device in devices)
    if fine and not model.weight_bytes:
        with contextlib.suppress(UsageError):  # a net that makes float32 tensors itself fails
            wide = replace(model, weightless_dtype=torch.float64)
            fit_batch(wide, shape, config.batch, on_cpu=on_cpu)
            model = wide
    forward, footprint = fit_batch(model, shape, config.batch, on_cpu=on_cpu)
    # All lanes on the CPU share this one.
    module = placed(model.module, torch.device("cpu"), footprint.channels_last)
    return Net(
        model=replace(model, module=module),
        shape=shape,
        amp=amp,
        carrier=torch.float64 if fine else torch.float32,
        clip=None if config.clip_norm is None else config.clip_norm or (0.0, 1.0),
        batch=-(-(config.batch or CPU_FORWARD) // forward) * forward if on_cpu else forward,
        forward=forward,
        footprint=footprint,
    )


def fit_batch(
    model: Model, shape: PatchShape, batch: int | None, *, on_cpu: bool
) -> tuple[int, Footprint]:
    """The number of patches in one forward, and its footprint. ``batch`` is that of --batch."""
    # A net that was exported for one batch size takes no other.
    if on_cpu:
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


def with_workspaces(net: Net, config: InferConfig, devices: Sequence[torch.device]) -> Net:
    """The net with a footprint that counts the workspaces of libraries, too.

    All CUDA devices count as alike.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return net
    with cuda_flags_kept():
        set_cuda_flags(config.tf32)
        return with_peak_on(net, gpus[0], torch.cuda)


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
