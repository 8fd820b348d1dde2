"""Files that are the planes of a volume, by their names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.data import Box, open_sink, open_source, overlap

from ..later import imported_later
from ..traced import traced
from .test_formats import ZYX, read, refused

pytestmark = pytest.mark.usefixtures("here")

nibabel = imported_later("nibabel")
tifffile = imported_later("tifffile")
PLANES = ("planes", "planes/", "planes/*.tif", "planes/img_*.tif")


@pytest.mark.parametrize("form", [{}, {"compression": "zlib"}, {"tile": (16, 16)}])
def test_planes(form: dict[str, Any]) -> None:
    Path("planes").mkdir()
    for z, plane in enumerate(np.concatenate([ZYX, ZYX, ZYX])):
        tifffile.imwrite(f"planes/img_{z}.tif", plane, **form)
    for path in ("planes", "planes/img_*.tif") if form else PLANES:
        source, made = read(path)
        assert (made[0, 0] == np.concatenate([ZYX, ZYX, ZYX])).all() and source.axes == "zyx"
    Path("planes/img_7.tif").unlink()
    refused("planes", "1 plane missing between img_0.tif and img_14.tif: 7")
    tifffile.imwrite("planes/img_7.tif", ZYX[0].astype("uint8"))
    refused("planes", "img_7.tif: has 37 x 41 of uint8, where img_0.tif has 37 x 41 of uint16")
    tifffile.imwrite("planes/img_7.tif", ZYX[0, :9])
    refused("planes/*.tif", "img_7.tif: has 9 x 41 of uint16")
    refused("planes/none*.tif", "no file has such a name")


def test_numbers_that_lie_far_apart_take_no_memory() -> None:
    """Such as times in milliseconds: all numbers between them do not fit into any memory."""
    for number in (0, 10**6, 2 * 10**6):
        tifffile.imwrite(f"{number}.tif", ZYX[0])
    with traced() as peak:
        assert read("*.tif")[0].domain.shape == (1, 1, 3, 37, 41)
        tifffile.imwrite("1.tif", ZYX[0])
        refused("*.tif", "1,999,997 planes missing between 0.tif and 2000000.tif: 2, 3, 4, 5, 6, 7")
        assert peak() < 2**24


TIMES = {
    "days": (["t_20240101.tif", "t_20240108.tif", "t_20240115.tif", "t_20240205.tif"], True),
    "weeks": ([f"S2B_2024-{month:02}-05_10m.tif" for month in (1, 2, 4)], True),
    "days in a row": (["ndvi.20240229.tif", "ndvi.20240301.tif"], False),
    "moments": (["IMG_20240101_235950.tif", "IMG_20240102_000000.tif"], False),
    "one day": (["a20240101T120000Z.tif", "a20240101T120007Z.tif", "a20240101T120100Z.tif"], True),
    "even": ([f"frame_12{second // 60:02}{second % 60:02}.tif" for second in (0, 45, 90)], False),
    "milliseconds": ([f"time{number}.tif" for number in (0, 100, 199, 301)], True),
    "months": (["pr_202311.tif", "pr_202312.tif", "pr_202401.tif"], True),
    "days of years": (["MOD13.A2023353.h18.tif", "MOD13.A2024001.h18.tif"], False),
    "a day before": (["a20230101_20240101.tif", "a20230101_20240301.tif"], False),
}


@pytest.mark.parametrize("case", TIMES)
def test_times_in_names_are_no_count_with_gaps(case: str) -> None:
    names, uneven = TIMES[case]
    for name, plane in zip(names, ZYX, strict=False):
        tifffile.imwrite(name, plane)
    source, made = read("*.tif")
    assert source.axes == "tyx" and (made[:, 0, 0] == ZYX[: len(names)]).all()
    assert any("not evenly spaced" in note for note in source.notes) == uneven


@pytest.mark.parametrize(
    "names",
    [
        ["a_2024_01_02_000001.tif", "a_2024_01_02_000002.tif", "a_2024_01_02_000004.tif"],
        ["t001.tif", "t004.tif", "t006.tif"],
        ["t0.tif", "t100.tif", "t300.tif"],
        ["20240230.tif", "20240231.tif", "20240235.tif"],
    ],
)
def test_gaps_in_counts_that_look_like_times(names: list[str]) -> None:
    for name, plane in zip(names, ZYX, strict=False):
        tifffile.imwrite(name, plane)
    refused("*.tif", "missing between")


def test_planes_share_one_cache(monkeypatch) -> None:
    """A brick of few planes has all of it: a share for each plane would decode each strip twice."""
    from penstock.data.stores import ometiff

    Path("planes").mkdir()
    for z, plane in enumerate(ZYX):
        form = {"compression": "zlib", "rowsperstrip": 8} if z else {}  # one is mapped
        tifffile.imwrite(f"planes/{4 - z}.tif", plane, **form)
    decoded, decode = [], ometiff._decode
    monkeypatch.setattr(ometiff, "_decode", lambda *key: decoded.append(key[2:]) or decode(*key))
    source = open_source("planes").with_cache(4 * 8 * 41 * 2)  # two strips of two planes
    for x in (0, 20):
        box = Box((0, 0, 0, 0, x), (1, 1, 2, 16, x + 20))
        assert (source.read(box)[0, 0] == ZYX[:2:-1, :16, x : x + 20]).all()
    assert len(decoded) == 4
    assert (source.read(source.domain)[0, 0] == ZYX[::-1]).all()


def test_planes_of_colours_and_of_several_channels() -> None:
    Path("rgb").mkdir()
    colours = np.random.default_rng(3).integers(0, 255, (4, 20, 30, 3), "uint8")
    for z in range(4):
        tifffile.imwrite(f"rgb/{z:03d}.tif", colours[z], photometric="rgb")
    source, made = read("rgb")
    assert source.axes == "czyx" and (made[0] == colours.transpose(3, 0, 1, 2)).all()
    assert read("rgb", axes="yxc")[0].axes == "czyx", "said of a plane"
    refused("rgb", "4 dimensions but axes", axes="yx")


STACKS = {
    "cyx": ["Channel_0.tif", "Channel_1.tif", "Channel_2.tif"],
    "tzyx": [f"img_t{t}_z{z:03}.tif" for t in (8, 9, 10) for z in range(4)],
    "zcyx": [f"r01c01f01p{z:02}-ch{c}sk1.tiff" for z in range(3) for c in (1, 2)],
    "ctyx": [f"exp_w{c}{'XDAG'[c]}_t{t}.TIF" for c in (1, 2, 3) for t in range(2)],
    "ctzyx": [
        f"img_channel{c:03}_position000_time{t:09}_z{z:03}.tif"
        for c in range(2) for t in range(2) for z in range(2)
    ],
    "zyx": ["b_1.tif", "b_2.tif", "a_3.tif"],
}  # fmt: skip


@pytest.mark.parametrize("axes", STACKS)
def test_files_lie_along_the_axes_that_their_names_say(axes: str) -> None:
    names = STACKS[axes]
    planes = np.random.default_rng(6).integers(0, 255, (len(names), 20, 30), "uint8")
    for name, plane in zip(names, planes, strict=True):
        tifffile.imwrite(name, plane)
    source, made = read("*.[Tt][Ii]*")
    sides = {axis: source.domain.shape["tczyx".index(axis)] for axis in axes}
    right = planes.reshape(list(sides.values()))
    order = [axes.index(axis) for axis in "tczyx" if axis in axes]
    assert (np.squeeze(made) == np.squeeze(right.transpose(order))).all()
    assert source.axes == "".join(axis for axis in "tczyx" if axis in axes)
    said = [note for note in source.notes if f"lie along {', '.join(axes[:-2])}; --axes" in note]
    assert len(said) == (axes != "zyx")
    assert read("*.[Tt][Ii]*", axes=f"{'zct'[: len(axes) - 2]}yx")[0].notes == ()
    if len(axes) == 4:
        Path(names[3]).unlink()
        refused("*.[Tt][Ii]*", "files are missing: ")


def test_names_that_do_not_say_what_they_count() -> None:
    for row, column in np.ndindex(2, 2):
        tifffile.imwrite(f"a{row}_k{column}.tif", ZYX[0])
    refused("*.tif", "differ in 2 numbers", "taken for z, z", "such as --axes tzyx")
    refused("*.tif", "taken for t", axes="tyx")
    assert read("*.tif", axes="tzyx")[0].domain.shape == (2, 1, 2, 37, 41)
    assert read("a*_k1.tif")[0].domain.shape == (1, 1, 2, 37, 41)
    for name in ("red.tif", "green.tif"):
        tifffile.imwrite(f"{name}f", ZYX[0])
    assert "lie along z in the order of their names" in read("*.tiff")[0].notes[0]


def test_volumes_of_several_times() -> None:
    for t in range(3):
        tifffile.imwrite(f"t{t:03}.tif", ZYX + t, compression="zlib" if t else None)
    source, made = read("t*.tif")
    assert source.axes == "tzyx" and (made[:, 0] == ZYX + np.arange(3)[:, None, None, None]).all()
    Path("v").mkdir()
    for z in range(2):
        tifffile.imwrite(f"v/{z}.tif", ZYX)
    refused("v", "0.tif holds several planes itself, along z as the files lie")
    assert read("v", axes="tzyx")[0].domain.shape == (2, 1, 5, 37, 41)


@pytest.mark.parametrize("ending", ["png", "bmp", "npy", "nii"])
def test_planes_of_other_formats(ending: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    planes = np.random.default_rng(8).integers(0, 255, (40, 20, 30), "uint8")
    for number, plane in enumerate(planes):
        if ending == "npy":
            np.save(f"w{number}.npy", plane)
        elif ending == "nii":
            nibabel.save(nibabel.Nifti1Image(plane.T, np.eye(4)), f"w{number}.nii")
        else:
            pillow.fromarray(plane).save(f"w{number}.{ending}")
    source, made = read(f"*.{ending}")
    assert source.axes == "cyx" and (made[0, :, 0] == planes).all()
    assert [each["label"] for each in source.omero[:2]] == ["w0", "w1"]
    said = "zxy" if ending == "nii" else "zyx"  # as they are stored
    assert read(f"w*.{ending}", axes=said)[0].domain.shape == (1, 1, 40, 20, 30)
    Path(f"w1.{ending}").write_bytes(b"no")
    refused(f"*.{ending}", f"w1.{ending}: not a readable ")


@pytest.mark.parametrize(
    ("name", "words"), [("a.h5", "HDF5 files are not"), ("a.nii.gz", "compressed NIfTI files are")]
)
def test_files_that_are_not_stacked(name: str, words: str) -> None:
    Path(name).write_bytes(b"any")
    refused(f"*{Path(name).suffix}", f"{words}", "stacked; name one of them")


def test_bands_of_files_become_those_of_a_geotiff() -> None:
    """As Landsat has them. Georeferences are read of all, and the output may lie beside them."""
    rasterio = pytest.importorskip("rasterio")

    def band(number: int, east: float) -> None:
        with rasterio.open(
            f"LC08_B{number}.TIF", "w", driver="GTiff", width=30, height=20, count=1,
            dtype="uint16", crs="EPSG:32633", transform=rasterio.Affine(30, 0, east, 0, -30, 9e5),
        ) as file:  # fmt: skip
            file.write(np.full((1, 20, 30), number, "uint16"))

    def written(path: str) -> Any:
        settings = {"domain": source.domain, "dtype": source.dtype, "like": source, "files": True}
        return open_sink(path, **settings)

    for number in (2, 3, 8):
        band(number, 7e5)
    source, made = read("LC08_B*.TIF")
    assert source.bands and source.axes == "cyx" and made[0, :, 0, 0, 0].tolist() == [2, 3, 8]
    assert [each["label"] for each in source.omero] == ["LC08_B2", "LC08_B3", "LC08_B8"]
    place = written("out.tif").georeference
    assert place.transform == (30, 0, 7e5, 0, -30, 9e5) and "UTM zone 33N" in place.crs
    assert not overlap(source, written("out.tif"))
    assert overlap(source, written("LC08_B9.TIF")), "it would be a band of the next run"
    band(3, 8e5)
    with pytest.raises(UsageError, match=r"LC08_B3\.TIF lies elsewhere than LC08_B2\.TIF"):
        written("out.tif")
