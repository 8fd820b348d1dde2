"""Presets of the suite, and the seed's command lines."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.base import PreprocessConfig, Refused, SuiteConfig, UsageError, build, from_flags
from penstock.bench.scenarios import train_scenario as scenario
from penstock.bench.suite.execute import launch_folder, suite_cases
from penstock.bench.suite.preset import PRESETS, SuitePreset, fit_preset, named_preset, read_preset
from penstock.cli import main
from penstock.cli import suite as verb
from penstock.cli.train import config_of

from ..places import ROOT
from .kit_suite import CUSTOM, DATA, H100, parsed


@pytest.mark.parametrize(
    ("name", "batches", "workers", "ranks"),
    [
        ("laptop", (4, 8, 16), (2, 4, 6, 8), 1),
        ("laptop-rtx3080ti", (4, 8, 16), (2, 4, 6, 8), 1),
        ("gb200", (8, 16, 32, 64), (4, 8, 12, 16), 1),
        ("dgx-a100", (16, 32, 64, 128), (8, 16, 24, 32), 8),
    ],
)
def test_presets_are_those_of_the_seed(name, batches, workers, ranks) -> None:
    preset = named_preset(name)
    assert (preset.batch_sizes, preset.num_workers_list) == (batches, workers)
    assert (preset.world_size, preset.distributed) == (ranks, ranks > 1)
    assert preset.channels == "vh,vv,bathymetry"


def test_every_preset_has_cases_that_a_training_takes(tmp_path) -> None:
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


def test_a_file_of_the_seed_is_taken_as_it_is(tmp_path) -> None:
    path = tmp_path / "custom.json"
    path.write_text(CUSTOM)
    custom = read_preset(path)
    assert custom.model_dump(mode="json", exclude={"train"}) == json.loads(CUSTOM)
    assert fit_preset(custom, [], anyway=False)[1] == "", "it names no device"


def test_a_path_of_the_seed_is_its_preset_where_no_file_is(here) -> None:
    path = Path("configs/dgx_a100.json")
    assert read_preset(path) == named_preset("dgx-a100")
    for absent in (Path("configs/mine.json"), Path("elsewhere/dgx_a100.json")):
        with pytest.raises(UsageError, match=f"--config {absent}: No such file"):
            read_preset(absent)
    path.parent.mkdir()
    theirs = named_preset("quick").model_dump(mode="json", exclude_none=True)
    path.write_text(json.dumps({**theirs, "name": "mine"}))
    assert read_preset(path).name == "mine"


def test_what_the_training_may_be_told_besides(tmp_path) -> None:
    path = tmp_path / "custom.json"
    further = {"amp": True, "backbone": "mobilenet", "max_steps": 3}
    path.write_text(json.dumps({**json.loads(CUSTOM), "train": further}))
    case = suite_cases(read_preset(path), build(SuiteConfig, {"output_dir": tmp_path}))[0]
    assert {name: case[name] for name in further} == further


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": [1]}, "there is no setting 'batch_size'"),
        ({"epochs": 0}, r"custom.json: epochs 0: input should be greater than or equal to 1"),
        ({"name": "../x"}, "name '../x': string should match"),
        ({"world_size": 8}, "custom.json: world_size 8 needs distributed true"),
        ({"train": {"epochs": 3}}, "'epochs' is the suite's to set, not for its key 'train'"),
        ({"train": {"backbon": "x"}}, "train: there is no setting 'backbon' .perhaps 'backbone'"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, change: Mapping[str, Any], words: str) -> None:
    path = tmp_path / "custom.json"
    path.write_text(json.dumps({**json.loads(CUSTOM), **change}))
    with pytest.raises(UsageError, match=words) as caught:
        read_preset(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_presets(tmp_path) -> None:
    path = tmp_path / "custom.json"
    with pytest.raises(UsageError, match="No such file"):
        read_preset(path)
    for text, words in (("{", "is not JSON"), ("[1]", "holds no settings")):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_preset(path)
    path.write_text('{"name": "x", "batch_sizes": [1], "num_workers_list": [0]}')
    with pytest.raises(UsageError, match="json: epochs is required"):
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
def test_the_benchmarks_of_the_seed(tmp_path, line: str, name: str, out: str) -> None:
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


def test_preprocess_and_train_of_the_seed(tmp_path) -> None:
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
    "line",
    [
        "benchmark --output-dir o",
        "laptop --output-dir o --config x.json",
        "benchmark --output-dir o --config x.json --use-default-configs",
    ],
)
def test_what_to_run_is_said_once(line: str) -> None:
    with pytest.raises(SystemExit):
        parsed(line)


def test_of_the_defaults_those_run_that_fit() -> None:
    every = [named_preset(name) for name in ("laptop", "gb200", "dgx-a100")]
    fit, notes = verb._fitted(every, [H100], anyway=False)
    assert [one.name for one in fit] == ["laptop-rtx3080ti", "gb200"]
    assert notes == ["left out: preset dgx-a100 is for 8 GPUs and torch finds 1 GPU here"]
    with pytest.raises(Refused, match="preset laptop-rtx3080ti is for 1 GPU and torch finds 0"):
        verb._fitted(every, [], anyway=False)


def test_the_script_at_the_root_finds_the_penstock_of_the_clone(tmp_path, capsys) -> None:
    """With no setting of the user's: where there is a `.venv`, its Python is taken. Here that one
    only says what it is asked to do."""
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
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\ntest "$1" = -c || printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    dash_m, penstock, *line = run().stdout.splitlines()
    assert (dash_m, penstock) == ("-m", "penstock")
    assert main(line) == 2
    assert capsys.readouterr().err.startswith("penstock suite: --train-chips is required; ")
    done = run(PYTHON="/no/such/python")  # what is said wins
    assert "/no/such/python has no penstock" in done.stderr
    bare.write_text("#!/bin/sh\necho activated\n")  # what the user has activated wins
    assert "activated\n" in run().stdout
