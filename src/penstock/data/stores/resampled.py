"""A source seen on another grid: voxels are resampled as they are read, box by box.

What is not finite counts as 0 where other voxels are made, and every voxel that is interpolated
from it is NaN.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..resampling import Resampling
from .protocols import BoxReader, Source, source_fingerprint


class ResampledSource(BoxReader):
    """Reads another source on a grid that lies over the same box.

    What it does not say here of itself, such as units and channels, is as in the other source.
    """

    def __init__(self, source: Source, resampling: Resampling, within: Box | None = None) -> None:
        """The outermost voxels of the box ``within`` stand for those beyond it."""
        self.source, self.resampling, self.within = source, resampling, within
        shown = on_grid(source, resampling.to, resampling.steps)
        self.domain, self.scale, self.translation = shown.domain, shown.scale, shown.translation
        self.chunks, self.affine = shown.chunks, getattr(shown, "affine", None)
        self.dtype = source.dtype
        if resampling.order:
            wide = source.dtype.itemsize == 8 or source.dtype.name in ("int32", "uint32")
            self.dtype = np.dtype(np.float64 if wide else np.float32)
        facts = [*resampling.to.start, *resampling.to.shape, resampling.order, resampling.nearest]
        facts += [] if within is None else [*within.start, *within.stop]
        self.fingerprint = source_fingerprint(source.address, source.fingerprint, facts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the object itself, which may be no more than begun
            raise AttributeError(name)
        return getattr(self.__dict__["source"], name)

    def fill(self, box: Box, out: NDArray[Any]) -> None:
        space, held = box[2:], self.resampling.needed(box[2:])
        limits = self.within or self.source.domain[2:]
        ends = zip(held.start, held.stop, limits.start, limits.stop, strict=True)
        places = [np.arange(a, b).clip(low, high - 1) for a, b, low, high in ends]
        first, last = (tuple(int(each[at]) for each in places) for at in (0, -1))
        seen = Box(first, tuple(each + 1 for each in last))
        for t, c in np.ndindex(out.shape[:2]):
            lead = Box.of((box.start[0] + t, box.start[1] + c), (1, 1))
            stored = self.source.read(lead + seen)[0]
            if seen != held:
                at = np.ix_(*(each - low for each, low in zip(places, first, strict=True)))
                stored = stored[:, *at]
            out[t, c] = self._made(stored, held, space)[0]

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

    def with_cache(self, num_bytes: int) -> ResampledSource:
        return ResampledSource(self.source.with_cache(num_bytes), self.resampling, self.within)


def on_grid(source: Source, to: Box, steps: Sequence[float]) -> Source:
    """A source as it would be on another grid that begins at the same place in the world.

    Args:
        source: The source.
        to: The box of the grid, z y x.
        steps: Voxels of the source in one of its voxels, along z y x.

    Returns:
        A copy with another frame, which is not to be read from.
    """
    shown = copy.copy(source)
    of = source.domain[2:]
    shown.domain = source.domain[:2] + to
    sides = zip(source.chunks[2:], steps, to.shape, strict=True)
    chunks = (max(1, min(length, math.ceil(chunk / step))) for chunk, step, length in sides)
    shown.chunks = (*source.chunks[:2], *chunks)
    sizes = source.scale or (1.0,) * 5
    # The centre of voxel 0, in voxels of the source.
    firsts = [
        start - 0.5 + step * (0.5 - first)
        for start, step, first in zip(of.start, steps, to.start, strict=True)
    ]
    shown.scale = (*sizes[:2], *(a * step for a, step in zip(sizes[2:], steps, strict=True)))
    moved = zip(source.translation[2:], sizes[2:], firsts, strict=True)
    shown.translation = (*source.translation[:2], *(a + size * n for a, size, n in moved))
    if (affine := getattr(source, "affine", None)) is not None:
        change = np.diag([*steps[::-1], 1.0])
        change[:3, 3] = firsts[::-1]
        shown.affine = (np.array(affine) @ change).tolist()  # type: ignore[attr-defined]
    return shown
