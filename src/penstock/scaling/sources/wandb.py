"""Offline runs of Weights & Biases, read by W&B's own reader.

Only W&B's library can read its files, so ``wandb leet inspect`` does it, in its own process. A
resumed run has a file for each of its parts.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...base import MissingDependency, UsageError, group_by, missing
from ...training import flat
from ..runs import Status
from .tracked import Series, TrackedRun

SUFFIX = ".wandb"
_READ_WITHIN_S = 600.0
_LIGHTNING_STEP = "trainer/global_step"
"""The step of a row that Lightning's logger wrote; W&B's own then only counts rows."""


def wandb_runs(paths: Sequence[Path]) -> Iterator[TrackedRun]:
    """The runs in some files; the parts of a run are joined.

    Args:
        paths: The files, those of a run in the order of its parts.

    Yields:
        Each run.

    Raises:
        UsageError: A file cannot be read.
        MissingDependency: W&B is not installed.
    """
    files = [(path, _records(path)) for path in paths]
    whole = [each for each in files if _first(each[1], "run")]  # others ended as they began
    for parts in group_by(whole, lambda each: str(_first(each[1], "run")["run_id"])).values():
        yield _run([path for path, _ in parts], [row for _, rows in parts for row in rows])


def _records(path: Path) -> list[Mapping[str, Any]]:
    if find_spec("wandb") is None:
        raise MissingDependency(f"{path}: {missing('wandb', 'track')}")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path.resolve())]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_READ_WITHIN_S, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]
    except (subprocess.SubprocessError, ValueError) as error:
        raise UsageError(f"{path} is not a file of W&B's") from error


def _first(records: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    """The content of the first record of a kind, empty if there is none."""
    contents = (record[kind] for record in records if record.get("type") == kind)
    return next(contents, {})


def _run(paths: Sequence[Path], records: Sequence[Mapping[str, Any]]) -> TrackedRun:
    run, exits = _first(records, "run"), [each for each in records if each.get("type") == "exit"]
    config = dict(run.get("config", {}).get("update", {}))
    for record in records:
        if record.get("type") == "config":
            config |= record["config"].get("update", {})
    metrics = defaultdict[str, Series](list)
    for record in records:
        row = record["history"]["item"] if record.get("type") == "history" else {}
        for name, value in row.items():
            # Pictures and texts are among the values.
            with contextlib.suppress(TypeError, ValueError):
                if not name.startswith("_") and name != _LIGHTNING_STEP:
                    step = int(row.get(_LIGHTNING_STEP, row["_step"]))
                    point = step, float(value), float(row["_timestamp"])
                    metrics[name].append(point)
    times = [time for series in metrics.values() for _, _, time in series]
    at_a_stretch = len(paths) == 1 and times
    return TrackedRun(
        paths[0],
        str(run["run_id"]),
        str(run.get("display_name") or run["run_id"]),
        flat(config),
        metrics,
        _status(exits[-1]["exit"]) if exits else None,
        min(times) if at_a_stretch else None,
        max(times) if at_a_stretch else None,
    )


def _status(ended: Mapping[str, Any]) -> Status:
    return "crashed" if ended.get("exit_code") else "complete"
