"""Trainings as reports: what bound one, its curves, its ranks; and how several scale."""

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.base import UsageError
from penstock.cli import main
from penstock.instruments import Ledger
from penstock.reports import Chapter, Report, html_page
from penstock.reports.charts.chart import words_of
from penstock.reports.training.fit_files import Steps
from penstock.reports.training.pictures import detection_pictures, draw_curves, draw_steps
from penstock.reports.training.report import report_of_training
from penstock.scaling.study_text import report_of_scaling

from ..bench.kit_suite import cases, made_up
from ..scaling.kit import log, seed_logs
from .pages import HOSTILE, Page, page_of

PHASES = ("data_wait", "transfer", "forward", "backward", "communication", "optimizer")


def training(
    folder: Path,
    phases: dict[str, tuple[float, ...]],
    world: int = 1,
    losses: tuple[float | None, ...] = (0.9, 0.5),
    seconds: float = 10.0,
    slow: float = 1.0,
    **results: Any,
) -> Path:
    """The folder of a training: ``phases`` are the seconds of a step in each epoch.

    ``slow`` is how many times as long computing takes on the last rank.
    """
    (folder / "steps").mkdir(parents=True)
    ranks = []
    for rank in range(world):
        factor = slow if rank == world - 1 else 1.0
        lines = [
            ",".join(("step", "epoch", "samples", "loss", "step_s", *(f"{p}_s" for p in PHASES)))
        ]
        totals = dict.fromkeys(PHASES, 0.0)
        for epoch in range(len(losses)):
            times = {p: each[epoch] for p, each in phases.items()}
            times = {p: s * (factor if p == "forward" else 1) for p, s in times.items()}
            for step in range(5):
                values = [f"{times[p]:.6f}" if p in times else "" for p in PHASES]
                lines.append(f"{5 * epoch + step},{epoch},32,0.5,{sum(times.values())},"
                             + ",".join(values))  # fmt: skip
                for name, value in times.items():
                    totals[name] += value
        (folder / "steps" / f"rank{rank}.csv").write_text("\n".join(lines) + "\n")
        medians = {p: {"total_s": t, "median_s": t / 10} if t else None for p, t in totals.items()}
        step = {"total_s": sum(totals.values()), "median_s": sum(totals.values()) / 10}
        ranks.append({"rank": rank, "host": "a", "phases": {"step": step, **medians},
                      "memory": {"host_peak": 2**30, "device_peak": None}})  # fmt: skip
    history = [
        {"epoch": n, "samples": 3200, "train_s": seconds / 2, "val_s": 0.1, "val_loss": loss,
         "train_loss": 1.0}
        for n, loss in enumerate(losses)
    ]  # fmt: skip
    document = {
        "workload": "spiral", "status": "complete", "parameters": 100, "device": "cpu",
        "world_size": world, "batch_size": 32, "global_batch_size": 32 * world, "epochs": 2,
        "steps": 10, "samples": 6400, "training_s": seconds, "validation_s": 0.2,
        "epoch_times_s": [seconds / 2] * 2, "samples_per_s": 6400 / seconds, "judge": "val_loss",
        "best": {"score": 0.5, "epoch": 1}, "final": {"val_loss": 0.5}, "history": history,
        "ranks": ranks, **results,
    }  # fmt: skip
    (folder / "training_results.json").write_text(json.dumps(document))
    args = {"workload": "spiral", "epochs": 2, "name": HOSTILE, "tags": {"study": HOSTILE}}
    (folder / "args.json").write_text(json.dumps(args))
    return folder


WAITING = {"data_wait": (0.6, 0.7), "forward": (0.3, 0.2), "optimizer": (0.1, 0.1)}
COMPUTING = {"data_wait": (0.2, 0.2), "forward": (0.7, 0.7), "optimizer": (0.1, 0.1)}


def test_the_verdict_of_a_training_turns_with_its_phases(tmp_path) -> None:
    report = report_of_training(training(tmp_path / "a", WAITING))
    assert report.about[0] == f"{HOSTILE}, tagged study={HOSTILE}"
    first, speed, score, memory = report.verdict
    assert first == (
        "Bound by waiting for data: 65% of the time of steps [60%-70%, 2 epochs of one run]; "
        "without it steps would be at most 2.9x as fast: train with more --num-workers, or chips "
        "that are read faster."
    )
    assert speed == (
        "It is complete after 2 of 2 epochs: 640 samples a second on 1 x cpu; an epoch took "
        "5.00 s [2 epochs] in the median."
    )
    cut = training(tmp_path / "cut", WAITING, steps_per_epoch=7)
    assert "2 of 2 epochs, the last with 3 of 7 steps: " in report_of_training(cut).verdict[1]
    assert score.startswith("Best val_loss: 0.5 after epoch 2 of 2; it was the last")
    assert memory == "Peak memory of the host: 1.00 GiB [most of 1 rank]."
    first, *_ = report_of_training(training(tmp_path / "b", COMPUTING)).verdict
    assert first == (
        "Bound by computing: 80% of the time of steps [80%-80%, 2 epochs of one run]; data was "
        "waited for 20% of it, so that a faster reader would give at most 1.25x."
    )


def test_what_a_training_does_not_hold_is_said(tmp_path) -> None:
    bare = training(tmp_path / "a", {}, losses=(None, 0.5), ranks=[], best=None)
    text = " ".join(report_of_training(bare).verdict)
    assert "What limited it is not known: no phase of a step was timed." in text
    assert "Nothing is known of its scores" in text
    (bare / "training_results.json").unlink()
    assert "Its speed is not known: no epoch has ended." in report_of_training(bare).verdict
    diverged = training(tmp_path / "b", WAITING, losses=(0.9, None))
    assert "It diverged: a validation loss was not finite." in report_of_training(diverged).verdict


def test_settings_of_other_workloads_are_not_shown(tmp_path) -> None:
    folder = training(tmp_path / "a", COMPUTING)
    args = {"workload": "detector", "backbone": "mobilenet", "model": "denoise-net"}
    (folder / "args.json").write_text(json.dumps(args))
    results = json.loads((folder / "training_results.json").read_text())
    (folder / "training_results.json").write_text(json.dumps(results | {"workload": "detector"}))
    chapter, *_ = report_of_training(folder).chapters
    (settings,) = (section.table for section in chapter.sections if section.title == "Settings")
    assert [name for name, _ in settings[1:]] == ["workload", "backbone"]


def test_steps_above_the_axis_are_told() -> None:
    nothing, seconds = np.full(200, np.nan), np.full(200, 0.001)
    seconds[0] = 2.0
    figure = draw_steps([Steps(0, nothing, nothing, {"step": seconds})])
    assert figure.note == "1 rank; 1 step above the axis, of up to 2.00 s"


def test_the_rank_that_others_wait_for_is_named(tmp_path) -> None:
    phases = {"forward": (0.5, 0.5), "communication": (0.2, 0.2)}
    folder = training(tmp_path / "a", phases, world=2, slow=1.2)
    # The first rank waits for the last, which has a fifth more to do and waits less.
    path = folder / "steps" / "rank0.csv"
    path.write_text(path.read_text().replace("0.200000", "0.300000").replace(",0.7,", ",0.8,"))
    lines = report_of_training(folder).verdict[-2:]
    assert "25% is the sum over ranks that no computing hides, 200 ms" in lines[0]
    assert "6% waiting for the last of 2 ranks, 50.0 ms" in lines[0]
    assert lines[1] == "Rank 1 is the last in 100% of 10 steps; 50% would be chance."
    untimed = report_of_training(training(tmp_path / "b", COMPUTING, world=3))
    why = "How long ranks waited for each other is not known: no sum over ranks was timed."
    assert untimed.verdict[-1] == why


def test_the_page_of_a_training_has_its_curves(tmp_path) -> None:
    page = page_of(report_of_training(training(tmp_path / "a", WAITING, world=2)))
    assert page.asked() == [] and sum("data-figure" in a for _, a in page.elements) == 3
    assert "val loss from 0.500 to 0.900, 0.700 in the median of 2 values" in page.text
    assert "data wait from 60.0 % to 70.0 %" in page.text
    assert "<script>alert(1)</script>" in page.text  # the name of the experiment, as text


def test_several_trainings_are_a_study_of_scaling(tmp_path, capsys) -> None:
    training(tmp_path / "runs" / "1", COMPUTING, losses=(0.9, 0.5))
    out = tmp_path / "s.json"
    words = ["report", str(tmp_path / "runs"), "--output", str(out), "--overwrite"]
    assert main(words) == 0 and json.loads(out.read_text())["title"] == "runs"
    training(tmp_path / "runs" / "2", COMPUTING, world=2, seconds=6.0)
    assert main(words) == 0
    document = json.loads(out.read_text())
    assert document["verdict"][0] == (
        "Scaling: 2 processes (1 node) gave 1.65x the speed of a single process [1 run, no "
        "interval], 82 % of linear."
    )
    titles = [chapter["title"] for chapter in document["chapters"]]
    assert titles == ["Scaling, hybrid", "Scaling: Runs", "Training: 1", "Training: 2"]
    names = [figure["name"] for figure in document["chapters"][0]["figures"]]
    assert names == ["speedup", "efficiency", "epoch"]
    training(tmp_path / "runs" / "3", COMPUTING, world=4, parameters=7)
    report = report_of_scaling(sorted((tmp_path / "runs").iterdir()), "Scaling", print)
    assert report.verdict[0].startswith("No scaling study: mixed experiments")
    alone = report_of_scaling([tmp_path / "runs" / "1"], "Scaling", print)
    assert alone.verdict[0] == "No scaling study: it takes two sizes, not 1 run of 1 size."
    capsys.readouterr()
    assert len(alone.chapters[0].sections[0].table) == 2  # the head, and the run


def test_logs_beside_a_training_or_a_ledger_are_reported_too(tmp_path, capsys) -> None:
    """Each is read once, whatever else lies in the folder."""
    out, folder = tmp_path / "s.json", tmp_path / "all"
    write = ["report", str(folder), "--output", str(out), "--overwrite"]
    Ledger(folder / "suite.ledger").append(made_up(cases(tmp_path)[0], 0, 5.0))
    (folder / "notes.log").write_text("Traceback (most recent call last)\n")
    (folder / "data.zip").write_text("no archive")
    assert main(write) == 0
    assert json.loads(out.read_text())["title"] == "suite.ledger"
    assert "data.zip is not" in capsys.readouterr().err
    (folder / "data.zip").unlink()
    (folder / "jobs").mkdir()
    logs = seed_logs(folder / "jobs")
    assert main(write) == 0
    document = json.loads(out.read_text())
    assert document["verdict"][0].startswith("suite.ledger: ")
    assert "Logs and trackers: Scaling, hybrid" in [c["title"] for c in document["chapters"]]
    capsys.readouterr()
    for name in "12":
        training(folder / "b" / name, COMPUTING, world=int(name))
    (folder / "b" / "1" / "slurm-9.out").write_text(logs[0].read_text())  # the training's own
    (folder / "jobs" / "1.out").write_text(log("1", 1, 10.2))
    assert main(write) == 0
    document = json.loads(out.read_text())
    assert document["verdict"][0].startswith("Scaling: 2 processes"), "other runs do not disturb"
    runs = {c["title"]: c["sections"][0]["table"] for c in document["chapters"]}
    assert len(runs["Scaling: Runs"]) == 3
    assert len(runs["Logs and trackers: Runs"]) == len(logs) + 1
    assert "1.out has the run of" in capsys.readouterr().err


def test_a_suite_comes_before_its_trainings_which_are_no_study(tmp_path, capsys) -> None:
    suite = tmp_path / "a" / "suite"
    for place, case in enumerate(cases(tmp_path)[:2]):
        training(suite / f"benchmark_quick_batch{place}_workers0", COMPUTING, world=1 + place)
        Ledger(suite / "suite.ledger").append(made_up(case, 0, 5.0))
    out = tmp_path / "s.json"
    assert main(["report", str(tmp_path / "a"), "--output", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["verdict"][0].startswith("suite.ledger: ")
    titles = [chapter["title"] for chapter in document["chapters"]]
    assert [title.partition(":")[0] for title in titles] == ["suite.ledger", *["Training"] * 2]
    for number in "12":
        training(tmp_path / "a" / number, COMPUTING, world=int(number))
    assert main(["report", str(tmp_path / "a"), "--output", str(out), "--overwrite"]) == 0
    assert json.loads(out.read_text())["verdict"][0].startswith("Scaling: 2 processes")
    capsys.readouterr()


def test_curves_of_one_colour_differ_in_their_style() -> None:
    figure = draw_curves("Scores", {f"score {n}": [(0, n / 9), (1, 0.5)] for n in range(9)})
    lines = figure.panels[0].series
    assert len({(int(line.colour) % 6, line.dashes, line.marker) for line in lines}) == 9
    assert figure.panels[0].x.whole


def test_logs_of_jobs_are_a_report(tmp_path, capsys) -> None:
    (tmp_path / "logs").mkdir()
    seed_logs(tmp_path / "logs")
    out = tmp_path / "r.json"
    named = [str(path) for path in sorted((tmp_path / "logs").iterdir())]
    assert main(["report", *named, "--output", str(out)]) == 0
    by_name = json.loads(out.read_text())
    assert main(["report", str(tmp_path / "logs"), "--output", str(out), "--overwrite"]) == 0
    assert json.loads(out.read_text())["verdict"] == by_name["verdict"]
    assert " the speed of " in by_name["verdict"][0]
    rows = by_name["chapters"][-1]["sections"][0]["table"]
    assert rows[0][0] == "Job ID" and len(rows) == 1 + len(named)
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "--output", str(out), "--overwrite"]) == 2
    assert "holds neither records" in capsys.readouterr().err


def test_detections_are_drawn_on_their_chips(tmp_path) -> None:
    folder = training(tmp_path / "run", COMPUTING)
    boxes = np.array([[10, 20, 30, 50], [1, 2, 3, 4]], np.float32)
    image = np.arange(100 * 80, dtype=np.uint8).reshape(100, 80)
    arrays = {"image_0": image, "true_0": boxes[:1], "predicted_0": boxes, "scores_0": boxes[:, 0]}
    np.savez(folder / "pictures.npz", names=np.array([HOSTILE]), **arrays)
    (picture,) = detection_pictures(folder)
    assert "image of 100 x 80 pixels, 1 true box, 2 predicted boxes" in words_of(picture.draw())
    (panel,) = picture.draw().panels
    assert panel.image is not None and (panel.image.pixels == image).all()
    true, predicted = panel.image.boxes
    assert true.places == [[7, 17, 33, 53]] and predicted.places == boxes.tolist()
    assert report_of_training(folder).chapters[0].pictures[-1].caption == picture.caption
    text = html_page(Report("t", ["v."], [], [Chapter("c", [], [picture])]))
    assert Page(text).asked() == []
    links = re.findall(r'"data:image/png;base64,([^"]+)"', text)
    assert [Image.open(BytesIO(base64.b64decode(link))).mode for link in links] == ["L"]
    (folder / "pictures.npz").write_bytes(b"PK, but no archive")
    with pytest.raises(UsageError, match=r"pictures\.npz is not as a training leaves it"):
        report_of_training(folder)
    np.savez(folder / "pictures.npz", names=np.array([{"a": "pickle"}], object))
    with pytest.raises(UsageError, match="not as a training leaves it"):
        report_of_training(folder)
