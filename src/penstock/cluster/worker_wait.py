"""The time in which a job gets on no further: reported once a minute, and limited."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..base import Incomplete, format_seconds

SAY_S = 60.0
"""Seconds between two sentences, after the first one."""
FIRST_S = 10.0


@dataclass(slots=True)
class Waiting:
    """Measures how long no worker has been there, or how long workers have died without progress.

    A worker that dies again and again is there most of the time. So its coming ends no wait: only
    progress does.
    """

    where: str
    """Name of the workers in messages."""
    timeout_s: float = float("inf")
    say: Callable[[str], None] = lambda sentence: None
    died: bool = False
    """True if a worker has died since there was progress."""
    limit: str = ""
    """The memory limit of the last one, as a sentence has it; empty if it had none."""
    _since: float = field(default_factory=lambda: time.monotonic())
    _due: float = float("-inf")

    def progressed(self) -> None:
        """Note that an item is done, or that some of one is saved."""
        self.died = False

    def note(self, present: int) -> None:
        """Note how many workers take items now.

        Args:
            present: Their number.

        Raises:
            Incomplete: The wait has lasted too long.
        """
        now = time.monotonic()
        if present and not self.died:
            self._since = now
            return
        self._due = max(self._due, self._since + FIRST_S)
        waited = format_seconds(now - self._since)
        if now - self._since >= self.timeout_s:
            what = f"workers of {self.where}{self.limit} died, and there was no progress"
            if not self.died:
                what = f"no worker of {self.where} was there"
            raise Incomplete(
                f"{what} for {waited} (--worker-timeout); if the run had begun, --resume "
                "continues it"
            )
        if not present and now >= self._due:
            self._due = now + SAY_S
            self.say(f"waiting for a worker of {self.where}, {waited} so far")
