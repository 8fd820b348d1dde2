"""Which time points and channels of the input a job runs over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ...base import UsageError, plural
from ...data import Box, Source


@dataclass(frozen=True, slots=True)
class Volume:
    """One pass of the model over space: one time point, one group of channels."""

    t: int
    channels: tuple[int, ...]

    def read(self, source: Source, box: Box, out: NDArray[Any]) -> None:
        """Read its channels over a spatial box into ``out``, shape (channels, z, y, x)."""
        for i, channel in enumerate(self.channels):
            source.read(Box.of((self.t, channel), (1, 1)) + box, out[None, i : i + 1])


def volumes_of(times: Sequence[int], channels: Sequence[int], at_once: int) -> list[Volume]:
    """The volumes of some times and channels. The model takes ``at_once`` channels.

    Raises `UsageError` if channels would be left over.
    """
    if len(channels) % at_once:
        raise UsageError(
            f"--c names {plural(len(channels), 'channel')} but the model takes {at_once} at once; "
            "name a multiple of it or set --in-channels"
        )
    groups = [
        tuple(channels[first : first + at_once]) for first in range(0, len(channels), at_once)
    ]
    return [Volume(t, group) for t in times for group in groups]


def select(selection: Sequence[str | int], start: int, stop: int, flag: str) -> tuple[int, ...]:
    """The coordinates that ``all``, ``3``, ``0:5`` or several of these name within a domain.

    >>> select(["0:2", 5], 0, 6, "--t")
    (0, 1, 5)
    """
    chosen: list[int] = []
    for item in (part for value in selection for part in str(value).split(",")):
        try:
            chosen += _named(item, start, stop)
        except (ValueError, TypeError):
            raise UsageError(f"{flag} {item!r} is not all, an index or a range like 0:5") from None
    if not chosen:
        raise UsageError(f"{flag} {' '.join(map(str, selection))} names nothing")
    for value in chosen:
        if not start <= value < stop:
            raise UsageError(f"{flag} {value} is out of range: the input has {start} to {stop - 1}")
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"{flag} {' '.join(map(str, selection))} names one index twice")
    return tuple(chosen)


def _named(item: str, start: int, stop: int) -> Sequence[int]:
    if item == "all":
        return range(start, stop)
    if ":" not in item:
        return [int(item)]
    low, high, *step = (int(number) if number else None for number in item.split(":"))
    low, high = start if low is None else low, stop if high is None else high
    named = range(low, high, *[number for number in step if number])
    # One index more than the input has is enough to raise the error.
    return named[: stop - start + 1]
