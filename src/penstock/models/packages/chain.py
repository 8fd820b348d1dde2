"""The steps that a package does to a network's input, as one normalisation for each channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ...base import UsageError, plural
from ...data import Normalisation


class Chain:
    """The steps so far.

    Every step is affine or a clip, so a chain of them is ``clip((x - lower) / scale)``. Some steps
    take their numbers from the data, such as its mean. They give the same after values were scaled
    as before, unless some of these were clipped or stayed 0.
    """

    def __init__(self, refuse: Callable[[str], UsageError], channels: int) -> None:
        """``refuse`` makes the error that names what Penstock cannot do."""
        self._refuse, self._channels = refuse, channels
        self.each = [Normalisation()]
        """One for all channels together, or one for each."""

    def count(self, name: str, how: Normalisation, *, by_channel: bool) -> None:
        """Normalise by numbers of the data.

        Args:
            name: The name of the step, for messages.
            how: How, for values that nothing was done to.
            by_channel: True if numbers are counted for each channel.

        Raises:
            UsageError: What was done before does not let it.
        """
        size = self._channels if by_channel else 1
        kept = Normalisation("moments", nonzero=True)
        if how == Normalisation("percentiles", 0, 100) and self.each == [kept] * size:
            self.each = [replace(kept, ends=True)] * size
            return
        if len(self.each) not in (1, size) or not all(_falls_away(b, how) for b in self.each):
            raise self._refuse(
                f"{name} counts numbers of its input after another step, which is not done; do that"
                " step to the volume first, and leave it out"
            )
        self.each = [how] * size

    def affine(self, name: str, lowers: ArrayLike, scales: ArrayLike) -> None:
        """Subtract ``lowers`` and divide by ``scales``, of which each has one number for all
        channels, or one for each.

        Raises `UsageError` for another number of numbers than of channels.
        """
        numbers = np.stack(np.broadcast_arrays(lowers, scales), axis=-1).reshape(-1, 2).tolist()
        if len(numbers) not in (1, self._channels):
            raise self._refuse(f"{name} of its input has {plural(len(numbers), 'number')}, and the "
                               f"network takes {plural(self._channels, 'channel')}")  # fmt: skip
        size = max(len(numbers), len(self.each))
        each, numbers = ([*some] * (size // len(some)) for some in (self.each, numbers))
        self.each = [self._after(how, *pair) for how, pair in zip(each, numbers, strict=True)]

    def _after(self, how: Normalisation, lower: float, scale: float) -> Normalisation:
        if how.nonzero and not how.ends and (lower, scale) != (0.0, 1.0):
            raise self._refuse("its input is scaled again after what is not 0 was, which is not "
                               "done")  # fmt: skip
        given = how.counts is None
        low, high = (how.lower, how.upper) if given else how.then
        ends = low + lower * (high - low), low + (lower + scale) * (high - low)
        clip = how.clip
        if clip is not None:
            first, last = ((each - lower) / scale for each in clip)
            clip = min(first, last), max(first, last)
        if given:
            return replace(how, lower=ends[0], upper=ends[1], clip=clip)
        return replace(how, then=ends, clip=clip)

    def clip(self, low: float, high: float) -> None:
        """Clip what the steps so far have made."""
        self.each = [
            replace(how, clip=(max(low, how.clip[0]), min(high, how.clip[1])) if how.clip else
                    (float(low), float(high)))
            for how in self.each
        ]  # fmt: skip


def _falls_away(before: Normalisation, how: Normalisation) -> bool:
    """Whether a step may be left out, because a later one takes its numbers from the data."""
    if before == Normalisation():
        return True
    kept = before.clip is None and not before.nonzero and not how.nonzero
    rising = before.upper > before.lower and before.then[1] > before.then[0]
    return kept and rising and not how.added
