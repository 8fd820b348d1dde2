"""Devices by name, and modules placed on them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from ..base import UsageError
from .load import computed_attributes


def placed(module: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """A module on a device. The module given is not changed.

    Tensors that lie on the device already, in the right layout, are shared and not copied.

    Args:
        module: The module to place.
        device: The device to run on.
        channels_last: Lay convolutions out channels last: tensor cores take that, and it is a third
            to a half faster on a CPU as well.

    Returns:
        A copy on the device, or the module itself if nothing had to be moved.
    """
    memo = _moved(module, device, channels_last)
    on_cpu = device.type == "cpu"
    to_onednn = on_cpu and channels_last and any(map(_is_pointwise, module.modules()))
    if on_cpu and not to_onednn and all(key == id(tensor) for key, tensor in memo.items()):
        return module
    memo |= {id(tensor): tensor.detach().to(device) for tensor in computed_attributes(module)}
    copied = copy.deepcopy(module, memo).to(device)  # TorchScript modules ignore the memo
    for part in copied.modules():
        if isinstance(part, torch.fx.GraphModule):
            _move_literals(part, device)
        elif to_onednn and _is_pointwise(part):
            _give_to_onednn(part)
    return copied


def _is_pointwise(part: nn.Module) -> bool:
    """Whether a module is a convolution of kernel 1 that torch, on one thread, gives to its own
    kernel and not to oneDNN. Subclasses may do something of their own with their numbers, and are
    left alone."""
    return (
        (type(part) is nn.Conv2d or type(part) is nn.Conv3d)
        and set(part.kernel_size) == {1}
        and set(part.dilation) == {1}
        and part.weight.dtype == torch.float32  # of the others oneDNN takes none, or all
        and torch.backends.mkldnn.is_available()
    )


def _give_to_onednn(part: nn.Module) -> None:
    """Have oneDNN compute a convolution of kernel 1, on one thread as on several.

    On one thread torch takes a kernel of its own. It copies its input to channels first, and all
    layers after it are copied too: a tenth of a UNet's time, up to nine tenths of the layer's. A
    dilated convolution always goes to oneDNN, and a dilation moves nothing where the kernel is 1.
    """
    part.dilation = (2,) * len(part.kernel_size)  # type: ignore[arg-type]


def _moved(module: nn.Module, device: torch.device, channels_last: bool) -> dict[int, Any]:
    """Parameters and buffers on a device, by the ids of the module's own. Those that lie there
    already are the module's own."""
    layouts: dict[int, torch.memory_format] = {}
    for part in module.modules():
        if channels_last and isinstance(part, nn.Conv2d | nn.Conv3d):
            kernels = (t for t in part.parameters() if t.ndim in CHANNELS_LAST)
            layouts |= {id(kernel): CHANNELS_LAST[kernel.ndim] for kernel in kernels}
    moved: dict[int, Any] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        with torch.no_grad():
            there = tensor.to(device, memory_format=layouts.get(id(tensor), torch.preserve_format))
        if there is not tensor and isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, tensor.requires_grad)
        moved[id(tensor)] = there
    return moved


def _move_literals(program: torch.fx.GraphModule, device: torch.device) -> None:
    """Make an exported program create its own tensors on a device: its graph names another one."""
    for node in program.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        elif node.target is torch.ops.aten.to.device:
            node.args = (node.args[0], device, *node.args[2:])
    program.recompile()


def find_devices(names: Sequence[str]) -> list[torch.device]:
    """Devices by name, each checked to exist. ``auto`` is all CUDA devices, else MPS, else the CPU.

    Raises:
        UsageError: A device does not exist; the message says what this machine has instead.
    """
    there = [torch.device("cpu")]
    if torch.cuda.is_available():  # else the driver may count cards that this torch cannot use
        there += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    there += [torch.device("mps")] * torch.backends.mps.is_available()
    devices: list[torch.device] = []
    for name in names:
        if name == "auto":
            return there[1:] or there
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise UsageError(
                f"--devices {name!r} is not a device; try cpu, cuda:0 or mps"
            ) from error
        # Of CUDA without an index it is the first device; the others have no second.
        index = (device.index or 0,) if device.type == "cuda" else ()
        devices.append(torch.device(device.type, *index))
        if devices[-1] not in there:
            raise UsageError(f"--devices {name}: this machine has {', '.join(map(str, there))}")
    if not devices:
        raise UsageError("--devices names no device")
    if len(set(devices)) < len(devices):
        raise UsageError(f"--devices {' '.join(names)} names one device twice")
    return devices


def set_cuda_flags(tf32: bool, cudnn_benchmark: bool = False) -> None:
    """Set how CUDA computes in float32, for products and convolutions alike.

    Args:
        tf32: Use TF32. Torch by itself uses it in convolutions alone.
        cudnn_benchmark: Let cuDNN time its algorithms and take the fastest. That may differ from
            run to run, and with it the last bits of a result.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = cudnn_benchmark


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout by the number of axes of a tensor: (sample, channel, [plane,] row, column)."""


def channels_last(tensor: Tensor) -> Tensor:
    """The tensor with its channels innermost, where it has the axes of images or of volumes."""
    form = CHANNELS_LAST.get(tensor.ndim)
    return tensor if form is None else tensor.contiguous(memory_format=form)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the channels of a tensor are innermost, and not its pixels."""
    axes = tensor.ndim
    return axes in CHANNELS_LAST and tensor.stride(1) == 1 and math.prod(tensor.shape[2:]) > 1
