"""The record of how chips were cut: `preprocess` writes it, a training keeps it, `predict` obeys
it. So a network is shown the same values everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ...base import UsageError
from .scene import CHANNELS


@dataclass(frozen=True, slots=True)
class ChipRecord:
    """How scenes are cut into chips, and what a model sees of them."""

    channels: tuple[str, ...]
    chip_size: int
    """Pixels along a side."""
    overlap: int
    """Pixels that neighbours share."""
    dtype: str
    """The dtype of the radar's values, ``float16`` or ``float32``."""
    scaling: tuple[tuple[float, float], ...]
    """The offset and the scale of each channel: a model sees ``(value - offset) / scale``."""

    @classmethod
    def of(cls, channels: Sequence[str], chip_size: int, overlap: int, dtype: str) -> ChipRecord:
        """The record of chips that are cut now, scaled as `CHANNELS` says."""
        scaling = tuple((CHANNELS[name].offset, CHANNELS[name].scale) for name in channels)
        return cls(tuple(channels), chip_size, overlap, dtype, scaling)

    @classmethod
    def read(cls, document: Mapping[str, Any], where: str) -> ChipRecord:
        """The record in a document.

        Raises:
            UsageError: it has none that can be obeyed; ``where`` names it.
        """
        try:
            values = {field.name: document[field.name] for field in fields(cls)}
            record = cls.of(*(values[name] for name in list(values)[:-1]))
            return replace(record, scaling=tuple((a, b) for a, b in values["scaling"]))
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{where} does not say how its chips were cut") from None

    def as_document(self) -> dict[str, Any]:
        """The record as JSON takes it."""
        return {**asdict(self), "channels": [*self.channels], "scaling": [*map(list, self.scaling)]}

    def told(self, name: str) -> str:
        """One of its values in words, such as ``channels vh,vv``."""
        value = getattr(self, name)
        return f"{name.replace('_', ' ')} {','.join(value) if name == 'channels' else value}"

    def differing(self, other: ChipRecord) -> str:
        """The first thing that a model would see otherwise, as ``channels``; empty if none. How far
        chips overlap changes nothing that it sees."""
        names = [field.name for field in fields(self) if field.name != "overlap"]
        return next((n for n in names if getattr(self, n) != getattr(other, n)), "")
