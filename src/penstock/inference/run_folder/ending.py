"""How a running job is asked to end, and the record of how it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...base import Incomplete, PenstockError, describe
from .names import ENDING_FILE


class EndRequest:
    """Asks a running job to end: it reads no more bricks, and writes the blocks that are complete.

    A signal handler may call it, as it never waits.
    """

    def __init__(self) -> None:
        self.why = ""
        """The first that asked, such as SIGTERM; empty while nothing has asked."""
        self._since = 0.0

    def ask(self, why: str) -> None:
        """Ask the job to end.

        Args:
            why: What asks, such as ``SIGTERM``: the subject of the sentence that is printed.
        """
        if not self.why:
            # Before `why`, which other threads look at first.
            self._since = time.monotonic()
            self.why = why

    def check(self, grace_s: float) -> None:
        """Raise `Incomplete` if the job was asked to end more than ``grace_s`` ago."""
        if self.why and time.monotonic() - self._since >= grace_s:
            raise Incomplete(f"{self.why} ended the job; run again with --resume")


@contextlib.contextmanager
def noting_end(save: Callable[[str, Mapping[str, Any]], None]) -> Iterator[None]:
    """If the job fails, save the reason in its run folder; ``save`` writes the file."""
    try:
        yield
    except BaseException as error:
        ours = isinstance(error, PenstockError)
        sentence = describe(error) if ours else f"{type(error).__name__}: {describe(error)}"
        if isinstance(error, KeyboardInterrupt):
            sentence = "interrupted"
        with contextlib.suppress(OSError, PenstockError):
            save(ENDING_FILE, {"time": time.time(), "error": sentence})
        raise
