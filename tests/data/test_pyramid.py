"""Levels against numpy on the whole array: odd shapes, kinds of values, kills, metadata."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data import Box, OutputLock, add_levels, open_sink, open_source, open_written, run_at
from penstock.data.levels import levels_below, reduced

from ..parameters import mainly, paired

ts = pytest.importorskip("tensorstore")
Array = NDArray[Any]
RNG = np.random.default_rng(0)


def image(path: Path, array: Array, **knobs: Any) -> str:
    """An OME-Zarr image of one level."""
    five = array.reshape((1,) * (5 - array.ndim) + array.shape)
    box = Box((0,) * 5, five.shape)
    sink = open_sink(str(path), domain=box, dtype=array.dtype, chunks=(4, 8, 8), **knobs)
    sink.create()
    sink.write(box, five)
    sink.close()
    return str(path)


def whole(path: str, level: int) -> Array:
    source = open_source(path, level=level)
    return source.read(source.domain)


def windows(array: Array, halved: tuple[int, ...], join: Any) -> Array:
    """The level below by a loop over its voxels."""
    out = np.empty([-(-n // by) for n, by in zip(array.shape, halved, strict=True)], array.dtype)
    for place in np.ndindex(*out.shape):
        cut = tuple(slice(i * by, i * by + by) for i, by in zip(place, halved, strict=True))
        out[place] = join(array[cut])
    return out


def mean(window: Array) -> Any:
    finite = window[~np.isnan(window)] if window.dtype.kind == "f" else window
    exact = finite.astype(np.float64).mean() if finite.size else np.nan
    return exact if window.dtype.kind == "f" else np.round(exact)


def mode(window: Array) -> Any:
    values, counts = np.unique(window, return_counts=True)
    return values[counts == counts.max()].min()


def values(dtype: str, shape: tuple[int, ...]) -> Array:
    if dtype.startswith("float"):
        array = RNG.normal(0, 9, shape).astype(dtype)
        array[RNG.random(shape) < 0.4] = np.nan
        return array
    top = 4 if dtype == "labels" else np.iinfo(dtype).max
    low = 0 if dtype == "labels" else np.iinfo(dtype).min
    dtype = "uint32" if dtype == "labels" else dtype
    return RNG.integers(low, top, shape, dtype=dtype, endpoint=True)


@pytest.mark.parametrize("shape", [(5, 7, 9), (4, 6, 8), (1, 3, 1), (1, 1, 1)])
@pytest.mark.parametrize(
    "dtype", ["uint8", "int16", "uint16", "int32", "uint32", "float32", "float64", "labels"]
)
def test_a_level_is_that_of_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    array, halved = values(dtype, shape), (2 if shape[0] > 1 else 1, 2, 2)
    join, rule = (mode, "mode") if dtype == "labels" else (mean, "mean")
    made = reduced(array, halved, rule)  # type: ignore[arg-type]
    assert made.dtype == array.dtype
    right = windows(array, halved, join)
    # Sums of float64 depend on their order, by bits of the values and not of a sum near 0.
    np.testing.assert_allclose(made, right, rtol=0, atol=1e-13 if dtype == "float64" else 0)
    alike = np.broadcast_to(array.flat[0], shape)
    of_one, of_many = (reduced(each, halved, rule) for each in (alike, alike.copy()))  # type: ignore[arg-type]
    np.testing.assert_array_equal(of_one, of_many)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_means_of_64_bits_are_exact(dtype: str) -> None:
    array = values(dtype, (4, 6))
    array[:2, :2] = np.iinfo(dtype).max
    sums = array.astype(object).reshape(2, 2, 3, 2).sum(axis=(1, 3))
    right = [[round(Fraction(total, 4)) for total in row] for row in sums]
    assert reduced(array, (2, 2), "mean").tolist() == right


def test_no_data_is_left_out_of_means() -> None:
    array = np.array([[7, 9, 0, 0], [0, 0, 0, 0]], "uint16")
    assert reduced(array, (2, 2), "mean", nodata=0).tolist() == [[8, 0]]
    assert reduced(array, (2, 2), "mean").tolist() == [[4, 0]]


def test_a_coarse_axis_waits() -> None:
    levels = levels_below((1, 2, 100, 3000, 3000), (1, 1, 2.0, 0.5, 0.5))
    assert [level.factors[2:] for level in levels] == [(1, 2, 2), (1, 4, 4), (2, 8, 8), (4, 16, 16)]
    assert levels[-1].shape == (1, 2, 25, 188, 188)
    assert levels_below((1, 1, 9, 256, 200)) == []
    assert len(levels_below((1, 1, 9, 99, 99), count=3)) == 2
    assert levels_below((1, 1, 1, 1, 1), count=9) == []


FORMS = [{"ome_version": "0.4"}, {"ome_version": "0.5"}, {"shards": (8, 16, 16)}]


@pytest.mark.parametrize(("form", "rule"), mainly(paired(FORMS, ["mean", "mode"]), 1))
def test_levels_of_an_image(tmp_path, form: dict[str, Any], rule: Any) -> None:
    array = values("labels" if rule == "mode" else "uint16", (2, 9, 19, 21))
    path = image(tmp_path / "a.zarr", array, **form)
    done: list[int] = []
    levels = add_levels(path, rule=rule, count=4, threads=3, progress=done.append)
    right = array[None]
    for number, level in enumerate(levels, 1):
        right = windows(right, level.halved, mode if rule == "mode" else mean)
        np.testing.assert_array_equal(whole(path, number), right)
        source = open_source(path, level=number)
        assert source.scale == (1, 1, *(2.0**number,) * 3)
        assert source.translation == (0, 0, *((2.0**number - 1) / 2,) * 3)
    assert sum(done) == sum(int(np.prod(level.shape)) for level in levels)
    models = pytest.importorskip("ome_zarr_models")
    zarr = pytest.importorskip("zarr")
    assert models.open_ome_zarr(zarr.open_group(path, mode="r")) is not None


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_times_without_channels_keep_their_axis(tmp_path, version: str) -> None:
    """Zarr 2 does not name it, and four dimensions may as well be c z y x."""
    array = values("uint16", (2, 1, 9, 19, 21))
    path = image(tmp_path / "a.zarr", array, ome_version=version)
    (level,) = add_levels(path, rule="mean", count=2)
    np.testing.assert_array_equal(whole(path, 1), windows(array, level.halved, mean))


@pytest.mark.slow
def test_a_killed_run_goes_on_with_what_is_stored(tmp_path, monkeypatch) -> None:
    array = values("uint16", (13, 37, 41)) | 1
    path, right = image(tmp_path / "a.zarr", array), image(tmp_path / "b.zarr", array)
    add_levels(right, rule="mean", count=3)
    done: list[int] = []

    def killed(size: int) -> None:
        done.append(size)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_levels(path, rule="mean", count=3, progress=killed)
    with pytest.raises(UsageError, match="level 1 does not exist"):  # nothing half is shown
        open_source(path, level=1)
    again: list[int] = []
    add_levels(path, rule="mean", count=3, progress=again.append)
    for level in (1, 2):
        assert (whole(path, level) == whole(right, level)).all()
    total = sum(int(np.prod(open_source(right, level=level).domain.shape)) for level in (1, 2))
    assert sum(again) <= total - sum(done[:-1])  # at most what was under way is made twice


def test_levels_that_are_there_are_kept_or_made_anew(tmp_path) -> None:
    path = image(tmp_path / "a.zarr", values("uint16", (8, 16, 16)))
    (tmp_path / "a.zarr" / ".zmetadata").write_text("{}")
    add_levels(path, rule="mean", count=3)
    assert not (tmp_path / "a.zarr" / ".zmetadata").exists()
    with pytest.raises(UsageError, match="has 3 levels; --overwrite makes them anew"):
        add_levels(path, rule="mean")
    add_levels(path, rule="mean", count=2, again=True)
    with pytest.raises(UsageError, match="level 2 does not exist"):
        open_source(path, level=2)
    assert not [file for file in (tmp_path / "a.zarr" / "2").rglob("*") if file.is_file()]


def test_what_is_no_image(tmp_path) -> None:
    ts.open(
        {"driver": "zarr3", "kvstore": f"file://{tmp_path}/plain", "create": True},
        dtype=ts.uint8, shape=[4, 4],
    ).result()  # fmt: skip
    with pytest.raises(UsageError, match="is no OME-Zarr image"):
        add_levels(str(tmp_path / "plain"), rule="mean")
    path = image(tmp_path / "a.zarr", values("uint16", (8, 16, 16)))
    file = tmp_path / "a.zarr" / "zarr.json"
    document = json.loads(file.read_text())
    del document["attributes"]["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="is OME-Zarr before"):
        add_levels(path, rule="mean")


def test_the_verb_takes_the_dtypes_of_labels(tmp_path, capsys) -> None:
    array = values("labels", (4, 16, 16)).astype("uint64") << 40
    path = image(tmp_path / "a.zarr", array)
    assert main(["pyramid", path, "--rule", "mode", "--levels", "2"]) == 0
    assert "level 1: 1 x 1 x 2 x 8 x 8" in capsys.readouterr().out
    made = ts.open({"driver": "zarr3", "kvstore": f"file://{path}/1/"}).result().read().result()
    assert (np.asarray(made).squeeze() == windows(array, (2, 2, 2), mode)).all()


@pytest.mark.parametrize("count", ["0", "-3"])
def test_an_image_has_one_level_at_least(count: str, tmp_path, capsys) -> None:
    path = image(tmp_path / "a.zarr", values("uint16", (4, 8, 8)))
    assert main(["pyramid", path, "--levels", count]) == 2
    assert f"--levels {count}: an image has 1 or more" in capsys.readouterr().err


def test_levels_are_made_under_the_lock_of_runs(tmp_path, capsys) -> None:
    path = image(tmp_path / "a.zarr", values("uint16", (8, 16, 16)))
    prepared = OutputLock.take([open_written(path, "")], "array")
    prepared.name()
    assert main(["pyramid", path, "--levels", "2"]) == 2
    prepared.hand_over()
    assert main(["pyramid", path, "--levels", "2"]) == 2
    said = capsys.readouterr().err
    assert f"{path}: process " in said and "holds it since" in said
    assert not (tmp_path / "a.zarr" / "1").exists()
    assert main(["pyramid", path, "--levels", "2", "--take-over"]) == 0
    assert main(["pyramid", path, "--levels", "3", "--overwrite"]) == 0
    assert run_at(open_written(path, "")) == "array", "the run that made the blocks stays named"
