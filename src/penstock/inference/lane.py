"""One device's share of a job: patches of blocks into batches, and batches back into blocks.

    upload | gather | normalise | forward | scatter | download

A lane is fed blocks in order and gives them back in order. Batches cross block borders, and the
last one is padded to the full size, so the net sees one input shape from first to last and a
patch's result does not depend on what else is in its batch. On the CPU upload and download are
free; on CUDA a block crosses the bus once each way, in the dtype of the store, from and to pinned
memory, on a stream of its own for each way, and the next one comes while the present one is at
work. Everything between is the same code.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..base import PenstockError, Pool, StageError, torch_threads
from ..data import Scaling, indices
from ..instruments import Probe
from ..models import CHANNELS_LAST, Head, Model, placed
from .geometry import Block, Geometry
from .heads import HeadPlan
from .stitch import axis_weights
from .values import (
    CLIPPED,
    NOTHING,
    check_labels,
    count_clipped,
    note_labels,
    note_range,
    to_range_,
)


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What a lane must know beside geometry and model."""

    batch: int
    forward: int
    """Patches of a batch that a CPU takes at a time."""
    model_axes: int
    channels_last: bool
    amp: torch.dtype | None
    compile_mode: str | None
    """None: eager."""
    compile_dynamic: bool | None
    """As `torch.compile` takes it; None: by the shapes that it is given."""
    clip: tuple[float, float] | None
    min_blend_weight: float
    carrier: torch.dtype
    """What patches are normalised in: float32, or float64 where the input's dtype needs it."""
    returns: tuple[Head, ...]
    """What the model was found to return."""
    heads: tuple[HeadPlan, ...]
    """One for each output."""


@dataclass(slots=True)
class Loaded:
    """A block as read: reflected at the volume's edges, in the dtype of the store."""

    block: Block
    array: NDArray[Any] | None
    """Shape (channels, z, y, x) of ``block.read``; None once the lane has taken it in."""
    scaling: Scaling
    invalid: NDArray[np.bool_] | None = None
    """Voxels of ``block.support`` that were not finite, None where all were."""
    native: Tensor | None = None
    """The array on the device, once its upload has begun; None once the lane has taken it in."""
    arrived: torch.cuda.Event | None = None
    """The end of the upload, where it is not over when it is begun."""


@dataclass(slots=True)
class Finished:
    """A block as computed."""

    loaded: Loaded
    outputs: list[Tensor]
    """On the host, one for each head, shape (channels, z, y, x) of ``block.support`` or, where it
    is not blended, of ``block.core``."""
    buffers: list[NDArray[Any]]
    """What the outputs lie in, for the pool; empty where they do not come from it."""
    tally: Tensor
    """Shape (heads, 4): see `values`."""
    settings: LaneSettings
    ready: torch.cuda.Event | None = None

    @property
    def block(self) -> Block:
        return self.loaded.block

    def wait(self) -> None:
        """Wait for the end of the download.

        Raises `PenstockError` if the model made a value that is not finite out of finite ones, in
        an integer it would hide, or a label that the output cannot hold.
        """
        if self.ready is not None:
            self.ready.synchronize()
        for head, (low, high, _, spoilt) in zip(
            self.settings.heads, self.tally.tolist(), strict=True
        ):
            if head.kind == "labels":
                check_labels(head, low, high, spoilt)
            elif spoilt:
                message = "the model made values that are not finite out of finite ones"
                if self.settings.amp is not None:
                    half = str(self.settings.amp).removeprefix("torch.")
                    message += f" in {half}; give --no-amp, or --clip-norm for what it is shown"
                raise PenstockError(message)

    @property
    def clipped(self) -> list[int]:
        """Values of each head that were clipped to the range of its output, once waited for."""
        return [int(count) for count in self.tally[:, CLIPPED]]

    def heads(self) -> list[NDArray[Any]]:
        """The outputs, once waited for.

        A voxel whose input was not finite becomes NaN, or 0 where the output holds integers.
        """
        arrays = [output.numpy() for output in self.outputs]
        invalid = self.loaded.invalid
        if invalid is not None:
            core = self.block.core.within(self.block.support)
            for array, head in zip(arrays, self.settings.heads, strict=True):
                where = invalid if head.blended else invalid[core]
                array[:, where] = np.nan if head.dtype.kind == "f" else 0
        return arrays


@dataclass(slots=True)
class _Open:
    """A block some of whose patches are still to come back."""

    loaded: Loaded
    outputs: list[Tensor]
    buffers: list[NDArray[Any]]
    tally: Tensor
    remaining: int


@dataclass(slots=True)
class _Slot:
    """A patch of the batch under way."""

    owner: _Open
    index: tuple[int, ...]
    place: tuple[int, ...]
    """Where it begins in what its block reads, and what it owns in what its block owns."""


@dataclass(slots=True)
class _Queued:
    """Work of a stage on a block that a GPU was told to do."""

    stage: str
    block: Block
    begin: torch.cuda.Event
    end: torch.cuda.Event


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
        self._module = self._compiled(placed(model.module, device, settings.channels_last))
        patch = geometry.patch if settings.model_axes == 3 else geometry.patch[1:]
        shape = (settings.batch, model.in_channels, *patch)
        layout = CHANNELS_LAST[len(shape)] if settings.channels_last else torch.contiguous_format
        self._batch = torch.empty(
            shape, dtype=settings.carrier, device=device, memory_format=layout
        )
        # What of a patch's output counts, and room to work on it: small enough to stay in cache.
        edges = zip(geometry.before, geometry.stride, strict=True)
        self._core = (slice(None), *(slice(b, b + s) for b, s in edges))
        self._values = [
            torch.empty(
                (head.channels, *(geometry.patch if head.blended else geometry.stride)),
                dtype=_torch_dtype(head.work),
                device=device,
            )
            for head in settings.heads
        ]
        self._untold = torch.tensor([NOTHING] * len(settings.heads), device=device)
        self._returned: list[torch.dtype] = []
        self._slots: list[_Slot] = []
        self._open: deque[_Open] = deque()
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # in, out
        self._queued: deque[_Queued] = deque()
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._first = self._mark()
            self._first.synchronize()
            self._first_s = probe.clock()

    def autocast(self) -> torch.autocast:
        """What the model runs in. To be entered around all of a lane's work as well: torch keeps
        the weights that it has cast until it leaves the outermost one."""
        return torch.autocast(self.device.type, self.settings.amp, self.settings.amp is not None)

    def upload(self, loaded: Loaded) -> None:
        """Begin to bring a block to the device; `push` does where nobody has."""
        if loaded.native is not None:
            return
        assert loaded.array is not None
        native = torch.from_numpy(loaded.array)
        if self._streams is None:
            loaded.native = native.to(self.device)
            return
        # Torch keeps released pinned memory and hands it out again: after the first blocks
        # this allocates nothing.
        with torch.cuda.stream(self._streams[0]):
            loaded.native = native.pin_memory().to(self.device, non_blocking=True)
            loaded.arrived = torch.cuda.Event()
            loaded.arrived.record(self._streams[0])

    def push(self, loaded: Loaded) -> Iterator[Finished]:
        """Take a block; yield those that it completes, oldest first."""
        self.upload(loaded)
        array, native = loaded.array, loaded.native
        loaded.array = loaded.native = None
        assert array is not None and native is not None
        if loaded.arrived is not None:
            main = torch.cuda.current_stream(self.device)
            main.wait_event(loaded.arrived)
            native.record_stream(main)
        outputs, buffers = self._outputs(loaded.block)
        tally = self._untold.clone()
        opened = _Open(loaded, outputs, buffers, tally, loaded.block.patches.size)
        self._open.append(opened)
        waiting = indices(loaded.block.patches)
        while True:
            with self._span("normalise", loaded.block), _one_thread():
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
        self._tell(wait=True)

    # --- the steps -----------------------------------------------------------------------------

    def _compiled(self, module: nn.Module) -> nn.Module:
        if self.settings.compile_mode is None:
            return module
        settings = self.settings
        return torch.compile(module, mode=settings.compile_mode, dynamic=settings.compile_dynamic)  # type: ignore[return-value]

    def _outputs(self, block: Block) -> tuple[list[Tensor], list[NDArray[Any]]]:
        """Arrays for a block's heads, and on the CPU the buffers that they lie in."""
        outputs: list[Tensor] = []
        buffers: list[NDArray[Any]] = []
        for head in self.settings.heads:
            box = block.support if head.blended else block.core
            shape = (head.channels, *box.shape)
            if self.device.type == "cpu":
                buffers.append(self.block_pool.take(shape, head.kept))
                outputs.append(torch.from_numpy(buffers[-1]))
            else:
                kept = _torch_dtype(head.kept)
                outputs.append(torch.empty(shape, dtype=kept, device=self.device))
            if head.blended:
                outputs[-1].zero_()
        return outputs, buffers

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
        self._tell()
        step = self.settings.forward if self.device.type == "cpu" else self.settings.batch
        for start in range(0, len(self._slots), step):
            slots = self._slots[start : start + step]
            block = slots[0].owner.loaded.block
            try:
                # Not in inference mode, in which autocast would keep no weights that it has cast.
                with self._span("forward", block), torch.no_grad():
                    outputs = self._run(self._batch[start : start + step])
            except PenstockError as error:  # of what it returned
                raise StageError("forward", str(block), error) from error
            with self._span("stitch", block), torch.inference_mode(), _one_thread():
                for head, output_BCZYX in enumerate(outputs):
                    for row, slot in enumerate(slots):
                        self._scatter(head, output_BCZYX[row], slot)
        for slot in self._slots:
            slot.owner.remaining -= 1
        self._slots.clear()

    def _run(self, batch: Tensor) -> list[Tensor]:
        """The model's heads, one for each sink, shape (batch, channels, z, y, x)."""
        with self.autocast():
            heads = self.model.heads(self._module(batch.to(self.model.dtype)))
        outputs = self._checked(heads, (len(batch), *batch.shape[2:]))
        if len(outputs) == 1 and len(self.settings.heads) > 1:
            outputs = list(outputs[0].split(1, dim=1))
        return outputs if self.settings.model_axes == 3 else [o.unsqueeze(2) for o in outputs]

    def _checked(self, heads: Mapping[str, Tensor], sides: tuple[int, ...]) -> list[Tensor]:
        """The heads in the order in which they were found.

        Raises `PenstockError` where a forward returns others than the first, or of another shape
        or dtype. Floats of half precision are what autocast makes of others.
        """
        found = self.settings.returns
        if heads.keys() != {head.name for head in found}:
            raise PenstockError(
                f"the model returned {len(heads)} head(s), {', '.join(heads)}, and not "
                f"{len(found)}, {', '.join(head.name for head in found)}, as at first"
            )
        outputs = [heads[head.name] for head in found]
        dtypes = self._returned or [
            output.dtype
            if output.is_floating_point() and head.dtype.is_floating_point
            else head.dtype
            for output, head in zip(outputs, found, strict=True)
        ]
        for head, output, dtype in zip(found, outputs, dtypes, strict=True):
            shape = (sides[0], head.channels, *sides[1:])
            if output.shape != shape or output.dtype != dtype:
                raise PenstockError(
                    f"the model returned {tuple(output.shape)} of {output.dtype} as {head.name}, "
                    f"and not {shape} of {dtype} as at first"
                )
        self._returned = dtypes
        return outputs

    def _scatter(self, head: int, output_CZYX: Tensor, slot: _Slot) -> None:
        """Put a patch into its block: what it owns (trim), or its share of all it sees (blend)."""
        plan, owner = self.settings.heads[head], slot.owner
        target, tally = owner.outputs[head], owner.tally[head]
        if plan.kind == "labels":
            labels = output_CZYX[self._core]
            target = target[(slice(None), *_window(slot.place, labels.shape[1:]))]
            labels = labels[(slice(None), *_window((0, 0, 0), target.shape[1:]))]
            target.copy_(note_labels(labels, target.dtype, tally))
            return
        values, scaling = self._values[head], owner.loaded.scaling
        values.copy_(output_CZYX if plan.blended else output_CZYX[self._core])
        if plan.denormalized and scaling != Scaling():
            values.mul_(scaling.scale).add_(scaling.lower)
        found = note_range(values, tally)
        if not plan.blended:
            target = target[(slice(None), *_window(slot.place, values.shape[1:]))]
            values = values[(slice(None), *_window((0, 0, 0), target.shape[1:]))]
            count_clipped(values, found, plan.dtype, tally)
            target.copy_(to_range_(values, plan.dtype))
            return
        for axis, weights in enumerate(self._weights(slot.index, values.dtype)):
            values.mul_(weights.view([-1 if a == axis else 1 for a in range(3)]))
        # At the volume's lower edges a patch sees more than it contributes to.
        block = owner.loaded.block
        outside = zip(slot.place, block.read.start, block.support.start, strict=True)
        begin = tuple(place + read - support for place, read, support in outside)
        # At the upper edges the slices end with the block.
        target = target[(slice(None), *_window(begin, values.shape[1:]))]
        first = [-min(b, 0) for b in begin]
        target.add_(values[(slice(None), *_window(first, target.shape[1:]))])

    def _weights(self, index: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        geometry, floor = self.geometry, self.settings.min_blend_weight
        shape = zip(
            geometry.patch, geometry.overlap, index, geometry.cores.cells.shape, strict=True
        )
        return [_weights_on(self.device, dtype, p, o, floor, i, n) for p, o, i, n in shape]

    def _finished(self) -> Iterator[Finished]:
        while self._open and self._open[0].remaining == 0:
            yield self._download(self._open.popleft())

    def _download(self, done: _Open) -> Finished:
        if self._streams is None:
            outputs = [output.cpu() for output in done.outputs]
            return Finished(done.loaded, outputs, done.buffers, done.tally.cpu(), self.settings)
        stream = self._streams[1]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        event = torch.cuda.Event(blocking=True)  # who waits for it leaves the processor to others
        with torch.cuda.stream(stream):
            host = [_to_pinned(t) for t in done.outputs]
            tally = _to_pinned(done.tally)
            event.record(stream)
        for tensor in (*done.outputs, done.tally):
            tensor.record_stream(stream)
        return Finished(done.loaded, host, [], tally, self.settings, event)

    # --- its clocks ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _span(self, stage: str, block: Block) -> Iterator[None]:
        """Time a piece of work: on a GPU, which is only told here what to do, by its own events."""
        if self._streams is None:
            with self.probe.span(stage, block):
                yield
            return
        begin = self._mark()
        yield
        self._queued.append(_Queued(stage, block, begin, self._mark()))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _tell(self, *, wait: bool = False) -> None:
        """Tell the probe of the work that a GPU has done since, or of all."""
        while self._queued and (wait or self._queued[0].end.query()):
            done = self._queued.popleft()
            done.end.synchronize()
            start = self._first_s + self._first.elapsed_time(done.begin) / 1e3
            end = start + done.begin.elapsed_time(done.end) / 1e3
            self.probe.record(done.stage, start, end, done.block, waiting=False)


@lru_cache(maxsize=1024)
def _weights_on(
    device: torch.device,
    dtype: torch.dtype,
    patch: int,
    overlap: int,
    floor: float,
    index: int,
    count: int,
) -> Tensor:
    """`axis_weights` on a device, copied there once and not for each patch and head."""
    weights = torch.from_numpy(axis_weights(patch, overlap, floor, index, count))
    return weights.to(dtype).to(device)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _one_thread() -> AbstractContextManager[None]:
    """Copies of a patch are made by one thread: waking others, on cores that decode and encode,
    takes longer than the copy."""
    return torch_threads(1)


def _window(start: Sequence[int], shape: Sequence[int]) -> Iterator[slice]:
    """Slices of so many voxels, without those before the first."""
    return (slice(max(a, 0), a + n) for a, n in zip(start, shape, strict=True))


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
