"""Keeps a job below the memory that its plan has named."""

from __future__ import annotations

from ...base import trim_heap
from ...instruments import Clock
from ..planning.memory import resident_bytes

_STEP_BYTES = 16 * 2**20
"""Bytes by which a process may come nearer to its plan before its heap is trimmed (again)."""
_EVERY_S = 10.0
"""The least seconds between two trims: the next forward takes its memory anew, page by page. A UNet
that was trimmed whenever it came near spent 39 s of 217 s in the system."""


class MemoryCeiling:
    """Trims the heap of a process that comes near to its plan.

    Chunks and blocks settle in the gaps that the large tensors of a forward leave, and the next
    forward takes new memory: without it, a UNet of one thread held 14 % more than its plan after
    two minutes, a fifth of it unused. What is used is in the plan; gaps are given back.
    """

    def __init__(self, planned: int, clock: Clock) -> None:
        """``planned`` is the greatest number of bytes that the process should hold."""
        self._most, self._clock = planned - _STEP_BYTES, clock
        self._next = clock()

    def keep(self) -> None:
        """Trim the heap if the process holds more than it did when that last helped."""
        if self._clock() >= self._next and resident_bytes() > self._most:
            trim_heap()
            # If all of it is in use, trimming would only cost time.
            self._most = max(self._most, resident_bytes() + _STEP_BYTES)
            self._next = self._clock() + _EVERY_S
