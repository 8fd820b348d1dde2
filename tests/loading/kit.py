"""What the tests of the loader share: arrays on disk, their truth, and a look into what it does."""

import contextlib
import functools
import http.server
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.data.packed.format import ArrayLayout, Packed
from penstock.data.packed.write import write_dataset
from penstock.loading.batch import Batch
from penstock.loading.loader import Loader

ENGINES = ("native", "tensorstore")
LAST = (12, 6, 5, 10)  # (sample, lat, lon, channels), the last chunk padded
FIRST = (12, 10, 6, 5)


def distinct(shape: tuple[int, ...], dtype: Any = np.float32, start: int = 1) -> NDArray[Any]:
    """No two values alike, none of them a fill value."""
    return np.arange(start, start + np.prod(shape), dtype=dtype).reshape(shape)


@contextlib.contextmanager
def quick_codecs() -> Iterator[None]:
    """Within it zarr-python takes the codecs of zarrs: with its own a chunk takes 0.3 ms, however
    small it is. What zarrs does not know is left to its own."""
    zarr = pytest.importorskip("zarr")
    try:
        import zarrs  # noqa: F401 - the import is what registers its codecs with zarr-python
    except ImportError:
        yield
        return
    with (
        warnings.catch_warnings(),
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}),
    ):
        warnings.filterwarnings("ignore", "Array is unsupported by ZarrsCodecPipeline")
        yield


def write(
    path: Path, values: NDArray[Any], chunks: tuple[int, ...], zarr_format: int = 2, **how: Any
) -> Path:
    """A Zarr array on disk; a codec that is a word is one of Zarr 3."""
    with quick_codecs():
        return write_plainly(path, values, chunks, zarr_format, **how)


def write_plainly(
    path: Path, values: NDArray[Any], chunks: tuple[int, ...], zarr_format: int = 2, **how: Any
) -> Path:
    """The same by zarr-python and numcodecs alone, as most arrays are written."""
    zarr = pytest.importorskip("zarr")
    codecs = {
        "blosc": zarr.codecs.BloscCodec(cname="lz4", typesize=values.itemsize),
        "gzip": zarr.codecs.GzipCodec(),
        "crc32c": zarr.codecs.Crc32cCodec(),
    }
    match how.get("compressors"):
        case str(word):
            how["compressors"] = codecs[word]
        case [*words]:
            how["compressors"] = [codecs[word] for word in words]
    array = zarr.create_array(
        path, shape=values.shape, chunks=chunks, dtype=values.dtype, zarr_format=zarr_format, **how
    )
    array[...] = values
    return path


def arrays(data: dict[str, Path]) -> dict[str, NDArray[Any]]:
    zarr = pytest.importorskip("zarr")
    with quick_codecs():
        return {name: zarr.open_array(path, mode="r")[...] for name, path in data.items()}


SAMPLES = 11
"""In a packed data set of two arrays."""
ARRAYS = {
    name: ArrayLayout((4, 6, depth), (4, 6, 3), tuple(map(str, range(depth))))
    for name, depth in (("inputs", 7), ("targets", 4))
}
TRUTH = {
    name: np.arange(SAMPLES * np.prod(layout.shape), dtype=np.float32).reshape(-1, *layout.shape)
    for name, layout in ARRAYS.items()
}


def pack(root: Path, **settings: Any) -> Packed:
    """A packed data set that holds `TRUTH`."""
    return write_dataset(
        root,
        ARRAYS,
        range(SAMPLES),
        lambda index: {name: values[index] for name, values in TRUTH.items()},
        **{"shards": None, **settings},
        workers=2,
        overwrite=False,
        facts={},
    )


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "cut-in-the-header": lambda path: os.truncate(path, 9),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 7),
    "unreadable": lambda path: (path.unlink(), path.mkdir()),  # type: ignore[func-returns-value]
}
"""What may happen to the file of a chunk."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


def signed(query: str) -> type[Quiet]:
    """A server that refuses each request without a signature in its query."""

    class Signed(Quiet):
        def do_GET(self) -> None:
            if not self.path.endswith(query):
                return self.send_error(403)
            self.path = self.path.removesuffix(query)
            return super().do_GET()

    return Signed


class _Forbidding(Quiet):
    """As a bucket that may be read and not listed: what it lacks is forbidden."""

    def send_error(self, code: int, *args: Any, **_: Any) -> None:
        super().send_error(403 if code == 404 else code, *args)


def forbidding(folder: Path) -> contextlib.AbstractContextManager[str]:
    return served(folder, _Forbidding)


@contextlib.contextmanager
def served(folder: Path, handler: type[Quiet] = Quiet) -> Iterator[str]:
    """The URL of a folder, by a thread of this process: a server of its own takes a tenth of a
    second to start."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=folder)
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def seen(loader: Loader) -> list[tuple[int, list[int], dict[str, bytes]]]:
    """All of an epoch: number, items and bytes of each batch."""
    return [
        (b.number, b.indices.tolist(), {name: array.tobytes() for name, array in b.items()})
        for b in loader
    ]


def expected(values: NDArray[Any], batch: Batch, loader: Loader) -> NDArray[Any]:
    """Rows of a batch from the whole array, by plain numpy."""
    field = loader.fields["data"]
    rows = []
    for item, sample in zip(batch.indices.tolist(), batch.samples.tolist(), strict=True):
        cut = [slice(None)] * (values.ndim - 1)
        for axis, start in field.patch_start(item % field.patches_per_sample).items():
            cut[axis - 1] = slice(start, start + field.item_shape[axis - values.ndim])
        steps = [values[sample + offset][tuple(cut)] for offset in field.offsets]
        if field.channels is not None:
            steps = [np.take(step, field.channels, field.channel_axis - 1) for step in steps]
        rows.append(np.stack(steps) if len(steps) > 1 else steps[0])
    return np.stack(rows)


def threads_of_loaders() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("penstock-loader")]


def read_by(monkeypatch, read: Callable[..., Any]) -> None:
    """Have the native engine read the files of chunks by another function."""
    monkeypatch.setattr("penstock.loading.engines.native.read_chunk_file", read)


def _chunk_reader() -> Callable[..., Any]:
    from penstock.loading.engines import native  # needs numcodecs, which is no part of the core

    return native.read_chunk_file


def slow(monkeypatch, seed: int) -> None:
    """Chunks take their time, each another."""
    rng, read = random.Random(seed), _chunk_reader()
    nap = threading.Event()

    def read_slowly(*args: Any) -> Any:
        nap.wait(rng.random() * 0.002)
        return read(*args)

    read_by(monkeypatch, read_slowly)
