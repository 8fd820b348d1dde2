"""One device's share of a job: patches of blocks into batches, and batches back into blocks.

    upload | normalise | gather | forward | scatter | download

A lane is fed blocks in order and gives them back in order. Batches cross block borders, and the
last one is padded to the full size, so the net sees one input shape from first to last and a
patch's result does not depend on what else is in its batch. On the CPU upload and download are
free; on CUDA a block crosses the bus once each way, in the dtype of the store, from and to pinned
memory, on streams of their own. Everything between is the same code.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .errors import PenstockError
from .grid import Block, Geometry, indices
from .model import Model
from .normalize import Scaling
from .probe import Probe
from .stitch import axis_weights

_TORCH_DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in (
        "uint8",
        "uint16",
        "uint32",
        "int8",
        "int16",
        "int32",
        "float16",
        "float32",
        "float64",
    )
} | {np.dtype(bool): torch.bool}


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What a lane must know beside geometry and model."""

    batch: int
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
    finite: Tensor
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
            raise PenstockError(
                "the model made values that are not finite out of finite ones; try --no-amp"
            )
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
    remaining: int


@dataclass(slots=True)
class _Slot:
    """Where a patch of the batch under way came from."""

    owner: _Open
    index: tuple[int, ...]


class Lane:
    """Feeds one device."""

    def __init__(
        self,
        device: torch.device,
        model: Model,
        geometry: Geometry,
        settings: LaneSettings,
        probe: Probe,
        before_batch: Callable[[int], None],
    ) -> None:
        """``before_batch`` is told how many patches a forward will run; it may raise to stop it."""
        self.device, self.model, self.geometry = device, model, geometry
        self.settings, self.probe, self.before_batch = settings, probe, before_batch
        self.on_cuda = device.type == "cuda"
        self._module = self._place(model.module)
        patch = geometry.patch if settings.model_axes == 3 else geometry.patch[1:]
        self._batch = torch.empty(
            (settings.batch, model.in_channels, *patch),
            device=device,
            memory_format=self._memory_format(),
        )
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._slots: list[_Slot] = []
        self._open: deque[_Open] = deque()
        self._copies = torch.cuda.Stream(device) if self.on_cuda else None

    def push(self, loaded: Loaded) -> Iterator[Finished]:
        """Take a block; yield those that it completes, oldest first."""
        assert loaded.array is not None
        with self.probe.span("normalise", loaded.block):
            floats = self._normalise(self._upload(loaded.array), loaded.scaling)
        loaded.array = None
        patches = loaded.block.patches
        opened = _Open(loaded, self._outputs(loaded.block), patches.size)
        self._open.append(opened)
        for index in indices(patches):
            where = self.geometry.patch_read(index).within(loaded.block.read)
            source = floats[(slice(None), *where)]
            target = self._batch[len(self._slots)]
            target.copy_(source if self.settings.model_axes == 3 else source[:, 0])
            self._slots.append(_Slot(opened, index))
            if len(self._slots) == self.settings.batch:
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
        if self.device.type != "cpu":
            module = copy.deepcopy(module).to(self.device)
        if self.on_cuda:
            for part in module.modules():
                if isinstance(part, nn.Conv2d | nn.Conv3d):
                    part.to(memory_format=self._memory_format())  # type: ignore[call-overload]
        if self.settings.compile_mode is not None:
            return torch.compile(module, mode=self.settings.compile_mode, dynamic=False)  # type: ignore[return-value]
        return module

    def _memory_format(self) -> torch.memory_format:
        """Channels last is what tensor cores take; on the CPU the layout makes no difference."""
        if not self.on_cuda:
            return torch.contiguous_format
        return torch.channels_last_3d if self.settings.model_axes == 3 else torch.channels_last

    def _outputs(self, block: Block) -> list[Tensor]:
        """Arrays for a block's heads: sums in float32 where patches are blended."""
        blend = self.geometry.seam == "blend"
        make = torch.zeros if blend else torch.empty
        return [
            make(
                (channels, *block.support.shape),
                dtype=torch.float32 if blend else _TORCH_DTYPES[dtype],
                device=self.device,
            )
            for channels, dtype in zip(
                self.settings.out_channels, self.settings.out_dtypes, strict=True
            )
        ]

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

    def _normalise(self, native: Tensor, scaling: Scaling) -> Tensor:
        floats = native.to(torch.float32)
        if scaling != Scaling():
            floats = floats.sub_(scaling.lower).div_(scaling.scale)
        return floats if self.settings.clip is None else floats.clamp_(*self.settings.clip)

    def _forward(self) -> None:
        """One batch through the net and into its blocks."""
        self.before_batch(len(self._slots))
        first = self._slots[0].owner.loaded.block
        with self.probe.span("forward", first), torch.inference_mode():
            with torch.autocast(self.device.type, self.settings.amp, self.settings.amp is not None):
                outputs = list(self.model.heads(self._module(self._batch)).values())
            if len(outputs) == 1 and len(self.settings.out_dtypes) > 1:
                outputs = list(outputs[0].split(1, dim=1))
        with self.probe.span("stitch", first), torch.inference_mode():
            for head, output in enumerate(outputs):
                if self.settings.model_axes == 2:
                    output = output.unsqueeze(2)
                output = output[: len(self._slots)]
                if self.geometry.seam == "trim":
                    self._scatter_cores(head, output)
                else:
                    self._scatter_weighted(head, output)
        for slot in self._slots:
            slot.owner.remaining -= 1
        self._slots.clear()

    def _scatter_cores(self, head: int, output_BCZYX: Tensor) -> None:
        """Each patch writes what it owns, in the dtype of the sink."""
        geometry = self.geometry
        keep = tuple(slice(b, b + s) for b, s in zip(geometry.before, geometry.stride, strict=True))
        cores = self._denormalise(output_BCZYX[(slice(None), slice(None), *keep)].float())
        cores = to_range(cores, self.settings.out_dtypes[head])
        for core, slot in zip(cores, self._slots, strict=True):
            owned = geometry.cores.cell(slot.index)  # shorter than a stride at the far edge
            part = tuple(slice(n) for n in owned.shape)
            block = slot.owner.loaded.block
            slot.owner.outputs[head][(slice(None), *owned.within(block.support))] = core[
                (slice(None), *part)
            ]

    def _scatter_weighted(self, head: int, output_BCZYX: Tensor) -> None:
        """Each patch adds its share of all that it sees, in float32."""
        geometry = self.geometry
        patches = self._denormalise(output_BCZYX.float())
        for patch, slot in zip(patches, self._slots, strict=True):
            seen = geometry.patch_read(slot.index)
            part = seen & geometry.domain
            share = patch[(slice(None), *part.within(seen))]
            for axis, weights in enumerate(self._weights(slot.index)):
                along = [1, 1, 1]
                along[axis] = -1
                share = share * weights[part.within(seen)[axis]].view(along)
            block = slot.owner.loaded.block
            slot.owner.outputs[head][(slice(None), *part.within(block.support))] += share

    def _weights(self, index: Sequence[int]) -> list[Tensor]:
        geometry, floor = self.geometry, self.settings.min_blend_weight
        shape = zip(
            geometry.patch, geometry.overlap, index, geometry.cores.cells.shape, strict=True
        )
        return [
            torch.from_numpy(axis_weights(p, o, floor, i, n)).to(self.device)
            for p, o, i, n in shape
        ]

    def _denormalise(self, output: Tensor) -> Tensor:
        """Back to intensities; also checks that finite input gave finite output."""
        self._finite &= torch.isfinite(output).all()
        scalings = [slot.owner.loaded.scaling for slot in self._slots]
        if not self.settings.denormalize or all(s == Scaling() for s in scalings):
            return output
        column = (-1, *[1] * (output.ndim - 1))
        scale = torch.tensor([s.scale for s in scalings], device=self.device).view(column)
        lower = torch.tensor([s.lower for s in scalings], device=self.device).view(column)
        return output.mul(scale).add_(lower)

    def _finished(self) -> Iterator[Finished]:
        while self._open and self._open[0].remaining == 0:
            yield self._download(self._open.popleft())

    def _download(self, done: _Open) -> Finished:
        if self._copies is None:
            return Finished(done.loaded, [t.cpu() for t in done.outputs], self._finite.cpu())
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        event = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            host = [_to_pinned(t) for t in done.outputs]
            finite = _to_pinned(self._finite)
            event.record(self._copies)
        for tensor in (*done.outputs, self._finite):
            tensor.record_stream(self._copies)
        return Finished(done.loaded, host, finite, event)


def to_range(values: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Rounded (half to even) where ``dtype`` is of integers, and within its range; still floats.

    The largest 32-bit integers are no float32: the nearest one below stands for them.
    """
    if dtype.kind == "f":
        info = np.finfo(dtype)
        return values if dtype.itemsize > 2 else values.clamp(float(info.min), float(info.max))
    if dtype.kind == "b":
        low, high = 0.0, 1.0
    else:
        low, high = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
        if np.float32(high) > high:
            high = float(np.nextafter(np.float32(high), np.float32(0)))
    return values.round().clamp_(low, high)


def as_dtype(values: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A blended sum in the dtype of its sink."""
    return to_range(torch.from_numpy(values), dtype).to(_TORCH_DTYPES[dtype]).numpy()


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
