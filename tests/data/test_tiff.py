"""TIFF files: their axes and segments, what is damaged, what stays in memory."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.data import Box, Source, open_source

from ..places import SHARED
from .kit import (
    DATA,
    DOMAIN,
    SHAPE,
    build_tiff_plain,
    build_tiff_strips,
    build_tiff_tiled,
    build_tiff_volume,
    ome_tiff_set,
)

MOUSE = SHARED / "mouse-brain-two-photon.ome.tif"


class TestTiffMetadata:
    @pytest.mark.parametrize("build", [build_tiff_tiled, build_tiff_strips, build_tiff_plain])
    def test_ome_tiff_sizes(self, build: Callable[[Path], Any], tmp_path) -> None:
        source = open_source(build(tmp_path))
        assert source.scale == (1.0, 1.0, 1.0, 1.5, 0.5)
        assert source.units == (None, None, None, "nanometer", "micrometer")

    @pytest.mark.parametrize(
        ("build", "chunks"),
        [
            (build_tiff_tiled, (1, 1, 1, 16, 16)),
            (build_tiff_strips, (1, 1, 1, 4, 17)),
            (build_tiff_volume, (1, 1, 4, 16, 16)),
        ],
    )
    def test_tiff_chunks_are_segments(self, build, chunks, tmp_path) -> None:
        assert open_source(build(tmp_path)).chunks == chunks

    @pytest.mark.parametrize(
        ("shape", "options", "axes"),
        [
            ((13, 17, 3), {"photometric": "rgb", "compression": "zlib"}, "cyx"),
            ((3, 13, 17), {"photometric": "rgb", "planarconfig": "separate"}, "cyx"),
            ((5, 13, 17), {"compression": "zlib"}, "zyx"),  # axes QYX: unknown, taken as z
            ((13, 17), {"compression": "zlib", "tile": (16, 16)}, "yx"),
            ((4, 3, 13, 17), {"imagej": True}, "czyx"),  # axes ZCYX
        ],
        ids=["interleaved", "planar", "unknown", "flat", "imagej"],
    )
    def test_tiff_axes(self, shape, options, axes, tmp_path) -> None:
        import tifffile

        data = np.arange(np.prod(shape), dtype="u2").reshape(shape)
        tifffile.imwrite(tmp_path / "a.tif", data, **options)
        source = open_source(tmp_path / "a.tif")
        assert source.axes == axes
        if axes == "cyx" and shape[-1] == 3:
            data = np.moveaxis(data, -1, 0)
        if axes == "czyx":
            data = data.swapaxes(0, 1)
        np.testing.assert_array_equal(source.read(source.domain).squeeze(), data)

    @pytest.mark.parametrize("form", [{}, {"compression": "zlib"}])
    def test_pages_that_were_written_one_by_one(self, form: dict[str, Any], tmp_path) -> None:
        import tifffile

        with tifffile.TiffWriter(tmp_path / "a.tif") as file:
            for plane in DATA[0, 0]:
                file.write(plane, **form)
        source = open_source(tmp_path / "a.tif")
        assert source.axes == "zyx" and (source.read(source.domain)[0, 0] == DATA[0, 0]).all()
        assert "its pages are, and they are taken for z" in source.notes[0]
        page = open_source(tmp_path / "a.tif", series=3)
        assert (page.read(page.domain)[0, 0, 0] == DATA[0, 0, 3]).all()

    def test_tiff_pyramid(self, tmp_path) -> None:
        import tifffile

        with tifffile.TiffWriter(tmp_path / "a.ome.tif") as file:
            sizes = {"axes": "YX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
            plane = np.arange(64 * 64, dtype="u2").reshape(64, 64)
            options = {"tile": (16, 16), "compression": "zlib"}
            file.write(plane, subifds=1, metadata=sizes, **options)
            file.write(plane[::2, ::2], subfiletype=1, **options)
        coarse = open_source(tmp_path / "a.ome.tif", level=1)
        assert coarse.scale == (1.0, 1.0, 1.0, 1.0, 1.0)
        np.testing.assert_array_equal(coarse.read(coarse.domain)[0, 0, 0], plane[::2, ::2])
        with pytest.raises(UsageError, match="level 2 does not exist; 0 to 1 do"):
            open_source(tmp_path / "a.ome.tif", level=2)

    def test_ome_metadata_that_is_no_xml_says_nothing(self, tmp_path) -> None:
        import tifffile

        path, plane = tmp_path / "a.ome.tif", DATA[0, 0, 0]
        tifffile.imwrite(path, plane, description="<OME><</OME>", metadata=None)
        source = open_source(path)
        assert source.scale is None
        np.testing.assert_array_equal(source.read(source.domain)[0, 0, 0], plane)

    @pytest.mark.parametrize(
        ("tag", "unknown"), [(259, 260), (262, 261)], ids=["compression", "photometric"]
    )
    def test_a_tag_that_imagej_leaves_out(self, tag: int, unknown: int, tmp_path) -> None:
        import tifffile

        path = pages(tmp_path, imagej=True)
        with tifffile.TiffFile(path) as file:
            place = file.pages[0].tags[tag].offset
        with path.open("r+b") as raw:
            raw.seek(place)
            raw.write(unknown.to_bytes(2, "big"))
        source = open_source(path)
        np.testing.assert_array_equal(source.read(source.domain).squeeze(), DATA[0, 0])

    def test_ome_tiff_of_several_files(self, tmp_path) -> None:
        names = [f"{z}.ome.tif" for z in range(3)]
        ome_tiff_set(tmp_path, names)
        source = open_source(tmp_path / names[0])
        np.testing.assert_array_equal(source.read(source.domain)[0, 0], DATA[0, 0, :3])
        (tmp_path / names[1]).unlink()
        with pytest.raises(UsageError, match=r"0\.ome\.tif: is truncated or corrupt.*1\.ome\.tif"):
            open_source(tmp_path / names[0])

    @pytest.mark.skipif(not MOUSE.exists(), reason="the shared data is absent")
    def test_a_real_ome_tiff(self) -> None:
        import tifffile

        source = open_source(MOUSE)
        assert source.axes == "czyx" and source.domain.shape == (1, 2, 30, 510, 667)
        assert source.chunks == (1, 1, 1, 196, 667) and source.scale is None
        box = Box((0, 1, 7, 180, 300), (1, 2, 12, 420, 667))
        pages = tifffile.imread(MOUSE, key=range(30 + 7, 30 + 12))
        np.testing.assert_array_equal(source.read(box), pages[None, None, :, 180:420, 300:])


def pages(folder: Path, **options: Any) -> Path:
    import tifffile

    tifffile.imwrite(folder / "a.tif", DATA[0, 0], **options)
    return folder / "a.tif"


class TestDamagedTiff:
    @pytest.mark.parametrize(
        "make",
        [
            build_tiff_tiled,
            build_tiff_strips,
            build_tiff_plain,
            build_tiff_volume,
            lambda d: pages(d, compression="zlib"),
            lambda d: pages(d, imagej=True),
            lambda d: pages(d, metadata=None),
            lambda d: pages(d, metadata=None, compression="zlib"),
            pages,
        ],
        ids="tiled strips plain volume shaped imagej pages zlib-pages contiguous".split(),
    )
    def test_cut_short_it_is_refused(self, make: Callable[[Path], Path], tmp_path) -> None:
        path = make(tmp_path)
        size = path.stat().st_size
        for left in (0.9, 0.6, 0.3):
            os.truncate(path, int(size * left))
            with pytest.raises((UsageError, OSError), match=r"a(\.ome)?\.tif: ") as caught:
                source = open_source(path)
                source.read(source.domain)
            if not isinstance(caught.value, UsageError):  # all metadata lies before the cut
                assert "page " in str(caught.value)

    def test_mapped_pixels_are_counted_at_open(self, tmp_path) -> None:
        import tifffile

        path = tmp_path / "a.tif"
        tifffile.imwrite(path, DATA[0, 0, 0], metadata=None)
        size = path.stat().st_size
        os.truncate(path, size - 100)
        message = rf"a\.tif: is shorter than its header says: {size - 100} bytes of {size}$"
        with pytest.raises(UsageError, match=message):
            open_source(path)

    def test_a_page_cut_short_is_refused_before_anything_is_begun(self, tmp_path) -> None:
        path = build_tiff_volume(tmp_path)  # segments come last in the file
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(UsageError, match=r"a\.tif: is truncated: a page ends at byte \d+"):
            open_source(path)

    def test_a_segment_cut_short_is_an_error_not_zeros(self, tmp_path) -> None:
        path = build_tiff_volume(tmp_path)
        source = open_source(path)
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(OSError, match=r"a\.tif: page 5, segment 5: the file ends after \d+"):
            source.read(DOMAIN)

    def test_a_corrupt_segment_is_named(self, tmp_path) -> None:
        import tifffile

        path = build_tiff_strips(tmp_path)
        with tifffile.TiffFile(path) as file:
            offset = file.pages[1].dataoffsets[2]
        with path.open("r+b") as raw:
            raw.seek(offset)
            raw.write(b"\xff" * 20)
        with pytest.raises(OSError, match=r"a\.ome\.tif: page 1, segment 2: "):
            open_source(path).read(DOMAIN)

    def test_a_codec_without_a_decoder_is_refused(self, tmp_path) -> None:
        import tifffile

        path = pages(tmp_path, compression="zlib")
        with tifffile.TiffFile(path) as file:
            places = [page.tags[259].valueoffset for page in file.pages]
        with path.open("r+b") as raw:
            for place in places:
                raw.seek(place)
                raw.write((34676).to_bytes(2, "little"))
        with pytest.raises(UsageError, match=r"a\.tif: not a readable TIFF file: .*SGILOG"):
            open_source(path)

    def test_ome_metadata_of_another_size(self, tmp_path) -> None:
        path = build_tiff_strips(tmp_path)
        path.write_bytes(path.read_bytes().replace(b'SizeZ="10"', b'SizeZ="90"'))
        with pytest.raises(UsageError, match=r"a\.ome\.tif: is truncated or corrupt"):
            open_source(path)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own count")
def test_a_mapped_file_does_not_stay_in_memory(tmp_path) -> None:
    num_bytes = 16 << 20
    np.save(tmp_path / "a.npy", np.ones((16, 1024, 1024), "u1"))
    source = open_source(tmp_path / "a.npy")
    boxes = [Box((0, 0, z, 0, 0), (1, 1, z + 2, 1024, 1024)) for z in range(0, 16, 2)]

    def shared() -> int:  # resident pages of mapped files
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGESIZE")

    before = shared()
    with ThreadPoolExecutor(4) as pool:
        assert all(part.all() for part in pool.map(source.read, boxes))
    assert shared() - before < num_bytes / 4


@pytest.mark.parametrize("pages", [4, 1])
def test_threads_that_read_neighbours_decode_different_segments(pages: int, tmp_path) -> None:
    """In one order, each would wait for the segment that the one before it decodes."""
    tifffile = pytest.importorskip("tifffile")
    from penstock.data.stores import ometiff, sliced

    values = np.arange(pages * 60, dtype="u2").reshape(pages, 12, 5)
    codec = {"compression": "zlib", "rowsperstrip": 3, "metadata": {"axes": "ZYX"}}
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack", **codec)
    asked = sliced.Asked(path=str(tmp_path / "a.tif"), where="IN", axes="zyx")
    array = ometiff.open_array(asked, 0).array
    both, this = threading.Barrier(2), threading.local()

    def decode(*place: int) -> Any:
        if not hasattr(this, "met"):
            this.met = both.wait(5)
        return array.decode(*place)

    array.decoded = sliced.decoded_once(decode, 100)
    halves = [(slice(0, pages), slice(0, 12), part) for part in (slice(0, 2), slice(2, 5))]
    with ThreadPoolExecutor(2) as pool:
        parts = [np.empty((pages, 12, 2), "u2"), np.empty((pages, 12, 3), "u2")]
        list(pool.map(sliced.read_into, [array] * 2, halves, parts))
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), values)


@pytest.fixture(scope="module", params=[build_tiff_volume, build_tiff_strips, build_tiff_tiled])
def tiff(request, tmp_path_factory) -> Source:
    return open_source(request.param(tmp_path_factory.mktemp("tiff")))


@given(corners=st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in SHAPE)))
def test_any_box_of_a_tiff(tiff: Source, corners: tuple[tuple[int, int], ...]) -> None:
    box = Box(tuple(map(min, corners)), tuple(map(max, corners)))
    np.testing.assert_array_equal(tiff.read(box), DATA[box.slices])
