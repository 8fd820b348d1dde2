"""The lines of a log: which blocks are written, and the checksums of each.

    0 2 0 128 5f1c0a9e5f1c0a9e    volume 0, block 2 0 128, a check for each output of the run
    # lost 0 2 0 128              the block is not in the output any more

A check is the checksum of the decoded values, in C order, little-endian and in the dtype of the
output. All checks have the same length, so a torn one is not accepted.

A line that a kill has cut off names no block, which is then written again. To write a block twice
does no harm; to leave one out would.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, ...]
Checks = tuple[str, ...]
"""A check of a block for each output."""
CHECKSUM = "xxh3_64"
"""The name of the checksum, which is one of the facts of a maker."""
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
    lines: Iterable[bytes], damaged: list[bytes] | None = None
) -> Iterator[tuple[Key, Checks | None]]:
    """Yield the block and the checks of each line of a log; None for the checks if the block is
    taken off.

    ``damaged`` takes the lines that cannot be read.
    """
    for line in lines:
        if (named := parse_line(line)) is not None:
            yield named
        elif (lost := parse_line(line.removeprefix(_LOST))) is not None:
            yield lost[0], None
        elif damaged is not None and not line.endswith(ENDED_TORN.encode()):
            damaged.append(line)


def read_lines(lines: Iterable[bytes], damaged: list[bytes] | None = None) -> dict[Key, Checks]:
    """The blocks that a log names, and their checks. The arguments are those of `read_entries`."""
    notes: dict[Key, Checks] = {}
    for key, checks in read_entries(lines, damaged):
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
