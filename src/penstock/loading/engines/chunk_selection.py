"""The arrays that an engine reads, and the part of each that an item takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, well_formed
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
    with well_formed(f"{url}: its metadata is malformed"):
        return {
            name: Location(f"{url}/{entry['path']}", tuple(entry.get("axes", ())))
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
