"""Every store against numpy on a small array; every refusal against its sentence."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.data.box import Box
from penstock.data.stores import kvstore as stores_kvstore
from penstock.data.stores import tensorstore as stores
from penstock.data.stores.kvstore import kvstore_of, local_path, open_kvstore
from penstock.data.stores.open import open_sink, open_source, parse_spec
from penstock.data.stores.protocols import AXES, Sink, Source, overlap, same_array

from ..places import SHARED

SHAPE = (2, 3, 10, 13, 17)
DATA = np.arange(np.prod(SHAPE), dtype="u2").reshape(SHAPE)
MOUSE = SHARED / "mouse-brain-two-photon.ome.tif"

ZARR2 = {"chunks": [1, 1, 4, 5, 6], "dtype": "<u2", "compressor": {"id": "zstd", "level": 1}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def write(driver: str, path: Path, array: np.ndarray, metadata: dict[str, Any]) -> None:
    """Write an array with TensorStore alone."""
    key = "dimensions" if driver == "n5" else "shape"
    spec = {
        "driver": driver,
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {key: array.shape, **metadata},
    }
    ts.open(spec, create=True).result().write(array).result()


def zarr3(chunk: list[int], inner: list[int] | None = None) -> dict[str, Any]:
    codecs: list[Any] = [BYTES, {"name": "gzip", "configuration": {"level": 1}}]
    if inner:
        sharding = {"chunk_shape": inner, "codecs": codecs}
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    return {"data_type": "uint16", "chunk_grid": grid, "codecs": codecs}


def ome_multiscale(axes: str, path: str = "0") -> dict[str, Any]:
    return {
        "axes": [{"name": a, "type": "space", "unit": "micrometer"} for a in axes],
        "datasets": [
            {
                "path": f"{path}{level}",
                "coordinateTransformations": [
                    {"type": "scale", "scale": [1.0, 1.0, 2.0, 0.5 * 2**level, 0.5 * 2**level]}
                ],
            }
            for level in range(2)
        ],
        "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 1, 3, 1]}],
    }


# Each builder writes DATA with a library that is not Penstock, and returns what to open.


def build_memory(folder: Path) -> Any:
    return DATA


def build_npy(folder: Path) -> Any:
    np.save(folder / "a.npy", DATA.astype(">u2"))
    return folder / "a.npy"


def build_zarr2(folder: Path) -> Any:
    write("zarr", folder / "a.zarr", DATA, ZARR2)
    return str(folder / "a.zarr")


def build_zarr2_big_endian(folder: Path) -> Any:
    write("zarr", folder / "a.zarr", DATA, {**ZARR2, "dtype": ">u2"})
    return str(folder / "a.zarr")


def build_zarr3(folder: Path) -> Any:
    write("zarr3", folder / "a.zarr", DATA, zarr3([1, 1, 4, 5, 6]))
    return f"file://{folder}/a.zarr"


def build_zarr3_sharded(folder: Path) -> Any:
    write("zarr3", folder / "a.zarr", DATA, zarr3([1, 1, 8, 10, 12], [1, 1, 4, 5, 6]))
    kvstore = {"driver": "file", "path": str(folder)}
    return {"driver": "zarr3", "kvstore": kvstore, "path": "a.zarr"}


def build_n5(folder: Path) -> Any:
    raw = {"blockSize": [6, 5, 4, 1, 1], "dataType": "uint16", "compression": {"type": "gzip"}}
    write("n5", folder / "a.n5", DATA.T, raw)
    return folder / "a.n5"


def build_precomputed(folder: Path) -> Any:
    scale = {"size": [17, 13, 10], "chunk_size": [6, 5, 4], "encoding": "raw", "key": "s"}
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"file://{folder}/a",
        "multiscale_metadata": {"data_type": "uint16", "num_channels": 3, "type": "image"},
        "scale_metadata": {**scale, "resolution": [4, 4, 40], "voxel_offset": [0, 0, 0]},
    }
    ts.open(spec, create=True).result().write(DATA[0].T).result()
    return folder / "a"


def build_ome_zarr_04(folder: Path) -> Any:
    root = folder / "a.zarr"
    write("zarr", root / "s0", DATA, ZARR2)
    write("zarr", root / "s1", DATA[..., ::2, ::2], ZARR2)
    (root / ".zgroup").write_text('{"zarr_format": 2}')
    multiscale = {"version": "0.4", **ome_multiscale(AXES, "s")}
    (root / ".zattrs").write_text(json.dumps({"multiscales": [multiscale]}))
    return root


def build_ome_zarr_05(folder: Path) -> Any:
    root = folder / "a.zarr"
    write("zarr3", root / "s0", DATA, zarr3([1, 1, 4, 5, 6]))
    write("zarr3", root / "s1", DATA[..., ::2, ::2], zarr3([1, 1, 4, 5, 6]))
    ome = {"version": "0.5", "multiscales": [ome_multiscale(AXES, "s")]}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}
    (root / "zarr.json").write_text(json.dumps(group))
    return root


def build_cast(folder: Path) -> Any:
    base = {"driver": "zarr", "kvstore": f"file://{build_zarr2(folder)}/"}
    return {"driver": "cast", "dtype": "uint16", "base": base}


def build_tiff(folder: Path, **options: Any) -> Path:
    ome = {"axes": "TCZYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 1.5, "PhysicalSizeYUnit": "nm"}
    path = folder / "a.ome.tif"
    tifffile.imwrite(path, DATA, metadata=ome, **options)
    return path


def build_tiff_tiled(folder: Path) -> Any:
    return build_tiff(folder, tile=(16, 16), compression="zlib")


def build_tiff_strips(folder: Path) -> Any:
    return build_tiff(folder, rowsperstrip=4, compression="lzw", predictor=True)


def build_tiff_plain(folder: Path) -> Any:
    return build_tiff(folder, byteorder=">")


def build_tiff_volume(folder: Path) -> Any:
    """Tiles of three dimensions, the slices of a page along z."""
    path = folder / "a.tif"
    options = {"tile": (4, 16, 16), "volumetric": True, "photometric": "minisblack"}
    tifffile.imwrite(path, DATA, metadata={"axes": "TCZYX"}, **options)
    return path


BUILDERS = [value for name, value in list(globals().items()) if name.startswith("build_")]
BUILDERS.remove(build_tiff)


@pytest.fixture(
    scope="module", params=BUILDERS, ids=lambda build: build.__name__.removeprefix("build_")
)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param(tmp_path_factory.mktemp("source"))


class TestEverySource:
    """What holds of any source, whatever it reads."""

    def test_is_a_source_of_five_axes(self, spec: Any) -> None:
        source = open_source(spec)
        assert isinstance(source, Source)
        assert source.dtype == np.dtype("u2") and source.dtype.isnative
        assert source.domain.shape in (SHAPE, (1, *SHAPE[1:]))
        assert len(source.chunks) == 5 and all(n >= 1 for n in source.chunks)
        assert source.axes in (AXES, AXES[1:])
        assert source.scale is None or len(source.scale) == 5
        assert source.cache_bytes == 0

    @pytest.mark.parametrize(
        "box",
        [
            Box((0, 0, 0, 0, 0), (1, 3, 10, 13, 17)),  # all
            Box((0, 1, 2, 3, 4), (1, 2, 9, 12, 16)),  # across chunks, nothing aligned
            Box((0, 2, 9, 12, 16), (1, 3, 10, 13, 17)),  # the last voxel
            Box((0, 0, 4, 5, 6), (1, 1, 8, 10, 12)),  # one chunk
        ],
        ids=["all", "inside", "last", "chunk"],
    )
    def test_reads_what_numpy_holds(self, spec: Any, box: Box) -> None:
        array = open_source(spec).read(box)
        assert array.dtype.isnative and array.flags.writeable
        np.testing.assert_array_equal(array, DATA[box.slices])

    def test_threads_read_at_once_with_and_without_a_cache(self, spec: Any) -> None:
        source = open_source(spec)
        cached = source.with_cache(10_000)
        boxes = [
            Box((0, c, z, 1, 2), (1, c + 1, z + 3, 12, 15)) for c in range(3) for z in range(7)
        ]
        with ThreadPoolExecutor(8) as pool:
            for one in (source, cached):
                for box, array in zip(boxes, pool.map(one.read, boxes), strict=True):
                    np.testing.assert_array_equal(array, DATA[box.slices])

    def test_outside_its_domain_is_a_programming_error(self, spec: Any) -> None:
        source = open_source(spec)
        with pytest.raises(AssertionError):
            source.read(Box((0, 0, 0, 0, 0), (1, 3, 10, 13, 18)))


class TestSourceMetadata:
    @pytest.mark.parametrize("build", [build_ome_zarr_04, build_ome_zarr_05])
    def test_ome_zarr_levels(self, build: Callable[[Path], Any], tmp_path: Path) -> None:
        path = build(tmp_path)
        fine, coarse = open_source(path), open_source(path, level=1)
        assert fine.scale == (1.0, 1.0, 2.0, 1.5, 0.5)
        assert coarse.scale == (1.0, 1.0, 2.0, 3.0, 1.0)
        assert fine.units[-1] == "micrometer"
        assert fine.chunks == (1, 1, 4, 5, 6)
        np.testing.assert_array_equal(coarse.read(coarse.domain), DATA[..., ::2, ::2])
        with pytest.raises(UsageError, match="level 2 does not exist; 0 to 1 do"):
            open_source(path, level=2)

    @pytest.mark.parametrize("build", [build_ome_zarr_04, build_ome_zarr_05])
    def test_a_level_of_ome_zarr_gives_its_position_on(
        self, build: Callable[[Path], Any], tmp_path: Path
    ) -> None:
        """Transformations apply in order: the scale of all datasets scales a dataset's position."""
        (tmp_path / "in").mkdir()
        path = build(tmp_path / "in")
        file = path / ("zarr.json" if build is build_ome_zarr_05 else ".zattrs")
        document = json.loads(file.read_text())
        (multiscale,) = document.get("attributes", {}).get("ome", document)["multiscales"]
        half, far = ([0, 0, 0, 0.5, 0.5], [0, 0, 10, 0, 0])
        for holder, position in ((multiscale["datasets"][1], half), (multiscale, far)):
            translation = {"type": "translation", "translation": position}
            holder["coordinateTransformations"].append(translation)
        file.write_text(json.dumps(document))
        fine, coarse = open_source(path), open_source(path, level=1)
        assert fine.translation == (0, 0, 10, 0, 0)
        assert coarse.translation == (0, 0, 10, 1.5, 0.5)
        assert coarse.scale == (1, 1, 2, 3, 1)
        open_out(tmp_path / "out.zarr", coarse.domain, like=coarse).create()
        written = open_source(tmp_path / "out.zarr")
        assert (written.scale, written.translation) == (coarse.scale, coarse.translation)
        assert written.ome_version == coarse.ome_version
        open_out(tmp_path / "at.zarr", like=coarse, at=(0, 0, 1, 2, 3)).create()
        assert open_source(tmp_path / "at.zarr").translation == (0, 0, 12, 7.5, 3.5)

    def test_chunks_of_a_sharded_array_are_the_inner_ones(self, tmp_path: Path) -> None:
        assert open_source(build_zarr3_sharded(tmp_path)).chunks == (1, 1, 4, 5, 6)

    def test_n5_lists_the_fastest_axis_first(self, tmp_path: Path) -> None:
        source = open_source(build_n5(tmp_path))
        assert source.axes == "tczyx" and source.chunks == (1, 1, 4, 5, 6)

    def test_precomputed_resolution_is_the_scale(self, tmp_path: Path) -> None:
        source = open_source(build_precomputed(tmp_path))
        assert source.axes == "czyx"
        assert source.scale == (1.0, 1.0, 40.0, 4.0, 4.0) and source.units[2] == "nanometer"

    @pytest.mark.parametrize("build", [build_tiff_tiled, build_tiff_strips, build_tiff_plain])
    def test_ome_tiff_sizes(self, build: Callable[[Path], Any], tmp_path: Path) -> None:
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
    def test_tiff_chunks_are_segments(
        self, build: Callable[[Path], Any], chunks: tuple[int, ...], tmp_path: Path
    ) -> None:
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
    def test_tiff_axes(
        self, shape: tuple[int, ...], options: dict[str, Any], axes: str, tmp_path: Path
    ) -> None:
        data = np.arange(np.prod(shape), dtype="u2").reshape(shape)
        tifffile.imwrite(tmp_path / "a.tif", data, **options)
        source = open_source(tmp_path / "a.tif")
        assert source.axes == axes
        if axes == "cyx" and shape[-1] == 3:
            data = np.moveaxis(data, -1, 0)
        if axes == "czyx":
            data = data.swapaxes(0, 1)
        np.testing.assert_array_equal(source.read(source.domain).squeeze(), data)

    def test_tiff_pyramid(self, tmp_path: Path) -> None:
        with tifffile.TiffWriter(tmp_path / "a.ome.tif") as file:
            sizes = {"axes": "YX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
            plane = np.arange(64 * 64, dtype="u2").reshape(64, 64)
            options = {"tile": (16, 16), "compression": "zlib"}
            file.write(plane, subifds=1, metadata=sizes, **options)
            file.write(plane[::2, ::2], subfiletype=1, **options)
        coarse = open_source(tmp_path / "a.ome.tif", level=1)
        assert coarse.scale == (1.0, 1.0, 1.0, 1.0, 1.0)
        np.testing.assert_array_equal(coarse.read(coarse.domain)[0, 0, 0], plane[::2, ::2])
        with pytest.raises(UsageError, match="level 2 does not exist; 2 levels do"):
            open_source(tmp_path / "a.ome.tif", level=2)

    def test_ome_tiff_of_several_files(self, tmp_path: Path) -> None:
        names = [f"{z}.ome.tif" for z in range(3)]
        planes = "".join(
            f'<TiffData FirstZ="{z}" IFD="0"><UUID FileName="{n}">urn:uuid:{z}</UUID></TiffData>'
            for z, n in enumerate(names)
        )
        for z, name in enumerate(names):
            ome = (
                f'<?xml version="1.0"?><OME UUID="urn:uuid:{z}"><Image ID="Image:0"><Pixels '
                'ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="17" SizeY="13" '
                f'SizeZ="3" SizeC="1" SizeT="1">{planes}</Pixels></Image></OME>'
            )
            plane = DATA[0, 0, z]
            tifffile.imwrite(
                tmp_path / name, plane, description=ome, metadata=None, compression="zlib"
            )
        source = open_source(tmp_path / names[0])
        np.testing.assert_array_equal(source.read(source.domain)[0, 0], DATA[0, 0, :3])

    def test_ome_metadata_that_is_no_xml_says_nothing(self, tmp_path: Path) -> None:
        path, plane = tmp_path / "a.ome.tif", DATA[0, 0, 0]
        tifffile.imwrite(path, plane, description="<OME><</OME>", metadata=None)
        source = open_source(path)
        assert source.scale is None
        np.testing.assert_array_equal(source.read(source.domain)[0, 0, 0], plane)

    @pytest.mark.skipif(not MOUSE.exists(), reason="the shared data is absent")
    def test_a_real_ome_tiff(self) -> None:
        source = open_source(MOUSE)
        assert source.axes == "czyx" and source.domain.shape == (1, 2, 30, 510, 667)
        assert source.chunks == (1, 1, 1, 196, 667) and source.scale is None
        box = Box((0, 1, 7, 180, 300), (1, 2, 12, 420, 667))
        whole = tifffile.imread(MOUSE)[None]
        np.testing.assert_array_equal(source.read(box), whole[box.slices])


def pages(folder: Path, **options: Any) -> Path:
    tifffile.imwrite(folder / "a.tif", DATA[0, 0], **options)
    return folder / "a.tif"


class TestDamagedTiff:
    @pytest.mark.parametrize("left", [0.3, 0.6, 0.9])
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
    def test_cut_short_it_is_no_smaller_volume(
        self, make: Callable[[Path], Path], left: float, tmp_path: Path
    ) -> None:
        path = make(tmp_path)
        os.truncate(path, int(path.stat().st_size * left))
        with pytest.raises((UsageError, OSError), match=r"a(\.ome)?\.tif: ") as caught:
            source = open_source(path)
            source.read(source.domain)
        if not isinstance(caught.value, UsageError):  # all metadata lies before the cut
            assert "page " in str(caught.value)

    def test_mapped_pixels_are_counted_at_open(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tif"
        tifffile.imwrite(path, DATA[0, 0, 0], metadata=None)
        size = path.stat().st_size
        os.truncate(path, size - 100)
        message = rf"a\.tif: is shorter than its header says: {size - 100} bytes of {size}$"
        with pytest.raises(UsageError, match=message):
            open_source(path)

    def test_a_segment_cut_short_is_an_error_not_zeros(self, tmp_path: Path) -> None:
        path = build_tiff_volume(tmp_path)  # segments come last in the file
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(OSError, match=r"a\.tif: page 5, segment 5: the file ends after \d+"):
            open_source(path).read(DOMAIN)

    def test_a_corrupt_segment_is_named(self, tmp_path: Path) -> None:
        path = build_tiff_strips(tmp_path)
        with tifffile.TiffFile(path) as file:
            offset = file.pages[1].dataoffsets[2]
        with path.open("r+b") as raw:
            raw.seek(offset)
            raw.write(b"\xff" * 20)
        with pytest.raises(OSError, match=r"a\.ome\.tif: page 1, segment 2: "):
            open_source(path).read(DOMAIN)

    def test_ome_metadata_of_another_size(self, tmp_path: Path) -> None:
        path = build_tiff_strips(tmp_path)
        path.write_bytes(path.read_bytes().replace(b'SizeZ="10"', b'SizeZ="90"'))
        with pytest.raises(UsageError, match=r"a\.ome\.tif: is truncated or corrupt"):
            open_source(path)

    def test_a_missing_file_of_a_set(self, tmp_path: Path) -> None:
        ome = (
            '<?xml version="1.0"?><OME UUID="urn:uuid:0"><Image ID="Image:0"><Pixels ID="Pixels:0" '
            'DimensionOrder="XYZCT" Type="uint16" SizeX="17" SizeY="13" SizeZ="2" SizeC="1" '
            'SizeT="1"><TiffData FirstZ="0" IFD="0"><UUID FileName="0.ome.tif">urn:uuid:0</UUID>'
            '</TiffData><TiffData FirstZ="1" IFD="0"><UUID FileName="1.ome.tif">urn:uuid:1</UUID>'
            "</TiffData></Pixels></Image></OME>"
        )
        path = tmp_path / "0.ome.tif"
        tifffile.imwrite(path, DATA[0, 0, 0], description=ome, metadata=None, compression="zlib")
        with pytest.raises(UsageError, match=r"0\.ome\.tif: is truncated or corrupt.*1\.ome\.tif"):
            open_source(path)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own count")
@pytest.mark.parametrize("name", ["a.npy", "a.tif"])
def test_a_mapped_file_does_not_stay_in_memory(name: str, tmp_path: Path) -> None:
    num_bytes = 64 << 20
    data = np.ones((64, 1024, 1024), "u1")
    np.save(tmp_path / name, data) if name == "a.npy" else tifffile.imwrite(tmp_path / name, data)
    source = open_source(tmp_path / name)
    boxes = [Box((0, 0, z, 0, 0), (1, 1, z + 4, 1024, 1024)) for z in range(0, 64, 4)]

    def shared() -> int:  # resident pages of mapped files
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGESIZE")

    before = shared()
    with ThreadPoolExecutor(4) as pool:
        assert all(part.all() for part in pool.map(source.read, boxes))
    assert shared() - before < num_bytes / 4


@pytest.fixture(scope="module", params=[build_tiff_volume, build_tiff_strips, build_tiff_tiled])
def tiff(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(request.param(tmp_path_factory.mktemp("tiff")))


@settings(max_examples=30, deadline=None)
@given(corners=st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in SHAPE)))
def test_any_box_of_a_tiff(tiff: Source, corners: tuple[tuple[int, int], ...]) -> None:
    box = Box(tuple(map(min, corners)), tuple(map(max, corners)))
    np.testing.assert_array_equal(tiff.read(box), DATA[box.slices])


class TestAxesAndDtypes:
    @pytest.mark.parametrize(("rank", "axes"), [(2, "yx"), (3, "zyx"), (4, "czyx"), (5, "tczyx")])
    @pytest.mark.parametrize("kind", ["memory", "zarr", "zarr3"])
    def test_by_rank(self, rank: int, axes: str, kind: str, tmp_path: Path) -> None:
        data = DATA[(0,) * (5 - rank)]
        spec: Any = data
        if kind != "memory":
            chunks = {"chunks": [4] * rank, "dtype": "<u2"}
            write(kind, tmp_path / "a", data, chunks if kind == "zarr" else zarr3([4] * rank))
            spec = tmp_path / "a"
        source = open_source(spec)
        assert source.axes == axes and source.domain.shape == (1,) * (5 - rank) + data.shape
        np.testing.assert_array_equal(source.read(source.domain), data[(None,) * (5 - rank)])

    def test_labels_permute_and_origins_stay(self, tmp_path: Path) -> None:
        path = build_zarr2(tmp_path)
        spec = {
            "driver": "zarr",
            "kvstore": f"file://{path}/",
            "transform": {  # x z c, from x = 103, z = -2
                "input_labels": ["X", "z", "channel", "y"],
                "input_inclusive_min": [103, -2, 0, 0],
                "input_exclusive_max": [117, 8, 3, 13],
                "output": [
                    {"offset": 1},
                    {"input_dimension": 2},
                    {"input_dimension": 1, "offset": 2},
                    {"input_dimension": 3},
                    {"input_dimension": 0, "offset": -100},
                ],
            },
        }
        source = open_source(spec)
        assert source.axes == "czyx" and source.chunks == (1, 1, 4, 5, 6)
        assert source.domain == Box((0, 0, -2, 0, 103), (1, 3, 8, 13, 117))
        box = Box((0, 1, -1, 2, 104), (1, 3, 4, 9, 110))
        np.testing.assert_array_equal(source.read(box), DATA[1:2, 1:3, 1:6, 2:9, 4:10])

    def test_ome_axes_in_another_order(self, tmp_path: Path) -> None:
        write("zarr", tmp_path / "0", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
        transformations = [{"type": "scale", "scale": [3.0, 2.0, 1.0]}]
        dataset = {"path": "0", "coordinateTransformations": transformations}
        multiscale = {"axes": [{"name": a} for a in "xyz"], "datasets": [dataset]}
        (tmp_path / ".zattrs").write_text(json.dumps({"multiscales": [multiscale]}))
        source = open_source(tmp_path)
        assert source.axes == "zyx" and source.scale == (1.0, 1.0, 1.0, 2.0, 3.0)
        np.testing.assert_array_equal(source.read(source.domain)[0, 0], DATA[0, 0].T)

    @pytest.mark.parametrize(
        "dtype",
        ["bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32))]
        + [f"float{n}" for n in (16, 32, 64)],
    )
    @pytest.mark.parametrize("suffix", ["04.zarr", "05.zarr", "n5", "npy"])
    def test_dtypes_survive_a_round_trip(self, dtype: str, suffix: str, tmp_path: Path) -> None:
        if suffix == "n5" and dtype in ("bool", "float16"):
            pytest.skip("N5 has no such dtype")
        data, path = DATA.astype(dtype), tmp_path / f"a.{suffix}"
        if suffix == "npy":
            np.save(path, data)
        else:
            version = "0.4" if suffix.startswith("04") else "0.5"
            domain = Box((0,) * 5, SHAPE)
            sink = open_sink(path, domain=domain, dtype=data.dtype, ome_version=version)
            sink.create()
            sink.write(domain, data)
        source = open_source(path)
        assert source.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(source.read(source.domain), data)

    @pytest.mark.parametrize("dtype", ["int64", "uint64", "complex64", "<U3"])
    def test_other_dtypes_are_refused(self, dtype: str) -> None:
        with pytest.raises(UsageError, match=f"dtype {np.dtype(dtype).name} is not one of"):
            open_source(np.zeros((3, 3), dtype))
        knobs: dict[str, Any] = {"domain": Box((0,) * 5, SHAPE), "dtype": np.dtype(dtype)}
        if "int64" in dtype:  # labels may be that large
            assert open_sink("x.zarr", **knobs).dtype == dtype
            return
        with pytest.raises(UsageError, match="dtype"):
            open_sink("x.zarr", **knobs)

    def test_bfloat16_is_refused_by_name(self, tmp_path: Path) -> None:
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/a/", "dtype": "bfloat16"}
        ts.open(spec, create=True, shape=[4, 4]).result()
        with pytest.raises(UsageError, match="dtype bfloat16 is not one of"):
            open_source(tmp_path / "a")


class TestGridOrigin:
    """A box whose edges lie on the chunk grid is read without decoding a byte twice."""

    @pytest.mark.parametrize(
        ("window", "origin"),
        [
            (lambda a: a, (0, 0, 0)),
            (lambda a: a.translate_by[0, 0, 5, 7, -9], (5, 7, -9)),
            (lambda a: a[:, :, 3:, 4:9], (0, 0, 0)),
            (lambda a: a[:, :, 3:, 4:9][ts.d[:].translate_to[0]], (-3, -4, 0)),
        ],
        ids=["plain", "translated", "sliced", "window at zero"],
    )
    @pytest.mark.parametrize(
        ("driver", "metadata"),
        [("zarr", ZARR2), ("zarr3", zarr3([1, 1, 8, 10, 12], [1, 1, 4, 5, 6]))],
        ids=["zarr2", "sharded"],
    )
    def test_follows_the_transform(
        self, driver: str, metadata: Any, window: Any, origin: Any, tmp_path: Path
    ) -> None:
        write(driver, tmp_path / "a", DATA, metadata)
        path = {"driver": driver, "kvstore": f"file://{tmp_path}/a/"}
        spec = window(ts.open(path).result()).spec().to_json()
        source, sink = open_source(spec), open_out(spec)
        assert source.grid_origin == sink.grid_origin == (0, 0, *origin)
        # A box of one chunk's size on that grid is one chunk, off the grid it is two.
        reads = []
        for shift in (0, 1):
            lines = zip(source.domain.start, source.grid_origin, source.chunks, strict=True)
            start = [first + (line - first) % chunk for first, line, chunk in lines]
            start[4] += shift
            before = count_reads("bytes_read")
            source.read(Box.of(start, (1, 1, 1, 1, source.chunks[4])))
            reads.append(count_reads("bytes_read") - before)
        assert reads[0] < reads[1]

    def test_where_a_dimension_has_no_chunks(self, tmp_path: Path) -> None:
        array = ts.open({"driver": "zarr", "kvstore": f"file://{build_zarr2(tmp_path)}/"}).result()
        source = open_source(array[:, :, [1, 2, 5]].spec().to_json())
        assert source.grid_origin == (0,) * 5 and source.chunks == (1, 1, 1, 5, 6)
        np.testing.assert_array_equal(source.read(source.domain), DATA[:, :, [1, 2, 5]])

    def test_of_a_sink_off_zero_and_of_other_stores(self, tmp_path: Path) -> None:
        box = Box((0, 1, 4, 5, 6), (1, 2, 9, 11, 13))
        for name in ("a.zarr", "a.n5"):
            assert open_out(tmp_path / name, box).grid_origin == (0, 1, 4, 5, 6)
        assert open_source(build_tiff_strips(tmp_path)).grid_origin == (0,) * 5
        assert open_source(DATA).grid_origin == open_out(DATA.copy()).grid_origin == (0,) * 5


class TestFingerprint:
    def test_of_a_chunked_array(self, tmp_path: Path) -> None:
        path = build_zarr2(tmp_path)
        spec = {"driver": "zarr", "kvstore": f"file://{path}/"}
        array = ts.open(spec).result()
        source = open_source(spec)
        pool = {"cache_pool": {"total_bytes_limit": 9}}
        for same in (
            open_source(path),
            source.with_cache(1000),
            open_source({**spec, "open": True, "recheck_cached_data": False, "context": pool}),
            open_source({**spec, **pool}),
        ):
            assert same.fingerprint == source.fingerprint
        windows = (array, array[:, :, 2:], array[:, :, 3:], array.translate_by[0, 0, 1, 0, 0])
        assert len({open_source(w.spec().to_json()).fingerprint for w in windows}) == 4
        cast = {"driver": "cast", "dtype": "float32", "base": spec}
        assert open_source(cast).fingerprint != source.fingerprint
        os.utime(f"{path}/.zarray", ns=(1, 1))
        assert open_source(path).fingerprint != source.fingerprint

    def test_of_levels_and_files(self, tmp_path: Path) -> None:
        path = build_ome_zarr_05(tmp_path)
        assert open_source(path).fingerprint != open_source(path, level=1).fingerprint
        for build in (build_npy, build_tiff_strips, build_tiff_plain):
            path = build(tmp_path)
            before = open_source(path).fingerprint
            assert open_source(path).with_cache(99).fingerprint == before
            os.utime(path, ns=(1, 1))
            assert open_source(path).fingerprint != before
        assert open_source(DATA).fingerprint == open_source(DATA).fingerprint
        assert open_source(DATA).fingerprint != open_source(DATA[0]).fingerprint

    def test_of_a_sink_stays_when_it_is_written(self, tmp_path: Path) -> None:
        box = Box((0, 1, 4, 5, 6), (1, 2, 9, 11, 13))
        for name in ("a.zarr", "a.n5"):
            sink = open_out(tmp_path / name, box, resume=True)
            sink.create()
            sink.write(box, DATA[box.slices])
            again = open_out(tmp_path / name, box, resume=True)
            assert again.exists and again.fingerprint == sink.fingerprint
            other = open_out(tmp_path / name, DOMAIN, overwrite=True)
            assert other.fingerprint != sink.fingerprint


class TestCache:
    def test_the_plan_sets_it(self, tmp_path: Path) -> None:
        path = build_zarr2(tmp_path)
        source = open_source(path).with_cache(1_000_000)
        assert source.cache_bytes == 1_000_000
        assert open_source(path, cache_bytes=5).cache_bytes == 5

    def test_it_spares_reading_the_same_chunk_again(self, tmp_path: Path) -> None:
        path = build_zarr2(tmp_path)
        box = Box((0, 0, 0, 0, 0), (1, 1, 4, 5, 6))

        def reads(source: Source) -> int:
            before = count_reads()
            for _ in range(3):
                source.read(box)
            return count_reads() - before

        # A chunk in the cache is looked at again unless the spec says otherwise, not read again.
        spec = {"driver": "zarr", "kvstore": f"file://{path}/", "recheck_cached_data": False}
        assert reads(open_source(spec)) == 3
        assert reads(open_source(spec).with_cache(1_000_000)) == 1

    def test_tiff_segments_are_kept(self, tmp_path: Path, monkeypatch: Any) -> None:
        source = open_source(build_tiff_strips(tmp_path))
        decoded = []
        decode = type(source)._decode
        monkeypatch.setattr(
            type(source), "_decode", lambda *key: decoded.append(key[1:]) or decode(*key)
        )
        box = Box((0, 0, 0, 0, 0), (1, 1, 1, 8, 17))  # two strips of 4 x 17 uint16
        for num_bytes, num_decoded in [(0, 4), (136, 4), (272, 2)]:
            decoded.clear()
            cached = source.with_cache(num_bytes)
            cached.read(box), cached.read(box)
            assert (cached.cache_bytes, len(decoded)) == (num_bytes, num_decoded)

    @pytest.mark.parametrize("place", ["context", "inline", "named"])
    def test_the_users_own_stands(self, place: str, tmp_path: Path) -> None:
        spec = {"driver": "zarr", "kvstore": f"file://{build_zarr2(tmp_path)}/"}
        pool = {"total_bytes_limit": 4000}
        if place == "context":
            spec["context"] = {"cache_pool": pool}
        elif place == "inline":
            spec = {"driver": "cast", "dtype": "float32", "base": {**spec, "cache_pool": pool}}
        else:
            spec |= {"cache_pool": "cache_pool#own", "context": {"cache_pool#own": pool}}
        source = open_source(spec, cache_bytes=7)
        assert source.cache_bytes == 4000
        assert source.with_cache(9) is source


def count_reads(metric: str = "batch_read") -> int:
    metrics = ts.experimental_collect_matching_metrics(f"/tensorstore/kvstore/file/{metric}")
    return sum(value["value"] for metric in metrics for value in metric["values"])


DOMAIN = Box((0,) * 5, SHAPE)


def sink_memory(folder: Path) -> tuple[Any, dict[str, Any]]:
    return np.zeros(SHAPE, "u2"), {}


def sink_ome_zarr_04(folder: Path) -> tuple[Any, dict[str, Any]]:
    return folder / "out.zarr", {"ome_version": "0.4", "chunks": (4, 5, 6)}


def sink_ome_zarr_05(folder: Path) -> tuple[Any, dict[str, Any]]:
    return folder / "out.zarr", {"chunks": (1, 1, 4, 5, 6)}


def sink_ome_zarr_sharded(folder: Path) -> tuple[Any, dict[str, Any]]:
    return folder / "out.zarr", {"chunks": (2, 5, 3), "shards": (4, 5, 6)}


def sink_n5(folder: Path) -> tuple[Any, dict[str, Any]]:
    return folder / "out.n5", {"chunks": (4, 5, 6)}


def sink_spec(folder: Path) -> tuple[Any, dict[str, Any]]:
    return {**out_spec({"driver": "file", "path": str(folder / "out.zarr")})}, {}


def out_spec(kvstore: dict[str, Any]) -> dict[str, Any]:
    """The benchmark's own output spec, key by key, with a smaller shape."""
    return {
        "driver": "zarr2",
        "kvstore": kvstore,
        "context": {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": 16},
            "s3_request_concurrency": {"limit": 32},
        },
        "path": "0",
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
        "metadata": {
            "shape": list(SHAPE),
            "zarr_format": 2,
            "fill_value": 0,
            "chunks": [1, 1, 4, 5, 6],
            "compressor": {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 1},
            "dimension_separator": "/",
            "dtype": "<u2",
        },
        "create": True,
        "delete_existing": True,
    }


SINKS = [value for name, value in list(globals().items()) if name.startswith("sink_")]


def open_out(spec: Any, domain: Box = DOMAIN, dtype: str = "u2", **options: Any) -> Sink:
    return open_sink(spec, domain=domain, dtype=np.dtype(dtype), **options)


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__.removeprefix("sink_"))
def out(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    return request.param(tmp_path)


class TestEverySink:
    """What holds of any sink, whatever it writes."""

    def test_is_known_before_anything_is_created(self, out: Any, tmp_path: Path) -> None:
        spec, options = out
        sink = open_out(spec, **options)
        assert isinstance(sink, Sink)
        assert (sink.domain, sink.dtype) == (DOMAIN, np.dtype("u2"))
        assert sink.write_grid in [(1, 1, 4, 5, 6), (1,) * 5]
        assert list(tmp_path.iterdir()) == []
        if sink.local_path:
            assert tmp_path in sink.local_path.parents
            sink.create()
            assert sink.local_path.is_dir()

    def test_holds_what_threads_wrote_in_pieces(self, out: Any) -> None:
        spec, options = out
        sink = open_out(spec, **options)
        sink.create()
        boxes = [
            Box((t, c, z, 0, 0), (t + 1, c + 1, min(z + 3, 10), 13, 17))
            for t in range(2)
            for c in range(3)
            for z in range(0, 10, 3)  # not the chunks' edges: writers share chunks
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda box: sink.write(box, DATA[box.slices]), boxes))
        sink.close()
        if isinstance(spec, dict):
            spec = {**spec, "create": True}
        source = open_source(spec)
        np.testing.assert_array_equal(source.read(source.domain), DATA)

    def test_outside_its_domain_is_a_programming_error(self, out: Any) -> None:
        spec, options = out
        sink = open_out(spec, **options)
        sink.create()
        with pytest.raises(AssertionError):
            sink.write(Box((0, 0, 0, 0, 1), (*SHAPE[:4], 18)), DATA)


class TestSinkLayout:
    @pytest.mark.parametrize("make", SINKS[1:4], ids=["04", "05", "sharded"])
    def test_zarr_python_reads_it(self, make: Callable[[Path], Any], tmp_path: Path) -> None:
        path, options = make(tmp_path)
        sink = open_out(path, **options)
        sink.create()
        sink.write(DOMAIN, DATA)
        array = zarr.open_group(path, mode="r")["0"]
        np.testing.assert_array_equal(array[...], DATA)
        assert array.shards == ((1, 1, 4, 5, 6) if "shards" in options else None)
        assert array.chunks == ((1, 1, 2, 5, 3) if "shards" in options else (1, 1, 4, 5, 6))

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    @pytest.mark.parametrize("axes", ["yx", "zyx", "czyx", "tczyx"])
    def test_metadata_is_valid_ome_zarr(self, version: str, axes: str, tmp_path: Path) -> None:
        models = pytest.importorskip(f"ome_zarr_models.v{version.replace('.', '')}")
        like = open_source(DATA[(0,) * (5 - len(axes))])
        sink = open_out(tmp_path / "a.zarr", like.domain, like=like, ome_version=version)
        sink.create()
        group = zarr.open_group(tmp_path / "a.zarr", mode="r")
        multiscale = models.Image.from_zarr(group).ome_attributes.multiscales[0]
        assert "".join(axis.name for axis in multiscale.axes) == axes
        assert group["0"].shape == DATA.shape[5 - len(axes) :]

    def test_it_mirrors_what_it_is_like(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        like = open_source(build_ome_zarr_04(tmp_path / "in"), level=1)
        sink = open_out(tmp_path / "a.zarr", like.domain, like=like)
        sink.create()
        source = open_source(tmp_path / "a.zarr")
        assert (source.axes, source.scale, source.units) == (like.axes, like.scale, like.units)
        assert source.ome_version == like.ome_version == "0.4"
        assert open_out(tmp_path / "b.zarr", like=like, shards=(8, 8, 8)).write_grid[2:] == (8,) * 3

    def test_n5_keeps_scale_and_units(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        like = open_source(build_ome_zarr_05(tmp_path / "in"))
        open_out(tmp_path / "a.n5", like.domain, like=like).create()
        source = open_source(tmp_path / "a.n5")
        assert (source.axes, source.scale, source.units) == (like.axes, like.scale, like.units)

    @pytest.mark.parametrize(
        ("shape", "chunk_of_like", "expected"),
        [
            ((1, 1, 300, 400, 500), None, (1, 1, 128, 128, 128)),
            ((1, 1, 30, 400, 500), None, (1, 1, 30, 128, 128)),
            ((9, 2, 1, 4000, 5000), None, (1, 1, 1, 512, 512)),
            ((1, 1, 300, 400, 500), (1, 1, 64, 64, 64), (1, 1, 64, 64, 64)),
            ((1, 1, 300, 400, 500), (4, 2, 40, 128, 128), (1, 1, 40, 128, 128)),
            ((1, 1, 300, 400, 500), (1, 1, 8, 8, 8), (1, 1, 128, 128, 128)),
        ],
        ids=["volume", "thin", "planes", "like", "like in space only", "like is too small"],
    )
    def test_default_chunks(
        self, shape: Any, chunk_of_like: Any, expected: Any, tmp_path: Path
    ) -> None:
        like = None
        if chunk_of_like:
            like = open_source(DATA)
            like.chunks = chunk_of_like
        domain = Box((0,) * 5, shape)
        assert open_out(tmp_path / "a.zarr", domain, like=like).write_grid == expected

    def test_a_domain_off_zero_keeps_its_coordinates(self, tmp_path: Path) -> None:
        box = Box((0, 1, 4, 5, 6), (1, 2, 9, 11, 13))
        for kind in ("zarr", "n5"):
            sink = open_out(tmp_path / f"a.{kind}", box)
            assert sink.domain == box
            sink.create()
            sink.write(box, DATA[box.slices])
            source = open_source(tmp_path / f"a.{kind}")
            assert source.domain.shape == box.shape
            np.testing.assert_array_equal(source.read(source.domain), DATA[box.slices])
        group = json.loads((tmp_path / "a.zarr/zarr.json").read_text())
        dataset = group["attributes"]["ome"]["multiscales"][0]["datasets"][0]
        assert dataset["coordinateTransformations"][1]["translation"] == [1, 4, 5, 6]

    def test_a_whole_chunk_is_written_without_reading_back(self, tmp_path: Path) -> None:
        for name, options in [("a", {}), ("b", {"shards": (8, 10, 12)})]:
            sink = open_out(tmp_path / f"{name}.zarr", chunks=(4, 5, 6), **options)
            sink.create()
            box = Box.of((0,) * 5, sink.write_grid)
            for _ in range(2):  # also where a chunk is there already
                before = count_reads()
                sink.write(box, DATA[box.slices])
                assert count_reads() == before

    def test_the_callers_array_is_the_callers_again(self, tmp_path: Path) -> None:
        spec = out_spec({"driver": "file", "path": str(tmp_path)})
        spec["context"]["cache_pool"]["total_bytes_limit"] = 1_000_000
        sink = open_out(spec)
        sink.create()
        array = DATA.copy()
        sink.write(DOMAIN, array)
        array[...] = 0  # a cache that held on to it would merge these into the next write
        first = Box((0,) * 5, (1, 1, 1, 1, 1))
        sink.write(first, DATA[first.slices])
        np.testing.assert_array_equal(open_source(tmp_path / "0").read(DOMAIN), DATA)


class TestExisting:
    def make(self, path: Path) -> None:
        sink = open_out(path, chunks=(4, 5, 6))
        sink.create()
        sink.write(DOMAIN, DATA)

    @pytest.mark.parametrize("name", ["a.zarr", "a.n5"])
    def test_is_refused_replaced_or_resumed(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / name
        self.make(path)
        with pytest.raises(UsageError, match=rf"{name}: exists; use --overwrite"):
            open_out(path)
        resumed = open_out(path, resume=True, chunks=(4, 5, 6))
        resumed.create()
        assert open_source(path).read(DOMAIN).sum() == DATA.sum()
        replaced = open_out(path, dtype="f4", overwrite=True)
        assert open_source(path).read(DOMAIN).sum() == DATA.sum()  # create() deletes, not before
        replaced.create()
        assert open_source(path).dtype == np.float32
        assert open_source(path).read(DOMAIN).sum() == 0

    def test_resume_starts_what_is_not_there(self, tmp_path: Path) -> None:
        sink = open_out(tmp_path / "a.zarr", resume=True)
        sink.create()
        sink.write(DOMAIN, DATA)
        np.testing.assert_array_equal(open_source(tmp_path / "a.zarr").read(DOMAIN), DATA)

    def test_resume_refuses_another_layout(self, tmp_path: Path) -> None:
        self.make(tmp_path / "a.zarr")
        with pytest.raises(UsageError, match=r"a\.zarr: .*float32.*uint16"):
            open_out(tmp_path / "a.zarr", dtype="f4", resume=True, chunks=(4, 5, 6))

    def test_resume_leaves_metadata_alone(self, tmp_path: Path) -> None:
        open_out(tmp_path / "a.zarr", ome_version="0.4").create()
        attributes = tmp_path / "a.zarr/.zattrs"
        attributes.write_text(attributes.read_text().replace('"a"', '"mine"'))
        open_out(tmp_path / "a.zarr", resume=True).create()
        assert "mine" in attributes.read_text()
        assert not (tmp_path / "a.zarr/zarr.json").exists()

    @pytest.mark.parametrize("overwrite", [True, False])
    def test_a_folder_of_other_things_is_left_alone(self, overwrite: bool, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/", "metadata": ZARR2}
        for target in (tmp_path, spec) if overwrite else (tmp_path,):
            with pytest.raises(UsageError, match="no Zarr or N5 store; it is left alone"):
                open_out(target, overwrite=overwrite)
        assert (tmp_path / "thesis.tex").exists()

    @pytest.mark.parametrize("kind", ["04", "05", "n5", "spec"])
    @pytest.mark.parametrize(
        "key", ["labels/cells/.zgroup", "notes.txt", "0/mask/.zarray", "scan-2/0.0", "0/0.tif"]
    )
    def test_overwrite_deletes_no_more_than_the_array(
        self, kind: str, key: str, tmp_path: Path
    ) -> None:
        target: Any = tmp_path / ("a.n5" if kind == "n5" else "a.zarr")
        options = {"ome_version": "0.4"} if kind == "04" else {}
        if kind == "spec":
            target = out_spec({"driver": "file", "path": str(target)})
            target = {**target, "path": "", "delete_existing": False}
        sink = open_out(target, **options)
        sink.create()
        sink.write(DOMAIN, DATA)
        open_out(target, overwrite=True)
        mine = sink.local_path / key
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text("mine")
        with pytest.raises(UsageError, match=f"also holds {key}, which is no part of the array"):
            open_out(target, overwrite=True)
        assert mine.read_text() == "mine"
        np.testing.assert_array_equal(open_source(sink.local_path).read(DOMAIN), DATA)
        mine.unlink()
        open_out(target, overwrite=True).create()

    @pytest.mark.parametrize("name", [".zattrs", "attributes.json", "zarr.json", ".zgroup"])
    def test_a_metadata_file_alone_makes_no_store(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text('{"mine": 1}')
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/", "metadata": ZARR2}
        for target in (tmp_path, spec):
            with pytest.raises(UsageError, match="no Zarr or N5 store; it is left alone"):
                open_out(target, overwrite=True)
        assert (tmp_path / name).read_text() == '{"mine": 1}'

    def test_overwrite_of_a_spec(self, tmp_path: Path) -> None:
        path = build_zarr2(tmp_path)
        metadata = {**ZARR2, "shape": SHAPE, "dtype": "<f4"}
        spec = {"driver": "zarr", "kvstore": f"file://{path}/", "metadata": metadata}
        with pytest.raises(UsageError, match="exists; use --overwrite"):
            open_out({**spec, "create": True})
        sink = open_out(spec, overwrite=True)
        assert sink.dtype == np.float32
        assert open_source(path).dtype == np.uint16
        sink.create()
        assert open_source(path).dtype == np.float32

    def test_a_spec_that_opens_takes_what_is_there(self, tmp_path: Path) -> None:
        spec = {"driver": "zarr", "kvstore": f"file://{build_zarr2(tmp_path)}/"}
        for mode in ({}, {"open": True}, {"open": True, "create": True}):
            sink = open_out({**spec, **mode}, dtype="f4")
            assert (sink.domain, sink.dtype) == (DOMAIN, np.dtype("u2"))
            assert sink.write_grid == (1, 1, 4, 5, 6)
            sink.create()
            sink.write(DOMAIN, DATA[..., ::-1].copy())
            np.testing.assert_array_equal(open_source(spec).read(DOMAIN), DATA[..., ::-1])

    def test_a_spec_that_creates_is_completed(self, tmp_path: Path) -> None:
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/a/", "create": True}
        spec["metadata"] = {"chunks": [1, 1, 4, 5, 6]}
        sink = open_out(spec, dtype="f4")
        assert (sink.domain, sink.dtype) == (DOMAIN, np.dtype("f4"))
        sink.create()
        assert open_source(tmp_path / "a").domain == DOMAIN

    def test_a_version_is_asked_of_what_replaces_another(self, tmp_path: Path) -> None:
        open_out(tmp_path / "a.zarr", ome_version="0.4").create()
        sharded = open_out(tmp_path / "a.zarr", overwrite=True, shards=(8, 8, 8))
        sharded.create()
        assert sorted(path.name for path in (tmp_path / "a.zarr").iterdir()) == ["0", "zarr.json"]
        assert open_source(tmp_path / "a.zarr").ome_version == "0.5"
        open_out(tmp_path / "a.zarr", overwrite=True, ome_version="0.4").create()
        with pytest.raises(UsageError, match=r"need OME-Zarr 0\.5, this is 0\.4"):
            open_out(tmp_path / "a.zarr", resume=True, shards=(8, 8, 8))

    def test_reading_a_sinks_spec_deletes_nothing(self, tmp_path: Path) -> None:
        spec = out_spec({"driver": "file", "path": str(tmp_path / "out.zarr")})
        sink = open_out(spec)
        sink.create()
        sink.write(DOMAIN, DATA)
        np.testing.assert_array_equal(open_source(spec).read(DOMAIN), DATA)
        open_out(spec)  # nor does opening the sink again
        np.testing.assert_array_equal(open_source(spec).read(DOMAIN), DATA)
        open_out(spec).create()  # the user's own delete_existing
        assert open_source(spec).read(DOMAIN).sum() == 0


class Killed(Exception):
    """Stands for a SIGKILL."""


def open_keys_by(patch: pytest.MonkeyPatch, opens: Any) -> None:
    """In every room that opens key-value stores."""
    for room in ("kvstore", "tensorstore_open", "omezarr"):
        patch.setattr(f"penstock.data.stores.{room}.open_kvstore", opens)


class Mortal:
    """TensorStore and its key-value stores, killed after so many of their steps.

    A local store that is killed as it writes a key leaves the file that it wrote to, and one that
    is killed as it deletes leaves some keys of many, and folders.
    """

    def __init__(self, steps: int, shuffled: random.Random) -> None:
        self.steps, self.shuffled = steps, shuffled

    def __getattr__(self, name: str) -> Any:
        return getattr(ts, name)

    def step(self, torn: Path | None = None) -> None:
        self.steps -= 1
        if self.steps < 0:
            if torn is not None:
                torn.parent.mkdir(parents=True, exist_ok=True)
                torn.write_bytes(b"{")
            raise Killed

    def open(self, spec: Any, **options: Any) -> Any:
        if options.get("create") is None:  # not the look at what is there
            folder = local_path(spec.kvstore)
            self.step(folder and folder / "zarr.json.__lock")
        return ts.open(spec, **options)

    def open_kvstore(self, spec: Any, where: str) -> Any:
        return MortalKeys(self, open_kvstore(spec, where))


class MortalKeys:
    def __init__(self, life: Mortal, store: Any) -> None:
        self.life, self.store = life, store
        self.folder = local_path(store.spec())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def write(self, key: str, value: bytes | None) -> Any:
        self.life.step(self.folder and self.folder / f"{key}.__lock")
        return self.store.write(key, value)

    def delete_range(self, keys: Any) -> Any:
        found = [key for key in self.store.list().result() if in_range(key, keys)]
        self.life.shuffled.shuffle(found)
        for key in found:
            self.life.step()
            self.store.write(key, None).result()
        self.life.step()  # the folders are there still
        return self.store.delete_range(keys)


def in_range(key: bytes, keys: Any) -> bool:
    first, end = keys.inclusive_min, keys.exclusive_max
    return first <= key and (not end or key < end)


def old_nothing(folder: Path) -> None:
    """Nothing was there."""


def old_group(folder: Path) -> None:
    """Of another dtype, and its array has a name of its own."""
    write("zarr", folder / "out.zarr/s0", FEW, {"chunks": [1, 1, 3, 5, 6], "dtype": "<f4"})
    (folder / "out.zarr/.zgroup").write_text('{"zarr_format": 2}')
    multiscale = {"version": "0.4", "datasets": [{"path": "s0"}]}
    (folder / "out.zarr/.zattrs").write_text(json.dumps({"multiscales": [multiscale]}))


def old_array(folder: Path) -> None:
    """What the spec and the N5 path name, of another dtype and other chunks."""
    write("zarr", folder / "out.zarr/0", FEW, {"chunks": [1, 1, 3, 5, 6], "dtype": "<f4"})
    raw = {"blockSize": [6, 5, 3, 1, 1], "dataType": "float32", "compression": {"type": "gzip"}}
    write("n5", folder / "out.n5", FEW.T, raw)


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".__lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


FEW = DATA[:1, :1, :5, :5, :6]
"""In few chunks: every step of making them is a test."""
DOMAIN_OF_FEW = Box((0,) * 5, FEW.shape)
KILLED = [
    *itertools.product(SINKS[1:4], [old_nothing, old_group]),
    *itertools.product([sink_n5, sink_spec], [old_nothing, old_array]),
]


class TestKilledWhileItIsMade:
    @pytest.mark.parametrize("way", ["resume", "overwrite"])
    @pytest.mark.parametrize(
        ("make", "old"), KILLED, ids=[f"{a.__name__}-{b.__name__}" for a, b in KILLED]
    )
    def test_it_goes_on_either_way(
        self, make: Any, old: Any, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec, options = make(tmp_path)
        if isinstance(spec, dict):
            spec["metadata"]["shape"] = list(FEW.shape)
        for steps in itertools.count():
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            old(tmp_path)
            before = tree(tmp_path)
            life = Mortal(steps, random.Random(steps))
            with monkeypatch.context() as patch:
                patch.setattr(stores_kvstore, "ts", life)
                patch.setattr(stores, "ts", life)
                open_keys_by(patch, life.open_kvstore)
                own = isinstance(spec, dict) and way == "resume"  # it says delete_existing itself
                sink = open_out(spec, DOMAIN_OF_FEW, overwrite=not own, **options)
                try:
                    sink.create()
                    break
                except Killed:
                    pass
            if steps == 0 and way == "resume" and tree(tmp_path) == before != {}:
                continue  # nothing was deleted yet: what there is to go on with is the old one
            for run in (again := {way: True}), {}:
                sink = open_out(spec, DOMAIN_OF_FEW, **run, **options)
                sink.create()
                sink.write(DOMAIN_OF_FEW, FEW)
                if run is again:
                    made = tree(sink.local_path)
                    shutil.rmtree(sink.local_path)
            assert made == tree(sink.local_path)  # of the old one nothing is left, nor a mark
            np.testing.assert_array_equal(open_source(spec).read(DOMAIN_OF_FEW), FEW)
        assert steps > (2 if before else 0)

    @pytest.mark.slow
    def test_on_s3_too(self, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        url, options = "s3://test-bucket/a.zarr", {"chunks": (10, 13, 17)}
        for way, steps in itertools.product(("resume", "overwrite"), (2, 5, 9)):
            old = open_out(url, dtype="f4", overwrite=True, **options)
            old.create()
            old.write(DOMAIN, DATA.astype("f4"))
            life = Mortal(steps, random.Random(steps))
            with monkeypatch.context() as patch:
                patch.setattr(stores_kvstore, "ts", life)
                patch.setattr(stores, "ts", life)
                open_keys_by(patch, life.open_kvstore)
                sink = open_out(url, overwrite=True, chunks=(5, 13, 17))
                with contextlib.suppress(Killed):
                    sink.create()
            again = open_out(url, **{way: True}, chunks=(5, 13, 17))
            again.create()
            again.write(DOMAIN, DATA)
            np.testing.assert_array_equal(open_source(url).read(DOMAIN), DATA)
            keys = open_kvstore(kvstore_of(url), url).list().result()
            assert {key for key in keys if b"/" not in key} == {b"zarr.json"}

    def test_what_is_half_deleted_is_still_not_taken_without_a_word(self, tmp_path: Path) -> None:
        for spec in (tmp_path / "a.zarr", out_spec({"driver": "file", "path": str(tmp_path)})):
            folder = tmp_path / ("a.zarr" if isinstance(spec, Path) else "0")
            folder.mkdir()
            (folder / stores_kvstore.DELETING).write_text('{"arrays": ["s0"]}')
            if isinstance(spec, dict):
                spec = {**spec, "delete_existing": False}
            with pytest.raises(UsageError, match="exists; use --overwrite to replace it"):
                open_out(spec)
            (folder / "notes.txt").write_text("mine")
            for way in ("resume", "overwrite"):
                with pytest.raises(UsageError, match=r"also holds notes\.txt"):
                    open_out(spec, **{way: True})

    def test_what_may_not_be_deleted_is_known_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        open_out(tmp_path / "a.zarr").create()
        before = tree(tmp_path)

        class ReadOnly(MortalKeys):
            def write(self, key: str, value: bytes | None) -> Any:
                raise ValueError("PERMISSION_DENIED: AccessDenied")

        life = Mortal(0, random.Random(0))
        open_keys_by(monkeypatch, lambda *a: ReadOnly(life, open_kvstore(*a)))
        sink = open_out(tmp_path / "a.zarr", overwrite=True)
        with pytest.raises(UsageError, match=r"a\.zarr: AccessDenied"):
            sink.check()
        open_out(tmp_path / "a.zarr", resume=True).check()
        assert tree(tmp_path) == before

    def test_a_check_changes_nothing(self, tmp_path: Path) -> None:
        open_out(tmp_path / "a.zarr").create()
        before = sorted(tmp_path.rglob("*"))
        open_out(tmp_path / "a.zarr", overwrite=True).check()
        open_out(tmp_path / "b.zarr").check()
        assert sorted(tmp_path.rglob("*")) == before


class TestS3:
    def test_the_benchmarks_own_specs(self, s3_endpoint: str) -> None:
        bucket = {"driver": "s3", "bucket": "test-bucket", "aws_region": "us-west-2"}
        sink = open_out(out_spec({**bucket, "path": "out.zarr", "endpoint": s3_endpoint}))
        assert sink.local_path is None and sink.write_grid == (1, 1, 4, 5, 6)
        sink.create()
        sink.write(DOMAIN, DATA)
        in_spec = {
            "driver": "zarr",
            "kvstore": {**bucket, "path": "out.zarr/0", "endpoint": s3_endpoint},
            "context": {
                "cache_pool": {"total_bytes_limit": 4_000_000_000},
                "data_copy_concurrency": {"limit": 16},
                "s3_request_concurrency": {"limit": 32},
            },
        }
        source = open_source(in_spec)
        assert source.cache_bytes == 4_000_000_000
        np.testing.assert_array_equal(source.read(DOMAIN), DATA)
        assert same_array(source, sink)

    def test_plain_urls(self, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        for name in ("a.zarr", "a.n5"):
            url = f"s3://test-bucket/some/{name}"
            sink = open_out(url)
            with pytest.raises(UsageError, match="neither an OME-Zarr image nor"):
                open_source(url)  # nothing is created yet
            sink.create()
            sink.write(DOMAIN, DATA)
            source = open_source(url)
            np.testing.assert_array_equal(source.read(DOMAIN), DATA)
            assert source.name == url
            with pytest.raises(UsageError, match=f"{url}: exists; use --overwrite"):
                open_out(url)
            open_out(url, overwrite=True).create()
            assert open_source(url).read(DOMAIN).sum() == 0
            open_kvstore(kvstore_of(url), url).write("notes.txt", b"mine").result()
            with pytest.raises(UsageError, match=f"{url}: also holds notes.txt"):
                open_out(url, overwrite=True)
        spec = {"driver": "n5", "kvstore": "s3://test-bucket/some/a.n5"}
        assert open_source(spec).domain == DOMAIN

    def test_a_bucket_that_is_not_there(self, s3_endpoint: str, monkeypatch: Any) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        with pytest.raises(UsageError, match=r"s3://no-bucket/a\.zarr: neither"):
            open_source("s3://no-bucket/a.zarr")
        with pytest.raises(UsageError, match=r"no-bucket/a: .*does not exist$"):
            open_source({"driver": "zarr", "kvstore": "s3://no-bucket/a"})
        for out in ("s3://no-bucket/a.zarr", "s3://no-bucket/a.n5"):
            with pytest.raises(UsageError, match=f"{out}: NoSuchBucket: .*does not exist$"):
                open_out(out)

    def test_a_server_that_is_not_there(self, s3_endpoint: str, monkeypatch: Any) -> None:
        monkeypatch.setattr(
            "penstock.data.stores.kvstore.IMPATIENT", {"s3_request_retries": {"max_retries": 0}}
        )
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        for spec in ("s3://test-bucket/a", {"driver": "zarr", "kvstore": "s3://test-bucket/a"}):
            with pytest.raises(UsageError, match="Could not connect"):
                open_source(spec)


class TestHttp:
    def test_a_web_server_is_read_and_never_written(self, tmp_path: Path) -> None:
        path = build_ome_zarr_05(tmp_path)
        handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
            url, local = f"http://127.0.0.1:{server.server_port}", open_source(path)
            try:
                source = open_source(f"{url}/{path.name}")
                box = Box.of((1, 2, 3, 4, 5), (1, 1, 3, 3, 3))
                np.testing.assert_array_equal(source.read(box), local.read(box))
                with pytest.raises(UsageError, match="cannot be written over HTTP"):
                    open_out(f"{url}/out.zarr")
            finally:
                server.shutdown()


class TestSameArray:
    def test_by_whatever_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "in").mkdir()
        path = build_ome_zarr_05(tmp_path / "in")
        (tmp_path / "link").symlink_to(path)
        monkeypatch.chdir(tmp_path)
        source = open_source(path, level=1)
        for name in (path, f"{path}/", "in/a.zarr", "link", f"file://{path}", path / "s1"):
            assert same_array(source, open_out(name, overwrite=True)), name
        for name in (tmp_path / "in/a.zarr2", tmp_path / "in/a", path / "s2"):
            assert not same_array(source, open_out(name)), name
        assert same_array(source, open_out({"driver": "zarr3", "kvstore": f"file://{path}/s1/"}))

    def test_two_sinks(self, tmp_path: Path) -> None:
        inside = {"driver": "zarr", "kvstore": f"file://{tmp_path}/a.zarr/1/", "create": True}
        a, b = open_out(tmp_path / "a.zarr"), open_out({**inside, "metadata": ZARR2})
        assert overlap(a, b) and overlap(b, a) and overlap(a, a)
        assert not overlap(a, open_out(tmp_path / "a.zarr2"))

    def test_in_memory(self) -> None:
        array = np.zeros((4, 4), "u1")
        assert same_array(open_source(array), open_out(array))
        assert not same_array(open_source(array.copy()), open_out(array))


def text_file(folder: Path) -> Path:
    (folder / "a.txt").write_text("hello")
    return folder / "a.txt"


def saved(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def pickled(folder: Path) -> Path:
    np.save(folder / "a.npy", np.array([{}]), allow_pickle=True)
    return folder / "a.npy"


def empty(folder: Path, suffix: str) -> Path:
    path, array = folder / f"a.{suffix}", np.zeros((0, 5, 6), "u1")
    if suffix == "npy":
        np.save(path, array)
    else:
        write("zarr", path, array, {"chunks": [4, 5, 6], "dtype": "|u1"})
    return path


def bad_multiscales(folder: Path) -> Path:
    saved(folder, ".zattrs", '{"multiscales": [{"version": "0.4"}]}')
    return folder


def told(folder: Path, **transformation: Any) -> Path:
    """An OME-Zarr image with something odd in its metadata."""
    root = build_ome_zarr_04(folder)
    attributes = json.loads((root / ".zattrs").read_text())
    kind, value = next(iter(transformation.items()))
    added = {"type": kind, kind: [1, 1, 1, 1, value]}
    attributes["multiscales"][0]["coordinateTransformations"].append(added)
    (root / ".zattrs").write_text(json.dumps(attributes))
    return root


def bad_axes(folder: Path, names: str) -> Path:
    write("zarr", folder / "0", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
    multiscale = {"axes": [{"name": a} for a in names], "datasets": [{"path": "0"}]}
    saved(folder, ".zattrs", json.dumps({"multiscales": [multiscale]}))
    return folder


def bad_tiff_axes(folder: Path) -> Path:
    tifffile.imwrite(folder / "a.tif", DATA[0], metadata={"axes": "ZRYX"})
    return folder / "a.tif"


class TestBadInput:
    """Each is one sentence that names the flag, the place and what is wrong with it."""

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda d: d / "none.zarr", r"--in-spec .*none\.zarr: no such file or folder$"),
            (lambda d: d, r"neither an OME-Zarr image nor a Zarr, N5 or precomputed array$"),
            (text_file, r"a\.txt: neither"),
            (lambda d: d / "none.tif", r"none\.tif: no such file$"),
            (lambda d: d / "none.npy", r"none\.npy: no such file$"),
            (lambda d: saved(d, "a.tif", "hello"), r"a\.tif: not a readable TIFF file: "),
            (lambda d: saved(d, "a.npy", "hello"), r"a\.npy: not a \.npy array: "),
            (lambda d: "s3://b/a.tif", "TIFF is read from local files only"),
            (pickled, r"a\.npy: not a \.npy array: .*objects"),
            (lambda d: '{"driver":\n zarr}', "--in-spec: not valid JSON at line 2 column 2: "),
            (lambda d: saved(d, "a.json", "{,"), r"--in-spec .*a\.json: not valid JSON at line 1"),
            (lambda d: saved(d, "a.json", "[1]"), r"a\.json: expected a JSON object, got list"),
            (lambda d: {"kvstore": f"file://{d}/"}, r"--in-spec: .*driver"),
            (lambda d: {"driver": "zarr9"}, r'"zarr9" is not a registered TensorStore driver$'),
            (lambda d: {"driver": "zarr", "path": 3}, "--in-spec: "),
            (lambda d: {"driver": "zarr", "kvstore": f"file://{d}/a"}, r"\.zarray.*not exist$"),
            (lambda d: told(d, translation="a"), "multiscales metadata is malformed: ValueError"),
            (bad_multiscales, "multiscales metadata is malformed: KeyError\\('datasets'\\)"),
            (lambda d: saved(d, ".zattrs", "{").parent, r"\.zattrs is not valid JSON"),
            (lambda d: bad_axes(d, "qyx"), r"axes \['q', 'y', 'x'\]; each must be one of t, c, z"),
            (lambda d: bad_axes(d, "yyx"), r"axes \['y', 'y', 'x'\]; each must be one of"),
            (lambda d: bad_axes(d, "tcz"), r"axes \['t', 'c', 'z'\] lack y or x"),
            (lambda d: bad_axes(d, "yx"), r"3 dimensions but axes \['y', 'x'\]"),
            (bad_tiff_axes, r"axes \['Z', 'R', 'Y', 'X'\]; each must be one of"),
            (lambda d: np.zeros(3), "--in-spec: 1 dimensions; 2 to 5 can be read"),
            (lambda d: np.zeros((0, 5, 6)), "^--in-spec: has 0 along z"),
            (lambda d: empty(d, "npy"), r"a\.npy: has 0 along z"),
            (lambda d: empty(d, "zarr"), r"a\.zarr: has 0 along z"),
            (
                lambda d: {"driver": "zarr", "kvstore": f"file://{d}/", "dtype": "x\ny" * 999},
                r"^--in-spec: .{1,310}$",
            ),
        ],
    )
    def test_source(self, make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            open_source(make(tmp_path))
        assert "\n" not in str(caught.value) and "tensorstore_spec" not in str(caught.value)

    @pytest.mark.parametrize("size", ["a", "", 0, float("nan"), float("inf")])
    def test_a_size_that_is_none_is_unknown(self, size: Any, tmp_path: Path) -> None:
        source = open_source(told(tmp_path, scale=size))
        assert source.scale == (1, 1, 2, 1.5, 0.5)
        open_out(tmp_path / "b.zarr", like=source).create()
        text = (tmp_path / "b.zarr/.zattrs").read_text()
        json.loads(text, parse_constant=pytest.fail)
        ome = {"axes": "TCZYX", "PhysicalSizeX": size, "PhysicalSizeY": 1.5}
        tifffile.imwrite(tmp_path / "a.ome.tif", DATA, metadata=ome)
        assert open_source(tmp_path / "a.ome.tif").scale == (1, 1, 1, 1.5, 1)

    @pytest.mark.parametrize("name", ["a.npy", "a.tif", "a.json"])
    def test_what_may_not_be_read(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / name).touch()

        def denied(self: Path, *_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied", str(self))

        for call in ("is_file", "read_text") if name == "a.json" else ("is_file",):
            with monkeypatch.context() as patch:
                patch.setattr(Path, call, denied)
                with pytest.raises(UsageError, match=rf"^--in-spec .*{name}: Permission denied$"):
                    open_source(tmp_path / name)

    def test_levels_where_there_are_none(self, tmp_path: Path) -> None:
        for spec in (DATA, {"driver": "zarr"}, tmp_path / "a.npy"):
            with pytest.raises(UsageError, match="level 1 is asked but only"):
                open_source(spec, level=1)
        with pytest.raises(UsageError, match="a plain array has level 0 only"):
            open_source(build_zarr2(tmp_path), level=1)

    @pytest.mark.parametrize(
        ("make", "options", "message"),
        [
            (lambda d: d / "a.tif", {}, r"--out-spec .*a\.tif: cannot write \.tif; what can be"),
            (lambda d: d / "a.json", {}, r"a\.json: cannot write \.json"),
            (lambda d: d / "a.zarr", {"chunks": (4, 4)}, r"chunk shape \(4, 4\); give z y x or"),
            (lambda d: d / "a.zarr", {"chunks": (4, 4, 0)}, r"chunk shape \(4, 4, 0\)"),
            (
                lambda d: d / "a.zarr",
                {"chunks": (4, 4, 4), "shards": (6, 8, 8)},
                r"shards \(1, 1, 6, 8, 8\) are not multiples of chunks \(1, 1, 4, 4, 4\)",
            ),
            (
                lambda d: d / "a.zarr",
                {"ome_version": "0.4", "shards": (8, 8, 8)},
                r"shards \(8, 8, 8\) need OME-Zarr 0\.5, this is 0\.4",
            ),
            (
                lambda d: d / "a.zarr",
                {"shards": (8, 192, 128)},
                r"--shards 192 \(axis y\) is not a multiple of 128, .* give --shards 256 or --ch",
            ),
            (lambda d: d / "a.n5", {"shards": (8, 8, 8)}, "this is n5"),
            (lambda d: d / "a.zarr", {"ome_version": "0.3"}, "OME-Zarr 0.3 cannot be written"),
            (
                lambda d: {"driver": "zarr", "kvstore": f"file://{d}/a/", "create": True},
                {},
                "does not say its chunk shape",
            ),
            (
                lambda d: {"driver": "zarr", "kvstore": f"file://{d}/a/"},
                {},
                r"\.zarray.*does not exist$",
            ),
            (
                lambda d: {**out_spec({"driver": "file", "path": str(d)}), "creat": True},
                {},
                r'--out-spec: Object includes extra members: "creat"$',
            ),
            (lambda d: saved(d, "a.zarr", "hello"), {}, "it is left alone"),
            (lambda d: np.zeros(3, "u1"), {}, "1 dimensions; 2 to 5"),
        ],
    )
    def test_sink(
        self, make: Callable[[Path], Any], options: Any, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError, match=message):
            open_out(make(tmp_path), **options)

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        parent = text_file(tmp_path)
        sink = open_out(parent / "a.zarr")
        with pytest.raises(UsageError, match=r"a\.txt/a\.zarr: .*Not a directory$"):
            sink.create()

    def test_a_corrupt_chunk_is_told_as_it_is(self, tmp_path: Path) -> None:
        path = Path(build_zarr2(tmp_path))
        (path / "0.0.0.0.0").write_bytes(b"nonsense")
        with pytest.raises(ValueError, match=r"0\.0\.0\.0\.0") as caught:
            open_source(path).read(DOMAIN)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_parse_spec(tmp_path: Path) -> None:
    spec = {"driver": "zarr", "kvstore": "file:///a"}
    file = saved(tmp_path, "in_spec.json", json.dumps(spec))
    for form in (spec, json.dumps(spec), f"  {json.dumps(spec)}\n", file, str(file)):
        assert parse_spec(form) == spec
    for path in ("/a/b.zarr", "s3://bucket/a.zarr/0", "gs://bucket/a", "none.json"):
        assert parse_spec(path) == path


def test_importing_the_protocols_imports_no_library() -> None:
    heavy = "tensorstore", "zarr", "tifffile", "imagecodecs", "torch"
    code = f"import sys, penstock.data.stores.protocols; assert not set({heavy}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
