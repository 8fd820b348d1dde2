"""Named pieces of work, such as scenes: all of them are done by workers, or named in an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..base import Incomplete, UsageError, plural
from .front import share
from .items import FailedItem
from .workers import Workers

REASONS = 3
"""Most pieces whose reasons an error gives. It names all pieces."""


def share_pieces(
    workers: Workers,
    function: Callable[[Any], Any],
    names: Sequence[str],
    work_of: Callable[[str], Any],
    kind: str,
    go_on: str,
) -> Iterator[tuple[str, Any]]:
    """Do all pieces on workers, and yield each when it is done, in any order.

    Args:
        workers: The workers, as `connect` yields them.
        function: Does a piece; see `share`.
        names: The names of the pieces.
        work_of: From the name of a piece, the argument of ``function``.
        kind: What a piece is, such as ``scene``.
        go_on: The end of an error: how to do the rest later.

    Yields:
        The name of a piece, and what ``function`` returned.

    Raises:
        UsageError: More pieces failed than may fail, because they cannot be done as asked.
        Incomplete: Pieces were given up. The error names them.
    """
    failed, done = dict[str, str](), 0
    for name, value in share(workers, function, names, work_of=work_of):
        if not isinstance(value, FailedItem):
            done += 1
            yield name, value
            continue
        failed[name] = value.sentence
        if len(failed) > workers.most_failed:
            if value.exit_code == UsageError.exit_code:
                raise value.error()
            break
    if failed:
        raise Incomplete(_sentence(failed, kind, len(names) - done - len(failed), go_on))


def _sentence(failed: Mapping[str, str], kind: str, left: int, go_on: str) -> str:
    items = [*failed.items()]
    reasons = [f"{name}: {why}" for name, why in items[:REASONS]]
    reasons += [name for name, _ in items[REASONS:]]
    rest = f", and {left} more not done" if left else ""
    return f"{plural(len(failed), kind)} failed ({'; '.join(reasons)}){rest}; {go_on}"
