"""Preprocessing: all or nothing, one sentence for bad input, the reference's layout."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock.data.scenes.cutting
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data.scenes.chips import Chips
from penstock.data.scenes.rasters import NODATA
from penstock.data.scenes.scene import Scene, scene_folders

from ..places import ROOT
from ..preloaded import started
from .kit import CHIP, NAMES, OVERLAP, SIZE, words_of

# --- all or nothing --------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_done_is_not_done_again(
    data: Path, chipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(chipped)
    assert main(words_of(data, chipped, "--overlap", str(OVERLAP))) == 0
    assert "2 scenes were done before" in capsys.readouterr().out
    after = everything(chipped)
    for name, (when, what) in before.items():
        assert after[name][1] == what
        assert "index.json" in name or after[name][0] == when


def test_results_do_not_depend_on_workers(data: Path, chipped: Path, tmp_path: Path) -> None:
    words = words_of(data, tmp_path, "--overlap", str(OVERLAP))
    words[words.index("--num_workers") + 1] = "1"
    assert main(words) == 0
    one, two = everything(tmp_path), everything(chipped)
    assert {name: what for name, (_, what) in one.items()} == {
        name: what for name, (_, what) in two.items()
    }


def test_a_scene_without_a_manifest_is_done_again_and_the_others_are_not(
    data: Path, chipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a killed run leaves it: chips half written, no manifest, no index."""
    shutil.copytree(chipped, tmp_path / "c")
    train = tmp_path / "c" / "train"
    first, second = sorted(path for path in train.iterdir() if path.is_dir())
    (train / "index.json").unlink()
    (first / "manifest.json").unlink()
    shard = next(path for path in first.rglob("c/**/*") if path.is_file())
    shard.write_bytes(b"half a shard")
    with pytest.raises(UsageError, match="was not finished; run penstock preprocess again"):
        Chips(train)
    kept = (second / "manifest.json").stat().st_mtime_ns
    assert main(words_of(data, tmp_path / "c", "--overlap", str(OVERLAP))) == 0
    assert "1 scenes were done before" in capsys.readouterr().out
    assert (second / "manifest.json").stat().st_mtime_ns == kept
    assert shard.read_bytes() == (chipped / "train" / shard.relative_to(train)).read_bytes()
    np.testing.assert_array_equal(
        Chips(train).read(0).image, Chips(chipped / "train").read(0).image
    )


def test_a_run_that_dies_leaves_no_manifest_and_no_index(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_row = penstock.data.scenes.windows.read_row
    rows = []

    def dies(*args: Any) -> Any:
        rows.append(args)
        if len(rows) == 7:  # in the second scene
            raise RuntimeError("the disk is on fire")
        return read_row(*args)

    monkeypatch.setattr(penstock.data.scenes.cutting, "read_row", dies)
    words = words_of(data, tmp_path, "--overlap", str(OVERLAP))
    words[words.index("--num_workers") + 1] = "1"
    assert main(words) == 1
    assert "preprocess failed at scene" in capsys.readouterr().err
    train = tmp_path / "train"
    assert [path.parent.name for path in train.glob("*/manifest.json")] == [
        min(scene_folders(data, "train"))
    ]
    assert not (train / "index.json").exists()
    monkeypatch.undo()
    assert main(words) == 0
    assert "1 scenes were done before" in capsys.readouterr().out


def test_a_killed_run_resumes_to_the_same_bytes(data: Path, chipped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = words_of(data, out, "--overlap", str(OVERLAP))
    run = started(tmp_path, words)
    while run.is_alive() and not list(out.glob("train/*/chips.zarr/c/1")):
        time.sleep(0.002)
    run.kill()
    run.join()
    assert main(words) == 0
    one, two = everything(out), everything(chipped)
    assert {name: what for name, (_, what) in one.items()} == {
        name: what for name, (_, what) in two.items()
    }


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--channels", "vh"], "channels"),
        pytest.param(["--overlap", "16"], "overlap", marks=pytest.mark.slow),
    ],
)
def test_chips_of_other_settings_are_not_taken_for_these(
    more: list[str],
    what: str,
    data: Path,
    chipped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(chipped, tmp_path / "c")
    words = words_of(data, tmp_path / "c", "--overlap", str(OVERLAP), *more)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"was made with other {what}; use --overwrite-preproc to replace it" in err
    assert main([*words, "--overwrite_preproc"]) == 0
    assert Chips(tmp_path / "c" / "train").channels == (("vh",) if what == "channels" else NAMES)


def test_a_raster_that_changed_is_cut_again_only_when_told(
    data: Path, chipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for made, folder in ((data, "d"), (chipped, "c")):
        shutil.copytree(made, tmp_path / folder)
    words = words_of(tmp_path / "d", tmp_path / "c", "--overlap", str(OVERLAP))
    assert main(words) == 0
    assert "2 scenes were done before" in capsys.readouterr().out
    next((tmp_path / "d" / "train").glob("*/VH_dB.tif")).touch()
    assert main(words) == 2
    assert "was made with other inputs" in capsys.readouterr().err


def test_rows_of_one_scene_leave_the_others_done(
    data: Path, chipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scene is its own labels, wherever in the file they stand."""
    shutil.copytree(chipped, tmp_path / "c")
    words = words_of(data, tmp_path / "c", "--overlap", str(OVERLAP))
    labels = tmp_path / "train.csv"
    words[words.index("--train_label_file") + 1] = str(labels)
    header, *rows = (data / "labels" / "train.csv").read_text().splitlines()
    first = next(name for name in scene_folders(data, "train") if name in rows[0])
    labels.write_text("\n".join([header, *sorted(rows, key=lambda row: first in row)]) + "\n")
    assert main(words) == 0
    assert "2 scenes were done before" in capsys.readouterr().out
    labels.write_text("\n".join([header, rows[0], *rows]) + "\n")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"{first} was made with other labels; use --overwrite-preproc" in err


# --- bad input -------------------------------------------------------------------------------


def drop_a_scene(data: Path) -> None:
    shutil.rmtree(min(scene_folders(data, "train").values()))


def empty_a_scene(data: Path) -> None:
    for path in min(scene_folders(data, "train").values()).iterdir():
        path.unlink()


def drop_labels(data: Path) -> None:
    path = data / "labels" / "train.csv"
    header, *rows = path.read_text().splitlines()
    name = min(scene_folders(data, "train"))
    path.write_text("\n".join([header, *(row for row in rows if name not in row)]) + "\n")


def put_outside(data: Path) -> None:
    path = data / "labels" / "train.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[1]["detect_scene_row"] = "330"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def no_train(data: Path) -> None:
    (data / "train").rename(data / "elsewhere")


def cut_short(data: Path) -> None:
    path = next((data / "train").glob("*/VV_dB.tif"))
    path.write_bytes(path.read_bytes()[:100_000])


def no_raster(data: Path) -> None:
    next((data / "train").glob("*/owiWindSpeed.tif")).unlink()


def no_tiff(data: Path) -> None:
    next((data / "train").glob("*/bathymetry.tif")).write_bytes(b"II*\x00" + bytes(40))


def add_a_column(data: Path) -> None:
    path = data / "labels" / "validation.csv"
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header + ",colour", *(row + "," for row in rows)]) + "\n")


def nothing_valid(data: Path) -> None:
    import rasterio

    for path in (data / "train").glob("*/V*_dB.tif"):
        with rasterio.open(path, "r+") as file:
            file.write(np.full(SIZE, NODATA, np.float32), 1)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            drop_a_scene,
            "t of .*train.csv has no folder with a raster .1 of 2 scenes.; --partial takes only",
        ),
        (empty_a_scene, "t of .*train.csv has no folder with a raster .1 of 2 scenes.; --partial"),
        (drop_labels, "t has no label in .*train.csv .1 of 2 scenes.; --partial takes only"),
        (put_outside, r"train.csv line 3: row 330, column \d+ is outside scene .* 330 x 470"),
        (no_train, "--data-root .* has no folder train or training"),
        (cut_short, "VV_dB.tif cannot be read at rows"),
        (no_raster, "owiWindSpeed.tif is missing"),
        (no_tiff, "bathymetry.tif is not a raster that can be read"),
        (add_a_column, "validation.csv has a column 'colour', which labels do not have"),
        (nothing_valid, "2 scenes under .*train give no chip with a valid pixel"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    damage: Callable[[Path], None],
    sentence: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(data, tmp_path / "d")
    damage(tmp_path / "d")
    capsys.readouterr()
    words = words_of(tmp_path / "d", tmp_path / "c")
    assert main([*words, "--overlap", "8"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("penstock preprocess: ") and re.search(sentence, last), last
    assert not list(tmp_path.glob("c/*/index.json"))
    if "--partial" in sentence:
        assert main([*words, "--overlap", "8", "--partial"]) == 0
        assert len(Chips(tmp_path / "c" / "train").scenes) == 1


def test_an_unknown_channel_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(data, tmp_path / "c")
    words[words.index("--channels") + 1] = "vh,hh"
    assert main(words) == 2
    assert "there is no channel 'hh'; there are vh, vv, bathymetry" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


# --- the layout of the reference -------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    assert main(words_of(data, folder, "--layout", "reference")) == 0
    return folder


def test_the_references_layout_is_its_files(data: Path, reference: Path) -> None:
    """Against its method done plainly: enlarge, pad with 0, cut."""
    train = reference / "train"
    for name, folder in scene_folders(data, "train").items():
        offsets = json.loads((train / name / "coords.json").read_text())["offsets"]
        assert offsets == [[c * CHIP, r * CHIP] for r in range(3) for c in range(4)]
        for channel in ("vv", "bathymetry"):
            with Scene(folder, (channel,)) as scene:
                values = scene.read(channel, (0, SIZE[0]), (0, SIZE[1])).astype(np.float32)
            plane = np.zeros((3 * CHIP, 4 * CHIP), np.float32)
            plane[: SIZE[0], : SIZE[1]] = np.where(np.isnan(values), NODATA, values)
            for number, (column, row) in enumerate(offsets):
                chip = np.load(train / name / channel / f"{number}_{channel}.npy")
                assert chip.dtype == np.float32
                expected = plane[row : row + CHIP, column : column + CHIP]
                np.testing.assert_allclose(chip, expected, rtol=1e-6, atol=1e-4)
    assert np.load(train / "data_means.npy").tolist() == [0.5] * 4


def test_the_references_annotations_say_unknown_where_it_said_fishing(reference: Path) -> None:
    classes = {("True", "True"): "1", ("True", "False"): "2", ("False", ""): "3",
               ("True", ""): "", ("", ""): ""}  # fmt: skip
    with (reference / "train" / "train_chip_annotations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    labelled = [row for row in rows if row["source"] != "background"]
    assert len(labelled) == 24
    for row in labelled:
        assert row["vessel_class"] == classes[row["is_vessel"], row["is_fishing"]]
        place = int(row["chip_index"])
        assert float(row["rows"]) + place // 4 * CHIP == int(row["detect_scene_row"])
        assert float(row["columns"]) + place % 4 * CHIP == int(row["detect_scene_column"])
    taken = {(row["scene_id"], row["chip_index"]) for row in labelled}
    background = [row for row in rows if row["source"] == "background"]
    assert background and all(row["vessel_class"] == "0" for row in background)
    assert not taken & {(row["scene_id"], row["chip_index"]) for row in background}
    with (reference / "val" / "val_chip_annotations.csv").open(newline="") as file:
        assert all(row["source"] != "background" for row in csv.DictReader(file))


def test_the_references_layout_does_not_overlap(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(data, tmp_path, "--layout", "reference", "--overlap", "8")) == 2
    assert "--overlap 8: chips of --layout reference do not overlap" in capsys.readouterr().err


# --- the benchmark ---------------------------------------------------------------------------

BENCHMARK = ROOT / "benchmarks" / "preprocess.py"


def test_verdicts_of_the_benchmark_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    bench = runpy.run_path(str(BENCHMARK))

    def report(seconds: float, peak: int) -> str:
        same = {"chips": 100, "cpu_s": 1.0, "bytes_read": 1e6, "bytes_written": 1e6, "files": 3}
        launches = [
            {**same, "contender": name, "round": 0, "seconds": 10.0, "peak_rss": 2**30}
            for name in bench["CONTENDERS"]
        ]
        for launch in launches[1:]:
            launch |= {"seconds": seconds, "peak_rss": peak, "chips": 150}
        document = {"time": "2026-01-01", "machine": "m", "load": 0.0, "size": [9, 9], "chip": 3,
                 "tiff": "strips", "launches": launches}  # fmt: skip
        return "\n".join(bench["lines_of"](document))

    assert "NOT MET" not in report(1.0, 2**25)
    lines = report(5.0, 1).splitlines()
    assert "| reference | 100 | 10 | 10 | 5 | 1 |" in lines[5]
    assert (
        lines[11] == "- as scenes, with 1.5 times the chips by overlap, it is 2 [2 - 2], 1 rounds."
    )
    assert "- **NOT MET**: chips/s of penstock over the reference's is 3 [3 - 3]" in report(5.0, 1)
    assert "- **NOT MET**: its peak memory over the reference's is 0.5" in report(1.0, 2**29)


@pytest.mark.slow
def test_quick_benchmark_measures_every_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    readme = BENCHMARK.with_name("README.md").read_text()
    command = [sys.executable, str(BENCHMARK), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*-preprocess.json")
    launches = json.loads(file.read_text())["launches"]
    assert [row["contender"] for row in launches] == list(
        runpy.run_path(str(BENCHMARK))["CONTENDERS"]
    )
    assert all(row["chips"] == 8 and row["peak_rss"] > 0 for row in launches)
    assert BENCHMARK.with_name("README.md").read_text() == readme


def test_chips_go_to_no_place_that_cannot_be_written(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(data, Path("/proc/chips"), "--overlap", "0")) == 2
    assert "--output-dir /proc/chips: /proc may not be written to" in capsys.readouterr().err


def test_a_users_folder_of_a_scenes_name_is_left_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = min(scene_folders(data, "train"))
    mine = tmp_path / "c" / "train" / name / "chips.zarr" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("what a user wrote")
    words = words_of(data, tmp_path / "c", "--overlap", "0")
    assert main(words) == 2
    assert f"{name} is not known to be Penstock's" in capsys.readouterr().err
    assert mine.read_text() == "what a user wrote"
    assert main([*words, "--replace"]) == 0
