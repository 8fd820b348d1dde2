"""The outputs of common operators as shapes alone, given by the kernels of the CPU.

Torch answers an operator on the meta device in Python, and at its first answers it imports sympy
and its compiler: a second of each process. The operators of most nets are answered here instead.
The kernel that computes them on a CPU is given no samples, or one element of each tensor, and so
computes next to nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .devices import CHANNELS_LAST, is_channels_last

_ATEN = torch.ops.aten


def output_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The output of an operator on the meta device.

    Args:
        func: The operator, such as ``torch.ops.aten.relu.default``.
        args: Its arguments.
        kwargs: Its named arguments.

    Returns:
        What torch returns for them: tensors of the same shapes, dtypes and order of axes. It is
        `NotImplemented` where torch is to be asked, which answers or raises.
    """
    answer = _ANSWERS.get(func) or (_of_elements if torch.Tag.pointwise in func.tags else None)
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if answer is None or not tensors or not all(tensor.is_meta for tensor in tensors):
        return NotImplemented
    with contextlib.suppress(RuntimeError, ValueError, IndexError):
        return answer(func, *args, **kwargs)
    return NotImplemented


def _of_samples(func: Any, *args: Any, **kwargs: Any) -> Any:
    """For an operator that computes each sample, or row, of some of its arguments alone."""
    sampled = tree_leaves([args[place] for place in _SAMPLED.get(func, (0,))])
    num_samples = len(sampled[0])
    if any(len(tensor) != num_samples for tensor in sampled):
        return NotImplemented
    last = all(map(is_channels_last, sampled))

    def lean(tensor: Tensor) -> Tensor:
        is_sampled = any(tensor is each for each in sampled)
        return _without_samples(tensor) if is_sampled else _hollow(tensor)

    def filled(tensor: Tensor) -> Tensor:
        return _empty((num_samples, *tensor.shape[1:]), tensor.dtype, last)

    outputs = func(*tree_map_only(Tensor, lean, args), **kwargs)
    return tree_map_only(Tensor, filled, outputs)


def _of_joined(func: Any, tensors: Sequence[Tensor], axis: int = 0) -> Any:
    """For `torch.cat` along any axis but the first, which puts samples behind others."""
    return NotImplemented if axis % tensors[0].ndim == 0 else _of_samples(func, tensors, axis)


def _of_convolution(
    func: Any, batch: Tensor, kernel: Tensor, bias: Tensor | None, *how: Any
) -> Any:
    """The sides are those of a convolution of one channel, for which torch copies no kernel."""
    *sides, transposed, output_padding, groups = how
    first, second = kernel.shape[:2]
    taken, made = (first, second * groups) if transposed else (second * groups, first)
    if len(batch[0]) != taken or taken % groups or made % groups or kernel.ndim != batch.ndim:
        return NotImplemented
    one = torch.empty((0, 1, *batch.shape[2:]), dtype=batch.dtype)
    kernel_of_one = torch.empty((1, 1, *kernel.shape[2:]), dtype=kernel.dtype)
    output = func(one, kernel_of_one, None, *sides, transposed, output_padding, 1)
    shape = (len(batch), made, *output.shape[2:])
    return _empty(shape, output.dtype, is_channels_last(batch))


def _of_channels(func: Any, batch: Tensor, *others: Any) -> Any:
    """For `torch.native_batch_norm`, which returns two statistics of each channel as well."""
    dtype = torch.promote_types(batch.dtype, torch.float32)
    return _with_statistics(batch, batch.shape[1:2], dtype)


def _of_groups(func: Any, batch: Tensor, *others: Any) -> Any:
    """For `torch.native_group_norm`, which returns two of each sample's groups."""
    return _with_statistics(batch, (len(batch), others[5]), batch.dtype)


def _with_statistics(batch: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Any:
    output = _like(batch)
    if output is NotImplemented:
        return NotImplemented
    return output, _empty(shape, dtype), _empty(shape, dtype)


def _of_elements(func: Any, *args: Any, **kwargs: Any) -> Any:
    """For an operator that computes each element of the output from one element of each input."""
    if torch.Tag.nondeterministic_seeded in func.tags or kwargs.keys() - _OF_ELEMENTS:
        return NotImplemented
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    shape = np.broadcast_shapes(*(tensor.shape for tensor in inputs))
    whole = [tensor for tensor in inputs if tensor.shape == shape]
    output = func(*tree_map_only(Tensor, _one, args), **kwargs)
    if not isinstance(output, Tensor):
        return NotImplemented
    if func._schema.is_mutable:
        return args[0] if args[0].shape == shape else NotImplemented
    return _like(whole[0], output.dtype) if whole else _empty(shape, output.dtype)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    # Torch does not say of these that they are pointwise.
    _ATEN._prelu_kernel.default: _of_elements,
    _ATEN.hardswish.default: _of_elements,
    _ATEN.hardswish_.default: _of_elements,
    _ATEN.convolution.default: _of_convolution,
    _ATEN.cat.default: _of_joined,
    _ATEN.native_batch_norm.default: _of_channels,
    _ATEN.native_group_norm.default: _of_groups,
    **dict.fromkeys(
        (
            _ATEN.max_pool2d_with_indices.default,
            _ATEN.max_pool3d_with_indices.default,
            _ATEN.avg_pool2d.default,
            _ATEN.avg_pool3d.default,
            _ATEN.mm.default,
            _ATEN.bmm.default,
            _ATEN.addmm.default,
            _ATEN.native_layer_norm.default,
            _ATEN._safe_softmax.default,
            _ATEN._softmax.default,
            _ATEN.upsample_nearest2d.default,
            _ATEN.upsample_nearest3d.default,
            _ATEN.upsample_bicubic2d.default,
            _ATEN.upsample_bilinear2d.default,
            _ATEN.upsample_trilinear3d.default,
        ),
        _of_samples,
    ),
}
_SAMPLED = {_ATEN.bmm.default: (0, 1), _ATEN.addmm.default: (1,)}
"""Places of the arguments that have samples, where it is not the first alone."""
_OF_ELEMENTS = {"alpha", "approximate", "rounding_mode"}
"""Named arguments that decide about elements, and not about a whole tensor."""


def _without_samples(batch: Tensor) -> Tensor:
    return torch.empty((0, *batch.shape[1:]), dtype=batch.dtype)


def _hollow(tensor: Tensor) -> Tensor:
    """A tensor of the same shape in the memory of one number."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _one(tensor: Tensor) -> Tensor:
    """One element, with as many axes, by which torch decides on dtypes."""
    return torch.ones((1,) * tensor.ndim, dtype=tensor.dtype)


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Any:
    """A tensor of the same shape, with its axes in the same order in memory."""
    shape, steps = tensor.shape, tensor.stride()
    if 0 in steps:
        return NotImplemented
    dtype = dtype or tensor.dtype
    if sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) < tensor.numel():
        return torch.empty_strided(shape, steps, dtype=dtype, device="meta")
    order = sorted(range(len(shape)), key=lambda axis: -steps[axis])
    return torch.empty_permuted(shape, order, dtype=dtype, device="meta")


def _empty(shape: Sequence[int], dtype: torch.dtype, channels_last: bool = False) -> Tensor:
    layout = CHANNELS_LAST[len(shape)] if channels_last else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=dtype, device="meta", memory_format=layout)
