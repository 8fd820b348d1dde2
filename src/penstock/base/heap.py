"""The heap of a process that computes voxels: one for all threads, which keeps its memory; and how
its threads wait."""

from __future__ import annotations

import ctypes
import os
from typing import Any


def one_heap() -> None:
    """Let all threads share one heap that keeps its memory, where the C library is glibc.

    It must be called before a library allocates. By default each thread has a heap of its own, and
    each keeps the memory of earlier chunks: a job with global percentiles held a quarter more than
    its plan. A heap that gives memory back after a forward must also take it again for the next
    one, page by page: 16,000 page faults, a third of a UNet's time. So does a large tensor that is
    mapped by itself: at patches of 160 cubed it was 5 of 7 s of system time.
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


_HEAP = {-8: 1, -1: -1, -4: 0}
"""M_ARENA_MAX, M_TRIM_THRESHOLD (never) and M_MMAP_MAX (nothing) of glibc's malloc.h."""
HEAP_VARIABLES = {"MALLOC_ARENA_MAX": str(_HEAP[-8]), "MALLOC_MMAP_MAX_": str(_HEAP[-4])}
"""Environment variables for a process that starts threads before it could call `one_heap`: each
thread would keep a heap of its own."""
THREAD_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
"""Environment variables by which OpenMP's threads sleep while they wait. By default they would
spin, and take time from the threads that decode and encode. They still spin for about 30
microseconds, because the next part of a forward often comes within that time."""
