"""The lines of done.log: which units are written, by which maker, and the checksums of each.

    0 2 0 128 v5f1c0a9e5f1c0a9e   volume 0, unit 2 0 128, a check for each output of the run
    # maker 1                     maker 1 of run.json made the units of the lines below
    # maker {"code": "1f0c", ...} the same, for a maker that run.json need not name
    # lost 0 2 0 128              the unit is not in the output any more

A check is the checksum of the decoded values, in C order, little-endian and in the dtype of the
output. It begins with f if every value is the fill value of the store, which may then hold no chunk
for the unit, else with v. All checks have the same length, so a torn one is not accepted. Lines of
older versions have none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Key = tuple[int, ...]
CHECKSUM = "xxh3_64"
"""The name of the checksum, which is one of the facts of a maker."""
_LINE = re.compile(rb"(\d+) (-?\d+) (-?\d+) (-?\d+)((?: [vf][0-9a-f]{16})*)\n")
_MAKER = re.compile(rb"# maker (?:(\d+)|({.*}))\n")
_LOST = b"# lost "


class Note(NamedTuple):
    """What the log says of a unit."""

    maker: int
    """Index of its maker. Those of run.json come first, then those that only logs name."""
    checks: tuple[str, ...] = ()
    """A check for each output. Empty for a unit of an older version."""


def line_of(key: Key, checks: Iterable[str] = ()) -> str:
    """The line that notes a unit."""
    return " ".join([*map(str, key), *checks]) + "\n"


def lost_line(key: Key) -> str:
    """The line that takes a unit off the list."""
    return _LOST.decode() + line_of(key)


def maker_line(maker: Mapping[str, Any]) -> str:
    """The line that names the maker of the units below it."""
    return f"# maker {json.dumps(maker)}\n"


def read_lines(
    lines: Iterable[bytes], makers: list[dict[str, Any]] | None = None
) -> dict[Key, Note]:
    """The units that a log names. Damaged and incomplete lines are ignored.

    ``makers`` are those of run.json; the log's own are added to them.
    """
    notes: dict[Key, Note] = {}
    for key, note in read_entries(lines, [{}] if makers is None else makers):
        if note is None:
            notes.pop(key, None)
        else:
            notes[key] = note
    return notes


def read_entries(
    lines: Iterable[bytes], makers: list[dict[str, Any]]
) -> Iterator[tuple[Key, Note | None]]:
    """Yield the unit and the note of each line of a log. The note is None if the unit is taken off.

    ``makers`` as in `read_lines`.
    """
    maker = 0
    for line in lines:
        if (named := parse_line(line)) is not None:
            yield named[0], Note(maker, named[1])
        elif (begun := _MAKER.fullmatch(line)) is not None:
            maker = int(begun[1]) if begun[1] else _index_of(begun[2], makers)
        elif line.startswith(_LOST) and (lost := parse_line(line[len(_LOST) :])) is not None:
            yield lost[0], None


def _index_of(text: bytes, makers: list[dict[str, Any]]) -> int:
    """The index of a maker that a log describes. A new one is added."""
    try:
        maker = json.loads(text)
    except ValueError:  # damaged: the maker is not known
        maker = {}
    if maker not in makers:
        makers.append(maker)
    return makers.index(maker)


def parse_line(line: bytes) -> tuple[Key, tuple[str, ...]] | None:
    """The unit that a line names, and its checks. None for any other line."""
    whole = _LINE.fullmatch(line)
    if whole is None:
        return None
    *key, checks = whole.groups()
    return tuple(map(int, key)), tuple(checks.decode().split())
