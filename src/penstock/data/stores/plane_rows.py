"""Rows of the planes of an array, in the order in which files hold them and in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray

from ...base import in_order
from ..box import Box
from .protocols import AXES, Source

TILE = 512
"""The side of a tile of a TIFF file."""
DEFLATE_LEVEL = 1
"""The level of deflate: with a predictor, 6 takes 1.5 times as long for files as large."""
CLASSIC_BYTES = 2**32 - 2**26
"""The size, before compression, above which a TIFF file gets 64-bit offsets."""
SCRATCH_SIDE = 2 * TILE
"""The side of a chunk of a scratch array: of one plane, as files hold planes one after another."""
HELD = 5
"""Most pieces that are read, held and written at a time."""


def rows_at_once(chunk: int) -> int:
    """Rows in a piece: whole tiles, and whole chunks where the chunk's rows are whole tiles."""
    return chunk if chunk % TILE == 0 else TILE


def rows_of(
    source: Source, slowest: str, progress: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[Box, NDArray[Any]]]:
    """The planes of an array, some rows at a time.

    Args:
        source: The array.
        slowest: The order of its other axes, such as ``tcz``: the first changes last.
        progress: Told the number of voxels of each piece.

    Yields:
        The box of a piece, and its values along y and x.
    """
    places = [AXES.index(axis) for axis in slowest]
    height, width = source.domain.shape[3:]
    step = rows_at_once(source.chunks[3])

    def boxes() -> Iterator[Box]:
        for index in itertools.product(*(range(source.domain.shape[place]) for place in places)):
            start, shape = [0] * 5, [1] * 3
            for place, number in zip(places, index, strict=True):
                start[place] = number
            for row in range(0, height, step):
                start[3] = row
                yield Box.of(start, (*shape, min(step, height - row), width))

    def read(box: Box) -> tuple[Box, NDArray[Any]]:
        return box, source.read(box)[0, 0, 0]

    for box, rows in in_order(read, boxes(), 1, ahead=1):
        yield box, rows
        progress(box.size)
