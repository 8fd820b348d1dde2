"""A source whose voxels are normalised as they are read, before they are resampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..filled_mask import FilledMask
from ..normalize import Scaling
from .protocols import BoxReader, Source


@dataclass(frozen=True, slots=True)
class ChannelValues:
    """What becomes of the values of a channel at a time point."""

    scaling: Scaling
    mask: FilledMask | None = None
    """True for the voxels that are normalised. Others become 0. None if all are."""
    least: NDArray[np.float64] | None = None
    """The least normalised value of all, or of each slice. Where voxels are resampled they do not
    go below it. None for no limits."""
    most: NDArray[np.float64] | None = None
    """The largest."""


def floats_for(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of floats in which values of a dtype are changed."""
    wide = dtype.itemsize == 8 or dtype.name in ("int32", "uint32")
    return np.dtype(np.float64 if wide else np.float32)


class NormalisedSource(BoxReader):
    """Reads another source as floats, which are normalised once it is known how.

    What it does not say here of itself is as in the other source.
    """

    def __init__(
        self, source: Source, each: Mapping[tuple[int, int], ChannelValues] | None = None
    ) -> None:
        """``each`` has the channels by time point and number; None leaves values as stored."""
        self.source, self.each = source, each
        self.domain, self.grid_origin = source.domain, source.grid_origin
        self.dtype = floats_for(source.dtype)
        self.packed_itemsize = source.dtype.itemsize + 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the object itself, which may be no more than begun
            raise AttributeError(name)
        return getattr(self.__dict__["source"], name)

    def fill(self, box: Box, out: NDArray[Any]) -> None:
        for t, c in np.ndindex(out.shape[:2]):
            lead = box.start[0] + t, box.start[1] + c
            values = out[t, c]
            values[...] = self.source.read(Box.of(lead, (1, 1)) + box[2:])[0, 0]
            if self.each is None:
                continue
            how = self.each[lead]
            how.scaling.apply_to(values, None if how.mask is None else ~how.mask.read(box[2:]))

    def normalised_by(self, each: Mapping[tuple[int, int], ChannelValues]) -> NormalisedSource:
        """The source with values that are normalised so."""
        return NormalisedSource(self.source, each)

    def with_cache(self, num_bytes: int) -> NormalisedSource:
        return NormalisedSource(self.source.with_cache(num_bytes), self.each)
