"""Scaling of stored intensities to the range that a model was trained on, and back.

A `Scaling` is two numbers, ``x -> (x - lower) / scale``. They come from the data: percentiles of
a block, exact percentiles of a whole volume by a streaming `Histogram`, or a range that the user
knows. Applying them to an array is the work of `lane`, on the device; this module only computes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_PIECE = 2**18
"""Values counted at a time: `numpy.bincount` copies its input to eight bytes a value."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """``x -> (x - lower) / scale``, and its inverse."""

    lower: float = 0.0
    scale: float = 1.0

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


def block_scaling(
    array: NDArray[Any], lower: float, upper: float, least: float | None = None
) -> Scaling:
    """Scaling by two percentiles of the finite voxels of one array; see `Scaling.of_range`.

    Args:
        array: intensities of any shape.
        lower: the percentile that becomes 0, from 0 to 100.
        upper: the percentile that becomes 1, from 0 to 100.
        least: the narrowest range between both, in the array's unit.

    Returns:
        The scaling. It never divides by 0.
    """
    histogram = Histogram(array.dtype)
    while not histogram.done:
        histogram.add(array)
        histogram.advance((lower, upper))
    return histogram.scaling(lower, upper, least)


class Histogram:
    """Exact percentiles of data that streams by in pieces, for any dtype, in bounded memory.

    Values are mapped to unsigned integers that sort alike. 8- and 16-bit data is counted whole in
    one pass; wider data (float64 is taken as the float32 that a model sees) needs two: the upper 16
    bits first, then the lower 16 of the few bins that hold a wanted rank. Values that are not
    finite are left out.

        while not histogram.done:
            for piece in pieces: histogram.add(piece)
            histogram.advance(percentiles)
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.wide = dtype.itemsize > 2
        kinds = {"b": np.uint8, "f": np.float32 if self.wide else np.float16}
        self._kind: np.dtype[Any] = np.dtype(kinds.get(dtype.kind, dtype))
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

    def advance(self, percentiles: Sequence[float]) -> None:
        """End a pass. Unless `done` is true then, all pieces must be added once more.

        Args:
            percentiles: those that will be read at the end, from 0 to 100.
        """
        if not self.wide or self._fine is not None or self.count == 0:
            self.done = True
            return
        ranks = [r for q in (0.0, 100.0, *percentiles) for r in self._ranks(q)[:2]]
        bins = np.searchsorted(self._cumulative, ranks, side="right")
        self._fine = {int(b): np.zeros(1 << 16, np.int64) for b in bins}

    def percentile(self, q: float) -> float:
        """As ``numpy.percentile`` (linear) of all the data at once; NaN where there was none."""
        if self.count == 0:
            return float("nan")
        below, above, fraction = self._ranks(q)
        low, high = self._value(below), self._value(above)
        return low + (high - low) * fraction

    def scaling(self, lower: float, upper: float, least: float | None = None) -> Scaling:
        """The scaling by two percentiles, from 0 to 100; call it once `done`.

        Args:
            lower: the percentile that becomes 0.
            upper: the percentile that becomes 1.
            least: the narrowest range between both, in the data's unit.

        Returns:
            The scaling; see `Scaling.of_range`.
        """
        return Scaling.of_range(
            self.percentile(lower),
            self.percentile(upper),
            self.percentile(0),
            self.percentile(100),
            least,
        )

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
            flat = flat[np.isfinite(flat)].astype(self._kind)
            flat = flat[np.isfinite(flat)] + 0.0  # -0.0 and 0.0 are one value
        bits = flat.view(f"u{self._kind.itemsize}")
        sign = bits.dtype.type(self._sign)
        if self._kind.kind == "f":
            return np.where(bits & sign, ~bits, bits | sign)
        return bits ^ sign if sign else bits

    def _from_key(self, key: int) -> float:
        bits = key ^ self._sign
        if self._kind.kind == "f" and not key & self._sign:
            bits = ~key & (2 * self._sign - 1)
        return float(np.array(bits, f"u{self._kind.itemsize}").view(self._kind))
