"""Report: columns by name and unit, a CSV that survives everything, sentences that follow data."""

import numpy as np
import pytest

from penstock.reports.model.cell import MODEL_COLUMNS, SEED_COLUMNS, model_cells

from .kit import MEASURED, launch, sweep

COLUMNS = MODEL_COLUMNS.names


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
    cells = model_cells(records)
    assert [(cell.tile, cell.batch, cell.launches) for cell in cells] == [
        *[("256", 1, 2), ("256", 1, 1), ("256", 2, 2), ("384", 1, 2), ("384", 2, 2)]
    ]


def test_numbers_of_a_cell() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.gamma(4, 0.01, n) for n in (20, 30, 40)]
    records = [launch(256, 2, i, times, steps_per_sample=i + 1) for i, times in enumerate(samples)]
    (cell,) = model_cells(records)
    assert cell.time is not None and cell.time.n >= 2
    assert cell.time.value == pytest.approx(np.median([np.median(times) for times in samples]))
    assert cell.time.low < cell.time.value < cell.time.high

    steps = np.concatenate([np.repeat(times, i + 1) for i, times in enumerate(samples)])
    assert cell.mean() == pytest.approx(steps.mean())
    assert cell.mean_rate("samples") == pytest.approx(2 * len(steps) / steps.sum())
    assert cell.rate("samples") == pytest.approx(2 / cell.time.value)
    assert cell.rate("samples") != pytest.approx((2 / steps).mean(), rel=0.05)  # no mean of rates
    assert cell.std == pytest.approx(np.concatenate(samples).std())


def test_an_interval_of_one_launch_is_of_its_samples() -> None:
    (cell,) = model_cells([launch(seconds=np.arange(1, 12) / 10)])
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
            work={"samples": 4, "pixels": 100, "useful_pixels": 50},
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
        "alloc_retries": "0", "structure": "",
        "machine_key": "m", "commit": "abc+dirty", "key": records[0].key,
    }  # fmt: skip
    assert {name: value for name, value in row.items() if name in expected} == expected
    assert 100 <= float(row["low_time_ms"]) <= 200 <= float(row["high_time_ms"]) <= 300


def test_missing_is_empty_and_never_0() -> None:
    row = model_cells([launch()])[0].row
    for name in COLUMNS:
        assert row[name] != "0" or name in {"halo", "seed", "failed", "unsettled"}, name
    for name in ("memory_peak_mb", "host_peak_mb", "std_time_ms", "total_time_ms"):
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
