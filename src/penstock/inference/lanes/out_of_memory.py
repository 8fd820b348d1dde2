"""If a device has no memory for a batch: name the batch that fits, or run smaller batches."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ...base import OutOfMemory, append_line, format_bytes
from ...data import Box, indices
from ..opening.job import Job
from ..run_folder.names import read_blocks
from .bricks import Slot

_ON_THE_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised an error because a device, or the host, has no memory left."""
    of_the_host = isinstance(error, RuntimeError) and any(w in str(error) for w in _ON_THE_HOST)
    return isinstance(error, torch.OutOfMemoryError) or of_the_host


@contextlib.contextmanager
def batch_named(job: Job, device: torch.device) -> Iterator[None]:
    """Turn torch's out-of-memory error into `OutOfMemory`, which names the batch that fits. The run
    can be resumed.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(_advice(job, device)) from error


def _advice(job: Job, device: torch.device) -> str:
    batch = job.net.batch
    if device.type == "cpu":
        # On a CPU the number of patches in a forward does not depend on the batch.
        return (
            f"the host has no memory left for {job.net.forward} patches at a time; run again with "
            "--resume --oom halve, or anew with a smaller --patch"
        )
    fits, free = fitting_batch(job, device)
    why = f"{device} has no memory left for a batch of {batch}"
    if batch == 1:
        return f"{why}; run anew with a smaller --patch"
    return (
        f"{why}; a batch of {fits} should fit into the {format_bytes(free)} that this job may have "
        f"there: run again with --resume --batch {fits}, or --resume --oom halve"
    )


def fitting_batch(job: Job, device: torch.device) -> tuple[int, int]:
    """The first of a half, a quarter ... of the batch that should fit a GPU, and the bytes that the
    job may take there.
    """
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device)
    return halved_to_fit(job.net.batch, job.plan.device_peak or 0, job.plan.batch_bytes, room), room


def halved_to_fit(batch: int, peak: int, of_batch: int, room: int) -> int:
    """The first of a half, a quarter ... of a batch whose planned peak fits; at least 1.

    ``of_batch`` are the bytes of the ``peak`` that shrink with the batch.
    """
    fits = max(1, batch // 2)
    while fits > 1 and peak - of_batch * (batch - fits) / batch > room:
        fits //= 2
    return fits


class Halvings:
    """The blocks with patches that ran in smaller batches, listed in the run folder."""

    def __init__(self, job: Job, path: Path | None, *, resumed: bool) -> None:
        """``path`` is the file of the list. A run that is not ``resumed`` begins it anew."""
        self.job, self.path = job, path
        self.blocks: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()
        if path is not None and path.exists():
            if resumed:
                self.blocks = read_blocks(path.read_bytes())
            else:
                path.unlink()

    def note(self, slots: Iterable[Slot]) -> None:
        """Note the blocks that patches overlap."""
        geometry = self.job.geometry
        with self._lock:
            for slot in slots:
                brick = slot.owner.brick
                start = (r + p for r, p in zip(brick.read.start, slot.place, strict=True))
                seen = Box.of(tuple(start), geometry.patch) & geometry.reach(brick)
                near = indices(geometry.blocks.touching(seen & geometry.domain))
                for block in ((brick.volume, *index) for index in near):
                    if block not in self.blocks:
                        self.blocks.add(block)
                        self._append(block)

    def _append(self, block: tuple[int, ...]) -> None:
        if self.path is not None:
            with self.path.open("a+b") as rows:
                append_line(rows, json.dumps({"block": block}))
