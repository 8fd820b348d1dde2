"""Launches of scenario ``queue``, as records."""

from __future__ import annotations

from typing import Any

from penstock.instruments.record import Record, case_key
from penstock.reports.queue.model import Timeline

CASE: dict[str, Any] = {
    "data": "data", "workers": 1, "queue": 4, "batch": 2, "iterations": 12, "shuffle": "sample",
    "seed": 0, "compute": "sleep", "compute_time": 1.0, "model": None, "tile": None,
    "device": "cpu",
}  # fmt: skip


def record(timeline: Timeline, number: int = 0, compute_s: float = 1.0, **case: Any) -> Record:
    knobs = {**CASE, "iterations": len(timeline.seconds), **case}
    return Record(
        schema=1,
        id=f"{number}",
        time=f"2026-01-01T00:00:0{number}+00:00",
        scenario="queue",
        case=knobs,
        key=case_key("queue", knobs),
        launch=number,
        status="ok",
        samples_s={"step": tuple(timeline.seconds)},
        facts={"compute_s": compute_s, "in_hand": 0, "left": timeline.left},
    )
