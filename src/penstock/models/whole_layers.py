"""Finds the layer of a network that sees the whole of what it is given."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_CHANGE = 1.0
"""Size of the change in a voxel. Inputs are normalised, so it is theirs."""


def layer_of_whole(
    module: nn.Module, x: Tensor, axis: int, kinds: tuple[type[nn.Module], ...]
) -> str:
    """The first layer whose output changes everywhere when the voxels at one end of a window do.

    Args:
        module: The network.
        x: The window, of shape (1, channels, spatial...).
        axis: The spatial axis that the end is of.
        kinds: The layers to look at.

    Returns:
        Its name and its class; empty if there is none, or it is not known.
    """
    layers = [each for each in module.named_modules() if isinstance(each[1], kinds)]
    if not layers:
        return ""
    probe, axes = x.clone(), x.ndim - 2
    probe.movedim(2 + axis, 0)[0] += _CHANGE

    def compare(name: str, *forward: Any) -> None:
        output = forward[-1][0] if isinstance(forward[-1], tuple) else forward[-1]
        if isinstance(output, Tensor) and _is_whole(output, axis, axes):
            raise _Whole(name)

    with contextlib.ExitStack() as hooks:
        for name, layer in layers:
            words = f"{name or 'the network'} ({type(layer).__name__})"
            with contextlib.suppress(RuntimeError):  # some programs take no hooks
                handle = layer.register_forward_hook(partial(compare, words))
                hooks.callback(handle.remove)
        try:
            module(torch.cat([x, probe]))
        except _Whole as whole:
            return str(whole)
        except Exception:  # it takes no batch of two, so the layer is not known
            return ""
    return ""


class _Whole(Exception):
    """Ends a forward at the layer that is to blame."""


def _is_whole(output: Tensor, axis: int, axes: int) -> bool:
    """Whether the two samples of a layer's output differ at the far end of an axis, or everywhere
    where there is no such axis."""
    if output.ndim == 2 + axes and output.shape[0] == 2 and output.shape[2 + axis] > 1:
        return bool((output[0] != output[1]).movedim(1 + axis, 0)[-1].any())
    if output.ndim < 2 or output.shape[0] != 2:
        return False
    return float((output[0] != output[1]).double().mean()) > 0.99
