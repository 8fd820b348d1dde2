"""The pytest plugin: a fixture that times a callable in the same way as the benchmarks.

    def test_decode(penstock_bench):
        penstock_bench(decode, chunk)

pytest imports this module in every session where Penstock is installed, so it imports nothing heavy
until the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .timed_test import TimedCall

_PROPERTY = "penstock"
"""Name of the test property that carries a line from a worker of xdist to the summary."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("penstock", "penstock: times of callables")
    group.addoption(
        "--penstock-ledger",
        metavar="FOLDER",
        help="ledger to which each time is added, and which holds the times of the baseline",
    )
    group.addoption(
        "--penstock-baseline",
        metavar="COMMIT",
        default="main",
        help="compare with the last launches at this commit or before it (default: main)",
    )
    group.addoption(
        "--penstock-fail-slower",
        metavar="X",
        help="a test fails if it is slower than the baseline by more than this, 5%% or 0.05",
    )
    group.addoption(
        "--penstock-seconds",
        metavar="X",
        type=float,
        default=1.0,
        help="most seconds of samples of one callable (default: 1)",
    )


@pytest.fixture
def penstock_bench(request: pytest.FixtureRequest) -> Callable[..., TimedCall]:
    """Time a callable: ``penstock_bench(function, *args, work={"samples": 8}, **kwargs)``.

    The fixture calls it until its time settles, and then until the median is known within 1 %. The
    record goes into ``--penstock-ledger`` and is compared with the baseline.
    """
    from .timed_test import Bench

    return Bench(request).time


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for each in terminalreporter.stats.values() for report in each]
    lines = dict.fromkeys(
        str(value)
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _PROPERTY
    )
    if lines:
        terminalreporter.section("penstock: times")
        for line in lines:
            terminalreporter.line(line)
