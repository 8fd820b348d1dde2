"""The memory of one forward, measured by a run on shapes alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..base import UsageError
from . import user_code
from .devices import CHANNELS_LAST, is_channels_last, placed
from .load import Head, Model
from .shapes import output_on_meta


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


class _Peak(TorchDispatchMode):
    """Adds up the storages that are alive while operators run on shapes."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        """``weights`` are not counted, nor are views of them, which linear layers make."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known = {weight.untyped_storage()._cdata for weight in weights}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which takes a second, for a mode that does not
        use it. A torch that does not call this is only slower."""
        return False

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


def _zeros(
    model: Model, shape: Sequence[int], channels_last: bool, device: str | None = None
) -> Tensor:
    """An input in the memory layout that a lane uses."""
    layout = CHANNELS_LAST[len(shape)] if channels_last else torch.contiguous_format
    empty = torch.empty(tuple(shape), dtype=model.dtype, device=device, memory_format=layout)
    return empty.zero_()


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
        if tensor.ndim != len(shape) or not all(map(_is_whole, tensor.shape[2:], shape[2:])):
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


def _is_whole(side: int, of: int) -> bool:
    """Whether one length is a whole multiple of the other."""
    return 0 in (side % of, of % side)


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
