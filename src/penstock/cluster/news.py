"""The news of a job on a cluster, as they come: events of Dask, and ends of tasks."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

TICK_S = 0.5
"""Seconds that `News.take` waits for the first."""


class News:
    """A queue of pairs: the kind of a piece of news, and what it says.

    Args:
        client: The client of Dask, which calls back in a thread of its own.
        topics: The topics of Dask's events, by the kind that their news get.
    """

    def __init__(self, client: Any, topics: Mapping[str, str]) -> None:
        self._client, self._topics = client, topics
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def subscribe(self) -> None:
        """Take in the events of all topics from now on."""
        for kind, topic in self._topics.items():
            self._client.subscribe_topic(topic, partial(self._put_event, kind))

    def unsubscribe(self) -> None:
        """Take in no more events."""
        for topic in self._topics.values():
            self._client.unsubscribe_topic(topic)

    def put_end(self, task: Any, future: Any) -> None:
        """Add the end of a task, from any thread."""
        self._queue.put(("done", (task, future)))

    def take(self) -> Iterator[tuple[str, Any]]:
        """All news that there are. It waits a moment for the first."""
        with contextlib.suppress(queue.Empty):
            yield self._queue.get(timeout=TICK_S)
            while True:
                yield self._queue.get_nowait()

    def _put_event(self, kind: str, event: tuple[float, Any]) -> None:
        self._queue.put((kind, event[1]))  # behind its time
