"""Faults of disks, stores and servers: each ends the iteration at once, with the path."""

import json
import os
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import StageError, UsageError
from penstock.loading.loader import Loader

from ..parameters import mainly
from .kit import DAMAGES, ENGINES, distinct, forbidding, read_by, served, threads_of_loaders, write

numcodecs = pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")


def chunk(data: dict[str, Path]) -> Path:
    return data["inputs"] / "7.0.0.1"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chunk_is_named(copy: dict[str, Path], damage: str, engine: str) -> None:
    DAMAGES[damage](chunk(copy))
    loader = Loader(copy, batch_size=2, workers=3, engine=engine)
    with pytest.raises(StageError, match=r"inputs\.zarr/7\.0\.0\.1") as caught:
        for batch in loader:
            assert 7 not in batch.samples
    assert caught.value.stage in ("read", "decode")
    assert threads_of_loaders() == []
    with pytest.raises(StageError):  # and again when iterated again
        list(loader)
    assert threads_of_loaders() == []


def test_a_pipe_in_place_of_a_chunk_is_not_waited_for(copy: dict[str, Path]) -> None:
    chunk(copy).unlink()
    os.mkfifo(chunk(copy))
    with pytest.raises(StageError, match=r"7\.0\.0\.1.*the file has 0 bytes"):
        list(Loader(copy, batch_size=2, engine="native"))


def test_what_a_blosc_header_promises_is_checked(copy: dict[str, Path]) -> None:
    stored = bytearray(chunk(copy).read_bytes())
    for place, value, message in (
        (12, len(stored) + 4096, "its header says"),
        (4, 1 << 30, "decodes to 1073741824 bytes"),
    ):
        wrong = stored.copy()
        wrong[place : place + 4] = value.to_bytes(4, "little")
        chunk(copy).write_bytes(wrong)
        with pytest.raises(StageError, match=message):
            list(Loader(copy, batch_size=2, engine="native"))


def of_v3(*codecs: Any) -> dict[str, Any]:
    return {"zarr_format": 3, "compressors": list(codecs)}


BLOSC, CHECKED = numcodecs.Blosc("lz4"), numcodecs.CRC32C(location="end")
SHUFFLED = {"filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.Zstd()}
CODECS: dict[str, tuple[dict[str, Any], Callable[[bytes], bytes]]] = {
    **{
        f"v2-{codec.codec_id}": ({"compressors": codec}, codec.encode)
        for codec in (
            BLOSC, numcodecs.Zstd(), numcodecs.LZ4(), numcodecs.Zlib(), numcodecs.GZip()
        )
    },
    "v2-uncompressed": ({"compressors": None}, bytes),
    "v2-shuffle": (SHUFFLED, numcodecs.Zstd().encode),
    "v3-zstd": ({"zarr_format": 3}, numcodecs.Zstd().encode),
    "v3-gzip": (of_v3("gzip"), numcodecs.GZip().encode),
    "v3-blosc": (of_v3("blosc"), BLOSC.encode),
    "v3-blosc-crc32c": (of_v3("blosc", "crc32c"), lambda data: CHECKED.encode(BLOSC.encode(data))),
    "v3-crc32c": (of_v3("crc32c"), CHECKED.encode),
}  # fmt: skip
"""How an array is stored, and what stores some bytes as one of its chunks."""


@pytest.mark.parametrize(
    ("codec", "lengths"),
    mainly(
        [*product(CODECS, [(356, 364)]), *product(["v2-lz4", "v3-gzip"], [(4, 64, 1 << 20)])],
        0,
        5,
        -1,
    ),
)
def test_a_chunk_of_another_length_is_named(codec: str, lengths: tuple[int, ...], tmp_path) -> None:
    """Whole and valid, but for how many bytes are in it."""
    how, encode = CODECS[codec]
    path = write(tmp_path / "a.zarr", values := distinct((4, 90)), (1, 90), **how)
    wrong = path / ("c/2/0" if how.get("zarr_format") == 3 else "2.0")
    assert wrong.is_file()
    with Loader(path, batch_size=1, workers=1, engine="native") as loader:
        for batch in loader:
            assert np.array_equal(batch["data"], values[batch.samples])
    for length in lengths:
        wrong.write_bytes(encode(bytes(length)))
        with pytest.raises(StageError, match=f"{wrong}") as caught:
            for batch in Loader(path, batch_size=1, workers=1, engine="native"):
                assert batch.samples.tolist() != [2]
        assert caught.value.stage in ("read", "decode")  # the longest is too long for a file
        if caught.value.stage == "decode":
            assert re.search(f"(decodes to|has) {length} bytes, not 360$", str(caught.value))


def test_two_frames_of_zstandard_are_one_chunk(tmp_path) -> None:
    path = write(
        tmp_path / "a.zarr", values := distinct((2, 90)), (1, 90), compressors=numcodecs.Zstd()
    )
    first, second = values[1].tobytes()[:64], values[1].tobytes()[64:]
    encode = numcodecs.Zstd().encode
    (path / "1.0").write_bytes(encode(first) + encode(second))
    with Loader(path, batch_size=2, engine="native") as loader:
        (batch,) = loader
        assert np.array_equal(batch["data"], values)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_chunk_is_filled_if_asked(engine: str, zarr_format: int, tmp_path) -> None:
    values = distinct((4, 6))
    path = write(tmp_path / "a.zarr", values, (1, 3), zarr_format, fill_value=-5)
    (path / ("2.1" if zarr_format == 2 else "c/2/1")).unlink()
    with pytest.raises(StageError, match=r"c/2/1.*missing|2\.1.*missing"):
        list(Loader(path, batch_size=4, engine=engine))
    with Loader(path, batch_size=4, engine=engine, missing="fill") as loader:
        (batch,) = loader
    values[2, 3:] = -5
    assert np.array_equal(batch["data"], values)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_without_a_fill_value_fills_nothing(engine: str, tmp_path) -> None:
    path = write(tmp_path / "a.zarr", distinct((4, 6)), (1, 3))
    metadata = json.loads((path / ".zarray").read_text()) | {"fill_value": None}
    (path / ".zarray").write_text(json.dumps(metadata))
    (path / "2.1").unlink()
    said = r"2\.1: .* sets no fill value" if engine == "native" else r"2\.1.* is missing"
    with pytest.raises(StageError, match=said):
        list(Loader(path, batch_size=4, engine=engine, missing="fill"))


def test_a_block_that_n5_lacks_is_zero_only_where_that_is_asked(tmp_path) -> None:
    import tensorstore

    metadata = {"dimensions": [4, 6], "blockSize": [1, 3], "dataType": "float32"}
    store = {"driver": "file", "path": f"{tmp_path}/a.n5/"}
    values = distinct((4, 6))
    tensorstore.open(
        {"driver": "n5", "kvstore": store, "metadata": metadata}, create=True
    ).result().write(values).result()
    (tmp_path / "a.n5" / "2" / "1").unlink()
    with pytest.raises(StageError, match=r"2/1.* is missing"):
        list(Loader(tmp_path / "a.n5", batch_size=4))
    with Loader(tmp_path / "a.n5", batch_size=4, missing="fill") as loader:
        (batch,) = loader
    values[2, 3:] = 0
    assert np.array_equal(batch["data"], values)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_store_that_may_not_be_listed_is_read(zarr_format: int, tmp_path) -> None:
    write(tmp_path / "a.zarr", values := distinct((4, 6)), (1, 3), zarr_format)
    with forbidding(tmp_path) as url:
        with Loader(f"{url}/a.zarr", batch_size=4) as loader:
            (batch,) = loader
        assert np.array_equal(batch["data"], values)
        with pytest.raises(UsageError, match=r"none\.zarr.*403"):
            Loader(f"{url}/none.zarr", batch_size=4)


def test_a_failing_disk_is_reported_by_its_first_error(data: dict[str, Path], monkeypatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    read_by(monkeypatch, fail)
    with pytest.raises(StageError, match=r"read failed at .*zarr/\d.*: Input/output error"):
        next(iter(Loader(data, batch_size=2, workers=8, queue=4, engine="native")))
    assert threads_of_loaders() == []


def test_a_server_that_is_gone_ends_after_so_many_tries(data: dict[str, Path], monkeypatch) -> None:
    """TensorStore by itself would go on for a quarter of an hour."""
    never = {"http_request_retries": {"max_retries": 1, "initial_delay": "1ms"}}
    monkeypatch.setattr("penstock.loading.engines.tensorstore_engine._PATIENCE", never)
    with served(data["inputs"].parent) as url:
        loader = Loader(f"{url}/inputs.zarr", batch_size=2)
    with pytest.raises(StageError, match=r"read failed at http.*inputs\.zarr"):
        list(loader)
