"""The page of runs in a real browser, as a reader uses it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import main

from ..rows import rows_of
from .browser import AXE, Browser
from .kit import sized
from .pages import HOSTILE, run_folder
from .run_kit import begun, ledger_of, steps_of, training
from .served import Served, served

pytestmark = pytest.mark.slow
SIZES = {"desk": (1280, 800), "phone": (400, 800)}
NAMES = "[...document.querySelectorAll('#list > li b')].map(each => each.textContent)"
CELLS = """[...document.querySelectorAll('table')].filter(each => each.caption?.textContent == {})
    .flatMap(each => [...each.rows].map(row => [...row.cells].map(cell => cell.textContent)))"""
LEGEND = "[...document.querySelectorAll('#curve-figure .legend button')].map(e => e.textContent)"
BOTTOM = "document.querySelector('{}').getBoundingClientRect().bottom"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for devices, seconds in ((1, 100.0), (2, 55.0), (4, 30.0)):
        training(folder / f"on{devices}", devices, seconds, tags={"size": f"s{devices}"})
    for seed in (1, 2, 3):
        training(folder / f"seed{seed}", 1, 90.0, seed=seed, learning_rate=0.5)
    ledger_of(folder / "sweep.ledger", sized({(64, 1): 12, (128, 1): 950}))
    run_folder(folder / "mouse.penstock", {"read": (8.0, 1.0, 1), "forward": (5.0, 4.0, 1)})
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[Served]:
    with served(folder) as server:
        yield server


def sized_as(browser: Browser, size: str) -> None:
    width, height = SIZES[size]
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=size == "phone")  # fmt: skip


def opened(browser: Browser, address: str) -> None:
    browser.go(address)
    browser.until("document.querySelectorAll('#list > li').length > 0")


def tick(browser: Browser, name: str) -> None:
    browser.run(f"document.querySelector('input[aria-label=\"compare {name}\"]').click()")


def clean(browser: Browser, address: str) -> None:
    """Nothing complains, and nothing is asked for elsewhere."""
    assert browser.complaints() == []
    assert [each for each in browser.requests() if not each.startswith((address, "data:"))] == []


@pytest.mark.parametrize("size", SIZES)
def test_a_comparison_is_on_the_first_screen(browser: Browser, tmp_path, size: str) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        training(tmp_path / name, learning_rate=rate)
    page = tmp_path / "page.html"
    a, b = (str(tmp_path / name) for name in "ab")
    assert main(["compare", a, b, "--html", str(page)]) == 0
    sized_as(browser, size)
    opened(browser, page.as_uri())
    browser.until("document.querySelectorAll('#curve-figure svg').length > 0")
    settings = browser.run(CELLS.format("'Settings that differ'"))
    assert settings == [["", "A", "B"], ["learning-rate", "0.1", "0.2"]]
    for part in ("#tables table", "#curve-figure svg"):
        assert browser.run(BOTTOM.format(part)) <= 800, part
    assert browser.run("document.documentElement.scrollWidth") <= SIZES[size][0]
    for part in ("#tables", "#tables .table", ".verdict p"):
        box = f"document.querySelector('{part}')"
        assert browser.run(f"{box}.scrollHeight <= {box}.clientHeight + 1"), "no box that scrolls"
    clean(browser, page.as_uri())


def test_runs_are_picked_and_a_link_shows_them_again(browser: Browser, ours: Served) -> None:
    sized_as(browser, "desk")
    opened(browser, f"{ours.address}#pick=none")
    names = browser.run(NAMES)
    assert len(names) == 7, "launches of a case, and trainings that repeat each other, are one"
    tick(browser, "on1")
    tick(browser, "on4")
    browser.until(f"({CELLS.format(chr(39) + 'Settings that differ' + chr(39))}).length == 3")
    settings = browser.run(CELLS.format("'Settings that differ'"))
    assert settings[0] == ["", "on1", "on4"] and ["devices", "1", "4"] in settings
    assert ["training time", "100 s", "30 s", "0.3 x"] in browser.run(CELLS.format("'Results'"))
    opened(browser, ours.address + browser.run("location.hash"))
    browser.until(f"({CELLS.format(chr(39) + 'Settings that differ' + chr(39))}).length == 3")
    assert browser.run(LEGEND)[:2] == ["on1", "on4"]
    clean(browser, ours.address)


def test_the_list_is_searched_and_put_in_order(browser: Browser, ours: Served) -> None:
    opened(browser, f"{ours.address}#find=training+on&order=seconds&up=1&pick=none")
    assert browser.run(NAMES) == ["on4", "on2", "on1"]
    browser.run("""{ const box = document.getElementById('find'); box.value = 'size=s2';
        box.dispatchEvent(new Event('input')); }""")
    assert browser.run(NAMES) == ["on2"]
    assert "find=size%3Ds2" in browser.run("location.hash")
    clean(browser, ours.address)


def test_repeats_are_a_mean_with_a_band_and_values_are_under_the_pointer(browser, ours) -> None:
    opened(browser, f"{ours.address}#pick=none")
    tick(browser, next(each for each in browser.run(NAMES) if each.startswith("seed")))
    browser.until(f"({LEGEND}).length || document.querySelectorAll('#curve-figure path').length")
    paths = "[...document.querySelectorAll('#curve-figure path')].map(e => e.getAttribute('d'))"
    browser.until(f"({paths}).some(each => each.endsWith('Z'))")
    tip = None
    while not tip:  # the page is drawn again as details come, and the pointer moves on
        time.sleep(0.2)
        x, y = browser.run("""{ const box = document.querySelector('#curve-figure svg')
            .getBoundingClientRect(); [box.x + box.width / 2, box.y + box.height / 2]; }""")
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        tip = browser.run("document.querySelector('.tip:not([hidden])')?.textContent")
    assert "mean of 3, least to most" in tip
    before = browser.run(paths)
    browser.run("""{ const box = document.getElementById('smooth'); box.value = '40';
        box.dispatchEvent(new Event('input')); }""")
    assert browser.run(paths) != before, "it is smoothed"
    clean(browser, ours.address)


def test_a_metric_is_drawn_against_a_setting(browser: Browser, ours: Served) -> None:
    opened(browser, f"{ours.address}#pick=none&metric=training_s&knob=devices&group=size")
    for name in ("on1", "on2", "on4"):
        tick(browser, name)
    head = ["size", "launches", "median training time", "least", "most"]
    browser.until(f"({CELLS.format(chr(39) + 'training time by size' + chr(39))}).length == 4")
    rows = browser.run(CELLS.format("'training time by size'"))
    assert rows[0] == head and rows[3] == ["s4", "1", "30 s", "30 s", "30 s"]
    # Those along x stand in the middle of their place, the name of the axis last.
    texts = "#metric-figure svg text[text-anchor=middle]"
    ticks = browser.run(f"[...document.querySelectorAll('{texts}')].map(each => each.textContent)")
    assert ticks == ["1", "2", "3", "4", "devices"]
    clean(browser, ours.address)


def test_a_job_that_goes_on_moves(browser: Browser, tmp_path) -> None:
    living = begun(tmp_path / "living", steps=5)
    with served(tmp_path) as server:
        opened(browser, server.address)
        browser.until("document.querySelectorAll('#curve-figure circle').length == 10")
        with (living / "steps" / "rank0.csv").open("a") as file:
            file.write(steps_of(7, first=6))
        browser.until("document.querySelectorAll('#curve-figure circle').length == 24")
        training(tmp_path / "later")
        browser.until(f"({NAMES}).includes('later')")
        clean(browser, server.address)


@pytest.mark.parametrize("button", ["runs-csv", "curves-csv"])
def test_what_is_picked_is_saved(browser: Browser, ours: Served, tmp_path, button: str) -> None:
    opened(browser, f"{ours.address}#pick=none")
    tick(browser, "on1")
    browser.until("!document.getElementById('compared').hidden")
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    time.sleep(1.0)
    browser.run(f"document.getElementById('{button}').click()")
    until = time.monotonic() + 100
    while not (files := list(tmp_path.glob("*.csv"))):
        assert time.monotonic() < until, "no file was saved"
        time.sleep(0.1)
    rows = rows_of(files[0])
    if button == "runs-csv":
        (row,) = rows
        assert row["tag size"] == "s1" and row["training time (s)"] == "100"
    else:
        assert sum(row["metric"] == "step time" for row in rows) == 12


def test_nothing_hostile_runs_or_is_fetched(browser: Browser, tmp_path) -> None:
    for name in ("a", "b"):
        folder = training(tmp_path / name, name=HOSTILE, tags={HOSTILE: HOSTILE + name},
                          learning_rate=HOSTILE + name)  # fmt: skip
        document = json.loads((folder / "training_results.json").read_text())
        for row in document["history"]:
            row[HOSTILE] = 0.5
        (folder / "training_results.json").write_text(json.dumps(document))
    ledger_of(tmp_path / "l.ledger", sized({(64, 1): 12}, case={"model": HOSTILE}, status="crash",
                                           error={"stage": "s", "message": HOSTILE}))  # fmt: skip
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    opened(browser, page.as_uri())
    for box in browser.run("[...document.querySelectorAll('#list > li input')].map(e => e.value)"):
        browser.run(f"document.querySelector('input[value=\"{box}\"]').click()")
    assert browser.run("document.querySelectorAll('#list img, img[src^=http]').length") == 0
    assert browser.run("document.body.textContent").count("<script>alert(1)</script>") > 3
    clean(browser, page.as_uri())


@pytest.mark.parametrize("link", ["#pick=absent", "#%00=%ff&page=99999&x=none&curve=none"])
def test_a_link_to_nothing_is_a_page_too(browser: Browser, ours: Served, link: str) -> None:
    opened(browser, ours.address + link)
    assert len(browser.run(NAMES)) > 0
    clean(browser, ours.address)


@pytest.mark.skipif(
    not AXE.is_file(), reason="axe-core is not installed: npm install --no-save axe-core"
)
def test_readers_who_do_not_see_find_their_way(browser: Browser, ours: Served) -> None:
    opened(browser, ours.address)
    browser.until("document.querySelectorAll('#curve-figure svg').length > 0")
    assert browser.axe(AXE.read_text()) == []
