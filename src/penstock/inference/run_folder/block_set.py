"""A set of blocks that takes about a bit for each: a job of a petabyte has a hundred million."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from itertools import product
from typing import Any

from ...data import Box
from .block_log import Key

_BITS = 512
"""Blocks of a row along x whose bits are one number."""


class BlockSet(MutableSet[Key]):
    """Blocks, each (volume, z, y, x). Those of a row along x are the bits of one number."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._rows: dict[Key, int] = {}
        for key in keys:
            self.add(key)

    def __contains__(self, key: Any) -> bool:
        row, bit = _place(key)
        return bool(self._rows.get(row, 0) >> bit & 1)

    def __iter__(self) -> Iterator[Key]:
        for (*row, piece), bits in self._rows.items():
            while bits:
                last = bits.bit_length() - 1
                bits ^= 1 << last
                yield (*row, piece * _BITS + last)

    def __len__(self) -> int:
        return sum(map(int.bit_count, self._rows.values()))

    def add(self, key: Key) -> None:
        row, bit = _place(key)
        self._rows[row] = self._rows.get(row, 0) | 1 << bit

    def discard(self, key: Key) -> None:
        row, bit = _place(key)
        self._rows[row] = self._rows.get(row, 0) & ~(1 << bit)

    def update(self, other: BlockSet) -> None:
        """Add the blocks of another set."""
        for row, bits in other._rows.items():
            before = self._rows.get(row, 0)
            self._rows[row] = before | bits if before else bits  # the number is shared

    def count(self, volume: int, box: Box) -> int:
        """Number of blocks of a volume in a box of indices."""
        *lines, (first, stop) = zip(box.start, box.stop, strict=True)
        count = 0
        for piece in range(first // _BITS, -(-stop // _BITS)):
            low, high = max(0, first - piece * _BITS), min(_BITS, stop - piece * _BITS)
            mask = (1 << high) - (1 << low)
            rows = ((volume, z, y, piece) for z, y in product(*(range(*line) for line in lines)))
            count += sum((self._rows.get(row, 0) & mask).bit_count() for row in rows)
        return count


def _place(key: Key) -> tuple[Key, int]:
    """The row of a block, and its bit there."""
    *row, x = key
    return (*row, x // _BITS), x % _BITS
