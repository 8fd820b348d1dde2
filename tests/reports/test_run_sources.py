"""Every source of runs: its rows, and the details of each."""

import json
import math
import os
import shutil

import numpy as np
import pytest

from penstock.instruments.ledger import record_cells
from penstock.reports import Catalogue, ShownRun, page_data

from ..scaling.kit import log, write
from .kit import launch
from .pages import HOSTILE, run_folder
from .run_kit import begun, catalogue_of, ledger_of, machine_of_training, mlflow_store, training


def only(catalogue: Catalogue) -> ShownRun:
    (run,) = catalogue.runs
    return run


def test_launches_are_told_apart_by_the_knobs_that_differ(tmp_path) -> None:
    records = [launch(64, 1), launch(64, 2), launch(64, 2, 1, name="night", tags={"node": "a"})]
    runs = catalogue_of(ledger_of(tmp_path / "l.ledger", records)).runs
    names = {run.name for run in runs}
    assert names == {"model batch=1 launch 1", "model batch=2 launch 1", "night batch=2 launch 2"}
    assert len({run.case for run in runs}) == 3 and "night batch=2" in {run.title for run in runs}
    tagged = next(run for run in runs if run.tags)
    assert tagged.tags == {"node": "a"} and tagged.kind == "bench model"
    assert tagged.seconds == 0.03 and tagged.model == "prithvi-refiner-tiny"


def test_details_of_a_launch_are_those_of_its_record(tmp_path) -> None:
    record = launch(64, 2, seconds=[0.03, 0.05, 0.04], environment={
        "machine": {"processor": "EPYC", "cores": 4}, "load": {"one_minute": 3.0},
        "machine_key": "abc",
    })  # fmt: skip
    catalogue = catalogue_of(ledger_of(tmp_path / "l.ledger", [launch(8), record]))
    run = next(run for run in catalogue.runs if "batch=2" in run.name)
    details = catalogue.details(run)
    assert details.settings["batch"] == "2" and details.settings["machine.cores"] == "4"
    assert not any("load" in name for name in details.settings)
    cells = record_cells(record)
    for name in ("step.median_s", "work.pixels"):
        assert details.metrics[name] == cells[name]
    assert details.metrics["facts.parameters"] == 1000
    curve = details.curves["step_s"]
    assert curve.values.tolist() == [0.03, 0.05, 0.04]
    assert curve.places["step"].tolist() == [1, 2, 3]
    assert curve.places["seconds"].tolist() == pytest.approx([0.03, 0.08, 0.12])
    assert run.machine == "abc", "as its CSV names it"


def test_a_failed_launch_shows_its_error(tmp_path) -> None:
    catalogue = catalogue_of(ledger_of(tmp_path / "l.ledger", [launch(status="crash")]))
    run = only(catalogue)
    assert (run.status, run.seconds) == ("crash", None)
    assert catalogue.details(run).error == "crash"


def test_a_packed_ledger_is_read_too(tmp_path) -> None:
    import gzip

    path = tmp_path / "l.jsonl.gz"
    path.write_bytes(gzip.compress((launch(8).line() + "\n").encode()))
    catalogue = catalogue_of(path)
    assert catalogue.details(only(catalogue)).settings["tile"] == "8"
    path.write_bytes(path.read_bytes()[:-20])
    (note,) = catalogue_of(path).notes
    assert "cannot be read" in note


def test_a_training_has_its_scores_steps_and_machine(tmp_path) -> None:
    folder = training(tmp_path / "lr3", 2, 12.0, learning_rate=0.003, name="a name",
                      tags={"node": "h200"}, num_samples=7, backbone="resnet50")  # fmt: skip
    machine_of_training(folder)
    catalogue = catalogue_of(tmp_path)
    run = only(catalogue)
    assert (run.name, run.kind, run.status, run.workload) == (
        "a name", "training", "complete", "spiral",
    )  # fmt: skip
    assert run.tags == {"node": "h200"} and run.seconds == 12.0 and run.model == ""
    assert run.began == (folder / "args.json").stat().st_mtime
    details = catalogue.details(run)
    settings = details.settings
    assert settings["devices"] == "2" and settings["learning_rate"] == "0.003"
    assert settings["num_samples"] == "7"
    assert "backbone" not in settings and "tags" not in settings and "name" not in settings
    assert details.metrics["training_s"] == 12.0 == run.seconds, "one quantity, one value"
    loss = details.curves["train_loss"]
    assert loss.values.tolist() == [1.0, 0.5, pytest.approx(1 / 3)]
    assert loss.places["step"].tolist() == [4, 8, 12] and loss.places["epoch"].tolist() == [1, 2, 3]
    assert loss.places["seconds"].tolist() == [3.0, 6.0, 9.0]
    steps = details.curves["train_loss_step"]
    assert steps.values.tolist() == pytest.approx([1 / n for n in range(1, 13)])
    assert steps.places["epoch"].tolist() == pytest.approx(np.arange(1, 13) / 4)
    assert steps.places["seconds"][[0, 3, 4, 11]].tolist() == [0.5, 2.0, 2.5, 6.0]
    assert "system/cpu_percent" in details.curves
    assert "transfer_s" not in details.curves


def test_the_model_of_a_training_is_of_its_workload(tmp_path) -> None:
    begun(tmp_path / "a", workload="detector", backbone="resnet18", model="denoise-net")
    begun(tmp_path / "b", workload="mine", backbone="resnet18", model="mine-net")
    models = {run.workload: run.model for run in catalogue_of(tmp_path).runs}
    assert models == {"detector": "resnet18", "mine": "mine-net"}


def test_a_run_of_inference_has_its_readings(tmp_path) -> None:
    run_folder(tmp_path / "a.penstock", {"read": (8.0, 1.0, 1), "forward": (5.0, 4.0, 1)},
               run={"name": "mouse", "tags": {"k": "v"}})  # fmt: skip
    catalogue = catalogue_of(tmp_path)
    run = only(catalogue)
    assert (run.name, run.kind, run.status, run.model) == (
        "mouse", "inference", "complete", "identity",
    )  # fmt: skip
    assert run.seconds == 10.0 and run.tags == {"k": "v"}
    details = catalogue.details(run)
    assert details.metrics["seconds"] == 10.0 and details.metrics["stages.read.busy"] == 8.0
    assert details.metrics["voxels_per_s"] == 552_960.0
    assert details.curves["cpu_percent"].values.tolist() == [100.0 + t for t in range(20)]
    assert details.curves["queue/prep"].of_machine and details.settings["devices"] == "1"


def test_a_run_of_inference_that_was_killed_is_found_by_its_output(tmp_path) -> None:
    run_folder(tmp_path / "a.zarr.penstock")
    (tmp_path / "a.zarr").mkdir()
    run = only(catalogue_of(tmp_path / "a.zarr"))
    assert run.status == "killed" and run.read().metrics["blocks planned"] == 4


def test_the_log_of_a_job(tmp_path) -> None:
    (path,) = write(tmp_path, {"slurm-77.out": log("77", 4, 95.23, ranks=4)})
    catalogue = catalogue_of(path)
    run = only(catalogue)
    assert (run.name, run.kind, run.machine) == ("mlp 77", "job log", "NVIDIA A100-SXM4-40GB")
    details = catalogue.details(run)
    assert details.settings["devices"] == "4" and details.metrics["seconds"] == 95.23
    assert details.metrics["best_val_acc"] == 0.949
    curve = details.curves["val_loss"]
    assert curve.places["epoch"].tolist() == list(range(1, 51))
    assert curve.values[[0, -1]].tolist() == [0.2, 0.151]
    assert details.curves["val_acc"].values[1] == 0.901
    assert curve.places["step"][:2].tolist() == [55, 110]


def test_readings_of_gpus_in_a_log_are_a_mean_as_they_have_no_times(tmp_path) -> None:
    readings = "0, 97 %, 41 %, 55\n0, 57 %, 41 %, 55\n"
    (path,) = write(tmp_path, {"slurm-77.out": f"{log('77', 1, 9.5)}{readings}"})
    details = only(catalogue_of(path)).read()
    assert "gpu_util_percent" not in details.curves
    assert details.metrics["gpu_util_percent"] == 77.0


@pytest.mark.parametrize(
    ("dates", "began"),
    [
        (("Tue Nov 24 23:57:26 UTC 2026", "Wed Nov 25 03:00:00 UTC 2026"),
         [1795564646, 1795575600]),
        (("Start: Tue Nov  3 00:00:00 GMT 2026  x", "Tue Nov 24 11:57:26 PM UTC 2026"),
         [1793664000, 900000 - 60]),
        (("Tue Xyz 24 23:57:26 2026", "Tue Nov 24 23:57:26 UTC"), [None, 900000 - 60]),
    ],
)  # fmt: skip
def test_a_log_began_at_its_own_date_or_as_long_ago_as_it_took(tmp_path, dates, began) -> None:
    """The time of a file is that of its end, so it says nothing of an attempt before the last."""
    first = f"{dates[0]}\n{log('7', 1, None, done=3)}"
    text = f"{first}{log('7', 1, 60.0, first=3)}".replace("Starting training", dates[1], 2)
    text = text.replace(dates[1], "Starting training", 1) + "Wed Nov 25 23:00:00 UTC 2026\n"
    (path,) = write(tmp_path, {"slurm-7.out": text})
    os.utime(path, (900000, 900000))
    runs = sorted(catalogue_of(path).runs, key=lambda run: run.name)
    assert [run.began for run in runs] == began


def test_a_store_of_mlflow_has_all_metrics(tmp_path) -> None:
    catalogue = catalogue_of(mlflow_store(tmp_path / "mlflow.db"))
    runs = {run.name: run for run in catalogue.runs}
    assert runs.keys() == {"tracked 0", "tracked 1"}
    details = catalogue.details(runs["tracked 1"])
    assert details.settings == {
        "devices": "2", "world_size": "2", "learning_rate": "0.001", "machine.cores": "4",
    }  # fmt: skip
    assert runs["tracked 1"].tags == {"node": "a100"}
    curve = details.curves["val_loss"]
    assert curve.places["seconds"].tolist() == [0, 10, 20, 30, 40]
    assert curve.places["epoch"].tolist() == [0, 0, 1, 1, 2]
    assert details.metrics["val_loss"] == pytest.approx(1 / 6)
    assert details.metrics["seconds"] == 60.0 == runs["tracked 1"].seconds


def test_hostile_words_are_clipped_and_without_control_characters(tmp_path) -> None:
    begun(
        tmp_path / "a", name=HOSTILE + "x" * 10**6, tags={HOSTILE: HOSTILE}, learning_rate=HOSTILE
    )
    ledger_of(tmp_path / "l.ledger", [launch(case={"model": HOSTILE, "tile": "y" * 10**5})])
    catalogue = catalogue_of(tmp_path)
    for run in catalogue.runs:
        words = [run.name, run.model, run.source, *run.tags, *run.tags.values()]
        words += catalogue.details(run).settings.values()
        assert not any("\x1b" in word or "\u202e" in word or "\x00" in word for word in words)
        assert max(map(len, words)) < 2100
    assert any("<script>alert(1)</script>" in run.name for run in catalogue.runs)


@pytest.mark.parametrize("kind", ["args", "ledger", "run", "db", "zip"])
def test_what_is_broken_is_passed_over_with_a_sentence(tmp_path, kind: str) -> None:
    training(tmp_path / "good")
    bad = tmp_path / "bad"
    if kind == "args":
        (begun(bad) / "args.json").write_text("{")
    elif kind == "run":
        bad.mkdir()
        (bad / "run.json").write_text("[1")
    elif kind == "ledger":
        ledger_of(bad, [launch()])
        with (bad / "records.jsonl").open("a") as file:
            file.write('{"schema": 99}\nnonsense\n')
    else:
        (tmp_path / f"bad.{kind}").write_bytes(b"SQLite format 3\0 no" if kind == "db" else b"PK")
    catalogue = catalogue_of(tmp_path)
    assert "good" in {run.name for run in catalogue.runs}
    assert catalogue.notes and all("bad" in note for note in catalogue.notes)
    assert all(note.endswith("it is passed over") for note in catalogue.notes)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_number_that_json_lacks_spoils_no_page(tmp_path, wrong: float) -> None:
    folder = training(tmp_path / "a")
    results = json.loads((folder / "training_results.json").read_text())
    results["ranks"][0]["phases"] = {"forward": {"total_s": wrong, "median_s": wrong}}
    results["history"][0]["train_s"] = results["training_s"] = wrong
    (folder / "training_results.json").write_text(json.dumps(results))
    run_folder(tmp_path / "b.penstock", {"read": (36.0, 2.0, 4)}, seconds=wrong, voxels=wrong)
    catalogue = catalogue_of(tmp_path)
    assert len(catalogue.runs) == 2
    json.dumps(page_data(catalogue), allow_nan=False)


def test_details_of_what_was_removed_since_say_so(tmp_path) -> None:
    catalogue = catalogue_of(training(tmp_path / "a"))
    shutil.rmtree(tmp_path / "a")
    assert "a cannot be read" in catalogue.details(only(catalogue)).error


def test_repeats_of_a_training_are_one_case(tmp_path) -> None:
    for name, args in (("a", {"seed": 1}), ("b", {"seed": 2}), ("c", {"learning_rate": 0.5})):
        training(tmp_path / name, **args)
    cases = {run.source[-1]: run.case for run in catalogue_of(tmp_path).runs}
    assert cases["a"] == cases["b"] != cases["c"]
