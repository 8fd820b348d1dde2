"""The real worker: one launch of each scenario, in a process of its own. That one loads torch for
two seconds, so by default the worker is this process. `test_launch` has others start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bench.launch.supervisor import LaunchRequest, run_launch

from .kit_loader import SAMPLE_BYTES, case
from .kit_model import CASE

SERIES = {"seconds": 0.0, "precision": 0.0, "series": 2, "warmup_samples": 1}
TIMED = {"seconds": 0.1, "precision": 0.5}
MODEL = ("model", {**CASE, "model": "NETS:convs"}, TIMED,
         {"samples": 2, "pixels": 512, "useful_pixels": 512}, ["step"])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "knobs", "rules", "work", "samples", "where"),
    [
        (*MODEL, "here"),
        ("loader", {"batches": 2}, SERIES, {"samples": 2, "bytes": 2 * SAMPLE_BYTES}, ["step"],
         "process"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_real_launch(
    scenario: str, knobs: dict[str, Any], rules: dict[str, Any], work: dict[str, float],
    samples: list[str], where: str, nets: str, data: Path,
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    if where == "here":
        request.getfixturevalue("launches_here")
    if scenario == "loader":
        knobs = case(data, **knobs)
    if knobs.get("model"):
        knobs = {**knobs, "model": knobs["model"].replace("NETS", nets)}
    places = {"data": str(data)}
    knobs |= {name: place for name, place in places.items() if name in knobs}
    asked = LaunchRequest(scenario, knobs, rules=rules)
    record = run_launch(asked, launch=0, order=None, timeout_s=300.0)
    assert record.ok, record.error
    assert record.work == work
    assert list(record.samples_s) == samples
    if "series" in rules:
        assert len(record.samples_s["step"]) == 2 and record.stop is None
    else:
        assert record.stop in ("precise", "noise_stable", "budget")
        assert len(record.samples_s["step"]) >= (1 if record.stop == "budget" else 10)
    assert record.warmup.setup_s is not None
    assert record.memory.host_baseline is not None and record.memory.host_peak_kernel is not None
    assert record.memory.host_baseline <= record.memory.host_peak_kernel
    assert record.environment["torch"]["threads"] >= 1
    assert record.environment["machine_key"]
