"""The content of an inference run's folder. Files may be missing or damaged."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base import UsageError, read_json
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
    summary: Mapping[str, Any] | None
    """The content of summary.json; None for a run that is not finished."""
    status: RunStatus
    telemetry: Sequence[Telemetry]

    @classmethod
    def read(cls, folder: Path) -> InferenceRun:
        """Read the folder of a run.

        Raises `UsageError` if it is none.
        """
        content, summary = read_json(folder / "run.json"), None
        if not isinstance(content, dict) or "fingerprint" not in content:
            raise UsageError(f"{folder / 'run.json'} is not that of a run of penstock infer")
        if (folder / "summary.json").is_file():
            summary = read_json(folder / "summary.json")
        return cls(folder, content, summary, RunLook(folder).status(), _telemetry(folder))

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
        """The numbers of its plan; empty for a run of an older version."""
        return self.content.get("plan") or {}

    @property
    def maker(self) -> Mapping[str, Any]:
        """Versions and machine of the first process that wrote it."""
        return next(iter(self.content.get("makers") or [{}]))

    @cached_property
    def stages(self) -> dict[str, StageTotals]:
        """The totals of each stage; empty for a run that is not done."""
        stages = (self.summary or {}).get("stages") or {}
        return {name: StageTotals(**totals) for name, totals in stages.items()}

    @property
    def seconds(self) -> float | None:
        return (self.summary or {}).get("seconds")

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
        return max(1, len((self.summary or {}).get("workers") or ()))

    @property
    def trace(self) -> Path | None:
        """The trace, if it can be found; its path may be relative to the folder where the run was
        started."""
        named = self.settings.get("trace")
        if not named:
            return None
        places = [Path(str(named)), self.folder.parent / Path(str(named)).name]
        return next((place for place in places if place.is_file()), None)

    def rows_of(self, name: str) -> list[dict[str, Any]]:
        """The rows of a log of all processes, such as ``retries.jsonl``."""
        stem, _, suffix = name.partition(".")
        rows = []
        for path in sorted(self.folder.glob(f"{stem}*.{suffix}")):
            with path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    with contextlib.suppress(ValueError):
                        row = json.loads(line)
                        rows += [row] if isinstance(row, dict) else []
        return rows


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
