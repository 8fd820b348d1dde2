"""Reads the logs of all processes of a run as they grow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from .unit_log import Key, Note, read_entries, read_lines
from .unit_set import UnitSet


class Notes(ABC):
    """The logs of a run, each read on from where the last look ended.

    A read gives the units noted since the last one; the first read gives all. Later reads do not
    know the makers of units. Units are not taken off the list while a run is at work, so what an
    earlier read gave stays true.
    """

    def __init__(self, makers: list[dict[str, Any]]) -> None:
        """``makers`` are those of run.json. Makers that only logs name are added to them."""
        self.makers = makers

    @abstractmethod
    def _logs(self) -> Iterator[Iterable[bytes]]:
        """Yield the new lines of each log. They are read before the next log is asked for."""

    def fresh(self) -> dict[Key, Note]:
        """The new units and their notes. Each takes some hundred bytes."""
        notes: dict[Key, Note] = {}
        for lines in self._logs():
            notes |= read_lines(lines, self.makers)
        return notes

    def units(self) -> UnitSet:
        """The new units."""
        every = UnitSet()
        for made in self._made():
            for units in made.values():
                every.update(units)
        return every

    def counts(self) -> Counter[int]:
        """Number of new units of each maker. A unit that two have made counts for the first."""
        every, counts = UnitSet(), Counter[int]()
        for made in self._made():
            for maker, units in made.items():
                before = len(every)
                every.update(units)
                counts[maker] += len(every) - before
        return +counts

    def _made(self) -> Iterator[dict[int, UnitSet]]:
        """The new units of each log, by their makers."""
        for lines in self._logs():
            made: dict[int, UnitSet] = defaultdict(UnitSet)
            for key, note in read_entries(lines, self.makers):
                if note is not None:
                    made[note.maker].add(key)
                    continue
                for units in made.values():
                    units.discard(key)
            yield made
