"""One batch: its arrays, stacks of several arrays, and their places in a buffer.

`selection_of` and `stacks_of` make of a `Loader`'s arguments what it reads and stacks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import StageError, UsageError, check_equal
from .engines.engine import Location, Selection
from .fields import Field, Index, PatchGrid
from .permutation import Items
from .ring import aligned


class Batch(dict[str, NDArray[Any]]):
    """One batch: the name of each array to its rows, (row, [time,] ...).

    The loader reuses the memory when the last view of it is gone. Hold a batch only as long as it
    is needed, and copy what must be kept for longer.

    Args:
        arrays: The arrays by name.
        epoch: The epoch, from 0.
        number: The place in the epoch, from 0.
        indices: The order's item of each row: sample * patches_per_sample + patch.
        samples: The sample of each row, along axis 0 of the arrays.
        mask: True for each row that counts. The others repeat samples of the epoch, so that all
            ranks have equally many rows: leave them out of a score. All True by default.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        epoch: int,
        number: int,
        indices: Items,
        samples: Items,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        super().__init__(arrays)
        self.epoch, self.number, self.indices, self.samples = epoch, number, indices, samples
        self.mask = np.ones(len(indices), bool) if mask is None else mask


Transform = Callable[[Batch], Mapping[str, NDArray[Any]] | None]


def transformed(batch: Batch, transform: Transform) -> Batch:
    """The batch after a transform: the same one, or one of the arrays that the transform returned.

    `StageError` names the batch where the transform fails.
    """
    try:
        result = transform(batch)
        if result is None or result is batch:
            return batch
        return Batch(result, batch.epoch, batch.number, batch.indices, batch.samples, batch.mask)
    except Exception as error:
        samples = ", ".join(map(str, batch.samples[:4].tolist()))
        more = ", ..." if len(batch.samples) > 4 else ""
        where = f"batch {batch.number} of epoch {batch.epoch} (samples {samples}{more})"
        raise StageError("transform", where, error) from error


@dataclass(frozen=True, slots=True)
class ChannelStack:
    """Arrays that become one array of a batch, with their channels one behind the other.

    An array with several offsets gives its channels once for each. An array without channels is one
    channel.

        u (sample, lat, lon, level)   ──▶  (row, lat, lon, [u at t-1 | u at t | ps at t])
        ps (sample, lat, lon)
    """

    name: str
    fields: tuple[Field, ...]
    flat: frozenset[str] = frozenset()
    """The names of the arrays without channels."""

    def __post_init__(self) -> None:
        if not self.fields:
            raise UsageError(f"stack {self.name}: names no array")
        for what, values in (
            ("dtypes", {f.name: str(f.dtype) for f in self.fields}),
            ("channel axes", {f.name: f.channel_axis for f in self._deep}),
            ("shapes but for channels", {f.name: self._shape(f) for f in self.fields}),
        ):
            check_equal(f"stack {self.name}: the {what} of its arrays", values)
        if self.axis == 0:
            raise UsageError(f"stack {self.name}: its samples, axis 0, cannot be its channels too")

    @property
    def _deep(self) -> list[Field]:
        return [field for field in self.fields if field.name not in self.flat]

    @property
    def axis(self) -> int:
        """The axis of the channels in a batch: that of the arrays, or else the last."""
        return self._deep[0].channel_axis if self._deep else len(self.fields[0].shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that all arrays have."""
        return self.fields[0].dtype

    @property
    def channels(self) -> list[tuple[str, int, int]]:
        """The array, the offset, and the array's channel (0 without channels) of each channel."""
        return [
            (field.name, offset, channel)
            for field in self.fields
            for offset in field.offsets
            for channel in field.channels or range(self._depth(field))
        ]

    def _depth(self, field: Field) -> int:
        """The channels of an array at one offset."""
        if field.name in self.flat:
            return 1
        return field.item_shape[field.channel_axis - len(field.shape)]

    def _shape(self, field: Field) -> tuple[int, ...]:
        """The shape of an item without time and channels."""
        times = len(field.item_shape) - len(field.shape) + 1
        shape = list(field.item_shape[times:])
        if field.name not in self.flat:
            del shape[field.channel_axis - 1]
        return tuple(shape)

    def out_shape(self, batch_size: int) -> tuple[int, ...]:
        """The shape of a batch: (rows, ...) with all channels."""
        shape = [batch_size, *self._shape(self.fields[0])]
        shape.insert(self.axis, len(self.channels))
        return tuple(shape)

    @property
    def item_nbytes(self) -> int:
        """Bytes of one row of a batch."""
        return math.prod(self.out_shape(1)) * self.dtype.itemsize

    def parts(self, batch: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """A view of a batch for each array, in the shape that the array has without a stack."""
        views: dict[str, NDArray[Any]] = {}
        start = 0
        before: Index = (slice(None),) * self.axis
        for field in self.fields:
            times, depth = len(field.offsets), self._depth(field)
            part = batch[(*before, slice(start, start + times * depth))]
            start += times * depth
            shape = (*part.shape[: self.axis], times, depth, *part.shape[self.axis + 1 :])
            view = part.reshape(shape)
            if field.name in self.flat:
                view = view[(*before, slice(None), 0)]
            views[field.name] = np.moveaxis(view, self.axis, 1) if times > 1 else view[(*before, 0)]
        return views


@dataclass(frozen=True)
class BatchLayout:
    """The arrays of a batch, and where they lie in its buffer."""

    fields: Mapping[str, Field]
    stacks: Mapping[str, ChannelStack]
    """The arrays of a batch that hold several of ``fields``."""

    @cached_property
    def arrays(self) -> dict[str, Field | ChannelStack]:
        """The arrays of a batch by name: stacks, and the fields that are in none."""
        stacked = {field.name for stack in self.stacks.values() for field in stack.fields}
        alone = {name: field for name, field in self.fields.items() if name not in stacked}
        return {**self.stacks, **alone}

    def nbytes(self, rows: int) -> int:
        """Bytes of a batch of so many rows, with the padding that aligns its arrays."""
        return sum(aligned(array.item_nbytes * rows) for array in self.arrays.values())

    def cut(self, root: NDArray[np.uint8], rows: int) -> dict[str, NDArray[Any]]:
        """The arrays of a batch of so many rows, as views of one buffer."""
        arrays, start = {}, 0
        for name, array in self.arrays.items():
            stop = start + array.item_nbytes * rows
            arrays[name] = root[start:stop].view(array.dtype).reshape(array.out_shape(rows))
            start = aligned(stop)
        return arrays

    def destinations(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The array that each field fills: one of the batch, or a part of a stack."""
        out = dict(arrays)
        for name, stack in self.stacks.items():
            out |= stack.parts(out.pop(name))
        return out


def selection_of(
    names: Sequence[str], *, offsets: Any, channels: Any, patch: Any, channel_axis: Any
) -> Selection:
    """The part of each array that an item takes, from the arguments of `penstock.Loader`."""
    return Selection(
        offsets=_for_each(names, "offsets", offsets, _numbers),
        channels=_for_each(names, "channels", channels, _numbers),
        patch=_for_each(names, "patch", patch, _grid),
        channel_axis=_for_each(names, "channel_axis", channel_axis, operator.index),
    )


def _for_each(
    names: Sequence[str], what: str, value: Any, parse: Callable[[Any], Any]
) -> dict[str, Any]:
    """A value for each array: those of a mapping, one value for all arrays, or none."""
    if value is None:
        return {}
    try:
        if isinstance(value, Mapping):
            return {name: parse(one) for name, one in value.items()}
        return dict.fromkeys(names, parse(value))
    except TypeError:
        number = "a whole number" if parse is operator.index else "a list of whole numbers"
        raise UsageError(f"{what} {value!r} is not {number}, nor one for each array") from None


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, values))


def _grid(patch: Any) -> PatchGrid:
    """The patches of an array, from a `PatchGrid` or the shape of a patch."""
    return patch if isinstance(patch, PatchGrid) else PatchGrid(_numbers(patch))


def stacks_of(
    value: Any,
    fields: Mapping[str, Field],
    places: Mapping[str, Location],
    selection: Selection,
) -> dict[str, ChannelStack]:
    """The stacks by name, from names of their arrays.

    An array has channels where its channel axis or its channels are given, or where the data set
    names such an axis.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(isinstance(names, str) for names in value.values()):
        raise UsageError(f"stack {value!r} is not a mapping of a name to a list of arrays")
    parts = [name for names in value.values() for name in names]
    unknown = sorted({str(name) for name in parts if name not in fields})
    if unknown:
        raise UsageError(f"stack names {', '.join(unknown)}; the arrays are {', '.join(fields)}")
    if len(set(parts)) < len(parts):
        raise UsageError(
            f"stack {value!r} has an array twice; DATA may be a mapping that gives it two names"
        )
    if taken := sorted(set(value) & (set(fields) - set(parts))):
        raise UsageError(f"stack {', '.join(taken)}: an array that is not stacked has that name")
    deep = {*selection.channel_axis, *selection.channels}
    deep |= {name for name, place in places.items() if "channels" in place.axes}
    return {
        str(name): ChannelStack(
            str(name), tuple(fields[part] for part in names), frozenset(names) - deep
        )
        for name, names in value.items()
    }
