"""The verb's simulation, from runs."""

import json
import re
from typing import Any

from .kit import results, said


def test_simulate_from_a_run_prints_its_assumptions(tmp_path, capsys) -> None:
    phases = {"forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    document: dict[str, Any] = results(1, 30.0, phases=phases) | {"gradient_bytes": 100 * 2**20}
    (tmp_path / "training_results.json").write_text(json.dumps(document))
    code, out, _ = said(["simulate", str(tmp_path), "--gpus-per-node", "8"], capsys)
    assert code == 0
    sizes = [line.split()[0] for line in out.splitlines()[3:13]]
    assert sizes == ["8", "16", "32", "64", "128", "256", "512", "1,024", "2,048", "4,096"]
    assert "computes 100 ms a step, 60.0 ms of it backward, on 32 samples." in out
    assert "100 MiB of gradients are summed by a ring" in out
    assert "Batches are always ready in time." in out
    # A sum of 100 MiB between two nodes of 1 GB/s takes as long as a step computes.
    slow = ["--between", "1GB", "--overlap", "0"]
    _, out, _ = said(["simulate", str(tmp_path), *slow, "--devices", "8", "16"], capsys)
    lines = out.splitlines()[3:5]
    assert [line.split()[0] for line in lines] == ["8", "16"]
    assert lines[0].endswith("the sum")
    for words in (["--between", "0"], [str(tmp_path)] * 2):
        assert said(["simulate", str(tmp_path), *words], capsys)[0] == 2
    assert said(["simulate"], capsys)[0] == 2


def test_simulate_from_a_run_of_one_and_one_of_several(tmp_path, capsys) -> None:
    phases = {"forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    for devices, seconds, took in ((1, 30.0, phases), (4, 33.0, phases | {"communication": 0.01})):
        document: dict[str, Any] = results(devices, seconds, phases=took) | {
            "parameters": 100,
            "gradient_bytes": 400,
        }
        (tmp_path / str(devices)).mkdir()
        (tmp_path / str(devices) / "training_results.json").write_text(json.dumps(document))
    folders = [str(tmp_path / name) for name in ("1", "4")]
    flags = ["--devices", "4", "8"]
    code, out, _ = said(["simulate", *folders, *flags], capsys)
    assert code == 0
    assert [line.count(" 90.9% ") for line in out.splitlines()[3:5]] == [1, 1]
    assert re.search(
        r"A step of 4 devices took 110 ms, which is 9.9\d ms more than all of this", out
    )
    assert "the figures are upper bounds" not in out
    code, _, err = said(["simulate", folders[0], folders[0]], capsys)
    assert code == 2
    assert "is a run of one device, too" in err
    document = results(4, 33.0, phases=phases) | {"parameters": 5}
    (tmp_path / "4" / "training_results.json").write_text(json.dumps(document))
    code, _, err = said(["simulate", *folders], capsys)
    assert code == 4
    assert "the parameters is 100 in" in err
