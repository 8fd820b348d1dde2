"""The protocol of trackers, which get the events of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .events import Event

Keep = Callable[[str], None]

TRACKING_FOLDER = "track"
"""The folder in a run's folder with the trackers' files, and how far each tracker has come."""


class Tracker(Protocol):
    """Takes the events of one run. Every method may raise any error."""

    package: str
    where: str
    """The place of the run, to be shown to the user: a path (absolute, or relative to the run's
    folder), or a URL without login."""
    durable: bool
    """True if events are stored as soon as `send` returns, not only when the tracker is closed."""

    def __init__(self, out: Path, before: Sequence[str] = (), store: Path | None = None) -> None:
        """Set `where`. Nothing is made and no server is reached yet.

        Args:
            out: The folder of the run.
            before: Every ``where`` at which the run has begun.
            store: The folder of the database that several runs share, None for the user's own.
        """

    def open(self, begin: Event, run: str | None, keep: Keep) -> str:
        """Begin a run, or continue one that began here before.

        Args:
            begin: The first event of the run, with the newest name and tags.
            run: The run's name at the tracker, None if it has not begun there.
            keep: Called with that name as soon as there is one, so that the run keeps it after an
                error.

        Returns:
            The run's name at the tracker.
        """

    def send(self, events: Sequence[Event]) -> None:
        """Send events, in the order of the file."""

    def close(self) -> None:
        """End the run at the tracker; all events were sent."""


def flat(value: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as texts by dotted names, without those that are None.

    Args:
        value: The settings.
        before: A prefix of each name.

    Returns:
        The texts.

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


def words_of(tags: Mapping[str, str]) -> list[str]:
    """Tags as words, for trackers whose tags have no values."""
    return [f"{key}={value}" for key, value in tags.items()]
