"""Every source against numpy on a small array, and what it says of itself."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from penstock.base.errors import UsageError
from penstock.data import AXES, Box, Source, add_levels, overlap
from penstock.data.stores.open import open_sink, open_source, parse_spec

from .kit import (
    BUILDERS,
    DATA,
    DOMAIN,
    SHAPE,
    ZARR2,
    build_n5,
    build_npy,
    build_ome_zarr_04,
    build_ome_zarr_05,
    build_precomputed,
    build_tiff_plain,
    build_tiff_strips,
    build_zarr2,
    build_zarr3_sharded,
    count_reads,
    open_out,
    saved,
    write,
    zarr3,
)


@pytest.fixture(
    scope="module", params=BUILDERS, ids=lambda build: build.__name__.removeprefix("build_")
)
def source(request, tmp_path_factory) -> Source:
    """Open all the while. Nobody changes it."""
    return open_source(request.param(tmp_path_factory.mktemp("source")))


BOXES = {
    "all": Box((0, 0, 0, 0, 0), (1, 3, 10, 13, 17)),
    "across chunks, nothing aligned": Box((0, 1, 2, 3, 4), (1, 2, 9, 12, 16)),
    "the last voxel": Box((0, 2, 9, 12, 16), (1, 3, 10, 13, 17)),
    "one chunk": Box((0, 0, 4, 5, 6), (1, 1, 8, 10, 12)),
}


class TestEverySource:
    """What holds of any source, whatever it reads."""

    def test_is_a_source_of_five_axes(self, source: Source) -> None:
        assert isinstance(source, Source)
        assert source.dtype == np.dtype("u2") and source.dtype.isnative
        assert source.domain.shape in (SHAPE, (1, *SHAPE[1:]))
        assert len(source.chunks) == 5 and all(n >= 1 for n in source.chunks)
        assert source.axes in (AXES, AXES[1:])
        assert source.scale is None or len(source.scale) == 5
        assert source.cache_bytes == 0

    def test_reads_what_numpy_holds(self, source: Source) -> None:
        for name, box in BOXES.items():
            array = source.read(box)
            assert array.dtype.isnative and array.flags.writeable
            np.testing.assert_array_equal(array, DATA[box.slices], name)

    def test_threads_read_at_once_with_and_without_a_cache(self, source: Source) -> None:
        cached = source.with_cache(10_000)
        boxes = [
            Box((0, c, z, 1, 2), (1, c + 1, z + 3, 12, 15)) for c in range(3) for z in (0, 3, 7)
        ]
        with ThreadPoolExecutor(8) as pool:
            for one in (source, cached):
                for box, array in zip(boxes, pool.map(one.read, boxes), strict=True):
                    np.testing.assert_array_equal(array, DATA[box.slices])


class TestSourceMetadata:
    @pytest.mark.parametrize("build", [build_ome_zarr_04, build_ome_zarr_05])
    def test_ome_zarr_levels(self, build: Callable[[Path], Any], tmp_path) -> None:
        path = build(tmp_path)
        fine, coarse = open_source(path), open_source(path, level=1)
        assert fine.scale == (1.0, 1.0, 2.0, 1.5, 0.5)
        assert coarse.scale == (1.0, 1.0, 2.0, 3.0, 1.0)
        assert fine.units[-1] == "micrometer"
        assert fine.chunks == (1, 1, 4, 5, 6)
        np.testing.assert_array_equal(coarse.read(coarse.domain), DATA[..., ::2, ::2])
        with pytest.raises(UsageError, match="level 2 does not exist; 0 to 1 do"):
            open_source(path, level=2)

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    def test_an_output_lies_where_its_input_lay(self, version: str, tmp_path) -> None:
        """That transformations apply in order is a law of test_frames."""
        like: Any = open_source(DATA)
        like.scale, like.translation = (1, 1, 2, 3, 1), (0, 0, 10, 1.5, 0.5)
        open_out(tmp_path / "out.zarr", like=like, ome_version=version).create()
        written = open_source(tmp_path / "out.zarr")
        assert (written.scale, written.translation) == (like.scale, like.translation)
        open_out(tmp_path / "at.zarr", like=like, ome_version=version, at=(0, 0, 1, 2, 3)).create()
        assert open_source(tmp_path / "at.zarr").translation == (0, 0, 12, 7.5, 3.5)

    def test_chunks_axes_and_sizes_of_other_stores(self, tmp_path) -> None:
        chunked = [open_source(build(tmp_path)) for build in (build_zarr3_sharded, build_n5)]
        assert {source.chunks for source in chunked} == {(1, 1, 4, 5, 6)}  # the inner ones
        assert chunked[1].axes == "tczyx", "which N5 lists from the end"
        source = open_source(build_precomputed(tmp_path / "p"))
        assert source.axes == "czyx"
        assert source.scale == (1.0, 1.0, 40.0, 4.0, 4.0) and source.units[2] == "nanometer"


SUFFIXES = ("04.zarr", "05.zarr", "n5", "npy")
DTYPES = "uint8 int32 uint16 int64 bool float64 int8 uint32 int16 uint64 float32 float16".split()


class TestAxesAndDtypes:
    @pytest.mark.parametrize("build", [build_ome_zarr_04, build_ome_zarr_05])
    @pytest.mark.parametrize("ending", ["zip", "ozx"])
    def test_a_zip_file(self, build: Callable[[Path], Any], ending: str, tmp_path) -> None:
        folder = build(tmp_path)
        made = shutil.make_archive(f"{tmp_path}/image", "zip", folder)
        place = Path(made).rename(tmp_path / f"image.ome.{ending}")
        one, other = open_source(place, level=1), open_source(folder, level=1)
        assert (one.read(one.domain) == other.read(other.domain)).all()
        assert (one.scale, one.axes, one.chunks) == (other.scale, other.axes, other.chunks)
        with pytest.raises(UsageError, match="lies in a zip file, which is only read"):
            add_levels(str(place), rule=None, again=True)
        before = one.fingerprint
        os.utime(place, (1, 1))
        assert open_source(f"file://{place}", level=1).fingerprint != before

    @pytest.mark.parametrize(
        ("dtype", "written", "fill"),
        [
            ("<u2", "7", 7),
            (">i4", "-7", -7),
            ("<f4", "NaN", np.nan),
            ("<f4", "", 0),
            ("<f8", "5", 5),
        ],
    )
    def test_metadata_of_other_writers_of_zarr_2(self, dtype, written, fill, tmp_path) -> None:
        """Fill values as texts, and the checksum that numcodecs names from 0.13 on."""
        array = DATA.astype(dtype)
        write("zarr", tmp_path / "a.zarr", array, {**ZARR2, "dtype": dtype})
        metadata = tmp_path / "a.zarr" / ".zarray"
        said = json.loads(metadata.read_text()) | {"fill_value": written}
        said["compressor"]["checksum"] = False
        metadata.write_text(json.dumps(said))
        (tmp_path / "a.zarr" / "0.0.0.0.0").unlink()
        array[:1, :1, :4, :5, :6] = fill
        source = open_source(tmp_path / "a.zarr").with_cache(2**20)
        np.testing.assert_array_equal(source.read(DOMAIN), array)

    @pytest.mark.parametrize(
        ("says", "of_levels"),
        [
            ({"pixelResolution": {"unit": "um", "dimensions": [0.5, 1, 2]}}, {}),
            ({"resolution": [0.5, 1, 2], "units": ["um"] * 3, "axes": ["x", "y", "z"]}, {}),
            (
                {},
                {"axes": "zyx", "scale": [2, 1, 0.5], "translate": [0, 0, 0], "units": ["um"] * 3},
            ),
        ],
        ids=["N5-viewer", "BigDataViewer", "COSEM"],
    )
    def test_a_group_of_n5_with_the_levels_of_one_image(self, says, of_levels, tmp_path) -> None:
        image, place = DATA[0, 0], tmp_path / "a.n5" / "raw"
        raw = {"blockSize": [6, 5, 4], "dataType": "uint16", "compression": {"type": "gzip"}}
        for level in range(2):
            move = {"translate": [0.5, 0.25, 0]} if level else {}
            of_level: dict[str, Any] = {"downsamplingFactors": [1, 2**level, 2**level]}
            if of_levels:
                scale = [2 * 2**level, 2**level, 0.5]
                of_level = {"transform": of_levels | {"scale": scale} | move}
            part = image[:: 2**level, :: 2**level].T
            write("n5", place / f"s{level}", part, {**raw, **of_level})
        (place / "attributes.json").write_text(json.dumps(says))
        for source in (open_source(place, level=1), open_source(place / "s1")):
            assert (source.read(source.domain)[0, 0] == image[::2, ::2]).all()
            assert source.axes == "zyx" and source.scale == (1, 1, 4, 2, 0.5)
            assert source.units[2:] == ("micrometer",) * 3
            middle = (0.5, 0.25, 0) if of_levels else (1, 0.5, 0)
            assert source.translation[2:] == middle
        assert open_source(place).translation == (0,) * 5
        with pytest.raises(UsageError, match="level 2 does not exist; 0 to 1 do"):
            open_source(place, level=2)
        with pytest.raises(UsageError, match="is no OME-Zarr image; penstock convert IN OUT"):
            add_levels(str(place), rule=None)

    @pytest.mark.parametrize("marker", [".zgroup", ".zattrs"])
    def test_the_only_image_of_a_group_is_taken(self, marker: str, tmp_path) -> None:
        """As bioformats2raw writes it, or xarray an array."""
        whole = tmp_path / "whole.zarr"
        image = build_ome_zarr_04(whole) if marker == ".zattrs" else build_zarr2(whole)
        said = {"bioformats2raw.layout": 3} if marker == ".zattrs" else {"zarr_format": 2}
        Path(image).rename(whole / "0")
        (whole / marker).write_text(json.dumps(said))
        assert (open_source(whole).read(DOMAIN) == DATA).all()
        level = int(marker == ".zattrs")
        assert open_source(whole, level=level).scale == open_source(whole / "0", level=level).scale

    def test_chunks_in_folders_of_which_the_metadata_says_nothing(self, tmp_path) -> None:
        """As zarr-python before 2.8 and bioformats2raw before 0.3 wrote them."""
        write("zarr", tmp_path / "a.zarr", DATA, {**ZARR2, "dimension_separator": "/"})
        metadata = tmp_path / "a.zarr" / ".zarray"
        said = json.loads(metadata.read_text())
        del said["dimension_separator"]
        metadata.write_text(json.dumps(said))
        assert (open_source(tmp_path / "a.zarr").read(DOMAIN) == DATA).all()
        first = tmp_path.joinpath("a.zarr", *"0" * DATA.ndim)
        first.unlink()  # as of zeros, which are not stored
        made = open_source(tmp_path / "a.zarr").read(DOMAIN)
        assert (made[..., -1, -1, -1] == DATA[..., -1, -1, -1]).all()

    def test_levels_of_precomputed(self, tmp_path) -> None:
        for level in range(2):
            part = DATA[0, 0, :, :: 2**level, :: 2**level].T[..., None]
            scale = {"size": part.shape[:3], "chunk_size": [4, 4, 4], "encoding": "raw"}
            spec = {
                "driver": "neuroglancer_precomputed", "kvstore": f"file://{tmp_path}/a",
                "multiscale_metadata": {"data_type": "uint16", "num_channels": 1, "type": "image"},
                "scale_metadata": {**scale, "resolution": [4 * 2**level, 4 * 2**level, 40]},
            }  # fmt: skip
            ts.open(spec, create=True, open=True).result().write(part).result()
        source = open_source(tmp_path / "a", level=1)
        assert (source.read(source.domain)[0, 0] == DATA[0, 0, :, ::2, ::2]).all()
        assert source.scale == (1, 1, 40, 8, 8)
        with pytest.raises(UsageError, match="level 2 does not exist"):
            open_source(tmp_path / "a", level=2)
        with pytest.raises(UsageError, match="--series 1 does not exist"):
            open_source(tmp_path / "a", series=1)

    def test_images_in_folders_are_listed_as_such(self, tmp_path) -> None:
        """As SpatialData has them, and not level by level."""
        whole = tmp_path / "whole.zarr"
        for name in ("images/a", "images/b"):
            image = build_ome_zarr_04(whole / name)
            Path(image).rename(whole / name / "raw")
        build_zarr2(whole)
        (whole / ".zgroup").write_text('{"zarr_format": 2}')
        size = r" \(2 x 3 x 10 x 13 x 17\)"
        with pytest.raises(UsageError, match=rf"arrays \(a\.zarr{size}, images/a/raw{size}, ima"):
            open_source(whole)

    def test_labels_permute_and_origins_stay(self, tmp_path) -> None:
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

    def test_ome_axes_in_another_order(self, tmp_path) -> None:
        write("zarr", tmp_path / "0", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
        transformations = [{"type": "scale", "scale": [3.0, 2.0, 1.0]}]
        dataset = {"path": "0", "coordinateTransformations": transformations}
        multiscale = {"axes": [{"name": a} for a in "xyz"], "datasets": [dataset]}
        (tmp_path / ".zattrs").write_text(json.dumps({"multiscales": [multiscale]}))
        source = open_source(tmp_path)
        assert source.axes == "zyx" and source.scale == (1.0, 1.0, 1.0, 2.0, 3.0)
        np.testing.assert_array_equal(source.read(source.domain)[0, 0], DATA[0, 0].T)

    @pytest.mark.parametrize(("suffix", "dtype"), [*zip(itertools.cycle(SUFFIXES), DTYPES)])
    def test_dtypes_survive_a_round_trip(self, dtype: str, suffix: str, tmp_path) -> None:
        data, path = DATA.astype(dtype), tmp_path / f"a.{suffix}"
        if suffix == "npy":
            np.save(path, data)
        else:
            version = "0.4" if suffix.startswith("04") else None
            domain = Box((0,) * 5, SHAPE)
            sink = open_sink(path, domain=domain, dtype=data.dtype, ome_version=version)
            sink.create()
            sink.write(domain, data)
        source = open_source(path)
        assert source.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(source.read(source.domain), data)

    @pytest.mark.parametrize("dtype", ["complex64", "<U3", "bfloat16"])
    def test_other_dtypes_are_refused(self, dtype: str, tmp_path) -> None:
        array: Any = tmp_path / "a"
        if dtype == "bfloat16":
            spec = {"driver": "zarr", "kvstore": f"file://{array}/", "dtype": dtype}
            ts.open(spec, create=True, shape=[4, 4]).result()
        else:
            array = np.zeros((3, 3), dtype)
            with pytest.raises(UsageError, match="dtype"):
                open_out("x.zarr", dtype=dtype)
            dtype = array.dtype.name
        with pytest.raises(UsageError, match=f"dtype {dtype} is not one of"):
            open_source(array)


GRIDS = {"zarr": ZARR2, "zarr3": zarr3([1, 1, 8, 10, 12], [1, 1, 4, 5, 6])}


@pytest.fixture(scope="module")
def gridded(tmp_path_factory) -> Path:
    """A folder with an array by each of these drivers, to be read."""
    folder = tmp_path_factory.mktemp("grids")
    for driver, metadata in GRIDS.items():
        write(driver, folder / driver, DATA, metadata)
    return folder


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
    @pytest.mark.parametrize("driver", GRIDS, ids=["zarr2", "sharded"])
    def test_follows_the_transform(self, driver, window, origin, gridded) -> None:
        path = {"driver": driver, "kvstore": f"file://{gridded}/{driver}/"}
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

    def test_where_a_dimension_has_no_chunks(self, tmp_path) -> None:
        array = ts.open({"driver": "zarr", "kvstore": f"file://{build_zarr2(tmp_path)}/"}).result()
        source = open_source(array[:, :, [1, 2, 5]].spec().to_json())
        assert source.grid_origin == (0,) * 5 and source.chunks == (1, 1, 1, 5, 6)
        np.testing.assert_array_equal(source.read(source.domain), DATA[:, :, [1, 2, 5]])

    def test_of_a_sink_off_zero_and_of_other_stores(self, tmp_path) -> None:
        box = Box((0, 1, 4, 5, 6), (1, 2, 9, 11, 13))
        for name in ("a.zarr", "a.n5"):
            assert open_out(tmp_path / name, box).grid_origin == (0, 1, 4, 5, 6)
        assert open_source(build_tiff_strips(tmp_path)).grid_origin == (0,) * 5
        assert open_source(DATA).grid_origin == open_out(DATA.copy()).grid_origin == (0,) * 5


class TestFingerprint:
    def test_of_a_chunked_array(self, tmp_path) -> None:
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

    def test_of_levels_and_files(self, tmp_path) -> None:
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

    def test_of_a_sink_stays_when_it_is_written(self, tmp_path) -> None:
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
    def test_it_spares_reading_the_same_chunk_again(self, tmp_path) -> None:
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

    def test_tiff_segments_are_kept(self, tmp_path, monkeypatch: Any) -> None:
        from penstock.data.stores import ometiff

        source = open_source(build_tiff_strips(tmp_path))
        decoded = []
        decode = ometiff._decode
        monkeypatch.setattr(ometiff, "_decode", lambda *k: decoded.append(k[2:]) or decode(*k))
        box = Box((0, 0, 0, 0, 0), (1, 1, 1, 8, 17))  # two strips of 4 x 17 uint16
        # The second read goes backwards, and begins with the segment that was decoded last.
        for num_bytes, num_decoded in [(0, 4), (136, 3), (272, 2)]:
            decoded.clear()
            cached = source.with_cache(num_bytes)
            cached.read(box), cached.read(box)
            assert (cached.cache_bytes, len(decoded)) == (num_bytes, num_decoded)

    @pytest.mark.parametrize("place", ["context", "inline", "named"])
    def test_the_users_own_stands(self, place: str, tmp_path) -> None:
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


class TestSameArray:
    def test_by_whatever_name(self, tmp_path, monkeypatch) -> None:
        (tmp_path / "in").mkdir()
        path = build_ome_zarr_05(tmp_path / "in")
        (tmp_path / "link").symlink_to(path)
        monkeypatch.chdir(tmp_path)
        source = open_source(path, level=1)
        for name in (path, f"{path}/", "in/a.zarr", "link", f"file://{path}", path / "s1"):
            assert overlap(source, open_out(name, overwrite=True)), name
        for name in (tmp_path / "in/a.zarr2", tmp_path / "in/a", path / "s2"):
            assert not overlap(source, open_out(name)), name
        assert overlap(source, open_out({"driver": "zarr3", "kvstore": f"file://{path}/s1/"}))

    def test_two_sinks(self, tmp_path) -> None:
        inside = {"driver": "zarr", "kvstore": f"file://{tmp_path}/a.zarr/1/", "create": True}
        a, b = open_out(tmp_path / "a.zarr"), open_out({**inside, "metadata": ZARR2})
        assert overlap(a, b) and overlap(b, a) and overlap(a, a)
        assert not overlap(a, open_out(tmp_path / "a.zarr2"))

    def test_in_memory(self) -> None:
        array = np.zeros((4, 4), "u1")
        assert overlap(open_source(array), open_out(array))
        assert not overlap(open_source(array.copy()), open_out(array))


def test_parse_spec(tmp_path) -> None:
    spec = {"driver": "zarr", "kvstore": "file:///a"}
    file = saved(tmp_path, "in_spec.json", json.dumps(spec))
    for form in (spec, json.dumps(spec), f"  {json.dumps(spec)}\n", file, str(file)):
        assert parse_spec(form) == spec
    for path in ("/a/b.zarr", "s3://bucket/a.zarr/0", "gs://bucket/a", "none.json"):
        assert parse_spec(path) == path
