"""One device's share of a job: patches of blocks into batches, and batches back into blocks.

    upload | gather | normalise | forward | scatter | download

A lane is fed blocks in order and gives them back in order. Batches cross block borders, and the
last one is padded to the full size, so the net sees one input shape from first to last and a
patch's result does not depend on what else is in its batch. On the CPU upload and download are
free; on CUDA a block crosses the bus once each way, in the dtype of the store, and the next one
comes while the present one is at work (`transfers`). Everything between is the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice

import torch
from torch import Tensor

from ..base import PenstockError, Pool, StageError, torch_threads
from ..data import Scaling, indices
from ..instruments import Probe
from ..models import placed
from .blocks import Computed, Loaded, Slot
from .geometry import Block
from .job import Job
from .scatter import PatchScatter, slices_of, torch_dtype
from .transfers import GpuClock, Transfers
from .values import NOTHING


class Lane:
    """Feeds one device."""

    def __init__(
        self,
        device: torch.device,
        job: Job,
        probe: Probe,
        pools: tuple[Pool, Pool],
        before_batch: Callable[[int], None],
    ) -> None:
        """``pools`` are those of the arrays that come in and of those that go out;
        ``before_batch`` is told how many patches a forward will run and may raise to stop it."""
        self.device, self.job, self.probe = device, job, probe
        self.read_pool, self.block_pool = pools
        self.before_batch = before_batch
        self.forward = Forward(device, job)
        self.scatter = PatchScatter(device, job)
        self.transfers = Transfers(device)
        self.clock = GpuClock(device, probe) if device.type == "cuda" else None
        net = job.net
        shape = (net.batch, net.model.in_channels, *net.shape.seen)
        self._batch = torch.empty(shape, dtype=net.carrier, device=device, memory_format=net.layout)
        self._empty_tally = torch.tensor([NOTHING] * len(job.heads), device=device)
        self._slots: list[Slot] = []
        self._open: deque[Computed] = deque()

    def push(self, loaded: Loaded) -> Iterator[Computed]:
        """Take a block; yield those that it completes, oldest first."""
        array, native = self.transfers.take(loaded)
        opened = self._opened(loaded)
        self._open.append(opened)
        waiting = indices(loaded.block.patches)
        while True:
            with self._span("normalise", loaded.block), one_thread():
                for index in islice(waiting, self.job.net.batch - len(self._slots)):
                    self._gather(opened, native, index)
            if len(self._slots) < self.job.net.batch:
                self.read_pool.give(array)
                return
            self._run_batch()
            yield from self._whole()

    def flush(self) -> Iterator[Computed]:
        """Run what is left in a padded batch."""
        if self._slots:
            rest = self._batch[len(self._slots) :]
            rest.copy_(self._batch[:1].expand_as(rest))
            self._run_batch()
        yield from self._whole()
        if self.clock is not None:
            self.clock.report(wait=True)

    def _opened(self, loaded: Loaded) -> Computed:
        """A block none of whose patches is computed; on the CPU its outputs lie in buffers."""
        opened = Computed(
            loaded, [], [], self._empty_tally.clone(), self.job, loaded.block.patches.size
        )
        for head in self.job.heads:
            box = loaded.block.support if head.blended else loaded.block.core
            shape = (head.channels, *box.shape)
            if self.device.type == "cpu":
                opened.buffers.append(self.block_pool.take(shape, head.kept))
                output = torch.from_numpy(opened.buffers[-1])
            else:
                output = torch.empty(shape, dtype=torch_dtype(head.kept), device=self.device)
            opened.outputs.append(output.zero_() if head.blended else output)
        return opened

    def _gather(self, opened: Computed, native: Tensor, index: tuple[int, ...]) -> None:
        """Copy a patch of a block into the batch and normalise it there."""
        geometry, net = self.job.geometry, self.job.net
        scaling, first = opened.loaded.scaling, opened.block.patches.start
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
        """Run the batch and put its patches into their blocks.

        A CPU takes as many at a time whatever the batch: the kernels that torch picks there, and
        with them the last bits of a result, depend on how many there are.
        """
        self.before_batch(len(self._slots))
        if self.clock is not None:
            self.clock.report()
        step = self.job.net.forward if self.device.type == "cpu" else self.job.net.batch
        for start in range(0, len(self._slots), step):
            slots = self._slots[start : start + step]
            block = slots[0].owner.block
            try:
                # Not in inference mode, in which autocast would keep no weights that it has cast.
                with self._span("forward", block), torch.no_grad():
                    outputs = self.forward.run(self._batch[start : start + step])
            except PenstockError as error:  # of what it returned
                raise StageError("forward", str(block), error) from error
            with self._span("stitch", block), torch.inference_mode(), one_thread():
                for head, output_BCZYX in enumerate(outputs):
                    for row, slot in enumerate(slots):
                        self.scatter.put(head, output_BCZYX[row], slot)
        for slot in self._slots:
            slot.owner.remaining -= 1
        self._slots.clear()

    def _whole(self) -> Iterator[Computed]:
        while self._open and self._open[0].remaining == 0:
            yield self.transfers.download(self._open.popleft())

    def _span(self, stage: str, block: Block) -> AbstractContextManager[None]:
        return (self.clock or self.probe).span(stage, block)


class Forward:
    """The net on a device: a batch in, its heads out, each checked to be as at first."""

    def __init__(self, device: torch.device, job: Job) -> None:
        self.device, self.job = device, job
        config, net = job.config, job.net
        self.module = placed(net.model.module, device, net.footprint.channels_last)
        if config.compile:
            dynamic = {"auto": None, "true": True, "false": False}[config.compile_dynamic]
            self.module = torch.compile(self.module, mode=config.compile_mode, dynamic=dynamic)  # type: ignore[assignment]
        self._dtypes: list[torch.dtype] = []
        """Of the heads, once one forward has returned them."""

    def autocast(self) -> torch.autocast:
        """What the model runs in. To be entered around all of a lane's work as well: torch keeps
        the weights that it has cast until it leaves the outermost one."""
        amp = self.job.net.amp
        return torch.autocast(self.device.type, amp, amp is not None)

    def run(self, batch: Tensor) -> list[Tensor]:
        """The model's heads, one for each sink, shape (batch, channels, z, y, x)."""
        model = self.job.net.model
        with self.autocast():
            heads = model.heads(self.module(batch.to(model.dtype)))
        outputs = self._checked(heads, (len(batch), *batch.shape[2:]))
        if len(outputs) == 1 and len(self.job.heads) > 1:
            outputs = list(outputs[0].split(1, dim=1))
        return outputs if self.job.net.shape.model_axes == 3 else [o.unsqueeze(2) for o in outputs]

    def _checked(self, heads: Mapping[str, Tensor], sides: tuple[int, ...]) -> list[Tensor]:
        """The heads in the order in which they were found.

        Raises `PenstockError` where a forward returns others than the first, or of another shape
        or dtype. Floats of half precision are what autocast makes of others.
        """
        expected = self.job.net.footprint.heads
        if heads.keys() != {head.name for head in expected}:
            raise PenstockError(
                f"the model returned {len(heads)} head(s), {', '.join(heads)}, and not "
                f"{len(expected)}, {', '.join(head.name for head in expected)}, as at first"
            )
        outputs = [heads[head.name] for head in expected]
        dtypes = self._dtypes or [
            output.dtype
            if output.is_floating_point() and head.dtype.is_floating_point
            else head.dtype
            for output, head in zip(outputs, expected, strict=True)
        ]
        for head, output, dtype in zip(expected, outputs, dtypes, strict=True):
            shape = (sides[0], head.channels, *sides[1:])
            if output.shape != shape or output.dtype != dtype:
                raise PenstockError(
                    f"the model returned {tuple(output.shape)} of {output.dtype} as {head.name}, "
                    f"and not {shape} of {dtype} as at first"
                )
        self._dtypes = dtypes
        return outputs


def one_thread() -> AbstractContextManager[None]:
    """Copies of a patch are made by one thread: waking others, on cores that decode and encode,
    takes longer than the copy."""
    return torch_threads(1)
