"""Mean, standard deviation and ends of data that streams by in pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import PenstockError

_PIECE = 2**18
"""Values counted at a time, as they are copied to eight bytes a value."""


class MeanAndDeviation:
    """Mean, standard deviation and ends of data that streams by in pieces.

    The sums of each piece are float64, those of all pieces are exact. So the result depends on how
    the data is cut into pieces, but not on their order or on who adds which.
    """

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        """True once all pieces are added."""
        self.count = 0
        """Finite values seen."""
        self._sum = self._squares = Fraction(0)
        self.ends = (math.inf, -math.inf)
        """The least and the largest value."""

    def add(self, array: NDArray[Any]) -> None:
        """Count the values of a piece, of any shape."""
        flags: Any = ("external_loop", "buffered", "zerosize_ok")
        for piece in np.nditer(array, flags, buffersize=_PIECE):
            values = np.asarray(piece).astype(np.float64)
            values = values[np.isfinite(values)]
            with np.errstate(over="ignore"):
                squares = float(np.square(values).sum())
            if math.isinf(squares):
                raise PenstockError(
                    f"the squares of values as large as {abs(values).max():.3g} are no float64; "
                    "--normalize fixed takes a range of yours"
                )
            self.count += values.size
            if values.size:
                self._widen(float(values.min()), float(values.max()))
            self._sum += Fraction(float(values.sum()))
            self._squares += Fraction(squares)

    def _widen(self, low: float, high: float) -> None:
        self.ends = min(low, self.ends[0]), max(high, self.ends[1])

    @property
    def counts(self) -> dict[str, NDArray[Any]]:
        """The counts: arrays that `merge` adds to those of another one."""
        sums = np.array([str(self.count), str(self._sum), str(self._squares)])
        return {"sums": sums, "ends": np.array(self.ends)}

    def merge(self, counts: Mapping[str, NDArray[Any]]) -> None:
        """Add the `counts` of another one."""
        count, total, squares = map(Fraction, counts["sums"].tolist())
        self.count += int(count)
        self._sum += total
        self._squares += squares
        self._widen(*counts["ends"].tolist())

    def advance(self) -> None:
        """End the only pass."""
        self.done = True

    @property
    def mean(self) -> float:
        """The mean; 0 where there was no value."""
        return float(self._sum / self.count) if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation of all values; 0 where there was none."""
        if not self.count:
            return 0.0
        variance = self._squares / self.count - (self._sum / self.count) ** 2
        return math.sqrt(max(float(variance), 0.0))
