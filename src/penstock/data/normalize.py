"""Scaling of stored intensities to the range that a model was trained on, and back.

A `Scaling` is two numbers, ``x -> (x - lower) / scale``. They come from the data (percentiles of a
block, exact percentiles of a whole volume by a streaming `Histogram`, its `MeanAndDeviation`), or
from the user or the network, who know a range. A `Normalisation` says which. Applying them to an
array is the work of `lane`, on the device; this module only computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .moments import MeanAndDeviation

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_PIECE = 2**18
"""Values counted at a time: `numpy.bincount` copies its input to eight bytes a value."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """``x -> (x - lower) / scale``, and its inverse."""

    lower: float = 0.0
    scale: float = 1.0
    clip: tuple[float, float] | None = None
    """Range that normalised values are clipped to; None for no clipping."""
    zeros: float | None = None
    """The value that voxels of value 0 get; None if they are like others."""

    def applied(self, array: NDArray[Any]) -> NDArray[np.float64]:
        """The normalised values of an array; one that is not finite counts as the lower bound."""
        values = array.astype(np.float64)
        values[~np.isfinite(values)] = self.lower
        self.apply_to(values)
        return values

    def apply_to(self, values: NDArray[Any], outside: NDArray[np.bool_] | None = None) -> None:
        """Normalise floats in place. Those that are ``outside`` become `zeros`: by default those
        that are 0."""
        if outside is None and self.zeros is not None:
            outside = values == 0
        values -= self.lower
        values /= self.scale
        if self.clip is not None:
            values.clip(*self.clip, out=values)
        if outside is not None:
            values[outside] = self.zeros or 0

    @classmethod
    def of_range(
        cls, lower: float, upper: float, low: float, high: float, least: float | None = None
    ) -> Scaling:
        """Map ``[lower, upper]`` to ``[0, 1]``. A range narrower than ``least`` is widened to it.

        If the two are equal (a block that is nearly all background), or so near that the scaled
        extremes of the data would overflow a float32, the extremes give the scale; if they are
        equal too, it is 1. A division by almost zero would turn the few voxels that matter into
        infinities. A ``least`` comes before all this.

        Args:
            lower: the value that becomes 0.
            upper: the value that becomes 1.
            low: the least value of the data.
            high: the greatest value of the data.
            least: the narrowest range between ``lower`` and ``upper``.

        Returns:
            The scaling.
        """
        if least is not None and upper - lower < least:
            return cls(float(lower), float(least))
        for scale in (upper - lower, high - low):
            if np.isfinite(scale) and scale * _FLOAT32_MAX > high - low:
                return cls(float(lower), float(scale))
        return cls(float(lower) if np.isfinite(lower) else 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """How a channel, or all channels of a volume together, are normalised."""

    counts: Literal["percentiles", "moments"] | None = None
    """Two percentiles, or mean and standard deviation, if they are counted of the data. None if
    the numbers are given."""
    lower: float = 0.0
    """The intensity that becomes 0, or its percentile."""
    upper: float = 1.0
    """The intensity that becomes 1, or its percentile."""
    least: float | None = None
    """The least number that values are divided by."""
    added: float = 0.0
    """A number that is added to the range or deviation that was counted."""
    then: tuple[float, float] = (0.0, 1.0)
    """The values, as counted numbers have made them, that become 0 and 1 in the end."""
    clip: tuple[float, float] | None = None
    """Range that normalised values are clipped to; None for no clipping."""
    ends: bool = False
    """True if the least and the largest value become 0 and 1, not the mean and what is a deviation
    above it."""
    nonzero: bool = False
    """True if only voxels other than 0 count and are normalised."""
    masked: bool = False
    """True if these are the voxels that are not 0 in some channel, and those that they enclose. An
    array by itself tells no more than where its own values are 0."""

    @property
    def given(self) -> Scaling | None:
        """The scaling; None if it is counted."""
        if self.counts is not None:
            return None
        low, high = self.lower, self.upper
        fit = Scaling.of_range(low, high, low, high, self.least)
        scaling = Scaling(low, high - low) if high < low else fit
        return self.of_numbers(scaling.lower, scaling.scale)

    def counter(self, dtype: np.dtype[Any]) -> Histogram | MeanAndDeviation:
        """What counts the data; it is done at once if the numbers are given."""
        if self.counts == "percentiles":
            return Histogram(dtype, (self.lower, self.upper))
        return MeanAndDeviation(done=self.counts is None)

    def add(
        self,
        counter: Histogram | MeanAndDeviation,
        array: NDArray[Any],
        valid: NDArray[np.bool_] | None = None,
    ) -> None:
        """Count the values of a piece, of any shape. ``valid`` is true for those inside the mask,
        for values that are `masked`; it has the last axes of that shape."""
        if self.nonzero:
            counts = array != 0 if valid is None or not self.masked else valid
            array = array[np.broadcast_to(counts, array.shape)]
        counter.add(array)

    def scaling(self, counter: Histogram | MeanAndDeviation) -> Scaling:
        """The scaling that was given, or that a counter that is done gives."""
        if (given := self.given) is not None:
            return given
        return self.of_numbers(*_numbers(self, counter))

    def of_array(self, array: NDArray[Any]) -> Scaling:
        """The scaling of one array by itself. It never divides by 0."""
        counter = self.counter(array.dtype)
        while not counter.done:
            self.add(counter, array)
            counter.advance()
        return self.scaling(counter)

    def of_numbers(self, lower: float, scale: float, zeros: float | None = 0.0) -> Scaling:
        """The scaling by numbers that were counted before."""
        return Scaling(lower, scale, self.clip, zeros if self.nonzero else None)

    def line(self) -> str:
        """The normalisation in words."""
        given = f"{self.lower:g} becomes 0 and {self.upper:g} becomes 1"
        words = {
            None: "as they are" if (self.lower, self.upper) == (0.0, 1.0) else given,
            "percentiles": f"percentiles {self.lower:g} and {self.upper:g} of the whole volume",
            "moments": "z-score by mean and deviation of the whole volume",
        }
        line = "least and largest of the whole volume" if self.ends else words[self.counts]
        if self.nonzero:
            inside = "inside what is not 0 in some channel"
            line += f", only {inside if self.masked else 'where it is not 0'}"
        if self.then != (0.0, 1.0):
            line += f", of which {self.then[0]:g} becomes 0 and {self.then[1]:g} becomes 1"
        return line + (f", clipped to {self.clip[0]:g} {self.clip[1]:g}" if self.clip else "")


def normalised(array: NDArray[Any], each: Sequence[Normalisation]) -> NDArray[np.float64]:
    """An array normalised by its own numbers.

    Args:
        array: Of shape (channels, ...).
        each: One normalisation for all channels together, or one for each.

    Returns:
        The values, in the same shape.
    """
    pairs = zip(each, [array] if len(each) == 1 else array, strict=True)
    made = [how.of_array(part).applied(part) for how, part in pairs]
    return np.reshape(made, array.shape)


def _numbers(
    how: Normalisation, counter: Histogram | MeanAndDeviation
) -> tuple[float, float, float]:
    """Lower bound and scale of data that was counted, and what its zeros become."""
    (first, last), zeros = how.then, 0.0
    if isinstance(counter, Histogram):
        scaling = counter.scaling(how.least)
        lower, scale = scaling.lower, scaling.scale + how.added
    elif how.ends and counter.count:  # zeros have become what the mean does
        lower, scale = counter.ends[0], (counter.ends[1] - counter.ends[0]) or 1.0
        zeros = (counter.mean - lower) / scale
    else:
        lower, scale = counter.mean, max(counter.deviation + how.added, how.least or 0.0) or 1.0
    return lower + first * scale, (last - first) * scale, (zeros - first) / (last - first)


class Histogram:
    """Exact percentiles of data that streams by in pieces, for any dtype, in bounded memory.

    Values are mapped to unsigned integers that sort alike. 8- and 16-bit data is counted whole in
    one pass; wider data (64-bit is taken as the float32 that a model sees) needs two: the upper 16
    bits first, then the lower 16 of the few bins that hold a wanted rank. Values that are not
    finite are left out.

        while not histogram.done:
            for piece in pieces: histogram.add(piece)
            histogram.advance()
    """

    def __init__(self, dtype: np.dtype[Any], percentiles: Sequence[float]) -> None:
        """``percentiles`` are those that will be read at the end, from 0 to 100."""
        self.percentiles = percentiles
        self.wide = dtype.itemsize > 2
        kinds = {"b1": np.uint8, "f8": np.float32, "i8": np.float32, "u8": np.float32}
        self._kind: np.dtype[Any] = np.dtype(kinds.get(dtype.str[1:], dtype))
        """The dtype of the values whose bits become keys."""
        self._sign = 0 if self._kind.kind == "u" else 1 << (8 * self._kind.itemsize - 1)
        self.done = False
        """Whether all passes have ended, so that percentiles can be read."""
        self._coarse = np.zeros(1 << 16, np.int64)
        self._up_to: NDArray[np.int64] | None = None
        """Values in each coarse bin and those below it; None if it is out of date."""
        self._fine: dict[int, NDArray[np.int64]] | None = None

    @property
    def count(self) -> int:
        """Finite values seen in the first pass."""
        return int(self._cumulative[-1])

    @property
    def _cumulative(self) -> NDArray[np.int64]:
        if self._up_to is None:
            self._up_to = np.cumsum(self._coarse)
        return self._up_to

    def add(self, array: NDArray[Any]) -> None:
        """Count the values of a piece, of any shape, in the current pass."""
        flags: Any = ("external_loop", "buffered", "zerosize_ok")
        for piece in np.nditer(array, flags, buffersize=_PIECE):  # a view is not copied whole
            self._count(self._keys(np.asarray(piece)))

    def _count(self, keys: NDArray[Any]) -> None:
        self._up_to = None
        if not self.wide:
            self._coarse += np.bincount(keys, minlength=1 << 16)
        elif self._fine is None:
            self._coarse += np.bincount(keys >> np.uint32(16), minlength=1 << 16)
        else:
            coarse = keys >> np.uint32(16)
            for bin_, counts in self._fine.items():
                low = keys[coarse == bin_] & np.uint32(0xFFFF)
                counts += np.bincount(low, minlength=1 << 16)

    @property
    def counts(self) -> dict[str, NDArray[np.int64]]:
        """The counts of this pass: arrays that `merge` adds to those of another histogram."""
        if self._fine is None:
            return {"coarse": self._coarse}
        bins = np.array([*self._fine], np.int64)
        return {"bins": bins, "fine": np.stack([*self._fine.values()])}

    def merge(self, counts: Mapping[str, NDArray[np.int64]]) -> None:
        """Add the counts of another histogram in the same pass.

        Args:
            counts: the `counts` of the other one.
        """
        self._up_to = None
        if self._fine is None:
            self._coarse += counts["coarse"]
        else:
            for bin_, fine in zip(counts["bins"].tolist(), counts["fine"], strict=True):
                self._fine[bin_] += fine

    def advance(self) -> None:
        """End a pass. Unless `done` is true then, all pieces must be added once more."""
        if not self.wide or self._fine is not None or self.count == 0:
            self.done = True
            return
        ranks = [r for q in (0.0, 100.0, *self.percentiles) for r in self._ranks(q)[:2]]
        bins = np.searchsorted(self._cumulative, ranks, side="right")
        self._fine = {int(b): np.zeros(1 << 16, np.int64) for b in bins}

    def percentile(self, q: float) -> float:
        """As ``numpy.percentile`` (linear) of all the data at once; NaN where there was none."""
        if self.count == 0:
            return float("nan")
        below, above, fraction = self._ranks(q)
        low, high = self._value(below), self._value(above)
        return low + (high - low) * fraction

    def scaling(self, least: float | None = None) -> Scaling:
        """The scaling by the two percentiles; call it once `done`.

        Args:
            least: the narrowest range between both, in the data's unit.

        Returns:
            The scaling; see `Scaling.of_range`.
        """
        lower, upper, low, high = map(self.percentile, (*self.percentiles, 0, 100))
        return Scaling.of_range(lower, upper, low, high, least)

    def _ranks(self, q: float) -> tuple[int, int, float]:
        position = q / 100 * (self.count - 1)
        below = int(np.floor(position))
        return below, min(below + 1, self.count - 1), position - below

    def _value(self, rank: int) -> float:
        cumulative = self._cumulative
        key = int(np.searchsorted(cumulative, rank, side="right"))
        if self._fine is not None:
            rest = rank - int(cumulative[key - 1] if key else 0)
            fine = int(np.searchsorted(np.cumsum(self._fine[key]), rest, side="right"))
            key = key << 16 | fine
        return self._from_key(key)

    def _keys(self, flat: NDArray[Any]) -> NDArray[Any]:
        if self._kind.kind == "f":
            with np.errstate(over="ignore"):  # what float32 lacks is infinite, and left out
                flat = flat[np.isfinite(flat)].astype(self._kind)
            flat = flat[np.isfinite(flat)] + 0.0  # -0.0 and 0.0 are one value
        bits = flat.view(f"u{self._kind.itemsize}")
        sign = bits.dtype.type(self._sign)
        if self._kind.kind == "f":
            # The bits of floats sort like numbers from 0 on. Those of negative ones sort backwards,
            # and must come first.
            return np.where(bits & sign, ~bits, bits | sign)
        return bits ^ sign if sign else bits

    def _from_key(self, key: int) -> float:
        bits = key ^ self._sign
        if self._kind.kind == "f" and not key & self._sign:
            bits = ~key & (2 * self._sign - 1)
        return float(np.array(bits, f"u{self._kind.itemsize}").view(self._kind))
