"""The site: it builds without a warning, opens from the disk, searches, and asks no network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.base.config import knobs
from penstock.cli import VERBS

from .reports.browser import Browser

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site that `make site` has just built, where SITE names it, or a new one."""
    if built := os.environ.get("SITE"):
        return (ROOT / built).resolve()
    pytest.importorskip("pydata_sphinx_theme")
    out: Path = tmp_path_factory.mktemp("site")
    words = "-b html -W --keep-going -E -q -d".split()
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, out.parent / "trees", ROOT / "docs", out],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out


class Loaded(HTMLParser):
    """What a page makes a browser load: all but links that a reader follows."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        names = ["src", "srcset", "data", "poster", "action"] + ["href"] * (tag == "link")
        self.places += [given[name] for name in names if name in given]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    assert len(pages) > 50
    for page in pages:
        parser = Loaded()
        parser.feed(page.read_text())
        away = [place for place in parser.places if re.match(r"(\w+:)?//|\w+:[^/]", place)]
        away = [place for place in away if not place.startswith("data:image/")]
        assert away == [], page
        assert all(not p or p[0] == "#" or exists(page, p) for p in parser.places), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()), style


def exists(page: Path, place: str) -> bool:
    return (page.parent / re.sub(r"[?#].*", "", place)).exists()


def errors(browser: Browser) -> list[dict[str, Any]]:
    """What a page complains of; the theme logs that it follows the system's light or dark."""
    return [each for each in browser.complaints() if each["params"].get("type") != "log"]


def test_a_reader_finds_a_flag_by_search_and_on_a_phone(site: Path, browser: Browser) -> None:
    browser.open(site / "index.html")
    assert errors(browser) == []
    browser.go(f"{(site / 'search.html').as_uri()}?q=min-blend-weight")
    results = "[...document.querySelectorAll('#search-results li a')].map(a => a.href)"
    browser.until(f"{results}.length")
    assert any("reference/verbs/infer.html" in address for address in browser.run(results))
    assert all(address.startswith("file:") for address in browser.requests())
    assert errors(browser) == []
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=360, height=800, deviceScaleFactor=2, mobile=True,
    )  # fmt: skip
    for page in ("index", "reference/verbs/infer", "reference/knobs", "tutorials/1-a-volume"):
        browser.open(site / f"{page}.html")
        assert browser.run("document.documentElement.scrollWidth") <= 360, page
        assert errors(browser) == []
        assert all(address.startswith("file:") for address in browser.requests())


def test_every_knob_and_every_public_name_is_in_the_reference(site: Path) -> None:
    for verb in VERBS:
        assert f"penstock {verb}" in (site / "reference" / "verbs" / f"{verb}.html").read_text()
    settings = (site / "reference" / "knobs.html").read_text()
    models = [knobs.Knobs]
    for model in models:
        models += model.__subclasses__()
    for model in models[1:]:
        if model.__name__ in settings:
            names = [name for name in model.model_fields if name in model.__annotations__]
            assert all(f">{name}<" in settings for name in names), model
    assert settings.count("<tr") > 300
    public = (site / "reference" / "python" / "penstock.html").read_text()
    for name in penstock.__all__:
        assert f'id="penstock.{name}"' in public
