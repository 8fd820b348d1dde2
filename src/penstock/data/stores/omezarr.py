"""Paths and URLs: an OME-Zarr group (0.1 to 0.5), or the Zarr, N5 or precomputed array found there.

Only metadata is handled here; every voxel goes through TensorStore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from ...base import UsageError, scrub
from ..box import Box
from .added import and_added, titles
from .file_formats import N5_DTYPES, check_dtype_of
from .frames import shown_channels
from .kvstore import (
    address,
    check_deletable,
    half_deleted,
    is_store,
    kvstore_of,
    local_path,
    open_kvstore,
    open_to_write,
    reader_of,
    ts,
)
from .ome_levels import transformations
from .protocols import AXES, DTYPES, Source, check_level, is_n5
from .tensorstore import TensorStoreSink, TensorStoreSource
from .tensorstore_open import (
    label_spec,
    open_tensorstore_source,
    prepare_sink,
)
from .zarr_groups import Group, image_at, label_place, zarr2_meant

SCRATCH_TILES = "tiles"
"""The folder in a scratch that has the tiles of a GeoTIFF."""
_SIDE = 128  # of a chunk in a volume: 4 MiB of uint16, the size that object stores serve well

_DRIVER_OF_MARKER = {
    "zarr.json": "zarr3",
    ".zarray": "zarr",
    "attributes.json": "n5",
    "info": "neuroglancer_precomputed",
}
_AXIS_TYPES = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}


def open_omezarr_source(
    path: str,
    *,
    level: int,
    cache_bytes: int,
    name: str,
    raw: bool = False,
    axes: str | None = None,
    series: int | None = None,
) -> TensorStoreSource:
    """Open one level of the OME-Zarr group at ``path``, or the array there.

    Axes, scale and position are the group's; a dataset's own are combined with its multiscale's.
    """
    path, group = image_at(path, name)
    spec: dict[str, Any] = {"driver": group.driver, "kvstore": kvstore_of(path)}
    image = None
    if "multiscales" in group.shown:
        image = group.level(level, series)
        spec["path"] = image.path
    else:
        spec["driver"] = _array_driver(group)
        if series:
            raise UsageError(f"{group.where}: --series {series} does not exist; it is one array")
        has_levels = spec["driver"] == "neuroglancer_precomputed"
        check_level(level, len(group.json("info")["scales"]) if has_levels else 1, group.where)
        spec |= {"scale_index": level} if has_levels else {}
    if spec["driver"] == "zarr":
        spec |= zarr2_meant(group, f"{image.path.strip('/')}/" if image else "")
    return open_tensorstore_source(
        spec, cache_bytes=cache_bytes, name=name, title=path, raw=raw, axes=axes,
        level=image,
    )  # fmt: skip


def open_omezarr_sink(
    path: str,
    *,
    domain: Box,
    dtype: np.dtype[Any],
    like: Source | None,
    chunks: Sequence[int] | None,
    shards: Sequence[int] | None,
    overwrite: bool,
    resume: bool,
    ome_version: str | None,
    at: Sequence[int] | None,
    name: str,
    scratch: bool = False,
) -> TensorStoreSink:
    """Prepare to write an OME-Zarr group, an N5 array where ``path`` is or is in a ``.n5``, or the
    array alone where ``ome_version`` is ``plain``.

    The array has the shape of ``domain``, the axes of ``like`` and every other axis that is longer
    than 1 or does not start at 0. If its first voxel (``at`` in ``like``) does not lie at the
    physical origin, the metadata of OME-Zarr gets a translation. A ``scratch`` is read once, and
    soon removed: it is encoded fast, not small.
    """
    where = f"{name} {scrub(path)}"
    root = open_to_write(path, where)
    exists = is_store(root, where)
    if exists and not (overwrite or resume):
        raise UsageError(f"{where}: exists; use --overwrite to replace it")
    arrays = half_deleted(root)
    if exists and not resume and arrays is None:
        arrays = _array_paths(root, where)
    if arrays is not None:
        check_deletable(root, where, [*arrays, SCRATCH_TILES] if scratch else arrays)
    stays = exists and arrays is None
    version = _version(path, root if stays else None, ome_version, like, shards, where)
    check_dtype_of("N5", N5_DTYPES if version == "n5" else DTYPES, dtype, where)
    layout = replace(_lay_out(domain, dtype, like, chunks, shards, at, where), scratch=scratch)
    spec = label_spec(
        {"kvstore": kvstore_of(path), **_ARRAY_SPECS[version](layout)},
        axes=layout.axes[::-1] if version == "n5" else layout.axes,
        origin=domain.start,
        where=where,
    )
    mode = {"open": resume and arrays is None, "delete_existing": arrays is not None}
    spec.update(open_mode=ts.OpenMode(create=True, **mode))
    sink = prepare_sink(spec, domain, dtype, where, path)
    sink = replace(sink, root=root, replaces=arrays)
    if version == "n5":
        return sink
    there = _packing_of(open_kvstore(spec.kvstore, where), where) if stays else layout.packing
    sink = replace(sink, packing=there)
    if version == "plain":
        return sink
    return replace(
        sink,
        local_path=local_path(root.spec()),
        address=address(root.spec()),
        documents=_documents(version, layout, path),
        channels=layout.omero,
    )


def _packing_of(array: Any, where: str) -> dict[str, float]:
    """What the numbers of an array of ours stand for, as its attributes say."""
    here = Group.of(array, where)
    document = here.json("zarr.json") or here.json(".zattrs")
    attributes = document.get("attributes", document)
    return {key: attributes[key] for key in ("scale_factor", "add_offset") if key in attributes}


def _array_paths(root: Any, where: str) -> list[str]:
    """The paths of the arrays that the group at ``root`` describes."""
    try:
        multiscales = Group.of(root, where).ome.get("multiscales", ())
        return [str(dataset["path"]) for image in multiscales for dataset in image["datasets"]]
    except (KeyError, TypeError, AttributeError, UsageError):
        return []


@dataclass(frozen=True)
class _Layout:
    axes: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    dtype: np.dtype[Any]
    scale: tuple[float, ...]
    """1 where it is not known."""
    translation: tuple[float, ...]
    """Physical position of the first voxel."""
    units: tuple[str | None, ...]
    omero: tuple[Mapping[str, Any], ...]
    """See `Framed.omero`."""
    packing: Mapping[str, Any]
    """The attributes that say what stored numbers stand for; see `cf_packing`."""
    scratch: bool = False


def _version(
    path: str,
    root: Any,
    asked: str | None,
    like: Source | None,
    shards: Sequence[int] | None,
    where: str,
) -> str:
    """``n5``, ``plain`` or a version of OME-Zarr: that of a store that stays, else the one that is
    asked for, else that of ``like``, else 0.5.
    """
    like_version = None if shards else getattr(like, "ome_version", None)
    version = asked or ("0.4" if like_version == "0.4" else "0.5")
    if is_n5(path):
        version = "n5"
    elif root is not None and root.read(".zgroup").result().state == "value":
        version = "0.4"
    elif root is not None:
        document = Group.of(root, where).json("zarr.json")
        version = "plain" if document.get("node_type") == "array" else "0.5"
    if version not in _ARRAY_SPECS:
        raise UsageError(f"{where}: OME-Zarr {version} cannot be written; 0.4 and 0.5 can")
    if shards and version not in ("0.5", "plain"):
        raise UsageError(f"{where}: shards {tuple(shards)} need OME-Zarr 0.5, this is {version}")
    return version


def _lay_out(
    domain: Box,
    dtype: np.dtype[Any],
    like: Source | None,
    chunks: Sequence[int] | None,
    shards: Sequence[int] | None,
    at: Sequence[int] | None,
    where: str,
) -> _Layout:
    at = at or domain.start
    five = _five(chunks, where) if chunks else _default_chunks(domain.shape, like)
    outer = _five(shards, where) if shards else None
    if outer and not chunks:
        five = tuple(min(_SIDE, n) if a > 1 else 1 for a, n in enumerate(outer))
        for axis, side in zip(AXES[2:], outer[2:], strict=True):
            if side > _SIDE and side % _SIDE:
                raise UsageError(
                    f"{where}: --shards {side} (axis {axis}) is not a multiple of {_SIDE}, the "
                    f"side of a chunk; give --shards {-(-side // _SIDE) * _SIDE} or --chunks too"
                )
    if outer and any(s % c for s, c in zip(outer, five, strict=True)):
        raise UsageError(f"{where}: shards {outer} are not multiples of chunks {five}")
    real = (like.axes if like else "") + "yx"
    kept = [i for i, axis in enumerate(AXES) if axis in real or domain.stop[i] > 1]
    scale = like.scale if like and like.scale else (1.0,) * len(AXES)
    omero = getattr(like, "omero", ())
    zero = like.translation if like else (0.0,) * len(AXES)
    return _Layout(
        axes="".join(AXES[i] for i in kept),
        shape=tuple(domain.shape[i] for i in kept),
        chunks=tuple(five[i] for i in kept),
        shards=tuple(outer[i] for i in kept) if outer else None,
        dtype=dtype,
        scale=tuple(scale[i] for i in kept),
        translation=tuple(zero[i] + at[i] * scale[i] for i in kept),
        units=tuple(like.units[i] if like else None for i in kept),
        omero=omero if len(omero) == domain.shape[1] else (),
        packing=getattr(like, "stands_for", {}),
    )


def _five(shape: Sequence[int], where: str) -> tuple[int, ...]:
    if len(shape) == 1:  # a cube
        shape = tuple(shape) * 3
    if len(shape) not in (2, 3, len(AXES)) or min(shape) < 1:
        raise UsageError(
            f"{where}: chunk shape {tuple(shape)}; give one number, y x, z y x or t c z y x, each "
            ">= 1"
        )
    return (*(1,) * (len(AXES) - len(shape)), *shape)


def _default_chunks(shape: tuple[int, ...], like: Source | None) -> tuple[int, ...]:
    """One t and c, and in space the chunks of ``like`` where these are of a sensible size."""
    space = shape[2:]
    if like and 2**18 <= math.prod(like.chunks[2:]) <= 2**24:
        sides = like.chunks[2:]
    else:
        sides = (_SIDE,) * 3 if space[0] > 1 else (1, 4 * _SIDE, 4 * _SIDE)
    return (1, 1, *(min(side, n) for side, n in zip(sides, space, strict=True)))


def _zarr2(layout: _Layout) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "path": "0",
        "metadata": {
            "shape": layout.shape,
            "chunks": layout.chunks,
            "dtype": layout.dtype.str,
            "fill_value": layout.dtype.type(0).item(),
            "dimension_separator": "/",
            "compressor": {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 1},
        },
    }


def _zarr3(layout: _Layout) -> dict[str, Any]:
    bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}}
    name, level = ("lz4", 1) if layout.scratch else ("zstd", 5)
    blosc = {"cname": name, "clevel": level, "shuffle": "shuffle"}
    codecs: list[Any] = [bytes_codec, {"name": "blosc", "configuration": blosc}]
    if layout.shards:
        sharding = {
            "chunk_shape": layout.chunks,
            "codecs": codecs,
            "index_codecs": [bytes_codec, {"name": "crc32c"}],
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    grid = {"chunk_shape": layout.shards or layout.chunks}
    return {
        "driver": "zarr3",
        "path": "0",
        "metadata": {
            "shape": layout.shape,
            "data_type": layout.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": grid},
            "fill_value": layout.dtype.type(0).item(),
            "codecs": codecs,
            "dimension_names": list(layout.axes),
            "attributes": {**layout.packing},
        },
    }


def _n5(layout: _Layout) -> dict[str, Any]:
    return {
        "driver": "n5",
        "metadata": {  # the fastest axis first
            "n5": "2.0.0",  # zarr-python 2 opens no array that is its own container without it
            "dimensions": layout.shape[::-1],
            "blockSize": layout.chunks[::-1],
            "axes": list(layout.axes[::-1]),
            "resolution": layout.scale[::-1],
            "units": [unit or "" for unit in layout.units[::-1]],
            # As N5-viewer has it.
            "pixelResolution": {
                "unit": layout.units[-1] or "pixel",
                "dimensions": layout.scale[::-1],
            },
            "dataType": layout.dtype.name,
            "compression": {"type": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 1},
        },
    }


_ARRAY_SPECS = {
    "0.4": _zarr2,
    "0.5": _zarr3,
    "plain": lambda layout: {**_zarr3(layout), "path": ""},
    "n5": _n5,
}


def _documents(version: str, layout: _Layout, path: str) -> dict[str, Any]:
    """The metadata files of the group, by key. The one that makes it a store comes first."""
    multiscale = _multiscale(layout, path)
    shown: dict[str, Any] = {}
    if any(layout.omero):
        shown["omero"] = shown_channels(layout.omero, layout.dtype)
    if label_place(path) is not None:
        source = {"source": {"image": "../../"}}
        shown["image-label"] = {"version": version, **source} if version == "0.4" else source
    if version == "0.4":
        attributes = {"multiscales": [{"version": "0.4", **multiscale}], **shown}
        documents = {".zgroup": {"zarr_format": 2}, ".zattrs": attributes}
        return documents | ({"0/.zattrs": {**layout.packing}} if layout.packing else {})
    ome = {"version": "0.5", "multiscales": [multiscale], **shown}
    return {"zarr.json": {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}}


def _multiscale(layout: _Layout, path: str) -> dict[str, Any]:
    axes = [
        {"name": axis, "type": _AXIS_TYPES[axis], **({"unit": unit} if unit else {})}
        for axis, unit in zip(layout.axes, layout.units, strict=True)
    ]
    moves = transformations(layout.scale, layout.translation)
    return {
        "name": PurePosixPath(path).stem.removesuffix(".ome"),
        "axes": axes,
        "datasets": [{"path": "0", "coordinateTransformations": moves}],
    }


def _array_driver(group: Group) -> str:
    """TensorStore's driver for the array at a place."""
    read = reader_of(group.root, group.where, strict=True)  # else a refusal would be no array
    for marker, driver in _DRIVER_OF_MARKER.items():
        if read(marker) is not None:
            return driver
    folder = local_path(group.root.spec())
    if folder is not None and not folder.exists():
        raise UsageError(f"{group.where}: no such file or folder")
    if folder is not None and folder.is_file():
        raise UsageError(
            f"{group.where}: its ending is of no kind that is read: Zarr, N5, {titles()}"
            f"{and_added()}"
        )
    planes = "; planes are read from this machine, so copy them here" * ("://" in group.where)
    raise UsageError(
        f"{group.where}: neither an OME-Zarr image nor a Zarr, N5 or precomputed array"
        f"{and_added()}{planes}"
    )
