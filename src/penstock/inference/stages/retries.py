"""Tries failed reads and writes again, after a random wait, and counts them."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ...base import (
    Flow,
    Incomplete,
    PenstockError,
    StageError,
    StoreAway,
    StoreFull,
    append_line,
    describe,
    format_seconds,
    plural,
    scrub,
)
from ...data import is_full, is_transient
from ...instruments import Clock, Probe

FIRST_S = 0.5
"""Longest wait before the second try. It doubles with every try, up to `LONGEST_S`. The wait itself
is random, so that many threads and machines do not come back at the same time."""
LONGEST_S = 30.0

Result = TypeVar("Result")


class Retries:
    """Tries reads and writes again, and counts how often and for how long."""

    def __init__(
        self, limit_s: float, rows: Path | None, clock: Clock, progressed: Callable[[], None]
    ) -> None:
        """``limit_s`` is the longest time in which a store may fail without any success. Each
        failure is a line of the file ``rows``, and a call of ``progressed``."""
        self.limit_s, self.rows, self.clock = limit_s, rows, clock
        self.progressed = progressed
        self.count = 0
        """Failures that were followed by another try."""
        self.seconds = 0.0
        """Seconds of tries that failed and of the waits after them, all threads added up."""
        self._lock = threading.Lock()
        self._away: dict[str, float] = {}
        """Time in seconds of the first failure of each store that has not succeeded since."""

    @property
    def failing_s(self) -> float:
        """Seconds for which the store that fails longest has been failing."""
        since = min(self._away.copy().values(), default=None)
        return 0.0 if since is None else self.clock() - since

    def run(self, flow: Flow, store: str, where: object, work: Callable[[], Result]) -> Result:
        """Do some work with a store, and do it again as long as its errors may pass.

        Args:
            flow: The flow whose failure ends a wait.
            store: The name of the store. Its time begins anew with each success, of any thread.
            where: The place of the work, for the file of retries.
            work: The work, which may be done twice.

        Returns:
            The result of the work.

        Raises:
            StoreAway: The store has failed for `limit_s`.
            StoreFull: The store has no room left.
            Stopped: The flow has failed meanwhile.
        """
        try:
            with saying_full():
                return self._run(flow, store, where, work)
        finally:  # success, or the end of this part: the next one has the full time again
            self._away.pop(store, None)

    def _run(self, flow: Flow, store: str, where: object, work: Callable[[], Result]) -> Result:
        for tries in itertools.count(1):
            began = self.clock()
            try:
                return work()
            except Exception as error:
                if not is_transient(error):
                    raise
                left = self._away.setdefault(store, began) + self.limit_s - self.clock()
                if left <= 0:
                    raise StoreAway(
                        f"{describe(error)}; this went on for {format_seconds(self.limit_s)} and "
                        f"{plural(tries, 'attempt')} (--retry-for); run again with --resume"
                    ) from error
                # The power is bounded: after a thousand tries it would be no float.
                wait = min(left, random.uniform(0, min(LONGEST_S, FIRST_S * 2 ** min(tries, 10))))
                self._note(where, error, tries, self.clock() - began + wait)
            flow.pause(wait)
            self.progressed()
        raise AssertionError

    def _note(self, where: object, error: Exception, tries: int, seconds: float) -> None:
        with self._lock:
            self.count += 1
            self.seconds += seconds
            row = {"time": time.time(), "at": str(where), "try": tries, "error": describe(error)}
            if self.rows is not None:
                # The file only informs: a full disk must not end a job that would survive its
                # store.
                with suppress(OSError), self.rows.open("a+b") as rows:
                    append_line(rows, scrub(json.dumps(row)))


@contextmanager
def saying_full() -> Iterator[None]:
    """Raise `StoreFull` in place of an error which says that a store has no room left."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Incomplete | StageError) or not is_full(error):
            raise
        raise StoreFull(
            f"{describe(error)}; make room there, then run again with --resume"
        ) from error


@contextmanager
def forgoing(what: str) -> Iterator[None]:
    """Warn if a record cannot be written. The job goes on."""
    try:
        yield
    except (OSError, PenstockError) as error:
        why = getattr(error, "strerror", None) or describe(error)
        warnings.warn(f"{what}: {why}", RuntimeWarning, stacklevel=4)


def patiently(limit_s: float, store: str, work: Callable[[], Result]) -> Result:
    """Do some work with a store outside any flow. See `Retries`, also for what is raised."""
    return Retries(limit_s, None, Probe().clock, lambda: None).run(Flow(), store, store, work)
