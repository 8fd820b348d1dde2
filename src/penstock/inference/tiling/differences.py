"""The difference between a tile and a larger input, by the distance from a seam.

window  ├────────────────────────────────┤
tile            ├──────────────┤            its core is compared with the middle of the window
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import plural, significant
from ...instruments import students_t
from .exact import SIDE_STEP

ENOUGH_PLACES, MOST_PLACES = 3, 8
"""The least places of an interval, and the most to measure at."""
_POWERS = np.linspace(0.5, 4, 71)
"""Powers of the side by which a difference may fall. At less, half of it takes a side of more than
four times: no patch for anybody."""


@dataclass(frozen=True, slots=True)
class SeamError:
    """The difference between tiles and larger inputs."""

    by_distance: tuple[float, ...]
    """Mean difference of the voxels at 0, 1, 2 ... voxels from a seam: a share of the range of the
    output, or of labels the share that is another."""
    low: tuple[float, ...]
    """Lower ends of 95 % intervals over the places; empty for fewer than three."""
    high: tuple[float, ...]
    """Upper ends of them."""
    places: int
    """Number of places on the data."""
    window: float
    """Side of the larger input, in those of a patch."""
    halving: int | None
    """Side of a patch at which the difference at seams would be half; None if larger patches are
    little better."""
    labels: bool = False
    """True if the output is labels."""
    f1: float | None = None
    """F1 of the labels of whole cores, a mean over labels but 0; None without such labels."""

    def line(self) -> str:
        """The same in words."""
        what = "of the labels change" if self.labels else "of the range"
        about = f"about {_percent(self.by_distance[0])} % {what} at seams"
        if self.low:
            about += f" ({_percent(self.low[0])} to {_percent(self.high[0])} %)"
        score = "" if self.f1 is None else f", F1 {self.f1:.3f} in whole cores"
        cure = "larger patches are little better"
        if self.halving is not None:
            cure = f"--patch {self.halving} would about halve it"
        on = f"measured on {plural(self.places, 'place')} of the data"
        return f"{about}, {on} against a side {self.window:.2g} times as long{score}; {cure}"


def _percent(share: float) -> str:
    return significant(100 * share)


def seam_error_of(
    each: Sequence[NDArray[np.float64]],
    smaller: Sequence[float],
    scores: Sequence[float | None],
    sides: tuple[int, int, int],
    *,
    labels: bool,
) -> SeamError:
    """Join what was measured at several places.

    Args:
        each: The difference by distance at each place, as `by_distance` has it.
        smaller: The difference at seams of a smaller patch, at each place.
        scores: F1 of labels at each place, None where there are none.
        sides: The sides of the smaller patch, of the patch and of the larger input.
        labels: True for labels.

    Returns:
        Means, intervals, and the patch that would halve the difference.
    """
    table = np.asarray(each)
    mean, ends = table.mean(0), np.empty((2, 0))
    if len(table) >= ENOUGH_PLACES:
        # To draw again from so few places would make the interval too narrow.
        spread = students_t(len(table) - 1) * table.std(0, ddof=1) / math.sqrt(len(table))
        ends = np.clip((mean - spread, mean + spread), 0, 1)
    # A tile and its window err together, so their difference falls faster than that of the tile:
    # as what of the tile's variance the window lacks, if that goes with a power of the side.
    small, side, window = sides
    lacks = [1 - (n / window) ** (2 * _POWERS) for n in (small, side)]
    falls = (side / small) ** _POWERS * np.sqrt(lacks[0] / lacks[1])
    fall = float(np.mean(smaller)) / (float(mean[0]) or math.inf)
    halving = None
    if fall >= falls[0]:
        double = 2 ** (1 / np.interp(fall, falls, _POWERS))
        halving = SIDE_STEP * math.ceil(side * double / SIDE_STEP)
    curve, low, high = (tuple(map(float, values)) for values in (mean, *ends))
    some = [score for score in scores if score is not None]
    f1 = float(np.mean(some)) if some else None
    return SeamError(curve, low, high, len(table), window / side, halving, labels, f1)


def by_distance(difference: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of the differences of a core's voxels at 0, 1, 2 ... voxels from a seam."""
    distance = np.full(difference.shape, max(difference.shape))
    for axis, side in enumerate(difference.shape):
        if side > 1:
            near = np.minimum(np.arange(side), np.arange(side)[::-1])
            shape = [-1 if n == axis else 1 for n in range(difference.ndim)]
            distance = np.minimum(distance, near.reshape(shape))
    counts = np.bincount(distance.ravel())
    sums = np.bincount(distance.ravel(), weights=difference.ravel())
    return np.asarray(sums / np.maximum(counts, 1))


def label_f1(one: NDArray[Any], other: NDArray[Any]) -> float | None:
    """F1 of the labels of two arrays, a mean over the labels that are not 0; None without any."""
    labels, counts = np.unique(np.concatenate([one.ravel(), other.ravel()]), return_counts=True)
    agreed = np.bincount(np.searchsorted(labels, one[one == other]), minlength=len(labels))
    scores = (2 * agreed / counts)[labels != 0]
    return float(scores.mean()) if len(scores) else None
