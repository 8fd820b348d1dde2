"""The chunks that a batch reads, and where they go in the batch, as plain data.

    array   (sample, lat, lon, channels)            batch  (row, [time,] lat, lon, channels)
            ┌────┬────┬──┐                                  ┌───────────┐
            │ 0  │ 1  │ 2│  chunks of one sample            │           │ row 0
            └────┴────┴──┘                                  ├───────────┤
                        ╎ padding of the last chunk         │           │ row 1
                                                            └───────────┘

Every sample reads the same chunks, except for their number along axis 0. This template is made
once, and a batch is the template times its samples. Each chunk appears once, however many rows need
it. Nothing here opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import UsageError, plural

Index = tuple[Any, ...]
"""An index of numpy: slices, and a whole number for the time axis of a batch."""


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Equal boxes of a sample, one every ``stride``, the last flush with the end of its axis.

    >>> grid = PatchGrid((4,))
    >>> [grid.start((i,), (10,)) for i in range(*grid.counts((10,)))]
    [(0,), (4,), (6,)]
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    """Voxels from patch to patch. By default the patch's own shape."""
    axes: tuple[int, ...] = ()
    """Axes of the array that are cut. By default the last ones."""

    def __post_init__(self) -> None:
        for name in ("stride", "axes"):
            given = getattr(self, name)
            if given and len(given) != len(self.shape):
                raise UsageError(
                    f"the patch {self.shape} has {plural(len(self.shape), 'axis')}, its {name} "
                    f"{given} has {len(given)}"
                )
        if min(self.shape + self.stride, default=0) < 1:
            raise UsageError(f"patch {self.shape} and stride {self.stride} must be at least 1")

    def counts(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The number of patches along each cut axis of the given lengths."""
        return tuple(
            -(-(length - size) // step) + 1
            for length, size, step in zip(lengths, self.shape, self.steps, strict=True)
        )

    def start(self, place: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
        """The first voxel of a patch along each cut axis.

        Args:
            place: The patch's place in the grid, from 0 along each cut axis.
            lengths: The lengths of the cut axes, in voxels.
        """
        return tuple(
            min(i * step, length - size)
            for i, length, size, step in zip(place, lengths, self.shape, self.steps, strict=True)
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """Voxels from patch to patch."""
        return self.stride or self.shape


@dataclass(slots=True)
class ChunkRead:
    """One chunk and its copies into a batch: ``batch[to] = chunk[of]`` for each."""

    index: tuple[int, ...]
    copies: list[tuple[Index, Index]]
    """Pairs (to, of): an index of the batch, and one of the chunk."""


@dataclass(frozen=True, slots=True)
class Field:
    """One stored array, and the part of it that an item takes. Axis 0 counts the samples."""

    name: str
    shape: tuple[int, ...]
    """The shape of the array: (samples, ...)."""
    chunks: tuple[int, ...]
    """The shape of a chunk."""
    dtype: np.dtype[Any]
    offsets: tuple[int, ...] = (0,)
    """The samples of an item, relative to its own: (-1, 0) is the one before and itself. Two or
    more become an axis of the batch, behind the rows."""
    channels: tuple[int, ...] | None = None
    """The channels of an item, in this order. None for all."""
    channel_axis: int = -1
    """The axis of the channels. The field counts it from the front, whatever was given."""
    patch: PatchGrid | None = None
    """The boxes that a sample is cut into. None for whole samples."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if len(self.shape) != len(self.chunks):
            raise UsageError(f"{self.name}: shape {self.shape} and chunks {self.chunks} differ")
        if min(self.shape, default=0) < 1:
            raise UsageError(
                f"{self.name}: an array of shape {self.shape} holds no samples: that takes an axis "
                "0 that counts them, and no axis of length 0"
            )
        if min(self.chunks) < 1 or not self.offsets:
            raise UsageError(f"{self.name}: chunks {self.chunks} or offsets {self.offsets} empty")
        if not self.valid:
            raise UsageError(
                f"{self.name}: no sample of its {self.shape[0]} has all offsets {self.offsets}"
            )
        ndim = len(self.shape)
        if not -ndim <= self.channel_axis < ndim:
            raise UsageError(
                f"{self.name}: channel_axis {self.channel_axis} is not an axis of {self.shape}"
            )
        object.__setattr__(self, "channel_axis", self.channel_axis % ndim)
        self._check_channels()
        self._check_patch()

    def _check_channels(self) -> None:
        if self.channels is None:
            return
        if self.channel_axis == 0:
            raise UsageError(f"{self.name}: its samples, axis 0, cannot be its channels too")
        number = self.shape[self.channel_axis]
        wrong = [c for c in self.channels if not 0 <= c < number]
        if wrong or not self.channels:
            raise UsageError(
                f"{self.name}: channels {wrong} are not among its {number} (0 to {number - 1})"
            )

    def _check_patch(self) -> None:
        for axis, size in self.patch_sizes.items():
            twice = self.patch_axes.count(axis) > 1
            if twice or not 0 < axis < len(self.shape) or size > self.shape[axis]:
                raise UsageError(
                    f"{self.name}: patch {self.patch and self.patch.shape} does not fit "
                    f"{self.shape}, of which axis 0 counts the samples"
                )
            if self.channels is not None and axis == self.channel_axis:
                raise UsageError(f"{self.name}: axis {axis} is cut by patch and by channels")

    @property
    def patch_axes(self) -> tuple[int, ...]:
        """The axes that are cut into patches, counted from the front."""
        if self.patch is None:
            return ()
        ndim = len(self.shape)
        if self.patch.axes:
            return tuple(axis + ndim if axis < 0 else axis for axis in self.patch.axes)
        return tuple(range(ndim - len(self.patch.shape), ndim))

    @property
    def patch_sizes(self) -> dict[int, int]:
        """The voxels of a patch along each axis that is cut."""
        return dict(zip(self.patch_axes, self.patch.shape if self.patch else (), strict=True))

    @property
    def patch_counts(self) -> tuple[int, ...]:
        """The patches along each cut axis. Numbers of patches count the last axis fastest."""
        if self.patch is None:
            return ()
        return self.patch.counts([self.shape[axis] for axis in self.patch_axes])

    @property
    def patches_per_sample(self) -> int:
        """The number of patches that a sample is cut into; 1 for whole samples."""
        return math.prod(self.patch_counts)

    def patch_start(self, patch: int) -> dict[int, int]:
        """The first voxel of a patch along each axis that is cut."""
        if self.patch is None:
            return {}
        (box,) = self.patch_boxes(np.array([patch]))
        return {axis: box[axis - 1].start for axis in self.patch_axes}

    def patch_boxes(self, patches: NDArray[Any]) -> list[tuple[slice, ...]]:
        """Each patch as slices, one for each axis but the first, which counts the samples."""
        along = [[slice(None)] * len(patches)] * (len(self.shape) - 1)
        places = np.unravel_index(patches, self.patch_counts)
        for axis, slices, place in zip(self.patch_axes, patch_slices(self), places, strict=True):
            along[axis - 1] = [slices[i] for i in place.tolist()]
        return list(zip(*along, strict=True))

    @property
    def valid(self) -> range:
        """The samples for which every offset exists."""
        return range(
            max(0, -min(self.offsets)), min(self.shape[0], self.shape[0] - max(self.offsets))
        )

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The shape of one row of a batch: ([time,] ...)."""
        shape = list(self.shape)
        for axis, size in self.patch_sizes.items():
            shape[axis] = size
        if self.channels is not None:
            shape[self.channel_axis] = len(self.channels)
        time = (len(self.offsets),) if len(self.offsets) > 1 else ()
        return (*time, *shape[1:])

    def out_shape(self, batch_size: int) -> tuple[int, ...]:
        """The shape of a batch: (rows, [time,] ...)."""
        return (batch_size, *self.item_shape)

    @property
    def item_nbytes(self) -> int:
        """Bytes of one row of a batch."""
        return math.prod(self.item_shape) * self.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a decoded chunk. The last chunks of an axis are padded to the same size."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def most_chunks(self, rows: int) -> int:
        """The most chunks that a batch of so many rows reads."""
        of_array = [
            -(-length // chunk) for length, chunk in zip(self.shape, self.chunks, strict=True)
        ]
        of_item = [1, *of_array[1:]]
        for axis in self.patch_axes:
            # A box of one voxel is in one chunk. Each chunk's length more may reach one more.
            size = self.item_shape[axis - len(self.shape)]
            of_item[axis] = min(of_item[axis], (size - 2) // self.chunks[axis] + 2)
        if self.channels is not None:
            axis = self.channel_axis
            of_item[axis] = len({channel // self.chunks[axis] for channel in self.channels})
        return min(rows * len(self.offsets) * math.prod(of_item), math.prod(of_array))

    @property
    def run_nbytes(self) -> int:
        """Bytes that are adjacent both in a chunk and in a batch, so that one step copies them.

        With short runs the copy is the limit, and not the disk: 13 float32 channels last are 52
        bytes.
        """
        _, copies = patch_template(self, 0)[0]
        run = self.dtype.itemsize
        to, of = copies[0]
        for axis in reversed(range(1, len(self.shape))):
            place = axis - len(self.shape)
            if of[place].step not in (None, 1):
                break
            length = of[place].stop - of[place].start
            run *= length
            if length != self.chunks[axis] or to[place] != slice(0, self.item_shape[place]):
                break
        return run


@lru_cache(maxsize=64)
def patch_slices(field: Field) -> list[list[slice]]:
    """The patches along each axis that is cut, as slices of that axis."""
    assert field.patch is not None
    grid = field.patch
    along = []
    for axis, count, size, step in zip(
        field.patch_axes, field.patch_counts, grid.shape, grid.steps, strict=True
    ):
        last = field.shape[axis] - size  # flush with the end, see `PatchGrid.start`
        along.append([slice(at, at + size) for at in (min(i * step, last) for i in range(count))])
    return along


_Piece = tuple[tuple[int, ...], list[tuple[Index, Index]]]
"""A chunk of a sample and its copies, without their places along the sample axis."""


@lru_cache(maxsize=4096)
def patch_template(field: Field, patch: int) -> list[_Piece]:
    """The chunks that one patch of a sample reads, along all axes but that of the samples."""
    begins = field.patch_start(patch)
    along = []
    for axis in range(1, len(field.shape)):
        if axis == field.channel_axis and field.channels is not None:
            runs = _runs(field.channels, field.chunks[axis])
        else:
            begin = begins.get(axis, 0)
            size = field.item_shape[axis - len(field.shape)]
            runs = _cuts(begin, begin + size, field.chunks[axis])
        along.append(runs)
    pieces: dict[tuple[int, ...], list[tuple[Index, Index]]] = {}
    for parts in product(*along):
        index = tuple(part[0] for part in parts)
        copy = tuple(part[1] for part in parts), tuple(part[2] for part in parts)
        pieces.setdefault(index, []).append(copy)
    return sorted(pieces.items(), key=itemgetter(0))


_Stretch = tuple[int, slice, slice]
"""A chunk along one axis, the place in the batch, the part of the chunk."""


def _cuts(start: int, stop: int, chunk: int) -> list[_Stretch]:
    """An interval of an axis, cut at the chunks' borders."""
    runs = []
    for number in range(start // chunk, (stop - 1) // chunk + 1):
        low, high = max(start, number * chunk), min(stop, (number + 1) * chunk)
        origin = number * chunk
        runs.append((number, slice(low - start, high - start), slice(low - origin, high - origin)))
    return runs


def _runs(channels: Sequence[int], chunk: int) -> list[_Stretch]:
    """Chosen places of an axis as a few strided slices, each within one chunk."""
    runs, first = [], 0
    while first < len(channels):
        last = first + 1
        step = max(1, channels[last] - channels[first]) if last < len(channels) else 1
        number, origin = channels[first] // chunk, channels[first] // chunk * chunk
        while (
            last < len(channels)
            and channels[last] - channels[last - 1] == step
            and channels[last] // chunk == number
        ):
            last += 1
        low, high = channels[first] - origin, channels[last - 1] - origin
        runs.append((number, slice(first, last), slice(low, high + 1, step)))
        first = last
    return runs


def chunk_reads(
    field: Field, samples: NDArray[np.integer[Any]], patches: NDArray[np.integer[Any]] | None = None
) -> list[ChunkRead]:
    """The chunks that a batch reads, each once and sorted, with their copies into the batch.

    Neighbouring rows from neighbouring places of one chunk are one copy.

    Args:
        field: The array and the part of it that an item takes.
        samples: The sample of each row, along axis 0 of the array: (rows,).
        patches: The patch of each row: (rows,). None where samples are not cut.

    Returns:
        The reads, in the order of the chunks' indices.
    """
    depth = field.chunks[0]
    numbers = samples.tolist()
    places = [0] * len(numbers) if patches is None else patches.tolist()
    rows: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # (chunk, patch, time)
    for time, offset in enumerate(field.offsets):
        for row, (sample, patch) in enumerate(zip(numbers, places, strict=True)):
            chunk, inside = divmod(sample + offset, depth)
            rows.setdefault((chunk, patch, time), []).append((row, inside))
    with_time = len(field.offsets) > 1
    reads: dict[tuple[int, ...], list[tuple[Index, Index]]] = {}
    for chunk, patch, time in sorted(rows):
        for first, inside, count in _stretches(rows[chunk, patch, time]):
            to = slice(first, first + count)
            head: Index = (to, time) if with_time else (to,)
            of: Index = (slice(inside, inside + count),)
            for tail, copies in patch_template(field, patch):
                here = reads.setdefault((chunk, *tail), [])
                here += [(head + copy_to, of + copy_of) for copy_to, copy_of in copies]
    order = reads if patches is None else sorted(reads)
    return [ChunkRead(index, reads[index]) for index in order]


def _stretches(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs (row, place) as stretches (row, place, length) in which both rise by 1."""
    stretches: list[tuple[int, int, int]] = []
    for row, inside in pairs:
        if stretches:
            first, start, count = stretches[-1]
            if row == first + count and inside == start + count:
                stretches[-1] = (first, start, count + 1)
                continue
        stretches.append((row, inside, 1))
    return stretches
