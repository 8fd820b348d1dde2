"""The order of a job's tasks: its parts, and joins of spilled pieces as soon as these are there.

A job of n parts has tasks 0 to n - 1, which compute parts. Where parts spill, task n + p joins the
units of part p that blocks of other parts contribute to. Task 2 n + p joins those of them whose
pieces are all there, if a part that contributes was given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from ..planning.spill_room import SpillRoom
from ..tiling.parts import Parts


class Turn(NamedTuple):
    """What a task does, and with which part."""

    kind: Literal["part", "join", "salvage"]
    part: int

    def __str__(self) -> str:
        return f"part {self.part}" if self.kind == "part" else f"the borders of part {self.part}"


def turn_of(task: int, parts: Parts) -> Turn:
    """What a task does.

    Args:
        task: The number of the task.
        parts: The parts of the job.

    Returns:
        What it does, and with which part.
    """
    kinds: tuple[Literal["part", "join", "salvage"], ...] = ("part", "join", "salvage")
    kind, part = divmod(task, len(parts))
    return Turn(kinds[kind], part)


class Turns:
    """An iterator over the tasks that can be given out now. It ends if there is none, and goes on
    once a task is done."""

    def __init__(
        self,
        parts: Parts,
        lacking: Mapping[int, int] | None,
        ended: Callable[[], object],
        room: SpillRoom | None = None,
    ) -> None:
        """Prepare.

        Args:
            parts: The parts of the job.
            lacking: The parts that lack units; None for all.
            ended: A function that is true once no more tasks are to be given out.
            room: The room for spilled pieces; None for no limit.
        """
        self.parts, self.lacking, self.ended, self.room = parts, lacking, ended, room
        self._ready: deque[int] = deque()
        self._next = self._under_way = 0
        self._sources: dict[int, int] = {}
        """Number of parts that a part still waits for, once one that it waits for is done."""
        self._spoilt: set[int] = set()
        """Parts that lack the pieces of a part that was given up."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while not self.ended():
            if self._ready:
                self._under_way += 1
                return self._ready.popleft()
            number = self._next
            if number == len(self.parts):
                break
            if not self._is_wanted(number):
                self._next += 1
                self._settle(number)
            elif self._fits(number):
                self._next += 1
                self._under_way += 1
                return number
            else:  # joins under way will make room
                break
        raise StopIteration

    @property
    def is_stuck(self) -> bool:
        """Whether parts are left for which spilled pieces leave no room."""
        return not self.ended() and not self._ready and self._next < len(self.parts)

    def done(self, task: int) -> None:
        """Note that a task is done. Joins that waited for it may be ready now."""
        self._under_way -= 1
        kind, number = turn_of(task, self.parts)
        if kind == "part":
            self._settle(number)
        elif self.room is not None:
            self.room.free(number, whole=kind == "join")

    def given_up(self, task: int) -> None:
        """Note that a task is given up. Pieces that a part has spilled may still be joined."""
        self._under_way -= 1
        kind, number = turn_of(task, self.parts)
        if kind == "part" and self.parts.geometry.spills:
            self._spoilt.update(self.parts.targets(self.parts[number]))
            if self.room is not None:
                self.room.give_up(number)
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Note that a part spills nothing more. The joins that waited only for it are ready."""
        if not self.parts.geometry.spills:
            return
        for other in self._targets(number):
            if other not in self._sources:
                sources = self.parts.sources(self.parts[other])
                if sources == [other]:  # no other part contributes: none of its units is joined
                    continue
                self._sources[other] = len(sources)
            self._sources[other] -= 1
            if not self._sources[other]:
                del self._sources[other]
                self._ready.append(len(self.parts) * (2 if other in self._spoilt else 1) + other)

    def _fits(self, number: int) -> bool:
        """Whether there is room for what a part spills. If so, the room is reserved."""
        if self.room is None:
            return True
        return self.room.take(number, self._targets(number), alone=not self._under_way)

    def _targets(self, number: int) -> list[int]:
        """The parts that a part contributes to and that lack units."""
        return [other for other in self.parts.targets(self.parts[number]) if self._lacks(other)]

    def _lacks(self, number: int) -> bool:
        return self.lacking is None or number in self.lacking

    def _is_wanted(self, number: int) -> bool:
        """Whether the part, or one that it contributes to, lacks units."""
        if self._lacks(number) or not self.parts.geometry.spills:
            return self._lacks(number)
        return bool(self._targets(number))
