"""What a tracker is, to those who send it events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .events import Event

Keep = Callable[[str], None]

TRACKING_FOLDER = "track"
"""In a run's folder: what trackers keep there, and how far each has come."""


class Tracker(Protocol):
    """Takes the events of one run. Every method may raise anything."""

    package: str
    where: str
    """For people: a path within the run's folder, or a URL without its login."""
    durable: bool
    """Whether what was sent is there at once, and not only when the tracker was closed."""

    def __init__(self, out: Path, before: Sequence[str] = ()) -> None:
        """``before``: every ``where`` at which the run has begun."""
        ...

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        """Begin a run, or go on with one that began here before; its name at the tracker.

        ``keep`` hears that name as soon as there is one: what fails after it goes on with it.
        """
        ...

    def send(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


def flat(value: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as texts by dotted names; what is not known is left out.

    >>> flat({"launch": {"job_id": "7", "hosts": ["a", "b"]}, "git": None})
    {'launch.job_id': '7', 'launch.hosts': 'a b'}
    """
    texts: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            texts |= flat(item, f"{before}{key}.")
        elif isinstance(item, list | tuple):
            texts[before + key] = " ".join(map(str, item))
        elif item is not None:
            texts[before + key] = str(item)
    return texts
