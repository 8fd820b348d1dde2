"""The dashboard in a real browser, as a reader uses it."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.instruments.ledger import ledger_to_csv, read_ledger

from ..reports.browser import AXE, CHROMIUM, Browser
from ..reports.kit import sized
from ..reports.pages import run_folder
from .kit import HOSTILE, begun, events_of, ledger_of, steps_of, training
from .served import Served, command, environment, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
axe = pytest.mark.skipif(
    not AXE.is_file(), reason="axe-core is not installed: npm install --no-save axe-core"
)
DEEP = """
window.deep = (selector, root = document) => [
  ...root.querySelectorAll(selector),
  ...[...root.querySelectorAll("*")].flatMap(e => e.shadowRoot ? deep(selector, e.shadowRoot) : []),
];
window.texts = selector => deep(selector).map(each => each.textContent);
window.cells = caption => [
  ...deep("table").find(each => each.caption?.textContent == caption).rows
].map(row => [...row.cells].map(each => each.textContent));
window.names = () => deep("input[type=checkbox]").map(each => each.ariaLabel.slice(8));
window.press = (selector, text) => deep(selector).find(each => each.textContent == text).click();
window.ticked = box => { if (!box.checked) box.click(); return false; };
window.tick = name => ticked(
  deep("input[type=checkbox]").find(each => each.ariaLabel == `compare ${name}`)
);
window.lengths = () => Bokeh.documents.flatMap(each => [...each._all_models.values()])
  .filter(each => each.type == "ColumnDataSource").map(each => each.data.x?.length);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=DEEP)
        browser.call("Emulation.setDeviceMetricsOverride", width=1300, height=1400,
                     deviceScaleFactor=1, mobile=False)  # fmt: skip
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for devices, seconds in ((1, 100.0), (2, 55.0), (4, 30.0)):
        training(folder / f"on{devices}", devices, seconds, tags={"size": f"s{devices}"})
    events_of(folder / "on1")
    ledger_of(folder / "sweep.ledger", sized({(64, 1): 12, (128, 1): 950}))
    run_folder(folder / "mouse.penstock", {"read": (8.0, 1.0, 1), "forward": (5.0, 4.0, 1)})
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[Served]:
    with served(folder) as server:
        yield server


@pytest.fixture(scope="module")
def trainings(browser: Browser, ours: Served) -> str:
    """What selects all trainings, in a link."""
    opened(browser, ours, "?kind=training")
    return "&".join(f"runs={key}" for key in _keys(browser))


def opened(browser: Browser, server: Served, query: str = "") -> None:
    browser.go(server.address + query)
    browser.until("names().length || texts('p').some(each => each.startsWith('Runs 0'))")


def drawn(browser: Browser) -> None:
    """Wait until the tab is there, all of it, and nothing of the page changes any more."""
    browser.until("Bokeh.documents.length && Bokeh.documents.every(each => each.is_idle)")
    before = -1
    while before != (now := browser.run("deep('*').length")):
        before = now
        time.sleep(0.5)


def complaints(browser: Browser) -> list[str]:
    """What is an error. Bokeh logs its version, and Chromium that it has no GPU."""
    said = []
    for event in browser.complaints():
        parameters = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            said.append(json.dumps(parameters)[:2000])
        elif event["method"] == "Runtime.consoleAPICalled":
            said += [json.dumps(parameters["args"])] * (parameters["type"] in ("error", "warning"))
        elif "WebGL" not in parameters["entry"]["text"]:
            said.append(json.dumps(parameters["entry"]))
    return said


def strangers(browser: Browser, server: Served) -> list[str]:
    """The requests to anywhere else."""
    ours = (server.address, "data:", f"blob:{server.address}")
    return [request for request in browser.requests() if not request.startswith(ours)]


def clean(browser: Browser, server: Served) -> None:
    assert complaints(browser) == [] and strangers(browser, server) == []


def saved(browser: Browser, folder: Path, button: str) -> list[list[str]]:
    """The rows of the file that a button gives."""
    folder.mkdir()
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.run(f"deep('a').find(each => each.textContent == '{button}').click()")
    until = time.monotonic() + 300
    while not (files := list(folder.glob("*.csv"))):
        assert time.monotonic() < until, "no file was saved"
        time.sleep(0.1)
    with files[0].open(newline="") as file:
        return list(csv.reader(file))


# --- what a reader does ---------------------------------------------------------------------------


def test_two_runs_are_selected_and_their_settings_differ(browser: Browser, ours: Served) -> None:
    opened(browser, ours)
    assert len(browser.run("names()")) == 14
    browser.until("location.search.includes('runs=') || tick('on1')")
    browser.until("(location.search.match(/runs=/g) || []).length == 2 || tick('on4')")
    settings = "press('.bk-tab', 'Settings and metrics')"
    browser.until(f"texts('caption').includes('Settings that differ') || {settings}")
    rows = browser.run("cells('Settings that differ')")
    assert rows[0] == ["setting", "on1", "on4"]
    assert ["devices", "1", "4"] in rows
    assert not any(row[0] == "batch_size" for row in rows)  # it is equal
    link = browser.run("location.search")
    clean(browser, ours)
    opened(browser, ours, link)  # restored, as whoever gets the link sees it
    browser.until("texts('caption').includes('Settings that differ')")
    ticked = browser.run("deep('input:checked').map(each => each.ariaLabel)")
    assert sorted(ticked) == ["compare on1", "compare on4"]
    clean(browser, ours)


def test_the_list_is_filtered_and_put_in_order(browser: Browser, ours: Served) -> None:
    opened(browser, ours, "?find=on&kind=training&order=seconds&up=1")
    assert browser.run("names()") == ["on4", "on2", "on1"]
    browser.run("""{ const box = deep('input[type=text]')[0]; box.value = 'on2';
        box.dispatchEvent(new Event('input')); box.dispatchEvent(new Event('change')); }""")
    browser.until("names().join() == 'on2'")
    browser.until("location.search.includes('find=on2')")
    opened(browser, ours, "?tag=size%3Ds4")
    assert browser.run("names()") == ["on4"]
    clean(browser, ours)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("&tab=curves&x=epoch", "Along x"),
        ("&tab=machine", "on2"),
        ("&tab=metric&metric=seconds&knob=devices", "seconds against devices"),
        ("&tab=scaling", "Speed-up and efficiency"),
        ("&tab=groups&group=tag+size", "seconds by tag size"),
        ("&tab=pictures", "Loss by epoch."),
    ],
)
def test_every_tab_shows_its_own(
    browser: Browser, ours: Served, trainings: str, query: str, words: str
) -> None:
    opened(browser, ours, f"?kind=training&{trainings}{query}")
    browser.until(f"texts('*').join(' ').includes({json.dumps(words)})")
    clean(browser, ours)


def _keys(browser: Browser) -> list[str]:
    """The keys of the runs on the page, by selecting all of them."""
    count = len(browser.run("names()"))
    for place in range(count):
        box = f"deep('input[type=checkbox]')[{place}]"
        count_is = f"(location.search.match(/runs=/g) || []).length == {place + 1}"
        browser.until(f"{count_is} || ticked({box})")
    keys: list[str] = browser.run("new URLSearchParams(location.search).getAll('runs')")
    return keys


def test_a_job_that_goes_on_moves(browser: Browser, tmp_path: Path) -> None:
    living = begun(tmp_path / "living", steps=5)
    with served(tmp_path) as server:
        opened(browser, server)
        browser.until("lengths().includes(5) || tick('living')")
        with (living / "steps" / "rank0.csv").open("a") as file:
            file.write(steps_of(7, first=6))
        browser.until("lengths().includes(12)")
        training(tmp_path / "later")
        browser.until("names().includes('later')")
        clean(browser, server)


def test_what_is_saved_is_what_the_ledger_holds(
    browser: Browser, ours: Served, folder: Path, tmp_path: Path
) -> None:
    opened(browser, ours, "?kind=bench+model&tab=settings&find=launch")
    keys = _keys(browser)
    browser.until("texts('caption').includes('Metrics')")
    head, *rows = saved(browser, tmp_path / "tab", "the open tab")
    shown = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    records = read_ledger(folder / "sweep.ledger")
    ledger_to_csv(records, tmp_path / "ledger.csv")
    with (tmp_path / "ledger.csv").open(newline="") as file:
        launches = list(csv.DictReader(file))
    assert len(keys) == len(head) - 1 == 8
    for launch in (each for each in launches if each["launch"] != "0"):
        name = f"model tile={launch['case.tile']} launch {int(launch['launch']) + 1}"
        for column in ("step.median_s", "step.low_s", "work.pixels", "memory.host_peak"):
            if launch[column]:
                assert float(shown[column][name]) == float(launch[column]), (name, column)
    listed = saved(browser, tmp_path / "list", "the list")
    assert [row[1] for row in listed[1:]] == browser.run("names()")
    clean(browser, ours)


def test_nothing_hostile_runs_or_is_fetched(browser: Browser, tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = training(tmp_path / name, name=HOSTILE, tags={HOSTILE: HOSTILE + name},
                          learning_rate=HOSTILE + name)  # fmt: skip
        document = json.loads((folder / "training_results.json").read_text())
        for row in document["history"]:
            row[HOSTILE] = 0.5
        (folder / "training_results.json").write_text(json.dumps(document))
    ledger_of(tmp_path / "l.ledger", sized({(64, 1): 12}, case={"model": HOSTILE}, status="crash",
                                           error={"stage": "s", "message": HOSTILE}))  # fmt: skip
    with served(tmp_path) as server:
        opened(browser, server, "?kind=training")
        query = "&".join(f"runs={key}" for key in _keys(browser))
        for tab in ("curves", "settings", "metric&knob=learning_rate", "groups", "pictures"):
            opened(browser, server, f"?{query}&tab={tab}")
            drawn(browser)
            assert browser.run("deep('img').length + deep('b').length") == 0
            clean(browser, server)
        hostile = json.dumps(HOSTILE[:20])
        assert browser.run(f"names().some(each => each.startsWith({hostile}))")
        _hover(browser)
        clean(browser, server)


def _hover(browser: Browser) -> None:
    """Move over the page, so that the tips of figures are shown."""
    for y in range(900, 1300, 40):
        for x in range(300, 1100, 80):
            browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@pytest.mark.parametrize("link", ["?runs=absent&runs=x", "?%00=%ff&page=99999&tab=1"])
def test_a_link_to_nothing_is_a_page_all_the_same(
    browser: Browser, ours: Served, link: str
) -> None:
    opened(browser, ours, link)
    assert len(browser.run("names()")) == 14
    clean(browser, ours)


# --- files, and readers who do not see ------------------------------------------------------------


def _static(folder: Path, out: Path, *words: str) -> dict[str, Any]:
    import subprocess

    done = subprocess.run(command(folder, "--static", out, *words), env=environment(),
                          capture_output=True, text=True)  # fmt: skip
    return {"code": done.returncode, "out": done.stdout, "error": done.stderr}


def test_a_comparison_as_files_loads_nothing(
    browser: Browser, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = _static(folder, tmp_path / "site")
    assert done["code"] == 0, done["error"]
    page = tmp_path / "site" / "index.html"
    browser.open(page)
    browser.until("deep('canvas').length > 3")
    asked = [each for each in browser.requests() if not each.startswith("data:")]
    assert asked == [page.as_uri()] and complaints(browser) == []
    captions = browser.run("texts('caption')")
    assert {"Runs", "Settings that differ", "Metrics"} <= set(captions)
    with (tmp_path / "site" / "runs.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 11
    (tmp_path / "site" / "runs.csv").write_text("mine")
    words = ["dashboard", str(folder), "--static"]
    assert main([*words, str(tmp_path / "site")]) == 2
    assert "--replace" in capsys.readouterr().err
    assert (tmp_path / "site" / "runs.csv").read_text() == "mine"
    lost = "http://localhost:1/?runs=absent"
    assert main([*words, str(tmp_path / "other"), "--view", lost]) == 2
    assert "cannot be found" in capsys.readouterr().err


@axe
@pytest.mark.parametrize("tab", ["curves", "settings", "metric", "scaling", "groups", "pictures"])
def test_readers_who_do_not_see_find_their_way(
    browser: Browser, ours: Served, trainings: str, tab: str
) -> None:
    opened(browser, ours, f"?{trainings}&tab={tab}")
    drawn(browser)
    assert browser.axe(AXE.read_text()) == []


@axe
def test_readers_of_files_who_do_not_see_find_their_way(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    """All tabs but the first are on a page of files, one below another."""
    done = _static(folder, tmp_path / "site")
    assert done["code"] == 0, done["error"]
    browser.open(tmp_path / "site" / "index.html")
    browser.until("deep('canvas').length > 3")
    drawn(browser)
    assert browser.axe(AXE.read_text()) == []
