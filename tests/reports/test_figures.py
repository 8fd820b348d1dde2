"""Plots: what is drawn is what the file says, gaps included."""

import argparse
import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.cli import plot as verb
from penstock.instruments.sampler import export_reference
from penstock.reports.charts.chart import (
    Axis,
    Boxes,
    Figure,
    Image,
    Panel,
    Series,
    before_after_figure,
    document_of,
    greys,
    link_of,
    rolling_mean,
    scale_of,
)
from penstock.reports.charts.metrics import metrics_figures
from penstock.reports.charts.paper import draw, save_under

from .drawn import known, series_of, y_of
from .kit import GPU_CSV

MIB = 2**20


def write_rows(path: Path) -> Path:
    """Rows whose every series differs; the first has no rates, the fourth no CPU."""
    lines: list[dict[str, Any]] = [
        {"schema": 1, "queues": {"prep": 64, "write-0": 0}, "interval": 1, "cpu_count": 8}
    ]
    names = ("read", "write", "machine_read", "machine_write", "net_sent", "net_recv")
    for t in range(6):
        gpu = {"index": 0, "name": "A10G", "util_percent": 10 * t, "memory_bytes": t * MIB}
        rates = {f"{name}_bytes_per_s": n * t * MIB for n, name in enumerate(names, 1)}
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
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_are_drawn_as_they_are(tmp_path) -> None:
    figures = metrics_figures(write_rows(tmp_path / "m.jsonl"))
    assert [*figures] == [
        *("cpu", "ram", "prep", "write-0", "blocks_done"),
        *("net_io", "disk_io", "gpu_util", "vram"),
    ]
    assert y_of(figures["cpu"], "CPU") == [None, 100, 200, None, 400, 500]
    assert "4 samples, one every 1.00 s" in figures["cpu"].note
    (cpu,), (ram,), (prep,) = (figures[name].panels for name in ("cpu", "ram", "prep"))
    assert cpu.y == Axis("CPU, 100 is one core", "%") and cpu.x == Axis("Time", "s")
    assert ram.y == Axis("Memory", "B") and y_of(ram, "RSS") == [n * MIB for n in range(1, 7)]
    assert y_of(ram, "PSS (shared pages once)") == [MIB / 2, MIB / 2]
    assert y_of(prep, "prep") == [0, 1, 4, 9, 16, 25] and prep.limits == [(64, "capacity")]
    assert not figures["write-0"].panels[0].limits
    assert y_of(figures["blocks_done"], "blocks/done") == [0, 1, 2, 3, 4, 5]
    rates = {"job read": 1, "job write": 2, "machine read": 3, "machine write": 4}
    for name, factor in rates.items():
        expected = [None, *(factor * t * MIB for t in range(1, 6))]
        assert y_of(figures["disk_io"], name) == expected
    assert y_of(figures["net_io"], "received") == [None, *(6 * t * MIB for t in range(1, 6))]
    assert y_of(figures["gpu_util"], "GPU 0 A10G") == [0, 10, 20, 30, 40, 50]
    assert y_of(figures["vram"], "GPU 0 A10G") == [n * MIB for n in range(6)]


def test_the_mean_is_of_what_is_there_and_smoothing_keeps_the_raw_line(tmp_path) -> None:
    figures = metrics_figures(write_rows(tmp_path / "m.jsonl"), mean=True, smooth=3)
    assert series_of(figures["cpu"], "CPU").label == "CPU, mean 300 %"
    names = draw(figures["cpu"]).axes[0].get_legend().get_texts()
    assert [text.get_text() for text in names] == ["CPU, mean 300 %"]
    labels = {each.label for each in figures["net_io"].panels[0].series}
    assert {"sent, mean 15.0 MiB/s", "received, mean 18.0 MiB/s"} <= labels
    assert "dashed: mean" in figures["cpu"].note and "rolling mean of 3" in figures["cpu"].note
    raw, smooth, level = figures["prep"].panels[0].series
    assert raw.faint and known(raw.y) == [0, 1, 4, 9, 16, 25]
    assert known(smooth.y) == pytest.approx([1 / 2, 5 / 3, 14 / 3, 29 / 3, 50 / 3, 41 / 2])
    assert level.dashes == 1 and known(level.y) == pytest.approx([55 / 6] * 6)


@pytest.mark.parametrize("samples", [1, 2, 5, 50])
def test_rolling_mean_is_the_mean_of_the_window(samples: int) -> None:
    y = np.arange(20.0) ** 2
    y[[4, 5, 11]] = np.nan
    for at, value in enumerate(rolling_mean(y, samples)):
        window = y[max(0, at - (samples - 1) // 2) : at + samples // 2 + 1]
        assert np.isnan(value) if np.isnan(y[at]) else value == pytest.approx(np.nanmean(window))


def test_the_reference_shape_draws_the_same_lines(tmp_path) -> None:
    export_reference(write_rows(tmp_path / "m.jsonl"), tmp_path / "metrics.json")
    figures = metrics_figures(tmp_path / "metrics.json")

    assert figures.keys() == {"cpu", "ram", "prep", "write-0", "net_io", "disk_io"}
    assert y_of(figures["cpu"], "CPU") == [100, 200, 400, 500]
    assert known(series_of(figures["cpu"], "CPU").x) == [1, 2, 4, 5]
    assert y_of(figures["ram"], "RSS") == [n * MIB for n in (2, 3, 5, 6)]
    assert y_of(figures["prep"], "prep") == [0, 1, 4, 9, 16, 25]
    assert figures["prep"].panels[0].limits == [(64, "capacity")]
    assert y_of(figures["net_io"], "received") == [n * MIB for n in (6, 12, 24, 30)]
    assert y_of(figures["disk_io"], "machine write") == [n * MIB for n in (4, 8, 16, 20)]


def test_a_reference_file_with_nulls_and_nothing_else(tmp_path) -> None:
    samples = [{"t_rel_s": 0.0, "size": None}, {"t_rel_s": 600.0, "size": 2}]
    queues = {"prep": {"max_size": 4, "samples": samples}, "idle": {"max_size": 4, "samples": []}}
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"queue_monitor": {"queues": queues}, "system_monitor": {}}))
    figures = metrics_figures(path)
    assert [*figures] == ["prep"]
    assert y_of(figures["prep"], "prep") == [None, 2]
    assert known(series_of(figures["prep"], "prep").x) == [0, 600]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"boxes": []}', "neither a queue_monitor"),
        ("[1, 2]", "neither a queue_monitor"),
        ('{"queue_monitor": {}, "system_monitor": {}}', "no sample"),
        ('{"schema": 1, "queues": {"prep": 4}, "cpu_count": 2}\n', "no sample"),
        (
            '{"system_monitor": {"t_rel_s": [1, 2], "cpu_percent": [5]}}',
            "1 value of cpu_percent for 2 times",
        ),
        ('{"schema": 1, "queues": {"prep": 4}, "cpu_count": 2}\n{"t": 0, "cp', "no sample"),
        ('{"queue_monitor": {"queues": {"a": {"samples": [{"t": 1}]}}}}', "metrics that are dam"),
        ('{"schema": 1, "queues": {}, "cpu_count": 2}\n{"t": 0}\n{"t": 1}\n', "metrics that are"),
    ],
)
def test_a_file_with_nothing_to_draw_is_refused(tmp_path, text: str, message: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(UsageError, match=rf"metrics\.json holds {message}"):
        metrics_figures(tmp_path / "metrics.json")


def test_gpu_csv(tmp_path) -> None:
    (tmp_path / "gpu.csv").write_text(GPU_CSV)
    figures = metrics_figures(tmp_path / "gpu.csv")
    assert [*figures] == ["gpu_util", "vram"]
    zero, one = "GPU 0 NVIDIA A10G", "GPU 1 NVIDIA A10G"
    assert y_of(figures["gpu_util"], zero, 0) == [87, None, 100]
    assert y_of(figures["gpu_util"], one, 1) == [0, 10, 20]
    assert y_of(figures["vram"], zero, 0) == [1024 * MIB, 2048 * MIB, 3072 * MIB]
    assert y_of(figures["vram"], one, 1) == [0, 512 * MIB, None]
    times = known(series_of(figures["vram"], one, 1).x)  # over midnight
    assert times == pytest.approx([0.003, 1.003, 2.003])


@pytest.mark.parametrize(
    ("tail", "last", "note"),
    [
        # Only the end of the first is torn.
        ("2025/09/13 00:00:01.000, 0, NVIDIA A10G, 4096 MiB, 50 %", 50, ""),
        ("2025/09/13 00:00:01.000, 0, NVIDIA A10G, 4096 MiB, 5", 100, ""),
        ("Unable to determine the device handle\n", 100, "1 line unreadable"),
    ],
)
def test_a_torn_line_or_none_is_left_out(tmp_path, tail: str, last: float, note: str) -> None:
    (tmp_path / "gpu.csv").write_text(GPU_CSV + tail)
    figures = metrics_figures(tmp_path / "gpu.csv")
    assert y_of(figures["gpu_util"], "GPU 0 NVIDIA A10G")[-1] == last
    assert note in figures["vram"].note


def test_gpus_are_in_the_order_of_their_numbers(tmp_path) -> None:
    gpus = (0, 2, 10)
    lines = [f"2025/09/12 00:00:00, {i}, A10G, {i} MiB, {i} %\n" for i in gpus]
    (tmp_path / "gpu.csv").write_text(GPU_CSV.partition("\n")[0] + "\n" + "".join(lines))
    figure = metrics_figures(tmp_path / "gpu.csv")["gpu_util"]
    strips = [y_of(figure, f"GPU {i} A10G", place) for place, i in enumerate(gpus)]
    assert strips == [[i] for i in gpus]


@pytest.mark.usefixtures("undrawn")
def test_one_column_is_enough(tmp_path) -> None:
    (tmp_path / "gpu.csv").write_text(
        "timestamp, utilization.gpu [%]\n2025/09/12 00:00:00.000, 40 %\n"
    )
    figures = metrics_figures(tmp_path / "gpu.csv")
    assert [*figures] == ["gpu_util"]
    assert y_of(figures["gpu_util"], "GPU") == [40]
    figures = metrics_figures(tmp_path / "gpu.csv", mean=True, smooth=2)
    (out,) = save_under(tmp_path / "gpu_plot", figures)
    assert out.name == "gpu_plot_gpu_util.png" and out.read_bytes()[:4] == b"\x89PNG"


def test_gpus_are_told_apart_or_refused(tmp_path) -> None:
    path = tmp_path / "gpu.csv"
    path.write_text(GPU_CSV.replace("index,", "pci.bus_id,"))
    assert y_of(metrics_figures(path)["gpu_util"], "GPU 1 NVIDIA A10G", 1) == [0, 10, 20]
    path.write_text(GPU_CSV.replace("index,", "temperature.gpu,"))
    with pytest.raises(UsageError, match=r"gpu\.csv holds readings of several GPUs"):
        metrics_figures(path)
    path.write_text(re.sub(r"(, 1, .*), \d+ %", r"\1, [N/A]", GPU_CSV))
    assert metrics_figures(path)["gpu_util"].note.endswith("no reading of GPU 1 NVIDIA A10G")


@pytest.mark.parametrize("text", ["", "a, b\n1, 2\n", "timestamp, index\n2025/09/12 00:00:00, 0\n"])
def test_a_csv_without_the_columns_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "gpu.csv").write_text(text)
    with pytest.raises(UsageError, match=r"gpu\.csv has no column timestamp, or neither"):
        metrics_figures(tmp_path / "gpu.csv")


def test_before_after() -> None:
    before = np.arange(900, dtype=np.uint16).reshape(30, 30)
    after = before // 2  # unsigned: the difference must not wrap
    figure = before_after_figure({"noisy": before, "clean": after}, "halved")
    assert [panel.title for panel in figure.panels] == ["noisy", "clean", "difference"]
    noisy, clean, difference = (panel.image.pixels for panel in figure.panels if panel.image)
    assert noisy[0, 0] == 0 and noisy[-1, -1] == 255 and clean.max() in (127, 128)
    red, green, blue = np.moveaxis(difference, -1, 0).astype(int)
    assert (blue == 255).all() and red[0, 0] == 255 and red[-1, -1] == 0, "it is darker: blue"
    assert (red == green).all() and figure.title == "halved"


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


def everything() -> Figure:
    """A figure of all that figures hold."""
    x = np.arange(4.0)
    kinds = ("line", "dots", "points", "bars", "steps", "area")
    series = [Series(kind, x, x + 1, kind, place) for place, kind in enumerate(kinds)]
    ends = Series("$e$", x, [1.0, None, np.nan, 4.0], "dots", low=x, high=x + 2, texts=["$t$"] * 4)
    named = Axis("Case", ticks=["a", "b", "c", "d" * 999])
    boxes = [Boxes("true", [[0, 0, 2, 1]], 2)]
    panels = [
        Panel("kinds", Axis("Time", "s"), Axis("Bytes", "B"), series, [(3.0, "limit")]),
        Panel("names", named, Axis("Rate", "samples/s", log=True), [ends]),
        Panel("empty", note="not recorded"),
        Panel("image", image=Image(greys(np.eye(3), 0, 1), boxes)),
    ]
    return Figure("title $x$", "note", panels, 2)


def test_a_figure_as_a_document_keeps_what_can_be_seen() -> None:
    document = document_of(everything())
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    kinds, names, _, image = document["panels"]
    assert [each["kind"] for each in kinds["series"]][-1] == "area"
    assert names["series"][0]["y"] == [1.0, None, None, 4.0]
    assert len(names["x"]["ticks"][3]) < 200, "a name of any length is cut"
    assert image["image"]["width"] == 3
    assert document_of(Series("", [1.23456789], [np.float32(0.1)]))["x"] == [1.2346]


def test_values_that_differ_little_stay_below_the_edge() -> None:
    lines = [Series("", [0, 1], [376, 385], "dots")]
    drawn = draw(Figure("", "", [Panel("", Axis("x"), Axis("y"), lines)]))
    assert drawn.axes[0].get_ylim() == (0, pytest.approx(385 * 1.05))


def test_a_figure_on_paper_draws_no_formula() -> None:
    from matplotlib.text import Text

    drawn = draw(everything())
    drawn.draw_without_rendering()
    texts = [text for text in drawn.findobj(Text) if "$" in text.get_text()]
    ours = [text for text in texts if text.get_text() in ("title $x$", "$e$", "$t$")]
    assert len(ours) == 3 and not any(text.get_parse_math() for text in ours)
    assert drawn.axes[0].get_ylabel() == "Bytes (B)" and len(drawn.axes[0].get_lines()) >= 4
    assert drawn.axes[1].get_yscale() == "log"


def test_the_names_of_a_stack_stand_beside_it() -> None:
    parts = [Series("forward", [0], [1], "bars"), Series("wait", [0], [3], "bars", 1, base=[1])]
    drawn = draw(Figure("phases", "", [Panel(series=parts)]))
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    names = axes.get_legend()
    assert names.get_window_extent().x0 >= axes.get_window_extent().x1
    assert [text.get_text() for text in names.get_texts()] == ["wait", "forward"]


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [("B", 2**31, ("GiB", 2.0**30)), ("B/s", 2**11, ("KiB/s", 2.0**10)), ("s", 2e-5, ("µs", 1e-6)),
     ("s", 500, ("min", 60.0)), ("s", 11_000, ("h", 3600.0)), ("s", 0, ("s", 1.0)),
     ("pixels/s", 3e6, ("M pixels/s", 1e6)), ("%", 99, ("%", 1.0))],
)  # fmt: skip
def test_values_have_fitting_units(unit: str, value: float, expected: tuple[str, float]) -> None:
    assert scale_of(unit, [value, np.nan]) == expected


def test_images_of_a_page_are_png() -> None:
    from io import BytesIO

    from PIL import Image as Png

    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    for image in (pixels, pixels[..., 0]):
        head, _, data = link_of(image).partition(",")
        assert head == "data:image/png;base64"
        assert (np.asarray(Png.open(BytesIO(base64.b64decode(data)))) == image).all()


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(arguments))


@pytest.mark.usefixtures("undrawn")
def test_the_verb_chooses_by_content(tmp_path, capsys) -> None:
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
def test_the_verb_names_what_it_knows(tmp_path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UsageError, match=r"x\.csv begins with .* plot knows metrics .* and gpu"):
        run(str(tmp_path / "x.csv"))


def test_the_verb_refuses_what_is_not_there_and_what_is_no_window(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"none\.csv cannot be read: No such file"):
        run(str(tmp_path / "none.csv"))
    with pytest.raises(UsageError, match="--smooth -1"):
        run(str(write_rows(tmp_path / "m.jsonl")), "--smooth", "-1")
