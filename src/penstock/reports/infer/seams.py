"""Whether seams between patches show in an output, read from the output itself.

A seam shows if neighbouring voxels differ more across it than across other planes. Each window that
is read has a seam in its middle and reaches half way to the next seams. The mean step (difference
of neighbours) across the seam is compared with the mean step across each other plane of the window.
The seam shows if its step is the largest. Few windows are read, so this takes seconds for a volume
of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import plural
from ...data import Box

WINDOWS = 16
"""Windows that are read along each axis."""
WINDOW = 96
"""Most voxels of a window along each side."""
REACH = 24
"""Most planes on each side that a seam is compared with."""
LEAST_REACH = 10
"""Fewest planes on each side. With fewer, chance would too often say that seams show."""


@dataclass(frozen=True)
class SeamReading:
    """What was read along one axis of one output."""

    axis: str
    seams: int
    """Planes that were looked at."""
    steps: NDArray[np.float64]
    """The mean step across each plane of each window, the seam in the middle: (windows, planes).
    For labels it is the share that changes."""

    @property
    def ratios(self) -> NDArray[np.float64] | None:
        """The mean step at each plane over the mean of all; None if the output is flat."""
        means = self.steps.sum(axis=0)
        return means / means.mean() if means.any() else None


def measure_seams(source: Any, fingerprint: Mapping[str, Any], kind: str) -> list[SeamReading]:
    """Read windows along the seams of an output.

    Args:
        source: The output, a `penstock.data.Source` of five axes.
        fingerprint: That of its run: ``patch``, ``overlap`` and ``seam``.
        kind: That of its head: intensity, scores or labels.

    Returns:
        A reading for each axis whose seams lie far enough apart.
    """
    rng = np.random.default_rng(0)
    readings = []
    for axis, reach, places in _planes(source.domain, fingerprint):
        spread = np.linspace(0, len(places) - 1, min(WINDOWS, len(places))).round().astype(int)
        chosen = [places[spread[number % len(spread)]] for number in range(WINDOWS)]
        steps = [_steps(source, axis, reach, place, kind, rng) for place in chosen]
        readings.append(SeamReading("zyx"[axis - 2], len(spread), np.array(steps)))
    return readings


def seam_sentences(readings: Sequence[SeamReading], name: str = "") -> list[str]:
    """Say of each axis whether its seams show.

    Args:
        readings: The axes of one output.
        name: Its name, if there are several outputs.

    Returns:
        The sentences.
    """
    return [_sentence(reading, f" of {name}" if name else "") for reading in readings]


def _sentence(reading: SeamReading, whose: str) -> str:
    ratios, windows = reading.ratios, len(reading.steps)
    where = f"Across seams along {reading.axis}{whose}"
    if ratios is None:
        return f"{where} and beside them nothing changes: the output is flat in all windows."
    middle = len(ratios) // 2
    others = np.delete(ratios, range(middle - 1, middle + 2))  # a net may smooth the next ones too
    verdict = "seams show" if ratios[middle] > others.max() else "seams do not show"
    return (
        f"{where} neighbours differ by {ratios[middle]:.2f}x the mean step; between seams by "
        f"{others.min():.2f}x to {others.max():.2f}x [{plural(reading.seams, 'seam')}, "
        f"{len(others)} planes between, {windows} windows]: {verdict}."
    )


def _planes(domain: Box, fingerprint: Mapping[str, Any]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield each axis whose seams can be judged, the number of planes on each side, and the first
    voxel after each seam that has room for them."""
    blended = fingerprint["seam"][0] == "blend"
    sizes = zip(fingerprint["patch"], fingerprint["overlap"], strict=True)
    for axis, (patch, overlap) in enumerate(sizes, start=2):
        low, high, stride = domain.start[axis], domain.stop[axis], patch - overlap
        reach = min(REACH, (stride - 1) // 2)
        # Blending spreads a seam; what can show is the plane where the next patch begins to count.
        first = low + stride - (overlap // 2 if blended else 0)
        places = [p for p in range(first, high, stride) if low < p - reach and p + reach < high]
        if places and reach >= LEAST_REACH:
            yield axis, reach, places


def _steps(
    source: Any, axis: int, reach: int, place: int, kind: str, rng: np.random.Generator
) -> list[float]:
    """The mean step across each plane of a window around a seam; other axes are taken at random."""
    start, stop = [], []
    for each, (low, high) in enumerate(zip(source.domain.start, source.domain.stop, strict=True)):
        size = min(high - low, WINDOW if each >= 2 else 1)
        begin = int(rng.integers(low, high - size + 1))
        start.append(place - reach - 1 if each == axis else begin)
        stop.append(place + reach + 1 if each == axis else begin + size)
    values = np.moveaxis(source.read(Box(tuple(start), tuple(stop))), axis, 0)
    if kind == "labels":
        change = (values[1:] != values[:-1]).astype(np.float64)
    else:
        change = np.nan_to_num(np.abs(np.diff(values.astype(np.float64), axis=0)))
    return change.reshape(len(change), -1).mean(axis=1).tolist()
