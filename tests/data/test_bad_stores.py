"""Every refusal of a store against its sentence."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.data.stores.open import open_sink, open_source
from penstock.data.stores.zarr_groups import Group

from ..parameters import mainly
from .kit import DATA, DOMAIN, build_zarr2, odd_image, open_out, out_spec, saved, write


def pickled(folder: Path) -> Path:
    np.save(folder / "a.npy", np.array([{}]), allow_pickle=True)
    return folder / "a.npy"


def empty(folder: Path) -> Path:
    write(
        "zarr", folder / "a.zarr", np.zeros((0, 5, 6), "u1"), {"chunks": [4, 5, 6], "dtype": "|u1"}
    )
    return folder / "a.zarr"


def filtered(zarr_format: Literal[2, 3], folder: Path, compressor: Any = None) -> Path:
    """An array whose numbers zarr-python makes of others."""
    attributes = {"shape": [2, 2], "fill_value": 0}
    if zarr_format == 2:
        attributes |= {"zarr_format": 2, "chunks": [2, 2], "dtype": "<i4", "compressor": compressor,
                       "filters": None if compressor else [{"id": "delta", "dtype": "<i4"}],
                       "order": "C"}  # fmt: skip
        return saved(folder, ".zarray", json.dumps(attributes)).parent
    grid = {"name": "regular", "configuration": {"chunk_shape": [2, 2]}}
    codecs = [{"name": "numcodecs.delta", "configuration": {"dtype": "<i4"}}, {"name": "bytes"}]
    attributes |= {"zarr_format": 3, "node_type": "array", "data_type": "int32", "codecs": codecs,
                   "chunk_grid": grid, "chunk_key_encoding": {"name": "default"}}  # fmt: skip
    return saved(folder, "zarr.json", json.dumps(attributes)).parent


def bad_multiscales(folder: Path) -> Path:
    saved(folder, ".zattrs", '{"multiscales": [{"version": "0.4"}]}')
    return folder


def leads_out(folder: Path, path: str) -> Path:
    """An image whose array lies beside its group; the array is there."""
    write("zarr", folder / "secret", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
    multiscale = {"axes": [{"name": a} for a in "zyx"], "datasets": [{"path": path}]}
    group = folder / "group"
    group.mkdir()
    saved(group, ".zattrs", json.dumps({"multiscales": [multiscale]}))
    return group


def bad_axes(folder: Path, names: str) -> Path:
    write("zarr", folder / "0", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
    multiscale = {"axes": [{"name": a} for a in names], "datasets": [{"path": "0"}]}
    saved(folder, ".zattrs", json.dumps({"multiscales": [multiscale]}))
    return folder


def cut_level(folder: Path) -> Path:
    path = folder / "a.zarr"
    open_out(path).create()
    document = path / "0/zarr.json"
    document.write_bytes(document.read_bytes()[:60])
    return path


class TestBadInput:
    """Each is one sentence that names the flag, the place and what is wrong with it."""

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda d: d / "none.zarr", r"--in-spec .*none\.zarr: no such file or folder$"),
            (lambda d: d, r"neither an OME-Zarr image nor a Zarr, N5 or precomputed array$"),
            (
                lambda d: saved(d, "a.txt", "hello"),
                r"a\.txt: its ending is of no kind that is read: Zarr, N5",
            ),
            (lambda d: "/dev/zero", "/dev/zero: neither"),
            (lambda d: d / "none.tif", r"none\.tif: no such file$"),
            (lambda d: saved(d, "a.tif", "hello"), r"a\.tif: not a readable TIFF file: "),
            (lambda d: saved(d, "a.npy", "hello"), r"a\.npy: not a readable \.npy array: "),
            (pickled, r"a\.npy: not a readable \.npy array: .*objects"),
            (lambda d: '{"driver":\n zarr}', "--in-spec: not valid JSON: .*line 2 column 2"),
            (lambda d: saved(d, "a.json", "{,"), r"--in-spec .*a\.json: not valid JSON: .*line 1"),
            (lambda d: saved(d, "a.json", "[1]"), r"a\.json: expected a JSON object, got list"),
            (lambda d: {"kvstore": f"file://{d}/"}, r"--in-spec: .*driver"),
            (lambda d: {"driver": "zarr9"}, r'"zarr9" is not a registered TensorStore driver$'),
            (lambda d: {"driver": "zarr", "path": 3}, "--in-spec: "),
            (lambda d: {"driver": "zarr", "kvstore": f"file://{d}/a"}, r"\.zarray.*not exist$"),
            (lambda d: odd_image(d, translation="a"), "metadata is malformed: could not convert"),
            (lambda d: saved(d, "a.json", '{"refs": {}}'), r"a\.json: a list of kerchunk's refer"),
            (partial(filtered, 2), "pass through filters of Zarr 2, and such are not read here"),
            (partial(filtered, 2, compressor={"id": "adler32"}), "pass through adler32, and such"),
            (partial(filtered, 3), "pass through numcodecs.delta, and such are not read here"),
            (bad_multiscales, "metadata is malformed: it lacks 'datasets'"),
            (lambda d: leads_out(d, "../secret"), r"names '../secret', which"),
            (lambda d: leads_out(d, f"{d}/secret"), "which is not below it$"),
            (lambda d: leads_out(d, f"file://{d}/secret"), "which is not below it$"),
            (lambda d: saved(d, ".zattrs", "{").parent, r"\.zattrs is not valid JSON"),
            (
                lambda d: saved(d, "zarr.json", "").parent,
                r"zarr\.json is not valid JSON: Exp",
            ),
            (cut_level, r"a\.zarr: .*/0/zarr\.json is damaged or cut: it is not valid JSON$"),
            (lambda d: bad_axes(d, "qyx"), r"axes \['q', 'y', 'x'\]; each must be one of t, c, z"),
            (lambda d: np.zeros(3), "--in-spec: 1 dimension; 2 to 5 can be read"),
            (lambda d: np.zeros((0, 5, 6)), "^--in-spec: has 0 along z"),
            (empty, r"a\.zarr: has 0 along z"),
            (
                lambda d: {"driver": "zarr", "kvstore": f"file://{d}/", "dtype": "x\ny" * 999},
                r"^--in-spec: .{1,310}$",
            ),
        ],
    )
    def test_source(self, make: Callable[[Path], Any], message: str, tmp_path) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            open_source(make(tmp_path))
        assert "\n" not in str(caught.value) and "tensorstore_spec" not in str(caught.value)

    @pytest.mark.parametrize("size", mainly(["a", "", 0, float("nan"), float("inf")], 0, 2, 3))
    def test_a_size_that_is_none_is_unknown(self, size: Any, tmp_path) -> None:
        import tifffile

        source = open_source(odd_image(tmp_path, scale=size))
        assert source.scale == (1, 1, 2, 1.5, 0.5)
        open_out(tmp_path / "b.zarr", like=source).create()
        json.loads((tmp_path / "b.zarr/.zattrs").read_text(), parse_constant=pytest.fail)
        ome = {"axes": "TCZYX", "PhysicalSizeX": size, "PhysicalSizeY": 1.5}
        tifffile.imwrite(tmp_path / "a.ome.tif", DATA, metadata=ome)
        assert open_source(tmp_path / "a.ome.tif").scale == (1, 1, 1, 1.5, 1)

    @pytest.mark.parametrize("name", ["a.npy", "a.json"])
    def test_what_may_not_be_read(self, name: str, tmp_path, monkeypatch) -> None:
        (tmp_path / name).touch()

        def denied(self: Path, *_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied", str(self))

        for call in ("is_file", "read_text") if name == "a.json" else ("is_file",):
            with monkeypatch.context() as patch:
                patch.setattr(Path, call, denied)
                with pytest.raises(UsageError, match=rf"^--in-spec .*{name}: Permission denied$"):
                    open_source(tmp_path / name)

    def test_levels_where_there_are_none(self, tmp_path) -> None:
        for spec in (DATA, {"driver": "zarr"}, tmp_path / "a.npy"):
            with pytest.raises(UsageError, match=r"level 1 is asked, but only|have no levels"):
                open_source(spec, level=1)
        with pytest.raises(UsageError, match="it has level 0 only"):
            open_source(build_zarr2(tmp_path), level=1)

    @pytest.mark.parametrize(
        ("out", "options", "message"),
        [
            ("a.tif", {}, r"--out-spec .*a\.tif: cannot write \.tif; give OME-Zarr"),
            ("a.json", {}, r"a\.json: cannot write \.json"),
            ("a.zarr", {"chunks": (4,) * 4}, r"chunk shape \(4, 4, 4, 4\); give one number, y x"),
            ("a.zarr", {"chunks": (4, 4, 0)}, r"chunk shape \(4, 4, 0\)"),
            (
                *("a.zarr", {"chunks": (4, 4, 4), "shards": (6, 8, 8)}),
                r"shards \(1, 1, 6, 8, 8\) are not multiples of chunks \(1, 1, 4, 4, 4\)",
            ),
            (
                *("a.zarr", {"ome_version": "0.4", "shards": (8, 8, 8)}),
                r"shards \(8, 8, 8\) need OME-Zarr 0\.5, this is 0\.4",
            ),
            (
                *("a.zarr", {"shards": (8, 192, 128)}),
                r"--shards 192 \(axis y\) is not a multiple of 128, .* give --shards 256 or --ch",
            ),
            ("a.n5", {"shards": (8, 8, 8)}, "this is n5"),
            ("a.zarr", {"ome_version": "0.3"}, "OME-Zarr 0.3 cannot be written"),
            ("mine.zarr", {}, "it is left alone"),
            ({"driver": "zarr", "kvstore": "file://a/", "create": True}, {}, "not say its chunk"),
            (
                *(out_spec({"driver": "file", "path": "a"}) | {"creat": True}, {}),
                r'--out-spec: Object includes extra members: "creat"$',
            ),
            (np.zeros(3, "u1"), {}, "1 dimension; 2 to 5"),
        ],
    )
    def test_sink(self, out: Any, options: Any, message: str, tmp_path) -> None:
        saved(tmp_path, "mine.zarr", "hello")
        with pytest.raises(UsageError, match=message):
            open_out(tmp_path / out if isinstance(out, str) else out, **options)

    def test_a_place_that_cannot_be_written(self, tmp_path) -> None:
        sink = open_out(saved(tmp_path, "a.txt", "hello") / "a.zarr")
        with pytest.raises(UsageError, match=r"a\.txt/a\.zarr: .*Not a directory$"):
            sink.create()

    def test_a_corrupt_chunk_is_told_as_it_is(self, tmp_path) -> None:
        path = Path(build_zarr2(tmp_path))
        (path / "0.0.0.0.0").write_bytes(b"nonsense")
        with pytest.raises(ValueError, match=r"0\.0\.0\.0\.0") as caught:
            open_source(path).read(DOMAIN)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400

    def test_a_zip_file_of_several_things_or_of_none(self, tmp_path) -> None:
        place = shutil.make_archive(build_zarr2(tmp_path), "zip", tmp_path, "a.zarr")
        for path in (place, f"{place}/a.zarr"):
            assert (open_source(path).read(DOMAIN) == DATA).all()
        both = tmp_path / "both"
        for name in ("b.zarr", "a.zarr"):
            shutil.copytree(tmp_path / "a.zarr", both / name)
        listed = (
            r"is a zip file of folders \(a\.zarr, b\.zarr\); name one, such as .*all\.zip/a\.zarr$"
        )
        with pytest.raises(UsageError, match=listed):
            open_source(shutil.make_archive(f"{tmp_path}/all", "zip", both))
        with pytest.raises(UsageError, match=r"cannot write \.zip; give OME-Zarr"):
            open_sink(place, domain=DOMAIN, dtype=DATA.dtype)
        inside = f"{place}/a.zarr/labels/b"
        with pytest.raises(UsageError, match=r"labels/b: lies in a zip file, which is only read"):
            open_sink(inside, domain=DOMAIN, dtype=DATA.dtype)
        Path(place).write_bytes(Path(place).read_bytes()[:-50])
        with pytest.raises(UsageError, match=r"a\.zarr\.zip: .*(zip|ZIP)"):
            open_source(place)

    @pytest.mark.parametrize("name", ["a.npy", "a.h5", "a.nii.gz", "planes/*.tif"])
    def test_a_file_of_this_machine_by_a_url(self, name: str) -> None:
        with pytest.raises(UsageError, match="are read from this machine; copy them here"):
            open_source(f"https://localhost/{name}")

    def test_a_server_that_is_away_is_no_broken_json(self) -> None:
        away = Mock(side_effect=UsageError("could not connect"))
        with pytest.raises(UsageError, match=r"^could not connect$"):
            Group(away, "a.zarr").json("zarr.json")
