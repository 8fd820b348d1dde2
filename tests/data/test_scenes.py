"""xView3 scenes: made, written, read by windows, refused where they are broken."""

import csv
import functools
import itertools
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data import CHANNELS, Objects, Scene, channels_of, read_shoreline, scene_folders
from penstock.data.scenes.objects import COLUMNS, NO_SHORE_KM, read_labels
from penstock.data.scenes.rasters import NODATA, is_missing
from penstock.data.scenes.synthetic import APART, STRIP, TIFF, SyntheticScene, write_scene

from .kit import SIZE

if not all(map(find_spec, ("rasterio", "contourpy", "tifffile", "scipy"))):
    pytest.skip("a library of scenes is not installed", allow_module_level=True)

COASTAL = 2  # a seed with land


@pytest.fixture(scope="module")
def folder(data: Path) -> Path:
    return next(iter(scene_folders(data, "train").values()))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str], Path]:
    """A scene of 530 x 310 pixels, by how its pixels lie in their files; not to be changed."""

    @functools.cache
    def write(tiff: str) -> Path:
        folder = tmp_path_factory.mktemp(tiff) / "s"
        write_scene(folder, SyntheticScene((530, 310), 1, 3), tiff)
        return folder

    return write


def pixels(scene: SyntheticScene) -> tuple[np.ndarray, np.ndarray]:
    strips = list(scene.strips())
    return (np.concatenate([strip[1] for strip in strips]),
            np.concatenate([strip[2] for strip in strips]))  # fmt: skip


def test_a_scene_is_the_same_from_the_same_seed_and_another_from_another() -> None:
    first, again, other = (pixels(SyntheticScene((300, 260), seed, 5)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert first[0].shape == first[1].shape == (300, 260)
    assert np.nanmax(np.abs(first[0] - other[0])) > 1


def test_targets_shine_where_they_are_said_to_be() -> None:
    scene = SyntheticScene((900, 900), COASTAL, 20)
    _, vv = pixels(scene)
    assert len(scene.targets) == 20
    bright = 0
    for target in scene.targets:
        row, column = round(target.row), round(target.column)
        near = vv[max(row - 3, 0) : row + 4, max(column - 3, 0) : column + 4]
        around = vv[max(row - 20, 0) : row + 21, max(column - 20, 0) : column + 21]
        bright += bool(np.nanmax(near) > np.nanmedian(around) + 5)
    assert bright >= 17
    spots = np.array([(target.row, target.column) for target in scene.targets])
    apart = np.hypot(*(spots[:, None] - spots[None]).transpose(2, 0, 1))
    assert apart[~np.eye(len(spots), dtype=bool)].min() >= APART


def test_a_strip_border_leaves_no_seam_in_a_target() -> None:
    """A target drawn in two strips is the one drawn in a single one."""
    scene = SyntheticScene((2 * STRIP, 300), 5, 1)
    (target,) = scene.targets
    parts = []
    for first, stop in ((0, 2 * STRIP), (0, STRIP), (STRIP, 2 * STRIP)):
        vv, vh = (np.ones((stop - first, 300), np.float32) for _ in range(2))
        scene._draw(target, first, vv, vh)
        parts.append(vv)
    np.testing.assert_array_equal(parts[0], np.concatenate(parts[1:]))
    assert parts[0].max() > 1


def test_the_data_set_is_laid_out_as_the_real_one(data: Path) -> None:
    for split, scenes in (("train", 2), ("validation", 1)):
        folders = scene_folders(data, split)  # type: ignore[arg-type]
        assert len(folders) == scenes
        labels = read_labels(data / "labels" / f"{split}.csv")
        assert labels.keys() == folders.keys()
        for name, path in folders.items():
            assert len(name) == 17 and name[-1] == split[0] and int(name[:16], 16) >= 0
            assert {file.name for file in path.iterdir()} == {c.file for c in CHANNELS.values()}
            labels[name].check_inside(SIZE, path)
            lines = read_shoreline(data / "shoreline" / f"{name}_shoreline.npy")
            if not lines:
                assert (labels[name].shore_km == NO_SHORE_KM).all()
                continue
            # The distances of the labels are those to the nearest vertex.
            spots, vertices = labels[name].points, np.concatenate(lines)
            nearest = np.hypot(*(spots[:, None] - vertices).transpose(2, 0, 1)).min(axis=1)
            np.testing.assert_allclose(labels[name].shore_km, nearest * 0.01, atol=0.02)
    with (data / "labels" / "train.csv").open(newline="") as file:
        assert next(csv.reader(file)) == COLUMNS


def test_rasters_have_the_real_ones_pixels_places_and_bits(folder: Path) -> None:
    import rasterio
    import tifffile

    with rasterio.open(folder / "VH_dB.tif") as fine, rasterio.open(folder / "owiMask.tif") as mask:
        assert fine.shape == SIZE and fine.nodata == NODATA
        assert fine.transform.a == 10 and mask.transform.a == 500
        assert fine.crs == mask.crs and fine.crs.to_epsg() // 100 in (326, 327)
        assert mask.shape == (7, 10)
    with tifffile.TiffFile(folder / "VH_dB.tif") as tiff:
        assert tiff.pages[0].dtype == np.float16


def test_labels_lie_on_earth_where_the_raster_says(data: Path, folder: Path) -> None:
    with (data / "labels" / "train.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["scene_id"] == folder.name)
    import rasterio
    from rasterio.warp import transform

    with rasterio.open(folder / "VH_dB.tif") as fine:
        east, north = transform(
            "EPSG:4326", fine.crs, [float(row["detect_lon"])], [float(row["detect_lat"])]
        )
        place = fine.index(east[0], north[0])
    assert abs(place[0] - int(row["detect_scene_row"])) <= 1
    assert abs(place[1] - int(row["detect_scene_column"])) <= 1


@given(rows=st.tuples(st.integers(0, 329), st.integers(1, 200)),
       columns=st.tuples(st.integers(0, 469), st.integers(1, 200)),
       name=st.sampled_from(sorted(CHANNELS)))  # fmt: skip
def test_a_window_is_a_piece_of_the_whole(folder, rows, columns, name) -> None:
    """Wherever it lies: no seam between windows that are read one by one."""
    window = (rows[0], min(sum(rows), SIZE[0])), (columns[0], min(sum(columns), SIZE[1]))
    with Scene(folder, (name,)) as scene:
        whole_scene = scene.read(name, (0, SIZE[0]), (0, SIZE[1]))
        part = scene.read(name, *window)
    np.testing.assert_allclose(
        part, whole_scene[slice(*window[0]), slice(*window[1])], rtol=1e-5, atol=1e-3
    )


def coarse_scene(folder: Path, name: str, values: np.ndarray, size: tuple[int, int]) -> None:
    """A scene whose radar is flat and whose coarse raster ``name`` holds ``values``."""
    import rasterio

    common = {"driver": "GTiff", "count": 1, "dtype": "float32", "nodata": NODATA,
              "crs": "EPSG:32631"}  # fmt: skip
    folder.mkdir(exist_ok=True)
    for file, array, pixel, west in (
        ("VH_dB.tif", np.zeros(size, np.float32), 10, 500_000.0),
        (CHANNELS[name].file, values, 500, 500_000.0),
    ):
        place = rasterio.Affine(pixel, 0, west, 0, -pixel, 4_000_000.0)
        with rasterio.open(folder / file, "w", height=array.shape[0], width=array.shape[1],
                           transform=place, **common) as out:  # fmt: skip
            out.write(array.astype(np.float32), 1)


def test_a_coarse_raster_is_interpolated_between_its_centres(tmp_path) -> None:
    from scipy import ndimage

    values = np.random.default_rng(0).normal(size=(5, 6)) * 100
    coarse_scene(tmp_path, "bathymetry", values, (230, 290))
    with Scene(tmp_path, ("vh", "bathymetry")) as scene:
        pixels = scene.read("bathymetry", (20, 200), (37, 280))
    at = np.meshgrid((np.arange(20, 200) + 0.5) / 50 - 0.5, (np.arange(37, 280) + 0.5) / 50 - 0.5,
                     indexing="ij")  # fmt: skip
    oracle = ndimage.map_coordinates(values, at, order=1, mode="nearest")
    np.testing.assert_allclose(pixels, oracle, rtol=1e-4, atol=1e-3)


def test_what_is_missing_is_not_spread_and_not_made_up(tmp_path) -> None:
    values = np.full((4, 4), 8.0)
    values[1, 2] = NODATA
    coarse_scene(tmp_path, "wind_speed", values, (200, 200))
    with Scene(tmp_path, ("wind_speed",)) as scene:
        pixels = scene.read("wind_speed", (0, 200), (0, 200))
    lost = is_missing(pixels)
    assert lost[75, 125] and not lost[:40].any() and not lost[:, :90].any()
    assert 0.3 * 2500 < lost.sum() < 1.5 * 2500
    np.testing.assert_allclose(pixels[~lost], 8, rtol=1e-6)
    values[1, 2] = 0  # how wind speeds say that they are not known
    coarse_scene(tmp_path, "wind_speed", values, (200, 200))
    with Scene(tmp_path, ("wind_speed",)) as scene:
        np.testing.assert_array_equal(scene.read("wind_speed", (0, 200), (0, 200)), pixels)


def test_directions_go_round_and_classes_stay_classes(tmp_path) -> None:
    coarse_scene(tmp_path, "wind_direction", np.array([[350.0, 10.0]] * 2), (100, 100))
    coarse_scene(tmp_path, "mask", np.array([[0.0, 2.0]] * 2), (100, 100))
    with Scene(tmp_path, ("wind_direction", "mask")) as scene:
        direction = scene.read("wind_direction", (0, 100), (0, 100))
        mask = scene.read("mask", (0, 100), (0, 100))
    away = np.minimum(direction, 360 - direction)
    assert away.max() <= 10.01 and away[:, 49:51].max() < 0.5
    assert set(np.unique(mask)) == {0, 2}
    assert (mask[:, :50] == 0).all() and (mask[:, 50:] == 2).all()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbled(path: Path) -> None:
    path.write_bytes(b"this is not a TIFF")


DAMAGES = [
    ("VV_dB.tif", Path.unlink, "VV_dB.tif is missing"),
    ("bathymetry.tif", Path.unlink, "bathymetry.tif is missing"),
    ("VV_dB.tif", garbled, "VV_dB.tif is not a raster that can be read"),
    ("bathymetry.tif", cut_short, "bathymetry.tif "),
    ("VV_dB.tif", cut_short, "VV_dB.tif cannot be read at rows 0 to 530"),
]


@pytest.mark.parametrize(("case", "tiff"), [*zip(DAMAGES, itertools.cycle(TIFF))])
def test_a_damaged_raster_is_named_and_never_zeros(case, tiff, written, tmp_path) -> None:
    file, damage, sentence = case
    shutil.copytree(written(tiff), tmp_path / "s")
    damage(tmp_path / "s" / file)
    with pytest.raises(UsageError, match=sentence) as caught:  # noqa: SIM117
        with Scene(tmp_path / "s", ("vh", "vv", "bathymetry")) as scene:
            for name in scene.channels:
                scene.read(name, (0, 530), (0, 310))
    assert "\n" not in str(caught.value)


def test_channels_are_known_and_given_once() -> None:
    assert channels_of("vh, vv,mask") == ("vh", "vv", "mask")
    with pytest.raises(UsageError, match="there is no channel 'hh'; there are vh, vv, bathymetry"):
        channels_of("vh,hh")
    with pytest.raises(UsageError, match="vh is given twice"):
        channels_of("vh,vv,vh")
    with pytest.raises(UsageError, match="give vh or vv as well"):
        channels_of("bathymetry")


def write_csv(path: Path, rows: list[dict[str, str]], columns: list[str] = COLUMNS) -> Path:
    plain = dict.fromkeys(columns, "") | {
        "scene_id": "a", "detect_scene_row": "3", "detect_scene_column": "4", "confidence": "HIGH",
    }  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**plain, **row} for row in rows)
    return path


def test_labels_keep_what_is_unknown_apart(tmp_path) -> None:
    path = write_csv(
        tmp_path / "labels.csv",
        [
            {"is_vessel": "True", "is_fishing": "False", "vessel_length_m": "12.5"},
            {"is_vessel": "True", "confidence": "low", "distance_from_shore_km": "9999.99"},
            {"scene_id": "0", "detect_scene_row": "7.0", "is_vessel": "nan"},
            {"is_vessel": "False", "confidence": "", "flag": "HR", "detect_id": "a_3"},
            {"scene_id": "b", "detect_scene_row": "", "detect_scene_column": "", "confidence": ""},
        ],
        ["", *COLUMNS, "flag"],  # the row numbers that pandas writes, and a column of our own
    )
    labels = read_labels(path)
    assert list(labels) == ["0", "a", "b"] and len(labels["b"]) == 0
    objects = labels["a"]
    assert objects.points.tolist() == [[3, 4]] * 3
    assert objects.is_vessel.tolist() == [1, 1, 0]
    assert objects.is_fishing.tolist() == [0, -1, -1]
    assert objects.confidence.tolist() == [2, 0, -1]
    assert objects.more.tolist() == [{}, {}, {"flag": "HR", "detect_id": "a_3"}]
    again = Objects.of("a", **objects.as_lists())
    assert (again.more == objects.more).all() and (again.confidence == objects.confidence).all()
    assert objects.lines.tolist() == [2, 3, 5]
    np.testing.assert_array_equal(objects.length_m, np.array([12.5, np.nan, np.nan]))
    np.testing.assert_array_equal(objects.shore_km, np.array([np.nan, 9999.99, np.nan]))
    assert labels["0"].points.tolist() == [[7, 4]]
    assert labels["0"].is_vessel.tolist() == [-1]


def test_a_label_that_is_there_twice_counts_once(tmp_path) -> None:
    rows = [{"is_vessel": "True"}, {"is_vessel": ""}, {"detect_scene_row": "9"}]
    path, said = write_csv(tmp_path / "labels.csv", [*rows, *rows[::2]]), list[str]()
    labels = read_labels(path, said.append)["a"]
    assert labels.lines.tolist() == [2, 3, 4]  # an object with another answer is another label
    (sentence,) = said
    assert sentence.endswith("already: 2, the first in line 5; each counts once")
    assert len(read_labels(path, once=False)["a"]) == 5
    twice = write_csv(tmp_path / "twice.csv", rows, [*COLUMNS, "confidence"])
    with pytest.raises(UsageError, match="has two columns confidence"):
        read_labels(twice)


def test_generate_writes_scenes_and_replaces_only_its_own(tmp_path, capsys) -> None:
    root = tmp_path / "x"
    words = ["generate", "xview3", str(root), "--scenes", "2", "--size", "80", "90",
             "--objects", "2", "--seed", "3"]  # fmt: skip
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "2 scenes of 80 x 90 pixels of 10 m" in out
    assert err.splitlines()[-1] == "2 of 2 scenes"
    (first,) = (path.name for path in (root / "train").iterdir())
    before = (root / "train" / first / "VH_dB.tif").read_bytes()
    assert main(words) == 2
    assert "use --overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert (root / "train" / first / "VH_dB.tif").read_bytes() == before
    (root / "notes.txt").write_text("mine")
    assert main([*words, "--overwrite"]) == 2
    assert "holds notes.txt beside its scenes" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    words[2] = str(tmp_path / "other")
    assert main([*words, "--overwrite"]) == 2
    assert "holds no synthetic scenes; nothing was removed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--size 8 80", "--size 8 80: each side must be at least 40"),
        ("--scenes 1", "--scenes '1': input should be greater than or equal to 2"),
        ("--scenes 2 --validation 2", "--validation 2 leaves none of --scenes 2 to train on"),
        ("--samples 2", "--samples belongs to a preset and --from, but this is xview3"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_2(words: str, sentence: str, tmp_path, capsys) -> None:
    assert main(["generate", "xview3", str(tmp_path / "x"), *words.split()]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1
