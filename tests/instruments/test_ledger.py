"""The ledger: appended whole or not at all, read for ever, exported without loss of meaning."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.instruments.ledger import Ledger, ledger_to_csv, read_ledger
from penstock.instruments.record import Failure, Memory, Record, Warmup, case_key, parse_record

from ..anew import fork
from ..places import DATA
from ..rows import rows_of

STORED = DATA / "records-v1.jsonl"
SCHEMA_FILE = Path(str(resources.files("penstock").joinpath("instruments/record.schema.json")))


def record(number: int = 0, **fields: Any) -> Record:
    case = fields.pop("case", {"batch": number, "tile": "256"})
    whole = {
        "id": f"{number:032x}", "time": "2026-11-21T14:33:49.000+00:00", "scenario": "model",
        "case": case, "key": case_key("model", case), "launch": 0, "status": "ok",
    }  # fmt: skip
    return Record.model_validate(whole | fields)


def failed(number: int) -> Record:
    return record(
        number, status="oom_device", error=Failure(stage="warmup", message='no room, "really"')
    )


def test_what_is_appended_is_read(tmp_path) -> None:
    ledger = Ledger(tmp_path / "new" / "folder")
    assert ledger.records() == []
    assert not ledger.path.parent.exists()
    records = [record(0, samples_s={"step": (0.1, 1 / 3)}), failed(1), record(2)]
    for each in records:
        ledger.append(each)
    assert (
        ledger.records() == read_ledger(ledger.path.parent) == read_ledger(ledger.path) == records
    )
    assert ledger.path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("cut", [1, 10, 100, -2])
def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next(tmp_path, cut: int) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(record(0))
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + failed(1).line().encode()[:cut])
    assert ledger.records() == [record(0)]
    ledger.append(record(2))
    assert ledger.records() == [record(0), record(2)]
    assert ledger.path.read_bytes() == whole + record(2).line().encode() + b"\n"


def test_a_line_that_lacks_only_its_newline_is_a_record(tmp_path) -> None:
    ledger = Ledger(tmp_path)
    ledger.path.write_text(record(0).line() + "\n" + failed(1).line())
    assert ledger.records() == [record(0), failed(1)]
    ledger.append(record(2))
    assert ledger.records() == [record(0), failed(1), record(2)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (record(1).line()[:-20], "line 2: "),
        ("", "line 2: "),
        ("[]", "line 2: "),
        ('{"id": "no schema"}', "line 2: schema: Field required"),
        (record(1).line().replace('"ok"', '"fine"'), "line 2: status: "),
        (record(1).line().replace('"schema":1', '"schema":2'), "line 2: the record is of schema 2"),
        (record(1, samples_s={"step": (0.5,)}).line().replace("[0.5]", "[]"), "samples_s.step: "),
        ('{"schema": 3, "all": "else differs"}', "line 2: the record is of schema 3; this"),
        ("\xff\xfe", "line 2: "),
    ],
    ids=["torn", "empty", "list", "no schema", "status", "newer", "samples", "other", "bytes"],
)
def test_a_bad_middle_line_is_named_and_nothing_is_lost(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(f"{record(0).line()}\n{line}\n{record(2).line()}\n".encode("latin-1"))
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        read_ledger(tmp_path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_ledger_that_is_not_there_is_a_usage_error(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"absent.*cannot be read: No such file"):
        read_ledger(tmp_path / "absent")


def test_a_ledger_that_cannot_be_written_is_a_usage_error(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        Ledger(tmp_path / "file").append(record())


def append(first: int, folder: Path) -> None:
    one = record()
    for number in range(first, first + 25):
        more = {"case": {**one.case, "batch": number}, "facts": {"long": "x" * 20_000}}
        Ledger(folder).append(one.model_copy(update=more))


@pytest.mark.slow
def test_processes_that_append_at_once_do_not_mix_their_lines(tmp_path) -> None:
    ledger = tmp_path / "ledger"
    other = fork(lambda: append(25, ledger), tmp_path)
    append(0, ledger)
    assert other() == (0, "", "")
    batches = [each.case["batch"] for each in read_ledger(ledger)]
    assert sorted(batches) == list(range(50))
    for first in (0, 25):  # each in its own order
        assert [n for n in batches if first <= n < first + 25] == list(range(first, first + 25))


# All of Unicode would be listed anew on each machine, which takes seconds.
text = st.text("aZ09_ \0\n\r\t\x1b\"\\'/{}[],:é\x85\u2028\ufeff\uffff\U0001f600")
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    case=st.dictionaries(text, plain, max_size=4),
    seconds=st.lists(st.floats(0, 1e6), min_size=1, max_size=8),
    message=text,
)
def test_a_record_is_the_same_after_its_line(case, seconds, message) -> None:
    before = record(
        case=case,
        samples_s={"step": seconds},
        error={"stage": "measure", "message": message},
        facts={"case": case},
    )
    line = before.line()
    assert "\n" not in line
    after = parse_record(line.encode())
    assert after == before
    assert after.key == case_key("model", after.case)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_time_that_is_no_number_is_no_sample(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        record(samples_s={"step": (1.0, value)})


def json_schema() -> dict[str, Any]:
    return Record.model_json_schema(by_alias=True) | {
        "$schema": "https://json-schema.org/draft/2020-12/schema"
    }


def test_the_published_schema_is_the_records() -> None:
    """To write it anew: python -m tests.instruments.test_ledger"""
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema()


@pytest.mark.slow
def test_stored_files_are_valid_by_the_published_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA_FILE.read_text())
    for line in STORED.read_text().splitlines():
        jsonschema.validate(json.loads(line), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(record().line()) | {"status": "fine"}, schema)


def measured() -> list[Record]:
    return [
        record(
            0,
            case={"batch": 1, "tile": "256", "amp": False, "shape": [1, 2]},
            samples_s={"step": [i / 100 for i in range(1, 12)], "device": (0.5,)},
            work={"pixels": 65536.0},
            stop="precise",
            warmup=Warmup(first_s=2.5, settled=True),
            memory=Memory(host_peak=123),
            environment={"machine_key": "abc"},
        ),
        failed(2),
        record(3, case={"batch": "auto", "other": 0.5}),
    ]


def test_csv_is_wide_and_what_is_missing_is_empty(tmp_path) -> None:
    ledger_to_csv(measured(), tmp_path / "deep" / "out.csv")
    first, second, third = rows_of(tmp_path / "deep" / "out.csv")
    assert first | {
        "status": "ok", "machine_key": "abc", "stop": "precise", "work.pixels": "65536.0",
        "case.batch": "1", "case.tile": "256", "case.amp": "False", "case.shape": "[1,2]",
        "step.n": "11", "step.median_s": "0.06", "step.low_s": "0.02", "step.high_s": "0.1",
        "device.n": "1", "device.median_s": "0.5", "device.low_s": "", "device.high_s": "",
        "warmup.first_s": "2.5", "warmup.compile_s": "", "warmup.settled": "True",
        "memory.host_peak": "123", "memory.device_peak": "", "error.message": "",
    } == first  # fmt: skip
    assert second["status"] == "oom_device" and second["error.message"] == 'no room, "really"'
    assert second["step.n"] == second["step.median_s"] == second["case.other"] == ""
    assert third["case.batch"] == "auto" and third["case.other"] == "0.5"
    names = list(first)
    assert names[:3] == ["id", "time", "scenario"] and len(set(names)) == len(names)
    cases = [place for place, name in enumerate(names) if name.startswith("case.")]
    assert cases == list(range(cases[0], cases[0] + 5))  # beside each other


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(json_schema(), indent=2) + "\n")


def test_a_table_is_no_ledger(tmp_path) -> None:
    (tmp_path / "runs.csv").write_text("devices,seconds\n1,362.45\n")
    with pytest.raises(UsageError, match=r"runs.csv is not a ledger: it begins with 'devices,sec"):
        read_ledger(tmp_path / "runs.csv")
