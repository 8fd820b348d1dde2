"""The time without any worker: reported once a minute, and limited."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..base import Incomplete, format_seconds

SAY_S = 60.0
"""Seconds between two sentences, after the first one."""
FIRST_S = 10.0


@dataclass(slots=True)
class Absence:
    """Measures how long there has been no worker."""

    timeout_s: float = float("inf")
    say: Callable[[str], None] = lambda sentence: None
    why: Callable[[], str] = lambda: ""
    """Function that says what asked the job to end; empty if nothing did."""
    _since: float | None = None
    _due: float = field(default=0.0)

    def note(self, lanes: int, where: str, standing: str | None) -> None:
        """Note how many tasks can run now.

        Args:
            lanes: Their number.
            where: The workers, in words.
            standing: The states of the workers' jobs, if known.

        Raises:
            Incomplete: No task can run, and the job was asked to end or has waited too long.
        """
        now = time.monotonic()
        if lanes:
            self._since = None
            return
        if self._since is None:
            self._since, self._due = now, now + FIRST_S
        if why := self.why():
            raise Incomplete(f"{why} ended the job while it waited for a worker")
        waited = format_seconds(now - self._since)
        if now - self._since >= self.timeout_s:
            raise Incomplete(
                f"no worker of {where} was there for {waited} (--worker-timeout); if the run had "
                "begun, --resume continues it"
            )
        if now >= self._due:
            self._due = now + SAY_S
            more = f" ({standing})" if standing else ""
            self.say(f"waiting for a worker of {where}, {waited} so far{more}")
