"""Launches, and launchers that run them: in this process one after the other, or on a cluster.

A launcher takes launches one by one when it can run them, and yields each with its record when it
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ...base import PenstockError, UsageError
from ...instruments import Record
from . import supervisor
from .request import Launch

Launcher = Callable[[Iterable[Launch]], Iterator[tuple[Launch, Record]]]


def in_turn(launches: Iterable[Launch]) -> Iterator[tuple[Launch, Record]]:
    """Run launches one after the other on this machine."""
    for launch in launches:
        yield launch, supervisor.run_launch(launch)


def ask_worker(
    scenario: str,
    case: Mapping[str, Any],
    timeout_s: float,
    launcher: Launcher = in_turn,
    *,
    may_fail: bool = False,
) -> Record:
    """Check a case in a fresh process, without a measurement.

    Args:
        scenario: the name of the scenario.
        case: its knobs.
        timeout_s: the seconds that the process may take.
        launcher: runs the process.
        may_fail: whether to return a valid case that cannot be measured as a failed record, instead
            of raising.

    Returns:
        A record with the resolved case and its facts.

    Raises:
        UsageError: the case is not valid; its message is that of the process.
        PenstockError: the case cannot be measured; its message is that of the failure.
    """
    ((_, answer),) = launcher([Launch(scenario, case, timeout_s, task="check")])
    if answer.error is None:
        return answer
    if answer.status == "unsupported":
        raise UsageError(answer.error.message)
    if may_fail:
        return answer
    raise PenstockError(answer.error.message)
