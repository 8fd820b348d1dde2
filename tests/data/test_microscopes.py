"""CZI, ND2 and LIF, each as the library that is made for it reads it."""

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.cli import main
from penstock.data import Box, open_source
from penstock.data.stores import sliced

from ..later import imported_later
from .microscope_files import write_lif, write_lsm, write_nd2, write_stk
from .test_formats import read, refused

pytestmark = pytest.mark.usefixtures("here")

czi = imported_later("pylibCZIrw.czi")
nd2 = imported_later("nd2")
liffile = imported_later("liffile")
tifffile = imported_later("tifffile")

RANDOM = np.random.default_rng(7)
CZYX = RANDOM.integers(0, 60000, (2, 3, 70, 90), "uint16")
FRAMES = RANDOM.integers(0, 60000, (24, 2, 20, 31), "uint16")


def write_czi(path: str, scenes: int = 1, **options: Any) -> None:
    """Scenes beside each other, each of two tiles."""
    with czi.create_czi(path, **options) as file:
        for scene, c, z in np.ndindex(scenes, 2, 3):
            plane, left = {"C": c, "Z": z, "T": 0}, 10 + 500 * scene
            file.write(CZYX[c, z, :, :50], plane=plane, location=(left, 20), scene=scene)
            file.write(CZYX[c, z, :, 50:], plane=plane, location=(left + 50, 20), scene=scene)
        names = {0: "DAPI", 1: "GFP"}
        file.write_metadata("doc", names, scale_x=5e-7, scale_y=2.5e-7, scale_z=2e-6)


@pytest.mark.parametrize("compression", [None, "zstd1:ExplicitLevel=3"])
def test_czi(compression: str | None) -> None:
    write_czi("a.czi", compression_options=compression)
    source, made = read("a.czi")
    assert (made[0] == CZYX).all() and source.axes == "tczyx"
    with czi.open_czi("a.czi") as file:
        right = file.read(roi=(10, 20, 90, 70), plane={"C": 1, "Z": 2, "T": 0})[..., 0]
    assert (made[0, 1, 2] == right).all()
    np.testing.assert_allclose(source.scale, (1, 1, 2, 0.25, 0.5))
    np.testing.assert_allclose(source.translation, (0, 0, 0, 5, 5))
    assert source.units[2:] == ("micrometer",) * 3 and source.chunks == (1, 1, 1, 70, 50)
    assert [each["label"] for each in source.omero] == ["DAPI", "GFP"]


def test_scenes_of_czi(capsys) -> None:
    write_czi("a.czi", scenes=2)
    refused("a.czi", "holds 2 scenes (0 70 x 90, 1 70 x 90); --series N takes one")
    refused("a.czi", "--series 2 does not exist; it has 2", series=2)
    refused("a.czi", "level 1 does not exist; it has level 0 only", series=1, level=1)
    source, made = read("a.czi", series=1)
    assert (made[0] == CZYX).all() and source.translation[4] == pytest.approx(255)
    assert main(["info", "a.czi"]) == 0
    assert "penstock info a.czi --series 1  70 x 90" in capsys.readouterr().out
    assert main(["info", "a.czi", "--series", "1"]) == 0
    assert "tczyx 1 x 2 x 3 x 70 x 90 uint16" in capsys.readouterr().out


def test_the_pyramid_of_a_czi_is_read(capsys) -> None:
    """pylibCZIrw writes none: tiles become those of levels by a longer side in their headers."""
    sides, level = [(90, 70), (45, 35), (23, 18)], {}
    with czi.create_czi("a.czi") as file:
        for number, (width, height) in enumerate(sides):
            level[number] = RANDOM.integers(1, 60000, (height, width), "uint16")
            file.write(level[number], plane={"C": 0, "Z": 0, "T": 0}, location=(10, 20))
        file.write_metadata("doc", scale_x=5e-7, scale_y=2.5e-7, scale_z=2e-6)
    whole = Path("a.czi").read_bytes()
    for shown in sides[1:]:
        for axis, start, size, side in zip(b"XY", (10, 20), sides[0], shown, strict=True):
            said = struct.pack("<4siifi", bytes([axis]), start, side, 0, side)
            assert whole.count(said) == 2
            whole = whole.replace(said, struct.pack("<4siifi", bytes([axis]), start, size, 0, side))
    Path("a.czi").write_bytes(whole)
    for number, by in enumerate((1, 2, 4)):
        source, made = read("a.czi", level=number)
        height, width = 70 // by, 90 // by
        assert (made[0, 0, 0] == level[number][:height, :width]).all()
        np.testing.assert_allclose(source.scale, (1, 1, 2, 0.25 * by, 0.5 * by))
        corner = [0.25 * (20 + (by - 1) / 2), 0.5 * (10 + (by - 1) / 2)]
        np.testing.assert_allclose(source.translation[3:], corner)
        assert source.chunks == (1, 1, 1, height, width)
    part = open_source("a.czi", level=1).read(Box((0, 0, 0, 3, 7), (1, 1, 1, 14, 22)))
    assert (part[0, 0, 0] == level[1][3:14, 7:22]).all()
    refused("a.czi", "level 3 does not exist; 0 to 2 do", level=3)
    assert main(["info", "a.czi"]) == 0
    assert "level 2   tczyx 1 x 1 x 1 x 17 x 22" in capsys.readouterr().out


def test_czi_of_colours_and_what_no_tile_covers() -> None:
    colours = RANDOM.integers(0, 255, (40, 50, 3), "uint8")
    with czi.create_czi("a.czi") as file:
        file.write(colours)
        file.write(colours, location=(60, 10))
    source, made = read("a.czi")
    assert source.domain.shape == (1, 3, 1, 50, 110) and source.bands and source.scale is None
    assert (made[0, :, 0, :40, :50] == colours.transpose(2, 0, 1)[::-1]).all()  # blue is first
    assert not made[..., 50:60].any()
    assert source.notes == ("the input's tiles cover at most 72.7 % of it; gaps read as 0",)
    low, high = (Box((0, 0, 0, y, 50), (1, 3, 1, y + 10, 60)) for y in (0, 40))
    beside = Box((0, 0, 0, 40, 0), (1, 3, 1, 50, 61))
    assert source.tells_absent and source.absent([low, beside, high]) == [low, high]


TIMES = [
    ("<Interval><Increment>33.4</Increment></Interval>", (33.4, "second")),
    ("<List><Offsets>0 60.075 120.151</Offsets></List>", (60.0755, "second")),
    ("<List><Offsets>0 60 300</Offsets></List>", (1.0, None)),
]


@pytest.mark.parametrize(("positions", "interval"), TIMES, ids=["interval", "list", "uneven"])
def test_times_and_colours_of_czi(positions: str, interval: tuple[float, str | None]) -> None:
    """pylibCZIrw writes no times: what a microscope says takes the place of a title."""
    looks = "".join(
        f'<Channel Id="{number}" Name="{name}"><Color>#FF{colour}</Color></Channel>'
        for number, name, colour in (("Channel:0", "blue", "00A1FF"), ("c15b", "GFP", "00ff5b"))
    )
    inside = (
        f"</Title></Document><Image><Dimensions><T><Positions>{positions}</Positions></T>"
        f"</Dimensions></Image></Information><DisplaySetting><Channels>{looks}</Channels>"
        "</DisplaySetting><Information><Document><Title>"
    )
    with czi.create_czi("a.czi") as file:
        for t, c in np.ndindex(3, 2):
            file.write(CZYX[c, t], plane={"T": t, "C": c})
        title = "x" * len(inside)
        file.write_metadata(title, {0: "DAPI"}, scale_x=1e-6, scale_y=1e-6)
    whole = Path("a.czi").read_bytes()
    Path("a.czi").write_bytes(whole.replace(title.encode(), inside.encode()))
    source, made = read("a.czi")
    assert (made[:, :, 0] == CZYX.swapaxes(0, 1)).all() and not source.notes
    assert (source.scale[0], source.units[0]) == pytest.approx(interval)
    shown = [(each["label"], each["color"]) for each in source.omero]
    assert shown == [("DAPI", "00A1FF"), ("GFP", "00FF5B")]


def test_a_plane_that_a_czi_lacks_is_absent() -> None:
    with czi.create_czi("a.czi") as file:
        for t, c in ((0, 0), (0, 1), (1, 0)):
            file.write(CZYX[c, t], plane={"T": t, "C": c})
    source = open_source("a.czi")
    cells = [Box((t, c, 0, 0, 0), (t + 1, c + 1, 1, 70, 90)) for t, c in np.ndindex(2, 2)]
    assert source.absent(cells) == cells[3:] and not source.read(cells[3]).any()


def test_a_block_of_czi_decodes_the_tiles_that_it_touches() -> None:
    write_czi("a.czi", compression_options="zstd1:ExplicitLevel=3")
    whole = bytearray(Path("a.czi").read_bytes())
    last = whole.rindex(b"ZISRAWSUBBLOCK")  # the right half of the last plane
    whole[last + 32 + 256 : last + 32 + 900] = b"\xff" * 644
    Path("a.czi").write_bytes(whole)
    source = open_source("a.czi")
    assert (source.read(Box((0, 0, 0, 0, 0), (1, 2, 3, 70, 50)))[0] == CZYX[..., :50]).all()
    with pytest.raises(RuntimeError):
        source.read(source.domain)


def test_many_threads_read_one_czi() -> None:
    write_czi("a.czi", compression_options="zstd1:ExplicitLevel=3")
    source = open_source("a.czi").with_cache(2**20)
    box, right = Box((0, 1, 1, 11, 40), (1, 2, 3, 60, 70)), CZYX[1, 1:3, 11:60, 40:70]
    with ThreadPoolExecutor(4) as threads:
        assert all((made[0, 0] == right).all() for made in threads.map(source.read, [box] * 80))


LOOPS = [("t", 2), ("p", 3), ("z", 4)]


@pytest.mark.parametrize("packed", [False, True])
def test_nd2_is_read_as_nd2_reads_it(packed: bool) -> None:
    write_nd2("a.nd2", FRAMES, LOOPS, names=("DAPI", "GFP"), packed=packed)
    refused("a.nd2", "holds 3 positions (0 well 0, 1 well 1, 2 well 2)")
    right = nd2.imread("a.nd2")
    assert (right.reshape(FRAMES.shape) == FRAMES).all()
    for series in range(3):
        source, made = read("a.nd2", series=series)
        assert (made == right[:, series].transpose(0, 2, 1, 3, 4)).all()
    assert source.scale == (0.5, 1, 1.5, 0.25, 0.25) and source.axes == "tczyx"
    assert source.units == ("second", None, *("micrometer",) * 3)
    shown = [(each["label"], each["color"]) for each in source.omero]
    assert shown == [("DAPI", "FF0000"), ("GFP", "FF0000")]
    assert source.cache_bytes == packed * 2**20
    assert source.notes == ("the input's positions of the stage go no further",)


def test_nd2_of_colours_and_of_one_frame() -> None:
    colours = RANDOM.integers(0, 255, (2, 3, 20, 30), "uint8")
    write_nd2("a.nd2", colours, [("z", 2)], samples=3)
    source, made = read("a.nd2")
    assert (made[0] == nd2.imread("a.nd2").transpose(3, 0, 1, 2)).all() and source.bands
    write_nd2("b.nd2", FRAMES[:1, :1])
    refused("b.nd2", "--series 1 does not exist; it has 1", series=1)
    source, made = read("b.nd2", series=0)
    assert (made[0, 0, 0] == nd2.imread("b.nd2")).all() and source.axes == "cyx"


def test_nd2_that_says_nothing_of_channels_is_read() -> None:
    write_nd2("a.nd2", FRAMES[:2, :1], [("z", 2)], names=())
    source, made = read("a.nd2")
    assert (made[0, 0] == nd2.imread("a.nd2")).all() and source.scale is None


def test_nd2_that_lacks_frames_says_so() -> None:
    write_nd2("a.nd2", FRAMES[:4, :1], [("z", 4)], absent=[3])
    source, made = read("a.nd2")
    assert source.notes == ("the input holds 3 frames of 4; the others read as 0",)
    assert source.tells_absent is False  # which ones, the library does not say
    assert (made[0, 0] == nd2.imread("a.nd2")).all() and not made[0, 0, 3].any()


def images() -> dict[str, tuple[str, NDArray[Any]]]:
    return {
        "stack": ("czyx", CZYX),
        "colours": ("zyxs", RANDOM.integers(0, 255, (4, 20, 30, 3), "uint8")),
        "film": ("tzyx", RANDOM.normal(size=(3, 2, 9, 8)).astype("float32")),
    }


def test_lif_is_read_as_liffile_reads_it(capsys) -> None:
    write_lif("a.lif", images())
    refused("a.lif", "holds 3 images (0 stack 2 x 3 x 70 x 90, 1 colours", "--series N takes one")
    refused("a.lif::none", "has no image none; it holds stack (2 x 3 x 70 x 90), colours")
    refused("a.lif", "LIF files have no levels", level=1)
    source, made = read("a.lif::stack")
    right = liffile.imread("a.lif", image="stack")
    assert (made[0] == right).all() and (right == CZYX).all() and source.axes == "czyx"
    np.testing.assert_allclose(source.scale, (1, 1, 0.2, 0.2, 0.2))
    np.testing.assert_allclose(source.translation, (0, 0, 2, 2, 2))
    source, made = read("a.lif", series=1)
    assert (made[0] == liffile.imread("a.lif", image=1).transpose(3, 0, 1, 2)).all()
    assert source.bands and source.axes == "czyx"
    source, made = read("a.lif::film")
    assert (made[:, 0] == liffile.imread("a.lif", image=2)).all() and source.units[0] == "second"
    assert main(["info", "a.lif"]) == 0
    assert "penstock info a.lif --series 2  film 3 x 2 x 9 x 8" in capsys.readouterr().out


def test_sizes_of_lif_that_run_backwards_or_along_axes_of_other_names() -> None:
    write_lif("a.lif", {"xz": ("tczx", CZYX)}, size=-2e-7)
    refused("a.lif", "axes ['t', 'c', 'z', 'x'] lack y or x; --axes")
    source, made = read("a.lif", axes="tcyx")
    assert (made[:, :, 0] == CZYX).all()
    np.testing.assert_allclose(source.scale[3:], 0.2)
    assert source.units[3:] == ("micrometer", "micrometer") and not any(source.translation)
    assert "the input runs backwards along y, and only its size goes further" in source.notes


def test_sizes_and_colours_of_lsm() -> None:
    right = RANDOM.integers(0, 60000, (2, 3, 3, 32, 40), "uint16")
    write_lsm("a.lsm", right, {"Ch1": (255, 0, 0), "Ch2": (0, 128, 255), "T": (255, 255, 255)})
    source, made = read("a.lsm")
    assert (made == right.swapaxes(1, 2)).all() and source.axes == "tczyx"
    np.testing.assert_allclose(source.scale, (2.5, 1, 1, 0.2, 0.1))
    assert source.units == ("second", None, *("micrometer",) * 3) and not source.notes
    shown = [(each["label"], each["color"]) for each in source.omero]
    assert shown == [("Ch1", "FF0000"), ("Ch2", "0080FF"), ("T", "FFFFFF")]


def test_a_stack_of_metamorph() -> None:
    write_stk("a.stk", FRAMES[:4, 0])
    source, made = read("a.stk")
    assert (made[0, 0] == FRAMES[:4, 0]).all() and source.axes == "zyx"
    assert source.scale == (1, 1, 1.5, 0.5, 0.645)
    assert source.units[2:] == ("micrometer",) * 3


def test_a_slide_beside_its_thumbnail() -> None:
    slide = RANDOM.integers(0, 255, (64, 80, 3), "uint8")
    said = "Aperio Image Library v12.2.2\r\n64x80 JPEG/RGB Q=30|AppMag = 20|MPP = 0.4990|Left = 2"
    with tifffile.TiffWriter("a.svs") as file:
        file.write(slide, tile=(32, 32), description=said, metadata=None)
        file.write(slide[::4, ::4], metadata=None)
    source, made = read("a.svs")
    assert (made[0, :, 0] == slide.transpose(2, 0, 1)).all() and source.bands
    assert source.scale == (1, 1, 1, 0.499, 0.499) and source.units[-1] == "micrometer"
    assert [each["color"] for each in source.omero] == ["FF0000", "00FF00", "0000FF"]
    assert open_source("a.svs", series=1).domain.shape == (1, 3, 1, 16, 20)


def test_threads_that_share_a_frame_wait_for_one_decoding() -> None:
    begun, stack = [], sliced.FrameStack([3], (4, 5), "uint8", lambda place: decode(place), 60)

    def decode(place: tuple[int, ...]) -> NDArray[Any]:
        begun.append(place)
        time.sleep(0.05)  # so that the others come meanwhile
        return np.full((4, 5), place[0], "uint8")

    with ThreadPoolExecutor(4) as pool:
        parts = [(slice(0, 3), slice(y, y + 1), slice(0, 5)) for y in range(4)]
        rows = [np.empty((3, 1, 5), "uint8") for _ in parts]
        list(pool.map(stack.read_into, parts, rows))
    assert sorted(begun) == [(0,), (1,), (2,)]
    assert (np.concatenate(rows, axis=1) == np.arange(3)[:, None, None]).all()


def _write_all() -> list[Path]:
    write_czi("a.czi")
    write_nd2("a.nd2", FRAMES[:4], [("z", 4)], names=("DAPI", "GFP"))
    write_lif("a.lif", {"stack": images()["stack"]})
    return [Path("a.czi"), Path("a.nd2"), Path("a.lif")]


def test_a_damaged_or_foreign_file_is_refused() -> None:
    for path in _write_all():
        whole = path.read_bytes()
        left = [whole[: int(share * len(whole))] for share in (0, 1e-3, 0.01, 0.5, 0.9, 0.98)]
        left += [] if path.suffix == ".czi" else [whole[:-1]]  # the end of a CZI is padding
        for damaged in (*left, b"no" * 400, whole[:20] + RANDOM.bytes(9000)):
            path.write_bytes(damaged)
            refused(str(path), f"{path}: not a readable {path.suffix[1:].upper()} file")
        path.unlink()
        refused(str(path), "no such file")


def test_a_czi_without_tiles_or_without_its_first_planes_is_refused() -> None:
    with czi.create_czi("a.czi") as file:
        file.write_metadata("doc")
    refused("a.czi", "a.czi: holds no tile")
    with czi.create_czi("b.czi") as file:
        for z in (2, 3):
            file.write(CZYX[0, 0], plane={"C": 0, "Z": z, "T": 0})
    refused("b.czi", "not a readable CZI file", "'Z' is out-of-range")


def test_a_lif_of_other_files_is_refused() -> None:
    """It could name any file of this machine."""
    xml = '<?xml version="1.0"?><LMSDataContainerHeader Version="2"><Element Name="a"><Memory '
    Path("a.lif").write_text(xml + 'Size="9"><Frame File="b.tif" Offset="0" Size="9"/></Memory>'
                             "</Element></LMSDataContainerHeader>")  # fmt: skip
    refused("a.lif", "not a LIF file")
