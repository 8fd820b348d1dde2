"""What a raster's file says of its values and its place holds, or the file is refused."""

import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.data import CHANNELS, Scene, open_source

from ..later import imported_later

if not all(map(find_spec, ("rasterio", "tifffile"))):
    pytest.skip("rasterio or tifffile is not installed", allow_module_level=True)

from affine import Affine

rasterio, warp, control = (imported_later(f"rasterio{room}") for room in ("", ".warp", ".control"))
UTM, NORTH, EAST = "EPSG:32655", 6_890_000.0, 300_000.0
SIZE = (300, 320)
UP = Affine(10, 0, EAST, 0, -10, NORTH)
HALVES = {"dtype": "float32", "nbits": 16}
PIECES = {"tiled": True, "blockxsize": 128, "blockysize": 128, "compress": "deflate"}
VH, DEPTH = CHANNELS["vh"].file, CHANNELS["bathymetry"].file


def tif(
    path: Path,
    values: np.ndarray,
    place: Affine | None = UP,
    crs: str | None = UTM,
    after: Callable[[Any], None] = lambda file: None,
    **profile: Any,
) -> Path:
    path.parent.mkdir(exist_ok=True)
    profile = {"dtype": values.dtype, "count": 1, "nodata": None, **profile}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path, "w", driver="GTiff", height=len(values), width=values.shape[1],
                           transform=place, crs=crs, **profile) as file:  # fmt: skip
            file.write(values.astype(profile["dtype"]), 1)
            after(file)
    return path


def radar(dtype: str = "float32") -> np.ndarray:
    return (np.arange(SIZE[0] * SIZE[1]).reshape(SIZE) % 99 + 1).astype(dtype)


def seen(folder: Path, name: str = "vh") -> np.ndarray:
    with Scene(folder, (name,)) as scene:
        return scene.read(name, (0, SIZE[0]), (0, SIZE[1]))


HOLE = slice(20, 150), slice(10, 140)


def masked(file: Any) -> None:
    mask = np.full(SIZE, 255, np.uint8)
    mask[HOLE] = 0
    file.write_mask(mask)


def alpha(file: Any) -> None:
    mask = np.full(SIZE, 255, file.dtypes[1])
    mask[HOLE] = 0
    file.write(mask, 2)


def scaled(file: Any) -> None:
    file.scales, file.offsets = (0.25,) * file.count, (-50.0,) * file.count


def said_beside(file: Any) -> None:
    """As GDAL writes what it may not put into a file."""
    band = '<PAMRasterBand band="1"><NoDataValue>-9999</NoDataValue></PAMRasterBand>'
    Path(f"{file.name}.aux.xml").write_text(f"<PAMDataset>{band}</PAMDataset>")


VALUES: dict[str, tuple[float, dict[str, Any]]] = {
    "a value of its own": (-9999, {"nodata": -9999}),
    "NaN": (np.nan, {"nodata": np.nan}),
    "the least float, in few digits": (-3.4e38, {"nodata": -3.4e38}),
    "0 of bytes": (0, {"nodata": 0, "dtype": "uint8"}),
    "a negative byte": (-1, {"nodata": -1, "dtype": "int8"}),
    "nothing, so that of xView3": (-32768, {}),
    "an infinity that no tag names": (-np.inf, {"nodata": -9999}),
    "a mask": (7, {"after": masked}),
    "an alpha band": (7, {"after": alpha, "count": 2, "dtype": "uint8", "alpha": "yes"}),
    "scaled integers": (-1, {"nodata": -1, "dtype": "int16", "after": scaled}),
    "16 bits": (-9999, {"nodata": -9999, **HALVES}),
    "16 bits, deflated": (0, {"nodata": 0, **HALVES, **PIECES}),
    "16 bits and a mask": (7, {**HALVES, "after": masked}),
    "16 bits as LZW with a predictor": (
        -32768, {"nodata": -32768, **HALVES, "compress": "lzw", "predictor": 3}
    ),
    "16 bits, scaled": (-1, {"nodata": -1, **HALVES, "after": scaled}),
    "16 bits, said beside": (-9999, {**HALVES, "after": said_beside}),
    "big endian": (-9999, {"nodata": -9999, "endianness": "big", "dtype": "float64"}),
}  # fmt: skip


@pytest.mark.parametrize("missing", VALUES)
def test_what_a_file_says_of_its_values_holds(missing: str, tmp_path) -> None:
    value, profile = VALUES[missing]
    values = radar()
    values[HOLE] = value
    expected = radar() * 0.25 - 50 if profile.get("after") is scaled else radar()
    expected[HOLE] = np.nan
    tif(tmp_path / VH, values, **profile)
    np.testing.assert_array_equal(seen(tmp_path), expected)


@pytest.mark.parametrize("nodata", [-32768.0, None])
@pytest.mark.parametrize("profile", [{"dtype": "float32"}, HALVES])
def test_left_out_pieces_are_void(profile: dict[str, Any], nodata: float | None, tmp_path) -> None:
    """SPARSE_OK: the file is whole. Without a no-data value they are 0, as GDAL has it."""
    values = radar()
    values[:256] = nodata or 0
    path = tif(tmp_path / VH, values, nodata=nodata, sparse_ok=True, **profile, **PIECES)
    with rasterio.open(path) as file:
        np.testing.assert_array_equal(file.read(1), values)
    expected = values.copy()
    expected[expected == nodata] = np.nan
    np.testing.assert_array_equal(seen(tmp_path), expected)
    source = open_source(path)
    np.testing.assert_array_equal(source.read(source.domain)[0, 0, 0], expected)


@given(drawn=st.data())
def test_a_raster_is_what_rasterio_reads_or_refused(drawn: st.DataObject, tmp_path_factory) -> None:
    dtype = drawn.draw(st.sampled_from(["uint8", "int16", "uint16", "float32", "float64", "halves",
                                       "complex64"]))  # fmt: skip
    profile: dict[str, Any] = HALVES if dtype == "halves" else {"dtype": dtype}
    profile = profile | drawn.draw(st.sampled_from([PIECES, {}, {"compress": "lzw"}]))
    nodata = drawn.draw(st.sampled_from([None, 0, 3, 100]))
    after = drawn.draw(st.sampled_from([lambda file: None, masked, scaled]))
    count = drawn.draw(st.sampled_from([1, 1, 1, 2]))
    folder = tmp_path_factory.mktemp("any")
    path = tif(folder / VH, radar(), nodata=nodata, after=after, count=count, **profile)
    rows, columns = (sorted(drawn.draw(st.lists(st.integers(0, side), min_size=2, max_size=2,
                                               unique=True))) for side in SIZE)  # fmt: skip
    window = (rows[0], rows[1]), (columns[0], columns[1])
    if count == 2 or dtype == "complex64":
        with pytest.raises(UsageError, match=r"VH_dB.tif has (2 bands|complex samples)"):
            Scene(folder, ("vh",))
        return
    with rasterio.open(path) as file:
        oracle = file.read(1, window=window, masked=True)
        oracle = (oracle * file.scales[0] + file.offsets[0]).astype(np.float32, copy=False)
    with Scene(folder, ("vh",)) as scene:
        np.testing.assert_array_equal(
            scene.read("vh", *window).astype(np.float32), oracle.filled(np.nan)
        )


def depths(shape: tuple[int, int]) -> np.ndarray:
    down, right = np.mgrid[: shape[0], : shape[1]]
    return (-30 * down - 7 * right - 5 + 40 * np.sin(down / 3 + right / 2)).astype(np.float32)


def over_the_radar(crs: str, pixel: float, shape: tuple[int, int]) -> Affine:
    """A place of a raster whose middle lies over that of the radar."""
    middle = EAST + 5 * SIZE[1], NORTH - 5 * SIZE[0]
    (x,), (y,) = warp.transform(UTM, crs, [middle[0]], [middle[1]])
    return Affine(pixel, 0, x - pixel * shape[1] / 2, 0, -pixel, y + pixel * shape[0] / 2)


PLACES: dict[str, tuple[str, Affine | float]] = {
    "south at the top": (UTM, Affine(500, 0, EAST, 0, 500, NORTH - 6000)),
    "east at the left": (UTM, Affine(-500, 0, EAST + 6000, 0, -500, NORTH)),
    "half a pixel away": (UTM, Affine(500, 0, EAST - 250, 0, -500, NORTH + 250)),
    "turned": (UTM, Affine(400, 300, EAST - 2000, 300, -400, NORTH)),
    "another zone": ("EPSG:32654", 500),
    "degrees": ("EPSG:4326", 0.005),
    "Mercator": ("EPSG:3857", 900),
    "a point for a pixel": (UTM, Affine(500, 0, EAST - 250, 0, -500, NORTH + 250)),
}
"""Of some rasters only the size of a pixel is given: they lie over the radar."""


@pytest.mark.parametrize("place", PLACES)
def test_a_coarse_raster_lies_where_it_says(place: str, tmp_path) -> None:
    """Warped by rasterio straight to the radar's grid, the raster is the same."""
    crs, at = PLACES[place]
    if not isinstance(at, Affine):
        at = over_the_radar(crs, at, (12, 12))
    tif(tmp_path / VH, radar())

    def pointed(file: Any) -> None:
        if place == "a point for a pixel":
            file.update_tags(AREA_OR_POINT="Point")

    values = depths((12, 12))
    values[[2, 8, 2, 8, 5], [2, 2, 8, 8, 5]] = -9999
    path = tif(tmp_path / DEPTH, values, at, crs, nodata=-9999, after=pointed)
    with rasterio.open(path) as file:
        straight, near = (
            warp.reproject(
                rasterio.band(file, 1), np.full(SIZE, np.nan, np.float32), dst_transform=UP,
                dst_crs=UTM, dst_nodata=np.nan, resampling=how, tolerance=0,
            )[0]
            for how in (rasterio.enums.Resampling.bilinear, rasterio.enums.Resampling.nearest)
        )  # fmt: skip
    pixels = seen(tmp_path, "bathymetry")
    with Scene(tmp_path, ("bathymetry",)) as scene:
        assert scene.coarse["bathymetry"].count_valid(SIZE) == np.isfinite(pixels).sum()
    # What is missing is so by the nearest pixel, to which a pixel on a border may belong or not.
    assert (np.isnan(pixels) != np.isnan(near)).mean() < 0.02
    both = np.isfinite(pixels) & np.isfinite(straight)
    assert both.mean() > 0.5 and np.isnan(pixels).any()
    apart = np.abs(pixels - straight)[both] / np.ptp(straight[both])
    assert (np.percentile(apart, (99, 100)) < (0.005, 0.03)).all()


def gone(folder: Path) -> None:
    tif(folder / VH, radar(), Affine.identity(), None)


def elsewhere(**profile: Any) -> Callable[[Path], None]:
    place = Affine(10, 0, EAST, 0, -10, NORTH + 5000)
    return lambda folder: tif(folder / CHANNELS["vv"].file, radar(), **{"place": place, **profile})


def deep(values: Any = None, **profile: Any) -> Callable[[Path], None]:
    place = Affine(500, 0, EAST, 0, -500, NORTH)
    array = depths((12, 12)) if values is None else values
    return lambda folder: tif(folder / DEPTH, array, **{"place": place, **profile})


def two_images(folder: Path) -> None:
    import tifffile

    for image in range(2):
        tifffile.imwrite(folder / VH, radar() + image, append=image > 0)


def in_unit(unit: str) -> Callable[[Any], None]:
    return lambda file: setattr(file, "units", (unit,))


def by_points(folder: Path) -> None:
    points = [
        control.GroundControlPoint(row, column, EAST + 10 * column, NORTH - 10 * row)
        for row in (0, SIZE[0]) for column in (0, SIZE[1])
    ]  # fmt: skip
    for name in ("vh", "vv"):
        tif(folder / CHANNELS[name].file, radar(), None, UTM, gcps=points)


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: tif(f / VH, radar("complex64")), "VH_dB.tif has complex samples .complex64."),
    (lambda f: tif(f / VH, radar(), count=2), "VH_dB.tif has 2 bands, and a channel is one"),
    (deep(count=3), "bathymetry.tif has 3 bands, and a channel is one"),
    (two_images, "VH_dB.tif holds 2 images, and a channel is one"),
    (
        lambda f: tif(f / CHANNELS["vv"].file, radar()[:200]),
        "VV_dB.tif has 200 x 320 pixels and VH_dB.tif 300 x 320",
    ),
    (gone, "VH_dB.tif has no place on Earth .no transform., and VV_dB.tif has one"),
    (deep(place=Affine.identity(), crs=None), "bathymetry.tif has no place on Earth"),
    (by_points, "VH_dB.tif has no place .* ground control points: warp it .*try.tif has one"),
    (deep(crs='LOCAL_CS["mine",UNIT["m",1]]'), "bathymetry.tif cannot be warped .*: no way leads"),
    (deep(crs=None), "bathymetry.tif has no coordinate system .CRS., and VH_dB.tif has one"),
    (elsewhere(), "VV_dB.tif lies elsewhere than VH_dB.tif: a corner is 500 pixels away"),
    (elsewhere(place=UP, crs="EPSG:32633"), "VV_dB.tif lies elsewhere than VH_dB.tif"),
    (elsewhere(place=Affine(10, 0, EAST, 0, 10, NORTH)), "VV_dB.tif lies elsewhere"),
    (deep(place=Affine(500, 0, 7e5, 0, -500, 5e6)), "it covers no pixel of .*VH_dB.tif"),
    (deep(crs="EPSG:4326"), "bathymetry.tif (lies elsewhere|cannot be warped)"),
    (
        deep(place=Affine(0.01, 0, 190, 0, -0.01, 60), crs="EPSG:4326"),
        "bathymetry.tif lies elsewhere: it covers no pixel of",
    ),
    (deep(after=in_unit("ft")), "bathymetry.tif is in 'ft', and the model takes m"),
    (lambda f: tif(f / VH, radar(), after=in_unit("linear")), "is in 'linear', and .* takes db"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_what_cannot_be_right_is_refused_by_name(change, sentence, tmp_path) -> None:
    for name in ("vh", "vv"):
        tif(tmp_path / CHANNELS[name].file, radar())
    deep(after=in_unit("m"))(tmp_path)
    Scene(tmp_path, ("vh", "vv", "bathymetry")).close()
    change(tmp_path)
    with pytest.raises(UsageError, match=sentence) as caught:
        Scene(tmp_path, ("vh", "vv", "bathymetry"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "crs", "note"),
    [
        (UP, UTM, ""),
        (Affine.identity(), None, "have no place on Earth and are taken to cover the sa"),
        (UP, None, "the rasters name no coordinate system .CRS., and are taken to share one"),
        (Affine(20, 0, EAST, 0, -20, NORTH), UTM, "pixels are 20 x 20 m; boxes, dist"),
        (Affine(1e-4, 0, 9, 0, -1e-4, 60), "EPSG:4326", "pixels are 11.1 x 5.58 m; box"),
    ],
)
def test_what_a_user_should_know_of_a_place_is_noted(place, crs, note, tmp_path) -> None:
    tif(tmp_path / VH, radar(), place, crs)
    with Scene(tmp_path, ("vh",)) as scene:
        assert len(scene.notes) == bool(note)
        assert not note or re.search(note, scene.notes[0])


RPC_NUMBERS = [f"{of}_{what}" for of in ("height", "lat", "line", "long", "samp")
               for what in ("off", "scale")]  # fmt: skip
RPC_LISTS = [f"{of}_{what}_coeff" for of in ("line", "samp") for what in ("num", "den")]


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
@pytest.mark.parametrize("by", ["points", "rpcs"])
def test_points_and_alpha_are_named(by: str, tmp_path) -> None:
    place = str(tmp_path / "in.tif")
    profile = {"driver": "GTiff", "width": 8, "height": 4, "count": 2, "dtype": "uint8"}
    profile["ALPHA"] = "YES"
    corners = [(0, 0, 1, 9), (0, 7, 2, 9), (3, 0, 1, 8), (3, 7, 2, 8)]
    with rasterio.open(place, "w", **profile) as file:
        file.write(np.ones((2, 4, 8), "uint8"))
        if by == "points":
            points = [control.GroundControlPoint(*each) for each in corners]
            file.gcps = points, rasterio.crs.CRS.from_epsg(4326)
        else:
            ones = dict.fromkeys(RPC_NUMBERS, 1.0)
            lists = {key: [1.0, *[0.0] * 19] for key in RPC_LISTS}
            file.rpcs = imported_later("rasterio.rpc").RPC(**ones, **lists)
    imported_later("rasterio.shutil").copy(place, str(tmp_path / "in.vrt"), driver="VRT")
    for name in ("in.tif", "in.vrt"):
        said = " ".join(open_source(tmp_path / name).notes)
        assert "control points or RPCs are not carried" in said
        assert "a band of the input is alpha" in said


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
@pytest.mark.parametrize("driver", ["PNG", "GTiff"])
def test_a_palette_is_named(driver: str, tmp_path) -> None:
    place = str(tmp_path / ("in.png" if driver == "PNG" else "in.tif"))
    numbers = np.arange(32, dtype="uint8").reshape(4, 8)
    profile = {"driver": driver, "width": 8, "height": 4, "count": 1, "dtype": "uint8"}
    with rasterio.open(place, "w", **profile) as file:
        file.write_colormap(1, {n: (n, 255 - n, 0, 255) for n in range(32)})
        file.write(numbers, 1)
    source = open_source(place)
    assert "the input is PALETTE, and its numbers are read as stored" in source.notes
    assert (source.read(source.domain).squeeze() == numbers).all()


def test_the_centre_of_a_voxel_of_an_overview_is_that_of_those_it_is_made_of(tmp_path) -> None:
    place = str(tif(tmp_path / "in.tif", radar(), **PIECES))
    with rasterio.open(place, "r+") as file:
        file.build_overviews([2], rasterio.enums.Resampling.average)
    imported_later("rasterio.shutil").copy(place, str(tmp_path / "in.vrt"), driver="VRT")
    for name in ("in.tif", "in.vrt"):
        source = open_source(tmp_path / name, level=1)
        assert source.scale == (1, 1, 1, 20, 20) and source.translation == (0, 0, 0, 5, 5)
