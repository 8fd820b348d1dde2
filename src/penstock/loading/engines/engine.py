"""Engines, which read batches into the caller's memory; the arrays that they read, and the part of
each that an item takes.

An `Engine` knows where arrays lie and reads the rows of a batch into arrays that it is given. It
knows nothing of orders, epochs or queues. It cuts a batch into independent `Task`s. Any thread may
run any task, in any order; the loader hands out those of the oldest batch first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, at_home, scrub, well_formed
from ...data import DOCUMENT, first_level_of, joined, parse_document, read_document, read_key
from ..fields import Field, PatchGrid
from ..permutation import Items

Arrays = Mapping[str, NDArray[Any]]


class Location(NamedTuple):
    """The place of one array, and the names of its axes."""

    url: str
    """A path, or a URL that TensorStore knows."""
    axes: tuple[str, ...] = ()
    """The names of its axes, ``sample`` first; empty where the data set does not name them."""


def locate(data: Any) -> dict[str, Location]:
    """The places of the arrays of a data set.

    Args:
        data: A packed data set, one array, or a mapping of names to paths or URLs.

    Returns:
        The place of each array by its name. One array alone is called ``data``.

    Raises:
        UsageError: There is no such folder, or the data set's document is damaged.
    """
    if isinstance(data, Mapping):
        return {
            str(name): place if isinstance(place, Location) else Location(str(place))
            for name, place in data.items()
        }
    url = str(data).rstrip("/")
    if "://" in url:
        text = read_key(url, DOCUMENT)
        packed = None if text is None else parse_document(text, scrub(url))
    else:
        url = str(at_home(url))
        if not Path(url).exists():
            raise UsageError(f"{url}: there is no such folder")
        file = Path(url, DOCUMENT)
        packed = read_document(file, url) if file.is_file() else None
    if packed is None:
        return {"data": Location(first_level_of(url))}
    with well_formed(f"{scrub(url)}: its metadata is malformed"):
        return {
            name: Location(joined(url, entry["path"]), tuple(entry.get("axes", ())))
            for name, entry in packed["arrays"].items()
        }


@dataclass(frozen=True)
class Selection:
    """The part of each array that an item takes, by the array's name. See `Field` for each
    setting."""

    offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    channels: Mapping[str, Sequence[int]] = field(default_factory=dict)
    patch: Mapping[str, PatchGrid] = field(default_factory=dict)
    channel_axis: Mapping[str, int] = field(default_factory=dict)
    """The axis of the channels; by default the one called ``channels``, or else the last."""

    def check(self, names: Sequence[str]) -> None:
        """Refuse settings of arrays that do not exist."""
        for what in ("offsets", "channels", "patch", "channel_axis"):
            if unknown := sorted(set(getattr(self, what)) - set(names)):
                raise UsageError(
                    f"{what} names {', '.join(unknown)}; the arrays are {', '.join(names)}"
                )

    def field(self, name: str, place: Location, shape: Any, chunks: Any, dtype: Any) -> Field:
        """The field of an array: the array and the part of it that an item takes.

        An array whose patches cut all of its axes is one sample: it gets an axis of length 1 in
        front.

        Args:
            name: The array's name.
            place: Its place, with the names of its axes.
            shape: Its shape: (samples, ...).
            chunks: The shape of its chunks.
            dtype: Its type as stored; the field has the native byte order.

        Returns:
            The field.

        Raises:
            UsageError: Offsets, channels or patch do not fit the array.
        """
        default = place.axes.index("channels") if "channels" in place.axes else -1
        channel_axis, grid = self.channel_axis.get(name, default), self.patch.get(name)
        ndim = len(shape)
        if grid is not None and _is_volume(grid, ndim):  # axes counted from behind stay the same
            shape, chunks = (1, *shape), (1, *chunks)
            channel_axis -= ndim if channel_axis >= 0 else 0
            grid = replace(grid, axes=tuple(a - ndim if a >= 0 else a for a in grid.axes))
        return Field(
            name,
            shape=tuple(shape),
            chunks=tuple(chunks),
            dtype=np.dtype(dtype).newbyteorder("="),
            offsets=tuple(self.offsets.get(name, (0,))),
            channels=tuple(self.channels[name]) if name in self.channels else None,
            channel_axis=channel_axis,
            patch=grid,
        )


def _is_volume(grid: PatchGrid, ndim: int) -> bool:
    """Whether patches cut axis 0 of an array of ``ndim`` axes too."""
    axes = grid.axes or range(ndim - len(grid.shape), ndim)
    return all(-ndim <= axis < ndim for axis in axes) and (0 in axes or -ndim in axes)


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
