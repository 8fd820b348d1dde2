"""One device's share of a job: patches of blocks into batches, and batches back into blocks.

    upload | gather | normalise | forward | scatter | download

A lane is fed blocks in order and gives them back in order. Batches cross block borders, and the
last one is padded to the full size, so the net sees one input shape from first to last and a
patch's result does not depend on what else is in its batch. On the CPU upload and download are
free; on CUDA a block crosses the bus once each way, in the dtype of the store, from and to pinned
memory, on streams of their own. Everything between is the same code.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .errors import PenstockError
from .flow import Pool
from .grid import Block, Geometry, indices
from .model import Model
from .normalize import Scaling
from .probe import Probe
from .stitch import axis_weights

_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
_SUMS = np.dtype(np.float32)
"""Blended patches are added up in this."""


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What a lane must know beside geometry and model."""

    batch: int
    forward: int
    """Patches of a batch that a CPU takes at a time."""
    model_axes: int
    amp: torch.dtype | None
    compile_mode: str | None
    """None: eager."""
    clip: tuple[float, float] | None
    denormalize: bool
    min_blend_weight: float
    out_channels: tuple[int, ...]
    out_dtypes: tuple[np.dtype[Any], ...]


@dataclass(slots=True)
class Loaded:
    """A block as read: reflected at the volume's edges, in the dtype of the store."""

    block: Block
    array: NDArray[Any] | None
    """Shape (channels, z, y, x) of ``block.read``; None once the lane has taken it in."""
    scaling: Scaling
    invalid: NDArray[np.bool_] | None = None
    """Voxels of ``block.support`` that were not finite, None where all were."""


@dataclass(slots=True)
class Finished:
    """A block as computed."""

    loaded: Loaded
    outputs: list[Tensor]
    """On the host, one for each head, shape (channels, z, y, x) of ``block.support``."""
    buffers: list[NDArray[Any]]
    """What the outputs lie in, for the pool; empty where they do not come from it."""
    finite: Tensor
    """Whether the model has made only finite values so far."""
    ready: torch.cuda.Event | None = None

    @property
    def block(self) -> Block:
        return self.loaded.block

    def heads(self, out_dtypes: Sequence[np.dtype[Any]]) -> list[NDArray[Any]]:
        """The outputs, once their download has ended.

        A voxel whose input was not finite becomes NaN, or 0 where the sink holds integers.

        Raises `PenstockError` if the model made such a value itself: in an integer it would hide.
        """
        if self.ready is not None:
            self.ready.synchronize()
        if not bool(self.finite):
            raise PenstockError("the model made values that are not finite out of finite ones")
        heads = [output.numpy() for output in self.outputs]
        if self.loaded.invalid is not None:
            for head, dtype in zip(heads, out_dtypes, strict=True):
                head[:, self.loaded.invalid] = np.nan if dtype.kind == "f" else 0
        return heads


@dataclass(slots=True)
class _Open:
    """A block some of whose patches are still to come back."""

    loaded: Loaded
    outputs: list[Tensor]
    buffers: list[NDArray[Any]]
    remaining: int


@dataclass(slots=True)
class _Slot:
    """A patch of the batch under way."""

    owner: _Open
    index: tuple[int, ...]
    place: tuple[int, ...]
    """Where it begins in what its block reads, and what it owns in what its block owns."""


class Lane:
    """Feeds one device."""

    def __init__(
        self,
        device: torch.device,
        model: Model,
        geometry: Geometry,
        settings: LaneSettings,
        probe: Probe,
        pools: tuple[Pool, Pool],
        before_batch: Callable[[int], None],
    ) -> None:
        """``pools`` are those of the arrays that come in and of those that go out;
        ``before_batch`` is told how many patches a forward will run and may raise to stop it."""
        self.device, self.model, self.geometry = device, model, geometry
        self.settings, self.probe = settings, probe
        self.read_pool, self.block_pool = pools
        self.before_batch = before_batch
        self.on_cuda = device.type == "cuda"
        self._module = self._place(model.module)
        patch = geometry.patch if settings.model_axes == 3 else geometry.patch[1:]
        self._batch = torch.empty(
            (settings.batch, model.in_channels, *patch),
            device=device,
            memory_format=_LAST[settings.model_axes],
        )
        # What of a patch's output counts, and room to work on it: small enough to stay in cache.
        edges = zip(geometry.before, geometry.stride, geometry.patch, strict=True)
        self._keep = tuple(slice(b, b + s) if self._trim else slice(p) for b, s, p in edges)
        shape = tuple(part.stop - (part.start or 0) for part in self._keep)
        self._values = [torch.empty((n, *shape), device=device) for n in settings.out_channels]
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._slots: list[_Slot] = []
        self._open: deque[_Open] = deque()
        self._copies = torch.cuda.Stream(device) if self.on_cuda else None

    @property
    def _trim(self) -> bool:
        return self.geometry.seam == "trim"

    def push(self, loaded: Loaded) -> Iterator[Finished]:
        """Take a block; yield those that it completes, oldest first."""
        array, loaded.array = loaded.array, None
        assert array is not None
        native = self._upload(array)
        outputs, buffers = self._outputs(loaded.block)
        opened = _Open(loaded, outputs, buffers, loaded.block.patches.size)
        self._open.append(opened)
        waiting = indices(loaded.block.patches)
        while True:
            with self.probe.span("normalise", loaded.block), _one_thread():
                for index in islice(waiting, self.settings.batch - len(self._slots)):
                    self._gather(opened, native, index)
            if len(self._slots) < self.settings.batch:
                self.read_pool.give(array)
                return
            self._forward()
            yield from self._finished()

    def flush(self) -> Iterator[Finished]:
        """Run what is left in a padded batch."""
        if self._slots:
            rest = self._batch[len(self._slots) :]
            rest.copy_(self._batch[:1].expand_as(rest))
            self._forward()
        yield from self._finished()

    # --- the steps -----------------------------------------------------------------------------

    def _place(self, module: nn.Module) -> nn.Module:
        """The model on this device, its convolutions laid out channels last: what tensor cores
        take, and a third to a half faster on a CPU as well."""
        convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
        if convolutions or self.device.type != "cpu":
            module = copy.deepcopy(module).to(self.device)  # the caller's own stays as it is
        for part in module.modules():
            if isinstance(part, nn.Conv2d | nn.Conv3d):
                axes = part.weight.ndim - 2
                part.to(memory_format=_LAST[axes])  # type: ignore[call-overload]
        if self.settings.compile_mode is not None:
            return torch.compile(module, mode=self.settings.compile_mode, dynamic=False)  # type: ignore[return-value]
        return module

    def _outputs(self, block: Block) -> tuple[list[Tensor], list[NDArray[Any]]]:
        """Arrays for a block's heads, and on the CPU the buffers that they lie in."""
        outputs: list[Tensor] = []
        buffers: list[NDArray[Any]] = []
        for channels, dtype in zip(
            self.settings.out_channels, self.settings.out_dtypes, strict=True
        ):
            shape, kept = (channels, *block.support.shape), dtype if self._trim else _SUMS
            if self.device.type == "cpu":
                buffers.append(self.block_pool.take(shape, kept))
                outputs.append(torch.from_numpy(buffers[-1]))
            else:
                outputs.append(torch.empty(shape, dtype=_torch_dtype(kept), device=self.device))
            if not self._trim:
                outputs[-1].zero_()
        return outputs, buffers

    def _upload(self, array: NDArray[Any]) -> Tensor:
        native = torch.from_numpy(array)
        if self._copies is None:
            return native.to(self.device)
        # Torch keeps released pinned memory and hands it out again: after the first blocks
        # this allocates nothing.
        with torch.cuda.stream(self._copies):
            uploaded = native.pin_memory().to(self.device, non_blocking=True)
        main = torch.cuda.current_stream(self.device)
        main.wait_stream(self._copies)
        uploaded.record_stream(main)
        return uploaded

    def _gather(self, opened: _Open, native: Tensor, index: tuple[int, ...]) -> None:
        """Copy a patch of a block into the batch and normalise it there."""
        scaling, first = opened.loaded.scaling, opened.loaded.block.patches.start
        steps = zip(index, first, self.geometry.stride, strict=True)
        place = tuple((i - f) * stride for i, f, stride in steps)
        source = native[(slice(None), *_window(place, self.geometry.patch))]
        target = self._batch[len(self._slots)]
        target.copy_(source if self.settings.model_axes == 3 else source[:, 0])
        if scaling != Scaling():
            target.sub_(scaling.lower).div_(scaling.scale)
        if self.settings.clip is not None:
            target.clamp_(*self.settings.clip)
        self._slots.append(_Slot(opened, index, place))

    def _forward(self) -> None:
        """Run the batch and put its patches into their blocks.

        A CPU takes as many at a time whatever the batch: the kernels that torch picks there, and
        with them the last bits of a result, depend on how many there are.
        """
        self.before_batch(len(self._slots))
        step = self.settings.forward if self.device.type == "cpu" else self.settings.batch
        for start in range(0, len(self._slots), step):
            slots = self._slots[start : start + step]
            block = slots[0].owner.loaded.block
            with self.probe.span("forward", block), torch.inference_mode():
                outputs = self._run(self._batch[start : start + step])
            with self.probe.span("stitch", block), torch.inference_mode(), _one_thread():
                for head, output_BCZYX in enumerate(outputs):
                    for row, slot in enumerate(slots):
                        self._scatter(head, output_BCZYX[row], slot)
        for slot in self._slots:
            slot.owner.remaining -= 1
        self._slots.clear()

    def _run(self, batch: Tensor) -> list[Tensor]:
        """The model's heads, one for each sink, shape (batch, channels, z, y, x)."""
        with torch.autocast(self.device.type, self.settings.amp, self.settings.amp is not None):
            outputs = list(self.model.heads(self._module(batch)).values())
        if len(outputs) == 1 and len(self.settings.out_dtypes) > 1:
            outputs = list(outputs[0].split(1, dim=1))
        return outputs if self.settings.model_axes == 3 else [o.unsqueeze(2) for o in outputs]

    def _scatter(self, head: int, output_CZYX: Tensor, slot: _Slot) -> None:
        """Put a patch into its block: what it owns (trim), or its share of all it sees (blend)."""
        loaded = slot.owner.loaded
        values = self._values[head].copy_(output_CZYX[(slice(None), *self._keep)])
        if self.settings.denormalize and loaded.scaling != Scaling():
            values.mul_(loaded.scaling.scale).add_(loaded.scaling.lower)
        low, high = torch.aminmax(values)  # a NaN anywhere makes both NaN
        self._finite &= low * 0 + high * 0 == 0  # so do infinities, times nothing
        begin = slot.place
        if self._trim:
            to_range_(values, self.settings.out_dtypes[head])
        else:
            for axis, weights in enumerate(self._weights(slot.index)):
                values.mul_(weights.view([-1 if a == axis else 1 for a in range(3)]))
            # At the volume's lower edges a patch sees more than it contributes to.
            outside = zip(
                slot.place, loaded.block.read.start, loaded.block.support.start, strict=True
            )
            begin = tuple(place + read - support for place, read, support in outside)
        # At the upper edges the slices end with the block.
        target = slot.owner.outputs[head][(slice(None), *_window(begin, values.shape[1:]))]
        source = values[(slice(None), *_window([-min(b, 0) for b in begin], target.shape[1:]))]
        target.copy_(source) if self._trim else target.add_(source)

    def _weights(self, index: Sequence[int]) -> list[Tensor]:
        geometry, floor = self.geometry, self.settings.min_blend_weight
        shape = zip(
            geometry.patch, geometry.overlap, index, geometry.cores.cells.shape, strict=True
        )
        return [_weights_on(self.device, p, o, floor, i, n) for p, o, i, n in shape]

    def _finished(self) -> Iterator[Finished]:
        while self._open and self._open[0].remaining == 0:
            yield self._download(self._open.popleft())

    def _download(self, done: _Open) -> Finished:
        if self._copies is None:
            outputs = [output.cpu() for output in done.outputs]
            return Finished(done.loaded, outputs, done.buffers, self._finite.cpu())
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        event = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            host = [_to_pinned(t) for t in done.outputs]
            finite = _to_pinned(self._finite)
            event.record(self._copies)
        for tensor in (*done.outputs, self._finite):
            tensor.record_stream(self._copies)
        return Finished(done.loaded, host, [], finite, event)


@lru_cache(maxsize=1024)
def _weights_on(
    device: torch.device, patch: int, overlap: int, floor: float, index: int, count: int
) -> Tensor:
    """`axis_weights` on a device, copied there once and not for each patch and head."""
    return torch.from_numpy(axis_weights(patch, overlap, floor, index, count)).to(device)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Copies of a patch are made by one thread: waking others, on cores that decode and encode,
    takes longer than the copy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _window(start: Sequence[int], shape: Sequence[int]) -> Iterator[slice]:
    """Slices of so many voxels, without those before the first."""
    return (slice(max(a, 0), a + n) for a, n in zip(start, shape, strict=True))


def to_range_(values: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Round (half to even) where ``dtype`` is of integers, and clip to its range, in place.

    The largest 32-bit integers are no float32: the nearest one below stands for them.
    """
    if dtype.kind == "f":
        info = np.finfo(dtype)
        return values if dtype.itemsize > 2 else values.clamp_(float(info.min), float(info.max))
    if dtype.kind == "b":
        return values.round_().clamp_(0, 1)
    low, high = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
    if np.float32(high) > high:
        high = float(np.nextafter(np.float32(high), np.float32(0)))
    return values.round_().clamp_(low, high)


def cast(sums: NDArray[np.float32], out: NDArray[Any]) -> None:
    """A blended sum into an array of the dtype of its sink; ``sums`` is used up."""
    torch.from_numpy(out).copy_(to_range_(torch.from_numpy(sums), out.dtype))


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
