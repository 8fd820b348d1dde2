"""``penstock doctor``: what it says of other machines, and of devices that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import doctor, main

from ..instruments.kit import ENVIRONMENT, limits_of

NOISE = {
    "n": 6,
    "disturbed": 0,
    "spread": 0.041,
    "ratio": 1.01,
    "low": 0.99,
    "high": 1.031,
    "threshold": 0.031,
}


def test_sections_of_a_machine_that_says_everything() -> None:
    gpu = {"index": 0, "name": "H200", "memory_bytes": 139 * 2**30, "driver": "570.1"}
    text = said(ENVIRONMENT | {"gpus": [gpu]})
    for words in (
        "Some CPU", "8, 4 of them physical", "16.0 GiB", "H200, 139 GiB, driver 570.1",
        "8 of 8 cores",
    ):  # fmt: skip
        assert words in text
    assert doctor.MISSING not in text


def test_what_is_missing_is_said_to_be_missing() -> None:
    nameless = ENVIRONMENT["machine"] | {"processor": None, "physical_cores": None}
    text = said(limits_of(affinity=None) | {"gpus": None, "machine": nameless})
    assert text.count(doctor.MISSING) == 2 and text.count("NVML did not answer") == 1
    assert "None" not in text and "unknown of them physical" in text


def said(block: dict[str, Any]) -> str:
    sections = (doctor.machine, doctor.libraries, doctor.limited)
    return "\n".join(line for section in sections for line in section(block)[1])


def test_the_sentence_of_the_noise_floor() -> None:
    *_, last = doctor.noise_lines(NOISE, "cpu")
    assert last == "Differences under 3.1 % cannot be distinguished from noise here."
    assert "4.1 %" in doctor.noise_lines(NOISE, "cpu")[0]
    *_, changed = doctor.noise_lines(NOISE | {"threshold": 0.2}, "cpu")
    assert "20.0 %" in changed
    assert doctor.noise_lines(NOISE | {"disturbed": 4}, "cpu")[0].endswith("as 4 of them began.")


def test_what_could_not_be_measured_is_said() -> None:
    failed = {"value": None, "note": "torch is not here", "threshold": None}
    assert doctor.noise_lines(failed, "cpu") == ["not measured: torch is not here"]


@pytest.mark.parametrize(
    ("gpus", "torch", "device"),
    [
        ([], "2.13.0", "cpu"),
        ([{}], "2.13.0+cpu", "cpu"),
        ([{}], "2.13.0", "cuda:0"),
        ([{}], None, "cpu"),
        (None, "2.13.0", "cpu"),
    ],
)
def test_the_device_is_a_gpu_where_torch_can_use_one(
    gpus: list[Any] | None, torch: str | None, device: str
) -> None:
    assert doctor.default_device({"gpus": gpus, "libraries": {"torch": torch}}) == device


def test_doctor_says_it_all_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "noise_floor", lambda *args, **options: NOISE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = tmp_path / "new" / "report.json"
    assert main(["doctor", "--json", str(report), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "Machine", "Libraries", "Limits", "Noise floor",
        f"The records are in {tmp_path / 'penstock/doctor.ledger/records.jsonl'}.",
    ]  # fmt: skip
    facts = json.loads(report.read_text())
    assert facts["noise"] == NOISE and facts["device"] == "cpu"


@pytest.mark.parametrize(("device", "code"), [("cuda:7", 2), ("auto", 0)])
def test_a_device_that_was_asked_for_and_is_absent_is_refused(
    device: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = NOISE | {"threshold": None, "note": "no such device"}
    monkeypatch.setattr(doctor, "collect_environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(doctor, "noise_floor", lambda *args, **options: nothing)
    assert main(["doctor", "--device", device]) == code
    refused = "--device cuda:7 cannot be measured: no such device"
    assert (refused in capsys.readouterr().err) == (code == 2)
