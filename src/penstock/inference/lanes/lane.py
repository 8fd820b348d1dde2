"""One device's share of a job: patches of bricks into batches, and batches back into bricks.

    upload | gather | normalise | forward | scatter | download

A lane takes bricks in order and gives them back in order. Batches cross the borders of bricks, and
the last batch is padded to the full size. So the net always sees one input shape, and the result of
a patch does not depend on what else is in its batch. On the CPU upload and download cost nothing.
On CUDA a brick crosses the bus once each way, in the dtype of the store, and the next brick is
uploaded while the net works on this one (`transfers`). Everything between is the same code.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from itertools import groupby

import torch
from torch import Tensor

from ...base import OutOfMemory, PenstockError, Pool, StageError, plural, torch_threads
from ...instruments import Probe
from ...models import placed
from ..opening.job import Job
from ..tiling.geometry import Brick
from .bricks import Computed, Loaded, PatchScatter, Slot, slices_of, torch_dtype
from .transfers import GpuClock, Transfers, pinned
from .values import NOTHING, fill_beyond_, normalise_


class Forward:
    """The net on a device. It checks that each forward returns heads like those of the first."""

    def __init__(self, device: torch.device, job: Job) -> None:
        self.device, self.job = device, job
        config, net = job.config, job.net
        self.module = placed(net.model.module, device, net.footprint.channels_last)
        if config.compile:
            dynamic = {"auto": None, "true": True, "false": False}[config.compile_dynamic]
            self.module = torch.compile(self.module, dynamic=dynamic)  # type: ignore[assignment]
        self._dtype = net.model.dtype
        self._dtypes: list[torch.dtype] = []
        """Dtypes of the heads, known after the first forward."""

    def autocast(self) -> torch.autocast:
        """The context that the model runs in. Enter one around all of a lane's work: torch keeps
        the weights that it has cast until the context ends."""
        return self.job.net.autocast(self.device)

    def run(self, batch: Tensor) -> list[Tensor]:
        """The model's heads, one for each sink, shape (batch, channels, z, y, x)."""
        heads = self.job.net.model.heads(self.module(batch.to(self._dtype)))
        outputs = self._checked(heads, (len(batch), *batch.shape[2:]))
        return outputs if self.job.net.shape.model_axes == 3 else [o.unsqueeze(2) for o in outputs]

    def _checked(self, heads: Mapping[str, Tensor], sides: tuple[int, ...]) -> list[Tensor]:
        """The heads in their order. ``sides`` are (batch, spatial axes of a patch).

        Raises `PenstockError` if a forward returns other heads than the first one did, or heads of
        another shape or dtype. Autocast may turn floats into half precision.
        """
        expected = self.job.net.footprint.heads
        if heads.keys() != {head.name for head in expected}:
            raise PenstockError(
                f"the model returned {plural(len(heads), 'head')}, {', '.join(heads)}, and not "
                f"{len(expected)}, {', '.join(head.name for head in expected)}, as in its first "
                "forward"
            )
        outputs = [heads[head.name] for head in expected]
        dtypes = self._dtypes or [
            output.dtype
            if output.is_floating_point() and head.dtype.is_floating_point
            else head.dtype
            for output, head in zip(outputs, expected, strict=True)
        ]
        for head, output, dtype in zip(expected, outputs, dtypes, strict=True):
            factors: Sequence[Fraction | int] = head.factors or (1,) * (len(sides) - 1)
            axes = zip(sides[1:], factors, strict=True)
            shape = (sides[0], head.channels, *(int(side * factor) for side, factor in axes))
            if output.shape != shape or output.dtype != dtype:
                raise PenstockError(
                    f"the model returned {tuple(output.shape)} of {output.dtype} as {head.name}, "
                    f"and not {shape} of {dtype} as in its first forward"
                )
        self._dtypes = dtypes
        return outputs


class Equipment:
    """What a process keeps from one part of a job to the next: its arrays, and the net on each
    device.

    To place a net on a GPU, to compile it and to pin memory takes seconds. A job of one process
    does so once, and so does a worker that computes a thousand parts.
    """

    def __init__(self, job: Job) -> None:
        self.job, plan = job, job.plan
        pins = plan.pinned_bricks
        # One pool for each kind of array: in a pool all buffers have one size, that of the largest.
        self.read_pool = Pool(plan.read_buffer_bytes, pinned if pins else None, pins)
        """Arrays of bricks as read."""
        self.brick_pool = Pool(plan.brick_buffer_bytes)
        """Arrays of bricks as computed."""
        on_cpu = all(device.type == "cpu" for device in job.devices)
        alike = on_cpu and plan.block_buffer_bytes == plan.brick_buffer_bytes
        self.block_pool = self.brick_pool if alike else Pool(plan.block_buffer_bytes)
        """Arrays of blocks. A block may take over those of a brick where the pool is the same."""
        self._forwards: dict[torch.device, Forward] = {}

    def forward_on(self, device: torch.device) -> Forward:
        """The net on a device, which is made when it is first needed."""
        if device not in self._forwards:
            self._forwards[device] = Forward(device, self.job)
        return self._forwards[device]


_NO_ROOM = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough")
"""Words of torch's errors when the host has no memory left."""
_MOST_OPEN = 1024
"""Most bricks that wait behind one that is not complete, as each takes a little memory."""


class Lane:
    """Runs the bricks of one device."""

    def __init__(
        self,
        device: torch.device,
        job: Job,
        probe: Probe,
        equipment: Equipment,
        before_batch: Callable[[int], None],
    ) -> None:
        """``before_batch`` is called with the number of patches before each batch; it may raise to
        stop the lane."""
        self.device, self.job, self.probe = device, job, probe
        self.read_pool, self.brick_pool = equipment.read_pool, equipment.brick_pool
        self.before_batch = before_batch
        self.forward = equipment.forward_on(device)
        self.scatter = PatchScatter(device, job, together=device.type != "cpu")
        self.clock = GpuClock(device, probe) if device.type == "cuda" else None
        self.transfers = Transfers(device, self.clock)
        net = job.net
        shape = (net.batch, net.model.in_channels, *net.shape.seen)
        self._batch = torch.empty(shape, dtype=net.carrier, device=device, memory_format=net.layout)
        self._empty_tally = torch.tensor([NOTHING] * len(job.heads), device=device)
        self._slots: list[Slot] = []
        """The patches in the batch, in visiting order."""
        self._in_pairs = device.type == "cpu" and net.forward == 2
        self._open: deque[Computed] = deque()

    def push(self, loaded: Loaded) -> Iterator[Computed]:
        """Take a brick, and yield each brick that is complete by then, oldest first."""
        if not loaded.brick.num_patches:  # nothing in it is sample
            tally = self._empty_tally.clone()
            self._open.append(Computed(loaded, [], [], tally, self.job, 0))
            yield from self._unblocked()
            return
        array, native = self.transfers.take(loaded)
        opened = self._opened(loaded)
        self._open.append(opened)
        waiting = loaded.brick.each_patch()
        index = next(waiting, None)
        while True:
            with self._span("normalise", loaded.brick), one_thread():
                while index is not None and (row := self._free_row(index)) is not None:
                    self._gather(opened, native, index, row)
                    index = next(waiting, None)
            # Whatever the parity of the next patch. A full batch is run at once: this brick may be
            # whole by it.
            if index is None and any(self._free_row((n,)) is not None for n in (0, 1)):
                # All patches are copied out of the array by now; on a CPU `native` is that array.
                loaded.wait()
                self.read_pool.give(array)
                yield from self._unblocked()
                return
            self._run_batch()
            yield from self._whole()

    def _free_row(self, index: tuple[int, ...]) -> int | None:
        """The row of the batch for the next patch; None if there is none.

        On a CPU two patches pass the net together. For a few values of the second one, the rest of
        a vector, torch may take other instructions, so that their last bits differ. Hence the place
        of a patch in the volume decides whether it comes first or second. Neighbours take turns,
        so that pairs are whole where all patches are computed.
        """
        if self._in_pairs:
            pair = self._slots[-1].row // 2 if self._slots else 0
            row = 2 * pair + sum(index) % 2
            # A row that was passed over stays free, as pairs are stitched in visiting order.
            if row in (slot.row for slot in self._slots[-2:]):
                row += 2
        else:
            row = len(self._slots)
        return row if row < self.job.net.batch else None

    def _unblocked(self) -> Iterator[Computed]:
        """The bricks that are complete, in a job that leaves out patches without sample.

        The patches of one batch may then come from more bricks than there is room for, and none of
        these bricks is complete before the batch is run. So the batch is run before it is full,
        once there is no room for the next brick.
        """
        if self.job.sample is None:
            return
        plan = self.job.plan
        held = sum(plan.brick_bytes(each.brick) for each in self._open if each.outputs)
        full = held + plan.largest_brick_bytes > plan.brick_budget or len(self._open) > _MOST_OPEN
        if self._slots and full:
            self._run_batch()
        yield from self._whole()

    def flush(self) -> Iterator[Computed]:
        """Run the last batch; yield the bricks that are left."""
        if self._slots:
            self._run_batch()
        yield from self._whole()
        if self.clock is not None:
            self.clock.report(wait=True)

    def _opened(self, loaded: Loaded) -> Computed:
        """The empty outputs of a brick. On the CPU they lie in arrays of a pool."""
        opened = Computed(
            loaded, [], [], self._empty_tally.clone(), self.job, loaded.brick.num_patches
        )
        for head in self.job.heads:
            box = loaded.brick.support if head.blended else loaded.brick.core
            shape = (head.channels, *head.grid.box(box).shape)
            if self.device.type == "cpu":
                opened.buffers.append(self.brick_pool.take(shape, head.kept))
                output = torch.from_numpy(opened.buffers[-1])
            else:
                output = torch.empty(shape, dtype=torch_dtype(head.kept), device=self.device)
            # Patches that are left out must add nothing where outputs are resampled and summed.
            opened.outputs.append(output.zero_() if head.summed else output)
        return opened

    def _gather(self, opened: Computed, native: Tensor, index: tuple[int, ...], row: int) -> None:
        """Copy a patch of a brick into a row of the batch and normalise it there."""
        geometry, net = self.job.geometry, self.job.net
        seen, read = geometry.patch_read(index), opened.brick.read
        place = tuple(at - first for at, first in zip(seen.start, read.start, strict=True))
        source = native[(slice(None), *slices_of(place, geometry.patch))]
        target = self._batch[row]
        target.copy_(source if net.shape.model_axes == 3 else source[:, 0])
        # Else the source has normalised the values as they were read, before it resampled them.
        if not self.job.values.first:
            normalise_(target, opened.loaded.scalings)
        if net.clip:
            target.clamp_(*net.clip)
        # Last, as what fills is a value that the net sees, and no value of the store.
        fill_beyond_(target, seen, geometry.inner or geometry.domain, self.job.sliding.fill)
        self._slots.append(Slot(opened, index, place, row))

    def _run_batch(self) -> None:
        """Run the batch, padded if rows are free, and put its patches into their bricks.

        A CPU takes the same number of patches at a time, whatever the batch: the kernels that torch
        picks, and with them the last bits of a result, depend on that number.
        """
        self.before_batch(len(self._slots))
        if self.clock is not None:
            self.clock.report()
        taken = {slot.row for slot in self._slots}
        # With a patch, as memory that was never written may hold what the net does not expect.
        for row in set(range(len(self._batch))) - taken:
            self._batch[row].copy_(self._batch[self._slots[0].row])
        step = self.job.net.forward if self.device.type == "cpu" else self.job.net.batch
        # A pair without any patch is left out. On a GPU the whole batch is one group.
        for number, group in groupby(self._slots, lambda slot: slot.row // step):
            slots, first = list(group), number * step
            outputs = self._heads(slots[0].owner.brick, self._batch[first : first + step])
            span = self._span("stitch", slots[0].owner.brick)
            with span, torch.inference_mode(), one_thread():
                # In visiting order, as sums of overlapping patches depend on it: the second row of
                # a pair may be due before the first.
                for rows in _runs(slots):
                    row = rows[0].row - first
                    for head, output_BCZYX in enumerate(outputs):
                        self.scatter.put(head, output_BCZYX[row : row + len(rows)], rows)
            for slot in slots:
                slot.owner.remaining -= 1
        self._slots.clear()

    def _heads(self, brick: Brick, batch: Tensor) -> list[Tensor]:
        """The heads of some rows of the batch, of which the first is a patch of the brick."""
        try:
            # Not in inference mode: autocast would not keep the weights that it casts.
            with self._span("forward", brick), torch.no_grad():
                return self.forward.run(batch)
        except PenstockError as error:  # it returned other heads
            raise StageError("forward", str(brick), error) from error

    def _whole(self) -> Iterator[Computed]:
        while self._open and self._open[0].remaining == 0:
            yield self.transfers.download(self._open.popleft())

    def _span(self, stage: str, brick: Brick) -> AbstractContextManager[None]:
        return (self.clock or self.probe).span(stage, brick)


@contextlib.contextmanager
def batch_named(job: Job, device: torch.device) -> Iterator[None]:
    """Turn torch's out-of-memory error into `OutOfMemory`, which names a smaller batch. The run can
    be resumed."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        of_host = any(words in str(error) for words in _NO_ROOM)
        if not (of_host or isinstance(error, torch.OutOfMemoryError)):
            raise
        batch, cure = job.net.batch, "anew with a smaller --patch"
        if device.type == "cpu":  # the number of patches in a forward does not depend on the batch
            raise OutOfMemory(
                f"the host has no memory left for {plural(job.net.forward, 'patch')} at a time; "
                f"run again with --resume when there is more, or {cure}"
            ) from error
        cure = f"again with --resume --batch {batch // 2}" if batch > 1 else cure
        raise OutOfMemory(
            f"{device} has no memory left for a batch of {batch}; run {cure}"
        ) from error


def _runs(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """The longest runs of slots whose rows follow one another."""
    for _, run in groupby(enumerate(slots), lambda item: item[1].row - item[0]):
        yield [slot for _, slot in run]


def one_thread() -> AbstractContextManager[None]:
    """Let one thread copy a patch. Waking other threads, on cores that decode and encode, would
    take longer than the copy."""
    return torch_threads(1)
