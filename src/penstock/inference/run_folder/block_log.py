"""The lines of a log: which blocks are written, and the checksums of each.

    0 2 0 128 5f1c0a9e5f1c0a9e    volume 0, block 2 0 128, a check for each output of the run
    # lost 0 2 0 128              the block is not in the output any more

A check is the checksum of the decoded values, in C order, little-endian and in the dtype of the
output. All checks have the same length, so a torn one is not accepted.

A line that a kill has cut off names no block, which is then written again. To write a block twice
does no harm; to leave one out would.

A set of blocks takes about a bit for each: a job of a petabyte has a hundred million.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, MutableSet, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data import Box

Key = tuple[int, ...]
Checks = tuple[str, ...]
"""A check of a block for each output."""
CHECKSUM = "xxh3_64"
"""The name of the checksum, which is one of the facts of a maker."""
# Blocks are counted from a corner of the chunk grid, which may lie within the volume: then some
# have negative numbers.
_LINE = re.compile(rb"(\d+) (-?\d+) (-?\d+) (-?\d+)((?: [0-9a-f]{16})*)\n")
_LOST = b"# lost "
ENDED_TORN = "?\n"
"""The end that a resume gives to a torn line, as half of "0 1 1 12" would name another block."""


def line_of(key: Key, checks: Iterable[str] = ()) -> str:
    """The line that notes a block."""
    return " ".join([*map(str, key), *checks]) + "\n"


def lost_line(key: Key) -> str:
    """The line that takes a block off the list."""
    return _LOST.decode() + line_of(key)


def read_entries(
    lines: Iterable[bytes], damaged: list[bytes] | None = None, plan: Sequence[range] = ()
) -> Iterator[tuple[Key, Checks | None]]:
    """Yield the block and the checks of each line of a log; None for the checks if the block is
    taken off.

    ``damaged`` takes the lines that cannot be read, or that name a block beyond the ``plan``, which
    is a range for each number of a block.
    """
    for line in lines:
        entry = parse_line(line.removeprefix(_LOST))
        if entry is not None and all(map(range.__contains__, plan, entry[0])):
            yield entry[0], None if line.startswith(_LOST) else entry[1]
        # A line that a resume has ended was cut by a kill, and its block is written again since.
        elif damaged is not None and not line.endswith(ENDED_TORN.encode()):
            damaged.append(line)


def read_lines(
    lines: Iterable[bytes], damaged: list[bytes] | None = None, plan: Sequence[range] = ()
) -> dict[Key, Checks]:
    """The blocks that a log names, and their checks. The arguments are those of `read_entries`."""
    notes: dict[Key, Checks] = {}
    for key, checks in read_entries(lines, damaged, plan):
        if checks is None:
            notes.pop(key, None)
        else:
            notes[key] = checks
    return notes


def is_line(line: bytes) -> bool:
    """Whether a log may have this line, whose end is stripped."""
    return parse_line(line + b"\n") is not None or line[:1] in (b"?", b"#")


def parse_line(line: bytes) -> tuple[Key, Checks] | None:
    """The block that a line names, and its checks. None for any other line."""
    whole = _LINE.fullmatch(line)
    if whole is None:
        return None
    *key, checks = whole.groups()
    return tuple(map(int, key)), tuple(checks.decode().split())


def digest_of(pieces: Iterable[NDArray[Any]]) -> str:
    """The check of values that come in pieces, one after the other in C order."""
    import xxhash  # only here, as who reads logs may lack it

    digest = xxhash.xxh3_64()
    for values in pieces:
        ordered = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        digest.update(ordered.reshape(-1).view(np.uint8).data)  # other threads may run meanwhile
    return digest.hexdigest()


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
