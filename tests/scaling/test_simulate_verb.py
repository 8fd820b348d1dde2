"""The verb's simulation, from runs and from flags."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .kit import results, said


def test_simulate_from_a_run_prints_its_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = {"forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    document: dict[str, Any] = results(1, 30.0, phases=phases) | {"parameters": 25_000_000}
    (tmp_path / "training_results.json").write_text(json.dumps(document))
    code, out, _ = said(["simulate", str(tmp_path), "--gpus-per-node", "8"], capsys)
    assert code == 0
    sizes = [line.split()[0] for line in out.splitlines()[3:13]]
    assert sizes == ["8", "16", "32", "64", "128", "256", "512", "1,024", "2,048", "4,096"]
    assert "computes 100 ms a step, 60.0 ms of it backward, on 32 samples." in out
    assert "95.4 MiB of gradients are summed by a tree" in out
    guessed = "each of 25,000,000 is assumed to have a gradient of 4 bytes."
    assert guessed in out
    assert "Batches are always ready in time." in out
    _, out, _ = said(["simulate", str(tmp_path), "--gradient-bytes", "1MiB"], capsys)
    assert guessed not in out
    document |= {"trainable_parameters": 1_000_000, "gradient_bytes": 2 * 2**20}
    (tmp_path / "training_results.json").write_text(json.dumps(document))
    _, out, _ = said(["simulate", str(tmp_path)], capsys)
    assert "2.00 MiB of gradients are summed by a tree" in out
    assert guessed not in out


def test_simulate_from_a_run_of_one_and_one_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = {"forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    for devices, seconds, took in ((1, 30.0, phases), (4, 33.0, phases | {"communication": 0.01})):
        document: dict[str, Any] = results(devices, seconds, phases=took) | {"parameters": 100}
        (tmp_path / str(devices)).mkdir()
        (tmp_path / str(devices) / "training_results.json").write_text(json.dumps(document))
    folders = [str(tmp_path / name) for name in ("1", "4")]
    flags = ["--devices", "4", "64"]
    code, out, _ = said(["simulate", *folders, *flags], capsys)
    assert code == 0
    assert [line.count(" 90.9% ") for line in out.splitlines()[3:5]] == [3, 2]
    assert re.search(
        r"A step of 4 devices took 110 ms, which is 9.9\d ms more than all of this", out
    )
    assert "the figures are upper bounds" not in out
    code, _, err = said(["simulate", *folders, "--batch-size", "64"], capsys)
    assert code == 2
    assert "has batches of 32 on each device, and the simulation has 64" in err
    code, _, err = said(["simulate", folders[0], folders[0]], capsys)
    assert code == 2
    assert "is a run of one device, too" in err
    document = results(4, 33.0, phases=phases) | {"parameters": 5}
    (tmp_path / "4" / "training_results.json").write_text(json.dumps(document))
    code, _, err = said(["simulate", *folders], capsys)
    assert code == 4
    assert "the parameters is 100 in" in err


def test_simulate_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--compute-time 0.1 --gradient-bytes 100MB --batch-size 32 --devices 8 --overlap 0"
    code, out, _ = said(["simulate", *flags.split(), "--between", "1GB"], capsys)
    assert code == 0
    # A sum of 100 MB between two nodes of 1 GB/s takes as long as a step computes.
    assert " 49.9% " in out and out.splitlines()[3].endswith("the sum")
    for sizes in (["8,16"], ["8", "16"]):
        code, out, _ = said(["simulate", *flags.split(), "--devices", *sizes], capsys)
        assert [line.split()[0] for line in out.splitlines()[3:5]] == ["8", "16"]


def test_simulate_takes_another_batch_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = {"data_wait": 0.1, "forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    document: dict[str, Any] = results(1, 30.0, phases=phases)
    (tmp_path / "training_results.json").write_text(json.dumps(document))
    code, out, _ = said(["simulate", str(tmp_path), "--batch-size", "64"], capsys)
    assert code == 0
    assert "computes 200 ms a step, 120 ms of it backward, on 64 samples." in out
    assert "A batch of 32 was measured, and one of 64 is assumed to take the same time" in out
    assert "makes 160 samples/s as in the run" in out
    assert out.splitlines()[3].endswith("data")
    flags = ["--batch-size", "64", "--compute-time", "0.15"]
    code, out, _ = said(["simulate", str(tmp_path), *flags], capsys)
    assert "computes 150 ms a step, 100 ms of it backward, on 64 samples." in out
    assert "was measured" not in out
