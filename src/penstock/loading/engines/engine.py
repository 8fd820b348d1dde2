"""Engines, which read batches into memory that is given to them, and contenders to be compared.

An `Engine` knows where arrays lie and how to bring the rows of a batch into the caller's arrays; it
knows nothing of order, epochs or queues. It cuts a batch into independent `Task`s, which any
threads may run in any order: the loader hands them out, the oldest batch first. A `Contender`
makes whole batches by itself, as other libraries do, so that a benchmark can set it beside ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..fields import Field
from ..permutation import Items
from .selection import Arrays

Check = Callable[[], None]
"""Called now and then in long work; raises where the work is no longer wanted."""


TICKET = 1 << 20
"""Bytes of a piece of work that is handed to a thread, at least; smaller chunks share one."""


class EngineKnobs(NamedTuple):
    """How an engine is to read."""

    workers: int
    """Threads that decode and copy."""
    fetch: int
    """Threads or requests that only read; 0 where that is left to the engine."""
    cache_bytes: int
    """Bytes of decoded chunks that may be kept."""
    missing: str
    """What a chunk is that the store lacks: ``error``, or ``fill`` for the store's fill value."""


class Traffic(NamedTuple):
    """Bytes that were moved for some rows."""

    stored_bytes: int | None = 0
    """None where the engine cannot tell."""
    decoded_bytes: int = 0
    """Padding of chunks and all, where the engine can tell."""

    def plus(self, other: Traffic) -> Traffic:
        stored = None
        if self.stored_bytes is not None and other.stored_bytes is not None:
            stored = self.stored_bytes + other.stored_bytes
        return Traffic(stored, self.decoded_bytes + other.decoded_bytes)


class Wanted(NamedTuple):
    """A batch that will be read."""

    number: int
    items: Items
    """The order's item of each row."""
    samples: Items
    """The sample of each row, along axis 0 of the arrays."""
    patches: Items | None
    """The patch of each row, None where samples are not cut."""


class Task(Protocol):
    """A piece of a batch that knows nothing of the other pieces."""

    @property
    def nbytes(self) -> int:
        """Bytes that are decoded for it, for sharing work out."""

    def fetch(self) -> Any:
        """Bring in what is stored; what it returns goes to `run`."""

    def run(self, out: Arrays, check: Check, fetched: Any = None) -> Traffic:
        """Put this piece where it belongs in the batch. Fetches by itself what was not."""


class Reading(Protocol):
    """A task that was begun."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def end_within(self, seconds: float) -> None:
        """Wait so long at most, and raise nothing."""

    def wait(self, check: Check) -> Traffic:
        """Until all of it is in the batch. Raises what went wrong, each time it is called."""


class Begins(Task, Protocol):
    """A task of an engine that reads in threads of its own."""

    def begin(self, out: Arrays) -> Reading:
        """Start reading into the batch."""


class Engine(ABC):
    """Reads rows of some arrays into memory of the caller."""

    name: str
    reason: str = "it was asked for"
    """Why this engine and no other."""
    fields: Mapping[str, Field]
    drivers: int
    """Threads that should run tasks."""
    fetchers: int = 0
    """Threads that should fetch for them; with none, who runs a task fetches too."""
    reads_alone: bool = False
    """Its tasks can be begun and go on without a thread of the caller's; see `Begins`."""
    fetched_nbytes: int = 0
    """Bytes that a task which was fetched may hold until it has run."""
    scratch_bytes: int
    """The most memory that it takes besides the batches and `bytes_in_flight`."""
    foreseen: int = 0
    """Uses of chunks that its cache may look ahead."""

    @property
    def fetched_bytes(self) -> int:
        """The most that tasks which were fetched may hold together."""
        return 2 * self.fetchers * max(self.fetched_nbytes, TICKET)

    def bytes_in_flight(self, rows: int, batches: int) -> int:
        """The most that reads hold which are asked for a whole batch at once: so many batches of so
        many rows are read at a time."""
        return 0

    @abstractmethod
    def tasks(self, samples: Items, patches: Items | None = None) -> Sequence[Task]:
        """What brings in the rows of a batch: sample and patch of each, along the arrays' axis 0.

        Moves no byte. Batches are asked for in the order in which they are wanted.
        """

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    def plan(self, batches: Iterator[Wanted]) -> Iterator[tuple[Wanted, Sequence[Task]]]:
        """Batches with their tasks, as they are asked for. ``batches`` may be looked at further
        ahead, by any thread that runs a task."""
        return ((batch, self.tasks(batch.samples, batch.patches)) for batch in batches)

    def save_memory(self) -> None:  # noqa: B027
        """Do with the least scratch, at the price of speed. To be said before the first task."""

    def clear(self) -> None:  # noqa: B027
        """Let go of the room that is kept for the next tasks."""

    def forget(self) -> None:  # noqa: B027
        """Of what `plan` has looked at or given out, nothing more will run."""

    def cancel(self) -> None:  # noqa: B027
        """Let go of tasks that wait for bytes; what they raise is not looked at."""

    def read_into(
        self,
        samples: Items,
        out: Arrays,
        check: Check = lambda: None,
        patches: Items | None = None,
    ) -> Traffic:
        """Bring in the rows of one batch, in this thread."""
        traffic = Traffic()
        for task in self.tasks(samples, patches):
            check()
            traffic = traffic.plus(task.run(out, check))
        return traffic
