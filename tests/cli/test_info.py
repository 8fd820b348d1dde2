"""`penstock info` says what an input holds, and the command that would take it."""

import argparse
import shlex

import numpy as np
import pytest

from penstock.cli import main
from penstock.cli.info import infer_line
from penstock.data import Box, open_sink


def info(capsys, *words: str, code: int = 0) -> str:
    assert main(["info", *words]) == code
    return "".join(capsys.readouterr())


def test_a_volume_with_levels(tmp_path, capsys) -> None:
    pytest.importorskip("tensorstore")
    path = str(tmp_path / "a.ome.zarr")
    box = Box((0,) * 5, (1, 2, 9, 40, 50))
    sink = open_sink(path, domain=box, dtype=np.dtype("uint16"), chunks=(4, 16, 16))
    sink.create()
    sink.write(box, np.ones(box.shape, "uint16"))
    assert main(["pyramid", path, "--levels", "2"]) == 0
    capsys.readouterr()
    assert info(capsys, path).splitlines() == [
        "array     czyx 2 x 9 x 40 x 50 uint16, 70.3 KiB",
        "chunks    czyx 1 x 4 x 16 x 16, blosc",
        "voxel     z 1, y 1, x 1",
        "level 1   czyx 2 x 5 x 20 x 25, z 2, y 2, x 2",
        f"infer     penstock infer --in-spec {path} --out-spec a-out.ome.zarr --model-type MODEL",
    ]


@pytest.mark.parametrize("verb", ["info", "view", "mask"])
def test_a_level_that_is_named_and_damaged_is_no_end_of_levels(
    verb: str, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    box = Box((0,) * 5, (1, 1, 1, 40, 50))
    sink = open_sink("a.zarr", domain=box, dtype=np.dtype("uint8"))
    sink.create()
    sink.write(box, np.ones(box.shape, "uint8"))
    assert main(["pyramid", "a.zarr", "--levels", "3"]) == 0
    (tmp_path / "a.zarr/1/zarr.json").write_text("{")
    capsys.readouterr()
    assert main([verb, "a.zarr", *["m.zarr"][: verb == "mask"]]) == 2
    error = capsys.readouterr().err
    assert "a.zarr" in error and "1/zarr.json" in error and error.count("\n") == 1


def test_an_axis_of_unknown_size_has_none_beside_others(tmp_path, capsys) -> None:
    """South at the top, which GDAL writes as a matrix."""
    rasterio = pytest.importorskip("rasterio")
    shape = {"count": 1, "height": 8, "width": 9, "dtype": "uint8", "crs": "EPSG:32633"}
    for name, turned in (("a", 0), ("b", 3)):
        place = rasterio.Affine(20, turned, 1000, turned, 10, 2000)
        path = str(tmp_path / f"{name}.tif")
        with rasterio.open(path, "w", driver="GTiff", transform=place, **shape) as file:
            file.write(np.ones((1, 8, 9), "uint8"))
        sizes = "of unknown size" if turned else "y 10 meter, x 20 meter"
        assert f"voxel     {sizes}\n" in info(capsys, path)
    (tmp_path / "planes").mkdir()
    for z in range(2):
        (tmp_path / "planes" / f"{z}.tif").write_bytes((tmp_path / "a.tif").read_bytes())
    assert "voxel     y 10 meter, x 20 meter\n" in info(capsys, str(tmp_path / "planes"))


def test_a_choice_is_listed(tmp_path, capsys) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["a"], file["b/c"] = np.zeros((3, 4, 5)), np.zeros((6, 7))
    assert info(capsys, str(path)).splitlines()[1:] == [
        f"  penstock info {path}::a  3 x 4 x 5",
        f"  penstock info {path}::b/c  6 x 7",
    ]
    assert "array     yx 6 x 7 float64" in info(capsys, f"{path}::b/c")


def test_series_and_axes(tmp_path, capsys) -> None:
    tifffile = pytest.importorskip("tifffile")
    path = str(tmp_path / "a.tif")
    with tifffile.TiffWriter(path) as file:
        file.write(np.zeros((3, 8, 9), "u2"), photometric="minisblack", metadata={"axes": "ZYX"})
        file.write(np.zeros((4, 8), "uint16"), compression="zlib")
    assert f"penstock info {path} --series 1  4 x 8" in info(capsys, path)
    assert "yx 4 x 8, deflate" in info(capsys, path, "--series", "1")
    said = info(capsys, path, "--series", "0", "--axes", "tyx")
    assert "array     tyx 3 x 8 x 9 uint16" in said and "--axes tyx --series 0" in said
    assert "no such file" in info(capsys, str(tmp_path / "none.zarr"), code=2)


@pytest.mark.parametrize(
    ("place", "out"),
    [("./-a.npy", "a-out"), ("./.a.npy", "a-out"), ('{"driver": "zarr"}', "input")],
)
def test_the_line_of_infer_can_be_typed(place: str, out: str) -> None:
    words = infer_line(argparse.Namespace(path=place, axes=None, series=None))
    assert f"--in-spec {shlex.quote(place)} --out-spec {out}" in words
