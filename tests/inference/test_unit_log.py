"""done.log: checks of what is written, whole lines and torn ones, logs of older versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.inference.run_folder.checks import check_of
from penstock.inference.run_folder.journal import Journal
from penstock.inference.run_folder.local import LocalFolder
from penstock.inference.run_folder.unit_log import Note, line_of, lost_line, read_lines

from ..parameters import crossed
from .kit import SMALL, arange

UNIT, CHECKS = (0, 1, -16, 128), ("vcafe0123cafe0123", "f0000000000000000")


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "uint64", "float16", "float64"])
def test_a_check_is_of_values_in_c_order_and_little_endian(dtype: str) -> None:
    values = (arange((3, 4, 5)) % 7).astype(dtype)
    little = values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    wanted = f"v{xxhash.xxh3_64_hexdigest(little)}"
    big = values.astype(np.dtype(dtype).newbyteorder(">"))
    for same in (values, np.asfortranarray(values), big, values[::-1][::-1]):
        assert check_of(same) == wanted
    assert check_of(values[::-1]) != wanted


def test_a_check_says_where_every_value_is_the_fill_value() -> None:
    zeros = np.zeros((2, 3, 4), "float32")
    assert [check_of(zeros, fill)[0] for fill in (None, 0, -0.0, 1)] == ["v", "f", "v", "v"]
    nan = np.full((2, 3, 4), np.nan, "float32")
    assert check_of(nan, float("nan"))[0] == "f"
    zeros[-1, -1, -1] = 1
    assert check_of(zeros, 0)[0] == "v"


@given(
    st.tuples(*[st.integers(0, 10**6)] * 4),
    st.lists(
        st.builds("{}{:016x}".format, st.sampled_from("vf"), st.integers(0, 2**64 - 1)), max_size=3
    ),
)
def test_a_line_says_what_was_noted_and_a_torn_one_nothing(
    key: tuple[int, ...], checks: list[str]
) -> None:
    line = line_of(key, checks).encode()
    assert read_lines([line]) == {key: Note(0, tuple(checks))}
    for end in range(len(line)):
        assert read_lines([line[:end]]) == {}
        assert read_lines([line[:end] + b"?\n"]) == {}  # as a resume ends it


def test_half_a_check_is_not_believed() -> None:
    for torn in ("v0123456789abcde", "0123456789abcdef", f"{CHECKS[0]}0", f"{CHECKS[0]} f0"):
        assert read_lines([f"0 0 0 0 {torn}\n".encode()]) == {}


def test_a_log_names_the_maker_of_each_unit_and_what_was_lost() -> None:
    lines = [
        line_of((0, 0, 0, 0)), line_of(UNIT, CHECKS), "# maker 1\n", line_of((0, 0, 0, 1)),
        lost_line(UNIT), lost_line((0, 0, 0, 0)), line_of((0, 0, 0, 0), CHECKS[:1]),
    ]  # fmt: skip
    assert read_lines(line.encode() for line in lines) == {
        (0, 0, 0, 0): Note(1, CHECKS[:1]), (0, 0, 0, 1): Note(1)
    }  # fmt: skip


@pytest.mark.parametrize("torn", [line_of(UNIT, CHECKS)[:end] for end in range(8, 44, 6)])
def test_a_unit_whose_line_was_torn_is_written_again(torn: str, tmp_path: Path) -> None:
    first = Journal.open(tmp_path, {}, resume=False)
    first.begin({})
    first.note((0, 0, 0, 0), 1, CHECKS)
    first.close()
    with (tmp_path / "done.log").open("a") as log:
        log.write(torn)
    again = Journal.open(tmp_path, {}, resume=True)
    again.begin({})
    again.note((0, 0, 0, 1), 1, CHECKS)
    again.close()
    assert {*Journal.open(tmp_path, {}, resume=True).done} == {(0, 0, 0, 0), (0, 0, 0, 1)}


@pytest.mark.parametrize(("suffix", "seam"), crossed(["zarr", "n5"], ["trim", "blend"]))
def test_the_checks_of_a_run_are_those_of_what_it_stored(
    suffix: str, seam: str, tmp_path: Path
) -> None:
    data, out = arange((20, 20, 20)), tmp_path / f"out.{suffix}"
    data[:10] = 0
    knobs: dict[str, Any] = {**SMALL, "block": 10, "chunks": (5, 10, 10), "normalize": "none"}
    summary = penstock.run_inference(data, out, seam_mode=seam, **knobs)
    folder = tmp_path / f"out.{suffix}.penstock"
    notes = read_lines((folder / "done.log").read_bytes().splitlines(keepends=True))
    stored = penstock.open_source(out)
    volume = stored.read(stored.domain)[0, 0]
    cells = range(0, 20, 10)
    assert len(notes) == 8
    for index, (z, y, x) in zip(np.ndindex(2, 2, 2), [(z, y, x) for z in cells for y in cells
                                                      for x in cells], strict=True):  # fmt: skip
        values = np.ascontiguousarray(volume[z : z + 10, y : y + 10, x : x + 10])
        sign = "v" if values.any() else "f"
        assert notes[(0, *index)].checks == (sign + xxhash.xxh3_64_hexdigest(values.data),)
    assert {note.checks[0][0] for note in notes.values()} == {"v", "f"}
    assert json.loads((folder / "run.json").read_text())["makers"][0]["checksum"] == "xxh3_64"
    assert summary.stages["checksum"].count == summary.stages["note"].count == 8


def test_a_run_folder_of_an_older_version_resumes(tmp_path: Path) -> None:
    data, out = arange((20, 20, 20)), tmp_path / "out.zarr"
    knobs: dict[str, Any] = {**SMALL, "patch": 10, "overlap": 0, "block": 10, "chunks": 10}
    penstock.run_inference(data, out, **knobs)
    log = tmp_path / "out.zarr.penstock/done.log"
    lines = log.read_text().splitlines()
    log.write_text("".join(" ".join(line.split()[:4]) + "\n" for line in lines[:5]))
    noted = tmp_path / "out.zarr.penstock/run.json"
    content = json.loads(noted.read_text())
    del content["makers"][0]["checksum"]
    noted.write_text(json.dumps(content))
    summary = penstock.run_inference(data, out, resume=True, **knobs)
    assert (summary.units_skipped, summary.units_written) == (5, 3)


def test_the_trace_shows_the_checksums(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    penstock.run_inference(arange((8, 8, 8)), tmp_path / "out.zarr", trace=trace, **SMALL)
    names = {event["name"] for event in json.loads(trace.read_text())}
    assert {"checksum", "note", "write"} <= names


def test_logs_are_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    log, other = tmp_path / "done.log", tmp_path / "done-b.log"
    one, two, three = ((0, 0, 0, number) for number in (1, 2, 3))
    log.write_text(line_of(one) + "0 0 0")
    notes = LocalFolder(tmp_path).notes("")
    assert notes.fresh().keys() == {one}
    read = "?" * (len(line_of(one)) - 1) + "\n"  # which is not read again
    log.write_text(read + line_of(two))
    other.write_text(line_of(three))
    assert notes.fresh().keys() == {two, three}
    assert notes.fresh() == {}


def test_a_run_begun_anew_reads_its_logs_from_their_begin(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"settings": {}, "fingerprint": {}}')
    (tmp_path / "done-b.log").write_text("# maker 0\n" * 100)
    journal = Journal.open(tmp_path, {}, resume=True, anyway=True)
    journal.begin({})
    (tmp_path / "done-b.log").write_text(line_of(UNIT))  # a worker of the same name
    journal.refresh()
    assert {*journal.done} == {UNIT}
    journal.close()
