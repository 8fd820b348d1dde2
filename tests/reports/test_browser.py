"""Reports in a real browser: nothing is asked for, nothing complains, tables sort."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.reports.html import html_page
from penstock.reports.infer.report import report_of_run
from penstock.reports.ledger_report import report_of_records

from .browser import AXE, CHROMIUM, Browser
from .kit import sized
from .pages import run_folder
from .test_html import hostile_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
FIRST = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[{}].textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def test_a_page_of_a_sweep_sorts_its_tables(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    page.write_text(
        html_page(report_of_records(sized({(32, 1): 4, (64, 1): 12, (128, 1): 950}), "s"))
    )
    browser.open(page)
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert browser.run(FIRST.format(2)) == ["4.00 ms", "12.0 ms", "950 ms"]
    browser.run("document.querySelectorAll('th button')[2].click()")
    browser.run("document.querySelectorAll('th button')[2].click()")
    assert browser.run(FIRST.format(2)) == ["950 ms", "12.0 ms", "4.00 ms"]
    assert browser.run("document.querySelectorAll('th')[2].ariaSort") == "descending"
    browser.run("document.querySelectorAll('th button')[0].click()")
    assert browser.run(FIRST.format(0)) == ["32", "64", "128"]
    assert browser.complaints() == []


def test_a_page_of_a_run_fits_a_phone_and_a_dark_screen(browser: Browser, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a.penstock", {"read": (8.0, 1.0, 1), "forward": (5.0, 4.0, 1)})
    page = tmp_path / "run.html"
    page.write_text(html_page(report_of_run(folder)))
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=2,
                 mobile=True)  # fmt: skip
    browser.open(page)
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


def test_nothing_hostile_runs_or_is_fetched(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "hostile.html"
    page.write_text(html_page(hostile_report()))
    browser.open(page)
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert browser.run("document.images.length + document.scripts.length") == 1
    assert browser.run("document.querySelector('h1').textContent").startswith("<script>alert(1)")
    # The policy holds: what was written into the page would not run either.
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.ran=1>')")
    assert browser.run("window.ran === undefined") is True


def test_without_a_script_all_is_readable(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "plain.html"
    page.write_text(html_page(report_of_records(sized({(32, 1): 4, (64, 1): 12}), "s")))
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        assert browser.run("document.querySelectorAll('th button').length") == 0
        assert browser.run(FIRST.format(0)) == ["32", "64"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.skipif(
    not AXE.is_file(), reason="axe-core is not installed: npm install --no-save axe-core"
)
def test_readers_who_do_not_see_find_their_way(browser: Browser, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a.penstock", {"read": (8.0, 1.0, 1), "forward": (5.0, 4.0, 1)})
    for report in (report_of_run(folder), report_of_records(sized({(32, 1): 4, (64, 1): 12}), "s")):
        page = tmp_path / "page.html"
        page.write_text(html_page(report))
        browser.open(page)
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.call("Emulation.setEmulatedMedia", features=features)
            assert browser.axe(AXE.read_text()) == []
    browser.call("Emulation.setEmulatedMedia", features=[])
