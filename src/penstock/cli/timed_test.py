"""What the fixture ``penstock_bench`` does: time a callable, keep the record, compare it.

A session of pytest is one launch of each test. One side of a comparison is all launches of a commit
on one machine, with the same uncommitted changes; the other side is those of the baseline. A single
launch is never compared, so run pytest several times at each commit.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ..base import NotComparable, UsageError, for_terminal, format_seconds, plural, scrub
from ..bench import Rules, measure_scenario
from ..instruments import (
    CONFIDENCE,
    Interval,
    Ledger,
    Record,
    ask_git,
    case_key,
    collect_environment,
    commit_named,
    commit_of,
    median_interval,
    short_commit,
)
from ..reports import Comparison, bracket, compare_records
from .compare import share_of_text

SCENARIO = "pytest"
_PRECISION = 0.01
"""Sampling stops when half the width of the median's interval is below this share of it."""
_MOST_COMMITS = 10_000
"""Most commits of the baseline's history that are searched for its last launches."""


@dataclass(frozen=True)
class TimedCall:
    """The time of a callable."""

    seconds: Interval
    """Median seconds of a call, with the interval of this launch's samples."""
    record: Record
    comparison: Comparison | None
    """Launches of this commit against those of the baseline; None if there is nothing to
    compare."""
    result: Any
    """Result of the last call."""


class _Calls:
    """A callable as a scenario: a step is a call."""

    facts: Mapping[str, Any] = {}

    def __init__(self, call: Callable[[], Any], work: Mapping[str, float], device: str) -> None:
        self._call, self._work, self.device = call, work, device
        self.result: Any = None

    def step(self, phase: Any) -> Mapping[str, float]:
        self.result = self._call()
        return self._work

    def close(self) -> None: ...


class Bench:
    """The fixture of one test."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._node, self._config = request.node, request.config
        self._folder = request.node.path.parent
        self._times = 0

    def time(
        self,
        function: Callable[..., Any],
        *args: Any,
        work: Mapping[str, float] | None = None,
        device: str = "cpu",
        tags: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> TimedCall:
        """Time a callable, keep the launch, and compare it with the baseline.

        Args:
            function: The callable.
            args: Its arguments.
            work: Amount of work of one call, such as ``{"samples": 8}``.
            device: Device whose clock times the call: ``cpu``, ``cuda:0`` or ``mps``.
            tags: Tags of the record.
            kwargs: Its keyword arguments.

        Returns:
            The time, the record, and the comparison.
        """
        self._times += 1
        calls = _Calls(lambda: function(*args, **kwargs), dict(work or {}), device)
        try:
            record = self._measured(calls, dict(tags or {}))
            comparison, words = self._compared(record)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
        seconds = median_interval(record.samples_s["step"])
        self._say(record, seconds, words)
        if comparison is not None and comparison.regressed and self._limit is not None:
            pytest.fail(f"{record.case['test']}: {words}", pytrace=False)
        return TimedCall(seconds, record, comparison, calls.result)

    def _measured(self, calls: _Calls, tags: dict[str, str]) -> Record:
        """The record of this launch."""
        folder = self._folder
        began = datetime.now(UTC).isoformat(timespec="seconds")
        rules = Rules(seconds=self._config.getoption("penstock_seconds"), precision=_PRECISION)
        fields = measure_scenario(calls, rules, lambda stage: None, time.perf_counter)
        case = {"test": self._name + (f" #{self._times}" if self._times > 1 else "")}
        facts = {"changes": _changes(folder), "workers": self._workers}
        return Record.model_validate(
            fields
            | {"id": uuid.uuid4().hex, "time": began, "scenario": SCENARIO, "case": case}
            | {"key": case_key(SCENARIO, case), "launch": 0, "status": "ok", "tags": tags}
            # No memory: the peaks are those of all tests in this process.
            | {"facts": facts, "memory": {}, "name": self._node.name}
            | {"environment": collect_environment(folder)}
        )

    @property
    def _name(self) -> str:
        """The test's path in the repository, because pytest's root may differ from call to call."""
        place = ask_git(["rev-parse", "--show-prefix"], self._folder) or ""
        return f"{place}{self._node.path.name}::{self._node.nodeid.partition('::')[2]}"

    @property
    def _workers(self) -> int:
        """Number of xdist processes that run tests at once; 1 without xdist."""
        return int(getattr(self._config, "workerinput", {}).get("workercount", 1))

    @property
    def _limit(self) -> float | None:
        text = self._config.getoption("penstock_fail_slower")
        return None if text is None else share_of_text("--penstock-fail-slower", text)

    def _compared(self, record: Record) -> tuple[Comparison | None, str]:
        """Compare with the baseline. Returns the comparison, or None, and a sentence about it."""
        limit, path = self._limit, self._config.getoption("penstock_ledger")
        if path is None:
            return None, "not kept: no --penstock-ledger"
        ledger = Ledger(Path(path))
        earlier = [each for each in ledger.records() if each.key == record.key]
        ours = [each for each in earlier if _state(each) == _state(record)]
        record = record.model_copy(update={"launch": len(ours)})
        ledger.append(record)
        name = self._config.getoption("penstock_baseline")
        others = [each for each in earlier if _state(each) != _state(record)]
        others = _last_of(name, others, self._folder)
        if not others:
            return None, f"no launch of {name} in the ledger"
        try:
            comparison = compare_records(
                others,
                [*ours, record],
                threshold=limit,
                confidence=CONFIDENCE,
                anyway=False,
                metric="step",
                seed=0,
            )
        except NotComparable as error:
            return None, f"not compared: {error}"
        row = comparison.rows[0]
        base = commit_of(others[0].environment.get("git")) or name
        return comparison, f"{row.verdict} against {name} ({short_commit(base)}): {row.reason}"

    def _say(self, record: Record, seconds: Interval, words: str) -> None:
        samples = bracket(seconds, plural(seconds.n, "sample"))
        parts = [f"{record.case['test']}: {format_seconds(seconds.value)} {samples}", words]
        if record.warmup.settled is False:
            parts.append("it never settled")
        if self._workers > 1:
            parts.append(f"beside {plural(self._workers - 1, 'other worker')} of xdist")
        self._node.user_properties.append(("penstock", for_terminal(scrub("; ".join(parts)))))


def _state(record: Record) -> tuple[str | None, str | None]:
    """The commit of a launch, and the hash of the changes on top of it."""
    return commit_of(record.environment.get("git")), record.facts.get("changes")


def _changes(folder: Path) -> str | None:
    """A hash of the uncommitted changes; None if there are none."""
    text = ask_git(["diff", "HEAD"], folder)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else None


def _last_of(name: str, records: list[Record], folder: Path) -> list[Record]:
    """The launches at a commit, or at its newest ancestor with launches."""
    full = commit_named(name, folder)
    words = ["rev-list", f"--max-count={_MOST_COMMITS}", "--end-of-options", full or ""]
    history = (ask_git(words, folder) or "").split() if full else []
    made = {commit_of(record.environment.get("git")) for record in records}
    newest = next((commit for commit in history if commit in made), None)
    return [r for r in records if newest and commit_of(r.environment.get("git")) == newest]
