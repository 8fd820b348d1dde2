"""The values of an array, counted, and the kind of target that they are.

    intensity      an image: any numbers
    mask           two values, 0 and another: a thing is there, or not
    labels         whole numbers, the class of each voxel from 0: one channel
    probabilities  floats from 0 to 1, where the input has others

Values that are not finite are counted, and say nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import TargetKind, UsageError, plural
from ...data import AXES, Box, Grid, Histogram, Scaling, Source

CHANNEL = AXES.index("c")
_DISTINCT = 64
"""Most distinct values that are listed."""
_FLAT = 0.5
"""Whole numbers are labels from this share of equal neighbours on: in an image they differ."""
_VOXELS = 2**22
"""About the most voxels that are read at once."""
_RANGES = 10.0
"""An image spans as much as the input, up to this factor, or it is of another quantity."""


class Values:
    """What is counted of an array's values, piece by piece."""

    def __init__(self) -> None:
        self.count = self.not_finite = 0
        self.low, self.high = np.inf, -np.inf
        self.whole = True
        """Whether all are whole numbers."""
        self.distinct: set[float] | None = set()
        """The values; None if they are many."""
        self._pairs = self._equal = 0

    def add(self, array: NDArray[Any]) -> None:
        """Count the values of a piece, of any shape; neighbours are those along the last axis."""
        finite = array
        self.count += array.size
        if array.dtype.kind == "f":
            finite = array[np.isfinite(array)]
            self.not_finite += array.size - finite.size
        if not finite.size:
            return
        self.low = min(self.low, float(finite.min()))
        self.high = max(self.high, float(finite.max()))
        self.whole = self.whole and (
            array.dtype.kind != "f" or bool(np.all(finite == np.round(finite)))
        )
        if self.distinct is not None:
            self.distinct |= set(np.unique(finite).astype(float).tolist())
            self.distinct = self.distinct if len(self.distinct) <= _DISTINCT else None
        if self.whole:
            left, right = array[..., :-1], array[..., 1:]
            ground = np.partition(finite.ravel(), finite.size // 2)[finite.size // 2]
            things = (left != ground) | (right != ground)  # the ground of an image is flat too
            self._pairs += int(things.sum())
            self._equal += int((things & (left == right)).sum())

    @property
    def flat(self) -> float:
        """The share of neighbours that are equal, of those that are not both the ground."""
        return self._equal / self._pairs if self._pairs else 0.0

    @property
    def within_one(self) -> bool:
        """Whether all lie from 0 to 1."""
        return 0 <= self.low <= self.high <= 1

    @property
    def two(self) -> bool:
        """Whether they are 0 and one other value, or one of both."""
        few = self.distinct is not None and len(self.distinct | {0.0}) <= 2
        return few and self.whole and (self.low == 0 or self.high == 1)

    def are_classes(self, channels: int, outputs: int) -> bool:
        """Whether a network of so many outputs has one for each class of a target of so many
        channels."""
        one_each = self.whole and self.low >= 0 and self.high < outputs
        return channels == 1 < outputs and one_each

    @property
    def text(self) -> str:
        """The values in words."""
        if self.distinct is not None and len(self.distinct) <= 8:
            return ", ".join(f"{value:g}" for value in sorted(self.distinct))
        whole = "whole numbers" if self.whole else "values"
        return f"{whole} from {self.low:g} to {self.high:g}"


def pieces(source: Source, part: Box) -> Iterator[NDArray[Any]]:
    """All voxels of a part of an array, each once, about a chunk at a time.

    Args:
        source: The array.
        part: The region, relative to the array's origin.

    Yields:
        The pieces, of five axes.
    """
    start, shape = list(part.start), list(part.shape)
    start[CHANNEL], shape[CHANNEL] = 0, source.domain.shape[CHANNEL]
    domain = Box.of(start, shape).shift(source.domain.start)
    step = [min(a, b) for a, b in zip(source.chunks, domain.shape, strict=True)]
    for axis in reversed(range(len(step))):  # more than a chunk where chunks are small
        room = _VOXELS // int(np.prod(step))
        step[axis] = min(domain.shape[axis], step[axis] * max(1, room))
    for box in Grid(domain, tuple(step), tuple(source.grid_origin)):
        yield source.read(box)


def count_values(source: Source, parts: Sequence[Box], flag: str) -> Values:
    """Count the values of some parts of an array.

    Args:
        source: The array.
        parts: The regions, relative to the array's origin.
        flag: The flag that errors name.

    Returns:
        The counts of all parts.

    Raises:
        UsageError: A part has no finite value.
    """
    values = Values()
    for part in parts:
        before = values.count - values.not_finite
        for piece in pieces(source, part):
            # A network sees float32, in which more is infinite.
            values.add(piece.astype(np.float32) if piece.dtype == np.float64 else piece)
        if values.count - values.not_finite == before:
            raise UsageError(
                f"{flag} {source.name}: no value is finite in the {plural(part.size, 'voxel')} "
                f"from {part.start} (t c z y x) to {part.stop}"
            )
    return values


def percentiles_of(source: Source, part: Box, lower: float, upper: float) -> Scaling:
    """The scaling by exact percentiles of the finite values of a part of an array."""
    dtype = np.dtype(np.float32) if source.dtype.itemsize > 2 else source.dtype
    histogram = Histogram(dtype, (lower, upper))
    while not histogram.done:
        for piece in pieces(source, part):
            histogram.add(piece)
        histogram.advance()
    return histogram.scaling()


def kind_of(
    values: Values, inputs: Values, channels: int, outputs: int, said: TargetKind | None
) -> TargetKind:
    """The kind of a target.

    Args:
        values: Its values.
        inputs: Those of the input.
        channels: Its channels.
        outputs: The channels that the network makes.
        said: The kind that the user says; None to find it.

    Returns:
        The kind.

    Raises:
        UsageError: The values are not of the kind that the user says.
    """
    if said is None:
        if values.are_classes(channels, outputs):
            return "labels"
        if values.two:
            return "mask"
        # Classes and objects count from 0 or 1; a flat image may begin anywhere.
        if values.whole and values.low <= 1 and values.flat >= _FLAT:
            return "labels"
        image = inputs.within_one or not values.within_one
        return "intensity" if values.whole or image else "probabilities"
    right = {
        "mask": (values.two, "0 and one other value"),
        "labels": (values.whole and values.low >= 0, "whole numbers from 0"),
        "probabilities": (values.within_one, "values from 0 to 1"),
        "intensity": (True, ""),
    }
    fits, wanted = right[said]
    if not fits:
        raise UsageError(f"--target-kind {said} takes {wanted}; --target-spec has {values.text}")
    return said


def is_of_the_same_quantity(target: Scaling, source: Scaling) -> bool:
    """Whether an image spans about as much as the input, as a denoised one does. Then the input can
    be compared with it, and its channels are those of the input."""
    apart = max(target.lower, source.lower) >= min(
        target.lower + target.scale, source.lower + source.scale
    )
    return not apart and 1 / _RANGES <= target.scale / source.scale <= _RANGES
