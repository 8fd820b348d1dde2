"""The order of a job's tasks: its parts, and the joins of what they spill as soon as they can be.

A job of n parts has tasks 0 to n - 1, which compute parts. Where parts spill, task n + p joins the
units of part p that blocks of other parts contribute to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from .parts import Parts


class Turns:
    """The tasks that can be given out now. It ends where none can, and goes on once one is done."""

    def __init__(
        self, parts: Parts, lacking: Mapping[int, int] | None, ended: Callable[[], object]
    ) -> None:
        """Prepare.

        Args:
            parts: The parts of the job.
            lacking: The parts that lack units; None for all.
            ended: A function that is true once no more tasks are to be given out.
        """
        self.parts, self.lacking, self.ended = parts, lacking, ended
        self._ready: deque[int] = deque()
        self._next = 0
        self._sources: dict[int, int] = {}
        """How many parts a part still waits for, of those that some have been done for."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while not self.ended():
            if self._ready:
                return len(self.parts) + self._ready.popleft()
            if self._next == len(self.parts):
                break
            number, self._next = self._next, self._next + 1
            if self._is_wanted(number):
                return number
            self.done(number)
        raise StopIteration

    def done(self, task: int) -> None:
        """Take in that a task is done: joins that waited for it may be ready."""
        if not self.parts.geometry.spills or task >= len(self.parts):
            return
        for other in self.parts.targets(self.parts[task]):
            if not self._lacks(other):
                continue
            if other not in self._sources:
                sources = self.parts.sources(self.parts[other])
                if sources == [other]:  # no other part contributes: none of its units is joined
                    continue
                self._sources[other] = len(sources)
            self._sources[other] -= 1
            if not self._sources[other]:
                del self._sources[other]
                self._ready.append(other)

    def name(self, task: int) -> str:
        """A task for a reader."""
        count = len(self.parts)
        return f"part {task}" if task < count else f"the borders of part {task - count}"

    def _lacks(self, number: int) -> bool:
        return self.lacking is None or number in self.lacking

    def _is_wanted(self, number: int) -> bool:
        """Whether a part lacks units, or others do that it contributes to."""
        if self._lacks(number) or not self.parts.geometry.spills:
            return self._lacks(number)
        return any(map(self._lacks, self.parts.targets(self.parts[number])))
