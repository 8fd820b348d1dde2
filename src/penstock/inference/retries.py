"""Reads and writes that fail for a while are tried again, after a random wait, and counted."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..base import Flow, Incomplete, describe, format_seconds, plural, scrub
from ..data import is_transient
from ..instruments import Clock

FIRST_S = 0.5
"""Longest wait before the second try. It doubles with every try, up to `LONGEST_S`; how long the
wait is, is drawn anew each time, so that many threads and machines do not come back at once."""
LONGEST_S = 30.0

Result = TypeVar("Result")


class Retries:
    """Tries reads and writes again, and counts how often and for how long."""

    def __init__(
        self, limit_s: float, rows: Path | None, clock: Clock, progressed: Callable[[], None]
    ) -> None:
        """``limit_s`` is how long one read or write may go on failing. Each failure is a line of
        the file ``rows``, and a call of ``progressed``."""
        self.limit_s, self.rows, self.clock = limit_s, rows, clock
        self.progressed = progressed
        self.count = 0
        """Failures that were followed by another try."""
        self.seconds = 0.0
        """Seconds of tries that failed and of the waits after them, all threads added up."""
        self._lock = threading.Lock()
        self._failing: dict[int, float] = {}
        """The second in which each thread began the work that fails now."""

    @property
    def failing_s(self) -> float:
        """Seconds for which a read or a write has been failing, the longest of any thread."""
        since = min(self._failing.copy().values(), default=None)
        return 0.0 if since is None else self.clock() - since

    def run(self, flow: Flow, where: object, work: Callable[[], Result]) -> Result:
        """Do some work, and do it again as long as its errors may pass.

        Args:
            flow: The flow whose failure ends a wait.
            where: The place of the work, for the record.
            work: The work, which may be done twice.

        Returns:
            The result of the work.

        Raises:
            Incomplete: It has failed for `limit_s`.
            Stopped: The flow has failed meanwhile.
        """
        try:
            return self._run(flow, where, work)
        finally:
            self._failing.pop(threading.get_ident(), None)

    def _run(self, flow: Flow, where: object, work: Callable[[], Result]) -> Result:
        first, tries = self.clock(), 0
        while True:
            began = self.clock()
            try:
                return work()
            except Exception as error:
                if not is_transient(error):
                    raise
                tries += 1
                self._failing[threading.get_ident()] = first
                left = first + self.limit_s - self.clock()
                if left <= 0:
                    raise Incomplete(
                        f"{describe(error)}; it went on so for {format_seconds(self.limit_s)} and "
                        f"{plural(tries, 'attempt')} (--retry-for); run again with --resume"
                    ) from error
                wait = min(left, random.uniform(0, min(LONGEST_S, FIRST_S * 2 ** min(tries, 10))))
                self._note(where, error, tries, self.clock() - began + wait)
            flow.pause(wait)
            self.progressed()

    def _note(self, where: object, error: Exception, tries: int, seconds: float) -> None:
        with self._lock:
            self.count += 1
            self.seconds += seconds
            row = {"time": time.time(), "at": str(where), "try": tries, "error": describe(error)}
            if self.rows is not None:
                with suppress(OSError), self.rows.open("a") as rows:
                    rows.write(scrub(json.dumps(row)) + "\n")
