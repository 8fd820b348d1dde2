"""Makes the file of an output from its scratch Zarr, once all blocks are written: OME-TIFF by
tifffile, NIfTI with a header by nibabel, GeoTIFF of its tiles.

Planes are read some rows at a time, in the order in which files hold them and in bounded memory.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import numpy as np
from numpy.typing import NDArray

from ...base import in_order, read_json, require, system_errors, usable_cores
from ..box import Box, Grid
from ..levels import Rule
from .file_formats import LENGTHS, OME_UNITS, TIMES, ending_of
from .file_sink import FileSink, rows_at_once, scratch_of
from .frames import to_tczyx
from .protocols import AXES, Source
from .pyramid import add_levels, level_of
from .raster import Georeference
from .raster_tiles import CLASSIC_BYTES, DEFLATE_LEVEL, TILE, write_cog
from .tensorstore import TensorStoreSource
from .zarr_groups import Group

_PLANAR = (3, 4)
"""The axes along which levels of an OME-TIFF are smaller: each plane has its own."""
_ENCODED_AT_ONCE = 2**26
"""Bytes of tiles that tifffile encodes at a time."""
_LONGEST = 2**15 - 1
"""The most voxels along an axis in NIfTI-1; NIfTI-2 takes more."""


def make_file(
    sink: FileSink, rule: Rule, count: int | None, progress: Callable[[int], None]
) -> bool:
    """Make a file of its scratch, and remove the scratch.

    Args:
        sink: The output, in which all blocks are written.
        rule: How voxels become one of a coarser level.
        count: The number of levels in all; None for as many as are sensible.
        progress: Told the number of voxels that are read or made; it may raise to end early.

    Returns:
        False if an earlier start has made it.

    Raises:
        UsageError: The file cannot be written.
    """
    if sink.made:
        sink.clear()  # that start may have been killed before it did
        return False
    scratch = scratch_of(sink.path)
    work = scratch.with_name(f"made{ending_of(sink.path.name)}")
    with system_errors(f"--out-spec {sink.name}"):
        for rest in scratch.parent.glob("*.tif*"):  # of a start that was killed
            rest.unlink()
        _write(sink, work, rule, count, progress)
        with work.open("rb+") as written:
            os.fsync(written.fileno())
        work.replace(sink.path)
        # At once, so that no later start takes a half of the scratch for all of it.
        scratch.rename(scratch.with_name("gone.zarr"))
        sink.clear()
    sink.made = True
    return True


def _write(
    sink: FileSink, work: Path, rule: Rule, count: int | None, progress: Callable[[int], None]
) -> None:
    scratch = str(scratch_of(sink.path))
    image = level_of(scratch, 0, "")
    # What the scratch says of the file besides its frame.
    says = read_json(Path(scratch, "zarr.json"))["attributes"]["penstock"]
    if sink.tiles is not None:
        count = sink.tiles.levels(count)
        for level in range(1, count):
            sink.tiles.make_overview(level, rule, usable_cores(), progress)
        names = [shown.get("label", "") for shown in image.omero]
        write_cog(work, sink.tiles, Georeference(**says["place"]), names, count, progress)
    elif sink.kind == "nifti":
        write_nifti(work, image, says["affine"], progress)
    else:
        add_levels(
            scratch, rule=rule, count=count, again=False, threads=usable_cores(),
            progress=progress, axes=_PLANAR,
        )  # fmt: skip
        numbers = range(len(Group.at(scratch).image()["datasets"]))
        write_ome_tiff(work, [level_of(scratch, number, "") for number in numbers], progress)


def rows_of(
    source: Source, slowest: str, progress: Callable[[int], None] = lambda _: None
) -> Iterator[NDArray[Any]]:
    """The planes of an array, some rows at a time.

    Args:
        source: The array.
        slowest: The order of its other axes, such as ``tcz``: the first changes last.
        progress: Told the number of voxels of each piece.

    Yields:
        The values of a piece along y and x.
    """
    order = slowest + "yx"
    shape = [source.domain.shape[AXES.index(axis)] for axis in order]
    step = (1, 1, 1, rows_at_once(source.chunks[3]), shape[4])

    def read(piece: Box) -> NDArray[Any]:
        ends = (to_tczyx(end, order, 0) for end in (piece.start, piece.stop))
        return source.read(Box(*ends))[0, 0, 0]

    for rows in in_order(read, Grid(Box.of((0,) * 5, shape), step), 1, ahead=1):
        yield rows
        progress(rows.size)


def write_ome_tiff(path: Path, levels: Sequence[TensorStoreSource], progress: Any) -> None:
    """Write an OME-TIFF, with the levels below the first as SubIFDs of its planes.

    Args:
        path: The file, which is made.
        levels: The image, and smaller copies of all of its planes.
        progress: Told the number of voxels that are written.
    """
    tifffile = require("tifffile", "infer")
    first, *below = levels
    options = {
        "dtype": first.dtype, "photometric": "minisblack", "tile": (TILE, TILE),
        "compression": "zlib", "compressionargs": {"level": DEFLATE_LEVEL}, "predictor": True,
        "maxworkers": usable_cores(), "buffersize": _ENCODED_AT_ONCE,
    }  # fmt: skip
    size = sum(level.domain.size for level in levels) * first.dtype.itemsize
    with tifffile.TiffWriter(path, ome=True, bigtiff=size > CLASSIC_BYTES) as file:
        for level in levels:
            of_first = {"subifds": len(below), "metadata": _ome_metadata(first)}
            more = of_first if level is first else {"subfiletype": 1}
            shape = [level.domain.shape[AXES.index(axis)] for axis in first.axes]
            file.write(_tiles(level, progress), shape=shape, **more, **options)


def _tiles(level: TensorStoreSource, progress: Any) -> Iterator[Any]:
    for rows in rows_of(level, "tcz", progress):
        for row in range(0, rows.shape[0], TILE):
            for column in range(0, rows.shape[1], TILE):
                # With its samples: of a tile one voxel wide, tifffile takes the rows for columns.
                yield np.ascontiguousarray(rows[row : row + TILE, column : column + TILE, None])


def _ome_metadata(image: TensorStoreSource) -> dict[str, Any]:
    """What OME's XML says of an image, in the words of tifffile."""
    # tifffile would take a UUID at random, and the same image would be other bytes.
    uuid = uuid5(NAMESPACE_OID, f"{image.axes} {image.domain.shape} {image.dtype}")
    says: dict[str, Any] = {"axes": image.axes.upper(), "UUID": str(uuid)}
    for axis, size, unit in zip(AXES, image.scale or (), image.units, strict=bool(image.scale)):
        key = "TimeIncrement" if axis == "t" else f"PhysicalSize{axis.upper()}"
        if axis != "c" and axis in image.axes and unit is not None:
            says |= {key: abs(size), f"{key}Unit": OME_UNITS[unit]}
    channels = {}
    if any("label" in each for each in image.omero):
        channels["Name"] = [each.get("label", "") for each in image.omero]
    if any("color" in each for each in image.omero):
        channels["Color"] = [_color(each.get("color", "FFFFFF")) for each in image.omero]
    return {**says, **({"Channel": channels} if channels else {})}


def _color(red_green_blue: str) -> int:
    """A colour as OME has it: red, green, blue and alpha in one signed integer."""
    value = (int(red_green_blue, 16) << 8) | 0xFF
    return value - 2**32 if value >= 2**31 else value


def write_nifti(
    path: Path, image: TensorStoreSource, affine: Sequence[Sequence[float]] | None, progress: Any
) -> None:
    """Write a NIfTI file, in one stream of gzip where its name ends in ``.gz``.

    Args:
        path: The file, which is made.
        image: The array, with axes x y z t c in the file.
        affine: From the voxel x y z to the world, in the units of the array; None: by its scale
            and position.
        progress: Told the number of voxels that are written.
    """
    header = _header(image, affine)
    with path.open("wb") as file:
        # Without a name and a time the same values are the same bytes.
        packed = gzip.GzipFile("", "wb", 1, file, mtime=0) if path.suffix == ".gz" else file
        header.write_to(packed)
        packed.write(bytes(header.single_vox_offset - packed.tell()))
        for rows in rows_of(image, "ctz", progress):
            packed.write(np.ascontiguousarray(rows).data)
        packed.close()


def _header(image: TensorStoreSource, affine: Sequence[Sequence[float]] | None) -> Any:
    nibabel = require("nibabel", "nifti")
    t, c, z, y, x = image.domain.shape
    shape = [x, y, z] + ([t, c] if c > 1 else [t] if t > 1 else [])
    scale = image.scale or (1.0,) * 5
    if affine is None:
        matrix = np.diag([*scale[:1:-1], 1.0])
        matrix[:3, 3] = image.translation[:1:-1]
    else:
        matrix = np.array(affine, np.float64)
    space, lengths = _in_one_unit([LENGTHS[unit] if unit else None for unit in image.units[:1:-1]])
    matrix[:3] *= np.array(lengths)[:, None]
    kind = nibabel.Nifti2Image if max(shape) > _LONGEST else nibabel.Nifti1Image
    header = kind(np.broadcast_to(image.dtype.type(0), shape), matrix).header
    seconds = TIMES[image.units[0] or "second"]
    if len(shape) > 3:
        header.set_zooms((*header.get_zooms()[:3], scale[0] * seconds, *[1.0] * (len(shape) - 4)))
    header.set_xyzt_units(space, "sec" if image.units[0] else "unknown")
    header["vox_offset"] = header.single_vox_offset
    return header


def _in_one_unit(metres: Sequence[float | None]) -> tuple[str, list[float]]:
    """NIfTI's code for the unit of all axes, and what sizes are multiplied by to be in it."""
    said = {size for size in metres if size is not None}
    if not said:
        return "unknown", [1.0] * len(metres)
    code, unit = {1.0: ("meter", 1.0), 1e-3: ("mm", 1e-3)}.get(max(said), ("micron", 1e-6))
    if len(said) > 1:
        code, unit = "micron", 1e-6
    return code, [1.0 if size is None else size / unit for size in metres]
