"""Chips: each pixel and label owned once, values as the rasters have them, all or nothing."""

from __future__ import annotations

import csv
import json
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.data.scenes.preprocess
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data.scenes.chips import Chips
from penstock.data.scenes.labels import read_labels
from penstock.data.scenes.rasters import NODATA
from penstock.data.scenes.scene import CHANNELS, Scene, radar_of, scene_folders
from penstock.data.scenes.synthetic_files import write_data_set
from penstock.data.scenes.windows import Cut, cuts_of, model_view, planes_of

from ..places import ROOT

rasterio = pytest.importorskip("rasterio")
pytest.importorskip("contourpy")
pytest.importorskip("numcodecs")

SIZE, CHIP, OVERLAP = (330, 470), 128, 32
NAMES = ("vh", "vv", "bathymetry", "wind_speed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("xview3")
    write_data_set(root, SIZE, scenes=3, validation=1, objects=12, tiff="strips", seed=0)
    return root


def words_of(data: Path, out: Path, *more: str) -> list[str]:
    """As the seed spells them."""
    return ["preprocess", "--data_root", str(data),
            "--train_label_file", str(data / "labels" / "train.csv"),
            "--val_label_file", str(data / "labels" / "validation.csv"),
            "--output_dir", str(out), "--channels", ",".join(NAMES), "--num_workers", "2",
            "--chip-size", str(CHIP), *more]  # fmt: skip


@pytest.fixture(scope="module")
def out(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chips")
    assert main(words_of(data, folder, "--overlap", str(OVERLAP))) == 0
    return folder


# --- geometry --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "chip", "overlap", "reads", "cores"),
    [
        (100, 40, 10, [(0, 40), (30, 70), (60, 100)], [(0, 35), (35, 65), (65, 100)]),  # exact
        (95, 40, 10, [(0, 40), (30, 70), (55, 95)], [(0, 35), (35, 62), (62, 95)]),  # moved in
        (40, 40, 10, [(0, 40)], [(0, 40)]),  # one
        (41, 40, 10, [(0, 40), (1, 41)], [(0, 20), (20, 41)]),  # one pixel more
        (7, 40, 10, [(0, 7)], [(0, 7)]),  # less than a chip
    ],
)
def test_cuts(
    length: int,
    chip: int,
    overlap: int,
    reads: list[tuple[int, int]],
    cores: list[tuple[int, int]],
) -> None:
    cut = Cut(length, chip, overlap)
    assert [cut.read(index) for index in range(cut.num)] == reads
    assert [cut.core(index) for index in range(cut.num)] == cores


@given(st.integers(1, 5000), st.integers(1, 900), st.data())
def test_cores_tile_the_scene_and_chips_see_around_them(
    length: int, chip: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, chip - 1))
    cut = Cut(length, chip, overlap)
    reads = [cut.read(index) for index in range(cut.num)]
    cores = [cut.core(index) for index in range(cut.num)]
    assert cores[0][0] == 0 and cores[-1][1] == length
    for (_, stop), (first, _) in pairwise(cores):
        assert stop == first
    for (first, stop), (begin, end) in zip(reads, cores, strict=True):
        assert begin < end
        assert stop - first == min(chip, length)
        # Context on each side, but at the scene's own edges.
        assert begin - first >= (overlap // 2 if first else 0)
        assert stop - end >= (overlap // 2 if stop < length else 0)


def test_an_overlap_of_a_whole_chip_is_refused() -> None:
    with pytest.raises(UsageError, match="--overlap 64 must be less than --chip-size 64"):
        cuts_of((100, 100), 64, 64)


# --- chips -----------------------------------------------------------------------------------


def test_chips_hold_what_the_rasters_hold(data: Path, out: Path) -> None:
    chips = Chips(out / "train")
    folders = scene_folders(data, "train")
    assert chips.channels == NAMES and chips.scenes == tuple(folders)
    seen = dict.fromkeys(folders, 0)
    for index in range(len(chips)):
        chip = chips.read(index)
        (row, column), tall = chip.offset, chip.image.shape[1]
        assert chip.image.shape == (4, CHIP, CHIP) and chip.image.dtype == np.float32
        window = (row, row + tall), (column, column + tall)
        known = np.zeros(chip.image.shape, bool)
        for place, name in enumerate(NAMES):
            path = folders[chip.scene]
            if CHANNELS[name].kind == "radar":
                with rasterio.open(path / CHANNELS[name].file) as file:
                    raw = file.read(1, window=window)
                raw[raw == NODATA] = np.nan
            else:
                with Scene(path, (name,)) as scene:
                    raw = scene.read(name, *window)
            scaled = (raw - CHANNELS[name].offset) / CHANNELS[name].scale
            expected = np.nan_to_num(scaled, nan=0.0)
            np.testing.assert_allclose(chip.image[place], expected, rtol=2e-3, atol=1e-5)
            known[place] = ~np.isnan(raw)
        np.testing.assert_array_equal(chip.valid, [known[:2].all(axis=0), known[2:].all(axis=0)])
        row0, row1, column0, column1 = chip.core
        seen[chip.scene] += (row1 - row0) * (column1 - column0)
    # All of each scene is owned once, but for chips without a single valid pixel: here none.
    assert set(seen.values()) == {SIZE[0] * SIZE[1]}


def test_every_label_is_owned_once_and_seen_by_all_that_see_its_place(
    data: Path, out: Path
) -> None:
    labels = read_labels(data / "labels" / "train.csv")
    chips = Chips(out / "train")
    owned: dict[str, list[tuple[float, float]]] = {name: [] for name in chips.scenes}
    for index in range(len(chips)):
        chip = chips.read(index)
        points, offset = chip.points, np.array(chip.offset)
        row0, row1, column0, column1 = chip.core
        mine = [row0 <= row < row1 and column0 <= column < column1 for row, column in points]
        assert sum(mine) == chips.num_points[index]
        owned[chip.scene] += [tuple(point) for point in points[mine] + offset]
        of_scene = labels[chip.scene]
        inside = np.all((of_scene.points >= offset) & (of_scene.points < offset + CHIP), axis=1)
        np.testing.assert_array_equal(points + offset, of_scene.points[inside])
        for name in ("is_vessel", "is_fishing", "confidence", "length_m"):
            np.testing.assert_array_equal(getattr(chip, name), getattr(of_scene, name)[inside])
    for name, places in owned.items():
        assert sorted(places) == sorted(map(tuple, labels[name].points))
    assert chips.num_points.sum() == sum(map(len, labels.values()))


def test_missing_is_masked_and_never_0_db(out: Path) -> None:
    chips = Chips(out / "train")
    hidden = 0
    for index in range(len(chips)):
        chip = chips.read(index)
        hidden += int((~chip.valid[0]).sum())
        # 0 is -40 dB to the model: darker than any sea. What is 0 dB would be 40 / 15.
        assert (chip.image[:2, ~chip.valid[0]] == 0).all()
        assert np.isfinite(chip.image).all()
    assert hidden > 1000


@pytest.mark.parametrize("missing", [0.0, NODATA])
def test_a_wind_that_is_missing_is_no_calm(data: Path, tmp_path: Path, missing: float) -> None:
    """It reads as 0 m/s. The mask of the radar knows nothing of it: it has values there."""
    folder = tmp_path / min(scene_folders(data, "train"))
    shutil.copytree(min(scene_folders(data, "train").values()), folder)
    with rasterio.open(folder / "owiWindSpeed.tif", "r+") as file:
        values = np.full(file.shape, 7.0, np.float32)
        values[:, : file.width // 2] = missing
        file.write(values, 1)

    def masks(*channels: str) -> tuple[Any, Any]:
        with Scene(folder, channels) as scene:
            whole = (0, SIZE[0]), (0, SIZE[1])
            radar = np.stack([scene.read(name, *whole) for name in radar_of(channels)])
            image, valid = model_view(channels, radar, scene.coarse, *whole)
        assert len(image) + len(valid) == planes_of(channels)
        return image, valid

    image, (of_radar, of_wind) = masks("vh", "wind_speed")
    assert of_wind.any() and (of_radar & ~of_wind).any()
    assert np.allclose(image[1], np.where(of_wind, 7 / 20, 0))
    _, (alone,) = masks("vh")
    np.testing.assert_array_equal(alone, of_radar)
    _, (_, of_both) = masks("wind_speed", "vv", "bathymetry")
    assert not (of_both & ~of_wind).any()


def test_a_scene_smaller_than_a_chip_is_one_chip_with_a_mask(tmp_path: Path) -> None:
    write_data_set(tmp_path / "d", (90, 100), scenes=2, validation=1, objects=2, tiff="strips",
                   seed=0)  # fmt: skip
    assert main(words_of(tmp_path / "d", tmp_path / "c", "--overlap", "16")) == 0
    chips = Chips(tmp_path / "c" / "train")
    assert len(chips) == 1
    chip = chips.read(0)
    assert chip.core == (0, 90, 0, 100) and chip.offset == (0, 0)
    assert not chip.valid[:, 90:].any() and not chip.valid[:, :, 100:].any()
    assert (chip.image[:, 90:] == 0).all()


def test_few_files_and_a_store_that_others_read(out: Path) -> None:
    zarr = pytest.importorskip("zarr")
    chips = Chips(out / "train")
    for name in chips.scenes:
        array = zarr.open_array(out / "train" / name / "chips.zarr", mode="r")
        assert array.shape == (4, 5, 2, CHIP, CHIP) and array.dtype == np.float16
        ts = pytest.importorskip("tensorstore")
        spec = {"driver": "zarr3", "kvstore": f"file://{out / 'train' / name / 'chips.zarr'}/"}
        again = ts.open(spec, open=True).result().read().result()
        np.testing.assert_array_equal(array[:], again)
        chunks = [path for path in (out / "train" / name).rglob("c/**/*") if path.is_file()]
        assert len(chunks) == 4  # a shard is a row of chips
        raw = (array[1, 2].astype(np.float32) + 40) / 15
        index = [chips.scene_of(i) for i in range(len(chips))].index(name) + 7
        np.testing.assert_allclose(chips.read(index).image[:2], np.nan_to_num(raw), atol=1e-6)


def test_the_order_is_the_same_for_any_hash_seed(out: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.data.scenes.chips import Chips\n"
        "c = Chips(Path(sys.argv[1])); print([c.read(i).offset for i in range(len(c))],"
        "[c.scene_of(i) for i in range(len(c))])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code, str(out / "train")],
            check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(said) == 1


def test_chips_go_to_another_process_and_through_a_fork(out: Path) -> None:
    chips = Chips(out / "val")
    first = chips.read(3)
    again = pickle.loads(pickle.dumps(chips)).read(3)
    np.testing.assert_array_equal(first.image, again.image)
    # In a process of its own: TensorStore is in this one, and ends what forks.
    code = (
        "import os, sys; from pathlib import Path; from penstock.data.scenes.chips import Chips\n"
        "chips = Chips(Path(sys.argv[1])); mean = chips.read(3).image.mean()\n"
        "if not (child := os.fork()): os._exit(chips.read(3).image.mean() != mean)\n"
        "sys.exit(os.waitpid(child, 0)[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(out / "val")], check=True, timeout=60)


# --- all or nothing --------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_done_is_not_done_again(
    data: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(out)
    assert main(words_of(data, out, "--overlap", str(OVERLAP))) == 0
    assert "2 scenes were done before" in capsys.readouterr().out
    after = everything(out)
    for name, (when, what) in before.items():
        assert after[name][1] == what
        assert "index.json" in name or after[name][0] == when


def test_results_do_not_depend_on_workers(data: Path, out: Path, tmp_path: Path) -> None:
    words = words_of(data, tmp_path, "--overlap", str(OVERLAP))
    words[words.index("--num_workers") + 1] = "1"
    assert main(words) == 0
    one, two = everything(tmp_path), everything(out)
    assert {name: what for name, (_, what) in one.items()} == {
        name: what for name, (_, what) in two.items()
    }


def test_a_scene_without_a_manifest_is_done_again_and_the_others_are_not(
    data: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a killed run leaves it: chips half written, no manifest, no index."""
    shutil.copytree(out, tmp_path / "c")
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
    assert shard.read_bytes() == (out / "train" / shard.relative_to(train)).read_bytes()
    np.testing.assert_array_equal(Chips(train).read(0).image, Chips(out / "train").read(0).image)


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

    monkeypatch.setattr(penstock.data.scenes.preprocess, "read_row", dies)
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


def test_a_killed_run_resumes_to_the_same_bytes(data: Path, out: Path, tmp_path: Path) -> None:
    words = words_of(data, tmp_path, "--overlap", str(OVERLAP))
    run = subprocess.Popen([sys.executable, "-m", "penstock", *words], stderr=subprocess.DEVNULL)
    while run.poll() is None and not list(tmp_path.glob("train/*/chips.zarr/c/1")):
        time.sleep(0.002)
    run.kill()
    run.wait()
    assert main(words) == 0
    one, two = everything(tmp_path), everything(out)
    assert {name: what for name, (_, what) in one.items()} == {
        name: what for name, (_, what) in two.items()
    }


def test_a_folder_that_is_half_replaced_is_refused(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out / "train", tmp_path / "c")
    path = sorted(tmp_path.glob("c/*/manifest.json"))[1]
    path.write_text(json.dumps({**json.loads(path.read_text()), "overlap": 8}))
    with pytest.raises(UsageError, match=r"is of other settings than .* was not finished"):
        Chips(tmp_path / "c")
    path.unlink()
    with pytest.raises(UsageError, match=r"manifest\.json cannot be read: .*No such file"):
        Chips(tmp_path / "c")


@pytest.mark.parametrize(
    ("more", "what"),
    [(["--overlap", "16"], "overlap"), (["--channels", "vh"], "channels")],
)
def test_chips_of_other_settings_are_not_taken_for_these(
    more: list[str],
    what: str,
    data: Path,
    out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(out, tmp_path / "c")
    words = words_of(data, tmp_path / "c", "--overlap", str(OVERLAP), *more)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"was made with other {what}; use --overwrite-preproc to replace it" in err
    assert main([*words, "--overwrite_preproc"]) == 0
    assert Chips(tmp_path / "c" / "train").channels == (("vh",) if what == "channels" else NAMES)


def test_a_raster_that_changed_is_cut_again_only_when_told(
    data: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data, tmp_path / "d")
    assert main(words_of(tmp_path / "d", tmp_path / "c", "--overlap", "8")) == 0
    next((tmp_path / "d" / "train").glob("*/VH_dB.tif")).touch()
    assert main(words_of(tmp_path / "d", tmp_path / "c", "--overlap", "8")) == 2
    assert "was made with other inputs" in capsys.readouterr().err


def test_rows_of_one_scene_leave_the_others_done(
    data: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scene is its own labels, wherever in the file they stand."""
    shutil.copytree(out, tmp_path / "c")
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
        (no_tiff, "bathymetry.tif is no raster that can be read"),
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


def test_folders_that_hold_no_chips_are_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no chips: there is no index\.json"):
        Chips(tmp_path)
    (tmp_path / "index.json").write_text('{"format": "something else"}')
    with pytest.raises(UsageError, match="is not of a folder of chips"):
        Chips(tmp_path)
    index = json.loads((out / "train" / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "version": 9}))
    with pytest.raises(UsageError, match="is of version 9; known is 1"):
        Chips(tmp_path)
    shutil.copytree(out / "train", tmp_path / "c")
    for path in (tmp_path / "c").rglob("c/**/*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match=r"chips\.zarr cannot be read at chip 0, 0"):
        Chips(tmp_path / "c").read(0)


# --- the layout of the reference -------------------------------------------------------------


def test_the_references_layout_is_its_files(data: Path, tmp_path: Path) -> None:
    """Against its method done plainly: enlarge, pad with 0, cut."""
    assert main(words_of(data, tmp_path, "--layout", "reference")) == 0
    train = tmp_path / "train"
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


def test_the_references_annotations_say_unknown_where_it_said_fishing(
    data: Path, tmp_path: Path
) -> None:
    assert main(words_of(data, tmp_path, "--layout", "reference")) == 0
    classes = {("True", "True"): "1", ("True", "False"): "2", ("False", ""): "3",
               ("True", ""): "", ("", ""): ""}  # fmt: skip
    with (tmp_path / "train" / "train_chip_annotations.csv").open(newline="") as file:
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
    with (tmp_path / "val" / "val_chip_annotations.csv").open(newline="") as file:
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
        found = {"time": "2026-01-01", "machine": "m", "load": 0.0, "size": [9, 9], "chip": 3,
                 "tiff": "strips", "launches": launches}  # fmt: skip
        return "\n".join(bench["lines_of"](found))

    assert "NOT MET" not in report(1.0, 2**25)
    told = report(5.0, 1).splitlines()
    assert "| reference | 100 | 10 | 10 | 5 | 1 |" in told[5]
    assert (
        told[11] == "- as scenes, with 1.5 times the chips by overlap, it is 2 [2 - 2], 1 rounds."
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


# --- what is kept of a value --------------------------------------------------------------------


def test_rounding_is_told_and_dtype_keeps_all(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(data, tmp_path / "d"))
    for path in data.glob("*/*/V?_dB.tif"):  # as 32-bit floats, and not those that 16 bits hold
        with rasterio.open(path) as file:
            profile, values = file.profile, file.read(1).astype(np.float32)
        values[values != NODATA] += np.float32(1e-5)
        with rasterio.open(path, "w", **{**profile, "dtype": "float32"}) as file:
            file.write(values, 1)
    words = words_of(data, tmp_path / "c", "--overlap", "0")
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "float32; chips keep them as float16" in told and "--dtype float32 keeps all" in told
    assert main([*words, "--dtype", "float32"]) == 2
    assert "was made with other dtype" in capsys.readouterr().err
    assert main([*words, "--dtype", "float32", "--overwrite-preproc"]) == 0
    assert "keep them as" not in capsys.readouterr().out
    chips = Chips(tmp_path / "c" / "train")
    name = chips.scenes[0]
    with Scene(scene_folders(data, "train")[name], NAMES) as scene:
        values = scene.read("vv", (0, CHIP), (0, CHIP))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(chips._radar(name, 0, 0)[1], values)
    assert main(words) == 2  # what is there is of more bits than is asked for
    zarr = pytest.importorskip("zarr")
    array = zarr.open_array(tmp_path / "c" / "train" / name / "chips.zarr", mode="r")
    np.testing.assert_array_equal(array[0, 0, 1], values)


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
    assert f"{name}: what is there is not known as Penstock's" in capsys.readouterr().err
    assert mine.read_text() == "what a user wrote"
    assert main([*words, "--replace"]) == 0
