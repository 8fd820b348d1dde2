"""Reports in a real browser: nothing is asked for, nothing complains, tables sort."""

import base64
import contextlib
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock.reports import Chapter, Report, Section, html_page, report_of_records
from penstock.reports.charts.chart import Axis, Figure, Panel, Series
from penstock.reports.content import Picture
from penstock.reports.infer.report import report_of_run
from penstock.reports.training.report import report_of_training
from penstock.scaling.study_text import report_of_scaling

from ..bench.kit_suite import cases, made_up
from ..scaling.kit import seed_logs
from .browser import AXE, Browser
from .kit import launch, sized
from .pages import run_folder
from .test_html import hostile_report
from .test_loader_report import ladder_records, launches
from .test_queue_report import run as queue
from .test_training_report import COMPUTING, training

pytestmark = pytest.mark.slow
FIRST = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[{}].textContent)"


def shown(browser: Browser, folder: Path, report: Report) -> Path:
    """The report as a page that is open in the browser."""
    page = folder / "page.html"
    page.write_text(html_page(report))
    browser.open(page)
    return page


def test_a_page_of_a_sweep_sorts_its_tables(browser: Browser, tmp_path) -> None:
    times = {(32, 1): 4, (64, 1): 12, (128, 1): 950}
    page = shown(browser, tmp_path, report_of_records(sized(times), "s"))
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert browser.run(FIRST.format(2)) == ["4.00 ms", "12.0 ms", "950 ms"]
    browser.run("document.querySelectorAll('th button')[2].click()")
    browser.run("document.querySelectorAll('th button')[2].click()")
    assert browser.run(FIRST.format(2)) == ["950 ms", "12.0 ms", "4.00 ms"]
    assert browser.run("document.querySelectorAll('th')[2].ariaSort") == "descending"
    browser.run("document.querySelectorAll('th button')[0].click()")
    assert browser.run(FIRST.format(0)) == ["32", "64", "128"]
    assert browser.complaints() == []


def test_a_cell_is_sorted_by_its_quantity(browser: Browser, tmp_path) -> None:
    rising = ["12.3 ms", "1.2 - 1.4", "1 min 34 s", "1,234", "8 h 1 min", "316 k", "1.5 MB/s",
              "646 MiB", "ok", "-", ""]  # fmt: skip
    table = [("value", "n"), *((text, str(n)) for n, text in enumerate(reversed(rising)))]
    shown(browser, tmp_path, Report("t", ["v."], [], [Chapter("c", [Section("s", table)])]))
    browser.run("document.querySelector('th button').click()")
    assert browser.run(FIRST.format(0))[:8] == rising[:8]
    assert browser.run("document.querySelectorAll('td.words').length") == 0
    assert browser.complaints() == []


def test_a_page_of_a_run_fits_a_phone_and_a_dark_screen(browser: Browser, tmp_path) -> None:
    folder = run_folder(tmp_path / "a.penstock", {"read": (8.0, 1.0, 1), "forward": (5.0, 4.0, 1)})
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=2,
                 mobile=True)  # fmt: skip
    shown(browser, tmp_path, report_of_run(folder))
    assert browser.run("document.documentElement.scrollWidth") <= 360
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    ink = "getComputedStyle(document.querySelector('svg text')).fill"
    light_ink = browser.run(ink)
    browser.call("Emulation.setEmulatedMedia",
                 features=[{"name": "prefers-color-scheme", "value": "dark"}])  # fmt: skip
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light
    assert browser.run(ink) != light_ink
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert browser.complaints() == []


def test_what_is_above_an_axis_is_not_drawn_over_the_title(browser: Browser, tmp_path) -> None:
    bars = [Series("", [0, 1], [1, 50], "bars")]
    panel = Panel(y=Axis("y", high=2), series=bars)
    pictures = [Picture("p", "c", lambda: Figure("title", "", [panel]))]
    shown(browser, tmp_path, Report("t", ["v."], [], [Chapter("c", pictures=pictures)]))
    at = "(() => { const box = document.querySelector('.panel svg').getBoundingClientRect();"
    at += "return document.elementFromPoint(box.x + 0.8 * box.width, box.y + PLACE).tagName; })()"
    above, inside = (browser.run(at.replace("PLACE", y)) for y in ("-8", "0.5 * box.height"))
    assert (above.lower(), inside) == ("p", "rect")


def test_nothing_hostile_runs_or_is_fetched(browser: Browser, tmp_path) -> None:
    page = shown(browser, tmp_path, hostile_report(tmp_path))
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert browser.run("document.images.length") == 0
    assert browser.run("[...document.scripts].filter(each => !each.type).length") == 1
    assert browser.run("document.querySelector('h1').textContent").startswith("<script>alert(1)")
    # The policy holds: what was written into the page would not run either.
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.ran=1>')")
    assert browser.run("window.ran === undefined") is True


def test_without_a_script_all_is_readable(browser: Browser, tmp_path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown(browser, tmp_path, report_of_records(sized({(32, 1): 4, (64, 1): 12}), "s"))
        assert browser.run("document.querySelectorAll('th button').length") == 0
        assert browser.run(FIRST.format(0)) == ["32", "64"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def _suite(folder: Path) -> Report:
    records = [made_up(case, n, 5.0 + n / 9) for case in cases(folder)[:3] for n in range(3)]
    failed = made_up(cases(folder)[3], 0, 0.0, status="oom_device")
    return report_of_records([*records, failed], "suite")


def _loader(folder: Path) -> Report:
    records = ladder_records(0.1, 0.2, 0.3, 0.4)
    return report_of_records([*records, *launches(0.4), *launches(0.8, threads=2)], "loader")


KINDS: Mapping[str, Callable[[Path], Report]] = {
    "infer": lambda folder: report_of_run(run_folder(
        folder / "a.penstock", {"read": (8.0, 1.0, 1), "forward": (5.0, 4.0, 1)}
    )),
    "sweep": lambda folder: report_of_records(
        [*sized({(32, 1): 4, (32, 2): 7, (64, 1): 12}), launch(64, 2, status="oom_host")], "s"
    ),
    "loader": _loader,
    "queue": lambda folder: report_of_records(list(queue(2.66)), "queue"),
    "suite": _suite,
    "training": lambda folder: report_of_training(training(folder / "t", COMPUTING, world=2)),
    "scaling": lambda folder: report_of_scaling(seed_logs(folder), "Scaling", print),
}  # fmt: skip


@pytest.mark.skipif(
    not AXE.is_file(), reason="axe-core is not installed: npm install --no-save axe-core"
)
@pytest.mark.parametrize("kind", KINDS)
def test_readers_who_do_not_see_find_their_way(browser: Browser, tmp_path, kind: str) -> None:
    shown(browser, tmp_path, KINDS[kind](tmp_path))
    assert browser.until("document.querySelectorAll('figure svg').length") > 0
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=features)
        assert browser.axe(AXE.read_text()) == []
    browser.call("Emulation.setEmulatedMedia", features=[])


A4 = {"width": 718, "height": 1000, "deviceScaleFactor": 1, "mobile": True}
"""What is between the margins, in CSS pixels."""
CUT = """[...document.querySelectorAll('.table, .drawing, .verdict')].filter(each =>
    each.scrollWidth > 1.25 * each.clientWidth
    || each.scrollHeight > each.clientHeight + 1).length"""
"""A sheet shrinks to its widest table, so that one a little too wide is whole, and can be read."""
MARKED = "#123456"


def printed(browser: Browser) -> list[set[str]]:
    """The page on paper, as a reader with a dark screen prints it: the colours of each sheet."""
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", features=dark)
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    browser.call("Emulation.setEmulatedMedia", features=[])
    sheets = []
    for packed in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        with contextlib.suppress(zlib.error):  # a font or an image may be packed otherwise
            text = zlib.decompress(packed).decode("latin-1")
            triples = re.findall(r"([\d.]+) ([\d.]+) ([\d.]+) rg", text)
            colours = {"#" + "".join(f"{round(255 * float(x)):02x}" for x in t) for t in triples}
            sheets += [colours] * (" Tj" in text or " TJ" in text)
    assert len(sheets) == len(re.findall(rb"/Type\s*/Page\b", pdf))
    return sheets


@pytest.mark.parametrize("kind", KINDS)
def test_a_print_is_light_and_whole(browser: Browser, tmp_path, kind: str) -> None:
    page = shown(browser, tmp_path, KINDS[kind](tmp_path))
    sheets = printed(browser)
    style = page.read_text().partition("prefers-color-scheme: dark")[2].partition("}")[0]
    paper, ink = (re.findall(rf"--{name}: (#\w+)", style)[0] for name in ("paper", "ink"))
    assert len(sheets) >= 1 and all({"#222222", "#5f5f5f"} & sheet for sheet in sheets)
    assert not {paper, ink} & set().union(*sheets), "nothing of a dark screen"
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.call("Emulation.setDeviceMetricsOverride", **A4)
    assert browser.run(CUT) == 0
    assert browser.run("getComputedStyle(document.body).maxWidth") == "none", "it is for print"
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.usefixtures("undrawn")
def test_a_long_table_has_its_head_on_every_sheet(browser: Browser, tmp_path) -> None:
    cases = {(32 * side, batch): side * batch for side in range(1, 41) for batch in (1, 2)}
    shown(browser, tmp_path, report_of_records(sized(cases), "s"))
    browser.run("document.querySelectorAll('header, ul, .figures').forEach(each => each.remove())")
    mark = f"document.querySelectorAll('th').forEach(each => each.style.color = '{MARKED}')"
    browser.run(mark)
    sheets = printed(browser)
    assert len(sheets) >= 3 and all(MARKED in sheet for sheet in sheets)
