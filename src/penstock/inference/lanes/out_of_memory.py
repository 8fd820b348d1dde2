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
from ..run_folder.log_file import read_units
from .blocks import Slot

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
    """The units with patches that ran in smaller batches, listed in the run folder."""

    def __init__(self, job: Job, path: Path | None, *, resumed: bool) -> None:
        """``path`` is the file of the list. A run that is not ``resumed`` begins it anew."""
        self.job, self.path = job, path
        self.units: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()
        if path is not None and path.exists():
            if resumed:
                self.units = read_units(path.read_bytes())
            else:
                path.unlink()

    def note(self, slots: Iterable[Slot]) -> None:
        """Note the units that patches overlap."""
        geometry = self.job.geometry
        with self._lock:
            for slot in slots:
                block = slot.owner.block
                start = (r + p for r, p in zip(block.read.start, slot.place, strict=True))
                seen = Box.of(tuple(start), geometry.patch) & geometry.reach(block)
                near = indices(geometry.units.touching(seen & geometry.domain))
                for unit in ((block.volume, *index) for index in near):
                    if unit not in self.units:
                        self.units.add(unit)
                        self._append(unit)

    def _append(self, unit: tuple[int, ...]) -> None:
        if self.path is not None:
            with self.path.open("a+b") as rows:
                append_line(rows, json.dumps({"unit": unit}))
