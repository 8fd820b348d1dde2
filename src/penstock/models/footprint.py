"""The memory of one forward, measured by a run on shapes alone; and its operations, counted.

Torch answers an operator on the meta device in Python, and at its first answers it imports sympy
and its compiler: a second of each process. The operators of most nets are answered here instead
(`output_on_meta`). The kernel that computes them on a CPU is given no samples, or one element of
each tensor, and so computes next to nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from ..base import UsageError
from . import user_code
from .devices import CHANNELS_LAST, is_channels_last, placed
from .load import Head, Model


@dataclass(frozen=True)
class Footprint:
    """The heads that one forward returns, and the memory that it takes."""

    heads: tuple[Head, ...]
    peak_bytes: int | None
    """Most bytes alive at once in one forward: input and output included, weights not. None if
    the net could not be run on shapes. A job on a CUDA device counts workspaces of libraries."""
    channels_last: bool = True
    """False for a net that fails on inputs and convolutions that are laid out channels last."""


_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default)


class LightMode(TorchDispatchMode):
    """A mode that sees the operators of a forward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which takes a second, for a mode that does not
        use it. A torch that does not call this is only slower."""
        return False


class _Peak(LightMode):
    """Adds up the storages that are alive while operators run on shapes."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        """``weights`` are not counted, nor are views of them, which linear layers make."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = output_on_meta(func, args, kwargs or {})
        if out is NotImplemented:
            out = func(*args, **kwargs or {})
        convolves = func is torch.ops.aten.convolution.default
        if convolves and any(is_channels_last(tensor) for tensor in args[:2]):
            out = out.to(memory_format=CHANNELS_LAST[out.ndim])  # on shapes alone torch forgets it
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.track(tensor)
        if convolves:
            # The libraries below torch may copy input and output into another layout.
            self.peak = max(self.peak, self.alive + args[0].nbytes + out.nbytes)
        if func in _SOFTMAX and not args[0].is_contiguous():  # torch works on a contiguous copy
            self.peak = max(self.peak, self.alive + args[0].nbytes)
        return out

    def track(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.alive -= count


def _zeros(model: Model, shape: Sequence[int], channels_last: bool, device: str = "cpu") -> Tensor:
    """An input in the memory layout that a lane uses."""
    return _empty(shape, model.dtype, channels_last, device).zero_()


def measure_footprint(model: Model, shape: Sequence[int]) -> Footprint:
    """The heads and the memory of a forward, by a run on shapes alone.

    A net that does not allow this (TorchScript, or a branch that depends on values) is run once on
    zeros on the CPU instead, on two samples of the batch at most. Its peak is then unknown.

    Args:
        model: The model.
        shape: Shape of the input: (batch, channels, spatial...).

    Returns:
        The heads, the most bytes alive at once, and whether channels last works.

    Raises:
        UsageError: The net does not take the shape, or returns another one.
    """
    peak: int | None
    module: Any = None
    for channels_last in (True, False):
        try:
            if isinstance(model.module, torch.jit.ScriptModule):
                raise TypeError("its operators are not seen")
            # A copy without its weights: those of the module are not touched.
            there = placed(model.module, torch.device("meta"), channels_last)
            counter = _Peak([*there.parameters(), *there.buffers()])
            with torch.no_grad(), counter:
                x = _zeros(model, shape, channels_last, "meta")
                outputs = there(x)
            peak, module = counter.peak, there
            break
        except UsageError:
            raise
        except Exception:
            continue
    else:
        outputs, shape, channels_last = _run_once(model, shape)
        peak = None
    heads = model.heads(outputs)
    for name, tensor in heads.items():
        if tensor.ndim == len(shape) and tensor.shape[0] != shape[0]:
            raise UsageError(
                f"model {model.name} turns a batch of {shape[0]} into one of {tensor.shape[0]}"
            )
        pairs = zip(tensor.shape[2:], shape[2:], strict=False)
        if tensor.ndim != len(shape) or not all(0 in (a % b, b % a) for a, b in pairs):
            raise UsageError(
                f"model {model.name} turns a patch of {tuple(shape[2:])} into "
                f"{tuple(tensor.shape[2:])} (head {name}); the two must be equal, or one a whole "
                "multiple of the other"
            )
        if tensor.is_complex():
            raise UsageError(f"model {model.name} returns complex numbers (head {name})")
    returned = tuple(
        Head(name, tensor.shape[1], tensor.dtype, _factors(tensor.shape[2:], shape[2:]))
        for name, tensor in heads.items()
    )
    if module is not None and any(head.factors for head in returned):
        _check_constant(model, module, shape, returned, channels_last)
    return Footprint(returned, peak, channels_last)


def _factors(sides: Sequence[int], of: Sequence[int]) -> tuple[Fraction, ...]:
    """See `Head.factors`."""
    return () if tuple(sides) == tuple(of) else tuple(map(Fraction, sides, of))


def _check_constant(
    model: Model, there: Any, shape: Sequence[int], heads: Sequence[Head], channels_last: bool
) -> None:
    """Refuse a net that cuts a margin from patches: at twice the patch the factors are others."""
    twice = [2 * side for side in shape[2:]]
    try:
        with torch.no_grad():
            outputs = there(_zeros(model, (*shape[:2], *twice), channels_last, "meta"))
    except Exception:  # it takes one shape only
        return
    for head, tensor in zip(heads, model.heads(outputs).values(), strict=True):
        if _factors(tensor.shape[2:], twice) != head.factors:
            raise UsageError(
                f"model {model.name} turns a patch of {tuple(twice)} into "
                f"{tuple(tensor.shape[2:])} (head {head.name}), which is no constant factor; pad "
                "its convolutions"
            )


def _run_once(model: Model, shape: Sequence[int]) -> tuple[Any, Sequence[int], bool]:
    """The net's output on the CPU, the shape of its input, and whether it was channels last.

    Two samples show what happens to the batch axis, while a whole batch would take a CPU long. Only
    a net that was exported for one size of batch gets all of it.
    """
    few = (min(2, shape[0]), *shape[1:])
    sizes = [tuple(shape)]
    if few != sizes[0] and not isinstance(model.module, torch.fx.GraphModule):
        sizes = [few, *sizes]
    failed: Exception | None = None
    with torch.no_grad():  # not inference mode: a training may use what the net caches
        for channels_last in (True, False):
            module = placed(model.module, torch.device("cpu"), channels_last)
            for size in sizes:
                try:
                    return module(_zeros(model, size, channels_last)), size, channels_last
                except Exception as error:
                    failed = error
    assert failed is not None
    raise UsageError(
        f"model {model.name} does not take a batch of shape {tuple(shape)} "
        f"(batch, channels, spatial; see --batch, --patch and --in-channels): "
        f"{user_code.error_in_user_code(failed)}"
    ) from failed


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
        if any(tensor is each for each in sampled):
            return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
        # Of the same shape, in the memory of one number.
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    def filled(tensor: Tensor) -> Tensor:
        return _empty((num_samples, *tensor.shape[1:]), tensor.dtype, last)

    outputs = func(*tree_map_only(Tensor, lean, args), **kwargs)
    return tree_map_only(Tensor, filled, outputs)


def _of_joined(func: Any, tensors: Sequence[Tensor], axis: int = 0) -> Any:
    """For `torch.cat` along any axis but the first, along which it would add samples."""
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
    """For `torch.native_group_norm`, which also returns two statistics of a sample's groups."""
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
    # One element of each, with as many axes, by which torch decides on dtypes.
    ones = tree_map_only(Tensor, lambda x: torch.ones((1,) * x.ndim, dtype=x.dtype), args)
    output = func(*ones, **kwargs)
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


def _empty(
    shape: Sequence[int], dtype: torch.dtype, channels_last: bool = False, device: str = "meta"
) -> Tensor:
    layout = CHANNELS_LAST[len(shape)] if channels_last else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=layout)


class Operations(LightMode):
    """Counts floating-point operations by torch's own formulas. Its `FlopCounterMode` does so, too,
    and imports the compiler for it, which takes a second of each start."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:  # it is one of the operators that all others are made of
            out = func(*args, **kwargs)
            count = flop_registry.get(func._overloadpacket)
            self.total += count(*args, **kwargs, out_val=out) if count else 0
        return out
