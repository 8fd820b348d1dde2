"""Preprocessing: all or nothing, and one sentence for bad input."""

import csv
import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main
from penstock.data import Chips, read_labels, scene_folders
from penstock.data.scenes.rasters import NODATA

from ..places import ROOT
from ..preloaded import started
from .kit import OVERLAP, SIZE, words_of


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_done_is_not_done_again(data: Path, chipped: Path, capsys) -> None:
    before = everything(chipped)
    assert main(words_of(data, chipped, "--overlap", str(OVERLAP))) == 0
    assert "done before: 2 scenes" in capsys.readouterr().out
    after = everything(chipped)
    for name, (when, what) in before.items():
        assert after[name][1] == what
        assert "index.json" in name or after[name][0] == when


@pytest.mark.slow
def test_results_do_not_depend_on_workers(data: Path, chipped: Path, tmp_path) -> None:
    words = words_of(data, tmp_path, "--overlap", str(OVERLAP))
    words[words.index("--num_workers") + 1] = "1"
    assert main(words) == 0
    assert contents(tmp_path) == contents(chipped)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: what for name, (_, what) in everything(folder).items()}


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(data: Path, chipped: Path, tmp_path) -> None:
    out = tmp_path / "out"
    words = words_of(data, out, "--overlap", str(OVERLAP))
    run = started(tmp_path, words)
    while run.is_alive() and not list(out.glob("train/*/chips.zarr/c/1")):
        time.sleep(0.002)
    run.kill()
    run.join()
    assert main(words) == 0
    assert contents(out) == contents(chipped)


@pytest.mark.slow
def test_a_changed_raster_is_cut_again_if_told(data: Path, chipped: Path, tmp_path, capsys) -> None:
    for made, folder in ((data, "d"), (chipped, "c")):
        shutil.copytree(made, tmp_path / folder)
    words = words_of(tmp_path / "d", tmp_path / "c", "--overlap", str(OVERLAP))
    assert main(words) == 0
    assert "done before: 2 scenes" in capsys.readouterr().out
    raster = next((tmp_path / "d" / "train").glob("*/VH_dB.tif"))
    raster.touch()
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("c/*/0/0/0/0")}
    assert main(words) == 0
    assert "done before: 2 scenes" in capsys.readouterr().out, "what is in it is the same"
    assert all(path.stat().st_mtime_ns == when for path, when in shards.items())
    manifests = everything(tmp_path / "c")
    assert main(words) == 0 and everything(tmp_path / "c").keys() == manifests.keys()
    pixels = bytearray(raster.read_bytes())
    pixels[-3] ^= 1
    raster.write_bytes(pixels)
    assert main(words) == 2
    assert "was made with other inputs" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_of_one_scene_leave_others_done(data: Path, chipped: Path, tmp_path, capsys) -> None:
    """A scene is its own labels, wherever in the file they stand."""
    shutil.copytree(chipped, tmp_path / "c")
    words = words_of(data, tmp_path / "c", "--overlap", str(OVERLAP))
    labels = tmp_path / "train.csv"
    words[words.index("--train_label_file") + 1] = str(labels)
    header, *rows = (data / "labels" / "train.csv").read_text().splitlines()
    first = next(name for name in scene_folders(data, "train") if name in rows[0])
    labels.write_text("\n".join([header, *sorted(rows, key=lambda row: first in row)]) + "\n")
    assert main(words) == 0
    assert "done before: 2 scenes" in capsys.readouterr().out
    labels.write_text("\n".join([header, *rows[1:]]) + "\n")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"{first} was made with other labels; use --overwrite-preproc" in err


def drop_a_scene(data: Path) -> None:
    shutil.rmtree(min(scene_folders(data, "train").values()))


def drop_labels(data: Path) -> None:
    path = data / "labels" / "train.csv"
    header, *rows = path.read_text().splitlines()
    name = min(scene_folders(data, "train"))
    path.write_text("\n".join([header, *(row for row in rows if name not in row)]) + "\n")


@pytest.mark.slow
def test_a_scene_without_a_label_is_background_and_labels_in_no_data_are_counted(
    data: Path, tmp_path, capsys
) -> None:
    import rasterio

    shutil.copytree(data, tmp_path / "d")
    drop_labels(tmp_path / "d")
    names = sorted(scene_folders(tmp_path / "d", "train"))
    labels = read_labels(tmp_path / "d" / "labels" / "train.csv")[names[1]]
    with rasterio.open(tmp_path / "d" / "train" / names[1] / "VH_dB.tif", "r+") as file:
        values = file.read(1)
        before = values == NODATA
        values[:150] = NODATA
        file.write(values, 1)
        missing = values == NODATA
    with rasterio.open(tmp_path / "d" / "train" / names[0] / "VH_dB.tif") as file:
        other = file.read(1) == NODATA
    rows, columns = labels.points.astype(int).T
    unseen = missing[rows, columns].sum()
    assert unseen > before[rows, columns].sum()
    words = words_of(tmp_path / "d", tmp_path / "c", "--overlap", str(OVERLAP))
    assert main(words) == 0
    output = capsys.readouterr().out
    chips = Chips(tmp_path / "c" / "train")
    assert [len(chips.labels[name]) for name in names] == [0, len(labels)]
    empty = (chips.num_points == 0).sum()
    assert f"{empty} of {len(chips)} chips hold no object, with 1 scene without a la" in output
    assert f"{unseen} of {len(labels)} labels lie where radar has no value" in output
    assert chips.labels_unseen == unseen
    share = 100 * (1 - (missing.sum() + other.sum()) / 2 / missing.size)
    assert f"pixels with a value: vh {share:.4g} %" in output
    assert main([*words, "--overwrite-preproc", "--partial"]) == 0
    assert Chips(tmp_path / "c" / "train").scenes == (names[1],)


@pytest.mark.slow
def test_values_that_16_bits_do_not_hold_are_refused(data: Path, tmp_path, capsys) -> None:
    import rasterio

    shutil.copytree(data, tmp_path / "d")
    for path in (tmp_path / "d").glob("*/*/V?_dB.tif"):
        with rasterio.open(path) as file:
            profile = {**file.profile, "dtype": "uint16", "nodata": 0}
        with rasterio.open(path, "w", **profile) as file:
            file.write(np.full(SIZE, 65_520, np.uint16), 1)
    words = words_of(tmp_path / "d", tmp_path / "c", "--overlap", "0")
    assert main(words) == 2
    sentence = "VH_dB.tif has values such as 65520, which chips of float16 do not hold; cut them"
    assert sentence in capsys.readouterr().err
    assert main([*words, "--dtype", "float32"]) == 0
    image = Chips(tmp_path / "c" / "train").read(0).image
    assert (image[:2] == np.float32((65_520 + 40) / 15)).all()


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
        (put_outside, r"train.csv line 3: row 330, column \d+ is outside scene .* 330 x 470"),
        (no_train, "--data-root .* has no folder train or training"),
        (nothing_valid, "no chip of 2 scenes under .*train has a valid pixel"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(damage, sentence, data, tmp_path, capsys) -> None:
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


BENCHMARK = ROOT / "benchmarks" / "preprocess.py"


@pytest.mark.long
def test_quick_benchmark_measures_every_contender(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    readme = BENCHMARK.with_name("README.md").read_text()
    command = [sys.executable, str(BENCHMARK), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*-preprocess.json")
    launches = json.loads(file.read_text())["launches"]
    assert [row["contender"] for row in launches] == [*runpy.run_path(str(BENCHMARK))["CONTENDERS"]]
    assert all(row["chips"] == 8 and row["peak_rss"] > 0 for row in launches)
    assert BENCHMARK.with_name("README.md").read_text() == readme


def test_chips_go_to_no_place_that_cannot_be_written(data: Path, capsys) -> None:
    assert main(words_of(data, Path("/proc/chips"), "--overlap", "0")) == 2
    assert "--output-dir /proc/chips: /proc may not be written to" in capsys.readouterr().err


def test_a_users_folder_of_a_scenes_name_is_left_alone(data: Path, tmp_path, capsys) -> None:
    name = min(scene_folders(data, "train"))
    mine = tmp_path / "c" / "train" / name / "chips.zarr" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("what a user wrote")
    words = words_of(data, tmp_path / "c", "--overlap", "0")
    assert main(words) == 2
    assert f"{name} is not known to be Penstock's" in capsys.readouterr().err
    assert mine.read_text() == "what a user wrote"
    assert main([*words, "--overwrite"]) == 0
