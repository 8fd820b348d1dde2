"""Making an output, killed after any of its steps: the next run goes on either way."""

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from penstock.base.errors import UsageError
from penstock.data import Box, open_source
from penstock.data.stores import kvstore as stores_kvstore
from penstock.data.stores import omezarr, tensorstore_open
from penstock.data.stores import tensorstore as stores
from penstock.data.stores.kvstore import local_path, open_kvstore

from .kit import DATA, SINKS, open_out, out_spec, write


class Killed(Exception):
    """Stands for a SIGKILL."""


def open_keys_by(patch: pytest.MonkeyPatch, opens: Any) -> None:
    """In every room that opens key-value stores, all of them imported before."""
    for room in (stores_kvstore, tensorstore_open, omezarr):
        patch.setattr(room, "open_kvstore", opens)


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
        stored = [key for key in self.store.list().result() if in_range(key, keys)]
        self.life.shuffled.shuffle(stored)
        for key in stored:
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
    pytest.param(SINKS["ome_zarr_04"], old_nothing, "overwrite", marks=pytest.mark.slow),
    (SINKS["ome_zarr_05"], old_group, "resume"),
    pytest.param(SINKS["n5"], old_array, "overwrite", marks=pytest.mark.slow),
    pytest.param(SINKS["spec"], old_array, "resume", marks=pytest.mark.slow),
    pytest.param(SINKS["ome_zarr_sharded"], old_group, "overwrite", marks=pytest.mark.slow),
    pytest.param(SINKS["spec"], old_nothing, "overwrite", marks=pytest.mark.slow),
]
"""Each kind of store, and each way with each of the old ones."""


class TestKilledWhileItIsMade:
    @pytest.mark.parametrize(("make", "old", "way"), KILLED)
    def test_it_goes_on(self, make: Any, old: Any, way: str, tmp_path, monkeypatch) -> None:
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
                says = isinstance(spec, dict) and way == "resume"  # it says delete_existing itself
                sink = open_out(spec, DOMAIN_OF_FEW, overwrite=not says, **options)
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

    def test_what_is_half_deleted_is_still_not_taken_without_a_word(self, tmp_path) -> None:
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

    def test_what_may_not_be_deleted_is_known_before(self, tmp_path, monkeypatch) -> None:
        open_out(tmp_path / "a.zarr").create()
        before = tree(tmp_path)
        for path in (tmp_path / "a.zarr", tmp_path / "b.zarr"):
            open_out(path, overwrite=True).check()
        assert tree(tmp_path) == before and not (tmp_path / "b.zarr").exists()

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
