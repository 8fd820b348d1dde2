"""Launches, and what runs them: this process one after the other, or a cluster's workers.

A launcher takes launches one by one as it can run them, and yields each with its record as it ends.
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
    """Its place in the sweep; None outside of one."""
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
    """Ask a process of its own about a case, without a measurement.

    Args:
        scenario: the name of the scenario.
        case: its knobs.
        timeout_s: the seconds that the process may take.
        launcher: runs the process.
        may_fail: whether a case that makes sense and cannot be measured is an answer.

    Returns:
        A record with the resolved case and its facts; with ``may_fail`` perhaps a failure.

    Raises:
        UsageError: the case makes no sense; it has the case's sentence.
        PenstockError: the case cannot be measured; it has the sentence of the failure.
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
