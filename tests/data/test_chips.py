"""Chips: each pixel and label owned once, values as the rasters have them."""

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data import ChipRecord, Chips, model_view, planes_of, read_labels, write_data_set
from penstock.data.scenes.rasters import NODATA
from penstock.data.scenes.scene import CHANNELS, Scene, radar_of, scene_folders

from .kit import CHIP, NAMES, SIZE, words_of

if not all(map(find_spec, ("rasterio", "contourpy", "numcodecs"))):
    pytest.skip("rasterio or numcodecs is not installed", allow_module_level=True)


def test_chips_hold_what_the_rasters_hold(data: Path, chipped: Path) -> None:
    import rasterio

    chips = Chips(chipped / "train")
    folders = scene_folders(data, "train")
    assert chips.channels == NAMES and chips.scenes == tuple(folders)
    seen = dict.fromkeys(folders, 0)
    radar, hidden = {}, 0
    for path in folders.values():
        for name in NAMES[:2]:
            with rasterio.open(path / CHANNELS[name].file) as file:
                radar[path, name] = file.read(1)
    with contextlib.ExitStack() as opened:
        scenes = {path: opened.enter_context(Scene(path, NAMES[2:])) for path in folders.values()}
        for index in range(len(chips)):
            chip = chips.read(index)
            path, (row, column), tall = folders[chip.scene], chip.offset, chip.image.shape[1]
            assert chip.image.shape == (4, CHIP, CHIP) and chip.image.dtype == np.float32
            window = (row, row + tall), (column, column + tall)
            valid = np.zeros(chip.image.shape, bool)
            for place, name in enumerate(NAMES):
                if CHANNELS[name].kind == "radar":
                    raw = radar[path, name][tuple(slice(*ends) for ends in window)].copy()
                    raw[raw == NODATA] = np.nan
                else:
                    raw = scenes[path].read(name, *window)
                scaled = (raw - CHANNELS[name].offset) / CHANNELS[name].scale
                expected = np.nan_to_num(scaled, nan=0.0)
                np.testing.assert_allclose(chip.image[place], expected, rtol=2e-3, atol=1e-5)
                valid[place] = ~np.isnan(raw)
                hidden += np.count_nonzero(~valid[place])
            masks = [valid[:2].all(axis=0), valid[2:].all(axis=0)]
            np.testing.assert_array_equal(chip.valid, masks)
            row0, row1, column0, column1 = chip.core
            seen[chip.scene] += (row1 - row0) * (column1 - column0)
    assert hidden > 1000
    # All of each scene is owned once, but for chips without a single valid pixel: here none.
    assert set(seen.values()) == {SIZE[0] * SIZE[1]}


def test_every_label_is_owned_once_and_seen_by_all_around_it(data: Path, chipped: Path) -> None:
    labels = read_labels(data / "labels" / "train.csv")
    chips = Chips(chipped / "train")
    owned: dict[str, list[tuple[float, float]]] = {name: [] for name in chips.scenes}
    for index in range(len(chips)):
        chip = chips.read(index)
        points, offset = chip.labels.points, np.array(chip.offset)
        row0, row1, column0, column1 = chip.core
        mine = [row0 <= row < row1 and column0 <= column < column1 for row, column in points]
        assert sum(mine) == chips.num_points[index]
        owned[chip.scene] += [tuple(point) for point in points[mine] + offset]
        of_scene = labels[chip.scene]
        inside = np.all((of_scene.points >= offset) & (of_scene.points < offset + CHIP), axis=1)
        np.testing.assert_array_equal(points + offset, of_scene.points[inside])
        for name in ("is_vessel", "is_fishing", "confidence", "length_m"):
            np.testing.assert_array_equal(
                getattr(chip.labels, name), getattr(of_scene, name)[inside]
            )
    for name, places in owned.items():
        assert sorted(places) == sorted(map(tuple, labels[name].points))
    assert chips.num_points.sum() == sum(map(len, labels.values()))


@pytest.mark.parametrize("missing", [0.0, NODATA])
def test_a_wind_that_is_missing_is_no_calm(data: Path, tmp_path, missing: float) -> None:
    """It reads as 0 m/s. The mask of the radar knows nothing of it: it has values there."""
    import rasterio

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
            record = ChipRecord.of(channels, SIZE[0], 0, "float16")
            image, valid = model_view(record, radar, scene.coarse, *whole)
        assert len(image) + len(valid) == planes_of(channels)
        return image, valid

    image, (of_radar, of_wind) = masks("vh", "wind_speed")
    assert of_wind.any() and (of_radar & ~of_wind).any()
    assert np.allclose(image[1], np.where(of_wind, 7 / 20, 0))
    _, (alone,) = masks("vh")
    np.testing.assert_array_equal(alone, of_radar)
    _, (_, of_both) = masks("wind_speed", "vv", "bathymetry")
    assert not (of_both & ~of_wind).any()


@pytest.mark.slow
def test_a_scene_smaller_than_a_chip_is_one_chip_with_a_mask(tmp_path) -> None:
    write_data_set(tmp_path / "d", (90, 100), scenes=2, validation=1, objects=2, tiff="strips",
                   seed=0)  # fmt: skip
    assert main(words_of(tmp_path / "d", tmp_path / "c", "--overlap", "16")) == 0
    chips = Chips(tmp_path / "c" / "train")
    assert len(chips) == 1
    chip = chips.read(0)
    assert chip.core == (0, 90, 0, 100) and chip.offset == (0, 0)
    assert not chip.valid[:, 90:].any() and not chip.valid[:, :, 100:].any()
    assert (chip.image[:, 90:] == 0).all()


def test_few_files_and_a_store_that_others_read(chipped: Path) -> None:
    zarr = pytest.importorskip("zarr")
    chips = Chips(chipped / "train")
    for name in chips.scenes:
        array = zarr.open_array(chipped / "train" / name / "chips.zarr", mode="r")
        assert array.shape == (4, 5, 2, CHIP, CHIP) and array.dtype == np.float16
        ts = pytest.importorskip("tensorstore")
        spec = {"driver": "zarr3", "kvstore": f"file://{chipped / 'train' / name / 'chips.zarr'}/"}
        again = ts.open(spec, open=True).result().read().result()
        np.testing.assert_array_equal(array[:], again)
        chunks = [path for path in (chipped / "train" / name).rglob("c/**/*") if path.is_file()]
        assert len(chunks) == 4  # a shard is a row of chips
        raw = (array[1, 2].astype(np.float32) + 40) / 15
        index = [chips.scene_of(i) for i in range(len(chips))].index(name) + 7
        np.testing.assert_allclose(chips.read(index).image[:2], np.nan_to_num(raw), atol=1e-6)


@pytest.mark.slow
def test_chips_are_the_same_in_another_process_and_through_a_fork(chipped: Path) -> None:
    """One with a hash seed of its own. TensorStore is in this one, and ends what forks."""
    chips = Chips(chipped / "val")
    first = chips.read(3)
    np.testing.assert_array_equal(first.image, pickle.loads(pickle.dumps(chips)).read(3).image)
    code = (
        "import os, sys; from pathlib import Path; from penstock.data.scenes.chips import Chips\n"
        "chips = Chips(Path(sys.argv[1])); mean = chips.read(3).image.mean()\n"
        "print([(chips.scene_of(i), chips.read(i).offset) for i in range(len(chips))])\n"
        "sys.stdout.flush()\n"
        "if not (child := os.fork()): os._exit(chips.read(3).image.mean() != mean)\n"
        "sys.exit(os.waitpid(child, 0)[1])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(chipped / "val")],
        check=True, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    here = [(chips.scene_of(i), chips.read(i).offset) for i in range(len(chips))]
    assert other.stdout == f"{here}\n"


def test_a_folder_that_is_half_replaced_is_refused(chipped: Path, tmp_path) -> None:
    shutil.copytree(chipped / "train", tmp_path / "c")
    path = sorted(tmp_path.glob("c/*/manifest.json"))[1]
    path.write_text(json.dumps({**json.loads(path.read_text()), "overlap": 8}))
    with pytest.raises(UsageError, match=r"is of other settings than .* was not finished"):
        Chips(tmp_path / "c")
    path.unlink()
    with pytest.raises(UsageError, match=r"manifest\.json cannot be read: .*No such file"):
        Chips(tmp_path / "c")


def test_folders_that_hold_no_chips_are_refused(chipped: Path, tmp_path) -> None:
    with pytest.raises(UsageError, match=r"has no chips: there is no index\.json"):
        Chips(tmp_path)
    (tmp_path / "index.json").write_text('{"format": "something else"}')
    with pytest.raises(UsageError, match="is not of a folder of chips"):
        Chips(tmp_path)
    index = json.loads((chipped / "train" / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "version": 9}))
    with pytest.raises(UsageError, match="is of version 9; this Penstock reads 3"):
        Chips(tmp_path)
    shutil.copytree(chipped / "train", tmp_path / "c")
    for path in (tmp_path / "c").rglob("c/**/*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match=r"chips\.zarr cannot be read at chip 0, 0"):
        Chips(tmp_path / "c").read(0)


def test_radar_that_is_not_in_decibels_is_noted(tmp_path, capsys) -> None:
    import rasterio

    data = tmp_path / "d"
    write_data_set(data, (CHIP, CHIP), scenes=2, validation=1, objects=2, tiff="strips", seed=0)
    (path,) = data.glob("train/*/VV_dB.tif")
    with rasterio.open(path, "r+") as file:
        values = file.read(1)
        file.write(np.where(values == NODATA, values, np.abs(values)), 1)
    assert main(words_of(data, tmp_path / "c", "--overlap", "0")) == 0
    (note,) = (line for line in capsys.readouterr().out.splitlines() if "in dB" in line)
    assert "train: 1 of 1 scene: VV_dB.tif has no value below 0, as the sea has in dB" in note


def test_rounding_is_told_and_dtype_keeps_all(tmp_path, capsys) -> None:
    import rasterio

    data = tmp_path / "d"
    write_data_set(data, (CHIP, CHIP), scenes=2, validation=1, objects=2, tiff="strips", seed=0)
    for path in data.glob("*/*/V?_dB.tif"):  # as 32-bit floats, and not those that 16 bits hold
        with rasterio.open(path) as file:
            profile, values = file.profile, file.read(1).astype(np.float32)
        values[values != NODATA] += np.float32(1e-5)
        with rasterio.open(path, "w", **{**profile, "dtype": "float32"}) as file:
            file.write(values, 1)
    words = words_of(data, tmp_path / "c", "--overlap", "0")
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "of 1 scene have more digits than float16" in output and "--dtype float32" in output
    assert main([*words, "--dtype", "float32"]) == 2
    assert "was made with other dtype" in capsys.readouterr().err
    assert main([*words, "--dtype", "float32", "--overwrite-preproc"]) == 0
    assert "more digits" not in capsys.readouterr().out
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
