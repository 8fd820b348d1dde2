"""A device like CUDA's, as far as its queue and its events tell."""

from types import SimpleNamespace
from typing import Any, Protocol


class _Clock(Protocol):
    now: float


class DeviceQueue(SimpleNamespace):
    """It runs behind the host and catches up where it is synchronised.

    ``queueing_s`` is what the host needs to queue some work.
    """

    def __init__(self, clock: _Clock, queueing_s: float = 0.001) -> None:
        self.clock, self.queueing_s = clock, queueing_s
        self.ready, self.syncs, self.events = clock.now, 0, 0
        queue = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                queue.events += 1

            def record(self) -> None:
                self.at = max(queue.ready, queue.clock.now)

            def elapsed_time(self, other: Any) -> float:
                assert queue.ready <= queue.clock.now, "read before the queue was empty"
                return float(other.at - self.at) * 1e3

        self.Event = Event

    def launch(self, seconds: float) -> None:
        self.clock.now += self.queueing_s
        self.ready = max(self.ready, self.clock.now) + seconds

    def synchronize(self) -> None:
        self.syncs += 1
        self.clock.now = max(self.clock.now, self.ready)
