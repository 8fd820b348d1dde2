"""``penstock bench model``: its cases, and the command with a worker that makes its answers up."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.base import BenchModelConfig, build
from penstock.bench import Launch, case_namer, model_cases
from penstock.bench.launch import supervisor
from penstock.bench.launch.supervisor import Ending
from penstock.cli import main
from penstock.instruments import Ledger, Record

from ..preloaded import forked_commands
from ..rows import rows_of
from . import answers
from .kit_model import CASE


def bench(*words: str) -> int:
    return main(["bench", "model", "--effort", "quick", "--output", "out/bench.csv", *words])


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """A folder to work in, whose launches `answers` answers here. It holds a file of a user."""

    def run(command: Sequence[str], launch: Launch, *_: object) -> Ending:
        said: list[bytes] = []
        asked = json.loads(json.dumps(asdict(launch)))
        code = answers.answer(asked, lambda message: said.append(answers.line(message)))
        return Ending(code, said=b"".join(said), peak=1, peak_kernel=1)

    monkeypatch.setattr(supervisor, "_run", run)
    (tmp_path / "worker.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**settings: Any) -> BenchModelConfig:
    return build(BenchModelConfig, settings)


def test_the_defaults_are_the_seeds() -> None:
    cases = model_cases(config())
    assert [(case["tile"], case["batch"]) for case in cases] == [
        ("256", 1), ("256", 2), ("256", 4), ("384", 1), ("384", 2), ("384", 4)
    ]  # fmt: skip
    assert cases[0].keys() == {*CASE, "model"}


def test_axes_are_multiplied_and_named_where_they_differ() -> None:
    cases = model_cases(config(amp=("off", "on"), tile_sizes=("8", "8", "16"), batch_sizes=(1,)))
    name = case_namer(cases, "tile", "batch")
    assert [name(case) for case in cases] == [
        "tile 8, batch 1, no amp",
        "tile 8, batch 1, amp",
        "tile 16, batch 1, no amp",
        "tile 16, batch 1, amp",
    ]


def test_a_sweep_writes_its_rows_and_says_what_they_say(fake: Path, capsys) -> None:
    assert bench("--tile_sizes", "16", "32", "--batch-sizes", "1", "64") == 0
    written = rows_of(fake / "out/bench.csv")
    assert {(row["tile_size"], row["batch_size"], row["status"]) for row in written} == {
        ("16", "1", "ok"), ("16", "64", "oom_host"), ("32", "1", "ok"), ("32", "64", "oom_host")
    }  # fmt: skip
    assert {row["device"] for row in written} == {"cpu"}, "auto was resolved"
    assert len(Ledger(fake / "out/bench.ledger").records()) == 4
    assert (fake / "out/bench.inference.yaml").exists()
    out, err = capsys.readouterr()
    assert "oom_host (no room)" in err
    assert "never steady" in err
    assert "tile 32, batch 1, launch 0: 2.0" in err
    for file in ("bench.csv", "bench.ledger/records.jsonl", "bench.inference.yaml"):
        assert f"Written: out/{file}" in out

    assert bench("--tile-sizes=16", "--batch_sizes=1") == 0
    assert len(rows_of(fake / "out/bench.csv")) == 5, "appended"


def test_a_model_that_crashes_is_a_row_and_the_exit_code_is_1(fake: Path) -> None:
    (fake / "nets.py").touch()
    words = ("--tile-sizes", "16", "--batch-sizes", "1", "--model", "nets:fragile", "nets:sound")
    assert bench(*words) == 1
    statuses = {row["model"]: row["status"] for row in rows_of(fake / "out/bench.csv")}
    assert statuses == {"nets:fragile": "crash", "nets:sound": "ok"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model unknown", "--model 'unknown' is unknown"),
        ("--batch-sizes 0", "--batch-sizes"),
        ("--tile-sizes 16x", "--tile-sizes"),
        ("--tile-sizes 16 --halo 8", "--halo 8 leaves nothing of --tile-sizes 16"),
        ("--amp --dtype bfloat16", "--amp"),
        ("--checkpointing", "--checkpointing"),
        ("--output worker.py", "worker.py is not the CSV of a benchmark"),
        ("--output worker.py/bench.csv", "--output worker.py/bench.csv cannot be written"),
        ("--output .", "--output . cannot be written"),
        ("--ledger worker.py", "--ledger worker.py/records.jsonl cannot be written"),
        ("--recommend worker.py/a.yaml", "--recommend worker.py/a.yaml cannot be written"),
    ],
)
def test_what_makes_no_sense_creates_nothing(fake: Path, capsys, words: str, sentence: str) -> None:
    before = sorted(fake.rglob("*"))
    assert bench(*words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and sentence in err
    assert sorted(fake.rglob("*")) == before


def test_an_interrupted_sweep_goes_on_with_resume(fake: Path, monkeypatch, capsys) -> None:
    words = ("--tile-sizes", "16", "--batch-sizes", "1", "2", "3")
    append, kept = Ledger.append, []

    def impatient(ledger: Ledger, record: Record) -> Record:
        kept.append(append(ledger, record))
        if len(kept) == 2:
            raise KeyboardInterrupt
        return kept[-1]

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "append", impatient)
        assert bench(*words) == 3
    assert "--resume" in capsys.readouterr().err
    assert bench(*words, "--resume") == 0
    records = Ledger(fake / "out/bench.ledger").records()
    assert records[:2] == kept
    assert sorted(record.case["batch"] for record in records) == [1, 2, 3]
    assert len(rows_of(fake / "out/bench.csv")) == 3


@pytest.mark.usefixtures("undrawn")
def test_the_limit_of_each_tile(fake: Path, capsys) -> None:
    assert bench("--find-limit", "--budget", "20000", "--tile-sizes", "16", "32") == 0
    out, _ = capsys.readouterr()
    assert "Tile 16: a batch of 18 fits" in out  # 1000 + 4 * 18 * 256 = 19432
    assert "Tile 32: a batch of 4 fits" in out
    assert Ledger(fake / "out/bench.ledger/limits").records()
    written = rows_of(fake / "out/bench.csv")
    tried = [(row["tile_size"], row["batch_size"], row["error"]) for row in written]
    assert tried == [("16", "18", ""), ("16", "19", "OOM"), ("32", "4", ""), ("32", "5", "OOM")]
    assert {row["avg_time_ms"] + row["pixels_per_sec"] for row in written} == {""}, "only tried"
    assert "Written: out/bench.csv" in out
    assert main(["plot", "out/bench.csv", "--output", "out/limits"]) == 0


@pytest.mark.parametrize("words", [(), ("--find-limit",)])
def test_a_budget_for_no_launch_is_refused(fake: Path, capsys, words: tuple[str, ...]) -> None:
    assert bench("--budget", "1KiB", *words) == 2
    reason = "holds no launch: Python, torch and the weights take 1.99 KiB before the first sample"
    assert f"--budget 1.00 KiB {reason}" in capsys.readouterr().err
    assert not (fake / "out").exists()
    assert bench("--budget", "0", *words) == 2


def test_resume_refuses_what_another_machine_measured(fake: Path, capsys) -> None:
    words = ("--tile-sizes", "16", "--batch-sizes", "1")
    assert bench(*words) == 0
    path = fake / "out/bench.ledger/records.jsonl"
    (record,) = Ledger(fake / "out/bench.ledger").records()
    elsewhere = record.model_copy(update={"environment": {"machine_key": "elsewhere"}})
    path.write_text(elsewhere.line() + "\n")
    assert bench(*words, "--resume") == 2
    assert "on another machine (elsewhere, not " in capsys.readouterr().err
    assert path.read_text() == elsewhere.line() + "\n"


@pytest.mark.slow
def test_from_a_file_to_a_row(nets: str, tmp_path, here, monkeypatch) -> None:
    words = f"--model {nets}:convs --tile_sizes 16 --batch_sizes 1 --mode train --device cpu"
    with forked_commands(tmp_path):
        monkeypatch.setattr(supervisor, "WORKER", (str(tmp_path / "launch"),))
        assert bench(*words.split(), "--launch-seconds", "0.2") == 0
    (row,) = rows_of(tmp_path / "out/bench.csv")
    assert (row["mode"], row["status"], row["model_params"]) == ("train", "ok", "370")
    assert float(row["total_time_ms"]) > 0
    assert float(row["host_peak_mb"]) > 10
    (record,) = Ledger(tmp_path / "out/bench.ledger").records()
    phases = ["forward", "backward", "optimizer"]
    assert list(record.samples_s) == ["step", *phases]
    parts = zip(*(record.samples_s[name] for name in phases), strict=True)
    for step, within in zip(record.samples_s["step"], parts, strict=True):
        assert 0 < sum(within) <= step
    assert record.warmup.first_s and record.warmup.setup_s
    assert record.memory.host_baseline and record.memory.host_peak_kernel
    assert record.memory.host_baseline <= record.memory.host_peak_kernel
    assert record.environment["torch"]["threads"] >= 1
    assert record.work == {"samples": 1, "pixels": 256, "useful_pixels": 256}
    assert record.case["channels"] == 3
