"""What is the user's own: no file that Penstock did not write, or that was edited, is replaced."""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from penstock.base import UsageError, replacing, store_around
from penstock.base import output_files as ours
from penstock.cli import main

from .arrays import counted_up, zarr
from .reports.kit import GPU_CSV, SEED_CSV
from .scaling.kit import log

THEIRS = "what a user wrote in a week"


def write(path: Path, text: str) -> None:
    with ours.writing_output(path) as draft:
        draft.write_text(text)


def test_what_penstock_wrote_is_replaced_and_what_was_edited_is_not(tmp_path) -> None:
    file = tmp_path / "out.csv"
    for text in ("first", "second"):
        ours.check_outputs(("--output", file))
        write(file, text)
    assert file.read_text() == "second"
    file.write_text("second, and my notes")
    with pytest.raises(UsageError, match=r"--output .*out\.csv has been edited"):
        ours.check_outputs(("--output", file))
    with pytest.raises(UsageError, match="edited since"):
        write(file, "third")
    assert file.read_text() == "second, and my notes"
    ours.check_outputs(("--output", file), replace=True)
    with ours.writing_output(file, replace=True) as draft:
        draft.write_text("third")
    ours.check_outputs(("--output", file))


def test_what_is_the_users_is_refused_before_anything(tmp_path) -> None:
    (tmp_path / "notes.json").write_text(THEIRS)
    with pytest.raises(UsageError, match=r"notes\.json is not known"):
        ours.check_outputs(("--json", tmp_path / "notes.json"))
    (tmp_path / "empty").touch()  # nothing is lost, as of a file that mktemp made
    ours.check_outputs(
        ("--json", tmp_path / "empty"), ("--trace", tmp_path / "new"), ("--csv", None)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes.json"]


def test_a_file_that_a_kill_left_half_written_is_ours(tmp_path) -> None:
    trace = tmp_path / "trace.json"
    ours.begin_output(trace)
    trace.write_text("[\n{")
    ours.check_outputs(("--trace", trace))
    ours.end_output(trace)
    ours.check_outputs(("--trace", trace))
    trace.write_text("mine")
    with pytest.raises(UsageError, match="edited"):
        ours.check_outputs(("--trace", trace))


def test_neither_an_input_nor_another_output_nor_the_inside_of_an_array(tmp_path) -> None:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "in.zarr/0")}}
    ts.open(spec, create=True, dtype="uint8", shape=[2, 2]).result()
    (tmp_path / "n5").mkdir()
    (tmp_path / "n5" / "attributes.json").write_text('{"n5": "4.0.0"}')
    (tmp_path / "link").symlink_to(tmp_path / "in.zarr")
    write(tmp_path / "in.csv", "ours, and read")
    for place in ("in.zarr/0/zarr.json", "in.zarr/0/new/file.json", "n5/a.json", "link/0/a.json"):
        with pytest.raises(UsageError, match=f"--output .*{place} lies inside the array"):
            ours.check_outputs(("--output", tmp_path / place), replace=True)
    with pytest.raises(UsageError, match=r"in\.csv is an input"):
        ours.check_outputs(("--output", tmp_path / "in.csv"), inputs=[tmp_path / "x/../in.csv"])
    with pytest.raises(UsageError, match=r"a\.json is --trace too"):
        ours.check_outputs(("--trace", tmp_path / "a.json"), ("--json", tmp_path / "a.json"))
    assert store_around(tmp_path) is None


def test_a_file_that_another_replaces_meanwhile_is_ours(tmp_path, monkeypatch) -> None:
    write(tmp_path / "a.json", "ours")
    mark_of = ours._mark_of

    def meanwhile(place: Path | int) -> bytes:
        monkeypatch.setattr(ours, "_mark_of", mark_of)
        write(tmp_path / "a.json", "ours too")
        return mark_of(place)

    monkeypatch.setattr(ours, "_mark_of", meanwhile)
    assert ours.is_written_by_us(tmp_path / "a.json")


def test_where_files_keep_no_marks_each_is_the_users(tmp_path, monkeypatch) -> None:
    monkeypatch.delattr(os, "setxattr")
    write(tmp_path / "a.json", "ours")
    with pytest.raises(UsageError, match=r"not known to be Penstock's; --overwrite replaces it"):
        ours.check_outputs(("--json", tmp_path / "a.json"))
    ours.check_outputs(("--json", tmp_path / "a.json"), replace=True)


def test_a_link_planted_at_the_draft_is_not_followed(tmp_path) -> None:
    (tmp_path / "victim").write_text(THEIRS)
    (tmp_path / f".out.json.{os.getpid()}.part").symlink_to(tmp_path / "victim")
    with replacing(tmp_path / "out.json") as draft:
        assert draft.is_file() and not draft.is_symlink()
        draft.write_text("new")
    assert (tmp_path / "victim").read_text() == THEIRS


def test_a_link_stays_one_and_its_file_is_written(tmp_path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "real.json").write_text("old")
    (tmp_path / "store" / "real.json").chmod(0o640)
    (tmp_path / "out.json").symlink_to(Path("store", "real.json"))
    with replacing(tmp_path / "out.json") as draft:
        draft.write_text("new")
    assert (tmp_path / "out.json").is_symlink()
    assert (tmp_path / "store" / "real.json").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "store" / "real.json").stat().st_mode) == 0o640
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["real.json"]


def test_a_device_is_written_to_and_stays_one() -> None:
    ours.check_outputs(("--json", Path(os.devnull)))
    write(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


def run(words: list[Any]) -> int:
    return main([str(word) for word in words])


def test_a_run_keeps_its_folder_out_of_arrays_and_its_own_files_to_itself(tmp_path, capsys) -> None:
    """Metrics in the place of run.json were lost, and a trace there left no run to resume."""
    source, net = zarr(tmp_path / "in.zarr" / "0", counted_up()).parent, tmp_path / "net.py"
    net.write_text("def net():\n    return lambda x: x + 1\n")
    (source / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    words = ["infer", "--in-spec", source / "0", "--out-spec", tmp_path / "out.zarr", "--patch", 8,
             "--model-type", f"{net}:net", "--overlap", 0, "--devices", "cpu"]  # fmt: skip
    before = sorted(tmp_path.rglob("*.*"))
    for more, why in (
        (["--run-dir", source / "run"], f"lies inside the array {source}"),
        (["--trace", tmp_path / "out.zarr.penstock" / "done.log"], "is a file of the run folder"),
        (["--run-dir", tmp_path / "r", "--metrics-json", tmp_path / "r/../r/run.json"],
         "is a file of the run folder"),
        (["--trace", tmp_path / "out.zarr.penstock-lock"], "is a name that Penstock keeps"),
        (["--metrics-json", net], "net.py is an input"),
        (["--run-dir", tmp_path / "r", "--trace", net], "net.py is an input"),
    ):  # fmt: skip
        assert run([*words, *more, "--overwrite"]) == 2
        assert why in capsys.readouterr().err
    assert sorted(path for path in tmp_path.rglob("*.*") if path.suffix != ".pyc") == before


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "line",
    [
        "plot gpu_metrics.csv --out gpu_plot",
        pytest.param("plot --input bench.csv --output reports/b.png", marks=pytest.mark.slow),
        "scaling --metrics slurm-1.out",
        pytest.param("scaling slurm-1.out --output report", marks=pytest.mark.slow),
        "slurm submit --study 1,4,8 --dry-run -- train spiral",
    ],
)
def test_the_seeds_command_lines_run_twice_in_a_row(line: str, here) -> None:
    Path("gpu_metrics.csv").write_text(GPU_CSV)
    Path("bench.csv").write_text(SEED_CSV)
    Path("slurm-1.out").write_text(log("1", 1, 362.45) + log("2", 4, 95.23))
    words = line.split()
    assert run(words) == 0 and run(words) == 0


NET = "from torch import nn\n\n\ndef net():\n    return nn.Conv2d(3, 3, 1)\n"
OF_NETS = "bench model --weights w.safetensors --tile-sizes 16 --model"
READS: list[tuple[str, str]] = [
    ("tune loader set --step-time 1 --output", "set/dataset.json"),
    ("tune loader set --step-time 1 --output {new} --ledger", "set/new"),
    ("bench loader set --output", "set/new.csv"),
    ("bench loader a.npy --ledger . --output", "records.jsonl"),
    ("bench queue set --output", "set/new.csv"),
    ("bench model --ledger . --output", "records.jsonl"),
    ("bench model --ledger . --output a.csv --recommend", "records.jsonl"),
    (f"{OF_NETS} nets.py:net --output", "nets.py"),
    (f"{OF_NETS} nets.pt2 --output a.csv --recommend", "nets.pt2"),
    (f"{OF_NETS} nets:net --output", "w.safetensors"),
    ("compare set set --json", "set/records.jsonl"),
    ("report set --output {new} --csv", "set/records.jsonl"),
    ("scaling runs.csv --output", "."),
]
"""Commands and a place for their output: a file that they read, or one in a folder that they read.
The document of a packed data set is JSON of ours, and was replaced."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    assert run(["generate", "ufs-p2", folder / "set", "--samples", 16, "--grid", 8, 16]) == 0
    records = Path(__file__).with_name("data") / "records-v1.jsonl"
    for place in ("records.jsonl", "set/records.jsonl"):
        shutil.copy(records, folder / place)
    np.save(folder / "a.npy", np.zeros((8, 8)))
    for name, text in {
        "nets.py": NET,
        "nets.pt2": NET,
        "w.safetensors": THEIRS,
        "runs.csv": THEIRS,
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("words", "place"), READS, ids=[" ".join(each) for each in READS])
def test_no_output_replaces_what_its_command_reads(
    words: str, place: str, inputs: Path, tmp_path, monkeypatch, capsys
) -> None:
    here = Path(shutil.copytree(inputs, tmp_path / "here"))
    monkeypatch.chdir(here)
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert run([*words.format(new=tmp_path / "new").split(), place, "--overwrite"]) == 2
    assert "is an input" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.usefixtures("undrawn")
def test_figures_replace_no_picture_of_the_users(tmp_path) -> None:
    (tmp_path / "gpu.csv").write_text(GPU_CSV)
    photo = tmp_path / "gpu_util.png"
    words = ["plot", tmp_path / "gpu.csv"]
    assert run(words) == 0 and run(words) == 0
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    photo = tmp_path / names[0]
    photo.write_text(THEIRS)
    for path in names[1:]:
        (tmp_path / path).unlink()
    assert run(words) == 2
    assert photo.read_text() == THEIRS and len(list(tmp_path.glob("*.png"))) == 1
    assert run([*words, "--overwrite"]) == 0


OUTPUTS: list[tuple[list[str], str]] = [
    (["doctor", "--json"], "mine"),
    (["compare", "{a}", "{a}", "--json"], "mine"),
    (["report", "{a}", "--output", "{new}", "--csv"], "mine"),
    (["report", "{a}", "--output"], "report.md"),
    (["scaling", "{a}", "--output"], "runs.csv"),
    (["score", "xview3", "--inference-file", "{new}", "--label-file", "{new}", "--output"], "mine"),
    (["bench", "model", "--output"], "mine.csv"),
    (["bench", "model", "--output", "{new}/a.csv", "--recommend"], "mine.yaml"),
    (["bench", "model", "--output", "{new}/a.csv", "--ledger"], "records.jsonl"),
    (["bench", "loader", "{a}", "--output"], "mine.csv"),
    (["bench", "queue", "{a}", "--output"], "mine.csv"),
    (["tune", "loader", "{a}", "--step-time", "1", "--output"], "mine.yaml"),
    (["predict", "{new}", "--data-root", "{a}", "--output"], "mine.csv"),
    (["train", "spiral", "--max-steps", "1", "--output-dir"], "args.json"),
    (["train", "spiral", "--max-steps", "1", "--overwrite", "--output-dir"], "best_model.pth"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "name"), OUTPUTS, ids=[" ".join(w) for w, _ in OUTPUTS])
def test_no_verb_replaces_what_is_the_users(words: list[str], name: str, tmp_path, capsys) -> None:
    mine = tmp_path / "theirs" / name
    mine.parent.mkdir(parents=True)
    mine.write_text(THEIRS)
    (tmp_path / "a").mkdir()
    shutil.copy(Path(__file__).with_name("data") / "records-v1.jsonl", tmp_path / "a/records.jsonl")
    folder = words[-1] in ("--output-dir", "--out", "--ledger") or name in (
        "report.md", "runs.csv"
    )  # fmt: skip
    target = tmp_path / "theirs" if folder else mine
    there = {"a": tmp_path / "a", "new": tmp_path / "new"}
    assert run([*(word.format(**there) for word in words), target]) == 2
    assert mine.read_text() == THEIRS
    said = capsys.readouterr().err
    assert name.partition("/")[0] in said or "theirs" in said, said
    assert not (tmp_path / "new").exists()
    assert sorted(path.name for path in (tmp_path / "theirs").rglob("*.*")) == sorted(
        {Path(part).name for part in Path(name).parts if "." in part}
    )
