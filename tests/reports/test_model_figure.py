"""The figure of a benchmark: every case of the CSV is in it, and nothing is joined that differs."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.cli import plot as verb
from penstock.reports.figures import model
from penstock.reports.figures.model import bench_figures, plot_bench
from penstock.reports.figures.panels import frontier
from penstock.reports.page import append_csv

from .kit import GIB, MEASURED, MIB, SEED_CSV, launch, sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEMORY, SAMPLES, PIXELS, TIME, FRONTIER = range(5)


def drawn(path: Path) -> Figure:
    (figure,) = bench_figures(path).values()
    return figure


def curves(axes: Axes) -> list[list[tuple[float, float]]]:
    """The lines with points, by batch."""
    lines = (line for line in axes.get_lines() if line.get_marker() == "o")
    points = [np.asarray(line.get_xydata(), float) for line in lines]
    return [[(float(x), float(y)) for x, y in line if np.isfinite(y)] for line in points]


def crosses(axes: Axes) -> int:
    return sum(line.get_marker() == "x" for line in axes.get_lines())


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four cases on a GPU, and one that did not fit."""
    tmp_path = tmp_path_factory.mktemp("bench")
    for (tile, batch), ms in MEASURED.items():
        memory = {"device_peak": tile * batch * MIB, "host_peak": 5 * GIB}
        case = {"device": "cuda:0"}
        records = sweep({(tile, batch): ms}, memory=memory, case=case)
        append_csv("model", records, tmp_path / "bench.csv")
    oom = launch(512, 2, status="oom_device", case={"device": "cuda:0"}, memory={"host_peak": GIB})
    append_csv("model", [oom], tmp_path / "bench.csv")
    return tmp_path / "bench.csv"


@pytest.fixture(scope="module")
def figure(bench: Path) -> Figure:
    return drawn(bench)


@pytest.fixture
def path(bench: Path, tmp_path: Path) -> Path:
    """A copy of the table to add to."""
    return Path(shutil.copy(bench, tmp_path))


# --- panels -------------------------------------------------------------------------------------


def test_memory_and_throughput_by_tile(figure: Figure) -> None:
    memory, samples, throughput = figure.axes[:3]
    assert memory.get_ylabel() == "Peak device memory (MiB)"
    assert curves(memory) == [[(0, 256), (1, 384)], [(0, 512), (1, 768)]]
    assert throughput.get_ylabel() == "Million pixels per second"
    expected = [
        (
            0,
            256**2 * batch / MEASURED[256, batch] / 1e3,
            384**2 * batch / MEASURED[384, batch] / 1e3,
        )
        for batch in (1, 2)
    ]
    points = [(x, y, z) for (x, y), (_, z) in curves(throughput)]
    assert points == [pytest.approx(point, rel=1e-3) for point in expected]
    assert samples.get_ylabel() == "Samples per second"  # the seed's plot
    assert curves(samples) == [
        [
            (0, pytest.approx(1e3 * b / MEASURED[256, b])),
            (1, pytest.approx(1e3 * b / MEASURED[384, b])),
        ]
        for b in (1, 2)
    ]
    for axes in (memory, samples, throughput):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "384", "512"]


def test_a_failure_is_drawn_in_every_panel(figure: Figure) -> None:
    for panel in (MEMORY, SAMPLES, PIXELS):
        axes = figure.axes[panel]
        (cross,) = (line for line in axes.get_lines() if line.get_marker() == "x")
        top = max(y for curve in curves(axes) for _, y in curve)
        assert np.asarray(cross.get_xdata()).tolist() == [2]
        assert np.asarray(cross.get_ydata())[0] > top
        _, batch_2 = (line for line in axes.get_lines() if line.get_marker() == "o")
        assert cross.get_color() == batch_2.get_color()
        assert "OOM" in words(axes)
    assert "OOM" in words(figure.axes[TIME])
    assert [bar.get_hatch() for bar in figure.axes[TIME].patches] == [None] * 4 + ["////"]
    assert "512 × 2 OOM" in words(figure.axes[FRONTIER])


def test_bars_are_medians_with_their_intervals(figure: Figure) -> None:
    axes = figure.axes[TIME]
    heights = [bar.get_height() for bar in axes.patches if not bar.get_hatch()]
    assert heights == pytest.approx([*MEASURED.values()])
    spans = [c.get_segments()[0][:, 1] for c in axes.collections if len(c.get_segments()) == 1]
    assert len(spans) == 4
    assert all(low < height < high for (low, high), height in zip(spans, heights, strict=True))


def test_phases_stand_on_one_another(tmp_path: Path) -> None:
    seconds = {"step": (0.1,), "forward": (0.03,), "backward": (0.05,), "optimizer": (0.02,)}
    append_csv("model", [launch(case={"mode": "train"}, samples_s=seconds)], tmp_path / "bench.csv")
    axes = drawn(tmp_path / "bench.csv").axes[TIME]
    assert [(bar.get_y(), bar.get_height()) for bar in axes.patches] == [
        pytest.approx(bar) for bar in ((0, 30), (30, 50), (80, 20))
    ]
    legend = axes.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == ["forward", "backward", "optimizer"]


def test_the_frontier(figure: Figure) -> None:
    axes = figure.axes[FRONTIER]
    (line,) = (line for line in axes.get_lines() if line.get_linestyle() == "--")
    assert np.asarray(line.get_xdata()).tolist() == [256, 384, 768]
    assert {"256 × 1", "384 × 1", "384 × 2"} < set(words(axes))
    places = [(1, 1), (2, 3), (3, 2), (3, 4), (1, 0.5)]
    assert [places[i] for i in frontier(places)] == [(1, 1), (2, 3), (3, 4)]
    assert frontier([]) == []


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    """Cases without a device that have a budget and a halo."""
    path = tmp_path_factory.mktemp("host") / "bench.csv"
    case = {"budget": 4 * GIB, "halo": 32}
    append_csv("model", sweep(MEASURED, case=case, memory={"host_peak": 3 * GIB}), path)
    return drawn(path)


def test_the_host_where_there_is_no_device(on_host: Figure) -> None:
    figure = on_host
    assert figure.axes[MEMORY].get_ylabel() == "Peak host memory (GiB)"
    assert figure.axes[FRONTIER].get_xlabel() == "Peak host memory (GiB)"
    assert curves(figure.axes[MEMORY])[0] == [(0, 3), (1, 3)]


def test_a_budget_and_a_halo_are_shown(on_host: Figure) -> None:
    figure = on_host
    assert "budget 4.00 GiB" in words(figure.axes[MEMORY])
    assert figure.axes[MEMORY].get_ylim()[1] > 4
    assert figure.axes[PIXELS].get_ylabel() == "Million useful pixels per second"
    useful = 192**2 / MEASURED[256, 1] / 1e3
    assert curves(figure.axes[PIXELS])[0][0][1] == pytest.approx(useful, rel=1e-3)
    assert figure.texts[0].get_text() == (
        "prithvi-refiner-tiny, inference, cpu, halo 32, budget 4.00 GiB"
    )


# --- files --------------------------------------------------------------------------------------


def test_the_latest_row_of_a_case_is_drawn(path: Path) -> None:
    again = sweep({(256, 1): 100.0}, launches=3, case={"device": "cuda:0"})
    append_csv("model", again, path, timestamp="2030-01-01T00:00:00")
    append_csv(
        "model",
        sweep({(256, 1): 50.0}, case={"device": "cuda:0"}),
        path,
        timestamp="2020-01-01T00:00:00",
    )
    figure = drawn(path)
    assert figure.axes[TIME].patches[0].get_height() == pytest.approx(100)
    assert (
        figure.texts[1]
        .get_text()
        .startswith(
            "7 rows of bench.csv, the latest of each of 5 cases  ·  3 to 5 launches of a case"
        )
    )


def test_the_seeds_own_file_draws(tmp_path: Path) -> None:
    (tmp_path / "stage2_bench.csv").write_text(SEED_CSV)
    figure = drawn(tmp_path / "stage2_bench.csv")
    assert figure.texts[0].get_text() == "inference, cpu"
    assert words(figure.axes[MEMORY]) == ["not recorded"]  # 0.0 on a CPU is no measurement
    assert "nothing to weigh" in words(figure.axes[FRONTIER])[0]
    assert curves(figure.axes[PIXELS])[0] == [
        (0, pytest.approx(33.6 * 256**2 / 1e6)),
        (1, pytest.approx(21.8 * 384**2 / 1e6)),
    ]
    assert [bar.get_height() for bar in figure.axes[TIME].patches] == [29.7, 45.9]


def test_the_seeds_own_oom_rows_draw(tmp_path: Path) -> None:
    rows = "batch_size,device,error,mode,tile_size,timestamp\n8,cuda,OOM,inference,384,2025-01-01\n"
    (tmp_path / "bench.csv").write_text(rows)
    figure = drawn(tmp_path / "bench.csv")
    assert [crosses(axes) for axes in figure.axes] == [1, 1, 1, 0, 1]
    assert figure.axes[MEMORY].get_ylabel() == "Peak device memory (MiB)"


def test_a_case_that_failed_in_one_launch_is_drawn_with_its_cross(tmp_path: Path) -> None:
    records = [
        *sweep({(256, 1): 30.0}, memory={"host_peak": GIB}),
        launch(256, 1, 7, status="crash"),
    ]
    append_csv("model", records, tmp_path / "bench.csv")
    figure = drawn(tmp_path / "bench.csv")
    assert curves(figure.axes[MEMORY]) == [[(0, 1)]]
    assert "crash" in words(figure.axes[MEMORY]) and "crash" in words(figure.axes[TIME])


@pytest.mark.parametrize(
    ("others", "names"),
    [
        pytest.param([{"mode": "train"}], ["inference", "train"], marks=pytest.mark.slow),
        ([{"device": "cuda:0", "model": "a/b:c"}], ["prithvi-refiner-tiny_cpu", "a_b_c_cuda_0"]),
        ([{"amp": True}, {"amp": True, "halo": 8}], ["", "amp", "amp_halo_8"]),
    ],
)
def test_what_differs_has_figures_of_its_own(
    tmp_path: Path, others: list[dict[str, Any]], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is of the cells of one group; what it shows is looked at above."""
    cells = list[int]()
    monkeypatch.setattr(model, "draw", lambda label, group, source: cells.append(len(group)))
    for case in [{}, *others]:
        append_csv("model", sweep({(256, 1): 30.0}, launches=1, case=case), tmp_path / "bench.csv")
    assert [*bench_figures(tmp_path / "bench.csv")] == names
    assert cells == [1] * len(names)


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of each figure there is an empty one."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(model, "draw", lambda *_: Figure((1, 1)))


@pytest.mark.usefixtures("empty")
def test_figures_are_saved_under_their_prefix(path: Path) -> None:
    (out,) = plot_bench(path, path.parent / "new" / "fig")
    assert out == path.parent / "new" / "fig.png" and out.read_bytes().startswith(b"\x89PNG")


def test_many_cells_fit(tmp_path: Path) -> None:
    """Volumes, more batches than colours, and failures of every kind."""
    records = []
    failures = ["oom_device", "oom_host", "timeout", "crash", "wrong_result"]
    for i, tile in enumerate(("32x64x64", "64x64x64", "64x128x128", "128x128x128", "256x256x256")):
        for batch in (1, 2, 3, 4, 6, 8, 16):
            status = failures[i] if batch * 2**i > 32 else "ok"
            records.append(launch(tile, batch, 0, (0.01 * batch * 2**i,), status))
    append_csv("model", records, tmp_path / "bench.csv")
    figure = drawn(tmp_path / "bench.csv")
    assert legend(figure)[:7] == [f"batch {n}" for n in (1, 2, 3, 4, 6, 8, 16)]
    assert crosses(figure.axes[MEMORY]) == crosses(figure.axes[FRONTIER]) == 9
    assert len(figure.axes[TIME].patches) == 35
    figure.canvas.draw()


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bench.csv").write_text("tile_size,batch_size,avg_time_ms\n256,1,fast\n")
    with pytest.raises(UsageError, match=r"bench\.csv has a field that is not a number: .*'fast'"):
        bench_figures(tmp_path / "bench.csv")


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bench.csv").write_text("tile_size,batch_size\n")
    with pytest.raises(UsageError, match=r"bench\.csv holds no row to plot"):
        bench_figures(tmp_path / "bench.csv")


# --- the verb -----------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(arguments))


@pytest.mark.slow
def test_the_verb_draws_a_benchmark(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = path.parent / "reports" / "stage2_bench.png"
    assert run(str(path), "--output", str(out)) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    assert out.exists()

    out.unlink()
    assert run("--input", str(path), "--output", str(out)) == 0  # as the seed spells it
    assert out.exists()
    assert run(str(path)) == 0 and path.with_suffix(".png").exists()

    monkeypatch.chdir(path.parent)
    (path.parent / "logs").mkdir()
    path.rename(path.parent / "logs" / "stage2_bench.csv")
    assert run("--output", "here.png") == 0 and Path("here.png").exists()


@pytest.mark.usefixtures("empty")
def test_the_verb_refuses(path: Path) -> None:
    with pytest.raises(UsageError, match=r"--mean and --smooth are for metrics, and .*bench\.csv"):
        run(str(path), "--mean")
    (path.parent / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/bench.* cannot be written: "):
        run(str(path), "--output", str(path.parent / "file" / "bench.png"))


def test_whiskers_hang_on_their_own_median_and_are_not_clipped(tmp_path: Path) -> None:
    """They hung on the mean, and were cut off at the top."""
    seconds = ((0.05,) * 9 + (0.5,) * 4, (0.04,) * 9, (0.02,) * 9)
    records = [launch(256, 2, n, times) for n, times in enumerate(seconds)]
    append_csv("model", records, tmp_path / "b.csv")
    figure = drawn(tmp_path / "b.csv")
    (curve,) = curves(figure.axes[SAMPLES])
    assert curve == [(0, pytest.approx(2 / 0.04))]
    for panel in (SAMPLES, PIXELS, TIME):
        axes = figure.axes[panel]
        ends = [y for c in axes.collections for s in c.get_segments() for _, y in s]
        assert ends and max(ends) <= axes.get_ylim()[1] and min(ends) >= axes.get_ylim()[0]
    low, high = (end for end in sorted(ends))
    assert (low, high) == (pytest.approx(20), pytest.approx(50))
