"""The summary of a job that several processes shared, and the voxels that its logs name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.data.grid import indices
from penstock.inference.run_folder.unit_set import UnitSet
from penstock.inference.sharing.completeness import voxels_of
from penstock.inference.stages.summary import Summary, merged

from .kit import opened


def share(voxels: int, seconds: float) -> Summary:
    """What one process did."""
    return Summary(
        seconds=seconds, voxels=voxels, input_bytes=voxels, units_written=1, units_skipped=0,
        units_planned=9, stages={}, bound_by="", cpu_seconds=seconds, peak_rss=None, planned_peak=0,
    )  # fmt: skip


def test_lanes_whose_processes_are_started_again_are_weighed_by_their_time() -> None:
    """Two lanes that always work, for 100 s; the process of each is killed nine times."""
    lives = {f"host-{number}": share(10_000_000, 10.0) for number in range(20)}
    together = replace(merged(lives, 100.0, 9, 0), worker_seconds=200.0)
    (line,) = [line for line in together.lines() if line.startswith("Workers: ")]
    assert line.startswith("Workers: 20 (2.0 at a time), 1.00 to 1.00 Mvox/s each while at work")
    assert "together 100% of" in line


def test_workers_that_wait_lower_the_share() -> None:
    both = {"a": share(10_000_000, 10.0), "b": share(5_000_000, 5.0)}
    together = replace(merged(both, 20.0, 9, 0), startup_seconds=10.0)
    (line,) = [line for line in together.lines() if line.startswith("Workers: ")]
    assert line.startswith("Workers: 2, 1.00 to") and "together 75% of" in line


def test_a_worker_that_is_much_slower_than_the_median_is_named() -> None:
    speeds = {"a": share(10_000_000, 10.0), "b": share(8_000_000, 10.0), "c": share(10**6, 10.0)}
    lines = [*merged(speeds, 10.0, 9, 0).lines()]
    assert [line for line in lines if "was slow" in line] == [
        "  c was slow: 0.10 Mvox/s over 10.0 s"
    ]


def test_the_voxels_of_units_are_those_of_their_boxes(tmp_path: Path) -> None:
    made = opened(tmp_path / "out.zarr", (21, 30, 37), block=8, chunks=8).plan
    keys = {(0, *index) for index in indices(made.geometry.units.cells)}
    assert voxels_of(made, UnitSet(keys)) == made.voxels == 21 * 30 * 37
    some = {key for key in keys if sum(key) % 3 == 0}
    boxes = [made.geometry.units.cell(key[1:]) for key in some]
    assert voxels_of(made, UnitSet(some)) == sum(box.size for box in boxes)
