"""Watches the work of each thread: a job without progress ends instead of hanging."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...base import Incomplete, StageError, format_seconds
from ...instruments import Clock


class _Work(NamedTuple):
    stage: str
    where: object
    since: float
    """Time of its last progress, in seconds."""


class Watchdog:
    """Records what each thread works on, and when that last made progress."""

    def __init__(self, limit_s: float, stacks: Path | None, clock: Clock) -> None:
        """``limit_s`` is how long a piece of work may go without progress; 0 means no limit. The
        stacks of all threads are written to the file ``stacks``."""
        self.limit_s, self.stacks, self.clock = limit_s, stacks, clock
        self.stalled = False
        """Whether a piece of work has made no progress for too long. Its thread hangs for good."""
        self._works: dict[int, _Work] = {}

    def forget(self) -> None:
        """Stop watching the work that has begun, such as that of a thread that an earlier part of
        the job left behind."""
        self._works = {}

    @contextlib.contextmanager
    def working(self, stage: str, where: object) -> Iterator[None]:
        """Watch a piece of work of this thread, instead of the larger one that it is part of."""
        thread, works = threading.get_ident(), self._works
        outer = works.get(thread)
        works[thread] = _Work(stage, where, self.clock())
        try:
            yield
        finally:
            if outer is None:
                del works[thread]
            else:
                works[thread] = outer._replace(since=self.clock())

    def progressed(self) -> None:
        """Note that the work of this thread goes on."""
        thread = threading.get_ident()
        if (work := self._works.get(thread)) is not None:
            self._works[thread] = work._replace(since=self.clock())

    def check(self) -> None:
        """Raise `StageError` if a piece of work has made no progress for too long."""
        if not self.limit_s:
            return
        # Stitching waits only for other stages, which are watched.
        works = [work for work in list(self._works.values()) if work.stage != "stitch"]
        oldest = min(works, key=lambda work: work.since, default=None)
        if oldest is None or self.clock() - oldest.since <= self.limit_s:
            return
        self.stalled = True
        cause = Incomplete(
            f"no progress for {format_seconds(self.limit_s)} (--stall-timeout)"
            f"{self._dumped()}; run again with --resume"
        )
        raise StageError(oldest.stage, str(oldest.where), cause)

    def _dumped(self) -> str:
        """Write the stacks, and return the words that say where."""
        if self.stacks is None:
            return ""
        try:
            with self.stacks.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return f", and the stacks cannot be written to {self.stacks}: {error.strerror}"
        return f", {self.stacks} has the stack of each thread"
