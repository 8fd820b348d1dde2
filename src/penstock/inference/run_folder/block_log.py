"""The lines of a log: which blocks are written, by which maker, and the checksums of each.

    # maker {"code": "1f0c", ...} the maker of the blocks below; before the first such line, it is
                                  the first of run.json
    0 2 0 128 v5f1c0a9e5f1c0a9e   volume 0, block 2 0 128, a check for each output of the run
    # lost 0 2 0 128              the block is not in the output any more

A check is the checksum of the decoded values, in C order, little-endian and in the dtype of the
output. It begins with f if every value is the fill value of the store, which may then hold no chunk
for the block, else with v. All checks have the same length, so a torn one is not accepted.

A line that a kill has cut off names no block, which is then written again. To write a block twice
does no harm; to leave one out would.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Key = tuple[int, ...]
CHECKSUM = "xxh3_64"
"""The name of the checksum, which is one of the facts of a maker."""
_LINE = re.compile(rb"(\d+) (-?\d+) (-?\d+) (-?\d+)((?: [vf][0-9a-f]{16})*)\n")
_MAKER = b"# maker "
_LOST = b"# lost "
ENDED_TORN = "?\n"
"""The end that a resume gives to a torn line, as half of "0 1 1 12" would name another block."""


class Note(NamedTuple):
    """What the log says of a block."""

    maker: int
    """Index of its maker. Those of run.json come first, then those that only logs name."""
    checks: tuple[str, ...] = ()
    """A check for each output."""


def line_of(key: Key, checks: Iterable[str] = ()) -> str:
    """The line that notes a block."""
    return " ".join([*map(str, key), *checks]) + "\n"


def lost_line(key: Key) -> str:
    """The line that takes a block off the list."""
    return _LOST.decode() + line_of(key)


def maker_line(maker: Mapping[str, Any]) -> str:
    """The line that names the maker of the blocks below it."""
    return f"{_MAKER.decode()}{json.dumps(maker)}\n"


def read_entries(
    lines: Iterable[bytes], makers: list[dict[str, Any]], damaged: list[bytes] | None = None
) -> Iterator[tuple[Key, Note | None]]:
    """Yield the block and the note of each line of a log. It has no note if it is taken off.

    Args:
        lines: The lines.
        makers: The makers of run.json. Those that only the log names are added to them.
        damaged: Takes the lines that cannot be read.
    """
    maker = 0
    for line in lines:
        if (named := parse_line(line)) is not None:
            yield named[0], Note(maker, named[1])
        elif (lost := parse_line(line.removeprefix(_LOST))) is not None:
            yield lost[0], None
        elif (described := _parse_maker(line)) is not None:
            if described not in makers:
                makers.append(described)
            maker = makers.index(described)
        elif damaged is not None and not line.endswith(ENDED_TORN.encode()):
            damaged.append(line)


def read_lines(
    lines: Iterable[bytes],
    makers: list[dict[str, Any]] | None = None,
    damaged: list[bytes] | None = None,
) -> dict[Key, Note]:
    """The blocks that a log names. The arguments are those of `read_entries`."""
    notes: dict[Key, Note] = {}
    for key, note in read_entries(lines, [{}] if makers is None else makers, damaged):
        if note is None:
            notes.pop(key, None)
        else:
            notes[key] = note
    return notes


def _parse_maker(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        return dict(json.loads(line.removeprefix(_MAKER))) if line.startswith(_MAKER) else None
    return None


def is_line(line: bytes) -> bool:
    """Whether a log may have this line, whose end is stripped."""
    return parse_line(line + b"\n") is not None or line[:1] in (b"?", b"#")


def parse_line(line: bytes) -> tuple[Key, tuple[str, ...]] | None:
    """The block that a line names, and its checks. None for any other line."""
    whole = _LINE.fullmatch(line)
    if whole is None:
        return None
    *key, checks = whole.groups()
    return tuple(map(int, key)), tuple(checks.decode().split())
