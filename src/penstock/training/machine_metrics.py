"""The metrics of the machine that a tracked run trains on, for its trackers and in its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base import PenstockError
from ..instruments import Sampler, TelemetryRow, read_rows, set_aside

TRACKING_FOLDER = "track"
"""The folder in a run's folder with the files of trackers and the metrics of the machine."""
MACHINE_METRICS = f"{TRACKING_FOLDER}/metrics.jsonl"
"""Written by the sampler; a resumed run renames the file of its earlier part."""
SYSTEM_EVERY_S = 10.0


class MachineSampler(Sampler):
    """Samples the machine, and calls ``tell`` with the metrics of each row."""

    def __init__(
        self, out: Path, step: Callable[[], int], tell: Callable[[dict[str, Any]], None]
    ) -> None:
        """``step()`` is the number of steps done."""
        self._rows, self._tell_metrics = out / MACHINE_METRICS, tell
        super().__init__(self._rows, SYSTEM_EVERY_S, lambda: {"step": step()}, {})

    def start(self) -> None:
        """Begin, if there is room; a training goes on without metrics of its machine."""
        with contextlib.suppress(OSError, PenstockError):
            set_aside(self._rows)
            super().start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            super().stop()

    def sample(self) -> TelemetryRow:
        row = super().sample()
        self._tell_metrics(system_metrics(row))
        return row


def system_metrics(row: TelemetryRow) -> dict[str, Any]:
    """A row of telemetry as metrics: of rank 0's process tree, and of its node's disks, network and
    GPUs."""
    names = [name for name in row if name.endswith(("_percent", "_bytes", "_per_s"))]
    metrics = {f"system/{name}": row[name] for name in names}
    for gpu in row["gpus"] or ():
        for name in ("util_percent", "memory_bytes"):
            metrics[f"system/gpu{gpu['index']}_{name}"] = gpu[name]
    return metrics


def read_machine_metrics(out: Path) -> list[tuple[float, float, dict[str, Any]]]:
    """The metrics of the machine of a tracked run, in all its parts.

    Args:
        out: The folder of the run.

    Returns:
        Of each row the step, the time (unix) and the metrics, in the order of time; none if the run
        was not tracked.
    """
    rows: list[TelemetryRow] = []
    for path in (out / TRACKING_FOLDER).glob("metrics*.jsonl"):
        with contextlib.suppress(PenstockError, OSError):
            rows += read_rows(path)[1]
    points = [(row["gauges"]["step"], row["time"], system_metrics(row)) for row in rows]
    return sorted(points, key=lambda point: point[1])
