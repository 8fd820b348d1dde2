"""The figure of a benchmark: every case of the CSV is in it, and nothing is joined that differs."""

import shutil
from pathlib import Path

import pytest

from penstock.base.errors import UsageError
from penstock.reports import Axis, Figure, Panel, append_csv
from penstock.reports.charts import model_chart as model
from penstock.reports.charts.model_chart import bench_figures, frontier

from .drawn import known, series_of, texts_of
from .kit import GIB, MEASURED, MIB, SEED_CSV, launch, sweep
from .test_figures import run

MEMORY, SAMPLES, PIXELS, TIME, FRONTIER = range(5)


def drawn(path: Path) -> Figure:
    (figure,) = bench_figures(path).values()
    return figure


def curves(panel: Panel) -> list[list[tuple[float, float]]]:
    """The lines with points, by batch."""
    lines = [each for each in panel.series if each.kind == "dots"]
    pairs = [zip(known(line.x), known(line.y), strict=True) for line in lines]
    return [[(x, y) for x, y in line if x is not None and y is not None] for line in pairs]


def crosses(panel: Panel) -> int:
    return sum(len(each.x) for each in panel.series if each.marker == "x")


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    """Four cases on a GPU, and one that did not fit."""
    tmp_path = tmp_path_factory.mktemp("bench")
    for (tile, batch), ms in MEASURED.items():
        memory = {"device_peak": tile * batch * MIB, "host_peak": 5 * GIB}
        records = sweep({(tile, batch): ms}, memory=memory, case={"device": "cuda:0"})
        append_csv("model", records, tmp_path / "bench.csv")
    oom = launch(512, 2, status="oom_device", case={"device": "cuda:0"}, memory={"host_peak": GIB})
    append_csv("model", [oom], tmp_path / "bench.csv")
    return tmp_path / "bench.csv"


@pytest.fixture(scope="module")
def figure(bench: Path) -> Figure:
    return drawn(bench)


@pytest.fixture
def path(bench: Path, tmp_path) -> Path:
    """A copy of the table to add to."""
    return Path(shutil.copy(bench, tmp_path))


def test_memory_and_throughput_by_tile(figure: Figure) -> None:
    memory, samples, throughput = figure.panels[:3]
    assert memory.y == Axis("Peak device memory", "B")
    assert curves(memory) == [
        [(0, 256 * MIB), (1, 384 * MIB)], [(0, 512 * MIB), (1, 768 * MIB)],
    ]  # fmt: skip
    assert throughput.y.unit == "pixels/s" and samples.y.unit == "samples/s"
    for panel, work in ((throughput, lambda tile: tile**2), (samples, lambda tile: 1)):
        expected = [
            [(place, pytest.approx(1e3 * work(tile) * b / MEASURED[tile, b], rel=1e-3))
             for place, tile in enumerate((256, 384))] for b in (1, 2)
        ]  # fmt: skip
        assert curves(panel) == expected
    for panel in (memory, samples, throughput):
        assert list(panel.x.ticks) == ["256", "384", "512"]


def test_a_failure_is_drawn_in_every_panel_by_tile(figure: Figure) -> None:
    for place in (MEMORY, SAMPLES, PIXELS):
        panel = figure.panels[place]
        cross = series_of(panel, "failed")
        top = max(y for curve in curves(panel) for _, y in curve)
        assert known(cross.x) == [2] and (known(cross.y)[0] or 0) > top
        assert list(cross.texts) == ["2: OOM"]
    assert "2 OOM" in texts_of(figure.panels[TIME])


def test_phases_stand_on_one_another(tmp_path) -> None:
    seconds = {"step": (0.1,), "forward": (0.03,), "backward": (0.05,), "optimizer": (0.02,)}
    append_csv("model", [launch(case={"mode": "train"}, samples_s=seconds)], tmp_path / "bench.csv")
    bars = [each for each in drawn(tmp_path / "bench.csv").panels[TIME].series if each.label]
    assert [each.label for each in bars] == ["forward", "backward", "optimizer"]
    assert [(known(b.base)[0], known(b.y)[0]) for b in bars] == [
        pytest.approx(ends) for ends in ((0, 0.03), (0.03, 0.08), (0.08, 0.1))
    ]


def test_the_frontier(figure: Figure) -> None:
    panel = figure.panels[FRONTIER]
    assert known(series_of(panel, "frontier").x) == [256 * MIB, 384 * MIB, 768 * MIB]
    assert {"256 × 1", "384 × 1", "384 × 2"} == set(texts_of(panel))
    places = [(1, 1), (2, 3), (3, 2), (3, 4), (1, 0.5)]
    assert [places[i] for i in frontier(places)] == [(1, 1), (2, 3), (3, 4)]
    assert frontier([]) == []


def test_the_host_its_budget_and_a_halo_are_shown(tmp_path) -> None:
    case = {"budget": 4 * GIB, "halo": 32}
    path = tmp_path / "bench.csv"
    append_csv("model", sweep(MEASURED, case=case, memory={"host_peak": 3 * GIB}), path)
    figure = drawn(path)
    assert figure.panels[MEMORY].y == Axis("Peak host memory", "B") == figure.panels[FRONTIER].x
    assert curves(figure.panels[MEMORY])[0] == [(0, 3 * GIB), (1, 3 * GIB)]
    assert figure.panels[MEMORY].limits == [(4 * GIB, "budget")]
    assert figure.panels[PIXELS].y.unit == "useful pixels/s"
    useful = 192**2 / MEASURED[256, 1] * 1e3
    assert curves(figure.panels[PIXELS])[0][0][1] == pytest.approx(useful, rel=1e-3)
    assert figure.title == "prithvi-refiner-tiny, inference, cpu, halo 32, budget 4.00 GiB"


def test_the_latest_row_of_a_case_is_drawn(path: Path) -> None:
    again = sweep({(256, 1): 100.0}, launches=3, case={"device": "cuda:0"})
    append_csv("model", again, path, timestamp="2030-01-01T00:00:00")
    older = sweep({(256, 1): 50.0}, case={"device": "cuda:0"})
    append_csv("model", older, path, timestamp="2020-01-01T00:00:00")
    figure = drawn(path)
    assert known(figure.panels[TIME].series[0].y)[0] == pytest.approx(0.1)
    assert figure.note.startswith(
        "7 rows of bench.csv, the latest of each of 5 cases  ·  3 to 5 launches of a case"
    )


def test_the_seeds_own_files_draw(tmp_path) -> None:
    (tmp_path / "stage2_bench.csv").write_text(SEED_CSV)
    figure = drawn(tmp_path / "stage2_bench.csv")
    assert figure.title == "inference, cpu"
    assert curves(figure.panels[MEMORY]) == [[]]  # 0.0 on a CPU is no measurement
    assert "nothing to weigh" in figure.panels[FRONTIER].note
    assert curves(figure.panels[PIXELS])[0] == [
        (0, pytest.approx(33.6 * 256**2)), (1, pytest.approx(21.8 * 384**2)),
    ]  # fmt: skip
    assert known(figure.panels[TIME].series[0].y) == pytest.approx([0.0297, 0.0459])
    assert figure.panels[TIME].title == "Time of a step, mean"
    rows = "batch_size,device,error,mode,tile_size,timestamp\n8,cuda,OOM,inference,384,2025-01-01\n"
    (tmp_path / "bench.csv").write_text(rows)
    figure = drawn(tmp_path / "bench.csv")
    assert [crosses(panel) for panel in figure.panels] == [1, 1, 1, 0, 0]
    assert figure.panels[MEMORY].y.name == "Peak device memory"
    (tmp_path / "bench.csv").write_text(rows + "4,cuda,OOM,inference,384,2025-01-01\n")
    panel = drawn(tmp_path / "bench.csv").panels[MEMORY]
    assert texts_of(panel) == ["4: OOM, 8: OOM"], "two crosses at one place hide each other"


def test_a_case_that_failed_in_one_launch_is_drawn_with_its_cross(tmp_path) -> None:
    records = [
        *sweep({(256, 1): 30.0}, memory={"host_peak": GIB}),
        launch(256, 1, 7, status="crash"),
    ]
    append_csv("model", records, tmp_path / "bench.csv")
    figure = drawn(tmp_path / "bench.csv")
    assert curves(figure.panels[MEMORY]) == [[(0, GIB)]]
    assert "1: crash" in texts_of(figure.panels[MEMORY])
    assert "1 crash" in texts_of(figure.panels[TIME])


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ([{"device": "cuda:0", "model": "a/b:c"}], ["prithvi-refiner-tiny_cpu", "a_b_c_cuda_0"]),
        ([{"amp": True}, {"amp": True, "halo": 8}], ["", "amp", "amp_halo_8"]),
    ],
)
def test_what_differs_has_figures_of_its_own(tmp_path, others, names, monkeypatch) -> None:
    cells = list[int]()
    monkeypatch.setattr(model, "draw_bench", lambda label, group, source: cells.append(len(group)))
    for case in [{}, *others]:
        append_csv("model", sweep({(256, 1): 30.0}, launches=1, case=case), tmp_path / "bench.csv")
    assert [*bench_figures(tmp_path / "bench.csv")] == names
    assert cells == [1] * len(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tile_size,batch_size,avg_time_ms\n256,1,fast\n",
            "a field that is not a number: .*'fast'",
        ),
        ("tile_size,batch_size\n", "no row to plot"),
    ],
)
def test_a_table_with_nothing_to_draw_is_refused(text: str, message: str, tmp_path) -> None:
    (tmp_path / "bench.csv").write_text(text)
    with pytest.raises(UsageError, match=rf"bench\.csv (has|holds) {message}"):
        bench_figures(tmp_path / "bench.csv")


@pytest.mark.usefixtures("undrawn")
def test_the_verb_draws_a_benchmark(path: Path, capsys, monkeypatch) -> None:
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


@pytest.mark.usefixtures("undrawn")
def test_the_verb_refuses(path: Path) -> None:
    with pytest.raises(UsageError, match=r"--mean and --smooth are for metrics, and .*bench\.csv"):
        run(str(path), "--mean")
    (path.parent / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/bench.* cannot be written: "):
        run(str(path), "--output", str(path.parent / "file" / "bench.png"))


def test_whiskers_hang_on_their_own_median(tmp_path) -> None:
    seconds = ((0.05,) * 9 + (0.5,) * 4, (0.04,) * 9, (0.02,) * 9)
    records = [launch(256, 2, n, times) for n, times in enumerate(seconds)]
    append_csv("model", records, tmp_path / "b.csv")
    panels = drawn(tmp_path / "b.csv").panels
    rate, bars = series_of(panels[SAMPLES], "batch 2"), panels[TIME].series[0]
    assert known(rate.y) == [pytest.approx(2 / 0.04)]
    assert [known(end)[0] for end in (rate.low, rate.high)] == pytest.approx([40, 100])
    assert [known(end)[0] for end in (bars.low, bars.high)] == pytest.approx([0.02, 0.05])
