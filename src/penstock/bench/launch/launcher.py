"""Launches, and launchers that run them: in this process one after the other, or on a cluster.

A launcher takes launches one by one when it can run them, and yields each with its record when it
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...base import PenstockError, UsageError
from ...instruments import Record
from . import supervisor
from .request import LaunchRequest


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a case."""

    request: LaunchRequest
    number: int
    """Its number among the launches of the case, from 0."""
    order: int | None
    """Its index in the sweep's order; None outside a sweep."""
    timeout_s: float
    """The seconds after which it is killed."""

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of `run_launch` beside the request."""
        return {"launch": self.number, "order": self.order, "timeout_s": self.timeout_s}


Launcher = Callable[[Iterable[Launch]], Iterator[tuple[Launch, Record]]]


def in_turn(
    launches: Iterable[Launch], run: Callable[..., Record] | None = None
) -> Iterator[tuple[Launch, Record]]:
    """Run launches one after the other on this machine.

    Args:
        launches: the launches.
        run: runs one launch; None for `run_launch`.

    Yields:
        Each launch and its record.
    """
    for launch in launches:
        yield launch, (run or supervisor.run_launch)(launch.request, **launch.how)


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
    asked = Launch(LaunchRequest(scenario, case, task="check"), 0, None, timeout_s)
    ((_, answer),) = launcher([asked])
    if answer.error is None:
        return answer
    if answer.status == "unsupported":
        raise UsageError(answer.error.message)
    if may_fail:
        return answer
    raise PenstockError(answer.error.message)
