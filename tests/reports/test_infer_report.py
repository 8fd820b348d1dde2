"""A run of inference as a report: each sentence follows from the record, and turns with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.inference import run_inference
from penstock.reports import Catalogue, joined, places_of, reports_of_places
from penstock.reports.charts.chart import greys
from penstock.reports.infer.job_files import InferenceRun
from penstock.reports.infer.pictures import output_pictures
from penstock.reports.infer.report import report_of_run

from ..later import imported_later
from .pages import HOSTILE, page_of, run_folder, text_of

zarr = imported_later("zarr")
READ = {"read": (36.0, 2.0, 4), "forward": (5.0, 5.0, 1), "write": (1.0, 9.0, 2)}
"""Four readers that were busy for 9 of 10 seconds, and a network that waited for half of them."""


def verdict(folder: Path, stages: Any = READ, **changes: Any) -> list[str]:
    return list(report_of_run(run_folder(folder, stages, **changes)).verdict)


def test_the_verdict_names_the_bound_the_gain_and_the_waiting(tmp_path) -> None:
    run = {"name": "mine", "tags": {"study": "a", "who": "me"}}
    report = report_of_run(run_folder(tmp_path / "a", READ, run=run))
    assert report.about[0] == "mine, tagged study=a and who=me"
    first, second, *rest = report.verdict
    assert first == (
        "Bound by read: its 4 threads were busy 90% of the time; 0.8 of 4 cores were in use. "
        "More --prep-workers of infer, or an input of larger chunks would give at most 1.8x: then "
        "forward would be the limit (one run, no interval)."
    )
    assert second == "The network waited 50% of the time [1 lane, 10 batches]."
    assert rest[0] == (
        "It wrote 4 of 4 blocks in 10.0 s: 0.553 Mvox/s, 1.11 MB/s of input (one run, no interval)."
    )
    assert rest[1].startswith("By its plan it computed 1.80 voxels for each that it wrote and read")
    assert rest[2] == "Peak memory 219 MiB is within the plan's 400 MiB, 55% of it [20 readings]."


def test_every_sentence_of_it_turns_with_the_record(tmp_path) -> None:
    busier = READ | {"forward": (8.0, 2.0, 1)}
    first, second, *_ = verdict(tmp_path / "a", busier)
    assert "at most 1.1x: then forward would be the limit" in first and "waited 20%" in second
    first, *_ = verdict(tmp_path / "b", READ, cpu_seconds=38.0)
    assert first.startswith("Bound by the processor: 3.8 of 4 cores were busy")
    assert "Two more cores would give at most 1.5x" in first
    first, *_ = verdict(tmp_path / "c", {"forward": (9.8, 0.1, 1), "write": (0.5, 0.1, 1)})
    assert "Bound by forward" in first and "would give at most 2.0x" in first
    first, *_ = verdict(tmp_path / "d", {"forward": (9.8, 0.1, 1)}, cpu_seconds=3.0)
    assert "it had a processor for at most 31% of that time" in first and "3.3x" in first
    *_, memory = verdict(tmp_path / "e", peak_rss=500 << 20)
    assert "500 MiB is ABOVE the plan's 400 MiB, 125% of it" in memory
    *_, memory = verdict(tmp_path / "f", peak_rss=None)
    assert memory == "The peak of memory is not known: it was not sampled."


def test_a_run_that_is_not_done_has_no_verdict_on_its_bound(tmp_path) -> None:
    report = report_of_run(run_folder(tmp_path / "a"))
    assert report.verdict[0].startswith("Not done: killed: 0 of 4 blocks are written (0.0%)")
    assert "What limited it is not known" in report.verdict[1]
    assert "1.1 [1.1-1.1] of 4 cores busy" in " ".join(report.verdict)
    assert "Processor of the run over time" in text_of(report)  # its telemetry is there


@pytest.mark.usefixtures("undrawn")
def test_faults_and_what_nothing_is_known_of(tmp_path) -> None:
    clipped = [
        {"head": "out", "output": HOSTILE, "dtype": "uint16", "clipped": 500, "values": 1000}
    ]
    folder = run_folder(tmp_path / "a", READ, clipped=clipped,
                        chunks={"read": 8, "absent": 1}, notes=["a worker died"])  # fmt: skip
    page = page_of(report_of_run(folder))
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert page.asked() == [] and [a for a in scripts if "data-figure" not in a] == [{}]
    for said in ("500 of 1,000 values) were outside the range of uint16", "1 of 8 chunks",
                 "a worker died"):  # fmt: skip
        assert said in page.text
    bare = run_folder(tmp_path / "b", READ, run={"fingerprint": {}, "plan": None, "maker": {}})
    (bare / "metrics.jsonl").unlink()
    text = text_of(report_of_run(bare))
    assert "a model that is not known" in text
    assert "How much of the machine it used is not known" in text


def test_explain_prints_the_verdict_with_names_as_text(tmp_path, capsys) -> None:
    folder = run_folder(tmp_path / "a", READ, run={"name": HOSTILE}, cpu_seconds=12.0)
    code = main(["explain", str(folder)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "\x1b" not in out and "\x00" not in out
    title, _, verdict, *_ = out.splitlines()
    assert title == "a" and verdict.startswith("- Bound by read: its 4 threads ")
    assert main(["explain", str(tmp_path / "nothing")]) == 2


def test_a_run_is_named_by_its_output_and_a_folder_is_searched(tmp_path, capsys) -> None:
    run_folder(tmp_path / "runs" / "a.zarr.penstock", READ)
    run_folder(tmp_path / "runs" / "b.zarr.penstock", READ | {"forward": (9.9, 0.0, 1)})
    (tmp_path / "runs" / "a.zarr" / "inner.penstock").mkdir(parents=True)
    (tmp_path / "runs" / "a.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "runs" / "a.zarr" / "inner.penstock" / "run.json").write_text("{}")  # of an array
    out = tmp_path / "a.json"
    assert main(["report", str(tmp_path / "runs" / "a.zarr"), "--output", str(out)]) == 0
    assert json.loads(out.read_text())["title"] == "a.zarr"
    (tmp_path / "c.tif").write_bytes(b"II*")  # an output may be one file
    run_folder(tmp_path / "c.tif.penstock", READ)
    assert main(["report", str(tmp_path / "c.tif"), "--output", str(tmp_path / "c.json")]) == 0
    assert json.loads((tmp_path / "c.json").read_text())["title"] == "c.tif"
    assert [run.kind for run in Catalogue([tmp_path / "c.tif"]).runs] == ["inference"]
    places = places_of(tmp_path / "runs")
    assert [place.path.name for place in places] == ["a.zarr.penstock", "b.zarr.penstock"]
    report = joined(reports_of_places(places), "runs")
    assert [line.partition(":")[0] for line in report.verdict] == ["a.zarr", "b.zarr"]
    assert "Bound by forward" in report.verdict[1]
    capsys.readouterr()
    assert main(["report", str(tmp_path / "runs"), "--csv", str(tmp_path / "x.csv")]) == 2
    assert "holds none" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for name, said in (("empty", "holds neither"), ("gone.ledger", "cannot be read"),
                       ("gone", "cannot be read")):  # fmt: skip
        assert main(["report", str(tmp_path / name), "--output", str(tmp_path / "y.html")]) == 2
        assert said in capsys.readouterr().err


def test_a_folder_that_somebody_changed_is_refused_in_a_sentence(tmp_path, capsys) -> None:
    for number, changes in enumerate(({"seconds": "ten"}, {"voxels": None}, {"blocks_written": "a"},
                                      {"workers": ["a"]}, {"run": {"fingerprint": [1]}},
                                      {"run": {"plan": 7}}, {"voxels": 10**400},
                                      {"stages": {"read": (36.0, 2.0, 0)}})):  # fmt: skip
        whole = {"stages": READ, **changes}
        folder = run_folder(tmp_path / f"{number}.penstock", **whole)
        assert main(["report", str(folder), "--output", str(tmp_path / f"{number}.json")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"penstock report: {folder}") and "defect" not in said
        assert not (tmp_path / f"{number}.json").exists()


def test_a_figure_of_damaged_records_is_refused_in_a_sentence(tmp_path, capsys) -> None:
    folder = run_folder(tmp_path / "a.penstock", READ, run={"plan": {"seam_error": {"places": 1}}})
    for output in ("a.html", "a.json", "a.md"):
        assert main(["report", str(folder), "--output", str(tmp_path / output)]) == 2
        said = capsys.readouterr().err
        assert "the figure seams cannot be drawn, as its records are damaged: it lacks" in said
        assert not (tmp_path / output).exists()


def test_a_run_of_infer_as_it_is(tmp_path) -> None:
    """From a real run, with its plan and trace."""
    store, trace = tmp_path / "out.zarr", tmp_path / "trace.json"
    np.save(tmp_path / "in.npy", np.arange(24**3, dtype="uint16").reshape(24, 24, 24))
    words = ["infer", "--in-spec", str(tmp_path / "in.npy"), "--out-spec", str(store),
             "--model-type", "identity", "--patch", "16", "--overlap", "4", "--devices", "cpu",
             "--trace", str(trace)]  # fmt: skip
    assert main(words) == 0
    assert main(["report", str(store), "--output", str(tmp_path / "r.json")]) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    text = json.dumps(document)
    assert "By its plan it computed " in text and "voxels for each that it wrote" in text
    names = [figure["name"] for figure in document["chapters"][0]["figures"]]
    assert {"stages", "ram"} <= set(names)
    sections = {each["title"]: each for each in document["chapters"][0]["sections"]}
    sections.pop("What to change", None)  # it depends on the times of the stages
    assert list(sections) == "Stages, Memory, Seams, Faults and values, Settings".split(", ")
    memory = sections["Memory"]["table"]
    assert memory[0] == ["part of the plan", "bytes", "share"] and memory[-1][0] == "total"


@pytest.mark.slow
def test_a_report_looks_at_the_output_of_its_run(tmp_path) -> None:
    out = tmp_path / "out.zarr"
    volume = np.random.default_rng(0).integers(0, 999, (48, 48, 48)).astype(np.uint16)
    zarr.save_array(tmp_path / "in.zarr", volume)
    run_inference(str(tmp_path / "in.zarr"), str(out), model="identity", patch=(24,), overlap=(0,),
                  normalize="none", head_kind="intensity")  # fmt: skip
    (picture,) = output_pictures(InferenceRun.read(Path(f"{out}.penstock")))
    assert "Plane z = 23" in picture.caption
    before, after, difference = picture.draw().panels
    assert before.title == "input" and difference.title == "difference"
    low, high = np.percentile(volume[23], (0.5, 99.5))
    assert (after.image.pixels == greys(volume[23], low, high)).all()
    (tmp_path / "out.zarr").rename(tmp_path / "moved.zarr")
    assert output_pictures(InferenceRun.read(Path(f"{out}.penstock"))) == []
    assert output_pictures(InferenceRun.read(run_folder(tmp_path / "a"))) == []  # it is not done


def test_what_is_known_of_seams_is_told_and_drawn(tmp_path) -> None:
    measured = {"by_distance": [0.02, 0.01], "low": [0.01, 0.0], "high": [0.03, 0.02], "places": 3,
                "labels": False}  # fmt: skip
    plan = {"seams": "no overlap is exact: a layer", "seam_error": measured}
    (chapter,) = report_of_run(run_folder(tmp_path / "a", READ, run={"plan": plan})).chapters
    (seams,) = [section for section in chapter.sections if section.title == "Seams"]
    assert list(seams.sentences) == ["No overlap is exact: a layer."]
    (picture,) = [picture for picture in chapter.pictures if picture.name == "seams"]
    (panel,) = picture.draw().panels
    assert list(panel.series[1].y) == [2.0, 1.0]
    assert list(panel.series[0].base) == [1.0, 0.0] and list(panel.series[0].y) == [3.0, 2.0]
