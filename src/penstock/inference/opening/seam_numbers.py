"""The difference at seams in numbers and words: means over places, and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import plural, significant
from ...instruments import students_t
from ..tiling.exact import SIDE_STEP

ENOUGH_PLACES = 3
"""The least places of an interval."""
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
    """Lower ends of 95 % intervals over the places, lowered as far as the range of the whole output
    may exceed that of the places; empty for fewer than three."""
    high: tuple[float, ...]
    """Upper ends of them, raised by what the larger input may lack of the whole volume."""
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
    blended: bool = False
    """True if patches are blended."""
    worst: int = 0
    """The distance from a seam at which the difference is largest. Where patches are blended, that
    may be as far as they overlap."""

    def line(self) -> str:
        """The same in words."""
        places = plural(self.places, "place")
        on = f"measured on {places} of the data against a side {self.window:.3g} times as long"
        if not any(self.by_distance):
            return f"no difference at seams, {on}"
        local = "" if self.low else "local "  # few places do not show the range of the output
        what = "of the labels change" if self.labels else f"of the {local}range"
        about = f"about {_percent(self.by_distance[self.worst])} % {what} at seams"
        score = "" if self.f1 is None else f", F1 {self.f1:.3f} in whole cores"
        if not self.low:
            return f"{about}, {on}{score}"
        about += f" ({_percent(self.low[self.worst])} to {_percent(self.high[self.worst])} %)"
        cure = "larger patches are little better"
        if self.halving is not None:
            cure = f"--patch {self.halving}{', its overlap in proportion,' * self.blended} would "
            cure += "about halve it"
        return f"{about}, {on}{score}; {cure}"


def _percent(share: float) -> str:
    return significant(100 * share)


def seam_error_of(
    each: Sequence[NDArray[np.float64]],
    smaller: Sequence[float],
    scores: Sequence[float | None],
    sides: tuple[int, int, int],
    *,
    labels: bool,
    blended: bool = False,
    shared: int = 0,
    wider: tuple[float, float] = (1.0, 1.0),
) -> SeamError:
    """Join what was measured at several places.

    Args:
        each: The difference by distance at each place, as `by_distance` has it.
        smaller: The difference at seams of a smaller patch, at each place.
        scores: F1 of labels at each place, None where there are none.
        sides: The sides of the smaller patch, of the patch and of the larger input.
        labels: True for labels.
        blended: True if patches are blended.
        shared: Voxels on each side of a seam to which two patches contribute.
        wider: Factors of the ends of intervals, for what no place can show.

    Returns:
        Means, intervals, and the patch that would halve the difference.
    """
    table = np.asarray(each)
    mean, ends = table.mean(0), np.empty((2, 0))
    worst = int(np.argmax(mean[: shared + 1]))
    if len(table) >= ENOUGH_PLACES:
        # To draw again from so few places would make the interval too narrow.
        spread = students_t(len(table) - 1) * table.std(0, ddof=1) / math.sqrt(len(table))
        ends = np.array([(mean - spread).clip(0) * wider[0], (mean + spread) * wider[1]])
        ends = ends.clip(None, 1) if labels else ends
    # A tile and its window err together, so their difference falls faster than that of the tile:
    # as what of the tile's variance the window lacks, if that goes with a power of the side.
    small, side, large = sides
    lacks = [1 - (n / large) ** (2 * _POWERS) for n in (small, side)]
    falls = (side / small) ** _POWERS * np.sqrt(lacks[0] / lacks[1])
    fall = float(np.mean(smaller)) / (float(mean[worst]) or math.inf)
    halving = None
    if fall >= falls[0]:
        double = 2 ** (1 / np.interp(fall, falls, _POWERS))
        halving = SIDE_STEP * math.ceil(side * double / SIDE_STEP)
    curve, low, high = (tuple(map(float, values)) for values in (mean, *ends))
    some = [score for score in scores if score is not None]
    f1 = float(np.mean(some)) if some else None
    return SeamError(
        curve, low, high, len(table), large / side, halving, labels, f1, blended, worst
    )


def by_distance(difference: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of the differences of a core's voxels at 0, 1, 2 ... voxels from a seam."""
    most = max(difference.shape)  # an axis of one voxel has no seam
    near = [
        np.minimum(np.arange(side), np.arange(side)[::-1]) if side > 1 else np.full(1, most)
        for side in difference.shape
    ]
    distance: NDArray[np.int64] = reduce(np.minimum.outer, near)
    counts = np.bincount(distance.ravel())
    sums = np.bincount(distance.ravel(), weights=difference.ravel())
    return np.asarray(sums / np.maximum(counts, 1))


def label_f1(one: NDArray[Any], other: NDArray[Any]) -> float | None:
    """F1 of the labels of two arrays, a mean over the labels that are not 0; None without any."""
    labels, counts = np.unique(np.concatenate([one.ravel(), other.ravel()]), return_counts=True)
    agreed = np.bincount(np.searchsorted(labels, one[one == other]), minlength=len(labels))
    scores = (2 * agreed / counts)[labels != 0]
    return float(scores.mean()) if len(scores) else None


def wider_ends(
    one: float, places: int, times: float, longest: int, side: int, large: int
) -> tuple[float, float]:
    """Factors that widen an interval by what the measured places cannot show: the rest of a larger
    volume, and context beyond the larger input.

    Args:
        one: The range of the output at one place, as a share of that at all of them.
        places: Their number.
        times: Voxels of the volume for one at the places.
        longest: The side of the volume.
        side: The side of a patch.
        large: The side of the larger input.

    Returns:
        A factor for the lower end, and one for the upper end.
    """
    low, high = 1.0, 1.0
    if times > 1 and places > 1:
        # The range of the whole exceeds that of the places as they exceed one of them.
        low = one ** (math.log(times) / math.log(places))
    if longest > large > side:
        # Data that differs as much at every scale: variance goes with the logarithm of a side.
        high = math.sqrt(math.log(longest / side) / math.log(large / side))
    return low, high
