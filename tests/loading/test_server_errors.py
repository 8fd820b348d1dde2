"""A server that answers for every chunk with an error: one sentence, after so many tries."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Loader, StageError, UsageError
from penstock.cli import main
from penstock.data.stores import tensorstore as store
from penstock.loading.engines import tensorstore_engine as engine

from .kit import SAMPLES, TRUTH, Quiet, pack, served, signed, write

Asked = Counter[str]


class _Faulty(Quiet):
    """What a store is gets told; of its chunks only that the server failed, and at some length."""

    asked: Asked

    def do_GET(self) -> None:
        if not re.fullmatch(r"\d+(\.\d+)*", Path(self.path).name):
            return super().do_GET()
        self.asked[self.path] += 1
        return self.send_error(500)


@contextlib.contextmanager
def faulty(folder: Path) -> Iterator[tuple[str, Asked]]:
    """The URL of a folder, and how often each chunk in it has been asked for."""
    handler = type("Handler", (_Faulty,), {"asked": Counter()})
    with served(folder, handler) as url:
        yield url, handler.asked


@pytest.fixture
def volume(tmp_path) -> Path:
    """The folder that holds an array of (8, 8, 8) in four chunks, called in.zarr."""
    metadata = {"shape": [8, 8, 8], "chunks": [2, 8, 8], "dtype": "<u2", "compressor": None}
    path = tmp_path / "data" / "in.zarr"
    spec = {"driver": "zarr", "kvstore": f"file://{path}/", "metadata": metadata}
    array = engine.ts.open(spec, create=True).result()
    array.write(np.arange(512, dtype="u2").reshape(8, 8, 8)).result()
    return path.parent


def hurried(monkeypatch, module: Any, name: str) -> int:
    """Wait for a millisecond at first before each new try. How many tries there are: as always.
    TensorStore before 0.1.86 counts the first try among them, and makes one less."""
    patience = getattr(module, name)
    brief = {kind: {**limits, "initial_delay": "1ms"} for kind, limits in patience.items()}
    monkeypatch.setattr(module, name, brief)
    return 1 + patience["http_request_retries"]["max_retries"]


def is_short(sentence: str) -> bool:
    """Whether it is one, without the page that the server sent."""
    return len(sentence.splitlines()) == 1 and "<" not in sentence and len(sentence) < 300


def test_a_loader_gives_up_with_one_sentence(volume: Path, monkeypatch) -> None:
    tries = hurried(monkeypatch, engine, "_PATIENCE")
    with faulty(volume) as (url, asked), Loader(f"{url}/in.zarr", batch_size=2) as loader:
        reason = rf"^read failed at {url}/in.zarr: Error reading .*: .*HTTP code 500\]$"
        with pytest.raises(StageError, match=reason) as caught:
            list(loader)
    assert is_short(str(caught.value))
    assert 2 < tries - 1 <= max(asked.values()) <= tries < 9


def test_a_loader_reads_behind_a_signature_and_never_says_it(tmp_path) -> None:
    query = "?sig=s1gnature"

    pack(tmp_path / "set")
    values = TRUTH["inputs"]
    write(tmp_path / "image" / "full", values, values.shape)
    axes = [{"name": name, "type": "space"} for name in "tzyx"]
    scale = [{"type": "scale", "scale": [1, 1, 1, 1]}]
    levels = [{"path": "full", "coordinateTransformations": scale}]
    image = {"version": "0.4", "axes": axes, "datasets": levels}
    (tmp_path / "image" / ".zattrs").write_text(json.dumps({"multiscales": [image]}))
    with served(tmp_path, signed(query)) as url:
        for place in (f"{url}/set{query}", f"{url}/image{query}"):
            with Loader(place, batch_size=SAMPLES) as loader:
                (first, *_) = next(iter(loader)).values()
            np.testing.assert_array_equal(first, values)
        for place in (f"{url}/none{query}", f"{url}/set{query}-wrong"):
            with pytest.raises(UsageError) as caught:
                Loader(place)
            assert "s1gnature" not in str(caught.value)


def test_infer_gives_up_with_one_sentence(volume: Path, tmp_path, monkeypatch, capsys) -> None:
    tries = hurried(monkeypatch, store, "BRIEF")
    with faulty(volume) as (url, asked):
        words = ["infer", "--in-spec", f"{url}/in.zarr", "--out-spec", f"{tmp_path}/out.zarr",
                 "--model-type", "identity", "--patch", "8", "--overlap", "0",
                 "--devices", "cpu", "--retry-for", "0", "--normalize", "none"]  # fmt: skip
        assert main(words) == 3
    said = capsys.readouterr().err
    assert is_short(said) and "HTTP code 500]; this went on" in said
    assert said.startswith("penstock infer: read failed at brick 0 ")
    assert 2 < tries - 1 <= max(asked.values()) <= tries < 9
