"""Means and standard deviations of channels, which add up over samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of each channel; they add up over samples."""

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def none(cls, num_channels: int) -> Moments:
        return cls(0, np.zeros(num_channels), np.zeros(num_channels))

    @classmethod
    def of(cls, values: NDArray[Any], channel_axis: int) -> Moments:
        """Of one array, in float64 and a slab at a time, which keeps the slab in the cache."""
        channels_last = np.moveaxis(values, channel_axis, -1)
        count = math.prod(channels_last.shape[:-1])
        # Deviations from a value near the mean lose nothing when their squares are added.
        near = channels_last[0].mean(axis=0, dtype=np.float64)
        total, squares = np.zeros_like(near), np.zeros_like(near)
        for slab in channels_last:
            deviations = slab - near
            total += deviations.sum(axis=0)
            squares += np.einsum("xc,xc->c", deviations, deviations)
        return cls(count, near + total / count, squares - total**2 / count)

    def __add__(self, other: Moments) -> Moments:
        """By the formula of Chan, Golub and LeVeque (1979)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.squares + other.squares + apart**2 * (self.count * other.count / count),
        )

    @property
    def std(self) -> NDArray[np.float64]:
        return np.sqrt(np.maximum(self.squares, 0) / self.count)
