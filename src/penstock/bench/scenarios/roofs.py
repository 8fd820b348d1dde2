"""Scenarios of the roofs of a machine: its highest rates of computing and of reading.

    matmul   a large square product                     floating-point operations per second
    disk     a file of its own, in large blocks         bytes read per second

A roof is measured and not taken from a data sheet.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil

from ...base import UsageError, require, system_errors
from ...instruments import PAGE_BLOCK, drop_pages_of
from . import Phase, Work, WrongResult, flags_of_bench

FROM_DEVICE = 0.9
"""The fraction of a read that must come from the device, for its source to be "device"."""


class Matmul:
    """The product of two square matrices, into preallocated memory."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        torch = require("torch", "infer")
        from ...models import find_devices, set_cuda_flags

        with flags_of_bench():
            find_devices([case["device"]])  # raises if there is no such device
        set_cuda_flags(case.get("tf32", False))
        self.device = case["device"]
        size, dtype = case["size"], getattr(torch, case["dtype"])
        generator = torch.Generator().manual_seed(0)
        self._left, self._right = (
            torch.randn(size, size, generator=generator).to(self.device, dtype) for _ in range(2)
        )
        self._product = torch.empty_like(self._left)
        self._matmul = torch.mm
        self.work: Work = {"flops": 2 * size**3, "bytes": 3 * size**2 * dtype.itemsize}
        self.facts: Mapping[str, Any] = {
            "threads": torch.get_num_threads() if self.device == "cpu" else None,
            "tf32": torch.backends.cuda.matmul.allow_tf32 if "cuda" in self.device else None,
        }

    def step(self, phase: Phase) -> Work:
        self._matmul(self._left, self._right, out=self._product)
        return self.work

    def close(self) -> None:
        del self._left, self._right, self._product

    def verify(self) -> None:
        """Check one element against float64; a product of length n deviates by about sqrt(n)."""
        element = float(self._product[0, 0])
        exact = float(self._left[0].cpu().double() @ self._right[:, 0].cpu().double())
        if not abs(element - exact) <= 0.05 * len(self._left) ** 0.5:
            raise WrongResult(f"an element of the product is {element}, not {exact}")


class DiskRead:
    """A file read from end to end; the phase ``read`` excludes the time to empty the page cache.

    The file's pages are dropped before each read, and the kernel's counter of fetched bytes is
    read. ``facts["source"]`` is "device", "page cache" (the kernel kept them, or the folder is in
    memory), or "unknown" if the kernel does not count. Caches of a hypervisor or of the device
    itself cannot be seen.
    """

    def __init__(self, case: Mapping[str, Any]) -> None:
        """Write a file without a name into the folder of the case, so that it cannot be left
        behind, however the process ends. Raises `UsageError` if the folder takes none."""
        self.device = "cpu"
        self._size = size = case["bytes"] // PAGE_BLOCK * PAGE_BLOCK or PAGE_BLOCK
        folder = case["folder"]
        with system_errors(f"--folder {folder} takes no file of {size} bytes"):
            if (free := shutil.disk_usage(folder).free) < 2 * size:
                raise UsageError(
                    f"--folder {folder} has {free} bytes free; reading it is measured with a file "
                    f"of {size} and as much room again"
                )
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - kept open
            random = np.random.default_rng(0)  # some file systems compress or deduplicate
            for _ in range(0, size, PAGE_BLOCK):
                self._file.write(random.bytes(PAGE_BLOCK))
            os.fsync(self._file.fileno())  # pending writes would slow the reads
        self._buffer = bytearray(PAGE_BLOCK)
        self.facts: dict[str, Any] = {}
        self.work: Work = {"bytes": size}

    def step(self, phase: Phase) -> Work:
        drop_pages_of(self._file.fileno())
        before = _fetched()
        phase("")
        self._file.seek(0)
        done = 0
        while done < self._size:
            count = self._file.readinto(self._buffer)
            if not count:
                raise WrongResult(f"the file ended at {done} bytes, {self._size - done} early")
            done += count
        phase("read")
        after = _fetched()
        if before is None or after is None:
            self.facts["source"] = "unknown"
        else:
            share = (after - before) / self._size
            self.facts["fetched_share"] = min(share, self.facts.get("fetched_share", share))
            kept = self.facts["fetched_share"] < FROM_DEVICE
            self.facts["source"] = "page cache" if kept else "device"
        return self.work

    def close(self) -> None:
        self._file.close()


def _fetched() -> int | None:
    """Bytes that the kernel fetched from a device for this process; None if it does not count."""
    with contextlib.suppress(AttributeError, psutil.Error, OSError):
        return psutil.Process().io_counters().read_bytes
    return None
