"""Named pieces of work, such as scenes, each done whole by one task.

A worker does one piece at a time, so a worker that dies is held against one piece only.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..base import Incomplete, OnCluster, UsageError, plural
from .absence import Absence
from .tasks import TaskFailure, Tasks, UnfitWorker, tell_begun, worker_notes
from .workers import Workers, connected

REASONS = 3
"""Pieces whose reasons an error tells; it names all."""


@dataclass(frozen=True, slots=True)
class _Order:
    topic: str
    function: Callable[[Any], Any]
    work: Any
    versions: Mapping[str, str]
    """The versions of the client; empty where a worker may run anything."""


class NamedTasks:
    """Gives named pieces of work to the workers of a cluster, one at a time to each."""

    def __init__(
        self, workers: Workers, knobs: OnCluster, kind: str, libraries: Sequence[str]
    ) -> None:
        """Prepare.

        Args:
            workers: The workers.
            knobs: How often a piece is tried again, and how many may fail.
            kind: What a piece is, such as ``scene``.
            libraries: Distributions whose versions decide what a piece gives.
        """
        self.workers, self.kind, self._knobs = workers, kind, knobs
        self._rounds: list[Tasks] = []
        self._versions = {} if knobs.mixed_arithmetic else versions_of(libraries)

    def run(
        self,
        function: Callable[[Any], Any],
        names: Sequence[str],
        work_of: Callable[[str], Any],
        go_on: str,
    ) -> Iterator[tuple[str, Any]]:
        """Do all pieces, and yield each as it is done, in any order.

        Args:
            function: Does a piece. A worker can import it, and it leaves the same however often it
                is called.
            names: The names of the pieces.
            work_of: What ``function`` is called with, by the name of the piece.
            go_on: How the rest is done later, for an error.

        Yields:
            The name of a piece, and what ``function`` returned.

        Raises:
            UsageError: More pieces than may fail cannot be done as asked.
            Incomplete: Pieces were given up. The error names them.
        """
        topic, failed, done = f"penstock-{uuid.uuid4().hex[:12]}", dict[str, str](), 0

        def order_of(number: int) -> _Order:
            return _Order(topic, function, work_of(names[number]), self._versions)

        tasks = Tasks(self.workers, run_alone, order_of, topic, self._knobs.part_retries)
        self._rounds.append(tasks)
        for outcome in tasks.run(range(len(names)), lambda word: None):
            name = names[outcome.number]
            if not isinstance(outcome.result, TaskFailure):
                done += 1
                yield name, outcome.result
                continue
            failed[name] = outcome.result.sentence
            if len(failed) > self._knobs.max_failed_parts:
                if outcome.result.exit_code == UsageError.exit_code:
                    raise UsageError(outcome.result.sentence)
                break
        if failed:
            raise Incomplete(self._sentence(failed, len(names) - done - len(failed), go_on))

    def notes(self) -> list[str]:
        """What a reader of the results should know of the workers."""
        return [*worker_notes(self._rounds, self.kind)]

    def _sentence(self, failed: Mapping[str, str], left: int, go_on: str) -> str:
        items = [*failed.items()]
        reasons = [f"{name}: {why}" for name, why in items[:REASONS]]
        reasons += [name for name, _ in items[REASONS:]]
        rest = f", and {left} more not done" if left else ""
        return f"{plural(len(failed), self.kind)} failed ({'; '.join(reasons)}){rest}; {go_on}"


@contextlib.contextmanager
def named_tasks_on(
    knobs: OnCluster,
    kind: str,
    libraries: Sequence[str],
    say: Callable[[str], None],
    gpus: int = 0,
) -> Iterator[NamedTasks | None]:
    """The workers that ``--cluster`` names, until the context ends.

    Args:
        knobs: The workers, how often a piece is tried again, and how many may fail.
        kind: What a piece is, such as ``scene``.
        libraries: Distributions whose versions decide what a piece gives.
        say: Called now and then with a sentence, while there is no worker.
        gpus: GPUs of this machine that local workers take, one each.

    Yields:
        What gives them pieces of work; None without ``--cluster``.

    Raises:
        UsageError: The address is none, or no scheduler answers there.
        Incomplete: No worker came.
    """
    if knobs.cluster is None:
        yield None
        return
    absence = Absence(knobs.worker_timeout, say)
    with connected(knobs.cluster, gpus, absence=absence) as workers:
        workers.wait()
        yield NamedTasks(workers, knobs, kind, libraries)


_ONE_AT_A_TIME = threading.Lock()


def run_alone(order_of_task: _Order, number: int) -> Any:
    """Do a piece on a worker once it does no other.

    Args:
        order_of_task: The piece.
        number: Its number.

    Returns:
        What its function returns.

    Raises:
        UnfitWorker: This worker runs other versions than the client.
    """
    mine = versions_of(order_of_task.versions)
    for name, version in order_of_task.versions.items():
        if mine.get(name, version) != version:
            raise UnfitWorker(
                f"the worker on {platform.node()} has {name} {mine[name]}, not {version}; "
                "--mixed-arithmetic takes such workers as well"
            )
    with _ONE_AT_A_TIME:
        tell_begun(order_of_task.topic, number)
        return order_of_task.function(order_of_task.work)


def versions_of(libraries: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """The versions of Python and of the libraries that are installed here."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in libraries:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
