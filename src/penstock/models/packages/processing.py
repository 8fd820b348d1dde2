"""Steps of pre-processing, one after the other, as one normalisation for each channel.

Every step is affine or a clip, so a chain of them is ``clip((x - lower) / scale)``. A step that
counts numbers of the data must come first; one that is neither is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...data import Normalisation
from .package import Parcel

DONE = (
    "scale_range, zero_mean_unit_variance, fixed_zero_mean_unit_variance, scale_linear, clip, "
    "ensure_dtype"
)


class Chain:
    """The steps of a network's input so far."""

    def __init__(self, parcel: Parcel, channels: int) -> None:
        self._parcel, self._channels = parcel, channels
        self._each = [Normalisation()]

    @property
    def normalisation(self) -> tuple[Normalisation, ...]:
        """One for all channels together, or one for each."""
        return tuple(self._each)

    def add(self, name: str, values: Any) -> None:
        """Add a step of bioimage.io.

        Args:
            name: Its name.
            values: Its keyword arguments, as attributes.

        Raises:
            UsageError: It is not done, or not at this place.
        """
        if name == "ensure_dtype":
            return
        if name == "scale_range" and values.reference_tensor in (None, "raw", "input"):
            self.count("percentiles", values.min_percentile, values.max_percentile, values)
        elif name == "zero_mean_unit_variance":
            self.count("moments", 0.0, 1.0, values)
        elif name == "fixed_zero_mean_unit_variance":
            self.affine(values.mean, values.std)
        elif name == "scale_linear":
            gains = np.asarray(values.gain, np.float64)
            self.affine(-np.asarray(values.offset) / gains, 1 / gains)
        elif name == "clip" and None not in (values.min, values.max):
            self.clip(values.min, values.max)
        else:
            raise self._parcel.refuse(
                f"{name} of its input is not done, only {DONE} are; do it to the volume first, and "
                "leave the step out of the description"
            )

    def count(self, what: Any, lower: float, upper: float, values: Any) -> None:
        """Normalise by numbers of the data."""
        if self._each != [Normalisation()]:
            raise self._parcel.refuse(
                "a step that counts numbers of its input comes after another, which is not done"
            )
        how = Normalisation(what, lower, upper, added=float(values.eps))
        axes = values.axes
        together = axes is None or "channel" in axes or self._channels == 1
        self._each = [how] if together else [how] * self._channels

    def affine(self, lowers: ArrayLike, scales: ArrayLike) -> None:
        """Subtract numbers and divide by others, each one for all channels or one a channel."""
        numbers = np.stack(np.broadcast_arrays(lowers, scales), axis=-1).reshape(-1, 2).tolist()
        size = max(len(numbers), len(self._each))
        each, numbers = ([*some] * (size // len(some)) for some in (self._each, numbers))
        self._each = [self._after(how, *pair) for how, pair in zip(each, numbers, strict=True)]

    def _after(self, how: Normalisation, lower: float, scale: float) -> Normalisation:
        if how.counts is not None and (lower, scale) != (0.0, 1.0):
            raise self._parcel.refuse("its input is scaled again after numbers of it were counted, "
                                     "which is not done")  # fmt: skip
        span = how.upper - how.lower
        first = how.lower + lower * span
        clip = how.clip
        if clip is not None:
            low, high = ((each - lower) / scale for each in clip)
            clip = min(low, high), max(low, high)
        return replace(how, lower=first, upper=first + scale * span, clip=clip)

    def clip(self, low: float, high: float) -> None:
        """Clip what the steps so far have made."""
        self._each = [
            replace(how, clip=(max(low, how.clip[0]), min(high, how.clip[1])) if how.clip else
                    (float(low), float(high)))
            for how in self._each
        ]  # fmt: skip
