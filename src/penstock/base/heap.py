"""The heap of a process that computes voxels: one for all threads, which keeps its memory."""

from __future__ import annotations

import ctypes
import os
from typing import Any


def one_heap() -> None:
    """Let all threads share one heap that keeps its memory, where the C library is glibc.

    It must be called before a library allocates. By default each thread has a heap of its own, and
    each keeps the memory of earlier chunks: a job with global percentiles held a quarter more than
    its plan. A heap that gives memory back after a forward must also take it again for the next
    one, page by page: 16,000 page faults, a third of a UNet's time.
    """
    if mallopt := _of_glibc("mallopt"):
        for option, value in _HEAP.items():
            mallopt(option, value)


def trim_heap() -> None:
    """Return unused memory of the heap to the system, where the C library is glibc. Later
    allocations take it anew, page by page."""
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Any:
    """A function of the C library; None where that is not glibc."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


_HEAP = {-8: 1, -1: 2**31 - 1, -3: 2**25}
"""M_ARENA_MAX, M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h, the last at its limit."""
HEAP_VARIABLES = {"MALLOC_ARENA_MAX": str(_HEAP[-8]), "MALLOC_MMAP_THRESHOLD_": str(_HEAP[-3])}
"""Environment variables for a process that starts threads before it could call `one_heap`: each
thread would keep a heap of its own."""
