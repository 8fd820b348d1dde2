"""``penstock doctor``: what it says of other machines."""

import json
from typing import Any

from penstock.cli import doctor, main

from ..instruments.kit import ENVIRONMENT, limits_of


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


def test_doctor_says_it_all_and_writes_it(tmp_path, capsys) -> None:
    report = tmp_path / "new" / "report.json"
    assert main(["doctor", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert titles == ["Machine", "Libraries", "Limits"]
    assert json.loads(report.read_text())["environment"]["machine"]["cores"] > 0
