"""The most memory that Python and numpy take for some work."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Callable, Iterator

_DRAIN_S = 0.05
"""Seconds in which threads of C++ end what they have called of Python."""


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Trace memory, and yield a function that returns the most bytes so far, beyond what was taken
    before."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        # TensorStore's threads call Python once a write is done. A thread that waits for the GIL
        # within an allocation as tracing ends crashes the process (CPython 128679).
        time.sleep(_DRAIN_S)
        tracemalloc.stop()
