"""A report as HTML: whole in itself, safe with any text, the same content as Markdown and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import Refused, UsageError
from penstock.cli import main
from penstock.reports import Section, html_page, report_of_records, write_report
from penstock.reports.content import Chapter, Report, json_page, markdown_page

from .kit import launch, sized, sweep
from .pages import HOSTILE, Page, page_of

TIMES = {(32, 1): 4.0, (32, 2): 7.0, (64, 1): 12.0}


def ledger(path: Path, records: Any) -> Path:
    path.write_text("".join(f"{one.line()}\n" for one in records))
    return path


def plain(**changes: Any) -> Report:
    content: dict[str, Any] = {
        "title": "t", "verdict": ["v."], "chapters": [
            Chapter("c", [Section("s", [("tile", "time"), ("64", "1.2 s")], ["said."])])
        ],
    }  # fmt: skip
    return Report(**{**content, **changes})


@pytest.fixture(scope="module")
def swept() -> Report:
    return report_of_records(sized(TIMES), "sweep.ledger")


@pytest.fixture(scope="module")
def swept_page(swept: Report) -> Page:
    return page_of(swept)


def test_a_sweep_is_a_page_with_its_verdict_first(swept_page: Page) -> None:
    page, text = swept_page, swept_page.text
    places = ["For throughput", "For latency", "Memory, throughput and time"]
    assert [text.index(each) for each in places] == sorted(text.index(each) for each in places)
    figures = [attrs for _, attrs in page.elements if attrs.get("class") == "drawing"]
    assert len(figures) == 1 and all(figure["role"] == "group" for figure in figures)
    assert "Pixels a second: batch 1 32 256 k pixels/s, 64 341 k pixels/s" in text
    heads = [attrs for tag, attrs in page.elements if tag == "th"]
    assert heads and all(attrs["scope"] == "col" for attrs in heads)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_case_without_memory_stands_in_the_figure() -> None:
    """Its model was never built, so that nothing is known of its structure."""
    ok = sweep(TIMES, facts={"structure": "abc"})
    failed = launch(64, 2, status="oom_host", memory={"host_peak": 2**30})
    page = page_of(report_of_records([*ok, failed], "l"))
    assert "2: OOM host" in page.text
    assert page.text.count("tile ↕") + page.text.count("tile batch step") <= 1  # one table
    alone = page_of(report_of_records([failed], "l"))
    assert "Nothing was measured: of 1 launch none was ok (1 oom_host)" in alone.text


def test_the_verdict_of_a_sweep_turns_with_its_records() -> None:
    slower = TIMES | {(64, 1): 30.0}
    first = report_of_records(sized(slower), "l").verdict[0]
    assert first.startswith("For throughput: prithvi-refiner-tiny, tile 32, batch 2: ")
    assert "5 launches]" in first and "fastest" not in first
    failed = launch(64, 2, status="oom_host")
    lines = report_of_records([*sized(slower), failed], "l").verdict
    assert "Left out, a launch failed: 64, batch 2." in lines
    (alone,) = (launch(64, 1, seconds=(0.012,) * 9),)
    assert "1 launch]" in report_of_records([alone], "l").verdict[0]


def test_the_three_forms_say_the_same(swept: Report, swept_page: Page) -> None:
    document, page = json.loads(json_page(swept)), swept_page
    markdown = markdown_page(swept, [[] for _ in swept.chapters])
    lines = [*document["verdict"], *document["about"]]
    lines += [line for c in document["chapters"] for s in c["sections"] for line in s["sentences"]]
    assert len(lines) > 5
    for line in lines:
        assert line in markdown and line in page.text
    for chapter in document["chapters"]:
        for section in chapter["sections"]:
            for row in section["table"]:
                assert f"| {' | '.join(row)} |" in markdown
                assert " ".join(row) in page.text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
def test_too_many_figures_are_counted_and_left_out(swept: Report, monkeypatch) -> None:
    monkeypatch.setattr("penstock.reports.page.MOST_FIGURES", 1)
    page = page_of(Report("t", ["v."], [], [*swept.chapters, *swept.chapters]))
    assert sum("data-figure" in attrs for _, attrs in page.elements) == 1
    assert "1 of 1 figures are left out" in page.text


def test_it_asks_for_nothing_and_runs_one_script(swept_page: Page) -> None:
    page = swept_page
    assert page.asked() == []
    (policy,) = (a["content"] for tag, a in page.elements if "http-equiv" in a)
    assert policy.startswith(
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-"
    )
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert [each.get("type", "") for each in scripts] == ["application/json", ""]
    names = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(names) == len(set(names))


def hostile_report(folder: Path) -> Report:
    file = folder / HOSTILE.replace("/", "").replace("\0", "")
    file.write_text("records")
    section = Section(HOSTILE, [(HOSTILE, "b"), ("1", HOSTILE)], [HOSTILE])
    records = sweep({(32, 1): 4.0}, case={"model": HOSTILE})
    pictures = report_of_records(records, HOSTILE).chapters[0].pictures
    return Report(HOSTILE, [HOSTILE, HOSTILE], [HOSTILE],
                  [Chapter(HOSTILE, [section], pictures, [HOSTILE])],
                  [file])  # fmt: skip


def test_what_others_named_is_text_everywhere(tmp_path) -> None:
    report = hostile_report(tmp_path)
    text = html_page(report)
    page = Page(text)
    assert page.asked() == []
    tags = [tag for tag, _ in page.elements]
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert [each for each in scripts if each.get("type") != "application/json"] == [{}]
    assert "img" not in tags and tags.count("style") == 1
    assert not [attrs for _, attrs in page.elements if any(a.startswith("on") for a in attrs)]
    assert not {char for char in text if not char.isprintable()} - {"\n"}
    assert "{{7*7}}" in page.text and "\\x1b[2J\\x00\\u202e" in page.text
    assert "<script>alert(1)</script>" in page.text  # as text
    assert f"{tmp_path}/" in page.text and "(7 B)" in page.text
    markdown = markdown_page(report, [[]])
    assert "<script" not in markdown and "](http" not in markdown and "\x1b" not in markdown


def test_texts_of_any_length_are_cut() -> None:
    long = "x<" * 100_000
    records = [
        launch(32, 1, case={"model": long}),
        launch(32, 2, status="crash", case={"model": long},
               error={"stage": "measure", "message": long, "stderr": long}),
    ]  # fmt: skip
    report = report_of_records(records, long)
    text = html_page(report)
    assert len(text) < 200_000 and "(200,000 characters)" in text
    assert len(json_page(report)) < 50_000


def test_no_key_gets_into_a_page(monkeypatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "env-secret-value")
    text = html_page(plain(verdict=["of env-secret-value and https://me:hunter2word@host/"]))
    assert "env-secret-value" not in text and "hunter2word" not in text


@pytest.mark.usefixtures("undrawn")
def test_one_file_of_each_kind(tmp_path, capsys) -> None:
    records = str(ledger(tmp_path / "s.jsonl", sized({(32, 1): 4.0})))
    for name in ("a.html", "a.json", "a.md"):
        assert main(["report", records, "--output", str(tmp_path / name)]) == 0
    assert Page((tmp_path / "a.html").read_text()).text.count("For throughput") == 1
    assert json.loads((tmp_path / "a.json").read_text())["format"] == "penstock-report"
    assert "![a_model](a_model.png)" in (tmp_path / "a.md").read_text()
    assert (tmp_path / "a_model.png").read_bytes()[:4] == b"\x89PNG"
    capsys.readouterr()
    assert main(["report", records, "--output", str(tmp_path / "a.html")]) == 2
    assert "a.html exists; --overwrite replaces it" in capsys.readouterr().err
    assert main(["report", records, "--output", str(tmp_path / "a.json"), "--overwrite"]) == 0
    (tmp_path / "mine.html").write_text("mine")
    assert main(["report", records, "--output", str(tmp_path / "mine.html")]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    with pytest.raises(Refused):
        write_report(plain(), tmp_path / "a.html")
    with pytest.raises(UsageError, match="is an input"):
        from penstock.reports.page import check_report

        check_report(Path(records), True, [Path(records)])


@pytest.mark.slow
def test_a_large_sweep_is_a_small_page() -> None:
    many = {(32 * a, b): a * b / 100 for a in range(1, 11) for b in range(1, 11)}
    text = html_page(report_of_records(sized(many), "sweep.ledger"))
    assert len(text) < 1_500_000
    assert Page(text).text.count("%") > 10
