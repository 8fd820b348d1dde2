"""What bound a run, and what share of its machine's limits it reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.reports import mfu
from penstock.reports.content import LIMITS, explanation_of
from penstock.reports.places import places_of, reports_of_places

from .pages import HOSTILE, run_folder
from .test_training_report import WAITING, training

READ = {"read": (9.0, 0.1, 1), "forward": (2.0, 8.0, 1), "write": (1.0, 9.0, 2)}


def explained(path: Path) -> dict[str, Any]:
    """The sentences of each section, by title; the verdict by an empty one."""
    (report,) = reports_of_places(places_of(path))
    verdict, *sections = explanation_of(report)
    return {"": list(verdict.sentences), **{each.title: each.sentences for each in sections}}


def infer(
    folder: Path, stages: Any = READ, settings: dict[str, Any] | None = None, **changes: Any
) -> Path:
    usual = {"model_type": "identity", "out_spec": [f"{folder.name}.zarr"], "prep_workers": 1}
    run = {"settings": usual | (settings or {}), **changes.pop("run", {})}
    return run_folder(folder, stages, run=run, **{"cpu_seconds": 12.0, **changes})


def trained(folder: Path, phases: Any, args: dict[str, Any] | None = None, **changes: Any) -> Path:
    training(folder, phases, **changes)
    usual = {"workload": "spiral", "num_workers": 0, "batch_size": 32, "output_dir": folder.name}
    (folder / "args.json").write_text(json.dumps(usual | (args or {})))
    return folder


def test_a_training_is_set_beside_the_roof_of_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roofs = {("m", "cpu", "float32"): 64e9, ("m", "cuda:0", "float16"): 1e12}
    monkeypatch.setattr(mfu, "known_roof", lambda *asked: roofs.get(asked))
    usual: dict[str, Any] = {"flops_per_sample": 10e6, "machine_key": "m"}
    (line,) = explained(trained(tmp_path / "a", WAITING, **usual))[LIMITS]
    does = (
        "it computed 6.40 Gflop/s (products, convolutions and attention, forward and backward, "
        "over all the time of its epochs)"
    )
    assert line == (
        f"MFU (model FLOPs utilisation) 10.0% [10.0%-10.0%, 2 epochs of one run]: {does}, of the "
        "64.0 Gflop/s that matrix products of float32 reach here."
    )
    usual |= {"device": "A GPU", "flops_per_sample": 1e9}
    folder = trained(tmp_path / "b", WAITING, {"amp": True}, world=2, **usual)
    (line,) = explained(folder)[LIMITS]
    assert line.startswith("MFU (model FLOPs utilisation) 32.0%"), "of two devices"
    assert "2.00 Tflop/s that matrix products of float16" in line
    for number, settings in enumerate(({"tf32": True}, {"dtype": "bfloat16"}, {})):
        folder = trained(tmp_path / str(number), WAITING, settings, **usual)
        (line,) = explained(folder)[LIMITS]
        dtype = settings.get("dtype", "tf32" if settings else "float32")
        start = f"Its MFU (model FLOPs utilisation) is not known, for want of a peak of {dtype}: it"
        assert line.startswith(start) and "it computed 640 Gflop/s" in line
        assert line.endswith("run penstock doctor once on each machine.")
    roofs["m", "cuda:0", "tf32"] = 64e12
    (line,) = explained(trained(tmp_path / "c", WAITING, {"tf32": True}, **usual))[LIMITS]
    assert "1.0% [1.0%-1.0%" in line and "products of tf32" in line


def test_why_the_arithmetic_of_a_training_is_not_known_is_said(tmp_path: Path) -> None:
    start = "Its MFU (model FLOPs utilisation) is not known: "
    lost = explained(trained(tmp_path / "a", WAITING))
    assert lost[LIMITS] == [f"{start}its operations were not counted."]
    assert LIMITS not in explained(trained(tmp_path / "c", WAITING, samples_per_s=None))


def test_names_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = infer(tmp_path / "a", run={"name": HOSTILE})
    code = main(["explain", str(folder)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "\x1b" not in out and "\x00" not in out
    title, _, verdict, *_ = out.splitlines()
    assert title == "a" and verdict.startswith("- Bound by read: its thread was busy 90% of the")
    assert LIMITS in out
    assert main(["explain", str(tmp_path / "nothing")]) == 2
