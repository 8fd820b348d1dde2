"""The arrays, samples and statistics that an engine reads."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base import UsageError
from ...data import DOCUMENT, first_level_of, parse_document, read_document
from ..fields import Field, PatchGrid

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
        from ...data import read_key

        text = read_key(url, DOCUMENT)
        packed = None if text is None else parse_document(text, url)
    else:
        url = str(Path(url).expanduser())
        if not Path(url).exists():
            raise UsageError(f"{url}: there is no such folder")
        file = Path(url, DOCUMENT)
        packed = read_document(file, url) if file.is_file() else None
    if packed is None:
        return {"data": Location(first_level_of(url))}
    try:
        return {
            name: Location(f"{url}/{entry['path']}", tuple(entry.get("axes", ())))
            for name, entry in packed["arrays"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{url}: its metadata is malformed: {error!r}") from error


@dataclass(frozen=True)
class Selection:
    """The part of each array that an item takes, by the array's name. See `Field` for each
    setting."""

    offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    channels: Mapping[str, Sequence[int]] = field(default_factory=dict)
    patch: Mapping[str, PatchGrid] = field(default_factory=dict)
    normalise: Mapping[str, Normaliser] = field(default_factory=dict)
    channel_axis: Mapping[str, int] = field(default_factory=dict)
    """The axis of the channels; by default the one called ``channels``, or else the last."""

    def check(self, names: Sequence[str]) -> None:
        """Refuse settings of arrays that do not exist."""
        for what in ("offsets", "channels", "patch", "normalise", "channel_axis"):
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
            UsageError: Offsets, channels, patch or statistics do not fit the array.
        """
        default = place.axes.index("channels") if "channels" in place.axes else -1
        channel_axis, grid = self.channel_axis.get(name, default), self.patch.get(name)
        ndim = len(shape)
        if grid is not None and _is_volume(grid, ndim):  # axes counted from behind stay the same
            shape, chunks = (1, *shape), (1, *chunks)
            channel_axis -= ndim if channel_axis >= 0 else 0
            grid = replace(grid, axes=tuple(a - ndim if a >= 0 else a for a in grid.axes))
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


def _is_volume(grid: PatchGrid, ndim: int) -> bool:
    """Whether patches cut axis 0 of an array of ``ndim`` axes too."""
    axes = grid.axes or range(ndim - len(grid.shape), ndim)
    return all(-ndim <= axis < ndim for axis in axes) and (0 in axes or -ndim in axes)


class Normaliser:
    """``(x - mean) / std`` in place: one mean and one std for each channel, or one of all channels.

    The result is that of numpy's expression in the dtype of the array, to the bit.
    """

    _PIECE = 1 << 18  # bytes that stay in a core's own cache between the two steps

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
        """Refuse a field that is not of floats, or has another number of channels."""
        if field.dtype.kind != "f":
            raise UsageError(f"{where}: normalise needs floats, its dtype is {field.dtype}")
        number = field.shape[field.channel_axis]
        if len(self.mean) not in (1, number):
            raise UsageError(
                f"{where}: normalise has {len(self.mean)} channels, the array has {number}"
            )

    def rows(self, channels: Any, axis: int, shape: Sequence[int], dtype: Any) -> Rows:
        """Mean and std for `apply`, for arrays of a shape with these channels along ``axis``."""
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
        """Normalise an array of the shape that the rows are for. A contiguous one is quicker."""
        if array.ndim > rows.mean.ndim and array.flags.c_contiguous:
            array = array.reshape((*array.shape[:-2], -1))
        elif array.ndim > rows.mean.ndim:  # a view, whose two last axes cannot be one
            last = array.shape[-2:]
            rows = Rows(*(row.reshape((*row.shape[:-1], *last)) for row in rows))
        step = max(1, cls._PIECE * len(array) // max(1, array.nbytes))
        for start in range(0, len(array), step):
            piece = array[start : start + step]
            # Rows of channels along axis 0 are cut as the array is; all others have length 1 there.
            mean, std = (row[start : start + step] if len(row) > 1 else row for row in rows)
            np.subtract(piece, mean, out=piece)
            np.divide(piece, std, out=piece)


class Rows(NamedTuple):
    """Mean and std in a shape that broadcasts in long runs."""

    mean: NDArray[Any]
    std: NDArray[Any]


def read_statistics(path: Path) -> dict[str, Normaliser]:
    """Read saved statistics.

    The file is JSON, ``{name: {"mean": [...], "std": [...]}}``, or an npz with arrays ``name.mean``
    and ``name.std``. `UsageError` for a damaged file.
    """
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
    except UsageError:
        raise
    except (OSError, EOFError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise UsageError(f"normalise {path}: {error}") from error
