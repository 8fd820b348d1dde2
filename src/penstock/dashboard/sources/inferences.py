"""A run of inference, read from its folder, while it goes on and after its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...base import format_seconds, read_json
from ...inference import RunLook
from ...instruments import TelemetryRow
from ...reports import InferenceRun
from ..listed_run import (
    ListedRun,
    RunCurve,
    RunDetails,
    Stamp,
    curve_of,
    key_of,
    label,
    numbers_of,
    settings_of_run,
    tags_of,
)
from .records import machine_of

_STATUS = {"done": "complete", "ended": "failed"}
_NOT_READINGS = ("t", "time", "processes", "threads")


def shown_inference(folder: Path, stamp: Stamp) -> ListedRun:
    """A run of inference as a row.

    Args:
        folder: Its folder.
        stamp: The states of its files.

    Returns:
        The row.

    Raises:
        UsageError: It is not the folder of a run of inference.
    """
    run, status = read_json(folder / "run.json"), RunLook(folder).status()
    run = run if isinstance(run, dict) else {}
    summary = read_json(folder / "summary.json") if (folder / "summary.json").is_file() else {}
    seconds = summary.get("seconds") if isinstance(summary, dict) else None
    model = (run.get("fingerprint") or {}).get("model") or [""]
    done = f"{status.units_done} of {status.units_planned or '?'} blocks"
    return ListedRun(
        key=key_of(str(folder.resolve())),
        name=label(run.get("name") or folder.resolve().name.removesuffix(".penstock")),
        kind="inference",
        status=_STATUS.get(status.state, status.state),
        source=label(folder),
        stamp=(*stamp, status.state),
        workload="infer",
        machine=machine_of(_maker(run)),
        model=label((run.get("settings") or {}).get("model_type") or model[0]),
        began=(folder / "run.json").stat().st_mtime,
        seconds=seconds,
        result=format_seconds(seconds) if seconds else done,
        tags=tags_of(run.get("tags")),
        read=partial(_details, folder),
    )


def _maker(run: Mapping[str, Any]) -> dict[str, Any]:
    """The machine of the first process that wrote the run, in the form of an environment."""
    maker: dict[str, Any] = next(iter(run.get("makers") or [{}]), {})
    gpus = [{"name": gpu} for gpu in maker.get("gpus") or () if isinstance(gpu, str)]
    return {"gpus": gpus, "machine_key": maker.get("host") or maker.get("instructions")}


def _details(folder: Path) -> RunDetails:
    run = InferenceRun.read(folder)
    devices = run.fingerprint.get("devices") or run.plan.get("devices") or []
    summary = dict(run.summary or {})
    metrics = numbers_of({name: v for name, v in summary.items() if name != "workers"})
    if run.seconds and summary.get("voxels"):
        metrics["voxels_per_s"] = float(summary["voxels"]) / run.seconds
    return RunDetails(
        settings_of_run(
            {"devices": len(devices) or None, "device": devices, "cores": run.cores},
            {name: v for name, v in run.settings.items() if name not in ("name", "tags")},
            run.maker,
        ),
        metrics,
        {
            f"{each.name}/{name}" if each.name else name: curve
            for each in run.telemetry
            for name, curve in curves_of_telemetry(each.rows).items()
        },
        None,
        folder,
        label(run.status.why),
    )


def curves_of_telemetry(rows: Sequence[TelemetryRow]) -> dict[str, RunCurve]:
    """Each reading of the rows of a process over time."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        readings = {name: v for name, v in row.items() if name not in (*_NOT_READINGS, "gpus")}
        gauges = readings.pop("gauges", None) or {}
        for gpu in row.get("gpus") or ():
            readings |= {f"gpu{gpu.get('index')}_{n}": v for n, v in gpu.items() if n != "index"}
        numbers = numbers_of(readings) | numbers_of(gauges, "queue/")
        for name, value in numbers.items():
            points.setdefault(name, []).append((value, float(row["t"])))
    curves = {}
    for name, pairs in points.items():
        values, seconds = np.transpose(pairs)
        curves[name] = curve_of(values, seconds=seconds, of_machine=True)
    return curves
