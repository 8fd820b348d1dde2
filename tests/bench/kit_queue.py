"""Launches of scenario ``queue``, as records."""

from typing import Any

from penstock.instruments.record import Record
from penstock.reports.queue.simulation import Timeline

from .records import made_record

CASE: dict[str, Any] = {
    "data": "data", "workers": 1, "queue": 4, "batch": 2, "iterations": 12, "shuffle": "sample",
    "seed": 0, "compute": "sleep", "compute_time": 1.0,
}  # fmt: skip


def record(timeline: Timeline, number: int = 0, **case: Any) -> Record:
    knobs = {**CASE, "iterations": len(timeline.seconds), **case}
    facts = {"left": timeline.left}
    seconds = {"step": tuple(timeline.seconds)}
    return made_record("queue", knobs, number, samples_s=seconds, facts=facts)
