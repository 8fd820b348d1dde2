"""HDF5 files by h5py: plain datasets, NetCDF 4, NWB and Imaris.

    file.h5::group/name     the array of that name; where a file holds one array only, it is that

A dataset may say what its axes are: by dimension scales (NetCDF), by labels of its dimensions, by
``axistags`` (vigra, ilastik), or by being NWB's or Imaris'.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, parsed_json, require
from .cf_packing import packing_of
from .frames import shown_channel, sizes_of, spaced_sizes, unit_name
from .ome_levels import array_below
from .protocols import SeveralArrays, check_level, in_words, listed
from .sliced import Asked, OpenedArray, Readable

_NWB_AXES = {3: "txy", 4: "txyz"}
_COLOUR_AXES = {"INTERLACE_PIXEL": "yxc", "INTERLACE_LINE": "ycx", "INTERLACE_PLANE": "cyx"}
"""Axes of the colour images of HDF5's own convention, by its attribute `INTERLACE_MODE`."""
_OF_BIGDATAVIEWER = re.compile(r"/t\d+/s\d+/\d+/cells")
"""Names of its arrays, which keep numbers without a sign as such with one."""
_NO_COORDINATES = "This is a netCDF dimension but not a netCDF variable"
_NEVER_WRITTEN = 2.0**122 * 1.875
"""The value of floats that NetCDF never wrote, unless it is told another one."""
_CHUNK = 2**20
"""About the voxels of a region that is read at once of an array that is stored in one piece."""


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open an array of an HDF5 file, by its name or as the only one."""
    with asked.file.open("rb") as stream:
        start = stream.read(4)
    if start == b"CDF\5":
        raise UsageError(
            f"{asked.where}: is of the kind CDF-5, which is not read; nccopy -k netCDF-4 IN OUT "
            "makes a file that is"
        )
    is_classic = start[:3] == b"CDF"
    handle: Any = {} if is_classic else _opened(asked, cache_bytes)
    if "DataSetInfo" in handle and "DataSet" in handle and not asked.inside:
        # Each of its datasets has a cache of its own.
        share = cache_bytes // max(1, sum(map(len, handle["DataSet/ResolutionLevel 0"].values())))
        return _imaris(_opened(asked, share), asked, cache_bytes)
    check_level(asked.level, 1, asked.where)
    if is_classic:
        return _classic(asked)
    return _plain(_chosen(arrays_in(handle), asked, handle), asked, cache_bytes)


def _opened(asked: Asked, cache_bytes: int) -> Any:
    # Slots as h5py advises: a prime of about a hundred times the chunks that fit.
    slots = {"rdcc_nbytes": cache_bytes, "rdcc_nslots": 100_003}
    return require("h5py", "hdf5").File(asked.file, "r", **slots)


def _classic(asked: Asked) -> OpenedArray:
    """An array of a file of classic NetCDF, which is mapped."""
    handle = require("scipy.io", "scenes").netcdf_file(asked.file, "r", mmap=True)
    arrays = {key: each for key, each in handle.variables.items() if len(each.dimensions) > 1}
    try:
        chosen = _chosen(arrays, asked)
        coordinates = {name: handle.variables.get(name) for name in chosen.dimensions}
    finally:
        with warnings.catch_warnings():  # the file stays mapped as long as its array is there
            warnings.simplefilter("ignore", RuntimeWarning)
            handle.close()
    attributes = _plain_attributes(vars(chosen)["_attributes"])
    dtype = chosen.data.dtype.newbyteorder("=")
    if dtype.kind == "f":
        attributes = {"_FillValue": _NEVER_WRITTEN, **attributes}
    sizes, lost = spaced_sizes(
        (name, each.data, _plain_attributes(vars(each)["_attributes"]))
        for name, each in coordinates.items()
        if each is not None
    )
    return OpenedArray(
        array=chosen.data,
        labels=list(chosen.dimensions),
        sizes=sizes,
        notes=lost,
        chunks=_bands(chosen.shape),
        packing=None if asked.raw else packing_of(attributes, dtype, asked.where),
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


def _others_in(handle: Any) -> list[tuple[str, str]]:
    """What else of two axes or more an open file has, and links to other files, by name."""
    h5py, others = require("h5py", "hdf5"), list[tuple[str, str]]()

    def visit(name: str, link: Any) -> None:
        if isinstance(link, h5py.ExternalLink):
            others.append((name, f"a link into {link.filename}"))
            return
        each = handle.get(name)
        if isinstance(each, h5py.Dataset) and each.ndim > 1 and each.dtype.kind not in "biuf":
            kind = "records" if each.dtype.names else each.dtype.name
            others.append((name, f"of {'texts' if each.dtype.kind in 'OSU' else kind}"))

    handle.visititems_links(visit)
    return others


def _chosen(arrays: Mapping[str, Any], asked: Asked, handle: Any = None) -> Any:
    """The array that is asked for by its name, or the only one. ``handle`` is the open file, of
    which a refusal also names what is no such array."""
    where, path = asked.where, asked.path
    names = [(each, in_words(array.shape)) for each, array in arrays.items()]
    holds = f"it holds {listed(names) or 'no array of numbers of two axes or more'}"
    if handle is not None and len(arrays) == 0 and (others := _others_in(handle)):
        holds += f", and what is not read: {listed(others)}"
    if asked.inside:
        if (key := asked.inside.strip("/")) in arrays:
            return arrays[key]
        raise UsageError(f"{where}: has no array {asked.inside}; {holds}")
    if not arrays:
        raise UsageError(f"{where}: {holds}")
    if len(arrays) > 1:
        raise SeveralArrays(
            f"{where}: {holds}; name one, such as {where}::{names[0][0]}",
            [(f"{path}::{each}", what) for each, what in names],
        )
    return next(iter(arrays.values()))


def _check_within(dataset: Any, where: str) -> None:
    """Refuse an array whose numbers are in files that do not lie below the folder of its own, or
    that are gone: HDF5 gives the fill value for these."""
    files = [name for name, *_ in dataset.external or ()]
    files += [each.file_name for each in dataset.virtual_sources()] if dataset.is_virtual else []
    for file in files:
        array_below(file, where)
        below = (Path(dataset.file.filename).with_name(file), Path(file))
        if file != "." and "%" not in file and not any(each.exists() for each in below):
            raise UsageError(f"{where}: numbers of it are in {file}, which is not there")


def _plain(dataset: Any, asked: Asked, cache_bytes: int) -> OpenedArray:
    _check_within(dataset, asked.where)
    labels = _labels(dataset)
    scales = [(dim[0], _plain_attributes(dim[0].attrs)) for dim in dataset.dims if len(dim)]
    sizes, lost = spaced_sizes(
        (each.name.rpartition("/")[2], each, says)
        for each, says in scales
        if not str(says.get("NAME")).startswith(_NO_COORDINATES)
    )
    micrometers = dataset.attrs.get("element_size_um")  # z, y, x, whatever the axes are
    if (
        micrometers is not None
        and len(micrometers) == dataset.ndim == 3
        and labels in (None, ["z", "y", "x"])
    ):
        each = zip("zyx", micrometers, strict=True)
        sizes = sizes_of((axis, size, "micrometer", 0.0) for axis, size in each)
    attributes = _plain_attributes(dataset.attrs)
    dtype = dataset.dtype.newbyteorder("=")
    if dtype.kind == "f" and float(dataset.fillvalue) == _NEVER_WRITTEN:
        attributes = {"_FillValue": _NEVER_WRITTEN, **attributes}
    if _OF_BIGDATAVIEWER.fullmatch(dataset.name) and dtype == np.int16:
        attributes |= {"_Unsigned": "true"}
    is_plain = asked.raw or dtype.kind == "b"
    return OpenedArray(
        # Opened again: h5py keeps the properties that were asked for, and HDF5 crashes at the end
        # of the process if those of a virtual dataset are open.
        array=dataset.file[dataset.name],
        labels=labels,
        sizes=sizes,
        packing=None if is_plain else packing_of(attributes, dtype, asked.where),
        notes=lost,
        codec=dataset.compression or "",
        chunks=dataset.chunks or _bands(dataset.shape),
        cache_bytes=cache_bytes if dataset.chunks else 0,
        again=partial(open_array, asked) if dataset.chunks else None,
    )


def _plain_attributes(said: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as JSON would hold them."""
    return {key: _plainly(value) for key, value in said.items()}


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
        tags = parsed_json(_plainly(dataset.attrs["axistags"]))["axes"]
        return [str(axis["key"]) for axis in tags]
    if _plainly(dataset.parent.attrs.get("neurodata_type", "")).endswith("Series"):
        return list(_NWB_AXES.get(dataset.ndim, "")) or None
    if _plainly(dataset.attrs.get("CLASS", "")) == "IMAGE" and dataset.ndim == 3:
        return list(_COLOUR_AXES.get(_plainly(dataset.attrs.get("INTERLACE_MODE", "")), "")) or None
    dims = [
        dim.label or (dim[0].name.rpartition("/")[2] if len(dim) else "") for dim in dataset.dims
    ]
    return dims if all(dims) else None


class _Channels(Readable):
    """The datasets of one level of an Imaris file, as t c z y x."""

    def __init__(self, datasets: Sequence[Sequence[Any]], sides: tuple[int, ...]) -> None:
        self._datasets, self.dtype = datasets, datasets[0][0].dtype
        self.shape, self.rank = (len(datasets), len(datasets[0]), *sides), 2

    def read_frame(
        self, place: tuple[int, ...], inside: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        t, c = place
        out[...] = self._datasets[t][c][inside]


def _imaris(handle: Any, asked: Asked, cache_bytes: int) -> OpenedArray:
    """A level of an Imaris file. Its chunks are padded, so the sizes stand in its attributes."""
    levels = handle["DataSet"]
    check_level(asked.level, len(levels), asked.where)
    image = {key: _text(value) for key, value in handle["DataSetInfo/Image"].attrs.items()}
    times = levels[f"ResolutionLevel {asked.level}"]
    rows = [
        [times[f"TimePoint {t}"][f"Channel {c}"] for c in range(len(times["TimePoint 0"]))]
        for t in range(len(times))
    ]
    for each in (channel["Data"] for row in rows for channel in row):
        _check_within(each, asked.where)
    first = rows[0][0]
    sides = tuple(int(_text(first.attrs[f"ImageSize{axis}"])) for axis in "ZYX")
    low, high = ([float(image[f"Ext{end}{i}"]) for i in (2, 1, 0)] for end in ("Min", "Max"))
    scale = [(b - a) / n for a, b, n in zip(low, high, sides, strict=True)]
    unit = unit_name(image.get("Unit", "um")) or "micrometer"
    about = [handle.get(f"DataSetInfo/Channel {c}", first).attrs for c in range(len(rows[0]))]
    return OpenedArray(
        array=_Channels([[each["Data"] for each in row] for row in rows], sides),
        labels="tczyx",
        chunks=(1, 1, *map(min, first["Data"].chunks or _bands(sides), sides)),
        cache_bytes=cache_bytes,
        again=partial(open_array, asked),
        # Imaris says where a voxel begins, Penstock where its centre is.
        sizes=sizes_of(
            (axis, size, unit, begin + size / 2)
            for axis, size, begin in zip("zyx", scale, low, strict=True)
        ),
        omero=[
            shown_channel(_text(says.get("Name", "")), _colour(_text(says.get("Color", ""))))
            for says in about
        ],
    )


def _colour(text: str) -> str:
    """The colour of three numbers from 0 to 1; another text where they are none."""
    with suppress(ValueError):
        return bytes(round(255 * float(part)) for part in text.split()).hex()
    return text


def _text(value: Any) -> str:
    """A text, which Imaris keeps as an array of single letters."""
    if isinstance(value, np.ndarray):
        return b"".join(value.astype("S1").tolist()).decode("utf-8", "replace")
    return str(_plainly(value))
