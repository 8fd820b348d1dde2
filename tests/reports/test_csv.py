"""The CSV of a benchmark of models survives everything: the seed's, torn lines, full disks."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.reports.model.cell import MODEL_COLUMNS
from penstock.reports.page import append_csv
from penstock.reports.table import append_rows, read_csv

from ..rows import rows_of
from .kit import MEASURED, SEED_CSV, launch, sweep

COLUMNS = MODEL_COLUMNS.names


def test_a_new_file_reads_back(tmp_path) -> None:
    path = tmp_path / "logs" / "bench.csv"
    append_csv("model", sweep(MEASURED), path, timestamp="2026-11-21T15:00:00")
    rows = rows_of(path)
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert [(row["tile_size"], row["batch_size"]) for row in rows] == [
        *[("256", "1"), ("256", "2"), ("384", "1"), ("384", "2")]
    ]
    assert {row["timestamp"] for row in rows} == {"2026-11-21T15:00:00"}
    assert [float(row["median_time_ms"]) for row in rows] == pytest.approx([*MEASURED.values()])
    assert [path.name for path in tmp_path.glob("logs/*")] == ["bench.csv"]


def test_appending_leaves_what_is_there(tmp_path) -> None:
    path = tmp_path / "bench.csv"
    append_csv("model", sweep(MEASURED), path)
    before = path.read_bytes()
    append_csv("model", [launch(512, 4, status="oom_host"), launch(case={"mode": "train"})], path)
    assert path.read_bytes().startswith(before)
    assert [row["error"] for row in rows_of(path)] == ["", "", "", "", "", "OOM"]
    assert rows_of(path)[4]["total_time_ms"] == "30"


def test_the_seeds_own_file_is_upgraded_in_place(tmp_path) -> None:
    path = tmp_path / "bench.csv"
    path.write_bytes(SEED_CSV.encode())
    path.chmod(0o640)
    append_csv("model", [launch()], path)
    rows = rows_of(path)
    assert tuple(rows[0]) == COLUMNS
    assert [row["avg_time_ms"] for row in rows] == ["29.7", "45.9", "30"]
    assert [row["memory_peak_mb"] for row in rows] == ["0.0", "0.0", ""]
    assert rows[0]["status"] == "" and rows[0]["timestamp"] == "2025-10-14T10:14:38"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [*tmp_path.iterdir()] == [path]


NOTHING = dict.fromkeys(COLUMNS, "")


@given(
    columns=st.lists(
        st.one_of(st.sampled_from(COLUMNS), st.text("abc_", min_size=1, max_size=3)),
        unique=True,
        max_size=8,
    ),
    data=st.data(),
)
def test_whatever_the_header_nothing_is_lost(tmp_path_factory, columns, data) -> None:
    header = [*columns, *({"tile_size", "batch_size"} - set(columns))]
    fields = st.text("a1 ,;\"'\n\té\u2028\U0001f600", max_size=6)
    row = st.lists(fields, min_size=len(header), max_size=len(header))
    old = data.draw(st.lists(row, max_size=3))
    path = tmp_path_factory.mktemp("law") / "bench.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *old])
    for tile in ("256", "384"):
        append_rows([NOTHING | {"tile_size": tile}], path, MODEL_COLUMNS)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [[row[name] for name in header] for row in rows[:-2]] == old
    assert [row["tile_size"] for row in rows[-2:]] == ["256", "384"]
    assert tuple(rows[0])[: len(COLUMNS)] == COLUMNS


@pytest.mark.parametrize("cut", [1, 2, 40, 150])
def test_a_torn_last_line_is_cut_off_or_ended(tmp_path, cut: int) -> None:
    path = tmp_path / "bench.csv"
    append_csv("model", sweep(MEASURED), path)
    path.write_bytes(path.read_bytes()[:-cut])
    append_csv("model", [launch(512)], path)
    tiles = [row["tile_size"] for row in rows_of(path)]
    # Without its newline, or without a letter of the last field, the line has all its fields.
    assert tiles == ["256", "256", "384", *["384"] * (cut < 3), "512"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "is not a CSV"),
        (b'{"schema": 1}\n', r"is not the CSV of a benchmark: it begins with '\{"),
        (b"name,age\nx,1\n", "is not the CSV of a benchmark: it begins with 'name,age'"),
        (b"tile_size,batch_size,tile_size\n", "is not the CSV of a benchmark"),
        (SEED_CSV.encode() + b"1,2\n256,1\n", r"line 4: 2 fields under a header of 13"),
    ],
)
def test_what_is_no_benchmark_is_refused_untouched(tmp_path, content: bytes, message: str) -> None:
    path = tmp_path / "bench.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"bench\.csv.*{message}"):
        append_csv("model", [launch()], path)
    assert path.read_bytes() == content and [*tmp_path.iterdir()] == [path]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "bench.csv"
    path.write_text(SEED_CSV)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match=r"bench\.csv cannot be written: No space left"):
        append_csv("model", [launch()], path)
    header, _ = read_csv(path, ())
    assert header == SEED_CSV.splitlines()[0].split(",")
    assert [*tmp_path.iterdir()] == [path]


def test_a_place_that_cannot_be_written_and_a_link(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        append_csv("model", [launch()], tmp_path / "file" / "bench.csv")

    (tmp_path / "real.csv").write_text(SEED_CSV)
    (tmp_path / "link.csv").symlink_to("real.csv")
    append_csv("model", [launch()], tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink()
    assert len(rows_of(tmp_path / "real.csv")) == 3
