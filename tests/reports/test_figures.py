"""Plots: what is drawn is what the file says, gaps included."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.cli import plot as verb
from penstock.instruments.seed_metrics import export_reference
from penstock.reports.figures.before_after import before_after_figure, plot_before_after
from penstock.reports.figures.canvas import rolling_mean
from penstock.reports.figures.run import (
    gpu_figures,
    metrics_figures,
    plot_gpu_metrics,
    plot_metrics,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MIB = 2**20
GPU_CSV = """\
timestamp, index, name, memory.used [MiB], utilization.gpu [%]
2025/09/12 23:59:58.000, 0, NVIDIA A10G, 1024 MiB, 87 %
2025/09/12 23:59:58.003, 1, NVIDIA A10G, 0 MiB, 0 %
2025/09/12 23:59:59.000, 0, NVIDIA A10G, 2048 MiB, [N/A]
2025/09/12 23:59:59.003, 1, NVIDIA A10G, 512 MiB, 10 %
2025/09/13 00:00:00.000, 0, NVIDIA A10G, 3072 MiB, 100 %
2025/09/13 00:00:00.003, 1, NVIDIA A10G, [Unknown Error], 20 %
"""


def write_rows(path: Path, kept: str = "", count: int = 6) -> Path:
    """Rows whose every series differs; the first has no rates, the fourth no CPU.

    If words are ``kept``, only the series whose names begin so have values.
    """
    lines: list[dict[str, Any]] = [
        {"schema": 1, "queues": {"prep": 64, "write-0": 0}, "interval": 1, "cpu_count": 8}
    ]
    for t in range(count):
        gpu = {"index": 0, "name": "A10G", "util_percent": 10 * t, "memory_bytes": t * MIB}
        rates = {
            "read_bytes_per_s": 1.0 * t * MIB,
            "write_bytes_per_s": 2.0 * t * MIB,
            "machine_read_bytes_per_s": 3.0 * t * MIB,
            "machine_write_bytes_per_s": 4.0 * t * MIB,
            "net_sent_bytes_per_s": 5.0 * t * MIB,
            "net_recv_bytes_per_s": 6.0 * t * MIB,
        }
        lines.append(
            {
                "t": float(t),
                "cpu_percent": None if t in (0, 3) else 100.0 * t,
                "rss_bytes": (t + 1) * MIB,
                "pss_bytes": MIB / 2 if t in (0, 4) else None,
                **(rates if t else dict.fromkeys(rates)),
                "gpus": [gpu],
                "gauges": {"prep": t * t, "write-0": 7 - t, "blocks/done": t},
            }
        )
    empty: dict[str, Any] = {"gpus": [], "gauges": {}}
    for line in lines[1:] if kept else ():
        gone = [name for name in line if name != "t" and not name.startswith(tuple(kept.split()))]
        line.update({name: empty.get(name) for name in gone})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(figure: Figure, label: str, axes: int = 0) -> Line2D:
    """The line with this label, up to a mean that follows it."""
    (drawn,) = (
        line
        for line in figure.axes[axes].get_lines()
        if str(line.get_label()).partition(", mean")[0] == label
    )
    return drawn


def y_of(figure: Figure, label: str, axes: int = 0) -> list[float | None]:
    values = np.asarray(line(figure, label, axes).get_ydata(), float)
    return [None if np.isnan(value) else float(value) for value in values]


def texts(figure: Figure) -> str:
    return " | ".join(text.get_text() for text in figure.texts)


# --- rows and metrics.json ----------------------------------------------------------------------


def test_rows_are_drawn_as_they_are(tmp_path: Path) -> None:
    figures = metrics_figures(write_rows(tmp_path / "m.jsonl"))

    assert [*figures] == [
        *("cpu", "ram", "prep", "write-0", "blocks_done"),
        *("net_io", "disk_io", "gpu_util", "vram"),
    ]
    assert y_of(figures["cpu"], "CPU") == [None, 100, 200, None, 400, 500]
    assert "4 samples, one every 1.00 s" in texts(figures["cpu"])
    assert figures["cpu"].axes[0].get_ylabel() == "CPU, 100 is one core (%)"
    assert figures["cpu"].axes[0].get_xlabel() == "Time (s)"
    assert y_of(figures["ram"], "RSS") == [1, 2, 3, 4, 5, 6]
    assert figures["ram"].axes[0].get_ylabel() == "Memory (MiB)"
    assert y_of(figures["ram"], "PSS (shared pages once)") == [0.5, 0.5]
    assert y_of(figures["prep"], "prep") == [0, 1, 4, 9, 16, 25]
    assert y_of(figures["prep"], "capacity 64") == [64, 64]
    assert [str(a.get_label()) for a in figures["write-0"].axes[0].get_lines()] == ["write-0"]
    assert y_of(figures["blocks_done"], "blocks/done") == [0, 1, 2, 3, 4, 5]
    assert y_of(figures["net_io"], "sent") == [None, 5, 10, 15, 20, 25]
    assert y_of(figures["net_io"], "received") == [None, 6, 12, 18, 24, 30]
    assert y_of(figures["disk_io"], "job read") == [None, 1, 2, 3, 4, 5]
    assert y_of(figures["disk_io"], "job write") == [None, 2, 4, 6, 8, 10]
    assert y_of(figures["disk_io"], "machine read") == [None, 3, 6, 9, 12, 15]
    assert y_of(figures["disk_io"], "machine write") == [None, 4, 8, 12, 16, 20]
    assert y_of(figures["gpu_util"], "GPU 0 A10G") == [0, 10, 20, 30, 40, 50]
    assert y_of(figures["vram"], "GPU 0 A10G") == [0, 1, 2, 3, 4, 5]


def test_the_mean_is_of_what_is_there(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "m.jsonl", "cpu_percent net_sent net_recv")
    figures = metrics_figures(rows, mean=True)
    assert y_of(figures["cpu"], "_CPU mean") == [300, 300]
    assert str(line(figures["cpu"], "CPU").get_label()) == "CPU, mean 300 %"
    labels = {str(a.get_label()) for a in figures["net_io"].axes[0].get_lines()}
    assert {"sent, mean 15.0 MiB/s", "received, mean 18.0 MiB/s"} <= labels
    assert "dotted: mean" in texts(figures["cpu"])


def test_smoothing_keeps_the_raw_line_behind(tmp_path: Path) -> None:
    figures = metrics_figures(write_rows(tmp_path / "m.jsonl", "gauges"), smooth=3)
    assert y_of(figures["prep"], "_prep raw") == [0, 1, 4, 9, 16, 25]
    expected = [1 / 2, 5 / 3, 14 / 3, 29 / 3, 50 / 3, 41 / 2]
    assert y_of(figures["prep"], "prep") == pytest.approx(expected)
    assert "rolling mean of 3" in texts(figures["prep"])


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 50])
def test_rolling_mean_is_the_mean_of_the_window(samples: int) -> None:
    y = np.arange(20.0) ** 2
    y[[4, 5, 11]] = np.nan
    for at, value in enumerate(rolling_mean(y, samples)):
        window = y[max(0, at - (samples - 1) // 2) : at + samples // 2 + 1]
        assert np.isnan(value) if np.isnan(y[at]) else value == pytest.approx(np.nanmean(window))


def test_the_reference_shape_draws_the_same_lines(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "m.jsonl")
    export_reference(rows, tmp_path / "metrics.json")
    figures = metrics_figures(tmp_path / "metrics.json")

    assert [*figures] == ["cpu", "ram", "prep", "write-0", "net_io", "disk_io"]
    assert y_of(figures["cpu"], "CPU") == [100, 200, 400, 500]
    assert list(line(figures["cpu"], "CPU").get_xdata()) == [1, 2, 4, 5]
    assert y_of(figures["ram"], "RSS") == [2, 3, 5, 6]
    assert y_of(figures["prep"], "prep") == [0, 1, 4, 9, 16, 25]
    assert y_of(figures["prep"], "capacity 64") == [64, 64]
    assert y_of(figures["net_io"], "received") == [6, 12, 24, 30]
    assert y_of(figures["disk_io"], "read") == [3, 6, 12, 15]
    assert y_of(figures["disk_io"], "write") == [4, 8, 16, 20]


def test_a_reference_file_with_nulls_and_nothing_else(tmp_path: Path) -> None:
    samples = [{"t_rel_s": 0.0, "size": None}, {"t_rel_s": 600.0, "size": 2}]
    queues = {"prep": {"max_size": 4, "samples": samples}, "idle": {"max_size": 4, "samples": []}}
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"queue_monitor": {"queues": queues}, "system_monitor": {}}))
    figures = metrics_figures(path)
    assert [*figures] == ["prep"]
    assert y_of(figures["prep"], "prep") == [None, 2]
    assert figures["prep"].axes[0].get_xlabel() == "Time (min)"
    assert list(line(figures["prep"], "prep").get_xdata()) == [0, 10]


@pytest.mark.usefixtures("undrawn")
def test_metrics_are_saved_under_the_names_of_the_seed(tmp_path: Path) -> None:
    queues = {"prep": {"max_size": 4, "samples": [{"t_rel_s": 0.0, "size": 2}]}}
    system = {"t_rel_s": [0.0, 1.0, 2.0], "cpu_percent": [1.0, None, 3.0]}
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"queue_monitor": {"queues": queues}, "system_monitor": system}))
    paths = plot_metrics(path, tmp_path / "new" / "sys_plot", True, 2)
    assert [path.name for path in paths] == ["sys_plot_cpu.png", "sys_plot_prep.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"boxes": []}', "neither a queue_monitor"),
        ("[1, 2]", "neither a queue_monitor"),
        ('{"queue_monitor": {}, "system_monitor": {}}', "no sample"),
        ('{"schema": 1, "queues": {"prep": 4}, "cpu_count": 2}\n', "no sample"),
        (
            '{"system_monitor": {"t_rel_s": [1, 2], "cpu_percent": [5]}}',
            "1 values of CPU for 2 times",
        ),
        ('{"schema": 1, "queues": {"prep": 4}, "cpu_count": 2}\n{"t": 0, "cp', "no sample"),
    ],
)
def test_a_file_with_nothing_to_draw_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(UsageError, match=rf"metrics\.json holds {message}"):
        metrics_figures(tmp_path / "metrics.json")


# --- nvidia-smi ---------------------------------------------------------------------------------


def test_gpu_csv(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text(GPU_CSV)
    figures = gpu_figures(tmp_path / "gpu.csv")
    assert [*figures] == ["gpu_util", "vram"]
    zero, one = "GPU 0 NVIDIA A10G", "GPU 1 NVIDIA A10G"
    assert y_of(figures["gpu_util"], zero, 0) == [87, None, 100]
    assert y_of(figures["gpu_util"], one, 1) == [0, 10, 20]
    assert y_of(figures["vram"], zero, 0) == [1, 2, 3]  # GiB
    assert y_of(figures["vram"], one, 1) == [0, 0.5, None]
    times = np.asarray(line(figures["vram"], one, 1).get_xdata(), float)  # over midnight
    assert times == pytest.approx([0.003, 1.003, 2.003])


@pytest.mark.parametrize(
    ("tail", "last"),
    [
        pytest.param(
            "2025/09/13 00:00:01.000, 0, NVIDIA A10G, 4096 MiB, 50 %\n", 50, marks=pytest.mark.slow
        ),
        ("2025/09/13 00:00:01.000, 0, NVIDIA A10G, 4096 MiB, 50 %", 50),  # only the end is torn
        ("2025/09/13 00:00:01.000, 0, NVIDIA A10G, 4096 MiB, 5", 100),
        pytest.param(
            "2025/09/13 00:00:01.000, 0, NVIDIA A10G, 4096 MiB", 100, marks=pytest.mark.slow
        ),
        pytest.param("2025/09/13 00:00:01.0", 100, marks=pytest.mark.slow),
        pytest.param("Unable to determine the device handle\n", 100, marks=pytest.mark.slow),
    ],
)
def test_a_torn_line_is_left_out(tmp_path: Path, tail: str, last: float) -> None:
    (tmp_path / "gpu.csv").write_text(GPU_CSV + tail)
    figures = gpu_figures(tmp_path / "gpu.csv")
    assert y_of(figures["gpu_util"], "GPU 0 NVIDIA A10G")[-1] == last


def test_an_unreadable_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text(GPU_CSV + "Unable to determine the device handle\n")
    figures = gpu_figures(tmp_path / "gpu.csv")
    assert "1 line unreadable" in texts(figures["vram"])
    assert y_of(figures["gpu_util"], "GPU 0 NVIDIA A10G")[-1] == 100


def test_gpus_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    gpus = (0, 2, 10)
    lines = [f"2025/09/12 00:00:00, {i}, A10G, {i} MiB, {i} %\n" for i in gpus]
    (tmp_path / "gpu.csv").write_text(GPU_CSV.partition("\n")[0] + "\n" + "".join(lines))
    figure = gpu_figures(tmp_path / "gpu.csv")["gpu_util"]
    strips = [y_of(figure, f"GPU {i} A10G", place) for place, i in enumerate(gpus)]
    assert strips == [[i] for i in gpus]


def test_one_column_is_enough(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text(
        "timestamp, utilization.gpu [%]\n2025/09/12 00:00:00.000, 40 %\n"
    )
    figures = gpu_figures(tmp_path / "gpu.csv")
    assert [*figures] == ["gpu_util"]
    assert y_of(figures["gpu_util"], "GPU 0") == [40]
    (out,) = plot_gpu_metrics(tmp_path / "gpu.csv", tmp_path / "gpu_plot", mean=True, smooth=2)
    assert out.name == "gpu_plot_gpu_util.png" and out.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("text", ["", "a, b\n1, 2\n", "timestamp, index\n2025/09/12 00:00:00, 0\n"])
def test_a_csv_without_the_columns_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "gpu.csv").write_text(text)
    with pytest.raises(UsageError, match=r"gpu\.csv has no column timestamp, or neither"):
        gpu_figures(tmp_path / "gpu.csv")


# --- before and after ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(30, 30), (4, 300), (300, 4)])
def test_before_after(shape: tuple[int, int]) -> None:
    before = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    after = before // 2  # unsigned: the difference must not wrap
    figure = before_after_figure({"noisy": before, "clean": after}, "halved")
    shown = [axes.images[0] for axes in figure.axes[:3]]
    assert [axes.get_title() for axes in figure.axes[:3]] == ["noisy", "clean", "difference"]
    assert np.array_equal(shown[2].get_array(), after.astype(float) - before)
    assert shown[0].get_clim() == shown[1].get_clim()
    low, high = shown[2].get_clim()
    assert low == -high < 0
    assert "halved" in texts(figure)


@pytest.mark.usefixtures("undrawn")
def test_before_after_is_saved(tmp_path: Path) -> None:
    images = {"a": np.eye(4), "b": np.ones((4, 4))}
    out = plot_before_after(images, tmp_path / "new" / "b.png", "halved")
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "images",
    [
        {"a": np.zeros((4, 4))},
        {"a": np.zeros((4, 4)), "b": np.zeros((4, 5))},
        {"a": np.zeros(4), "b": np.zeros(4)},
    ],
)
def test_before_after_wants_two_images_of_one_shape(images: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="two 2-D images of one shape"):
        before_after_figure(images, "")


# --- the verb -----------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(arguments))


@pytest.mark.slow
def test_the_verb_chooses_by_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "anything.txt")
    (tmp_path / "gpu_metrics.csv").write_text(GPU_CSV)

    assert run(str(rows), "--mean", "--smooth", "50", "--out", f"{tmp_path}/a/sys.plot") == 0
    assert f"{tmp_path}/a/sys.plot_cpu.png" in capsys.readouterr().out.splitlines()
    assert (tmp_path / "a" / "sys.plot_cpu.png").exists()

    assert run(str(tmp_path / "gpu_metrics.csv"), "--output", f"{tmp_path}/b/gpu.png") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/b/gpu_gpu_util.png",
        f"{tmp_path}/b/gpu_vram.png",
    ]

    assert run(str(tmp_path / "gpu_metrics.csv")) == 0
    assert (tmp_path / "gpu_metrics_vram.png").exists()


@pytest.mark.parametrize("text", ["tile_size,batch\n64,1\n", "", "\x89PNG\n"])
def test_the_verb_names_what_it_knows(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UsageError, match=r"x\.csv begins with .* plot knows metrics .* and gpu"):
        run(str(tmp_path / "x.csv"))


def test_the_verb_refuses_what_is_not_there_and_what_is_no_window(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.csv cannot be read: No such file"):
        run(str(tmp_path / "none.csv"))
    with pytest.raises(UsageError, match="--smooth -1"):
        run(str(write_rows(tmp_path / "m.jsonl")), "--smooth", "-1")
