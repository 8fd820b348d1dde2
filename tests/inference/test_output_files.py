"""Outputs that become one file: each is what the library of its format reads, whoever made it."""

import csv
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from penstock.base.errors import Incomplete
from penstock.cli import main
from penstock.data import Box, Grid, make_file, open_sink, open_source, reduced
from penstock.data.stores import file_making, ometiff
from penstock.data.stores.raster import Georeference, georeference_of
from penstock.data.stores.raster_tiles import RasterTiles, write_cog

from ..later import imported_later
from ..parameters import mainly
from ..preloaded import forked_workers
from .kit import Array, values

pytestmark = pytest.mark.usefixtures("here")

pytest.importorskip("tensorstore")
tifffile = imported_later("tifffile")
VOLUME = np.random.default_rng(0).integers(0, 4000, (2, 3, 2, 270, 40), "uint16")
"""t c z y x"""
SCENE = np.random.default_rng(1).integers(0, 4000, (3, 700, 90), "uint16")
NODATA = 7
BLOCKS = "--block 8 160 24".split()
"""Of several planes, and of no whole tiles."""


def convert(source: str, out: str, *more: str) -> int:
    return main(["convert", source, out, *more])


def image(path: str = "in.zarr", unit: str = "micrometer", volume: Array = VOLUME) -> str:
    """An OME-Zarr image with sizes, a position, names and colours."""
    source: Any = open_source(volume)
    source.scale, source.units = (2.5, 1.0, 2.0, 0.5, 0.4), ("second", None, unit, unit, unit)
    source.translation = (0.0, 0.0, 10.0, 20.0, 30.0)
    source.omero = tuple({"label": name, "color": "00FF00"} for name in ("dapi", "gfp", "red"))
    sink = open_sink(path, domain=Box((0,) * 5, volume.shape), dtype=volume.dtype, like=source)
    sink.create()
    sink.write(sink.domain, volume)
    return path


def scene(path: str = "in.tif", values: Array = SCENE, **profile: Any) -> Any:
    """A raster of three bands with names, in UTM."""
    rasterio = pytest.importorskip("rasterio")
    settings = {
        "driver": "GTiff", "width": 90, "height": 700, "count": 3, "dtype": "uint16",
        "crs": "EPSG:32631", "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 4e6),
    }  # fmt: skip
    with rasterio.open(path, "w", **settings | profile) as file:
        file.write(values)
        file.descriptions = ("blue", "green", "nir", "red")[: file.count]
    return rasterio


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out.tif", "out.ome.tif", "out.nii.gz"])
def test_numbered_objects(out: str) -> None:
    """A GeoTIFF of labels lies where the raster of scores does."""
    rasterio = scene(values=SCENE[:1], count=1)
    given = "in.tif" if out == "out.tif" else image(volume=VOLUME[:1, :1])
    words = ["label", given, out, "--threshold", "2000", "--chunks", "1", "128", "128"]
    assert main([*words, "--table", "out.csv"]) == 0
    labels, before = open_source(out), Path(out).read_bytes()
    scores = SCENE[0] if out == "out.tif" else VOLUME[0, 0]
    wanted, count = ndimage.label(scores > 2000)
    np.testing.assert_array_equal(labels.read(labels.domain).squeeze(), wanted)
    assert len(Path("out.csv").read_text().splitlines()) == count + 1
    assert main([*words, "--overwrite", "--workers", "2"]) == 0
    assert Path(out).read_bytes() == before and not Path(f"{out}.scratch").exists()
    assert main(["verify", out]) == 0
    if out == "out.tif":
        with rasterio.open("in.tif") as scored, rasterio.open(out) as made:
            assert (made.crs, made.transform) == (scored.crs, scored.transform)
            assert len(made.overviews(1)) == 2
            (row, column), place = ndimage.center_of_mass(wanted == count), scored.transform
            *_, last = csv.DictReader(Path("out.csv").read_text().splitlines())
            x, y = place @ (column + 0.5, row + 0.5)
            assert (float(last["x"]), float(last["y"])) == pytest.approx((x, y), rel=1e-12)


@pytest.mark.slow
def test_a_number_that_stands_for_no_data_is_no_object(capsys) -> None:
    scene(values=SCENE[:1], count=1, nodata=5)
    words = ["label", "in.tif", "out.tif", "--threshold", "2000", "--raw"]
    assert main(words) == 2
    assert "5, which stands for no data, would be an object's number" in capsys.readouterr().err
    assert not Path("out.tif.scratch").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
def test_a_raster_without_a_place_has_objects_in_pixels() -> None:
    scene(values=SCENE[:1], count=1, nodata=5, crs=None, transform=None)
    words = ["label", "in.tif", "out.zarr", "--threshold", "2000", "--nan-background"]
    assert main([*words, "--table", "out.csv"]) == 0
    first, *_ = csv.DictReader(Path("out.csv").read_text().splitlines())
    place = ndimage.center_of_mass(ndimage.label(SCENE[0] > 2000)[0] == 1)
    assert (float(first["y"]), float(first["x"])) == pytest.approx(place)


@pytest.mark.slow
def test_ome_tiff() -> None:
    given = image()
    assert convert(given, "out.ome.tif", *BLOCKS) == 0
    with tifffile.TiffFile("out.ome.tif") as file:
        (series,) = file.series
        assert series.axes == "TCZYX" and (series.asarray() == VOLUME).all()
        small = reduced(VOLUME, (1, 1, 1, 2, 2), "mean")
        assert len(series.levels) == 2 and (series.levels[1].asarray() == small).all()
        assert series.keyframe.tilewidth == 512
        xml = file.ome_metadata
    pixels = pytest.importorskip("ome_types").from_xml(xml).images[0].pixels
    sizes = {axis: getattr(pixels, f"physical_size_{axis}") for axis in "xyz"}
    assert sizes == {"x": 0.4, "y": 0.5, "z": 2.0} and pixels.physical_size_x_unit.value == "µm"
    assert pixels.time_increment == 2.5 and pixels.time_increment_unit.value == "s"
    assert [each.name for each in pixels.channels] == ["dapi", "gfp", "red"]
    assert pixels.channels[0].color.as_rgb_tuple()[:3] == (0, 255, 0)
    back: Any = open_source("out.ome.tif")
    assert back.scale == (2.5, 1.0, 2.0, 0.5, 0.4) and back.units[4] == "micrometer"
    assert [each["label"] for each in back.omero] == ["dapi", "gfp", "red"]
    assert main(["verify", "out.ome.tif"]) == 0
    before = Path("out.ome.tif").read_bytes()
    assert convert(given, "out.ome.tif", *BLOCKS, "--overwrite") == 0
    assert Path("out.ome.tif").read_bytes() == before


@pytest.mark.slow
def test_a_tif_of_a_volume_is_an_ome_tiff(capsys) -> None:
    labels = (VOLUME // 1000).astype("uint8")
    words = "--levels 3 --t 1 --c 0 2 --head-kind labels --out-dtype uint8".split()
    assert convert(image(volume=labels), "out.tiff", *words) == 0
    assert "an OME-TIFF does not hold the position" in capsys.readouterr().out
    with tifffile.TiffFile("out.tiff") as file:
        (series,) = file.series
        right = labels[1, [0, 2]]
        for level in series.levels:
            assert (level.asarray() == right).all()
            right = reduced(right, (1, 1, 2, 2), "mode")
        assert len(series.levels) == 3
    assert convert("in.zarr", "one.tif", "--levels", "none") == 0
    with tifffile.TiffFile("one.tif") as file:
        assert len(file.series[0].levels) == 1


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out.tif", "out.nii.gz", "out.zarr"])
def test_a_volume_one_voxel_wide(out: str) -> None:
    np.save("in.npy", np.arange(60, dtype="uint16").reshape(3, 20, 1) ** 2)
    assert convert("in.npy", out) == 0
    np.testing.assert_array_equal(values(out).ravel(), np.load("in.npy").ravel())


def test_geotiff() -> None:
    rasterio = scene()
    assert convert("in.tif", "out.tif") == 0
    valid, errors, warnings = pytest.importorskip("rio_cogeo").cog_validate("out.tif")
    assert valid and not errors and not warnings
    with rasterio.open("in.tif") as before, rasterio.open("out.tif") as made:
        assert (made.read() == SCENE).all()
        assert (made.crs, made.transform) == (before.crs, before.transform)
        assert made.descriptions == before.descriptions and made.overviews(1) == [2, 4]
        assert made.nodata is None
    with rasterio.open("out.tif", overview_level=0) as level:
        assert np.abs(level.read() - reduced(SCENE, (1, 2, 2), "mean").astype(int)).max() <= 1
    assert main(["verify", "out.tif"]) == 0
    # A second job begins with the first one's file, at its overview.
    assert convert("out.tif", "small.tif", "--level", "1", "--levels", "none", "--c", "1") == 0
    with rasterio.open("small.tif") as small:
        assert small.transform == rasterio.Affine(20, 0, 5e5, 0, -20, 4e6)
        assert small.descriptions == ("green",) and small.overviews(1) == []


@pytest.mark.parametrize(
    ("dtype", "nodata", "rule"),
    mainly([("uint16", 7, "mean"), ("float32", None, "mean"), ("uint8", None, "mode")], 0),
)
def test_overviews_do_not_depend_on_blocks(dtype: str, nodata: int | None, rule: Any) -> None:
    """Made of blocks as they come or at the end, they are those of numpy."""
    rasterio = pytest.importorskip("rasterio")
    bands = np.random.default_rng(2).integers(0, 9, (2, 2100, 600)).astype(dtype)
    bands[:, 1024:1536, :512] = 0  # a tile that is not written
    place = Georeference("EPSG:32631", (10.0, 0.0, 5e5, 0.0, -10.0, 4e6), None)
    files = []
    for name, in_flight, step in (("one", rule, 2048), ("other", None, 512)):
        tiles = RasterTiles(Path(name), bands.shape, bands.dtype, nodata)
        for box in Grid(Box((0,) * 3, bands.shape), (1, step, step)):
            if bands[box.slices].any():
                tiles.write(box, bands[box.slices], in_flight)
        for level in range(1, tiles.levels()):
            tiles.make_overview(level, rule, 2, print)
        none_was_lacking = (Path(name) / "1" / "0").stat().st_size == 16
        assert none_was_lacking == (in_flight is not None)
        write_cog(Path(f"{name}.tif"), tiles, place, ["a", "b"], tiles.levels(), print)
        assert (tiles.read(Box((1, 500, 30), (2, 1600, 40))) == bands[1:, 500:1600, 30:40]).all()
        files.append(Path(f"{name}.tif").read_bytes())
    assert files[0] == files[1]
    with rasterio.open("one.tif") as made:
        assert made.overviews(1) == [2, 4, 8, 16] and made.nodata == nodata
        assert made.descriptions == ("a", "b") and made.crs == "EPSG:32631"
    right = bands
    for level in range(4):
        right = reduced(right, (1, 2, 2), rule, nodata)
        with rasterio.open("one.tif", overview_level=level) as made:
            assert (made.read() == right).all()
    valid = pytest.importorskip("rio_cogeo").cog_validate("one.tif", strict=True)
    assert valid == (True, [], [])


@pytest.mark.slow
def test_a_large_geotiff_has_64_bit_offsets(monkeypatch) -> None:
    from penstock.data.stores import raster_tiles as room

    rasterio = scene()
    monkeypatch.setattr(room, "CLASSIC_BYTES", 0)
    assert convert("in.tif", "out.tif") == 0
    assert Path("out.tif").read_bytes()[:4] == b"II+\0"
    with rasterio.open("out.tif") as made:
        assert (made.read() == SCENE).all() and made.overviews(1) == [2, 4]
    assert pytest.importorskip("rio_cogeo").cog_validate("out.tif", strict=True)[0]


def test_a_damaged_tile_of_a_scratch(tmp_path) -> None:
    tiles = RasterTiles(tmp_path, (1, 20, 30), np.dtype("uint16"))
    tiles.write(Box((0,) * 3, (1, 20, 30)), SCENE[:1, :20, :30], None)
    pack = tmp_path / "0" / "0.0.0.1.20.30"
    whole = pack.read_bytes()
    changed = whole[:-30] + b"damage" + whole[-24:]
    for damaged in (b"damage" + whole[6:], changed, whole[:-9], b""):
        pack.write_bytes(damaged)
        again = RasterTiles(tmp_path, (1, 20, 30), np.dtype("uint16"))
        with pytest.raises(OSError, match="is damaged"):
            again.read(Box((0,) * 3, (1, 20, 30)))


def test_a_band_keeps_the_pixels_that_another_one_lacks() -> None:
    values = SCENE[:, :40].astype("float32")
    values[0, :7], values[2, :, 3] = np.nan, np.nan
    rasterio = scene(values=values, dtype="float32", height=40)
    assert convert("in.tif", "out.tif") == 0
    with rasterio.open("out.tif") as made:
        assert np.array_equal(made.read(), values, equal_nan=True)


def test_the_fourth_of_four_bands_is_no_alpha(capsys: pytest.CaptureFixture[str]) -> None:
    rasterio = scene(values=SCENE[[0, 1, 2, 0]].astype("uint8"), dtype="uint8", count=4)
    with rasterio.open("in.tif", "r+") as file:
        file.set_band_unit(4, "dB")
    assert convert("in.tif", "out.tif") == 0
    assert "units that the input gives its bands (dB) are not carried" in capsys.readouterr().out
    with rasterio.open("out.tif") as made:
        assert made.colorinterp[3].name != "alpha"


BESIDE = {
    "tif.aux.xml": "<PAMDataset><SRS>EPSG:32633</SRS><PAMRasterBand band='1'><Offset>-10</Offset>"
    "<Scale>0.5</Scale><NoDataValue>7</NoDataValue></PAMRasterBand></PAMDataset>",
    "tfw": "10\n0\n0\n-10\n500005\n4999995\n",
}


@pytest.mark.parametrize("ending", BESIDE)
@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
def test_what_files_beside_a_tiff_say_holds(ending: str) -> None:
    rasterio = scene(values=SCENE[:1], count=1, crs=None, transform=None)
    Path(f"in.{ending}").write_text(BESIDE[ending])
    assert convert("in.tif", "out.ome.tif") == 0
    (made,), source = values("out.ome.tif")[0, :, 0], open_source("in.tif")
    with rasterio.open("in.tif") as file:
        stored = file.read(1, masked=True)
        right = np.ma.filled(stored * file.scales[0] + file.offsets[0], np.nan)
        assert georeference_of(source, (0,) * 5, source.dtype, "").transform == file.transform[:6]
    np.testing.assert_array_equal(made, right)


def test_no_data_of_a_mosaic() -> None:
    rasterio = scene(nodata=NODATA)
    Path("in.vrt").write_text(
        '<VRTDataset rasterXSize="90" rasterYSize="700"><SRS>EPSG:32631</SRS>'
        "<GeoTransform>500000, 10, 0, 4000000, 0, -10</GeoTransform>"
        '<VRTRasterBand dataType="UInt16" band="1"><NoDataValue>7</NoDataValue><SimpleSource>'
        '<SourceFilename relativeToVRT="1">in.tif</SourceFilename><SourceBand>2</SourceBand>'
        "</SimpleSource></VRTRasterBand></VRTDataset>"
    )
    assert convert("in.vrt", "out.tif") == 0 and convert("in.tif", "raw.tif", "--raw") == 0
    with rasterio.open("out.tif") as made, rasterio.open("raw.tif") as raw:
        right = np.where(SCENE[1] == NODATA, np.nan, SCENE[1])
        assert np.isnan(made.nodata) and np.array_equal(made.read(1), right, equal_nan=True)
        assert made.crs == "EPSG:32631" and made.transform == raw.transform
        assert raw.nodata == NODATA and raw.dtypes[0] == "uint16" and (raw.read() == SCENE).all()


def test_a_part_of_a_raster_lies_where_it_lay() -> None:
    rasterio = scene()
    like = open_source("in.tif")
    sink: Any = open_sink(
        "out.tif", domain=Box.of((0,) * 5, (1, 3, 1, 64, 32)), dtype=like.dtype, like=like,
        at=(0, 0, 0, 100, 50), files=True,
    )  # fmt: skip
    sink.create()
    sink.write(sink.domain, SCENE[None, :, None, 100:164, 50:82])
    assert make_file(sink, "mean", None, print) and not make_file(sink, "mean", None, print)
    with rasterio.open("out.tif") as made, rasterio.open("in.tif") as before:
        window = rasterio.windows.Window(50, 100, 32, 64)
        assert made.transform == rasterio.Affine(10, 0, 500500, 0, -10, 3999000)
        assert (made.read() == before.read(window=window)).all()


@pytest.mark.parametrize("ending", mainly([".nii", ".nii.gz"], 0))
def test_nifti(ending: str) -> None:
    nibabel = pytest.importorskip("nibabel")
    assert convert(image(), f"out{ending}") == 0
    made = nibabel.load(f"out{ending}")
    assert made.shape == (40, 270, 2, 2, 3)
    assert (np.asarray(made.dataobj) == VOLUME.transpose(4, 3, 2, 0, 1)).all()
    assert np.allclose(made.header.get_zooms(), (0.4, 0.5, 2.0, 2.5, 1.0))
    assert made.header.get_xyzt_units() == ("micron", "sec")
    assert (made.affine[:3, 3] == (30, 20, 10)).all()
    back = open_source(f"out{ending}")
    assert np.allclose(back.scale or (), (2.5, 1.0, 2.0, 0.5, 0.4))
    assert back.translation[2:] == (10, 20, 30)
    assert main(["verify", f"out{ending}"]) == 0


def test_an_affine_that_turns_axes_stays(capsys) -> None:
    nibabel = pytest.importorskip("nibabel")
    affine = np.array([[0, -2.0, 0, 5], [1.5, 0, 0, 6], [0, 0, 3.0, 7], [0, 0, 0, 1]])
    array = np.arange(4 * 5 * 6, dtype="int16").reshape(4, 5, 6)
    before = nibabel.Nifti1Image(array, affine)
    before.header.set_xyzt_units("mm")
    before.to_filename("in.nii")
    assert convert("in.nii", "out.nii") == 0
    made = nibabel.load("out.nii")
    assert (made.affine == affine).all() and made.header.get_xyzt_units()[0] == "mm"
    assert (np.asarray(made.dataobj) == array).all()
    assert "turns or flips" not in capsys.readouterr().out
    assert convert("in.nii", "out.zarr") == 0
    assert "turns or flips its axes, and only its sizes go further" in capsys.readouterr().out


def test_nanometers_are_said_in_a_unit_of_nifti() -> None:
    nibabel = pytest.importorskip("nibabel")
    assert convert(image(unit="nanometer"), "out.nii", "--t", "0", "--c", "0") == 0
    made = nibabel.load("out.nii")
    assert np.allclose(made.header.get_zooms(), (0.4e-3, 0.5e-3, 2e-3), rtol=1e-6)
    assert made.header.get_xyzt_units()[0] == "micron" and made.shape == (40, 270, 2)


@pytest.mark.parametrize(
    ("out", "more", "said"),
    [
        ("a.ome.tif", ("--out-dtype", "int64"), "an OME-TIFF does not hold int64; give --out-dtyp"),
        ("a.nii", ("--out-dtype", "float16"), "does not hold float16; give --out-dtype float32"),
        ("a.n5", ("--levels", "2"), "--levels 2: a.n5 is an array alone"),
        ("a.zarr", ("--levels", "2", "--plain"), "--levels 2: a.zarr is an array alone"),
        ("a.n5", ("--out-dtype", "bool"), "a.n5: N5 does not hold bool; give --out-dtype uint8"),
        ("a.tif", ("--shards", "64"), "a .tif has no shards"),
        ("a.ome.tif", ("--ome-zarr", "0.4"), "a.ome.tif: --ome-zarr 0.4 is for a .zarr by its"),
        ("a.n5", ("--ome-zarr", "0.5"), "a.n5: --ome-zarr 0.5 is for a .zarr by its path alone"),
        ("a.n5", ("--plain",), "a.n5: --plain is for a .zarr by its path alone"),
        ("s3://bucket/a.tif", (), "is written on this machine only"),
        ("folder.tif", (), "is no file"),
        ("mine.tif", (), "exists; use --overwrite"),
        ("in.zarr/0/a.tif", (), "lies inside the array"),
    ],
)
def test_what_no_file_holds_is_refused(out: str, more: tuple[str, ...], said: str, capsys) -> None:
    image()
    Path("folder.tif").mkdir()
    Path("mine.tif").write_text("mine")
    before = sorted(Path().rglob("*"))
    assert convert("in.zarr", out, *more) == 2
    assert said in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before and Path("mine.tif").read_text() == "mine"


@pytest.mark.parametrize(("dtype", "wider"), [("bool", "uint8"), ("float16", "float32")])
@pytest.mark.parametrize("out", ["a.ome.tif", "a.nii", "a.n5", "a.zarr"])
def test_values_that_a_wider_dtype_holds_go_into_a_format_without_theirs(
    dtype: str, wider: str, out: str, capsys
) -> None:
    np.save("in.npy", array := (np.arange(120) % 3).reshape(4, 5, 6).astype(dtype))
    assert convert("in.npy", out) == 0
    made, said = open_source(out), f"{out} holds {dtype} as {wider}, as its format has no {dtype}"
    assert (made.read(made.domain)[0, 0] == array).all()
    assert {made.dtype == wider, said in capsys.readouterr().out} == {out != "a.zarr"}


def test_units_that_a_format_lacks(capsys) -> None:
    image(unit="inch")
    for out in ("a.ome.tif", "a.nii"):
        assert convert("in.zarr", out) == 2
        assert "has no unit 'inch', as axis z has; give OME-Zarr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "dtype", "shown"), [(-9999, "int16", "-9999"), (-3.4e38, "float32", "-3.4e+38")]
)
def test_an_undeclared_fill_value_is_named(value: float, dtype: str, shown: str, capsys) -> None:
    pytest.importorskip("rasterio")
    values = np.ones(SCENE.shape, dtype)
    values[:, :128] = value
    if dtype == "float32":
        values[0, 200, 0] = np.nan
    scene("in.tif", values, dtype=dtype)
    assert convert("in.tif", "out.tif", "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"25 % of the input's upper left corner is {shown}, and it declares no value" in said
    assert f"gdal_edit -a_nodata {shown}" in said
    assert convert("in.tif", "out.tif", "--dry-run", "--raw") == 0
    scene("in.tif", values, dtype=dtype, nodata=value)
    assert convert("in.tif", "out.tif", "--dry-run") == 0
    assert "upper left corner" not in capsys.readouterr().out


def with_keys(path: str, *keys: int, name: str = "") -> None:
    """A TIFF with the keys of a GeoTIFF."""
    rows = [1024, 0, 1, *keys[:1], 1025, 0, 1, 1, *keys[1:]]
    tags = [(33550, "d", 3, (10.0, 10.0, 0.0)), (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 4e6, 0.0)),
            (34735, "H", 4 + len(rows), (1, 1, 0, len(rows) // 4, *rows)),
            (34737, "s", 0, f"{name}|")]  # fmt: skip
    tifffile.imwrite(path, SCENE[0], extratags=tags)


def test_a_crs_that_cannot_be_read(capsys) -> None:
    pytest.importorskip("rasterio")
    with_keys("in.tif", 1, 3072, 0, 1, 9999)
    with_keys("geographic.tif", 2, 2048, 0, 1, 9999)
    Path("in.vrt").write_text(
        '<VRTDataset rasterXSize="90" rasterYSize="700"><SRS>NOTHING</SRS>'
        '<VRTRasterBand dataType="UInt16" band="1"><SimpleSource>'
        '<SourceFilename relativeToVRT="1">in.tif</SourceFilename><SourceBand>1</SourceBand>'
        "</SimpleSource></VRTRasterBand><GeoTransform>0,1,0,0,0,-1</GeoTransform></VRTDataset>"
    )
    for source in ("in.tif", "geographic.tif", "in.vrt"):
        assert convert(source, "out.tif") == 2
        said = capsys.readouterr().err
        assert f"{source} cannot be read; gdal_edit -a_srs" in said and said.count("\n") == 1
    assert convert("in.vrt", "in.zarr") == 0, "which needs none"
    assert not list(Path().glob("out*"))


def test_a_crs_that_is_only_a_name_goes_further_as_such(capsys) -> None:
    rasterio = pytest.importorskip("rasterio")
    with_keys("in.tif", 1, 1026, 34737, 10, 0, 3072, 0, 1, 29999, name="My Region")
    assert convert("in.tif", "out.tif") == 0
    assert "the input's CRS is only a name, 'My Region'" in capsys.readouterr().out
    with rasterio.open("out.tif") as made:
        assert made.crs.to_wkt().startswith('LOCAL_CS["My Region"')


@pytest.mark.slow
def test_the_old_file_stands_until_the_new_one_is_whole(monkeypatch, capsys) -> None:
    def asked_to_end(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return write(*args)

    write = file_making.write_ome_tiff

    image()
    Path("out.ome.tif").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(file_making, "write_ome_tiff", asked_to_end)
        assert convert("in.zarr", "out.ome.tif", "--overwrite") == Incomplete.exit_code
    assert "written and out.ome.tif is not, when SIGUSR1 ended the job" in capsys.readouterr().err
    assert Path("out.ome.tif").read_text() == "mine"
    assert main(["verify", "out.ome.tif"]) == 0, "of the scratch, which has all blocks"
    assert main(["status", "out.ome.tif"]) == 3 and "ended: " in capsys.readouterr().out
    assert convert("in.zarr", "out.ome.tif") == 2
    assert convert("in.zarr", "out.ome.tif", "--resume") == 0
    assert (tifffile.imread("out.ome.tif") == VOLUME).all()
    assert not Path("out.ome.tif.scratch").exists()
    stamp = Path("out.ome.tif").stat().st_mtime_ns
    assert convert("in.zarr", "out.ome.tif", "--resume") == 0
    assert Path("out.ome.tif").stat().st_mtime_ns == stamp


@pytest.mark.slow
@pytest.mark.parametrize("name", mainly(["fsync", "replace", "rename", "rmtree"], 1))
def test_a_kill_at_any_moment_of_the_making(name: str, monkeypatch) -> None:
    """Whatever it leaves, the next start makes the same file and nothing stays beside it."""
    owner: Any = {"fsync": os, "rmtree": shutil}.get(name, Path)
    usual = getattr(owner, name)

    def killed(*args: Any, **more: Any) -> Any:
        if Path("out.tif.scratch/made.tif").exists() or Path("out.tif").exists():
            raise KeyboardInterrupt
        return usual(*args, **more)

    rasterio = scene()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        assert convert("in.tif", "out.tif") == 3
    assert Path("out.tif.scratch").exists()
    if Path("out.tif.scratch/blocks.zarr/tiles/0").exists():
        shutil.copytree("out.tif.scratch", "again.tif.scratch")
        Path("again.tif.scratch/blocks.zarr/tiles/0", f".penstock-{16 * '0'}.part").touch()
        Path("again.tif.scratch/blocks.zarr/tiles/mine").touch()
        assert convert("in.tif", "again.tif", "--overwrite") == 2
        Path("again.tif.scratch/blocks.zarr/tiles/mine").unlink()
        assert convert("in.tif", "again.tif", "--overwrite") == 0
    assert convert("in.tif", "out.tif", "--resume") == 0
    assert not Path("out.tif.scratch").exists()
    with rasterio.open("out.tif") as made:
        assert (made.read() == SCENE).all()
    assert main(["verify", "out.tif"]) == 0
    assert convert("in.tif", "out.tif", "--overwrite") == 0
    assert not Path("out.tif.scratch").exists()


def test_a_damaged_file(capsys) -> None:
    assert convert(image(), "out.ome.tif", "--levels", "none") == 0
    with tifffile.TiffFile("out.ome.tif") as file:
        offset = file.pages[0].dataoffsets[0]
    with Path("out.ome.tif").open("r+b") as damaged:
        damaged.seek(offset)
        damaged.write(b"damage" * 9)
    capsys.readouterr()
    assert main(["verify", "out.ome.tif"]) == 1
    said = capsys.readouterr().out
    assert "Damaged: block" in said and "is one file, in which no block can be written" in said
    assert main(["repair", "out.ome.tif"]) == 2
    assert "--overwrite makes all of it anew" in capsys.readouterr().err
    assert main(["verify", "out.ome.tif", "--forget"]) == 2


def test_a_file_of_nobody_is_not_gone_on_with(capsys) -> None:
    image()
    Path("out.ome.tif").write_text("mine")
    assert convert("in.zarr", "out.ome.tif", "--resume") == 2
    assert "out.ome.tif is one file, in which no block" in capsys.readouterr().err
    assert Path("out.ome.tif").read_text() == "mine"
    assert not Path("out.ome.tif.penstock").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_workers_of_a_cluster_make_it_at_the_end() -> None:
    pytest.importorskip("distributed")
    rasterio = scene()
    with forked_workers():
        assert convert("in.tif", "out.tif", "--block", "512", "--cluster", "local:2") == 0
    with rasterio.open("out.tif") as made:
        assert (made.read() == SCENE).all() and made.crs == "EPSG:32631"
    assert main(["verify", "out.tif"]) == 0


def test_the_plan_counts_the_scratch(capsys) -> None:
    image()
    assert convert("in.zarr", "out.ome.tif", "--dry-run") == 0
    plan = capsys.readouterr().out
    size = "253 KiB"
    assert f"an OME-TIFF, from a scratch Zarr beside it, which takes {size} on disk" in plan
    assert "  making " in plan and not list(Path().glob("out*"))
    assert "patch          2 x 270 x 40" in plan, "not larger than the volume, where it is thin"


def test_convert_keeps_values(capsys) -> None:
    ranges = {"int32": 2**31, "uint32": 2**32, "float64": 2**53, "float16": 2**11, "bool": 2}
    for number, (dtype, most) in enumerate(ranges.items()):
        array = np.random.default_rng(number).integers(0, most, (4, 30, 20)).astype(dtype)
        np.save("in.npy", array)
        assert convert("in.npy", f"{dtype}.zarr") == 0
        made = open_source(f"{dtype}.zarr")
        assert made.dtype == array.dtype and (made.read(made.domain)[0, 0] == array).all()
    assert convert("none.npy", "a.zarr") == 2 and not Path("a.zarr").exists()
    assert "no such file" in capsys.readouterr().err


def test_a_large_segment_is_said_with_its_cost(monkeypatch) -> None:
    from penstock.data.stores import ometiff

    tifffile.imwrite("in.tif", SCENE[0], compression="zlib", rowsperstrip=700)
    monkeypatch.setattr(ometiff, "_LARGE_SEGMENT", 2**16)
    (note,) = (each for each in getattr(open_source("in.tif"), "notes", ()) if "segments" in each)
    assert "stored in segments of 123 KiB" in note and "penstock convert IN OUT.zarr" in note


@pytest.mark.slow
def test_tiles_of_several_bands_are_decoded_once_and_not_kept(monkeypatch, capsys) -> None:
    scene(interleave="pixel", tiled=True, blockxsize=64, blockysize=64, compress="deflate")
    decoded, decode = [], ometiff._decode
    monkeypatch.setattr(
        ometiff, "_decode", lambda *place: (decoded.append(place[2:]), decode(*place))[1]
    )
    words = "--model identity --normalize none --devices cpu --patch 64 64 --overlap 0".split()
    assert main(["infer", "in.tif", "out.zarr", *words, "--raw"]) == 0
    assert len(decoded) == len({*decoded}) == 11 * 2, decoded
    assert "  cache        0 B" in capsys.readouterr().out
