"""Sources whose voxels are changed as they are read, box by box: normalised, or on another grid.

What is not finite counts as 0 where other voxels are made, and every voxel that is interpolated
from it is NaN.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..normalize import Scaling
from ..resampling import Resampling
from ..within_mask import FilledMask
from .protocols import BoxReader, Source, source_fingerprint


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


class _ChangedSource(BoxReader):
    """Reads another source. What it does not say of itself, such as units, is as in that."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the object itself, which may be no more than begun
            raise AttributeError(name)
        return getattr(self.__dict__["source"], name)


class NormalisedSource(_ChangedSource):
    """Reads another source as floats, which are normalised once it is known how."""

    def __init__(
        self, source: Source, each: Mapping[tuple[int, int], ChannelValues] | None = None
    ) -> None:
        """``each`` has the channels by time point and number; None leaves values as stored."""
        self.source, self.each = source, each
        self.domain, self.grid_origin = source.domain, source.grid_origin
        self.dtype = floats_for(source.dtype)
        self.packed_itemsize = source.dtype.itemsize + 1

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


class ResampledSource(_ChangedSource):
    """Reads another source on a grid that lies over the same box."""

    def __init__(
        self,
        source: Source,
        resampling: Resampling,
        each: Mapping[tuple[int, int], ChannelValues] | None = None,
    ) -> None:
        """``each`` has the limits of channels by time point and number; None for no limits."""
        self.source, self.resampling, self.each = source, resampling, each
        shown = on_grid(source, resampling.to, resampling.steps, resampling.begins)
        self.domain, self.scale, self.translation = shown.domain, shown.scale, shown.translation
        self.chunks, self.affine = shown.chunks, getattr(shown, "affine", None)
        self.dtype = floats_for(source.dtype) if resampling.order else source.dtype
        self.fingerprint = source_fingerprint(source.address, source.fingerprint, repr(resampling))

    def fill(self, box: Box, out: NDArray[Any]) -> None:
        space, held = box[2:], self.resampling.needed(box[2:])
        for t, c in np.ndindex(out.shape[:2]):
            lead = box.start[0] + t, box.start[1] + c
            stored = self.source.read(Box.of(lead, (1, 1)) + held)[0]
            out[t, c] = self._made(stored, held, space)[0]
            how = self.each[lead] if self.each else None
            if how is not None and how.least is not None and how.most is not None:
                slices = self.resampling.slices(space)
                out[t, c].clip(how.least[slices], how.most[slices], out=out[t, c])

    def _made(self, stored: NDArray[Any], held: Box, space: Box) -> NDArray[Any]:
        values = stored.astype(self.dtype, copy=False)
        if self.resampling.order == 0 or stored.dtype.kind != "f" or np.isfinite(values).all():
            return self.resampling.apply(values, held, space)
        unknown = ~np.isfinite(values)
        made = self.resampling.apply(np.where(unknown, 0, values), held, space)
        linear = self.resampling.of_order(1)
        made[linear.apply(unknown.astype(np.float32), held, space) > 0] = np.nan
        return made

    @property
    def tells_absent(self) -> bool:
        return False

    def absent(self, cells: Sequence[Box]) -> list[Box]:
        return []

    def normalised_by(self, each: Mapping[tuple[int, int], ChannelValues]) -> ResampledSource:
        """The source with values that are normalised so, and kept within their limits. The other
        source is a `NormalisedSource`."""
        return ResampledSource(self.source.normalised_by(each), self.resampling, each)  # type: ignore[attr-defined]

    def with_cache(self, num_bytes: int) -> ResampledSource:
        return ResampledSource(self.source.with_cache(num_bytes), self.resampling, self.each)


def on_grid(
    source: Source, to: Box, steps: Sequence[float], begins: Sequence[float] | None = None
) -> Source:
    """A source as it would be on another grid.

    Args:
        source: The source.
        to: The box of the grid, z y x.
        steps: Voxels of the source in one of its voxels, along z y x.
        begins: The centre of its voxel 0, in voxels of the source. By default both as a whole begin
            at the same place in the world.

    Returns:
        A copy with another frame, which is not to be read from.
    """
    shown = copy.copy(source)
    if begins is None:
        starts = zip(source.domain.start[2:], steps, to.start, strict=True)
        begins = [start - 0.5 + step * (0.5 - first) for start, step, first in starts]
    shown.domain = source.domain[:2] + to
    sides = zip(source.chunks[2:], steps, to.shape, strict=True)
    chunks = (max(1, min(length, math.ceil(chunk / step))) for chunk, step, length in sides)
    shown.chunks = (*source.chunks[:2], *chunks)
    sizes = source.scale or (1.0,) * 5
    shown.scale = (*sizes[:2], *(a * step for a, step in zip(sizes[2:], steps, strict=True)))
    moved = zip(source.translation[2:], sizes[2:], begins, strict=True)
    shown.translation = (*source.translation[:2], *(a + size * n for a, size, n in moved))
    if (affine := getattr(source, "affine", None)) is not None:
        change = np.diag([*steps[::-1], 1.0])
        change[:3, 3] = begins[::-1]
        shown.affine = (np.array(affine) @ change).tolist()  # type: ignore[attr-defined]
    return shown
