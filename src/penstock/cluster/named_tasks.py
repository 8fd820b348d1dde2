"""Named pieces of work, such as scenes, each done whole by one task.

A worker does one piece at a time, so its death counts against one piece only.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from ..base import Incomplete, OnCluster, OnWorkers, UsageError, plural
from .absence import Absence
from .task_side import TaskFailure, UnfitWorker, tell_begun
from .tasks import Tasks, worker_notes
from .workers import Workers, connected

REASONS = 3
"""Most pieces whose reasons an error gives. It names all pieces."""
Holder = Callable[[Any], contextlib.AbstractContextManager[object]]
"""A function from the work of a piece to the context that a worker holds while it does the
piece."""
Piece = TypeVar("Piece")


def nothing(work: Any) -> contextlib.AbstractContextManager[object]:
    """A context that does nothing."""
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _TaskOrder:
    topic: str
    function: Callable[[Any], Any]
    work: Any
    holding: Holder
    versions: Mapping[str, str]
    """Versions of the client by library; empty if a worker may have any versions."""
    cure: str
    """End of the error for a worker with other versions: what to do."""


class NamedTasks:
    """Gives named pieces of work to the workers of a cluster, one at a time to each."""

    def __init__(
        self, workers: Workers, knobs: OnWorkers, kind: str, libraries: Sequence[str]
    ) -> None:
        """Prepare to give out pieces.

        Args:
            workers: The workers.
            knobs: How often a piece is tried again, and how many may fail.
            kind: What a piece is, such as ``scene``.
            libraries: Distributions whose versions decide what a piece gives.
        """
        self.workers, self.kind, self._knobs = workers, kind, knobs
        self._rounds: list[Tasks] = []
        self._most_failed, mixed, self._cure = 0, False, ""
        if isinstance(knobs, OnCluster):
            self._most_failed, mixed = knobs.max_failed_parts, knobs.mixed_arithmetic
            self._cure = "; --mixed-arithmetic takes such workers as well"
        self._versions = {} if mixed else versions_of(libraries)

    def run(
        self,
        function: Callable[[Any], Any],
        names: Sequence[str],
        work_of: Callable[[str], Any],
        go_on: str,
    ) -> Iterator[tuple[str, Any]]:
        """Do all pieces, and yield each when it is done, in any order.

        Args:
            function: Does a piece. Workers must be able to import it, and calling it again must
                leave the same result.
            names: The names of the pieces.
            work_of: From the name of a piece, the argument of ``function``.
            go_on: The end of an error: how to do the rest later.

        Yields:
            The name of a piece, and what ``function`` returned.

        Raises:
            UsageError: More pieces failed than may fail, because they cannot be done as asked.
            Incomplete: Pieces were given up. The error names them.
        """
        failed, done = dict[str, str](), 0
        for name, result in self.outcomes(function, names, work_of):
            if not isinstance(result, TaskFailure):
                done += 1
                yield name, result
                continue
            failed[name] = result.sentence
            if len(failed) > self._most_failed:
                if result.exit_code == UsageError.exit_code:
                    raise UsageError(result.sentence)
                break
        if failed:
            raise Incomplete(self._sentence(failed, len(names) - done - len(failed), go_on))

    def outcomes(
        self,
        function: Callable[[Any], Any],
        pieces: Iterable[Piece],
        work_of: Callable[[Piece], Any],
        holding: Holder = nothing,
    ) -> Iterator[tuple[Piece, Any]]:
        """Do all pieces, and yield each when it is done or given up, in any order.

        Args:
            function: Does a piece; see `run`.
            pieces: The pieces, taken one by one as workers need them.
            work_of: What ``function`` is called with.
            holding: The context that a worker holds while it does a piece.

        Yields:
            The piece, and what ``function`` returned or a `TaskFailure`.

        Raises:
            Incomplete: No worker is there, and the time to wait for one is over.
        """
        topic, taken = f"penstock-{uuid.uuid4().hex[:12]}", list[Piece]()

        def order_of(number: int) -> _TaskOrder:
            work = work_of(taken[number])
            return _TaskOrder(topic, function, work, holding, self._versions, self._cure)

        def numbers() -> Iterator[int]:
            for number, piece in enumerate(pieces):
                taken.append(piece)
                yield number

        tasks = Tasks(self.workers, run_alone, order_of, topic, self._knobs.part_retries)
        self._rounds.append(tasks)
        for outcome in tasks.run(numbers(), lambda word: None):
            yield taken[outcome.number], outcome.result

    def notes(self) -> list[str]:
        """Sentences on the workers that matter for the results."""
        return [*worker_notes(self._rounds, self.kind)]

    def _sentence(self, failed: Mapping[str, str], left: int, go_on: str) -> str:
        items = [*failed.items()]
        reasons = [f"{name}: {why}" for name, why in items[:REASONS]]
        reasons += [name for name, _ in items[REASONS:]]
        rest = f", and {left} more not done" if left else ""
        return f"{plural(len(failed), self.kind)} failed ({'; '.join(reasons)}){rest}; {go_on}"


@contextlib.contextmanager
def named_tasks_on(
    knobs: OnWorkers,
    kind: str,
    libraries: Sequence[str],
    say: Callable[[str], None],
    gpus: int = 0,
) -> Iterator[NamedTasks | None]:
    """Use the workers that ``--cluster`` names, until the context ends.

    Args:
        knobs: The workers, how often a piece is tried again, and how many may fail.
        kind: What a piece is, such as ``scene``.
        libraries: Distributions whose versions decide what a piece gives.
        say: Called once a minute with a sentence while there is no worker.
        gpus: GPUs of this machine that local workers take, one each.

    Yields:
        An object that gives them pieces of work; None without ``--cluster``.

    Raises:
        UsageError: The address is not valid, or no scheduler answers there.
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


def run_alone(order_of_task: _TaskOrder, number: int) -> Any:
    """Do a piece on a worker, after its other piece has ended.

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
                f"the worker on {platform.node()} has {name} {mine[name]}, not {version}"
                f"{order_of_task.cure}"
            )
    with _ONE_AT_A_TIME, order_of_task.holding(order_of_task.work):
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
