"""If a device has no memory for a batch: the error names the batch that fits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ...base import OutOfMemory, format_bytes
from ..opening.job import Job

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
            f"the host has no memory left for {job.net.forward} patches at a time; run again "
            "with --resume when there is more, or anew with a smaller --patch"
        )
    fits, free = fitting_batch(job, device)
    why = f"{device} has no memory left for a batch of {batch}"
    if batch == 1:
        return f"{why}; run anew with a smaller --patch"
    return (
        f"{why}; a batch of {fits} should fit into the {format_bytes(free)} that this job may have "
        f"there: run again with --resume --batch {fits}"
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
