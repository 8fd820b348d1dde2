"""Report: columns by name and unit, a CSV that survives everything, sentences that follow data."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.instruments.record import Record, case_key
from penstock.reports.cell import cell_ratio
from penstock.reports.model.cell import MODEL_COLUMNS, SEED_COLUMNS, ModelCell, model_cells
from penstock.reports.model.report import append_model_csv, labelled, model_sections, roof_line
from penstock.reports.table import MB, in_markdown, in_text, read_csv

COLUMNS = MODEL_COLUMNS.names

SEED_CSV = (
    "avg_time_ms,batch_size,device,memory_allocated_mb,memory_peak_mb,memory_reserved_mb,mode,"
    "model_params,model_size_mb,std_time_ms,throughput_samples_per_sec,tile_size,timestamp\r\n"
    "29.7,1,cpu,0.0,0.0,0.0,inference,6600532,25.2,0.7,33.6,256,2025-10-14T10:14:38\r\n"
    "45.9,1,cpu,0.0,0.0,0.0,inference,6600532,25.2,1.4,21.8,384,2025-10-14T10:14:44\r\n"
)
"""In the shape of the seed's own writer: sorted columns, carriage returns."""

MEASURED = {(256, 1): 29.718066, (256, 2): 43.777886, (384, 1): 45.901424, (384, 2): 73.835202}
"""Milliseconds, as the seed's file has them: what its document says of them must come out."""


def launch(
    tile: int | str = 256,
    batch: int = 1,
    number: int = 0,
    seconds: Sequence[float] = (0.03,),
    status: str = "ok",
    case: dict[str, Any] | None = None,
    **fields: Any,
) -> Record:
    """A record of scenario ``model``; ``case`` and ``fields`` override what it usually is."""
    knobs: dict[str, Any] = {
        "model": "prithvi-refiner-tiny", "weights": None, "mode": "inference", "tile": str(tile),
        "batch": batch, "channels": None, "dtype": "float32", "amp": False, "compile": False,
        "channels_last": False, "checkpointing": False, "halo": 0, "device": "cpu",
        "threads": None, "seed": 0, "budget": None, **(case or {}),
    }  # fmt: skip
    sides = [int(side) for side in str(tile).split("x")]
    sides = sides * 2 if len(sides) == 1 else sides
    usual: dict[str, Any] = {
        "id": f"{tile}-{batch}-{number}",
        "time": f"2026-11-21T14:00:0{number % 10}+00:00",
        "work": {
            "samples": batch,
            "pixels": batch * int(np.prod(sides)),
            "useful_pixels": batch * int(np.prod([side - 2 * knobs["halo"] for side in sides])),
        },
        "samples_s": {"step": tuple(seconds)},
        "facts": {"parameters": 1000, "model_bytes": 3 * 2**20, "tile_shape": sides},
        "environment": {"machine_key": "here"},
    }
    if status != "ok":
        usual |= {"work": {}, "samples_s": {}, "error": {"stage": "measure", "message": status}}
    return Record(
        **{"schema": 1, "scenario": "model", "case": knobs, "launch": number, "status": status}
        | {"key": case_key("model", knobs)}
        | usual
        | fields
    )


def sweep(
    milliseconds: dict[tuple[int, int], float],
    launches: int = 5,
    spread: float = 0.01,
    **fields: Any,
) -> list[Record]:
    """Launches whose medians are exactly those given and lie ``spread`` about them."""
    shifts = np.linspace(-spread, spread, launches) if launches > 1 else [0.0]
    return [
        launch(tile, batch, number, ms / 1e3 * (1 + shift) * np.linspace(0.995, 1.005, 9), **fields)
        for (tile, batch), ms in milliseconds.items()
        for number, shift in enumerate(shifts)
    ]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows), "a line is ragged"
    return rows


# --- cells --------------------------------------------------------------------------------------


def test_the_seeds_columns_come_first() -> None:
    table = """timestamp mode tile_size batch_size device model_params model_size_mb avg_time_ms
        std_time_ms throughput_samples_per_sec memory_allocated_mb memory_reserved_mb memory_peak_mb
        forward_time_ms backward_time_ms total_time_ms error"""
    assert list(SEED_COLUMNS) == table.split() == list(COLUMNS[:17])
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_a_cell_is_the_launches_of_one_case_on_one_machine() -> None:
    records = [
        *sweep(MEASURED, launches=2),
        launch(256, 1, 2, environment={"machine_key": "there"}),
        launch(256, 1, 3, scenario="matmul"),
    ]
    found = model_cells(records)
    assert [(cell.tile, cell.batch, cell.launches) for cell in found] == [
        *[("256", 1, 2), ("256", 1, 1), ("256", 2, 2), ("384", 1, 2), ("384", 2, 2)]
    ]


def test_numbers_of_a_cell() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.gamma(4, 0.01, n) for n in (20, 30, 40)]
    records = [launch(256, 2, i, own, steps_per_sample=i + 1) for i, own in enumerate(samples)]
    (cell,) = model_cells(records)
    assert cell.time is not None and cell.time.n >= 2
    assert cell.time.value == pytest.approx(np.median([np.median(own) for own in samples]))
    assert cell.time.low is not None and cell.time.high is not None
    assert cell.time.low < cell.time.value < cell.time.high

    steps = np.concatenate([np.repeat(own, i + 1) for i, own in enumerate(samples)])
    assert cell.mean() == pytest.approx(steps.mean())
    assert cell.mean_rate("samples") == pytest.approx(2 * len(steps) / steps.sum())
    assert cell.rate("samples") == pytest.approx(2 / cell.time.value)
    assert cell.rate("samples") != pytest.approx((2 / steps).mean(), rel=0.05)  # no mean of rates
    assert cell.std == pytest.approx(np.concatenate(samples).std())
    assert cell.rate("flops") is None


def test_an_interval_of_one_launch_is_of_its_samples() -> None:
    (cell,) = model_cells([launch(seconds=np.arange(1, 12) / 10)])
    assert cell.time is not None
    assert (cell.time.value, cell.time.low, cell.time.high) == (0.6, 0.2, 1.0)


def test_a_row_by_column() -> None:
    memory = {
        "host_peak": 5 * 2**20, "host_peak_kernel": 6 * 2**20, "device_allocated": 2**20,
        "device_peak": 3 * 2**20, "device_reserved": 4 * 2**20, "device_driver": 9 * 2**20,
        "alloc_retries": 0,
    }  # fmt: skip
    seconds = {"step": (0.1, 0.3), "forward": (0.02, 0.04), "backward": (0.07, 0.23)}
    records = [
        launch(
            *("32x256x256", 4, number),
            case={"mode": "train", "halo": 8, "device": "cuda:0", "budget": 2**30, "amp": True},
            samples_s=seconds | {"optimizer": (0.01, 0.03)},
            memory=memory | {"device_peak": (3 + number) * 2**20},
            work={"samples": 4, "pixels": 100, "useful_pixels": 50, "flops": 1000},
            environment={"machine_key": "m", "git": {"commit": "abc", "dirty": True}},
            warmup={"settled": number > 0},
        )
        for number in range(2)
    ]
    row = model_cells(records)[0].row
    assert tuple(row) == COLUMNS
    expected = {
        "timestamp": "2026-11-21T14:00:01+00:00", "mode": "train", "tile_size": "32x256x256",
        "batch_size": "4", "device": "cuda:0", "model_params": "1000", "model_size_mb": "3",
        "avg_time_ms": "200", "std_time_ms": "100", "throughput_samples_per_sec": "20",
        "memory_allocated_mb": "1", "memory_reserved_mb": "4", "memory_peak_mb": "4",
        "forward_time_ms": "30", "backward_time_ms": "150", "total_time_ms": "200", "error": "",
        "model": "prithvi-refiner-tiny", "weights": "", "channels": "", "dtype": "float32",
        "amp": "True", "compile": "False", "channels_last": "False", "checkpointing": "False",
        "halo": "8", "threads": "", "seed": "0", "budget_mb": "1024", "status": "ok",
        "launches": "2", "failed": "0", "samples": "4", "unsettled": "1",
        "median_time_ms": "200", "optimizer_time_ms": "20", "pixels_per_sec": "500",
        "useful_pixels_per_sec": "250", "host_peak_mb": "6", "memory_driver_mb": "9",
        "alloc_retries": "0", "flops_per_step": "1000", "flops_per_sec": "5000", "structure": "",
        "machine_key": "m", "commit": "abc+dirty", "key": records[0].key,
    }  # fmt: skip
    assert {name: value for name, value in row.items() if name in expected} == expected
    assert 100 <= float(row["low_time_ms"]) <= 200 <= float(row["high_time_ms"]) <= 300


def test_missing_is_empty_and_never_0() -> None:
    row = model_cells([launch()])[0].row
    for name in COLUMNS:
        known_zeros = {"halo", "seed", "failed", "unsettled"}
        assert row[name] != "0" or name in known_zeros, name
    for name in ("memory_peak_mb", "host_peak_mb", "std_time_ms", "total_time_ms", "flops_per_sec"):
        assert row[name] == "", name
    assert row["low_time_ms"] == ""  # one sample bounds nothing


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("oom_device", "OOM"),
        ("oom_host", "OOM"),
        ("crash", "crash: signal 11 in the net"),
        ("timeout", "timeout: signal 11 in the net"),
    ],
)
def test_a_failure_is_a_row(status: str, error: str) -> None:
    failure = {"stage": "measure", "message": "signal 11\nin the net"}
    peak = {"host_peak": 7 * 2**20}
    records = [launch(512, 4, n, status=status, error=failure, memory=peak) for n in range(2)]
    row = model_cells(records)[0].row
    assert (row["error"], row["status"], row["failed"]) == (error, status, "2")
    assert (row["launches"], row["avg_time_ms"], row["throughput_samples_per_sec"]) == ("0", "", "")
    assert row["host_peak_mb"] == "7"


def test_a_case_that_failed_once_is_not_ok() -> None:
    (cell,) = model_cells([launch(number=0), launch(number=1), launch(number=2, status="oom_host")])
    assert (cell.status, cell.launches, cell.row["error"]) == ("oom_host", 2, "OOM")
    assert cell.row["avg_time_ms"] == "30"


# --- the CSV ------------------------------------------------------------------------------------


def test_a_new_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "bench.csv"
    append_model_csv(sweep(MEASURED), path, when="2026-11-21T15:00:00")
    rows = rows_of(path)
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert [(row["tile_size"], row["batch_size"]) for row in rows] == [
        *[("256", "1"), ("256", "2"), ("384", "1"), ("384", "2")]
    ]
    assert {row["timestamp"] for row in rows} == {"2026-11-21T15:00:00"}
    assert [float(row["median_time_ms"]) for row in rows] == pytest.approx([*MEASURED.values()])
    assert [path.name for path in tmp_path.glob("logs/*")] == ["bench.csv"]


def test_appending_leaves_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    append_model_csv(sweep(MEASURED), path)
    before = path.read_bytes()
    append_model_csv([launch(512, 4, status="oom_host"), launch(case={"mode": "train"})], path)
    assert path.read_bytes().startswith(before)
    assert [row["error"] for row in rows_of(path)] == ["", "", "", "", "", "OOM"]
    assert rows_of(path)[4]["total_time_ms"] == "30"


def test_the_seeds_own_file_is_upgraded_in_place(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    path.write_bytes(SEED_CSV.encode())
    path.chmod(0o640)
    append_model_csv([launch()], path)
    rows = rows_of(path)
    assert tuple(rows[0]) == COLUMNS
    assert [row["avg_time_ms"] for row in rows] == ["29.7", "45.9", "30"]
    assert [row["memory_peak_mb"] for row in rows] == ["0.0", "0.0", ""]
    assert rows[0]["status"] == "" and rows[0]["timestamp"] == "2025-10-14T10:14:38"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [*tmp_path.iterdir()] == [path]


@given(
    columns=st.lists(
        st.one_of(st.sampled_from(COLUMNS), st.text("abc_", min_size=1, max_size=3)),
        unique=True,
        max_size=8,
    ),
    data=st.data(),
)
def test_whatever_the_header_nothing_is_lost(
    tmp_path_factory: pytest.TempPathFactory, columns: list[str], data: st.DataObject
) -> None:
    header = [*columns, *({"tile_size", "batch_size"} - set(columns))]
    fields = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=6)
    row = st.lists(fields, min_size=len(header), max_size=len(header))
    old = data.draw(st.lists(row, max_size=3))
    path = tmp_path_factory.mktemp("law") / "bench.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *old])
    append_model_csv([launch(256)], path)
    append_model_csv([launch(384)], path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [[row[name] for name in header] for row in rows[:-2]] == old
    assert [row["tile_size"] for row in rows[-2:]] == ["256", "384"]
    assert tuple(rows[0])[: len(COLUMNS)] == COLUMNS


def test_columns_of_a_later_version_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    path.write_text("new," + ",".join(reversed(COLUMNS)) + "\n" + "1" + "," * len(COLUMNS) + "\n")
    before = path.read_bytes()
    append_model_csv([launch()], path)
    assert path.read_bytes().startswith(before)
    assert [(row["new"], row["tile_size"]) for row in rows_of(path)] == [("1", ""), ("", "256")]


@pytest.mark.parametrize("cut", [1, 2, 40, 150])
def test_a_torn_last_line_is_cut_off_or_ended(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "bench.csv"
    append_model_csv(sweep(MEASURED), path)
    path.write_bytes(path.read_bytes()[:-cut])
    append_model_csv([launch(512)], path)
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
def test_what_is_no_benchmark_is_refused_untouched(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bench.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"bench\.csv.*{message}"):
        append_model_csv([launch()], path)
    assert path.read_bytes() == content and [*tmp_path.iterdir()] == [path]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "bench.csv"
    path.write_text(SEED_CSV)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match=r"bench\.csv cannot be written: No space left"):
        append_model_csv([launch()], path)
    assert read_csv(path).header == tuple(SEED_CSV.splitlines()[0].split(","))
    assert [*tmp_path.iterdir()] == [path]


def test_a_place_that_cannot_be_written_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        append_model_csv([launch()], tmp_path / "file" / "bench.csv")

    (tmp_path / "real.csv").write_text(SEED_CSV)
    (tmp_path / "link.csv").symlink_to("real.csv")
    append_model_csv([launch()], tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink()
    assert len(rows_of(tmp_path / "real.csv")) == 3


# --- sentences ----------------------------------------------------------------------------------


def told(records: Sequence[Record]) -> list[str]:
    """The sentences of all groups."""
    return [line for section in model_sections(records) for line in section.told]


def test_the_seeds_sentences_come_out_of_the_seeds_numbers() -> None:
    lines = told(sweep(MEASURED))
    assert [re.sub(r"[\d.]+-[\d.]+", "..", line) for line in lines] == [
        "Batch 1: 384 is 1.54x slower per sample than 256 [.., 5 launches each].",
        "Batch 1: 384 processes 46 % more pixels per second than 256 [.. %, 5 launches each].",
        "Batch 2: 384 is 1.69x slower per sample than 256 [.., 5 launches each].",
        "Batch 2: 384 processes 33 % more pixels per second than 256 [.. %, 5 launches each].",
        (
            "Batch 2 improves throughput over batch 1 by 36 % (256) [.. %, 5 launches each] and "
            "24 % (384) [.. %, 5 launches each]."
        ),
    ]


def test_a_sentences_interval_is_that_of_the_ratio() -> None:
    records = sweep(MEASURED)
    small, large = (c for c in model_cells(records) if c.batch == 1)
    time = cell_ratio(small, large)
    assert time.low is not None and time.high is not None
    first, second = told(records)[:2]
    assert f"[{time.low:.2f}-{time.high:.2f}, 5 launches each]" in first
    pixels = [(384 / 256) ** 2 / end for end in (time.high, time.low)]
    assert f"[{pixels[0] * 100 - 100:.0f}-{pixels[1] * 100 - 100:.0f} %, 5" in second


def test_other_data_other_text() -> None:
    faster = told(sweep(MEASURED | {(384, 1): 20.0}))
    assert faster[0].startswith("Batch 1: 384 is 1.49x faster per sample than 256 [")
    assert "384 processes 234 % more pixels" in faster[1]
    slower = told(sweep({(256, 1): 10.0, (384, 1): 40.0, (256, 2): 21.0}))
    assert "384 processes 44 % fewer pixels per second than 256" in slower[1]
    assert "Batch 2 lowers throughput over batch 1 by 4.8 % (256)" in slower[2]


def test_what_an_interval_covers_is_not_distinguishable() -> None:
    same = {(256, 2): 20.0, (384, 2): 20.1, (256, 4): 40.1, (512, 4): 160.0}
    lines = told(sweep(same))
    assert lines[0].startswith("Batch 2: 384 and 256 are not distinguishable per sample [0.9")
    assert lines[0].endswith("5 launches each].")
    assert lines[3].startswith(
        "Batch 4: 512 and 256 are not distinguishable in pixels per second [0.9"
    )
    assert lines[4].startswith(
        "Batch 4 and batch 2 are not distinguishable in throughput (256) [0.9"
    )
    apart = told(sweep(same, spread=0.0001))
    assert not any("not distinguishable per sample" in line for line in apart)


def test_of_many_tiles_neighbours_are_compared() -> None:
    tiles = {(64 * i, 1): 10.0 * i for i in range(1, 7)}
    lines = told(sweep(tiles))
    pairs = [re.findall(r"\b(\d+) is .* than (\d+)", line) for line in lines]
    assert [pair for (pair,) in filter(None, pairs)] == [
        *[("128", "64"), ("192", "128"), ("256", "192"), ("320", "256"), ("384", "320")]
    ]


def test_one_launch_is_never_compared() -> None:
    assert told(sweep(MEASURED, launches=1)) == ["One launch each: not compared."]
    uneven = sweep({(256, 1): 30.0}) + sweep({(384, 1): 60.0, (256, 2): 50.0}, launches=1)
    assert told(uneven) == [
        "Batch 1: 384 and 256: 1 and 5 launches, not compared.",
        "Batch 2 and 1 (256): 1 and 5 launches, not compared.",
    ]


def test_useful_pixels_decide_and_are_named() -> None:
    """A halo turns the ranking of tiles round: the point that the seed missed."""
    times = {(128, 1): 10.0, (256, 1): 44.0}
    assert "256 processes 9.1 % fewer pixels per second" in told(sweep(times))[1]
    haloed = told(sweep(times, case={"halo": 32}))[1]
    assert "256 processes 105 % more useful pixels (halo 32) per second" in haloed


def test_troubles_are_told() -> None:
    oom = [launch(512, 4, n, status="oom_host", memory={"host_peak": 3 * 2**30}) for n in range(3)]
    unsteady = [launch(256, 1, n, warmup={"settled": n > 1}) for n in range(5)]
    cliff = [launch(384, 1, n, memory={"alloc_retries": 3}, status="ok") for n in range(5)]
    lines = told([*unsteady, *cliff, launch(384, 1, 5, status="timeout"), *oom])
    assert lines[:3] == [
        "Batch 1: 256 was still unsteady after warm-up in 2 of 5 launches.",
        (
            "Batch 1: 384 did not end in time in 1 of 6 launches and is on the cliff: the "
            "allocator gave its cache back 3 times to go on."
        ),
        "Batch 4: 512 ran out of host memory in 3 of 3 launches (last peak 3.00 GiB).",
    ]


def test_only_tile_and_batch_are_compared() -> None:
    other = {"amp": True}, {"mode": "train"}, {"dtype": "bfloat16"}, {"device": "cuda:0"}
    records = [record for case in other for record in sweep({(384, 2): 50.0}, case=case)]
    records += sweep({(256, 1): 30.0}) + sweep(
        {(384, 1): 10.0}, environment={"machine_key": "elsewhere"}
    )
    assert told(records) == []
    assert [section.title for section in model_sections(records)] == [
        "prithvi-refiner-tiny, inference, cpu, machine here",
        "prithvi-refiner-tiny, inference, cpu, machine elsewhere",
        "prithvi-refiner-tiny, inference, cpu, amp, machine here",
        "prithvi-refiner-tiny, train, cpu, machine here",
        "prithvi-refiner-tiny, inference, cpu, dtype bfloat16, machine here",
        "prithvi-refiner-tiny, inference, cuda:0, machine here",
    ]


def test_groups_of_rows_and_of_cells_are_the_same(tmp_path: Path) -> None:
    records = sweep(MEASURED) + sweep(MEASURED, case={"compile": True})
    append_model_csv(records, tmp_path / "bench.csv")
    measured = labelled(model_cells(records))
    read = labelled(ModelCell.of_csv(tmp_path / "bench.csv"))
    assert [label for label, _ in read] == [label for label, _ in measured]
    for (_, one), (_, other) in zip(read, measured, strict=True):
        assert [cell.row for cell in one] == [cell.row for cell in other]
        assert [(c.tile, c.batch) for c in one] == [(c.tile, c.batch) for c in other]
    assert labelled([]) == []


# --- tables -------------------------------------------------------------------------------------


def test_the_table_says_what_is_known() -> None:
    records = sweep(MEASURED, memory={"host_peak": 2**30})
    records.append(launch(512, 4, status="oom_host"))
    lines = in_text(model_sections(records))
    assert lines[0] == "prithvi-refiner-tiny, inference, cpu"
    head = re.split(r"  +", lines[2].strip())
    assert head == [
        *("tile", "batch", "step", "95 %", "samples/s", "px/s"),
        *("host peak", "launches", "status"),
    ]
    first = re.split(r"  +", lines[3].strip())
    assert first[:3] + first[4:] == [
        *("256", "1", "29.7 ms"),
        *("33.6", "2.21 M", "1.00 GiB", "5", "ok"),
    ]
    assert re.split(r"  +", lines[7].strip()) == ["512", "4", *"-----", "0", "oom_host"]
    assert lines[9] == "- Batch 4: 512 ran out of host memory in 1 of 1 launch."
    assert "useful px/s" in in_text(model_sections(sweep(MEASURED, case={"halo": 8})))[2]


def test_markdown_holds_the_same() -> None:
    text = in_markdown(model_sections(sweep(MEASURED)))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0].startswith("| tile | batch | step |") and len(table) == 6
    assert len({line.count("|") for line in table}) == 1
    bullets = [line[2:] for line in text.splitlines() if line.startswith("- ")]
    assert bullets == told(sweep(MEASURED))
    assert text.endswith(".\n") and text == in_markdown(model_sections(sweep(MEASURED)))


def test_a_launch_that_grew_slower_and_a_hot_card_are_told() -> None:
    rising = [0.03 * (1 + 0.08 * i / 99 + 0.001 * (i % 3)) for i in range(100)]
    steady = [0.03 * (1 + 0.001 * (i % 3)) for i in range(100)]
    hot = [{"throttle_reasons": 0x1}, {"throttle_reasons": 0x64}, {"throttle_reasons": None}]
    lines = told(
        [
            *(launch(256, 1, n, rising if n == 0 else steady) for n in range(3)),
            *(launch(384, 1, n, steady, clocks=hot) for n in range(2)),
        ]
    )
    assert lines[0] == "Batch 1: 256 drifted by up to +7.7% of its median in 1 of 3 launches."
    assert lines[1] == "Batch 1: 384 had its clocks held down by its power cap and heat."


def test_arithmetic_is_set_against_the_measured_roof() -> None:
    records = [launch(256, 1, n, [0.01] * 9, work={"samples": 1, "flops": 2e9}) for n in range(2)]
    asked = []

    def roof(*of: str) -> float | None:
        asked.append(of)
        return 8e11

    assert roof_line(records, roof) == (
        "Most arithmetic: 200 GFLOP/s (256, batch 1), 25% of the 800 GFLOP/s in float32 that "
        "`penstock doctor` measured here."
    )
    assert asked == [("here", "cpu", "float32")]
    assert "`penstock doctor` measures" in roof_line(records, lambda *of: None)
    assert roof_line([launch()], roof) == ""


def test_a_line_of_the_table_is_of_one_kind_and_a_long_tail_is_told() -> None:
    """2 samples in a step of 56.8 ms were told as 23.4 a second, which was of the mean."""
    tailed = [launch(256, 2, n, (0.0568,) * 9 + (0.4,) * 2) for n in range(3)]
    (section,) = model_sections(tailed)
    head, line = section.table
    told = dict(zip(head, line, strict=True))
    assert (told["step"], told["samples/s"]) == ("56.8 ms", "35.2")
    assert any("took 119 ms in the mean and 56.8 ms in the median" in s for s in section.told)
    (row,) = (cell.row for cell in model_cells(tailed))
    assert float(row["throughput_samples_per_sec"]) == pytest.approx(
        2e3 / float(row["avg_time_ms"])
    )
    even = [launch(256, 2, n, (0.0568,) * 9) for n in range(3)]
    assert not any("in the mean" in s for s in model_sections(even)[0].told)


def test_under_a_budget_the_peak_is_what_the_kernel_counts() -> None:
    """922 MiB were resident, with a "margin of 10 %", where the kernel had counted 1,024."""
    memory = {"host_peak": 922 * MB, "host_counted": 1024 * MB}
    (free,) = model_cells([launch(256, 1, memory=memory)])
    (bound,) = model_cells([launch(256, 1, memory=memory, case={"budget": 1024 * MB})])
    assert (free.memory, bound.memory) == (922 * MB, 1024 * MB)
