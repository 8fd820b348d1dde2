"""Seams of an output: those that show are said to, and those that do not are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from torch import nn

from penstock.data import open_source
from penstock.inference import run_inference
from penstock.reports.charts.chart import greys
from penstock.reports.infer import seams
from penstock.reports.infer.job_files import InferenceRun
from penstock.reports.infer.output import look_at_output
from penstock.reports.infer.seams import measure_seams, seam_sentences

from .pages import run_folder

FINGERPRINT = {"patch": [32, 40, 40], "overlap": [0, 8, 8], "seam": ["trim", 0.05]}
NOISE = np.random.default_rng(1).normal(size=(96, 96, 96)).astype(np.float32)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As many as ever, but in the first test, of a sixteenth of the voxels."""
    if request.function is not test_a_volume_without_seams_shows_none:
        monkeypatch.setattr(seams, "WINDOW", 24)


def sentences(volume: Any, kind: str = "intensity", **changes: Any) -> list[str]:
    return seam_sentences(measure_seams(open_source(volume), FINGERPRINT | changes, kind))


def with_steps(axis: int, stride: int, size: float) -> Any:
    shape = [1, 1, 1]
    shape[axis] = -1
    return NOISE + size * (np.arange(96) // stride % 2).reshape(shape).astype(np.float32)


def test_a_volume_without_seams_shows_none() -> None:
    said = sentences(NOISE)
    assert len(said) == 3 and all("seams do not show" in each for each in said)
    z, y, _ = said
    assert z.startswith("Across seams along z neighbours differ by ")
    # Strides of 32 leave 15 steps to either side, less the seam's neighbours.
    assert "[2 seams, 28 planes between, 16 windows]" in z and "[2 seams, 28" in y


@pytest.mark.parametrize("axis", range(3))
def test_a_step_at_the_seams_of_one_axis_shows_on_that_axis_alone(axis: int) -> None:
    said = sentences(with_steps(axis, 32, 3.0))
    assert ["seams show" in each for each in said] == [each == axis for each in range(3)]


def test_a_step_elsewhere_is_no_seam() -> None:
    moved = np.roll(with_steps(0, 32, 3.0), 7, axis=0)
    assert "seams do not show" in sentences(moved)[0]


def test_labels_are_compared_by_how_many_change() -> None:
    rng = np.random.default_rng(2)
    labels = np.repeat(rng.integers(1, 5, (96, 96, 1)), 96, axis=2).astype(np.int32)
    labels[rng.random(labels.shape) < 0.01] = 9
    assert "along x" in (x := sentences(labels, "labels")[2]) and "do not show" in x
    labels[..., 32:64] += 100_000  # not a large step: all change
    assert "seams show" in sentences(labels, "labels")[2]


def test_a_flat_output_and_seams_too_close_are_not_judged() -> None:
    assert "flat in all windows" in sentences(np.zeros((96, 96, 96), np.uint8))[0]
    assert sentences(NOISE, patch=[16, 16, 16], overlap=[8, 8, 8]) == []
    assert sentences(NOISE[:30, :30, :30]) == []  # one patch has no seam
    holes = NOISE.copy()
    holes[40:50] = np.nan
    assert all("nan" not in each for each in sentences(holes))


def test_blended_seams_are_looked_for_where_the_next_patch_begins_to_count() -> None:
    at = 32 - 4
    step = NOISE + 3.0 * ((np.arange(96) + 32 - at) // 32 % 2).reshape(1, -1, 1)
    blended = {"seam": ["blend", 0.05]}
    assert "seams show" in sentences(step.astype(np.float32), **blended)[1]
    assert "seams do not show" in sentences(step.astype(np.float32))[1]


def test_a_report_looks_at_the_output_of_its_run(tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    volume = np.random.default_rng(0).integers(0, 999, (48, 48, 48)).astype(np.uint16)
    zarr.save_array(tmp_path / "in.zarr", volume)
    run_inference(str(tmp_path / "in.zarr"), str(out), model="identity", patch=(24,), overlap=(0,),
                  normalize="none", head_kind="intensity")  # fmt: skip
    look = look_at_output(InferenceRun.read(Path(f"{out}.penstock")))
    assert len(look.sentences) == 3 and "along z" in look.sentences[0]
    (picture,) = look.pictures
    assert "Plane z = 23" in picture.caption
    before, after, difference = picture.draw().panels
    assert before.title == "input" and difference.title == "difference"
    low, high = np.percentile(volume[23], (0.5, 99.5))
    assert after.image is not None
    assert (after.image.pixels == greys(volume[23], low, high)).all()
    (tmp_path / "out.zarr").rename(tmp_path / "moved.zarr")
    look = look_at_output(InferenceRun.read(Path(f"{out}.penstock")))
    assert "is not on this machine" in look.sentences[0] and not look.pictures


def test_a_run_that_is_not_done_is_not_looked_at(tmp_path: Path) -> None:
    look = look_at_output(InferenceRun.read(run_folder(tmp_path / "a")))
    assert look.sentences == ["Whether seams show is measured once the run is done."]


def test_the_plan_of_a_run_counts_its_operations(tmp_path: Path) -> None:
    net = nn.Conv3d(1, 1, 3, padding=1)
    run_inference(NOISE[:32, :32, :32], str(tmp_path / "out.zarr"), model=net, patch=(16,),
                  overlap=(8,), normalize="none", run_dir=tmp_path / "run")  # fmt: skip
    plan = json.loads((tmp_path / "run" / "run.json").read_text())["plan"]
    assert plan["patch_flops"] == 2 * 27 * 16**3  # a product and a sum for each of 27 weights
