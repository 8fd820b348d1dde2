"""Engines, which read batches into the caller's memory.

An `Engine` knows where arrays lie and reads the rows of a batch into arrays that it is given. It
knows nothing of orders, epochs or queues. It cuts a batch into independent `Task`s. Any thread may
run any task, in any order; the loader hands out those of the oldest batch first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..fields import Field
from ..permutation import Items
from .chunk_selection import Arrays

Check = Callable[[], None]
"""Long work calls this now and then. It raises once the work is no longer wanted."""


TICKET = 1 << 20
"""The fewest bytes that a thread is handed at once. Smaller chunks share a ticket."""


class EngineKnobs(NamedTuple):
    """The settings of an engine."""

    workers: int
    """Threads that decode and copy."""
    fetch: int
    """Requests under way at once, of TensorStore. 0 leaves their number to it."""
    cache_bytes: int
    """The most bytes of decoded chunks that TensorStore keeps."""
    missing: str
    """``error``: a chunk that the store lacks is an error. ``fill``: it is the fill value."""


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
    """A piece of a batch, independent of the other pieces."""

    @property
    def nbytes(self) -> int:
        """Bytes that it decodes. Work is shared out by this number."""

    def run(self, out: Arrays, check: Check) -> None:
        """Read this piece into the batch."""


class Reading(Protocol):
    """A task that was started and runs by itself."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def end_within(self, seconds: float) -> None:
        """Wait for the end, at most so many seconds. Raises nothing."""

    def wait(self, check: Check) -> None:
        """Wait until all of it is in the batch. Every call raises the error of a failed read."""


class Begins(Task, Protocol):
    """A task that an engine reads in threads of its own."""

    def begin(self, out: Arrays) -> Reading:
        """Start reading into the batch."""


class Engine(ABC):
    """Reads rows of some arrays into the caller's memory."""

    name: str
    reason: str = "it was asked for"
    """Why this engine was chosen."""
    fields: Mapping[str, Field]
    drivers: int
    """Threads that should run tasks."""
    reads_alone: bool = False
    """True where tasks can be begun and need no thread of the caller; see `Begins`."""
    scratch_bytes: int
    """The most memory that it takes, without the batches and `bytes_in_flight`."""

    def bytes_in_flight(self, rows: int, batches: int) -> int:
        """The most bytes that reads in flight hold, beside the batches.

        Args:
            rows: Rows of a batch.
            batches: Batches that are read at a time.
        """
        return 0

    @abstractmethod
    def tasks(self, samples: Items, patches: Items | None = None) -> Sequence[Task]:
        """The tasks that read the rows of a batch. Nothing is read yet.

        Call it in the order in which the batches are needed.

        Args:
            samples: The sample of each row, along axis 0 of the arrays: (rows,).
            patches: The patch of each row: (rows,). None where samples are not cut.

        Returns:
            The tasks, independent of each other.
        """

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    def save_memory(self) -> None:  # noqa: B027
        """Take the least scratch memory, and lose speed. Call it before the first task."""

    def clear(self) -> None:  # noqa: B027
        """Free the memory that is kept for the next tasks."""

    def cancel(self) -> None:  # noqa: B027
        """End tasks that wait for bytes. Their errors are ignored."""

    def read_into(
        self,
        samples: Items,
        out: Arrays,
        check: Check = lambda: None,
        patches: Items | None = None,
    ) -> None:
        """Read the rows of one batch in this thread.

        Args:
            samples: The sample of each row, along axis 0 of the arrays: (rows,).
            out: The batch: an array of shape (rows, ...) for each field.
            check: Called before each task; may raise.
            patches: The patch of each row: (rows,). None where samples are not cut.
        """
        for task in self.tasks(samples, patches):
            check()
            task.run(out, check)
