"""HDF5 files by h5py: plain datasets, NetCDF 4, NWB and Imaris.

    file.h5::group/name     the array of that name; where a file holds one array only, it is that

A dataset may say what its axes are: by dimension scales (NetCDF), by labels of its dimensions, by
``axistags`` (vigra, ilastik), or by being NWB's or Imaris'.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe, require, system_errors
from .cf_packing import packing_of
from .frames import physical_size, shown_channel, unit_name
from .protocols import SeveralArrays, in_words, listed, local_file
from .sliced import OpenedArray, SlicedSource, open_sliced

_NWB_AXES = {3: "txy", 4: "txyz"}
_CHUNK = 2**20
"""About the voxels of a region that is read at once of an array that is stored in one piece."""


def open_hdf5_source(
    path: str, *, inside: str, level: int, cache_bytes: int, name: str, raw: bool,
    axes: str | None, series: int | None,
) -> SlicedSource:  # fmt: skip
    """Open an array of an HDF5 file.

    Args:
        path: The file.
        inside: The array's name; empty for the only one.
        level: The level of Imaris' pyramid.
        cache_bytes: The most decoded bytes that HDF5 keeps.
        name: The flag that messages name.
        raw: Read what is stored, whatever the CF attributes say of it.
        axes: The letters of the stored axes, as the user says.
        series: The image that the user asks for; such a file has one.

    Raises:
        UsageError: It cannot be read, or there is a choice of several arrays.
    """
    where, file = local_file(path, name)
    if series is not None:
        raise UsageError(f"{where}: an HDF5 file has no series; name an array as {path}::NAME")

    def read(num_bytes: int) -> OpenedArray:
        classic = _begins(file, where) == b"CDF"
        handle: Any = {} if classic else _opened(file, num_bytes, where)
        if "DataSetInfo" in handle and "DataSet" in handle and not inside:
            # Each of its datasets has a cache of its own.
            share = num_bytes // max(1, sum(map(len, handle["DataSet/ResolutionLevel 0"].values())))
            return _imaris(_opened(file, share, where), level, num_bytes, where)
        if level:
            raise UsageError(f"{where}: level {level} is asked, but it has no levels")
        if classic:
            return _classic(file, inside, path, name, raw)
        return _plain(_chosen(arrays_in(handle), inside, path, name), raw, num_bytes, where)

    return open_sliced(
        read, path=path, inside=f"{inside} {level}",
        axes=axes, cache_bytes=cache_bytes, where=where,
    )  # fmt: skip


def _opened(file: Path, cache_bytes: int, where: str) -> Any:
    try:
        # Slots as h5py advises: a prime of about a hundred times the chunks that fit.
        return require("h5py", "hdf5").File(file, "r", rdcc_nbytes=cache_bytes, rdcc_nslots=100_003)
    except OSError as error:
        raise UsageError(f"{where}: not a readable HDF5 file: {describe(error)}") from error


def _begins(file: Path, where: str) -> bytes:
    with system_errors(where), file.open("rb") as stream:
        return stream.read(3)


def _classic(file: Path, inside: str, path: str, name: str, raw: bool) -> OpenedArray:
    """An array of a file of classic NetCDF, which is mapped."""
    where = f"{name} {path}"
    try:
        handle = require("scipy.io", "scenes").netcdf_file(file, "r", mmap=True)
        arrays = {key: each for key, each in handle.variables.items() if len(each.dimensions) > 1}
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{where}: not a readable NetCDF file: {describe(error)}") from error
    try:
        chosen = _chosen(arrays, inside, path, name)
    finally:
        with warnings.catch_warnings():  # the file stays mapped as long as its array is there
            warnings.simplefilter("ignore", RuntimeWarning)
            handle.close()
    attributes = {key: _plainly(value) for key, value in vars(chosen)["_attributes"].items()}
    dtype = chosen.data.dtype.newbyteorder("=")
    return OpenedArray(
        array=chosen.data,
        labels=list(chosen.dimensions),
        chunks=_bands(chosen.shape),
        packing=None if raw else packing_of(attributes, dtype, where),
    )


def arrays_in(handle: Any) -> dict[str, Any]:
    """The arrays of numbers of at least two axes, by name."""
    h5py, arrays = require("h5py", "hdf5"), {}

    def visit(name: str, each: Any) -> None:
        # Others are tables, texts and coordinates.
        if isinstance(each, h5py.Dataset) and each.ndim > 1 and each.dtype.kind in "biuf":
            arrays[name] = each

    handle.visititems(visit)
    return arrays


def _chosen(arrays: Mapping[str, Any], inside: str, path: str, name: str) -> Any:
    where = f"{name} {path}"
    names = [(each, in_words(array.shape)) for each, array in arrays.items()]
    holds = f"it holds {listed(names) or 'no array of two axes or more'}"
    if inside:
        if (key := inside.strip("/")) in arrays:
            return arrays[key]
        raise UsageError(f"{where}: has no array {inside}; {holds}")
    if not arrays:
        raise UsageError(f"{where}: {holds}")
    if len(arrays) > 1:
        raise SeveralArrays(
            f"{where}: {holds}; name one, such as {name} {path}::{names[0][0]}",
            [(f"{path}::{each}", what) for each, what in names],
        )
    return next(iter(arrays.values()))


def _plain(dataset: Any, raw: bool, cache_bytes: int, where: str) -> OpenedArray:
    labels, scale = _labels(dataset), None
    units: tuple[str, ...] = ()
    sizes = dataset.attrs.get("element_size_um")  # z, y, x, whatever the axes are
    if sizes is not None and len(sizes) == 3 and labels is None and dataset.ndim == 3:
        scale, units = [physical_size(size) or 1.0 for size in sizes], ("micrometer",) * 3
    attributes = {key: _plainly(dataset.attrs[key]) for key in dataset.attrs}
    dtype = dataset.dtype.newbyteorder("=")
    packing = None if raw or dtype.kind == "b" else packing_of(attributes, dtype, where)
    return OpenedArray(
        array=dataset, labels=labels, scale=scale, units=units, packing=packing,
        codec=dataset.compression or "",
        chunks=dataset.chunks or _bands(dataset.shape),
        cache_bytes=cache_bytes if dataset.chunks else 0,
        takes_cache=dataset.chunks is not None,
    )  # fmt: skip


def _plainly(value: Any) -> Any:
    """An attribute as JSON would hold it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _bands(shape: Sequence[int]) -> tuple[int, ...]:
    """A region of an array in one piece: whole rows of its last axes, about a MiB at once."""
    region = [1] * len(shape)
    for axis in reversed(range(len(shape))):
        region[axis] = max(1, min(shape[axis], _CHUNK // int(np.prod(region))))
    return tuple(region)


def _labels(dataset: Any) -> list[str] | None:
    """What the file says of the axes of a dataset."""
    with suppress(ValueError, KeyError, TypeError):
        tags = json.loads(_plainly(dataset.attrs["axistags"]))["axes"]
        return [str(axis["key"]) for axis in tags]
    if _plainly(dataset.parent.attrs.get("neurodata_type", "")).endswith("Series"):
        return list(_NWB_AXES.get(dataset.ndim, "")) or None
    dims = [
        dim.label or (dim[0].name.rpartition("/")[2] if len(dim) else "") for dim in dataset.dims
    ]
    return dims if all(dims) else None


class _Channels:
    """The datasets of one level of an Imaris file, as t c z y x."""

    def __init__(self, datasets: Sequence[Sequence[Any]], sides: tuple[int, ...]) -> None:
        self.datasets, self.dtype = datasets, datasets[0][0].dtype
        self.shape = (len(datasets), len(datasets[0]), *sides)

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        t, c, *space = index
        return np.stack(
            [np.stack([each[tuple(space)] for each in row[c]]) for row in self.datasets[t]]
        )


def _imaris(handle: Any, level: int, cache_bytes: int, where: str) -> OpenedArray:
    """A level of an Imaris file. Its chunks are padded, so the sizes stand in its attributes."""
    levels = handle["DataSet"]
    if f"ResolutionLevel {level}" not in levels:
        raise UsageError(f"{where}: level {level} does not exist; {len(levels)} levels do")
    image = {key: _text(value) for key, value in handle["DataSetInfo/Image"].attrs.items()}
    times = levels[f"ResolutionLevel {level}"]
    rows = [
        [times[f"TimePoint {t}"][f"Channel {c}"] for c in range(len(times["TimePoint 0"]))]
        for t in range(len(times))
    ]
    first = rows[0][0]
    sides = tuple(int(_text(first.attrs[f"ImageSize{axis}"])) for axis in "ZYX")
    low, high = ([float(image[f"Ext{end}{i}"]) for i in (2, 1, 0)] for end in ("Min", "Max"))
    scale = [(b - a) / n for a, b, n in zip(low, high, sides, strict=True)]
    unit = unit_name(image.get("Unit", "um")) or "micrometer"
    names = [
        _text(handle[f"DataSetInfo/Channel {c}"].attrs.get("Name", "")) for c in range(len(rows[0]))
    ]
    chunks = (1, 1, *(min(a, b) for a, b in zip(first["Data"].chunks, sides, strict=True)))
    return OpenedArray(
        array=_Channels([[each["Data"] for each in row] for row in rows], sides),
        labels=list("tczyx"),
        chunks=chunks,
        cache_bytes=cache_bytes,
        takes_cache=True,
        scale=[1.0, 1.0, *scale],
        units=[None, None, unit, unit, unit],
        # Imaris says where a voxel begins, Penstock where its centre is.
        translation=[0.0, 0.0, *(a + size / 2 for a, size in zip(low, scale, strict=True))],
        omero=tuple(shown_channel(label) for label in names) if any(names) else (),
    )


def _text(value: Any) -> str:
    """A text, which Imaris keeps as an array of single letters."""
    if isinstance(value, np.ndarray):
        return b"".join(value.astype("S1").tolist()).decode("utf-8", "replace")
    return str(_plainly(value))
