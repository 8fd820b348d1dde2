"""A suite: what it refuses, its launches, and trainings from end to end."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock.base import SUITE_LEDGER, TrainConfig, UsageError, build
from penstock.bench import Launch, Rules, measure_scenario, named_preset, run_launch, series_rules
from penstock.bench.scenarios import train_scenario as scenario
from penstock.bench.suite.execute import (
    check_resumed_suite,
    check_suite_output,
    prepare_suite,
    suite_cases,
    with_roots,
)
from penstock.cli import main
from penstock.cli import suite as verb
from penstock.cli.train import config_of
from penstock.cluster.place import NOT_A_RANK
from penstock.data import SPLITS, Chips
from penstock.instruments.ledger import Ledger

from ..preloaded import forked_workers, started
from .kit_suite import CUSTOM, config_for, flags, made_up, parsed

pytestmark = pytest.mark.skipif(
    find_spec("lightning_fabric") is None, reason="lightning_fabric is not installed"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two scenes of the real layout, and their chips."""
    folder = tmp_path_factory.mktemp("xview3")
    scenes = ["generate", "xview3", str(folder / "scenes"), "--scenes", "2", "--size", "256", "256"]
    assert main([*scenes, "--objects", "8"]) == 0
    cut = f"suite preprocess --data-root {folder}/scenes --output-dir {folder}/chips"
    labels = f"--train-labels {folder}/scenes/labels/train.csv"
    labels += f" --val-labels {folder}/scenes/labels/validation.csv"
    assert main([*cut.split(), *labels.split(), "--chip-size", "128", "--overlap", "32"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "val"), list(zip(SPLITS["train"], SPLITS["validation"], strict=True))
)
def test_splits_are_called_as_in_preprocess(data: Path, tmp_path, train: str, val: str) -> None:
    for name in (train, val):
        (tmp_path / name).mkdir()
    config = with_roots(config_for(data, tmp_path, data_root=tmp_path), [named_preset("quick")])
    assert (config.train_data_root, config.val_data_root) == (tmp_path / train, tmp_path / val)
    args = parsed(f"train --data-root {tmp_path} --output-dir out")
    trained = config_of(verb._with_roots(args))
    assert (trained.train_data_root, trained.val_data_root) == (tmp_path / train, tmp_path / val)
    # What is said of a split comes first, and the other is looked for alone.
    (tmp_path / val).rmdir()
    said = parsed(f"train --data-root {tmp_path} --val-data-root elsewhere --output-dir out")
    trained = config_of(verb._with_roots(said))
    assert (trained.train_data_root, trained.val_data_root) == (tmp_path / train, Path("elsewhere"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_chips_path": None}, "--train-chips is required; penstock suite preprocess"),
        ({"val_chips_path": Path("none")}, "--val-chips none has no chips: there is no index.json"),
        ({"val_label_file": Path("none.csv")}, "--val-labels none.csv: there is no such file"),
        ({"data_root": Path("none")}, "--data-root none has no folder train or training"),
        ({"train_data_root": Path("no")}, "--train-data-root no: there is no such folder"),
        ({"val_chips_path": Path(__file__).parent}, "has no chips: there is no index.json"),
    ],
)
def test_what_is_not_there_is_named(data, tmp_path, change, words) -> None:
    with pytest.raises(UsageError, match=words):
        with_roots(config_for(data, tmp_path, **change), [named_preset("quick")])


def test_chips_of_other_channels_are_refused(data: Path, tmp_path) -> None:
    dual = named_preset("quick").model_copy(update={"channels": "vv,vh"})
    with pytest.raises(UsageError, match=r"is for channels vv,vh and --train-chips .* has vh,vv,b"):
        with_roots(config_for(data, tmp_path), [dual])


def test_no_chip_with_a_valid_pixel_is_refused(data: Path, tmp_path, monkeypatch) -> None:
    """A detector has a sample for each chip, and loads torchvision, which takes a second."""
    shutil.copytree(data / "chips" / "train", tmp_path / "empty")
    manifest = next((tmp_path / "empty").glob("*/manifest.json"))
    document = json.loads(manifest.read_text())
    document["valid_pixels"] = [[0 for _ in row] for row in document["valid_pixels"]]
    manifest.write_text(json.dumps(document))
    config = config_for(data, tmp_path, train_chips_path=tmp_path / "empty")
    case = suite_cases(named_preset("quick"), config)[0]

    def of_chips(name: str, config: TrainConfig) -> SimpleNamespace:
        assert config.train_chips_path and config.val_chips_path
        train, val = Chips(config.train_chips_path), Chips(config.val_chips_path)
        return SimpleNamespace(train=train, val=val)

    monkeypatch.setattr(scenario, "make_workload", of_chips)
    with pytest.raises(UsageError, match=r"--train-chips-path .*/empty holds no sample to train"):
        scenario.check({**case, "output_dir": str(tmp_path)})


def test_a_folder_that_holds_a_suite_is_refused(data: Path, tmp_path) -> None:
    config = config_for(data, tmp_path)
    check_suite_output(config)
    check_suite_output(config.model_copy(update={"resume": True}))
    case = suite_cases(named_preset("quick"), config)[0]
    Ledger(tmp_path / SUITE_LEDGER).append(made_up(case, 0, 5.0))
    with pytest.raises(UsageError, match="holds a suite; --resume runs what it lacks, --overwrite"):
        check_suite_output(config)
    check_suite_output(config.model_copy(update={"overwrite": True}))
    with pytest.raises(UsageError, match="give one"):
        check_suite_output(config.model_copy(update={"overwrite": True, "resume": True}))
    resumed = config.model_copy(update={"resume": True})
    check_suite_output(resumed)
    with pytest.raises(UsageError, match="holds another suite, with a run of quick, batch 1, 0 wo"):
        others = suite_cases(named_preset("quick"), resumed.model_copy(update={"seed": 3}))
        check_resumed_suite(resumed, others, "another")
    with pytest.raises(UsageError, match=r"was measured on another machine \(another, not this\)"):
        check_resumed_suite(resumed, suite_cases(named_preset("quick"), resumed), "this")
    check_resumed_suite(resumed, suite_cases(named_preset("quick"), resumed), "another")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="is not a folder"):
        check_suite_output(config_for(data, file / "out"))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_suite_leaves_no_training_and_a_living_one_is_named(data: Path, tmp_path) -> None:
    out = tmp_path / "out"
    quick = json.loads(json.dumps(named_preset("quick").model_dump(mode="json")))
    path = tmp_path / "long.json"
    path.write_text(json.dumps({**quick, "name": "long", "epochs": 1000, "batch_sizes": [1],
                                "num_workers_list": [1]}))  # fmt: skip
    words = ["suite", "benchmark", "--config", str(path), *flags(data, out)]
    folder = out / "benchmark_long_batch1_workers1"
    suite = started(tmp_path, words)
    try:
        until((folder / "steps" / "rank0.csv").exists)
        children = psutil.Process(suite.pid).children
        until(lambda: len(children(recursive=True)) >= 2)  # a training, and its worker
        below = children(recursive=True)
        holder = (folder / "train.lock").read_text().strip()
        assert holder.startswith(f"process {below[0].pid} on ")
        with pytest.raises(UsageError, match=rf"{folder.name}: {holder} trains there now; end it"):
            prepare_suite(config_for(data, out, overwrite=True), {})
    finally:
        suite.kill()
        suite.join()
    until(lambda: not psutil.wait_procs(below, timeout=0)[1])
    prepare_suite(config_for(data, out, overwrite=True), {})


def spiral(out: Path, **knobs: Any) -> dict[str, Any]:
    small = {"num_samples": 203, "batch_size": 8, "epochs": 2, "num_workers": 0, "device": "cpu"}
    config = build(TrainConfig, {"learning_rate": 1e-3, "optimizer": "adam"}, small, knobs)
    about = {"workload": "spiral", "preset": "none", "world_size": 1, "profile_gpu": True}
    return {**config.model_dump(mode="json", exclude_unset=True), **about, "output_dir": str(out)}


@pytest.mark.slow
def test_a_launch_has_one_training_and_counts_its_samples(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())  # as if it were loaded
    operators = importlib.import_module("penstock.models.torchvision_ops")
    monkeypatch.setattr(operators, "compiled_operators", lambda: False)
    made = scenario.TrainScenario(spiral(tmp_path / "out"))
    result = measure_scenario(made, Rules.model_validate(series_rules(1)), lambda stage: None)
    assert result["work"] == {"samples": 2 * 142}
    assert len(result["samples_s"]["step"]) == 1
    training = result["facts"]["training"]
    written = json.loads((tmp_path / "out" / "training_results.json").read_text())
    del written["history"]
    assert training == written
    assert len(training["epoch_times_s"]) == 2
    assert result["samples_s"]["step"][0] > training["training_s"] > 0
    assert (tmp_path / "out" / "telemetry.jsonl").is_file()
    assert result["facts"]["utilisation"]["gpu_percent"] is None
    assert result["facts"]["torchvision_operators"] == "plain torch"
    json.dumps(result, allow_nan=False)


@pytest.mark.long
def test_ranks_are_torchruns_and_one_launch(tmp_path) -> None:
    case = spiral(tmp_path / "out", distributed=True, batch_size=4) | {"world_size": 2}
    record = run_launch(Launch("train", case, 300.0, rules=series_rules(1)))
    assert record.error is None
    training = record.facts["training"]
    assert (training["world_size"], training["global_batch_size"]) == (2, 8)
    assert [rank["rank"] for rank in training["ranks"]] == [0, 1]
    assert training["ranks"][0]["phases"]["communication"]["total_s"] > 0
    assert record.work == {"samples": training["samples"]}
    assert record.facts["utilisation"]["cpu_percent"] > 0
    assert record.memory.host_peak and record.memory.host_shared, "ranks share pages"


def test_a_rank_that_fails_says_why() -> None:
    lines = [f"penstock train: {NOT_A_RANK}", "penstock train: a.zarr cannot be read", "W: rank 1"]
    assert scenario._fault(lines) == "a.zarr cannot be read"


@pytest.mark.slow
def test_no_rank_outlives_its_launch(tmp_path) -> None:
    """Ranks have sessions of their own, out of reach of what kills a launch's process group. An
    epoch is so long that none of them would end by itself, or by writing to a pipe that is gone."""
    long = {"num_samples": 2_000_000, "batch_size": 1}
    case = spiral(tmp_path / "out", distributed=True, **long) | {"world_size": 2}
    path = tmp_path / "request.json"
    path.write_text(json.dumps(asdict(Launch("train", case, 300.0, rules=series_rules(1)))))
    command = [sys.executable, "-m", "penstock.bench.launch.worker", str(path), "1"]
    worker = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )

    try:
        until((tmp_path / "out" / "steps" / "rank1.csv").is_file)
        below = psutil.Process(worker.pid).children(recursive=True)
        assert len(below) >= 3, "torchrun and two ranks"
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    try:
        until(lambda: not psutil.wait_procs(below, timeout=0)[1])
    finally:
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def small(path: Path, **changes: Any) -> Path:
    """A preset of two runs of a few steps."""
    settings = {
        **json.loads(CUSTOM), "name": "small", "batch_sizes": [1, 2], "num_workers_list": [0],
        "epochs": 1, "train": {"backbone": "mobilenet", "device": "cpu"},
    }  # fmt: skip
    path.write_text(json.dumps({**settings, **changes}))
    return path


def check_run(run: Mapping[str, Any], out: Path, kept: bool = False) -> None:
    """What the report of a suite says of a training is what the training left.

    ``kept`` is whether its checkpoints are.
    """
    folder = out / run["folders"][0]
    results = json.loads((folder / "training_results.json").read_text())
    assert run["throughput_samples_per_s"] == pytest.approx(
        results["samples"] / sum(results["epoch_times_s"])
    )
    assert run["samples"] == results["samples"] > 0
    assert run["gpu_memory_peak_bytes"] is None
    assert run["cpu_utilization_percent"] > 0
    assert run["map"] == results["final"]["val_AP"]
    assert json.loads((folder / "args.json").read_text())["output_dir"] == str(folder)
    assert (folder / "best_model.pth").is_file()
    assert (folder / "checkpoints" / "last.pt").is_file() == kept


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_suite_on_workers(data: Path, tmp_path) -> None:
    pytest.importorskip("distributed")
    out = tmp_path / "out"
    config = str(small(tmp_path / "small.json", batch_sizes=[1], save_checkpoints=True))
    words = ["suite", "benchmark", "--config", config, *flags(data, out), "--cluster", "local:2"]
    with forked_workers():
        assert main(words) == 0
    assert not [path for path in out.iterdir() if path.suffix == ".part"], "left by a worker"
    (record,) = Ledger(out / SUITE_LEDGER).records()
    assert set(record.environment["worker"]) == {"host", "address"}
    (run,) = json.loads((out / "benchmark_report.json").read_text())["runs"]
    check_run(run, out, kept=True)
    (rank,) = record.facts["training"]["ranks"]
    assert run["host_memory_peak_bytes"] > rank["memory"]["host_peak"] / 2


@pytest.mark.slow
@pytest.mark.usefixtures("launches_here")
def test_a_suite_end_to_end(data: Path, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    config = str(small(tmp_path / "small.json"))
    words = ["suite", "benchmark", "--config", config, *flags(data, out)]
    assert main(words) == 0
    assert not any("worker" in one.environment for one in Ledger(out / SUITE_LEDGER).records())
    document = json.loads((out / "benchmark_report.json").read_text())
    assert [(run["batch_size"], run["status"]) for run in document["runs"]] == [
        (1, "ok"), (2, "ok"),
    ]  # fmt: skip
    for run in document["runs"]:
        check_run(run, out)
    assert json.loads((out / "system_info.json").read_text())["machine"]["cores"] > 0
    assert "| batch | workers |" in (out / "benchmark_report.md").read_text()
    assert (out / "benchmark_report.png").is_file()

    assert main(words) == 2
    assert "holds a suite; --resume runs what it lacks" in capsys.readouterr().err
    # One launch is lost, as by a kill before it was written: only that one runs again.
    ledger = out / SUITE_LEDGER / "records.jsonl"
    kept, lost = ledger.read_text().splitlines(keepends=True)
    ledger.write_text(kept)
    assert main([*words, "--resume"]) == 0
    assert "skipped, the ledger has it" in capsys.readouterr().err
    first, again = ledger.read_text().splitlines(keepends=True)
    assert first == kept
    assert json.loads(again)["key"] == json.loads(lost)["key"]
    assert json.loads(again)["id"] != json.loads(lost)["id"]


def test_a_preset_of_several_ranks_takes_no_workers(data: Path, tmp_path, capsys) -> None:
    words = ["suite", "dgx-a100", *flags(data, tmp_path / "out"), "--cluster", "local"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "preset dgx-a100 trains on 8 devices at once, and a worker of --cluster has" in error
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("launches_here")
def test_a_foreign_preset_runs_anyway_and_what_fails_is_a_row(data: Path, tmp_path, capsys) -> None:
    import torch

    out = tmp_path / "out"
    config = small(
        tmp_path / "small.json", distributed=True, world_size=64, learning_rate=1e30,
        train={"backbone": "mobilenet", "device": "cuda"},
    )  # fmt: skip
    words = ["suite", "benchmark", "--config", str(config), *flags(data, out)]
    assert main(words) == 2
    gpus = torch.cuda.device_count()
    refused = f"preset small is for 64 GPUs and torch finds {gpus} GPU{'s' * (gpus != 1)} here"
    assert refused in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--anyway"]) == 1
    document = json.loads((out / "benchmark_report.json").read_text())
    assert [note.partition(";")[0] for note in document["notes"]] == [refused]
    assert document["presets"][0]["world_size"] == 64, "what was asked for"
    assert refused in (out / "benchmark_report.md").read_text()
    assert [run["status"] for run in document["runs"]] == ["crash", "crash"], "both were tried"
    assert all("the loss is" in run["error"] for run in document["runs"])
    assert document["best"] is None
    assert not list(out.glob("*.png")), "there is nothing to draw"


@pytest.mark.slow
@pytest.mark.usefixtures("launches_here")
def test_labels_that_the_chips_were_not_cut_with_are_refused_before_anything_runs(
    data: Path, tmp_path, capsys
) -> None:
    labels = tmp_path / "fewer.csv"
    lines = (data / "scenes/labels/train.csv").read_text().splitlines(keepends=True)
    labels.write_text("".join(lines[:-1]))
    words = ["suite", "quick", *flags(data, tmp_path / "out"), "--train-labels", str(labels)]
    assert main(words) == 2
    assert "run penstock preprocess again" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
