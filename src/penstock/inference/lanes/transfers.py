"""Copies of bricks to and from a device, and the times of the work on a GPU.

On the CPU copies are free and work is timed as it is done. On a GPU work is only queued: a brick
crosses the bus from and to pinned memory, on one stream for each way, and events of the device time
the work.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...instruments import Probe
from ..tiling.geometry import Brick
from .bricks import Computed, Loaded


class Transfers:
    """Copies bricks to a device, and their outputs back to the host."""

    def __init__(self, device: torch.device, clock: GpuClock | None = None) -> None:
        """``clock`` times the copies; None on the CPU, where copies take no time."""
        self.device, self.clock = device, clock
        self.streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        """The streams of uploads and of downloads; None on the CPU."""
        if device.type == "cuda":
            self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def upload(self, loaded: Loaded) -> None:
        """Begin to copy a brick to the device, if that has not begun."""
        if loaded.native is not None or loaded.array is None:
            return
        native = torch.from_numpy(loaded.array)
        if self.streams is None:
            loaded.native = native.to(self.device)
            return
        # The array is pinned already, unless the pool had no pinned buffer left.
        native = native.pin_memory()
        with torch.cuda.stream(self.streams[0]), self._span("upload", loaded.brick):
            loaded.native = native.to(self.device, non_blocking=True)
            # A blocking event: a thread that waits for it leaves the processor to others.
            loaded.arrived = torch.cuda.Event(blocking=True)
            loaded.arrived.record(self.streams[0])

    def take(self, loaded: Loaded) -> tuple[NDArray[Any], Tensor]:
        """The array of a brick on the host and on the device. The brick keeps neither."""
        self.upload(loaded)
        array, native = loaded.array, loaded.native
        loaded.array = loaded.native = None
        assert array is not None and native is not None
        if loaded.arrived is not None:
            main = torch.cuda.current_stream(self.device)
            main.wait_event(loaded.arrived)
            # Torch's allocator knows only the stream of uploads. Without this it might give the
            # memory to the next upload while the net still reads it.
            native.record_stream(main)
        return array, native

    def download(self, computed: Computed) -> Computed:
        """Begin to copy the outputs of a brick to the host. `Computed.wait` waits for the end."""
        outputs, tally = computed.outputs, computed.tally
        if self.streams is None:
            computed.outputs, computed.tally = [each.cpu() for each in outputs], tally.cpu()
            return computed
        stream = self.streams[1]
        # The outputs are only queued so far: the copy must come after what computes them.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        computed.ready = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            with self._span("download", computed.brick):
                computed.outputs = [_to_pinned(each) for each in outputs]
                computed.tally = _to_pinned(tally)
            computed.ready.record(stream)
        # As in `take`: the memory must not be given to the next brick before it is copied.
        for tensor in (*outputs, tally):
            tensor.record_stream(stream)
        return computed

    def _span(self, stage: str, brick: Brick) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.clock is None else self.clock.span(stage, brick)


def pinned(nbytes: int) -> NDArray[np.uint8]:
    """A pinned buffer of ``nbytes``, from which a GPU copies while threads go on."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def _to_pinned(tensor: Tensor) -> Tensor:
    # Torch keeps released pinned memory and hands it out again: after the first bricks this
    # allocates nothing.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


_TRACKS = {"upload": 1, "download": 2}
"""Tracks of a lane's thread in the trace, as copies overlap with what the GPU computes."""


class GpuClock:
    """Times the work of a GPU by the device's events, and reports it on the clock of a probe."""

    def __init__(self, device: torch.device, probe: Probe) -> None:
        self.device, self.probe = device, probe
        self._queued: deque[tuple[str, Brick, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Stage, brick, begin and end of each piece of work that is not reported yet."""
        self._first = self._mark()
        # Events count from each other. This one, read on both clocks, joins the device's to the
        # probe's.
        self._first.synchronize()
        self._first_s = probe.clock()

    @contextlib.contextmanager
    def span(self, stage: str, brick: Brick) -> Iterator[None]:
        """Time the work that is queued inside the context."""
        begin = self._mark()
        yield
        self._queued.append((stage, brick, begin, self._mark()))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def report(self, *, wait: bool = False) -> None:
        """Report the work that is done by now, or wait for all of it."""
        while self._queued and (wait or self._queued[0][-1].query()):
            stage, brick, begin, end = self._queued.popleft()
            end.synchronize()
            start_s = self._first_s + self._first.elapsed_time(begin) / 1e3
            end_s = start_s + begin.elapsed_time(end) / 1e3
            track = _TRACKS.get(stage, 0)
            self.probe.record(stage, start_s, end_s, brick, waiting=False, track=track)
