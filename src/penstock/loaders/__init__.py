"""Engines, which read batches into memory that is given to them, and contenders to be compared.

An `Engine` knows where arrays lie and how to bring the rows of a batch into the caller's arrays; it
knows nothing of order, epochs or queues. It cuts a batch into independent `Task`s, which any
threads may run in any order: the loader hands them out, the oldest batch first. A `Contender`
makes whole batches by itself, as other libraries do, so that a benchmark can set it beside ours.
"""

from __future__ import annotations

import importlib
import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..batches import Field
from ..errors import UsageError
from ..order import Items, Order

Arrays = Mapping[str, NDArray[Any]]
Check = Callable[[], None]
"""Called now and then in long work; raises where the work is no longer wanted."""

CONTENDERS = {
    "penstock": "penstock.loader:Ours",
    "penstock-tensorstore": "penstock.loader:OursByTensorStore",
    "penstock-native": "penstock.loader:OursNative",
    "tensorstore-loop": "penstock.loaders.tensorstore_read:TensorStoreLoop",
    "tensorstore-read": "penstock.loaders.tensorstore_read:TensorStoreRead",
    "torch": "penstock.loaders.torch_workers:TorchWorkers",
    "dask-sample": "penstock.loaders.dask_xarray:DaskSample",
    "dask-stacked": "penstock.loaders.dask_xarray:DaskStacked",
    "xbatcher": "penstock.loaders.xbatcher:Xbatcher",
    "zarr": "penstock.loaders.zarr_python:Zarr",
    "zarr-stacked": "penstock.loaders.zarr_python:ZarrStacked",
    "zarrs": "penstock.loaders.zarr_python:Zarrs",
}
"""Loaders that a benchmark compares, each ``module:Class`` called as `make` says."""
TICKET = 1 << 20
"""Bytes of a piece of work that is handed to a thread, at least; smaller chunks share one."""
FORMAT, VERSION = "penstock-packed", 1
DOCUMENT = "dataset.json"
"""What a folder is known by as a packed data set; see `penstock.dataset`."""


class Contender(Protocol):
    """A loader as a benchmark sees it: the batches of one epoch, in the order that it was given."""

    def batches(self) -> Iterator[Mapping[str, NDArray[Any]]]: ...

    def close(self) -> None: ...


def make(name: str, data: Any, order: Order, *, threads: int, **knobs: Any) -> Contender:
    """A contender by name. `MissingDependency` says what to install for one that is not there."""
    if name not in CONTENDERS:
        raise UsageError(f"there is no loader {name!r}; known are {', '.join(CONTENDERS)}")
    module, _, attribute = CONTENDERS[name].partition(":")
    contender: Contender = getattr(importlib.import_module(module), attribute)(
        data, order, threads=threads, **knobs
    )
    return contender


# --- what is read -------------------------------------------------------------------------------


class Location(NamedTuple):
    """Where one array lies."""

    url: str
    """A path, or a URL that TensorStore knows."""
    axes: tuple[str, ...] = ()
    """The names of its axes where the data set tells them, ``sample`` first."""


def locate(data: Any) -> dict[str, Location]:
    """The arrays of a data set: a packed folder, one array, or a mapping of name to path or URL."""
    if isinstance(data, Mapping):
        return {
            str(name): place if isinstance(place, Location) else Location(str(place))
            for name, place in data.items()
        }
    url = str(data).rstrip("/")
    if "://" in url:
        from .tensorstore import read_key

        text = read_key(url, DOCUMENT)
    else:
        url = str(Path(url).expanduser())
        if not Path(url).exists():
            raise UsageError(f"{url}: there is no such folder")
        text = read_text(Path(url, DOCUMENT), url) if Path(url, DOCUMENT).is_file() else None
    if text is None:
        return {"data": Location(first_level(url))}
    packed = parse_document(text, url)
    check_version(packed, url)
    try:
        return {
            name: Location(f"{url}/{entry['path']}", tuple(entry.get("axes", ())))
            for name, entry in packed["arrays"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{url}: what describes it is malformed: {error!r}") from error


def first_level(place: str) -> str:
    """The largest array of an OME-Zarr image in a folder of this machine; else the place itself."""
    for marker in (".zattrs", "zarr.json"):
        try:
            found = json.loads(Path(place, marker).read_text())
            attributes = found if marker == ".zattrs" else found["attributes"]
            image = attributes.get("ome", attributes)["multiscales"][0]
            return f"{place}/{image['datasets'][0]['path']}"
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            continue  # it is an array, or says itself what it is
    return place


def read_text(path: Path, where: str) -> str:
    """The text of a file of ``where``, or a `UsageError` that says why there is none."""
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: {path.name} cannot be read: {error}") from error


def parse_document(text: str, where: str, name: str = DOCUMENT) -> dict[str, Any]:
    """What the document of a packed data set says; `UsageError` where it is none."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: {name} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{where}: {name} is not that of a packed data set")
    return document


def check_version(document: Mapping[str, Any], where: str) -> None:
    """Refuse a packed data set of a version that is not known here."""
    if document.get("version") != VERSION:
        raise UsageError(
            f"{where}: version {document.get('version')} of the format; this Penstock reads "
            f"{VERSION}"
        )


def chunk_names(meta: Mapping[str, Any]) -> tuple[str, str]:
    """What the name of a chunk has before its numbers and between them, by its Zarr metadata.

    >>> chunk_names({"zarr_format": 2})
    ('', '.')
    >>> chunk_names({"zarr_format": 3, "chunk_key_encoding": {"name": "default"}})
    ('c/', '/')
    """
    if meta["zarr_format"] == 2:
        return "", meta.get("dimension_separator", ".")
    encoding = meta["chunk_key_encoding"]
    default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if default else ".")
    return f"c{separator}" if default else "", separator


@dataclass(frozen=True)
class Selection:
    """What an item wants of each array; see the same names of `penstock.batches.Field`."""

    offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    channels: Mapping[str, Sequence[int]] = field(default_factory=dict)
    patch: Mapping[str, Any] = field(default_factory=dict)
    normalise: Mapping[str, Normaliser] = field(default_factory=dict)
    channel_axis: Mapping[str, int] = field(default_factory=dict)
    """Where it is not the axis that the data set calls ``channels``, or else the last."""

    def check(self, names: Sequence[str]) -> None:
        for what in ("offsets", "channels", "patch", "normalise", "channel_axis"):
            if unknown := sorted(set(getattr(self, what)) - set(names)):
                raise UsageError(
                    f"{what} names {', '.join(unknown)}; the arrays are {', '.join(names)}"
                )

    def is_volume(self, name: str, ndim: int) -> bool:
        """Whether the patches cut all of an array's axes, 0 too: then it is one sample."""
        grid = self.patch.get(name)
        if grid is None:
            return False
        axes = grid.axes or range(ndim - len(grid.shape), ndim)
        return all(-ndim <= axis < ndim for axis in axes) and (0 in axes or -ndim in axes)

    def field(
        self,
        name: str,
        place: Location,
        shape: Any,
        chunks: Any,
        dtype: Any,
        *,
        volume: bool = False,
    ) -> Field:
        """What an item wants of an array; ``volume`` puts an axis of one sample before its own."""
        default = place.axes.index("channels") if "channels" in place.axes else -1
        channel_axis, grid = self.channel_axis.get(name, default), self.patch.get(name)
        if volume and grid is not None:  # axes that are counted from behind stay the same
            behind = len(shape)
            shape, chunks = (1, *shape), (1, *chunks)
            channel_axis -= behind if channel_axis >= 0 else 0
            grid = replace(grid, axes=tuple(a - behind if a >= 0 else a for a in grid.axes))
        selected = Field(
            name,
            shape=tuple(shape),
            chunks=tuple(chunks),
            dtype=np.dtype(dtype).newbyteorder("="),
            offsets=tuple(self.offsets.get(name, (0,))),
            channels=tuple(self.channels[name]) if name in self.channels else None,
            channel_axis=channel_axis,
            patch=grid,
        )
        if name in self.normalise:
            self.normalise[name].check(selected, place.url)
        return selected


class Normaliser:
    """``(x - mean) / std`` in place, with one mean and one std for each channel of an array, or
    one for all.

    Bit-identical to numpy's expression in the dtype of the array.
    """

    _PIECE = 1 << 18  # bytes: what stays in a core's own cache between the two steps

    def __init__(self, mean: ArrayLike, std: ArrayLike) -> None:
        try:
            self.mean, self.std = (
                np.atleast_1d(mean).astype(float),
                np.atleast_1d(std).astype(float),
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"normalise: mean and std are not lists of numbers: {error}") from None
        if self.mean.ndim > 1 or self.mean.shape != self.std.shape:
            raise UsageError(
                f"normalise: mean {self.mean.shape} and std {self.std.shape} are not two lists of "
                "one number for each channel"
            )
        bad = np.flatnonzero(~(np.isfinite(self.mean) & np.isfinite(self.std) & (self.std >= 0)))
        if bad.size:
            at = int(bad[0])
            raise UsageError(
                f"normalise: channel {at} has mean {self.mean[at]} and std {self.std[at]}; both "
                "must be finite, and no std below 0"
            )
        self.std[self.std == 0] = 1  # a channel that never changes becomes 0, as in scikit-learn

    def check(self, field: Field, where: str) -> None:
        if field.dtype.kind != "f":
            raise UsageError(f"{where}: normalise needs floats, its dtype is {field.dtype}")
        number = field.shape[field.channel_axis]
        if len(self.mean) not in (1, number):
            raise UsageError(
                f"{where}: normalise has {len(self.mean)} channels, the array has {number}"
            )

    def rows(self, channels: Any, axis: int, shape: Sequence[int], dtype: Any) -> Rows:
        """What `apply` needs for arrays of a shape whose channels along ``axis`` are these."""
        axis %= len(shape)
        both = []
        for values, neutral in ((self.mean, 0), (self.std, 1)):
            padded = np.full(shape[axis], neutral, dtype)  # the last chunk is wider than its data
            chosen = values if len(values) == 1 else values[channels]
            padded[: shape[axis] if len(values) == 1 else len(chosen)] = chosen
            row = padded.reshape([-1 if a == axis else 1 for a in range(len(shape))])
            if axis == len(shape) - 1 and axis > 0:  # one long row, not many of a few channels
                row = np.broadcast_to(row, [1] * (axis - 1) + list(shape[-2:]))
                row = row.reshape((*row.shape[:-2], -1))
            both.append(np.ascontiguousarray(row))
        return Rows(both[0], both[1])

    @classmethod
    def apply(cls, array: NDArray[Any], rows: Rows) -> None:
        """Normalise an array of the shape that the rows were made for; a C-contiguous one is
        quicker."""
        if array.ndim > rows.mean.ndim and array.flags.c_contiguous:
            array = array.reshape((*array.shape[:-2], -1))
        elif array.ndim > rows.mean.ndim:  # a view, whose two last axes cannot be one
            last = array.shape[-2:]
            rows = Rows(*(row.reshape((*row.shape[:-1], *last)) for row in rows))
        for piece, mean, std in cls._pieces(array, rows.mean, rows.std):
            np.subtract(piece, mean, out=piece)
            np.divide(piece, std, out=piece)

    @classmethod
    def _pieces(cls, *arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
        """The same small parts of arrays that broadcast against the first."""
        first = arrays[0]
        if first.nbytes <= cls._PIECE or first.ndim < 2:
            yield arrays
            return
        if len(first) == 1:
            yield from cls._pieces(*(a[0] for a in arrays))
            return
        step = max(1, cls._PIECE * len(first) // first.nbytes)
        for start in range(0, len(first), step):
            part = slice(start, start + step)
            yield from cls._pieces(*(a[part] if len(a) > 1 else a for a in arrays))


class Rows(NamedTuple):
    """Mean and std, laid out so that they broadcast in long runs."""

    mean: NDArray[Any]
    std: NDArray[Any]


def read_statistics(path: Path) -> dict[str, Normaliser]:
    """Saved statistics: JSON ``{name: {"mean": [...], "std": [...]}}``, or an npz with arrays
    ``name.mean`` and ``name.std``."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                names = sorted({key.rpartition(".")[0] for key in file})
                return {n: Normaliser(file[f"{n}.mean"], file[f"{n}.std"]) for n in names}
        saved = json.loads(path.read_text())
        return {
            name: Normaliser(entry["mean"], entry["std"])
            for name, entry in saved.items()
            if isinstance(entry, dict) and {"mean", "std"} <= set(entry)
        }
    except (OSError, EOFError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"normalise {path}: {error}") from error


# --- engines ------------------------------------------------------------------------------------


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
        ...

    def fetch(self) -> Any:
        """Bring in what is stored; what it returns goes to `run`."""
        ...

    def run(self, out: Arrays, check: Check, fetched: Any = None) -> Traffic:
        """Put this piece where it belongs in the batch. Fetches by itself what was not."""
        ...


class Reading(Protocol):
    """A task that was begun."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def end_within(self, seconds: float) -> None:
        """Wait so long at most, and raise nothing."""
        ...

    def wait(self, check: Check) -> Traffic:
        """Until all of it is in the batch. Raises what went wrong, each time it is called."""
        ...


class Begins(Task, Protocol):
    """A task of an engine that reads in threads of its own."""

    def begin(self, out: Arrays) -> Reading:
        """Start reading into the batch."""
        ...


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


def open_engine(
    name: str,
    places: Mapping[str, Location],
    selection: Selection,
    *,
    workers: int,
    fetch: int,
    cache_bytes: int,
    missing: str,
) -> Engine:
    """The engine of a name; `_fitting` for ``auto``."""
    if not places:
        raise UsageError("there are no arrays to read")
    selection.check(list(places))
    options: dict[str, Any] = {
        "workers": workers, "fetch": fetch, "cache_bytes": cache_bytes, "missing": missing
    }  # fmt: skip
    if name == "auto":
        return _fitting(places, selection, options)
    if name == "native":
        from .native import NativeEngine

        return NativeEngine(places, selection, **options)
    if name == "tensorstore":
        from .tensorstore import TensorStoreEngine

        return TensorStoreEngine(places, selection, **options)
    raise UsageError(f"engine {name!r} is not one of auto, native, tensorstore")


def _fitting(
    places: Mapping[str, Location], selection: Selection, options: Mapping[str, Any]
) -> Engine:
    """TensorStore, but where only the native engine does what is wanted.

    Between two chunks the native engine takes Python's lock, and its threads wait for one another:
    with chunks of 72 KiB for more than half of the time. TensorStore decodes a whole batch without
    that lock. ``benchmarks/loader.py --grid`` compares the two on many layouts.
    """
    from .native import NativeEngine, Unsupported
    from .tensorstore import TensorStoreEngine

    engine: Engine
    try:
        engine = NativeEngine(places, selection, **options)
    except Unsupported as error:
        engine = TensorStoreEngine(places, selection, **options)
        engine.reason = str(error).partition(";")[0]
        return engine
    if options["cache_bytes"]:
        engine.reason = "its cache knows which chunks will be used next"
        return engine
    if options["fetch"]:
        engine.reason = "it has threads that only read ahead"
        return engine
    if engine.copies_large_chunks_together:
        engine.reason = "it copies large chunks together that lie side by side in a batch"
        return engine
    try:
        engine = TensorStoreEngine(places, selection, **options)
        engine.reason = "it decodes a whole batch without Python's lock"
    except UsageError as error:
        engine.reason = f"TensorStore does not read this: {error}"
    return engine
