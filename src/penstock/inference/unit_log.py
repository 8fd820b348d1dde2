"""The lines of done.log: which units are written, by which maker, and the checksums of each.

    0 2 0 128 v5f1c0a9e5f1c0a9e   volume 0, unit 2 0 128, a check for each output of the run
    # maker 1                     maker 1 of run.json made the units of the lines below
    # lost 0 2 0 128              the unit is not in the output any more

A check is that of the values as they are decoded: in C order, little-endian, in the dtype of the
output. It begins with f where every value is the fill value of its store, which may then keep no
chunk for the unit, else with v. All checks are equally long, so a torn one is not believed. A line
of a run of an older version has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

Key = tuple[int, ...]
CHECKSUM = "xxh3_64"
"""The name of the checksum, which stands among the facts of a maker."""
_LINE = re.compile(rb"(\d+) (-?\d+) (-?\d+) (-?\d+)((?: [vf][0-9a-f]{16})*)\n")
_MAKER = re.compile(rb"# maker (\d+)\n")
_LOST = b"# lost "


class Note(NamedTuple):
    """What the log says of a unit."""

    maker: int
    """Index of its maker in run.json."""
    checks: tuple[str, ...] = ()
    """A check for each output. Empty for a unit of an older version."""


def line_of(key: Key, checks: Iterable[str] = ()) -> str:
    """The line that notes a unit."""
    return " ".join([*map(str, key), *checks]) + "\n"


def lost_line(key: Key) -> str:
    """The line that takes a unit off the list."""
    return _LOST.decode() + line_of(key)


def read_lines(lines: Iterable[bytes]) -> dict[Key, Note]:
    """The units that a log names. A line that is damaged or not whole says nothing."""
    notes: dict[Key, Note] = {}
    maker = 0
    for line in lines:
        if (named := parse_line(line)) is not None:
            notes[named[0]] = Note(maker, named[1])
        elif (begun := _MAKER.fullmatch(line)) is not None:
            maker = int(begun[1])
        elif line.startswith(_LOST) and (lost := parse_line(line[len(_LOST) :])) is not None:
            notes.pop(lost[0], None)
    return notes


def parse_line(line: bytes) -> tuple[Key, tuple[str, ...]] | None:
    """The unit that a line names, and its checks. None for any other line."""
    whole = _LINE.fullmatch(line)
    if whole is None:
        return None
    *key, checks = whole.groups()
    return tuple(map(int, key)), tuple(checks.decode().split())
