"""What a plan expects of many workers, against a count of every part."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.base import ScaleConfig, UsageError, format_bytes, format_seconds
from penstock.inference.planning.at_scale import measured_rate, scale_lines
from penstock.inference.planning.plan import Plan, make_plan

from .kit import SEED, config, facts

RATE = 2e6


def planned(workers: int = 3) -> Plan:
    return make_plan(config(workers=workers), facts((1024, 700, 900)), SEED)


def seconds_of_largest(plan: Plan) -> float:
    """A worker does as many patches a second as its voxels a second have, borders left out."""
    geometry = plan.geometry
    patches = [geometry.patches_for(part.box).size for part in plan.parts]
    assert sum(patches) == plan.num_patches
    once = plan.num_patches / plan.border_amplification
    return max(patches) * plan.voxels / RATE / once


@pytest.mark.parametrize("bandwidth", [None, 10**12, 10**7])
def test_the_last_turn_ends_with_the_largest_part(bandwidth: int | None) -> None:
    plan = planned()
    lines = list(scale_lines(ScaleConfig(rate=RATE, bandwidth=bandwidth), plan))
    said = dict(lines)
    seconds = -(-len(plan.parts) // 3) * seconds_of_largest(plan)
    moved, counted = plan.read_bytes + plan.output_bytes, plan.statistics_bytes
    bound = "the workers"
    if bandwidth is None:
        assert "store" not in said
        assert (said.get("note", "").startswith("the ")) == bool(counted)
    else:
        before = counted / bandwidth
        if moved / bandwidth > seconds:
            bound = "the store"
        seconds = before + max(seconds, moved / bandwidth)
        assert said["store"].startswith(format_bytes(moved + counted))
    assert (bound == "the store") == (bandwidth == 10**7)
    assert said["time"].startswith(f"{format_seconds(seconds)} at most on 3 workers of 2.00 Mvox/s")
    assert f"bound by {bound}" in said["time"]
    share = plan.voxels / RATE / 3 / seconds
    assert f"{share:.0%} of the speed" in said["time"]


def test_without_a_rate_there_is_no_time() -> None:
    (line,) = scale_lines(ScaleConfig(), planned())
    assert line[0] == "time" and "not known; --rate" in line[1]


def test_the_rate_of_a_run_is_that_of_a_worker_of_the_middle(tmp_path) -> None:
    plan = planned()
    shares = [{"voxels": 100, "seconds": each} for each in (1, 2, 50)]
    summary: dict[str, Any] = {"workers": [*shares, {"voxels": 0, "seconds": 9}]}
    Path(tmp_path, "summary.json").write_text(json.dumps(summary))
    rate, note = measured_rate(tmp_path, plan)
    assert rate == 50 and note is not None and "unlike this plan" in note
    assert [*scale_lines(ScaleConfig(rate=tmp_path), plan)][-1] == ("note", note)
    alike = {"patch": plan.geometry.patch, "overlap": plan.geometry.overlap}
    Path(tmp_path, "run.json").write_text(json.dumps({"fingerprint": alike}))
    assert measured_rate(tmp_path, plan) == (50, None)


def test_a_folder_without_a_rate_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="neither a number of voxels per second nor the folder"):
        measured_rate(tmp_path, planned())
    Path(tmp_path, "summary.json").write_text('{"voxels": 0, "seconds": 1}')
    with pytest.raises(UsageError, match="that run computed nothing"):
        measured_rate(tmp_path, planned())
    Path(tmp_path, "summary.json").write_text('{"objects": 7}')  # as that of label
    with pytest.raises(UsageError, match="has no voxels and seconds of infer: it lacks 'voxels'"):
        measured_rate(tmp_path, planned())
