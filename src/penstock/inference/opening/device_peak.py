"""The memory of one forward on a CUDA device, as the device's allocator counts it.

A run on shapes sees the tensors of a net. cuDNN takes workspaces besides, which no shape shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...base import InferConfig, cuda_flags_kept
from ...models import placed, set_cuda_flags
from .net import Net


def with_workspaces(net: Net, config: InferConfig, devices: Sequence[torch.device]) -> Net:
    """The net with a footprint that counts the workspaces of libraries, too.

    All CUDA devices count as alike. With ``--cudnn-benchmark`` nothing is measured: cuDNN then
    tries algorithms that take all free memory once, and the plan has a note about it.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus or config.cudnn_benchmark:
        return net
    with cuda_flags_kept():
        set_cuda_flags(config.tf32)
        return with_peak(net, forward_peak(net, gpus[0], torch.cuda))


def with_peak(net: Net, peak: int | None) -> Net:
    """The net with the larger of two peaks: that of its tensors, and one that was measured."""
    peaks = [count for count in (net.footprint.peak_bytes, peak) if count is not None]
    return replace(net, footprint=replace(net.footprint, peak_bytes=max(peaks, default=None)))


def forward_peak(net: Net, device: torch.device, allocator: Any) -> int | None:
    """The most bytes that one forward of zeros takes on a device.

    Input and output are included, and the weights that autocast keeps in half precision.

    Args:
        net: The net as the job runs it. It is not compiled for this.
        device: The device.
        allocator: The functions that count its memory: `torch.cuda`, or one with the same names.

    Returns:
        Bytes. None if the net fails on zeros, or the device has no memory for it: the run, which
        meets the same on its input, says so.
    """
    module = None
    try:
        module = placed(net.model.module, device, net.footprint.channels_last)
        allocator.reset_peak_memory_stats(device)
        before = allocator.memory_allocated(device)
        with torch.no_grad(), torch.autocast(device.type, net.amp, net.amp is not None):
            module(net.zeros(device))
        allocator.synchronize(device)
        return int(allocator.max_memory_allocated(device)) - int(before)
    except Exception:  # of a user's net
        return None
    finally:
        del module  # its memory is free before the plan asks how much is
        allocator.empty_cache()
