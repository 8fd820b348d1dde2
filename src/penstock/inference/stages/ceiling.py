"""Keeps a job within the memory that its plan gives."""

from __future__ import annotations

from ...base import trim_heap
from ...instruments import Clock
from ..planning.memory import resident_bytes

_STEP_BYTES = 16 * 2**20
"""Bytes by which a process may come nearer to its plan before its heap is trimmed (again)."""
_EVERY_S = 10.0
"""Least seconds between two trims, as the next forward must get its memory back page by page. A
UNet that was trimmed without this pause spent 39 s of 217 s in the kernel."""


class MemoryCeiling:
    """Trims the heap of a process that comes near to its planned memory.

    Chunks and bricks settle in the gaps that the large tensors of a forward leave, so the next
    forward takes new memory. Without trimming, a UNet with one thread held 14 % more than its plan
    after two minutes, and a fifth of that was unused.
    """

    def __init__(self, planned: int, clock: Clock) -> None:
        """``planned`` is the most bytes that the process should hold."""
        self._most, self._clock = planned - _STEP_BYTES, clock
        self._next = clock()

    def keep(self) -> None:
        """Trim the heap if the process holds more than it did when that last helped."""
        if self._clock() >= self._next and resident_bytes() > self._most:
            trim_heap()
            # If all of it is in use, trimming would only cost time.
            self._most = max(self._most, resident_bytes() + _STEP_BYTES)
            self._next = self._clock() + _EVERY_S
