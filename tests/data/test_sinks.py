"""Every sink against numpy on a small array; its layout; what exists already."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.data import Box, Sink, open_source

from .kit import (
    DATA,
    DOMAIN,
    SHAPE,
    SINKS,
    ZARR2,
    build_ome_zarr_04,
    build_ome_zarr_05,
    build_zarr2,
    count_reads,
    open_out,
    out_spec,
)


@pytest.fixture(params=SINKS.values(), ids=SINKS)
def out(request, tmp_path) -> tuple[Any, dict[str, Any]]:
    return request.param(tmp_path)


class TestEverySink:
    """What holds of any sink, whatever it writes."""

    def test_is_known_before_anything_is_created(self, out: Any, tmp_path) -> None:
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
            Box((t, c, z, 0, 0), (t + 1, c + 1, z + 5, 13, 17))
            for t in range(2)
            for c in range(3)
            for z in range(0, 10, 5)  # not the chunks' edges: writers share chunks
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda box: sink.write(box, DATA[box.slices]), boxes))
        sink.close()
        if isinstance(spec, dict):
            spec = {**spec, "create": True}
        source = open_source(spec)
        np.testing.assert_array_equal(source.read(source.domain), DATA)


class TestSinkLayout:
    @pytest.mark.parametrize("kind", ["ome_zarr_04", "ome_zarr_05", "ome_zarr_sharded"])
    def test_zarr_python_reads_it(self, kind: str, tmp_path) -> None:
        import zarr

        path, options = SINKS[kind](tmp_path)
        domain = Box.of((0,) * 5, (2, 2, 5, 13, 12))
        sink = open_out(path, domain, **options)
        sink.create()
        sink.write(domain, DATA[domain.slices])
        array = zarr.open_group(path, mode="r")["0"]
        np.testing.assert_array_equal(array[...], DATA[domain.slices])
        assert array.shards == ((1, 1, 4, 5, 6) if "shards" in options else None)
        assert array.chunks == ((1, 1, 2, 5, 3) if "shards" in options else (1, 1, 4, 5, 6))

    @pytest.mark.parametrize(
        ("version", "axes"), [("0.4", "yx"), ("0.5", "zyx"), ("0.4", "czyx"), ("0.5", "tczyx")]
    )
    def test_metadata_is_valid_ome_zarr(self, version: str, axes: str, tmp_path) -> None:
        import zarr

        models = pytest.importorskip(f"ome_zarr_models.v{version.replace('.', '')}")
        like = open_source(DATA[(0,) * (5 - len(axes))])
        open_out(tmp_path / "a.zarr", like.domain, like=like, ome_version=version).create()
        group = zarr.open_group(tmp_path / "a.zarr", mode="r")
        multiscale = models.Image.from_zarr(group).ome_attributes.multiscales[0]
        assert "".join(axis.name for axis in multiscale.axes) == axes
        assert group["0"].shape == DATA.shape[5 - len(axes) :]

    @pytest.mark.parametrize(
        ("build", "out"), [(build_ome_zarr_04, "a.zarr"), (build_ome_zarr_05, "a.n5")]
    )
    def test_it_mirrors_what_it_is_like(self, build: Any, out: str, tmp_path) -> None:
        (tmp_path / "in").mkdir()
        like = open_source(build(tmp_path / "in"), level=1)
        open_out(tmp_path / out, like.domain, like=like).create()
        source = open_source(tmp_path / out)
        assert (source.axes, source.scale, source.units) == (like.axes, like.scale, like.units)
        if out == "a.zarr":
            assert source.ome_version == like.ome_version == "0.4"
            sharded = open_out(tmp_path / "b.zarr", like=like, shards=(8, 8, 8))
            assert sharded.write_grid[2:] == (8,) * 3

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
    def test_default_chunks(self, shape: Any, chunk_of_like: Any, expected: Any, tmp_path) -> None:
        like = None
        if chunk_of_like:
            like = open_source(DATA)
            like.chunks = chunk_of_like
        domain = Box((0,) * 5, shape)
        assert open_out(tmp_path / "a.zarr", domain, like=like).write_grid == expected

    def test_a_domain_off_zero_keeps_its_coordinates(self, tmp_path) -> None:

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

    def test_n5_says_its_version_also_inside_a_container(self, tmp_path) -> None:
        """zarr-python 2 opens no N5 without it."""
        for path in ("a.n5", "shelf.n5/raw"):
            open_out(tmp_path / path).create()
            written = json.loads((tmp_path / path / "attributes.json").read_text())
            assert written["n5"] == "2.0.0" and written["dimensions"] == [17, 13, 10, 3, 2]
            assert written["pixelResolution"]["dimensions"] == [1.0] * 5  # of N5-viewer

    def test_a_whole_chunk_is_written_without_reading_back(self, tmp_path) -> None:
        for name, options in [("a", {}), ("b", {"shards": (8, 10, 12)})]:
            sink = open_out(tmp_path / f"{name}.zarr", chunks=(4, 5, 6), **options)
            sink.create()
            box = Box.of((0,) * 5, sink.write_grid)
            for _ in range(2):  # also where a chunk is there already
                before = count_reads()
                sink.write(box, DATA[box.slices])
                assert count_reads() == before

    def test_the_callers_array_is_the_callers_again(self, tmp_path) -> None:
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


KINDS = ("04", "05", "n5", "spec")
FOREIGN = ("labels/cells/.zgroup", "notes.txt", "0/mask/.zarray", "scan-2/0.0", "0/0.tif")


class TestExisting:
    def make(self, path: Path) -> None:
        sink = open_out(path, chunks=(4, 5, 6))
        sink.create()
        sink.write(DOMAIN, DATA)

    @pytest.mark.parametrize("name", ["a.zarr", "a.n5"])
    def test_is_refused_replaced_or_resumed(self, name: str, tmp_path) -> None:
        path = tmp_path / name
        self.make(path)
        with pytest.raises(UsageError, match=rf"{name}: exists; use --overwrite"):
            open_out(path)
        open_out(path, resume=True, chunks=(4, 5, 6)).create()
        assert open_source(path).read(DOMAIN).sum() == DATA.sum()
        replaced = open_out(path, dtype="f4", overwrite=True)
        assert open_source(path).read(DOMAIN).sum() == DATA.sum()  # create() deletes, not before
        replaced.create()
        assert open_source(path).dtype == np.float32
        assert open_source(path).read(DOMAIN).sum() == 0

    @pytest.mark.parametrize("name", ["a.zarr/0", "a.n5"])
    def test_is_never_inside_an_array(self, name: str, tmp_path) -> None:
        self.make(tmp_path / name.partition("/")[0])
        with pytest.raises(UsageError, match=rf"b\.zarr: lies inside the array .*{name}; give"):
            open_out(tmp_path / name / "b.zarr")
        open_out(tmp_path / name.partition("/")[0] / "labels/b.zarr") if "/" in name else None

    def test_resume_refuses_another_layout(self, tmp_path) -> None:
        self.make(tmp_path / "a.zarr")
        with pytest.raises(UsageError, match=r"a\.zarr: .*float32.*uint16.*; go on with the"):
            open_out(tmp_path / "a.zarr", dtype="f4", resume=True, chunks=(4, 5, 6))

    def test_resume_leaves_metadata_alone(self, tmp_path) -> None:

        open_out(tmp_path / "a.zarr", ome_version="0.4").create()
        attributes = tmp_path / "a.zarr/.zattrs"
        attributes.write_text(attributes.read_text().replace('"a"', '"mine"'))
        open_out(tmp_path / "a.zarr", resume=True).create()
        assert "mine" in attributes.read_text()
        assert not (tmp_path / "a.zarr/zarr.json").exists()

    @pytest.mark.parametrize(("kind", "key"), [*zip(itertools.cycle(KINDS), FOREIGN)])
    def test_overwrite_deletes_no_more_than_the_array(self, kind: str, key: str, tmp_path) -> None:
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
        with pytest.raises(UsageError, match=f"also holds {key}, which is not part of the array"):
            open_out(target, overwrite=True)
        assert mine.read_text() == "mine"
        np.testing.assert_array_equal(open_source(sink.local_path).read(DOMAIN), DATA)
        mine.unlink()
        open_out(target, overwrite=True).create()

    @pytest.mark.parametrize("name", ["thesis.tex", ".zattrs", "attributes.json", "zarr.json"])
    def test_a_folder_of_other_things_is_left_alone(self, name: str, tmp_path) -> None:
        """A file that is named as metadata makes no store."""
        (tmp_path / name).write_text('{"mine": 1}')
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/", "metadata": ZARR2}
        for target, overwrite in ((tmp_path, True), (tmp_path, False), (spec, True)):
            with pytest.raises(UsageError, match="no Zarr or N5 store; it is left alone"):
                open_out(target, overwrite=overwrite)
        assert (tmp_path / name).read_text() == '{"mine": 1}'

    def test_an_n5_of_no_array_is_a_store(self, tmp_path) -> None:
        (tmp_path / "a.n5").mkdir()
        (tmp_path / "a.n5/attributes.json").write_text('{"n5": "4.0.0"}')
        with pytest.raises(UsageError, match="exists; use --overwrite"):
            open_out(tmp_path / "a.n5")
        open_out(tmp_path / "a.n5", overwrite=True).create()
        assert open_source(tmp_path / "a.n5").domain == DOMAIN

    def test_overwrite_of_a_spec(self, tmp_path) -> None:
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

    def test_a_spec_that_opens_takes_what_is_there(self, tmp_path) -> None:
        spec = {"driver": "zarr", "kvstore": f"file://{build_zarr2(tmp_path)}/"}
        for mode in ({}, {"open": True}, {"open": True, "create": True}):
            sink = open_out({**spec, **mode}, dtype="f4")
            assert (sink.domain, sink.dtype) == (DOMAIN, np.dtype("u2"))
            assert sink.write_grid == (1, 1, 4, 5, 6)
            sink.create()
            sink.write(DOMAIN, DATA[..., ::-1].copy())
            np.testing.assert_array_equal(open_source(spec).read(DOMAIN), DATA[..., ::-1])

    def test_a_spec_that_creates_is_completed(self, tmp_path) -> None:
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/a/", "create": True}
        spec["metadata"] = {"chunks": [1, 1, 4, 5, 6]}
        sink = open_out(spec, dtype="f4")
        assert (sink.domain, sink.dtype) == (DOMAIN, np.dtype("f4"))
        sink.create()
        assert open_source(tmp_path / "a").domain == DOMAIN

    def test_a_version_is_asked_of_what_replaces_another(self, tmp_path) -> None:

        open_out(tmp_path / "a.zarr", ome_version="0.4").create()
        open_out(tmp_path / "a.zarr", overwrite=True, shards=(8, 8, 8)).create()
        assert sorted(path.name for path in (tmp_path / "a.zarr").iterdir()) == ["0", "zarr.json"]
        assert open_source(tmp_path / "a.zarr").ome_version == "0.5"
        open_out(tmp_path / "a.zarr", overwrite=True, ome_version="0.4").create()
        with pytest.raises(UsageError, match=r"need OME-Zarr 0\.5, this is 0\.4"):
            open_out(tmp_path / "a.zarr", resume=True, shards=(8, 8, 8))

    def test_reading_a_sinks_spec_deletes_nothing(self, tmp_path) -> None:
        spec = out_spec({"driver": "file", "path": str(tmp_path / "out.zarr")})
        sink = open_out(spec)
        sink.create()
        sink.write(DOMAIN, DATA)
        np.testing.assert_array_equal(open_source(spec).read(DOMAIN), DATA)
        open_out(spec)  # nor does opening the sink again
        np.testing.assert_array_equal(open_source(spec).read(DOMAIN), DATA)
        open_out(spec).create()  # the user's own delete_existing
        assert open_source(spec).read(DOMAIN).sum() == 0


@pytest.mark.parametrize("name", ["link", "link/a.zarr", "link.tif"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_to_nothing_is_no_output(name: str, overwrite: bool, tmp_path: Path) -> None:
    link = tmp_path / name.partition("/")[0]
    link.symlink_to("gone")
    with pytest.raises(UsageError, match="is a link to gone, which does not exist"):
        open_out(str(tmp_path / name), files=True, overwrite=overwrite)
    assert [*tmp_path.iterdir()] == [link]
