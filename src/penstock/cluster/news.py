"""The news of a job on a cluster, in the order of arrival: events of Dask, and ends of tasks."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

TICK_S = 0.5
"""Most seconds that `News.take` waits for the first piece of news."""


class News:
    """A queue of pairs: the kind of a piece of news, and its content.

    Args:
        client: The Dask client, which calls back in a thread of its own.
        topics: Topics of Dask's events by the kind of their news.
    """

    def __init__(self, client: Any, topics: Mapping[str, str]) -> None:
        self._client, self._topics = client, topics
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def subscribe(self) -> None:
        """Receive the events of all topics from now on."""
        for kind, topic in self._topics.items():
            self._client.subscribe_topic(topic, partial(self._put_event, kind))

    def unsubscribe(self) -> None:
        """Receive no more events."""
        for topic in self._topics.values():
            self._client.unsubscribe_topic(topic)

    def put_end(self, task: Any, future: Any) -> None:
        """Add the end of a task, from any thread."""
        self._queue.put(("done", (task, future)))

    def take(self) -> Iterator[tuple[str, Any]]:
        """Yield all news in the queue. Waits up to `TICK_S` for the first."""
        with contextlib.suppress(queue.Empty):
            yield self._queue.get(timeout=TICK_S)
            while True:
                yield self._queue.get_nowait()

    def _put_event(self, kind: str, event: tuple[float, Any]) -> None:
        self._queue.put((kind, event[1]))  # event is (time, content)
