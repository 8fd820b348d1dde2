"""Reads the channels of a volume, and cuts it into pieces for statistics."""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from ..data import Box, Grid, Source
from .job import Volume

STATISTICS_VOXELS = 2**22
"""Voxels of the pieces in which a volume streams through the histogram."""


def read_channels(source: Source, volume: Volume, box: Box, out: NDArray[Any]) -> None:
    """The channels of a volume over a spatial box into ``out``, shape (channels, z, y, x)."""
    for i, channel in enumerate(volume.channels):
        lead = Box.of((volume.t, channel), (1, 1))
        source.read(lead + box, out[None, i : i + 1])


def pieces_of(source: Source) -> Grid:
    """A volume in boxes of whole chunks, each small enough to hold."""
    domain, step = source.domain[2:], list(source.chunks[2:])
    for axis in (2, 1, 0):
        room = max(1, STATISTICS_VOXELS // math.prod(step))
        step[axis] *= min(room, -(-domain.shape[axis] // step[axis]))
    return Grid(domain, tuple(step), source.grid_origin[2:])
