"""Components by blocks: the values of scipy and cc3d on the whole, whatever the blocks."""

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage

from penstock.base import LabelConfig, PenstockError, UsageError, build
from penstock.cli import main
from penstock.data import open_source
from penstock.inference import Labelling, LabelSummary
from penstock.inference.objects.components import labelled

from ..later import imported_later
from ..parameters import slowly

cc3d = imported_later("cc3d")
parquet = imported_later("pyarrow.parquet")
zarr = imported_later("zarr")

ORDER = {4: 1, 8: 2, 6: 1, 18: 2, 26: 3}
"""The order of scipy's structure of each connectivity."""
COMPLEMENT = {4: 2, 8: 1, 6: 3, 18: 1, 26: 1}


def by_parts(asked: Mapping[str, Any], counts: Iterator[int]) -> LabelSummary:
    """Label as the elements of arrays do: in any order, and some of them twice."""
    config = build(LabelConfig, asked)

    def step(**words: Any) -> LabelSummary | None:
        return Labelling(config.model_copy(update={"overwrite": False, **words})).step()[1]

    step(prepare=True, overwrite=True)
    while True:
        parts = next(counts)
        elements = [*range(1, parts + 1), parts]
        for element in elements[parts // 2 :] + elements[: parts // 2]:
            step(part=f"{element}/{parts}")
        if (summary := step(finish=True)) is not None:
            return summary


def label(
    folder: Path, array: NDArray[Any], counts: Iterator[int] | None = None, **knobs: Any
) -> tuple[NDArray[Any], LabelSummary, Labelling]:
    place, out = folder / "in.npy", folder / "out.zarr"
    if not place.exists() or not np.array_equal(np.load(place), array, equal_nan=True):
        np.save(place, array)
    asked: Mapping[str, Any] = {
        "in_spec": str(place), "out_spec": str(out), "overwrite": True, "workers": 1,
        "levels": "none", "chunks": (4, 4, 4), "block": (4, 4, 4), **knobs,
    }  # fmt: skip
    labelling = Labelling(build(LabelConfig, asked))
    summary = labelling.run() if counts is None else by_parts(asked, counts)
    values = open_source(str(out)).read(labelling.source.domain)
    return values[0, 0].reshape(array.shape), summary, labelling


def scipys(mask: NDArray[Any], connectivity: int) -> NDArray[Any]:
    structure = ndimage.generate_binary_structure(mask.ndim, ORDER[connectivity])
    return ndimage.label(mask, structure)[0]


def spiral(side: int) -> NDArray[np.bool_]:
    """One object that winds through every block."""
    plane = np.zeros((side, side), bool)
    low, high = 0, side - 1
    while low < high:
        plane[low, low:] = plane[low:, high] = plane[high, low : high + 1] = True
        plane[low + 2 : high + 1, low] = True
        plane[low, high + 1 :] = plane[high + 1 :, high] = False
        low, high = low + 2, high - 2
    mask = np.zeros((side, side, side), bool)
    mask[::2] = plane
    mask[1::2, 0, side - 1] = True
    return mask


def shapes() -> dict[str, NDArray[np.bool_]]:
    z, y, x = np.indices((5, 6, 7))
    corners = np.zeros((8, 8, 8), bool)
    corners[3:5, 3:5, 3:5] = [[[1, 0], [0, 1]], [[0, 1], [1, 0]]]
    comb = np.zeros((9, 9, 9), bool)
    comb[:, ::2] = True
    comb[8] = True
    return {
        "nothing": np.zeros((5, 6, 7), bool),
        "all": np.ones((9, 5, 6), bool),
        "a board": (z + y + x) % 2 == 0,
        "corners": corners,
        "a comb": comb,
        "a spiral": spiral(9),
        "single voxels": (z % 2 + y % 2 + x % 2) == 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("connectivity", [6, 18, 26])
def test_adversarial_volumes_have_the_labels_of_scipy(tmp_path, connectivity: int) -> None:
    for name, mask in shapes().items():
        got, summary, _ = label(tmp_path, mask, connectivity=connectivity)
        wanted = scipys(mask, connectivity)
        np.testing.assert_array_equal(got, wanted, name)
        assert summary.objects == wanted.max()


def check_random(folder: Path, seed: int, *, in_parts: bool = False) -> None:
    rng = np.random.default_rng(seed)
    counts = iter(np.random.default_rng(seed).integers(1, 6, 9).tolist()) if in_parts else None
    flat = rng.random() < 0.3
    shape = tuple(int(n) for n in rng.integers(1, 14, 2 if flat else 3))
    mask = rng.random(shape) < rng.uniform(0.1, 0.7)
    connectivity = int(rng.choice([4, 8] if flat else [6, 18, 26]))
    block = tuple(int(n) for n in 2 * rng.integers(1, 5, 3))
    fill, least, clear = bool(rng.integers(2)), int(rng.integers(1, 5)), bool(rng.integers(2))
    got, *_ = label(
        folder, mask, counts, connectivity=connectivity, chunks=(2, 2, 2), block=block,
        fill_holes=fill,
        min_size=least, clear_border=clear,
    )  # fmt: skip
    if fill:
        around = ndimage.generate_binary_structure(mask.ndim, COMPLEMENT[connectivity])
        mask = ndimage.binary_fill_holes(mask, around)
    labels = scipys(mask, connectivity)
    stays = np.bincount(labels.ravel()) >= least
    if clear:
        for axis in range(mask.ndim):
            stays[np.take(labels, [0, -1], axis)] = False
    stays[0] = False
    dense = np.cumsum(stays) * stays
    np.testing.assert_array_equal(got, dense[labels])


@pytest.mark.slow
@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=476)  # a row of one voxel, by diagonal neighbours
def test_any_mask_blocks_and_filters(tmp_path_factory: Any, seed: int) -> None:
    check_random(tmp_path_factory.mktemp("law"), seed)


@pytest.mark.slow
def test_fifty_random_grids_by_parts(tmp_path) -> None:
    for seed in range(50):
        check_random(tmp_path, seed, in_parts=True)


@pytest.mark.parametrize("block", [(4, 4, 4), slowly(((8, 4, 12),))])
def test_equal_values_have_the_labels_of_cc3d(tmp_path, block: tuple[int, ...]) -> None:
    values = np.random.default_rng(3).integers(0, 3, (11, 10, 13)).astype(np.uint16)
    got, _, labelling = label(tmp_path, values, connectivity=26, block=block)
    wanted = cc3d.connected_components(values, connectivity=26)
    _, first = np.unique(wanted, return_index=True)
    order = np.argsort(np.argsort(first[1:])) + 1
    np.testing.assert_array_equal(got, np.concatenate([[0], order])[wanted])
    assert labelling.taken == "voxels of equal value"


def test_a_number_beyond_63_bits_is_a_label() -> None:
    labels, count = labelled(np.array([[[0, 2**63]]], np.uint64), 6)
    assert count == 1 and labels.tolist() == [[[0, 1]]]


@pytest.mark.slow
def test_scores_times_and_channels_are_labelled_each_by_itself(tmp_path) -> None:
    scores = np.random.default_rng(5).random((2, 2, 6, 7, 8)).astype(np.float32)
    place, out = tmp_path / "in.npy", tmp_path / "out.zarr"
    np.save(place, scores)
    words = ["label", str(place), str(out), "--threshold", "0.7", "--chunks", "4", "4", "4"]
    words += ["--connectivity", "18"]
    assert main([*words, "--block", "4", "4", "4", "--workers", "1"]) == 0
    got = open_source(str(out))
    within = np.zeros((3,) * 5)
    within[1, 1] = ndimage.generate_binary_structure(3, 2)
    wanted, count = ndimage.label(scores > 0.7, within)
    np.testing.assert_array_equal(got.read(got.domain), wanted)
    assert got.dtype == np.min_scalar_type(count)


def test_the_table_has_what_scipy_measures(tmp_path) -> None:
    rng = np.random.default_rng(7)
    mask = ndimage.gaussian_filter(rng.standard_normal((10, 11, 12)), 1) > 0.1
    image = rng.integers(0, 500, (2, *mask.shape)).astype(np.uint16)
    np.save(tmp_path / "image.npy", image)
    table = tmp_path / "t.parquet"
    knobs = {"table": table, "intensity": str(tmp_path / "image.npy")}
    _, summary, labelling = label(tmp_path, mask, **knobs)
    bytes_of = table.read_bytes()
    rows = parquet.read_table(table).to_pydict()
    labels = scipys(mask, 6)
    index = range(1, summary.objects + 1)
    assert rows["id"] == [*index] and labelling.source.scale is None
    assert rows["voxels"] == np.bincount(labels.ravel())[1:].tolist()
    centroids = np.array([rows[axis] for axis in "zyx"]).T
    np.testing.assert_allclose(centroids, ndimage.center_of_mass(mask, labels, index))
    boxes = [[(rows[f"{axis}0"][n], rows[f"{axis}1"][n]) for axis in "zyx"] for n in range(3)]
    assert boxes == [[(s.start, s.stop) for s in each] for each in ndimage.find_objects(labels)[:3]]
    np.testing.assert_allclose(rows["mean_1"], ndimage.mean(image[1], labels, index))
    np.testing.assert_array_equal(rows["max_0"], ndimage.maximum(image[0], labels, index))
    surface = np.zeros(summary.objects + 1)
    padded = np.pad(labels, 1)
    for axis in range(3):
        ahead = np.moveaxis(padded, axis, 0)
        for side in (ahead[1:], ahead[:-1]):
            surface += np.bincount(side[ahead[1:] != ahead[:-1]], minlength=len(surface))
    assert rows["surface"] == surface[1:].tolist()
    label(tmp_path, mask, **knobs, block=(8, 12, 16))
    assert table.read_bytes() == bytes_of


@pytest.mark.slow
def test_processes_write_what_one_writes(tmp_path) -> None:
    mask = np.random.default_rng(11).random((20, 20, 20)) < 0.3
    one, *_ = label(tmp_path, mask)
    got, _, labelling = label(tmp_path, mask, workers=3)
    np.testing.assert_array_equal(got, one)
    others = list[int]()
    labelling.run(lambda voxels: others.append(len(multiprocessing.active_children())))
    assert max(others) == 2  # this process is one of three


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--workers 2", "--cluster local:1"])
def test_a_script_may_start_processes_without_a_guard(tmp_path, words: str) -> None:
    """They do not run it again, as Python does if it asks not for the name ``__main__``."""
    np.save(tmp_path / "in.npy", np.eye(20, dtype=bool))
    asked = f"label in.npy out.zarr --chunks 4 4 --block 4 4 --levels none {words}".split()
    script = f"from penstock.cli import main\nraise SystemExit(main({asked}))\n"
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.count("objects ") == 1, done.stderr


@pytest.mark.parametrize(
    ("array", "knobs", "sentence"),
    [
        (np.ones((3, 3, 3), "f4"), {}, "holds float32; --threshold X"),
        (np.full((3, 3, 3), np.nan, "f4"), {"threshold": 0}, "0 0 0 is NaN, .* --nan-background"),
        (np.ones((3, 3), "u1"), {"connectivity": 26}, "does not fit the axes y x; give 4 or 8"),
        (np.ones((3, 3, 3), "u1"), {"connectivity": 8}, "give 6 or 18 or 26"),
        (
            np.eye(300, dtype="u1"),
            {"dtype": "uint8", "chunks": (99, 99), "block": (99, 99)},
            "not hold 300 objects",
        ),
        (np.ones((3, 3, 3), "u2"), {"fill_holes": True}, "give --no-equal"),
        (
            np.ones((9, 9, 9), "u1"),
            {"block": (5, 4, 4)},
            "--block 5 4 4: .* 4 x 4 x 4 voxels, z y x; give .* 8 4 4",
        ),
        (np.ones((3, 3, 3), "u1"), {"max_memory": 2**20}, "take 130 MiB, and --max-memory allows"),
        (np.ones((3, 3), "u1"), {"table": Path("a.xls")}, "ends in .parquet or .csv"),
        (np.ones((3, 3), "u1"), {"object_size": 5}, "--object-size has no effect with components"),
    ],
)
def test_what_cannot_be_labelled_is_refused(tmp_path, array, knobs, sentence) -> None:
    with pytest.raises(UsageError, match=sentence) as error:
        label(tmp_path, array, **knobs)
    assert isinstance(error.value, PenstockError)
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize(
    ("shape", "knobs", "sentence"),
    [
        ((3, 3, 4), {}, "has t z y x 1 x 3 x 3 x 4, and the input has 1 x 3 x 3 x 3"),
        ((3, 3, 3), {"channels": (1,)}, "--channels 1: .* has 1"),
    ],
)
def test_an_image_of_another_grid_is_refused(tmp_path, shape, knobs, sentence) -> None:
    np.save(tmp_path / "image.npy", np.ones(shape, np.uint16))
    asked = {"table": tmp_path / "t.csv", "intensity": str(tmp_path / "image.npy"), **knobs}
    with pytest.raises(UsageError, match=sentence):
        label(tmp_path, np.ones((3, 3, 3), np.uint8), **asked)
    assert {each.name for each in tmp_path.iterdir()} == {"image.npy", "in.npy"}


def test_what_a_file_says_of_its_numbers_is_told(tmp_path, capsys) -> None:
    array = zarr.create_array(tmp_path / "in.zarr", data=np.eye(9, dtype="i2"))
    array.attrs["scale_factor"] = 0.5
    words = ["label", str(tmp_path / "in.zarr"), str(tmp_path / "out.zarr"), "--threshold", "0.4"]
    assert main(words) == 0
    assert "note      the input's attributes say value = 0.5 * stored" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["run_dir", "table"])
def test_a_file_within_the_output_is_refused(tmp_path, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag.replace('_', '-')} .* lies inside the output"):
        label(tmp_path, np.ones((3, 3, 3), bool), **{flag: tmp_path / "out.zarr" / "a.csv"})
    assert [each.name for each in tmp_path.iterdir()] == ["in.npy"]


def test_the_image_of_a_table_is_not_overwritten(tmp_path) -> None:
    mask = np.ones((3, 3, 3), bool)
    label(tmp_path, mask)
    asked = {"table": tmp_path / "t.csv", "intensity": str(tmp_path / "out.zarr")}
    with pytest.raises(UsageError, match="is the image of --intensity, or one lies in the other"):
        label(tmp_path, ~mask, **asked)
    labels = open_source(str(tmp_path / "out.zarr"))
    assert labels.read(labels.domain).all()


def test_an_output_that_exists_stays(tmp_path) -> None:
    mask = np.ones((3, 3, 3), bool)
    label(tmp_path, mask)
    with pytest.raises(UsageError, match="exists; use --overwrite"):
        label(tmp_path, mask, overwrite=False)
    labels = open_source(str(tmp_path / "out.zarr"))
    assert labels.read(labels.domain).all()
