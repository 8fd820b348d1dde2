"""The suite: presets, the seed's command lines, refusals, real trainings end to end, the report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("lightning_fabric")

from penstock.base.config.data import PreprocessConfig
from penstock.base.config.knobs import build, from_flags
from penstock.base.config.train import SuiteConfig, TrainConfig
from penstock.base.errors import Refused, UsageError
from penstock.bench.launch.supervisor import LaunchRequest, run_launch
from penstock.bench.measure import Rules, measure_scenario
from penstock.bench.scenarios import train as scenario
from penstock.bench.suite.preset import PRESETS, SuitePreset, fit_preset, named_preset, read_preset
from penstock.bench.suite.run import (
    RULES,
    SUITE_LEDGER,
    check_resumed_suite,
    check_suite_output,
    launch_folder,
    prepare_suite,
    suite_cases,
    with_roots,
)
from penstock.cli import _dashed, main
from penstock.cli import suite as verb
from penstock.cli.train import config_of
from penstock.cluster.place import NOT_A_RANK
from penstock.data.scenes.scene import SPLITS
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Failure, Record, case_key
from penstock.reports import page
from penstock.reports.figures.suite import plot_suite
from penstock.reports.suite import cell as suite_cell
from penstock.reports.suite import report as suite_report

from ..places import ROOT

CUSTOM = """{
  "name": "custom_benchmark",
  "batch_sizes": [8, 16, 32],
  "num_workers_list": [4, 8, 12],
  "epochs": 5,
  "channels": "vh,vv,bathymetry",
  "learning_rate": 0.005,
  "distributed": false,
  "world_size": 1,
  "save_checkpoints": false,
  "profile_memory": true,
  "profile_gpu": true
}"""
"""The seed's own, to the letter."""
H100 = "NVIDIA H100 80GB HBM3"


# --- presets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "batches", "workers", "ranks"),
    [
        ("laptop", (4, 8, 16), (2, 4, 6, 8), 1),
        ("laptop-rtx3080ti", (4, 8, 16), (2, 4, 6, 8), 1),
        ("gb200", (8, 16, 32, 64), (4, 8, 12, 16), 1),
        ("dgx-a100", (16, 32, 64, 128), (8, 16, 24, 32), 8),
    ],
)
def test_presets_are_those_of_the_seed(
    name: str, batches: tuple[int, ...], workers: tuple[int, ...], ranks: int
) -> None:
    found = named_preset(name)
    assert (found.batch_sizes, found.num_workers_list) == (batches, workers)
    assert (found.world_size, found.distributed) == (ranks, ranks > 1)
    assert found.channels == "vh,vv,bathymetry"


def test_quick_is_small_and_for_any_machine() -> None:
    quick = named_preset("quick")
    assert max(quick.batch_sizes) <= 4
    assert quick.epochs == 1
    assert fit_preset(quick, [], anyway=False) == (quick, "")


def test_every_preset_has_cases_that_a_training_takes(tmp_path: Path) -> None:
    config = build(SuiteConfig, {"output_dir": tmp_path, "train_chips_path": tmp_path})
    for name in PRESETS:
        one = named_preset(name)
        cases = suite_cases(one, config)
        assert len(cases) == len(one.batch_sizes) * len(one.num_workers_list)
        assert len({launch_folder(case, 0) for case in cases}) == len(cases)
        for case in cases:
            knobs = scenario.config_of({**case, "output_dir": "out"})
            assert (knobs.epochs, knobs.distributed) == (one.epochs, one.distributed)
            assert (case["workload"], case["world_size"]) == ("detector", one.world_size)


def test_a_file_of_the_seed_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "custom.json"
    path.write_text(CUSTOM)
    custom = read_preset(path)
    assert custom.model_dump(mode="json", exclude={"train"}) == json.loads(CUSTOM)
    assert fit_preset(custom, [], anyway=False)[1] == "", "it names no device"


def test_what_the_training_may_be_told_besides(tmp_path: Path) -> None:
    path = tmp_path / "custom.json"
    further = {"amp": True, "backbone": "mobilenet", "max_steps": 3}
    path.write_text(json.dumps({**json.loads(CUSTOM), "train": further}))
    case = suite_cases(read_preset(path), build(SuiteConfig, {"output_dir": tmp_path}))[0]
    assert {name: case[name] for name in further} == further


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": [1]}, r"there is no key 'batch_size'; did you mean 'batch_sizes'\?"),
        ({"zzz": 1}, "there is no key 'zzz'; there are batch_sizes, channels"),
        ({"epochs": 0}, r"custom.json: epochs 0: input should be greater than or equal to 1"),
        ({"batch_sizes": []}, r"batch_sizes \[\]: tuple should have at least 1 item"),
        ({"name": "../x"}, "name '../x': string should match"),
        ({"world_size": 8}, "custom.json: world_size 8 needs distributed true"),
        ({"train": {"epochs": 3}}, "'epochs' is the suite's to set, not for its key 'train'"),
        ({"train": {"backbon": "x"}}, r"train: there is no key 'backbon'; did you mean 'backbone'"),
        ({"epochs": None}, "epochs None"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    tmp_path: Path, change: Mapping[str, Any], words: str
) -> None:
    path = tmp_path / "custom.json"
    path.write_text(json.dumps({**json.loads(CUSTOM), **change}))
    with pytest.raises(UsageError, match=words) as caught:
        read_preset(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_presets(tmp_path: Path) -> None:
    path = tmp_path / "custom.json"
    with pytest.raises(UsageError, match="No such file"):
        read_preset(path)
    for text, words in (("{", "is not JSON"), ("[1]", "holds no settings")):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_preset(path)
    path.write_text('{"name": "x", "batch_sizes": [1], "num_workers_list": [0]}')
    with pytest.raises(UsageError, match="lacks the key 'epochs'"):
        read_preset(path)


def test_a_preset_for_more_gpus_than_there_are_is_refused_with_both_numbers() -> None:
    dgx = named_preset("dgx-a100")
    with pytest.raises(Refused, match="preset dgx-a100 is for 8 GPUs and torch finds 1 GPU here"):
        fit_preset(dgx, [H100], anyway=False)
    with pytest.raises(Refused, match="is for 1 GPU and torch finds 0 GPUs here"):
        fit_preset(named_preset("laptop"), [], anyway=False)
    assert fit_preset(dgx, [H100] * 8, anyway=False) == (dgx, "")


@pytest.mark.parametrize(("gpus", "how"), [(0, "without a GPU"), (1, "on 1 GPU"), (3, "on 3 GPUs")])
def test_anyway_falls_to_what_there_is_and_says_so(gpus: int, how: str) -> None:
    made, note = fit_preset(named_preset("dgx-a100"), [H100] * gpus, anyway=True)
    assert (made.world_size, made.distributed) == (max(1, gpus), gpus > 1)
    assert made.device == "auto"
    assert note.startswith("preset dgx-a100 is for 8 GPUs and torch finds ")
    assert note.endswith(f"--anyway runs it {how}")
    assert made.batch_sizes == named_preset("dgx-a100").batch_sizes


def test_ranks_on_the_cpu_need_no_gpu() -> None:
    made = SuitePreset(
        name="ranks", batch_sizes=(1,), num_workers_list=(0,), epochs=1, distributed=True,
        world_size=2, train={"device": "cpu"},
    )  # fmt: skip
    assert fit_preset(made, [], anyway=False) == (made, "")
    with pytest.raises(Refused, match="for 2 GPUs and torch finds 0"):
        fit_preset(made.model_copy(update={"train": None}), [], anyway=False)


# --- the seed's command lines -------------------------------------------------------------------

DATA = """--data-root /path/to/xview3/data --train-labels /path/to/train.csv
    --val-labels /path/to/validation.csv --train-chips ./preprocessed_data/train
    --val-chips ./preprocessed_data/val"""


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return parser.parse_args([_dashed(word) for word in line.replace("\\\n", " ").split()])


@pytest.mark.parametrize(
    ("line", "name", "out"),
    [
        (f"laptop {DATA} --output-dir ./benchmarks/laptop", "laptop-rtx3080ti", "laptop"),
        (f"laptop-rtx3080ti {DATA} --output-dir benchmarks/laptop", "laptop-rtx3080ti", "laptop"),
        (f"dgx-a100 {DATA} --output-dir ./benchmarks/dgx", "dgx-a100", "dgx"),
        (f"gb200 {DATA} --output-dir ./benchmarks/gb200", "gb200", "gb200"),
        (
            f"benchmark --config CUSTOM {DATA} --output-dir ./benchmarks/custom",
            "custom_benchmark",
            "custom",
        ),
    ],
)
def test_the_benchmarks_of_the_seed(tmp_path: Path, line: str, name: str, out: str) -> None:
    custom = tmp_path / "custom.json"
    custom.write_text(CUSTOM)
    args = parsed(line.replace("CUSTOM", str(custom)))
    assert [one.name for one in verb._presets(args)] == [name]
    config = from_flags(SuiteConfig, args)
    assert config.data_root == Path("/path/to/xview3/data")
    assert config.train_label_file == Path("/path/to/train.csv")
    assert config.val_label_file == Path("/path/to/validation.csv")
    assert config.train_chips_path == Path("preprocessed_data/train")
    assert config.val_chips_path == Path("preprocessed_data/val")
    assert config.output_dir == Path("benchmarks") / out


def test_the_script_of_the_seed() -> None:
    args = parsed(
        """benchmark --output_dir out --train_data_root T --val_data_root V --train_label_file t.csv
        --val_label_file v.csv --train_chips_path c/t --val_chips_path c/v --use_default_configs"""
    )
    config = from_flags(SuiteConfig, args)
    assert (config.train_data_root, config.val_data_root) == (Path("T"), Path("V"))
    assert (config.train_label_file, config.train_chips_path) == (Path("t.csv"), Path("c/t"))
    assert [p.name for p in verb._presets(args)] == ["laptop-rtx3080ti", "gb200", "dgx-a100"]


def test_preprocess_and_train_of_the_seed(tmp_path: Path) -> None:
    args = parsed(
        """preprocess --data-root /path/to/xview3/data --train-labels /path/to/train.csv
        --val-labels /path/to/validation.csv --output-dir ./preprocessed_data"""
    )
    cut = from_flags(PreprocessConfig, args)
    assert cut.data_root == Path("/path/to/xview3/data")
    assert cut.train_label_file == Path("/path/to/train.csv")
    for folder in ("train", "validation"):
        (tmp_path / folder).mkdir()
    line = f"train {DATA} --output-dir ./training_run"
    args = verb._with_roots(parsed(line.replace("/path/to/xview3/data", str(tmp_path))))
    config = config_of(args)
    assert args.workload == "detector"
    assert config.train_data_root == tmp_path / "train"
    assert config.val_data_root == tmp_path / "validation"
    assert config.val_chips_path == Path("preprocessed_data/val")
    assert config.output_dir == Path("training_run")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("benchmark --output-dir o", "needs --config FILE.json or --use-default-configs"),
        ("laptop --output-dir o --config x.json", "suite laptop is a preset itself"),
        ("quick --output-dir o --use-default-configs", "suite quick is a preset itself"),
        ("benchmark --output-dir o --config x.json --use-default-configs", "give one"),
    ],
)
def test_what_to_run_is_said_once(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        verb._presets(parsed(line))


def test_of_the_defaults_those_run_that_fit() -> None:
    every = [named_preset(name) for name in ("laptop", "gb200", "dgx-a100")]
    fit, notes = verb._fitted(every, [H100], anyway=False)
    assert [one.name for one in fit] == ["laptop-rtx3080ti", "gb200"]
    assert notes == ["left out: preset dgx-a100 is for 8 GPUs and torch finds 1 GPU here"]
    with pytest.raises(Refused, match="preset laptop-rtx3080ti is for 1 GPU and torch finds 0"):
        verb._fitted(every, [], anyway=False)


def test_the_script_at_the_root_finds_the_penstock_of_the_clone(tmp_path: Path) -> None:
    """With no setting of the user's: where there is a `.venv`, its Python is taken."""
    shutil.copy(ROOT / "run_benchmark.sh", tmp_path)
    words = [tmp_path / "run_benchmark.sh", "laptop", "--output-dir", tmp_path / "out"]
    empty = tmp_path / "elsewhere"
    empty.mkdir()
    bare = empty / "python3"  # of the system, which has no penstock
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    settings = {"PATH": f"{empty}{os.pathsep}{os.environ['PATH']}"}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        environ = {k: v for k, v in os.environ.items() if k != "PYTHON"} | settings | more
        return subprocess.run(words, env=environ, capture_output=True, text=True, cwd=empty)

    done = run()
    assert done.returncode == 2
    assert done.stderr.startswith("run_benchmark.sh: python3 has no penstock; make test builds ")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    own = tmp_path / ".venv" / "bin" / "python"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    done = run()
    assert done.returncode == 2
    assert done.stderr.startswith("penstock suite: --train-chips is required; ")
    done = run(PYTHON="/no/such/python")  # what is said wins
    assert "/no/such/python has no penstock" in done.stderr
    bare.write_text(own.read_text())  # an environment that the user has activated wins
    own.write_text("#!/bin/sh\nexit 7\n")
    assert run().stderr.startswith("penstock suite: --train-chips is required; ")


# --- what is not there --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two scenes of the real layout, and their chips."""
    folder = tmp_path_factory.mktemp("xview3")
    scenes = ["generate", "xview3", str(folder / "scenes"), "--scenes", "2", "--size", "256", "256"]
    assert main([*scenes, "--objects", "8"]) == 0
    cut = f"suite preprocess --data-root {folder}/scenes --output-dir {folder}/chips"
    labels = f"--train-labels {folder}/scenes/labels/train.csv"
    labels += f" --val-labels {folder}/scenes/labels/validation.csv"
    assert main([*cut.split(), *labels.split(), "--chip-size", "128", "--overlap", "32"]) == 0
    return folder


def flags(data: Path, out: Path) -> list[str]:
    return [
        "--data-root", str(data / "scenes"),
        "--train-labels", str(data / "scenes/labels/train.csv"),
        "--val-labels", str(data / "scenes/labels/validation.csv"),
        "--train-chips", str(data / "chips/train"),
        "--val-chips", str(data / "chips/val"),
        "--output-dir", str(out),
    ]  # fmt: skip


def config_for(data: Path, out: Path, **changes: Any) -> SuiteConfig:
    words = " ".join(["quick", *flags(data, out)])
    return from_flags(SuiteConfig, parsed(words)).model_copy(update=changes)


def test_all_is_there(data: Path, tmp_path: Path) -> None:
    config = with_roots(config_for(data, tmp_path), [named_preset("quick")])
    assert config.train_data_root == data / "scenes" / "train"
    assert config.val_data_root == data / "scenes" / "validation"


@pytest.mark.parametrize("train", SPLITS["train"])
@pytest.mark.parametrize("val", SPLITS["validation"])
def test_splits_are_called_as_in_preprocess(
    data: Path, tmp_path: Path, train: str, val: str
) -> None:
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
        ({"train_chips_path": None}, "--train-chips is required; to make "),
        ({"val_chips_path": Path("none")}, "--val-chips none has no chips: there is no index.json"),
        ({"val_label_file": Path("none.csv")}, "--val-labels none.csv: there is no such file"),
        ({"data_root": Path("none")}, "--data-root none has no folder train or training"),
        ({"train_data_root": Path("no")}, "--train-data-root no: there is no such folder"),
        ({"val_chips_path": Path(__file__).parent}, "has no chips: there is no index.json"),
    ],
)
def test_what_is_not_there_is_named(
    data: Path, tmp_path: Path, change: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        with_roots(config_for(data, tmp_path, **change), [named_preset("quick")])


def test_chips_that_are_not_there_come_with_the_command_that_makes_them(
    data: Path, tmp_path: Path
) -> None:
    scenes, chips = data / "scenes", tmp_path / "mine"
    config = config_for(data, tmp_path, train_chips_path=chips / "train")
    with pytest.raises(UsageError) as caught:
        with_roots(config, [named_preset("quick")])
    assert str(caught.value).endswith(
        f"to make {chips}/train and {chips}/val: penstock suite preprocess --data-root {scenes} "
        f"--train-labels {scenes}/labels/train.csv --val-labels {scenes}/labels/validation.csv "
        f"--output-dir {chips}"
    )


def test_chips_of_other_channels_are_refused(data: Path, tmp_path: Path) -> None:
    dual = named_preset("quick").model_copy(update={"channels": "vv,vh"})
    with pytest.raises(UsageError, match=r"is for channels vv,vh and --train-chips .* has vh,vv,b"):
        with_roots(config_for(data, tmp_path), [dual])


def test_no_chip_with_a_valid_pixel_is_refused(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "chips" / "train", tmp_path / "empty")
    manifest = next((tmp_path / "empty").glob("*/manifest.json"))
    told = json.loads(manifest.read_text())
    told["valid_pixels"] = [[0 for _ in row] for row in told["valid_pixels"]]
    manifest.write_text(json.dumps(told))
    config = config_for(data, tmp_path, train_chips_path=tmp_path / "empty")
    case = suite_cases(named_preset("quick"), config)[0]
    with pytest.raises(UsageError, match=r"--train-chips-path .*/empty holds no sample to train"):
        scenario.check({**case, "output_dir": str(tmp_path)})


def test_a_folder_that_holds_a_suite_is_refused(data: Path, tmp_path: Path) -> None:
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


# --- the report ---------------------------------------------------------------------------------


def made_up(
    case: Mapping[str, Any],
    launch: int,
    rate: float,
    *,
    data_wait: float = 1.0,
    peak: int | None = None,
    status: str = "ok",
) -> Record:
    """A launch of a training of 10 s in two epochs."""
    phases: dict[str, Any] = dict.fromkeys(
        ("step", "data_wait", "transfer", "forward", "backward", "communication", "optimizer")
    )
    phases["data_wait"] = {"total_s": data_wait, "median_s": 0.1}
    phases["forward"] = {"total_s": 4.0, "median_s": 0.1}
    training = {
        "samples_per_s": rate, "training_s": 10.0, "validation_s": 2.0, "samples": 10 * rate,
        "epoch_times_s": [6.0, 4.0], "final": {"val_AP": 0.25, "val_loc_fscore": 0.5},
        "parameters": 1000, "world_size": 1, "device": "cpu",
        "ranks": [{"phases": phases, "memory": {"host_peak": 1, "device_peak": peak,
                                                "device_reserved": peak}}],
    }  # fmt: skip
    ok = status == "ok"
    return Record.model_validate(
        {
            "id": f"{launch}", "time": "2026-01-01T00:00:00+00:00", "scenario": "train",
            "case": dict(case), "key": case_key("train", case), "launch": launch, "status": status,
            "work": {"samples": 10 * rate} if ok else {},
            "samples_s": {"step": (13.0,)} if ok else {},
            "memory": {"host_peak": 3 * 2**30},
            "facts": {
                "training": training, "train_samples": 20,
                "utilisation": {"cpu_percent": 150.0, "gpu_percent": None},
            } if ok else {},
            "environment": {"machine_key": "another"},
            "error": None if ok else Failure(stage="measure", message="no room"),
        }
    )  # fmt: skip


def cases(tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    one = named_preset("quick").model_copy(update=changes)
    return suite_cases(one, build(SuiteConfig, {"output_dir": tmp_path}))


def test_a_row_holds_what_was_measured_and_null_where_nothing_was(tmp_path: Path) -> None:
    case = cases(tmp_path)[1]
    row = suite_cell.suite_cells([made_up(case, 0, 5.0, data_wait=7.0)])[0].values()
    assert (row["batch_size"], row["num_workers"], row["status"]) == (1, 2, "ok")
    assert row["throughput_samples_per_s"] == 5.0
    assert (row["throughput_low"], row["launches"]) == (None, 1), "one launch has no interval"
    assert (row["training_time_s"], row["epoch_times_s"]) == (13.0, [[6.0, 4.0]])
    assert (row["map"], row["loc_fscore"], row["map50"]) == (0.25, 0.5, None)
    assert (row["gpu_memory_peak_bytes"], row["gpu_utilization_percent"]) == (None, None)
    assert (row["host_memory_peak_bytes"], row["cpu_utilization_percent"]) == (3 * 2**30, 150.0)
    assert row["shares"] == {"data": 0.7, "transfer": None, "compute": 0.4, "communication": None}
    assert row["limited_by"] == "data"
    assert row["folders"] == ["benchmark_quick_batch1_workers2"]


def test_what_is_not_to_be_profiled_is_null(tmp_path: Path) -> None:
    case = cases(tmp_path, profile_memory=False, profile_gpu=False)[0]
    row = suite_cell.suite_cells([made_up(case, 0, 5.0, peak=2**30)])[0].values()
    assert row["gpu_memory_peak_bytes"] is None
    assert row["host_memory_peak_bytes"] is None
    assert row["gpu_utilization_percent"] is None
    case = cases(tmp_path)[0]
    assert (
        suite_cell.suite_cells([made_up(case, 0, 5.0, peak=9)])[0].values()["gpu_memory_peak_bytes"]
        == 9
    )


def told(records: list[Record]) -> list[str]:
    (section,) = suite_report.suite_sections(records, [])
    return list(section.told)


def test_sentences_follow_the_records(tmp_path: Path) -> None:
    slow, fast, *_ = cases(tmp_path)
    once = [made_up(slow, 0, 5.0), made_up(fast, 0, 7.0, data_wait=9.0)]
    best, limits, *_ = told(once)
    assert best == (
        "Most samples a second: batch 1, 2 workers, 7.00 [1 launch]; next is batch 1, 0 workers, "
        "5.00 [1 launch], not compared."
    )
    assert limits == (
        "Compute limits 1 of 2 runs, data limits 1 of 2 runs; batch 1, 2 workers waits longest for "
        "data, 90% of its epochs [1 launch]."
    )
    often = [made_up(slow, n, 5.0 + n / 100) for n in range(5)]
    often += [made_up(fast, n, 10.0 + n / 100) for n in range(5)]
    assert told(often)[0].startswith(
        "Most samples a second: batch 1, 2 workers, 10.0 [10.0 - 10.0, 5 launches], 2.00x as many "
        "as batch 1, 0 workers [1.9"
    )
    alike = [made_up(case, n, 5.0 + n) for case in (slow, fast) for n in range(5)]
    assert "not distinguishable from" in told(alike)[0]
    busy = [r.model_copy(update={"environment": {"load": {"busy_processes": 1}}}) for r in once[:1]]
    assert told([*busy, *once[1:]])[-1] == (
        "Other processes kept cores busy as 1 of 2 launches began: these are times of a shared "
        "machine."
    )


def test_failures_are_rows(tmp_path: Path) -> None:
    first, second, *_ = cases(tmp_path)
    records = [made_up(first, 0, 5.0), made_up(second, 0, 0.0, status="oom_device")]
    (section,) = suite_report.suite_sections(records, [])
    head, good, bad = section.table
    assert "GPU peak" not in head, "nobody has a value for it"
    assert (good[-1], bad[-1]) == ("ok", "oom_device")
    assert "Batch 1, 2 workers ran out of device memory in 1 of 1 launch: no room." in section.told
    (section,) = suite_report.suite_sections(records[1:], [])
    assert section.told == [section.told[0]], "nothing else can be said"


def test_the_files_of_a_report(tmp_path: Path) -> None:
    records = [made_up(case, 0, 5.0 + i) for i, case in enumerate(cases(tmp_path))]
    figures = plot_suite(records, tmp_path / "benchmark_report")
    assert [path.name for path in figures] == ["benchmark_report.png"]
    system = {
        "machine": {"processor": "P", "cores": 2, "memory_bytes": 2**30},
        "libraries": {"torch": "2.0"}, "devices": [],
    }  # fmt: skip
    note = "preset quick is for 8 GPUs and torch finds 0 GPUs here; --anyway runs it without a GPU"
    written = suite_report.write_suite_report(tmp_path, records, [], system, [note], figures)
    document = json.loads(written[0].read_text())
    assert [run["throughput_samples_per_s"] for run in document["runs"]] == [5.0, 6.0, 7.0, 8.0]
    assert document["best"]["throughput_samples_per_s"] == 8.0
    page = written[1].read_text()
    assert "- P, 2 cores, 1.00 GiB, no GPU, torch 2.0" in page
    assert f"- {note}." in page
    assert "![benchmark_report](benchmark_report.png)" in page
    assert document["notes"] == [note]


def test_a_ledger_of_trainings_is_a_page(tmp_path: Path) -> None:
    records = [made_up(case, 0, 5.0 + i) for i, case in enumerate(cases(tmp_path))]
    report, *figures = page.write_page(records, tmp_path / "page", "suite.ledger", False)
    assert [path.name for path in figures] == ["train.png"]
    assert all(path.is_file() for path in figures)
    assert "## Training" in report.read_text()
    assert "Most samples a second: batch 2" in report.read_text()


@pytest.mark.slow
def test_a_killed_suite_leaves_no_training_and_a_living_one_is_named(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quick = json.loads(json.dumps(named_preset("quick").model_dump(mode="json")))
    path = tmp_path / "long.json"
    path.write_text(json.dumps({**quick, "name": "long", "epochs": 1000, "batch_sizes": [1],
                                "num_workers_list": [1]}))  # fmt: skip
    words = ["suite", "benchmark", "--config", str(path), *flags(data, out)]
    command = [sys.executable, "-m", "penstock", *words]
    folder = out / "benchmark_long_batch1_workers1"

    def until(true: Callable[[], bool]) -> None:
        for _ in range(1000):
            if true():
                return
            time.sleep(0.1)
        raise AssertionError("it never was")

    suite = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
        suite.wait()
    until(lambda: not psutil.wait_procs(below, timeout=0)[1])
    prepare_suite(config_for(data, out, overwrite=True), {})


# --- the scenario -------------------------------------------------------------------------------


def spiral(out: Path, **knobs: Any) -> dict[str, Any]:
    small = {"num_samples": 203, "batch_size": 8, "epochs": 2, "num_workers": 0, "device": "cpu"}
    config = build(TrainConfig, {"learning_rate": 1e-3, "optimizer": "adam"}, small, knobs)
    about = {"workload": "spiral", "preset": "none", "world_size": 1, "profile_gpu": True}
    return {**config.model_dump(mode="json", exclude_unset=True), **about, "output_dir": str(out)}


def test_a_launch_has_one_training_and_counts_its_samples(tmp_path: Path) -> None:
    made = scenario.TrainScenario(spiral(tmp_path / "out"))
    result = measure_scenario(made, Rules.model_validate(RULES), lambda stage: None)
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
    json.dumps(result, allow_nan=False)


@pytest.mark.slow
def test_ranks_are_torchruns_and_one_launch(tmp_path: Path) -> None:
    case = spiral(tmp_path / "out", distributed=True, batch_size=4) | {"world_size": 2}
    request = LaunchRequest(scenario="train", case=case, rules=RULES)
    record = run_launch(request, launch=0, order=None, timeout_s=120)
    assert record.error is None
    training = record.facts["training"]
    assert (training["world_size"], training["global_batch_size"]) == (2, 8)
    assert [rank["rank"] for rank in training["ranks"]] == [0, 1]
    assert training["ranks"][0]["phases"]["communication"]["total_s"] > 0
    assert record.work == {"samples": training["samples"]}
    assert record.facts["utilisation"]["cpu_percent"] > 0
    assert record.memory.host_peak and record.memory.host_shared, "ranks share pages"


@pytest.mark.slow
def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    case = spiral(tmp_path, distributed=True, learning_rate=1e30) | {"world_size": 2}
    request = LaunchRequest(scenario="train", case=case, rules=RULES)
    record = run_launch(request, launch=0, order=None, timeout_s=120)
    assert record.status == "crash"
    assert record.error is not None
    assert "torchrun ended with exit code 1: the loss is " in record.error.message
    told = [f"penstock train: {NOT_A_RANK}", "penstock train: a.zarr cannot be read", "W: rank 1"]
    assert scenario._fault(told) == "a.zarr cannot be read"


@pytest.mark.slow
def test_no_rank_outlives_its_launch(tmp_path: Path) -> None:
    """Ranks have sessions of their own, out of reach of what kills a launch's process group. An
    epoch is so long that none of them would end by itself, or by writing to a pipe that is gone."""
    long = {"num_samples": 2_000_000, "batch_size": 1}
    case = spiral(tmp_path / "out", distributed=True, **long) | {"world_size": 2}
    path = tmp_path / "request.json"
    path.write_text(json.dumps(asdict(LaunchRequest(scenario="train", case=case, rules=RULES))))
    command = [sys.executable, "-m", "penstock.bench.launch.worker", str(path), "1"]
    worker = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )

    def wait_for(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.2)
        return condition()

    try:
        assert wait_for((tmp_path / "out" / "steps" / "rank1.csv").is_file), "it never trained"
        below = psutil.Process(worker.pid).children(recursive=True)
        assert len(below) >= 3, "torchrun and two ranks"
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    try:
        assert wait_for(lambda: not psutil.wait_procs(below, timeout=0)[1]), "a rank is left"
    finally:
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# --- end to end ---------------------------------------------------------------------------------


def small(path: Path, **changes: Any) -> Path:
    """A preset of two runs of a few steps."""
    settings = {
        **json.loads(CUSTOM), "name": "small", "batch_sizes": [1, 2], "num_workers_list": [0],
        "epochs": 1, "train": {"backbone": "mobilenet", "device": "cpu"},
    }  # fmt: skip
    path.write_text(json.dumps({**settings, **changes}))
    return path


@pytest.mark.slow
def test_a_suite_end_to_end(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = [
        "suite",
        "benchmark",
        "--config",
        str(small(tmp_path / "small.json")),
        *flags(data, out),
    ]
    assert main(words) == 0
    document = json.loads((out / "benchmark_report.json").read_text())
    assert [(run["batch_size"], run["status"]) for run in document["runs"]] == [
        (1, "ok"),
        (2, "ok"),
    ]
    for run in document["runs"]:
        folder = out / run["folders"][0]
        results = json.loads((folder / "training_results.json").read_text())
        assert run["throughput_samples_per_s"] == pytest.approx(
            results["samples"] / sum(results["epoch_times_s"])
        )
        assert run["samples"] == results["samples"] > 0
        assert run["host_memory_peak_bytes"] > results["ranks"][0]["memory"]["host_peak"] / 2
        assert run["gpu_memory_peak_bytes"] is None
        assert run["cpu_utilization_percent"] > 0
        assert run["map"] == results["final"]["val_AP"]
        assert (folder / "args.json").is_file()
        assert (folder / "best_model.pth").is_file()
        assert not (folder / "checkpoints").exists(), "save_checkpoints is false"
    system = json.loads((out / "system_info.json").read_text())
    assert system["machine"]["cores"] > 0
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


@pytest.mark.slow
def test_a_run_that_fails_is_a_row_and_the_others_go_on(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = small(tmp_path / "small.json", learning_rate=1e30, save_checkpoints=True)
    assert main(["suite", "benchmark", "--config", str(config), *flags(data, out)]) == 1
    document = json.loads((out / "benchmark_report.json").read_text())
    assert {run["status"] for run in document["runs"]} == {"crash"}
    assert all("the loss is" in run["error"] for run in document["runs"])
    assert document["best"] is None
    assert not list(out.glob("*.png")), "there is nothing to draw"
    assert len(Ledger(out / SUITE_LEDGER).records()) == 2


@pytest.mark.slow
def test_a_preset_for_another_machine_runs_anyway_and_the_report_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    further = {"backbone": "mobilenet", "device": "cuda"}
    many = {"distributed": True, "world_size": 64, "batch_sizes": [1]}
    config = small(tmp_path / "small.json", **many, train=further)
    words = ["suite", "benchmark", "--config", str(config), *flags(data, out)]
    assert main(words) == 2
    found = torch.cuda.device_count()
    refused = f"preset small is for 64 GPUs and torch finds {found} GPU{'s' * (found != 1)} here"
    assert refused in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--anyway"]) == 0
    document = json.loads((out / "benchmark_report.json").read_text())
    assert [note.partition(";")[0] for note in document["notes"]] == [refused]
    assert document["presets"][0]["world_size"] == 64, "what was asked for"
    assert [run["world_size"] for run in document["runs"]] == [max(1, found)]
    assert refused in (out / "benchmark_report.md").read_text()


@pytest.mark.slow
def test_ranks_of_a_suite(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = small(
        tmp_path / "small.json", batch_sizes=[1], distributed=True, world_size=2,
        save_checkpoints=True,
    )  # fmt: skip
    assert main(["suite", "benchmark", "--config", str(config), *flags(data, out)]) == 0
    (run,) = json.loads((out / "benchmark_report.json").read_text())["runs"]
    assert (run["world_size"], run["status"]) == (2, "ok")
    assert run["shares"]["communication"] > 0
    assert (out / run["folders"][0] / "checkpoints" / "last.pt").is_file()


@pytest.mark.slow
def test_labels_that_the_chips_were_not_cut_with_are_refused_before_anything_runs(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "fewer.csv"
    lines = (data / "scenes/labels/train.csv").read_text().splitlines(keepends=True)
    labels.write_text("".join(lines[:-1]))
    words = ["suite", "quick", *flags(data, tmp_path / "out"), "--train-labels", str(labels)]
    assert main(words) == 2
    assert "run penstock preprocess again" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["suite", "dgx-a100", *flags(data, tmp_path / "out")]) == 2
    assert "preset dgx-a100 is for 8 GPUs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
