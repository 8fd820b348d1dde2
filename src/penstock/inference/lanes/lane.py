"""One device's share of a job: patches of bricks into batches, and batches back into bricks.

    upload | gather | normalise | forward | scatter | download

A lane takes bricks in order and gives them back in order. Batches cross the borders of bricks, and
the last batch is padded to the full size. So the net always sees one input shape, and the result of
a patch does not depend on what else is in its batch. On the CPU upload and download cost nothing.
On CUDA a brick crosses the bus once each way, in the dtype of the store, and the next brick is
uploaded while the net works on this one (`transfers`). Everything between is the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice

import torch
from torch import Tensor

from ...base import PenstockError, StageError, torch_threads
from ...data import Scaling
from ...instruments import Probe
from ..opening.job import Job
from ..tiling.geometry import Brick
from .bricks import Computed, Loaded, Slot
from .equipment import Equipment
from .scatter import PatchScatter, slices_of, torch_dtype
from .transfers import GpuClock, Transfers
from .values import NOTHING


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
        self._open: deque[Computed] = deque()

    def push(self, loaded: Loaded) -> Iterator[Computed]:
        """Take a brick, and yield each brick that is complete by then, oldest first."""
        array, native = self.transfers.take(loaded)
        opened = self._opened(loaded)
        self._open.append(opened)
        waiting = loaded.brick.each_patch()
        while True:
            with self._span("normalise", loaded.brick), one_thread():
                for index in islice(waiting, self.job.net.batch - len(self._slots)):
                    self._gather(opened, native, index)
            if len(self._slots) < self.job.net.batch:
                loaded.wait()
                self.read_pool.give(array)
                return
            self._run_batch()
            yield from self._whole()

    def flush(self) -> Iterator[Computed]:
        """Pad the last batch and run it; yield the bricks that are left."""
        if self._slots:
            rest = self._batch[len(self._slots) :]
            rest.copy_(self._batch[:1].expand_as(rest))
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
            shape = (head.channels, *box.shape)
            if self.device.type == "cpu":
                opened.buffers.append(self.brick_pool.take(shape, head.kept))
                output = torch.from_numpy(opened.buffers[-1])
            else:
                output = torch.empty(shape, dtype=torch_dtype(head.kept), device=self.device)
            opened.outputs.append(output.zero_() if head.blended else output)
        return opened

    def _gather(self, opened: Computed, native: Tensor, index: tuple[int, ...]) -> None:
        """Copy a patch of a brick into the batch and normalise it there."""
        geometry, net = self.job.geometry, self.job.net
        scaling, first = opened.loaded.scaling, opened.brick.patches.start
        steps = zip(index, first, geometry.stride, strict=True)
        place = tuple((i - f) * stride for i, f, stride in steps)
        source = native[(slice(None), *slices_of(place, geometry.patch))]
        target = self._batch[len(self._slots)]
        target.copy_(source if net.shape.model_axes == 3 else source[:, 0])
        if scaling != Scaling():
            target.sub_(scaling.lower).div_(scaling.scale)
        if net.clip:
            target.clamp_(*net.clip)
        self._slots.append(Slot(opened, index, place))

    def _run_batch(self) -> None:
        """Run the batch and put its patches into their bricks.

        A CPU takes the same number of patches at a time, whatever the batch: the kernels that torch
        picks, and with them the last bits of a result, depend on that number.
        """
        self.before_batch(len(self._slots))
        if self.clock is not None:
            self.clock.report()
        step = self.job.net.forward if self.device.type == "cpu" else self.job.net.batch
        for start in range(0, len(self._slots), step):
            slots = self._slots[start : start + step]
            outputs = self._heads(slots[0].owner.brick, self._batch[start : start + step])
            span = self._span("stitch", slots[0].owner.brick)
            with span, torch.inference_mode(), one_thread():
                for head, output_BCZYX in enumerate(outputs):
                    self.scatter.put(head, output_BCZYX, slots)
        for slot in self._slots:
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


def one_thread() -> AbstractContextManager[None]:
    """Let one thread copy a patch. Waking other threads, on cores that decode and encode, would
    take longer than the copy."""
    return torch_threads(1)
