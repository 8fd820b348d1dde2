"""The content of an inference run's folder. Files may be missing or damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base import RUN_FILE, SUMMARY_FILE, UsageError, json_object, read_json
from ...inference import RunLook, RunStatus
from ...instruments import StageTotals, TelemetryRow, read_rows

MOST_ROWS = 200_000
"""Rows of telemetry that a report reads of each process: two days of a row a second."""


@dataclass(frozen=True)
class Telemetry:
    """The rows of one process."""

    name: str
    """The name of the process if several share the run; otherwise empty."""
    header: TelemetryRow
    rows: Sequence[TelemetryRow]

    def readings(self, key: str) -> list[float]:
        """The values of a key that are known."""
        return [row[key] for row in self.rows if row.get(key) is not None]


@dataclass(frozen=True)
class InferenceRun:
    """A run, finished or not."""

    folder: Path
    content: Mapping[str, Any]
    """The content of run.json."""
    summary: Mapping[str, Any]
    """The content of summary.json; empty for a run that is not finished."""
    status: RunStatus

    @classmethod
    def read(cls, folder: Path) -> InferenceRun:
        """Read the folder of a run.

        Raises `UsageError` if it is none.
        """
        content, summary = read_json(folder / RUN_FILE), folder / SUMMARY_FILE
        if not isinstance(content, dict) or "fingerprint" not in content:
            raise UsageError(f"{folder / 'run.json'} is not that of a run of penstock infer")
        done = read_json(summary) if summary.is_file() else {}
        return cls(folder, content, done, RunLook(folder).status())

    @cached_property
    def telemetry(self) -> Sequence[Telemetry]:
        """The rows of each process. They are read when they are asked for, because a list of many
        runs does not show them."""
        return _telemetry(self.folder)

    @property
    def began(self) -> float:
        """The time at which it was started."""
        return (self.folder / RUN_FILE).stat().st_mtime

    @property
    def name(self) -> str:
        return self.folder.name.removesuffix(".penstock")

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.content.get("settings") or {}

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.content.get("fingerprint") or {}

    @property
    def plan(self) -> Mapping[str, Any]:
        """The numbers of its plan."""
        return self.content.get("plan") or {}

    @property
    def maker(self) -> Mapping[str, Any]:
        """Versions and machine of the processes that wrote it."""
        return self.content.get("maker") or {}

    @property
    def machine_key(self) -> str | None:
        """The machine of the first process that wrote it, as launches of a ledger name it."""
        for path in sorted(self.folder.glob("metrics*.jsonl")):
            with contextlib.suppress(OSError, ValueError), path.open(encoding="utf-8") as lines:
                return json_object(next(lines, "")).get("machine_key") or self.maker.get("host")
        return self.maker.get("host")

    @cached_property
    def stages(self) -> dict[str, StageTotals]:
        """The totals of each stage; empty for a run that is not done."""
        stages = self.summary.get("stages") or {}
        return {name: StageTotals(**totals) for name, totals in stages.items()}

    @property
    def seconds(self) -> float | None:
        return self.summary.get("seconds")

    @property
    def worked(self) -> float:
        """Seconds of the run, added up over the processes that shared it."""
        workers = self.summary.get("workers") or ()
        return sum(worker["seconds"] for worker in workers) or self.seconds or 0.0

    def share(self, stage: StageTotals) -> float:
        """The share of the time in which the threads of a stage worked."""
        return stage.busy / max(stage.threads, 1) / self.worked if self.worked else 0.0

    @property
    def cores(self) -> int | None:
        """The cores that a process of the run could use."""
        return self.plan.get("cores") or next(
            (each.header.get("cpu_count") for each in self.telemetry), None
        )

    @property
    def on_gpu(self) -> bool:
        devices = self.fingerprint.get("devices") or self.plan.get("devices") or []
        return any(not str(device).startswith("cpu") for device in devices)

    @property
    def processes(self) -> int:
        """The processes that shared the run."""
        return max(1, len(self.summary.get("workers") or ()))


def _telemetry(folder: Path) -> list[Telemetry]:
    """The rows of each process: those of the last start, or of each of several processes."""
    last = folder / "metrics.jsonl"
    paths = [last] if last.is_file() else sorted(folder.glob("metrics-*.jsonl"))
    telemetry = []
    for path in paths:
        with contextlib.suppress(UsageError, OSError):
            header, rows = read_rows(path)
            name = "" if path == last else path.stem.removeprefix("metrics-")
            telemetry.append(Telemetry(name, header, rows[:MOST_ROWS]))
    return [each for each in telemetry if each.rows]
