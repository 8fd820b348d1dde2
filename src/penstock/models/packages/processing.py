"""Steps of pre-processing, one after the other, as one normalisation for each channel.

Every step is affine or a clip, so a chain of them is ``clip((x - lower) / scale)``. A step that
counts numbers of the data must come first; one that is neither is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
            self.affine(_many(values.mean), _many(values.std))
        elif name == "scale_linear":
            gains = _many(values.gain)
            offsets = _many(values.offset)
            size = max(len(gains), len(offsets))
            pairs = zip(_repeated(gains, size), _repeated(offsets, size), strict=True)
            lowers, scales = zip(
                *((-offset / gain, 1 / gain) for gain, offset in pairs), strict=True
            )
            self.affine(lowers, scales)
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

    def affine(self, lowers: Sequence[float], scales: Sequence[float]) -> None:
        """Subtract numbers and divide by others, each one for all channels or one a channel."""
        size = max(len(lowers), len(scales), len(self._each))
        numbers = zip(
            _repeated(self._each, size),
            _repeated(lowers, size),
            _repeated(scales, size),
            strict=True,
        )
        self._each = [self._after(how, lower, scale) for how, lower, scale in numbers]

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


def _many(value: Any) -> Sequence[float]:
    return [float(each) for each in value] if isinstance(value, Sequence) else [float(value)]


def _repeated(values: Sequence[Any], size: int) -> list[Any]:
    return [*values] * size if len(values) == 1 else [*values]
