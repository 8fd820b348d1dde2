"""The packed data set: stacked samples on disk, each with an id and a checksum.

    DATA/dataset.json     the document; written last, so a folder without it was not finished
    DATA/inputs.zarr      (sample, lat, lon, channels)
    DATA/targets.zarr
    DATA/ids.npy          int64, one for each sample
    DATA/checks.npz       the ids again, and for each array one CRC-32 for each sample
    DATA/statistics.npz   for each array the mean and the standard deviation of each channel, over
                          its finite values; `dataset.json` counts the others, by channel

Shapes, chunks and codecs stand in the metadata of the Zarr arrays and nowhere else. No values are
read here; that is the work of `loading`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import StageError, UsageError, in_order, plural, require, system_errors
from ..stores.kvstore import kvstore_of
from .data_folder import check_room, clear, finish, mark_unfinished
from .format import (
    CHECKS,
    IDS,
    LAYOUT_AXES,
    STATISTICS,
    ArrayLayout,
    Packed,
    checksum,
    open_dataset,
)

Sample = Mapping[str, NDArray[np.float32]]
"""The arrays of one sample by name, without the sample axis."""


def write_dataset(
    root: Path,
    layouts: Mapping[str, ArrayLayout],
    ids: Sequence[int],
    make: Callable[[int], Sample],
    *,
    shards: int | None,
    workers: int,
    overwrite: bool,
    facts: Mapping[str, Any],
    progress: Callable[[int], None] = lambda done: None,
) -> Packed:
    """Write a data set of ``len(ids)`` samples, as Zarr 2 or, in shards, as Zarr 3. The result does
    not depend on ``workers``.

    Args:
        root: the folder to write.
        layouts: the layout of each array.
        ids: the id of each sample.
        make: gives the arrays of sample 0, 1, ...
        shards: samples in a shard, None for no shards.
        workers: threads; each makes, checks and writes one sample, or one shard.
        overwrite: replace a data set that is there.
        facts: further entries of `dataset.json`.
        progress: called with the number of samples that are done.

    Returns:
        The data set, opened.

    Raises:
        UsageError: the folder holds other files or cannot be written, or a channel has no finite
            value.
        Refused: the disk is too full.
        StageError: a sample failed.
    """
    _make_way(root, layouts, len(ids), overwrite)
    arrays = _open_arrays(root, layouts, len(ids), shards, workers)
    checks = {name: np.zeros(len(ids), np.uint32) for name in layouts}
    moments = {name: Moments.none(len(layout.channels)) for name, layout in layouts.items()}

    def write(first: int) -> list[dict[str, Moments]]:
        """Make and write one sample, or those of one shard; the moments of each."""
        numbers = range(first, min(first + (shards or 1), len(ids)))
        return _write_samples(root, numbers, make, arrays, checks, whole=bool(shards))

    done = 0
    for samples in in_order(write, range(0, len(ids), shards or 1), workers):
        for of_sample in samples:
            moments = {name: moments[name] + of_sample[name] for name in layouts}
        done += len(samples)
        progress(done)

    facts = {
        "statistics": STATISTICS,
        "not_finite": _not_finite(root, layouts, len(ids), moments),
        **facts,
    }
    _finish(root, layouts, ids, checks, moments, facts)
    return open_dataset(root, "OUT")


def _make_way(
    root: Path, layouts: Mapping[str, ArrayLayout], samples: int, overwrite: bool
) -> None:
    need = samples * sum(layout.num_bytes for layout in layouts.values())
    check_room(root, need, plural(samples, "sample"), "--samples or --grid")
    require("tensorstore", "loaders")
    clear(root, overwrite)
    with system_errors(f"OUT {root} cannot be written"):
        root.mkdir(parents=True, exist_ok=True)
        mark_unfinished(root, [f"{name}.zarr" for name in layouts])


def _not_finite(
    root: Path, layouts: Mapping[str, ArrayLayout], samples: int, moments: Mapping[str, Moments]
) -> dict[str, int]:
    """The number of values that are not finite, by array and channel, where there are any."""
    lacking = {}
    for name, layout in layouts.items():
        values = samples * math.prod(layout.shape) // len(layout.channels)
        for channel, count in zip(layout.channels, moments[name].count.tolist(), strict=True):
            if not count:
                raise UsageError(
                    f"OUT {root}: {channel} of {name} has no finite value in any sample"
                )
            if count < values:
                lacking[f"{name} {channel}"] = values - count
    return lacking


def _finish(
    root: Path,
    layouts: Mapping[str, ArrayLayout],
    ids: Sequence[int],
    checks: Mapping[str, NDArray[np.uint32]],
    moments: Mapping[str, Moments],
    facts: Mapping[str, Any],
) -> None:
    """Write everything beside the arrays, the document last."""
    np.save(root / IDS, np.asarray(ids, np.int64))
    np.savez(root / CHECKS, ids=np.asarray(ids, np.int64), **checks)  # type: ignore[arg-type]
    saved = {f"{name}.mean": of_array.mean for name, of_array in moments.items()}
    saved |= {f"{name}.std": of_array.std for name, of_array in moments.items()}
    np.savez(root / STATISTICS, **saved)  # type: ignore[arg-type]
    entries = {
        name: {
            "path": f"{name}.zarr",
            "axes": ["sample", *LAYOUT_AXES],
            "decoded_bytes": len(ids) * layout.num_bytes,
            "channels": layout.channels,
        }
        for name, layout in layouts.items()
    }
    finish(root, entries, len(ids), facts)


def _write_samples(
    root: Path,
    numbers: Sequence[int],
    make: Callable[[int], Sample],
    arrays: Mapping[str, Any],
    checks: Mapping[str, NDArray[np.uint32]],
    *,
    whole: bool,
) -> list[dict[str, Moments]]:
    """Write samples, all at once if ``whole``, and their checksums; returns their moments."""
    transaction = require("tensorstore", "loaders").Transaction() if whole else None
    written = []
    for number in numbers:
        try:
            sample, moments = make(number), {}
            for name, array in arrays.items():
                checks[name][number] = checksum(sample[name])
                moments[name] = Moments.of(sample[name])
                array.with_transaction(transaction)[number].write(sample[name]).result()
            written.append(moments)
        except Exception as error:
            raise StageError("generate", f"sample {number} of {root}", error) from error
    if transaction is not None:
        transaction.commit_async().result()
    return written


def _open_arrays(
    root: Path, layouts: Mapping[str, ArrayLayout], samples: int, shards: int | None, workers: int
) -> dict[str, Any]:
    """The new arrays, open in TensorStore."""
    ts = require("tensorstore", "loaders")
    context = ts.Context({"file_io_sync": False, "data_copy_concurrency": {"limit": workers}})
    arrays = {}
    for name, layout in layouts.items():
        path = root / f"{name}.zarr"
        spec = _spec(path, layout, samples, shards)
        arrays[name] = ts.open(spec, create=True, context=context).result()
        if not shards:  # as xarray wants it; Zarr 3 has a place for the names of axes
            axes = {"_ARRAY_DIMENSIONS": ["sample", *LAYOUT_AXES]}
            (path / ".zattrs").write_text(json.dumps(axes))
    return arrays


def _spec(path: Path, layout: ArrayLayout, samples: int, shards: int | None) -> dict[str, Any]:
    """A TensorStore spec of a new array."""
    shape, chunks = [samples, *layout.shape], [1, *layout.chunks]
    # Every chunk is stored, whatever is in it, so a missing chunk was lost. The fill value is that
    # of xarray, which would take any other for a missing value.
    common = {"kvstore": kvstore_of(str(path)), "store_data_equal_to_fill_value": True}
    blosc = {"cname": "lz4", "clevel": 5, "blocksize": 0}
    metadata: dict[str, Any]
    if not shards:
        metadata = {
            "shape": shape,
            "chunks": chunks,
            "dtype": "<f4",
            "order": "C",
            "compressor": {"id": "blosc", **blosc, "shuffle": 1},
            "fill_value": "NaN",
            "filters": None,
        }
        return {"driver": "zarr", **common, "metadata": metadata}
    sides = zip(layout.shape, layout.chunks, strict=True)
    outer = [shards, *(-(-length // chunk) * chunk for length, chunk in sides)]
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "blosc", "configuration": {**blosc, "shuffle": "shuffle", "typesize": 4}},
    ]
    inner = {"chunk_shape": chunks, "codecs": codecs}
    metadata = {
        "shape": shape,
        "data_type": "float32",
        "fill_value": "NaN",
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
        "dimension_names": ["sample", *LAYOUT_AXES],
    }
    return {"driver": "zarr3", **common, "metadata": metadata}


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of each channel; they add up over samples.

    Values that are not finite are left out: a coast is no weather.
    """

    count: NDArray[np.int64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def none(cls, num_channels: int) -> Moments:
        """The moments of no values."""
        none = np.zeros(num_channels)
        return cls(none.astype(np.int64), none, none)

    @classmethod
    def of(cls, values: NDArray[Any]) -> Moments:
        """The moments of an array, its channels last, in float64, a slab at a time.

        A slab stays in the processor's cache.
        """
        there = np.isfinite(values)
        sides = tuple(range(values.ndim - 1))
        count = there.sum(axis=sides)
        some = np.maximum(count, 1)
        # Deviations from a value near the mean lose nothing when their squares are added.
        near = values.sum(axis=sides, dtype=np.float64, where=there) / some
        total, squares = np.zeros_like(near), np.zeros_like(near)
        for slab, is_value in zip(values, there, strict=True):
            deviations = np.where(is_value, slab - near, 0)
            total += deviations.sum(axis=0)
            squares += np.einsum("xc,xc->c", deviations, deviations)
        return cls(count, near + total / some, squares - total**2 / some)

    def __add__(self, other: Moments) -> Moments:
        """The moments of both, by Chan, Golub and LeVeque (1979)."""
        count = self.count + other.count
        apart, share = other.mean - self.mean, other.count / np.maximum(count, 1)
        return Moments(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart**2 * (self.count * share),
        )

    @property
    def std(self) -> NDArray[np.float64]:
        """The standard deviation of each channel, over ``n``, shape (channels,)."""
        return np.sqrt(np.maximum(self.squares, 0) / np.maximum(self.count, 1))
