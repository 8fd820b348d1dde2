"""A ring of buffers that are lent to batches. A buffer comes back when its last view is gone."""

from __future__ import annotations

import weakref
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import Refused, UsageError, format_bytes, plural, require

_ALIGN = 64


class Ring:
    """Buffers of one size. Each is lent for one batch and comes back when no view of it is left.

    A buffer is lent as an array over a `memoryview` of it. Every view that numpy or torch makes
    keeps that array alive, so the array ends when no view is left. It may end in any thread, even
    inside the garbage collector: the callback puts the buffer into a `SimpleQueue`, which allows
    that, and takes no lock. Only one thread, the planner, lends.

    A copy to a device may still have to read a pinned buffer whose views are gone. Copies from
    arrays cannot be tracked: the planner waits until all devices have finished the work that was
    queued by then. Copies from tensors are tracked by torch. It notes an event for each copy, on
    any stream, and reuses the memory after these. So memory that is lent as tensors goes back to
    torch. The planner waits only for the stream of the thread that released it, so that copies do
    not fall behind.
    """

    def __init__(self, nbytes: int, usual: int, limit: int | None, pin: bool) -> None:
        self.nbytes, self._usual, self._limit, self._pin = nbytes, usual, limit, pin
        self.made = 0
        """The number of buffers that exist, lent or free."""
        self._most = usual
        self._device = -1
        """The CUDA device of the thread that iterates. Other threads begin on the first device."""
        self._as_tensors = False
        self._free: list[NDArray[np.uint8]] = []
        self._returned: SimpleQueue[NDArray[np.uint8] | _Left | None] = SimpleQueue()

    def begin(self, *, as_tensors: bool = False) -> None:
        """Allow the usual number of buffers again. Others are freed as they come back.

        ``as_tensors``: devices copy only from tensors, which share the buffers' storage.
        """
        self._most, self._as_tensors = self._usual, as_tensors and self._pin
        if self._pin:
            self._device = _cuda().current_device()

    def lend(self) -> NDArray[np.uint8] | None:
        """A buffer with any content, None where one must come back first."""
        while not self._returned.empty():
            self._take_back(self._returned.get())
        while self._as_tensors and self._free:
            self._drop()
        if not self._free and self.made >= self._most:
            return None
        if self._as_tensors:
            return self._lend_memory()
        buffer = self._free.pop() if self._free else self._make()
        root = np.frombuffer(buffer.data, np.uint8)
        # Not at the interpreter's exit, when nobody takes a buffer back.
        weakref.finalize(root, self._returned.put, buffer).atexit = False
        return root

    def wait(self) -> None:
        """Wait until a buffer comes back, or `wake` is called."""
        self._take_back(self._returned.get())

    def wake(self) -> None:
        """End a `wait`."""
        self._returned.put(None)

    def grow(self) -> None:
        """Allow one buffer more, since the user holds the others. `Refused` at the limit."""
        if self._limit is not None and self._most >= self._limit:
            raise Refused(
                f"all {plural(self._most, 'batch')} of {format_bytes(self.nbytes)} that "
                "max_memory allows are still held; let go of some (copy what must be kept), or "
                "raise max_memory"
            )
        self._most += 1

    def clear(self) -> None:
        """Free the buffers that nobody holds."""
        # Where none is allowed, to lend takes back what was returned, and drops all that is free.
        self._most = 0
        self.lend()
        self._most = self._usual

    def _lend_memory(self) -> NDArray[np.uint8]:
        """Memory of torch's, which ends when no view of it is left, neither array nor tensor."""
        self.made += 1
        memory = self._pinned()
        weakref.finalize(memory.untyped_storage(), _leave, self._returned).atexit = False
        return memory.numpy()

    def _take_back(self, buffer: NDArray[np.uint8] | _Left | None) -> None:
        if isinstance(buffer, _Left):
            if buffer.event is not None:
                buffer.event.synchronize()
            self.made -= 1
        elif buffer is not None:
            if self._pin:
                self._synchronize()
            self._free.append(buffer)
        while self._free and self.made > self._most:
            self._drop()

    def _drop(self) -> None:
        self._free.pop()
        self.made -= 1

    def _synchronize(self) -> None:
        """Wait for each device that may still copy. Torch holds memory on every device that it
        copies to."""
        cuda = _cuda()
        for device in range(cuda.device_count()):
            if device == self._device or cuda.memory_reserved(device):
                cuda.synchronize(device)

    def _make(self) -> NDArray[np.uint8]:
        self.made += 1
        return self._pinned().numpy() if self._pin else np.empty(self.nbytes, np.uint8)

    def _pinned(self) -> Any:
        torch = require("torch", "loaders")
        return torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)


class _Left(NamedTuple):
    """Says that memory which was lent as tensors has gone back to torch."""

    event: Any
    """The end of its last stream's work; None while that stream is captured as a graph."""


def _leave(returned: SimpleQueue[Any]) -> None:
    cuda = _cuda()
    event = None
    if not cuda.is_current_stream_capturing():
        event = cuda.Event(blocking=True)
        event.record()
    returned.put(_Left(event))


def _cuda() -> Any:
    cuda = require("torch", "loaders").cuda
    if not cuda.is_available():
        raise UsageError("pin needs a CUDA device, and torch sees none")
    return cuda


def aligned(count: int) -> int:
    """A number of bytes, rounded up to whole cache lines."""
    return -(-count // _ALIGN) * _ALIGN
