"""One contender on one layout, in a fresh process: ``python loader_epoch.py JOB.json ANSWER.json``.

The layouts of ``loader.py --grid``, the data in them, and a contender's epochs: timed, or, untimed,
compared with numpy.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from penstock.loading.contenders import by_name
from penstock.loading.contenders.peers import BatchSamples
from penstock.loading.loader import Loader
from penstock.loading.order import Order

BATCH, THREADS = 16, 2
CONTENDERS = ("tensorstore-loop", "tensorstore-read", "zarr", "torch", "dask-stacked")
OURS = "penstock"


@dataclass(frozen=True)
class Layout:
    """How an array is stored, and what a sample of it is."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str = "float32"
    zarr: int = 2
    codec: str = "lz4"
    """raw, zstd, or by Blosc: lz4, blosc-zstd."""
    shards: tuple[int, ...] | None = None
    patch: tuple[int, ...] | None = None
    """Of a volume."""

    @property
    def told(self) -> str:
        parts = [f"{_by(self.shape)} {self.dtype}", f"chunks {_by(self.chunks)}"]
        parts += [f"shards {_by(self.shards)}"] if self.shards else []
        parts += [f"patches {_by(self.patch)}"] if self.patch else []
        return ", ".join([*parts, self.codec, f"v{self.zarr}"])

    @property
    def items(self) -> int:
        if self.patch is None:
            return self.shape[0]
        return int(np.prod([n // p for n, p in zip(self.shape, self.patch, strict=True)]))


_S, _F = (160, 8, 192, 384), (1, 8, 192, 384)
_SMALL = (1, 2, 96, 96)
LAYOUTS = {
    "sample, lz4": Layout(_S, _F),
    "sample, raw": Layout(_S, _F, zarr=3, codec="raw"),
    "sample, zstd": Layout(_S, _F, zarr=3, codec="zstd"),
    "sample, int16": Layout((320, *_S[1:]), _F, "int16", codec="blosc-zstd"),
    "small chunks, lz4": Layout(_S, _SMALL),
    "small chunks, raw": Layout(_S, _SMALL, zarr=3, codec="raw"),
    "small chunks, zstd": Layout(_S, _SMALL, zarr=3, codec="zstd"),
    "across samples": Layout(_S, (8, 2, 96, 192)),
    "across samples, int16": Layout((320, *_S[1:]), (16, 1, 192, 384), "int16", 3, "blosc-zstd"),
    "channels last, one a chunk": Layout((96, 192, 384, 13), (1, 192, 384, 1), codec="blosc-zstd"),
    "channels last, all in a chunk": Layout((160, 192, 384, 8), (1, 96, 96, 8), zarr=3),
    "uint8 images": Layout((1600, 256, 256, 3), (1, 256, 256, 3), "uint8", 3, "zstd"),
    "uint8 images, 16 a chunk": Layout((1600, 256, 256, 3), (16, 256, 256, 3), "uint8"),
    "shards of samples": Layout(_S, _F, zarr=3, codec="zstd", shards=(16, 8, 192, 384)),
    "shards of small chunks": Layout(_S, _SMALL, zarr=3, shards=(4, 8, 192, 384)),
    "patches, chunk of a patch": Layout(
        (512, 512, 512), (64, 64, 64), "uint16", codec="blosc-zstd", patch=(64, 64, 64)
    ),
    "patches across chunks": Layout(
        (480, 480, 480), (64, 64, 64), "int16", 3, "zstd", patch=(96, 96, 96)
    ),
}
QUICK = {
    "small chunks": Layout((64, 2, 16, 16), (1, 1, 8, 8)),
    "patches": Layout((32, 32, 32), (8, 8, 8), "uint16", 3, "zstd", patch=(8, 8, 8)),
}


def _by(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


# --- the data -----------------------------------------------------------------------------------


def write(layout: Layout, path: Path) -> None:
    """A smooth field with noise in its last digits, another one for each index of axis 0."""
    import numcodecs
    import zarr

    blosc, v3 = {"lz4": "lz4", "blosc-zstd": "zstd"}.get(layout.codec), layout.zarr == 3
    codecs: dict[str, Any] = {
        "raw": None, "zstd": zarr.codecs.ZstdCodec(level=3) if v3 else numcodecs.Zstd(3)
    }  # fmt: skip
    if blosc:
        codecs[layout.codec] = (
            zarr.codecs.BloscCodec(cname=blosc) if v3 else numcodecs.Blosc(blosc, 5, 1)
        )
    array = zarr.create_array(
        path, shape=layout.shape, chunks=layout.chunks, shards=layout.shards, dtype=layout.dtype,
        zarr_format=layout.zarr, compressors=codecs[layout.codec],
    )  # fmt: skip
    step = (layout.shards or layout.chunks)[0]
    for start in range(0, layout.shape[0], step):
        stop = min(start + step, layout.shape[0])
        array[start:stop] = np.stack([values(layout, i) for i in range(start, stop)])


_BASES: dict[tuple[int, ...], np.ndarray] = {}


@cache
def values(layout: Layout, index: int) -> np.ndarray:
    """What stands at an index of axis 0."""
    inner = layout.shape[1:]
    if inner not in _BASES:
        noise = np.random.default_rng(0).standard_normal(inner, np.float32)
        _BASES[inner] = np.cumsum(noise, axis=-2)
    field = np.roll(_BASES[inner], index * 7, axis=-2) + np.float32(index % 50)
    dtype = np.dtype(layout.dtype)
    if dtype.kind == "f":
        return field
    most = np.iinfo(dtype).max
    return np.clip(np.abs(field * (4 if most < 256 else 16)), 0, most).astype(dtype)


# --- the contenders -----------------------------------------------------------------------------


def order_of(layout: Layout, shuffle: str) -> Order:
    patches = 1 if layout.patch is None else layout.items
    samples = layout.items // patches
    return Order(samples, BATCH, shuffle=shuffle, patches_per_sample=patches, drop_last=True)


def opened(contender: str, layout: Layout, path: str, shuffle: str) -> Any:
    """A contender: ``batches()`` and ``close()``."""
    order = order_of(layout, shuffle)
    if layout.patch is None:
        return by_name.make_contender(contender, path, order, threads=THREADS)
    if contender.startswith(OURS):
        return OurPatches(contender, path, layout.patch, shuffle)
    return PATCHES[contender](path, order, layout)


class OurPatches:
    def __init__(self, name: str, path: str, patch: tuple[int, ...], shuffle: Any) -> None:
        engine = name.removeprefix(OURS).removeprefix("-") or "auto"
        self.loader = Loader(
            path, batch_size=BATCH, workers=THREADS, patch=patch, shuffle=shuffle,
            engine=engine, drop_last=True,
        )  # fmt: skip

    def batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        return iter(self.loader)

    def close(self) -> None:
        self.loader.close()


class Patches:
    """Patches as the others are read: a box for each row of a batch."""

    def __init__(self, path: str, order: Order, layout: Layout) -> None:
        self.order, self.layout = order, layout
        self.array = self.open(path)

    def open(self, path: str) -> Any:
        import tensorstore as ts

        driver = "zarr" if self.layout.zarr == 2 else "zarr3"
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": path}}
        context = ts.Context({"data_copy_concurrency": {"limit": THREADS}})
        return ts.open(spec, context=context).result()

    def boxes(self) -> Iterator[list[tuple[slice, ...]]]:
        for items in BatchSamples(self.order):
            yield [box_of(self.layout, int(item)) for item in items]

    def batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        for boxes in self.boxes():
            reads = [self.array[box].read() for box in boxes]
            yield {"data": np.stack([read.result() for read in reads])}

    def close(self) -> None:
        pass


class LoopPatches(Patches):
    def batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        import tensorstore as ts

        assert self.layout.patch is not None
        buffers = [np.empty((BATCH, *self.layout.patch), self.layout.dtype) for _ in range(2)]
        before = None
        for number, boxes in enumerate(self.boxes()):
            batch = buffers[number % 2]
            reads = [
                ts.array(row).write(self.array[box][ts.d[:].translate_to[0]])
                for row, box in zip(batch, boxes, strict=True)
            ]
            if before is not None:
                yield finished(*before)
            before = batch, reads
        if before is not None:
            yield finished(*before)


def finished(batch: np.ndarray, reads: list[Any]) -> Mapping[str, np.ndarray]:
    for read in reads:
        read.result()
    return {"data": batch}


class ZarrPatches(Patches):
    def open(self, path: str) -> Any:
        import zarr

        zarr.config.set({"async.concurrency": THREADS, "threading.max_workers": THREADS})
        return zarr.open_array(path, mode="r")

    def batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        for boxes in self.boxes():
            yield {"data": np.stack([self.array[box] for box in boxes])}


class DaskPatches(ZarrPatches):
    def batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        import dask
        import dask.array

        array = dask.array.from_zarr(self.array)
        with dask.config.set(scheduler="threads", num_workers=THREADS):
            for boxes in self.boxes():
                yield {"data": dask.array.stack([array[box] for box in boxes]).compute()}


class TorchPatches(Patches):
    """A map-style data set of boxes in worker processes."""

    def open(self, path: str) -> Any:
        import torch.utils.data

        return torch.utils.data.DataLoader(
            Boxes(path, self.layout),
            batch_sampler=[items.tolist() for items in BatchSamples(self.order)],
            num_workers=THREADS,
            multiprocessing_context="spawn",
            persistent_workers=True,
        )

    def batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        for batch in self.array:
            yield {"data": batch.numpy()}

    def close(self) -> None:
        self.array = None


class Boxes:
    def __init__(self, path: str, layout: Layout) -> None:
        self.path, self.layout, self.array = path, layout, None

    def __len__(self) -> int:
        return self.layout.items

    def __getitem__(self, item: int) -> np.ndarray:
        if self.array is None:
            import zarr

            zarr.config.set({"async.concurrency": 1, "threading.max_workers": 1})
            self.array = zarr.open_array(self.path, mode="r")
        return self.array[box_of(self.layout, item)]


def box_of(layout: Layout, item: int) -> tuple[slice, ...]:
    assert layout.patch is not None
    counts = [n // p for n, p in zip(layout.shape, layout.patch, strict=True)]
    place = np.unravel_index(item, counts)
    starts = [int(i) * p for i, p in zip(place, layout.patch, strict=True)]
    return tuple(slice(i, i + p) for i, p in zip(starts, layout.patch, strict=True))


PATCHES = {
    "tensorstore-loop": LoopPatches,
    "tensorstore-read": Patches,
    "zarr": ZarrPatches,
    "torch": TorchPatches,
    "dask-stacked": DaskPatches,
}


# --- one epoch ----------------------------------------------------------------------------------


def expected(layout: Layout, item: int) -> np.ndarray:
    if layout.patch is None:
        return values(layout, item)
    first, *rest = box_of(layout, item)
    return np.stack([values(layout, i)[tuple(rest)] for i in range(first.start, first.stop)])


def verify(job: Mapping[str, Any], layout: Layout) -> int:
    """Values that are not numpy's; -1 where batches are missing."""
    order = order_of(layout, job["shuffle"])
    loader, wrong, count = opened(job["contender"], layout, job["path"], job["shuffle"]), 0, 0
    for number, batch in enumerate(loader.batches()):
        count += 1
        (rows,) = batch.values()
        for row, item in zip(rows, order.items(0, number), strict=True):
            wrong += int((np.asarray(row) != expected(layout, int(item))).sum())
    loader.close()
    return wrong if count == order.num_batches else -1


def timed(job: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Seconds from opening the array to the last batch of the first epoch, and the median of the
    epochs after it, in which no memory is new to the process."""
    if job["contender"] == "torch":  # its workers start, and import, before the clock does
        loader = opened("torch", layout, job["path"], job["shuffle"])
        for _ in loader.batches():
            pass
    gc.collect()
    began = time.perf_counter()
    if job["contender"] != "torch":
        loader = opened(job["contender"], layout, job["path"], job["shuffle"])
    _run_through(loader)
    first, cpu = time.perf_counter() - began, time.process_time()
    later = [_run_through(loader) for _ in range(job["epochs"])]
    cpu = (time.process_time() - cpu) / max(1, len(later))
    ours = getattr(loader, "loader", None)
    loader.close()
    engine = str(ours.engine) if job["contender"].startswith(OURS) and ours else None
    seconds = statistics.median(later) if later else first
    return {"seconds": seconds, "first_s": first, "cpu_seconds": cpu, "engine": engine}


def _run_through(loader: Any) -> float:
    began = time.perf_counter()
    for batch in loader.batches():
        del batch
    return time.perf_counter() - began


def imports(contender: str) -> None:
    """What a contender imports, before its clock starts."""
    needs = {
        "zarr": ["zarr"],
        "torch": ["zarr", "torch.utils.data"],
        "dask-stacked": ["zarr", "dask.array", "xarray"],
    }
    for name in needs.get(
        contender,
        ["penstock.loading.engines.native", "penstock.loading.engines.tensorstore_engine"],
    ):
        import_module(name)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    layout = {**LAYOUTS, **QUICK}[job["layout"]]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    imports(job["contender"])
    answer = {"wrong": verify(job, layout)} if job["verify"] else timed(job, layout)
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
