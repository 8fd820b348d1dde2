"""TIFF files, OME-TIFF among them: read by tile or strip, decoded by the thread that asks. What
their metadata say of axes, sizes, channels and values is read in `tiff_frame`.

tifffile reads a part of a damaged file and only logs the damage. Here that is an error: a
truncated volume must not pass for a smaller one.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe, format_bytes, require
from ..box import Box
from ..grid import Grid, flatten, indices
from .cf_packing import Packing
from .frames import Framed, canonical, to_five, to_tczyx
from .in_memory import MemorySource
from .protocols import AXES, check_dtype, file_stamp, local_file, source_fingerprint
from .sliced import decoded_once
from .tiff_frame import (
    axes_of,
    check_files,
    chosen_series,
    frame_of,
    left_out,
    packing_in,
    pixels_of,
)

tifffile = require("tifffile", "infer")

# Warnings of tifffile about files whose voxels can all be read.
_HARMLESS = re.compile(
    r"ParseError|GDAL_NODATA|_metadata>|Datetime|coercing|read_uic1tag|not stitched"
)
_LARGE_SEGMENT = 2**28
"""The size above which a plan says what a segment costs."""


@dataclass(eq=False, repr=False)
class TiffSource(Framed):
    """Reads one series of a TIFF file; made by `open_ometiff_source`.

    tifffile sees a page in five dimensions: planar samples, z, y, x, interleaved samples. A
    segment, which is a tile or a strip, is one cell of a grid over a page. `with_cache` keeps
    decoded segments, so that neighbouring blocks decode a strip they share only once.
    """

    name: str
    file: Any
    series: Any
    stored_axes: str
    stored_dtype: np.dtype[Any]
    address: str
    fingerprint: str
    packing: Packing | None
    cache_bytes: int

    def __post_init__(self) -> None:
        page, axes = self.series.keyframe, self.stored_axes
        self._grid = Grid(Box((0,) * 5, page.shaped), _segment_shape(page))
        self._cells = self._grid.cells  # which costs as much as a small segment
        sample_axis = 0 if page.shaped[0] > 1 else 4
        self._page_axes = [{"Z": 1, "Y": 2, "X": 3}.get(a, sample_axis) for a in page.axes]
        shape = self.series.shape
        self._lead = Box((0,) * (len(axes) - len(page.axes)), shape[: -len(page.axes)])
        self.axes, self.dtype = canonical(axes), self.stored_dtype
        self.packed_itemsize = 0
        if self.packing is not None:
            self.dtype, self.packed_itemsize = self.packing.dtype, self.stored_dtype.itemsize
        self.domain = Box((0,) * 5, to_tczyx(shape, axes, 1))
        self._left_out = left_out(page, self.stored_dtype)
        self.segment_bytes = math.prod(self._grid.step) * self.stored_dtype.itemsize
        self.decode = partial(_decode, self.file, self.series)
        self._decoded = decoded_once(self.decode, self.cache_bytes // self.segment_bytes)
        steps = (*(1 for _ in self._lead.start), *(self._grid.step[a] for a in self._page_axes))
        self.chunks = to_tczyx(steps, axes, 1)
        self.grid_origin: tuple[int, ...] = (0,) * 5

    def read(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        assert box in self.domain, f"{box} is not in {self.domain}"
        if out is None:
            out = np.empty(box.shape, self.dtype)
        if self.packing is None:
            return self._read_stored(box, out)
        self.packing.decode(self._read_stored(box, np.empty(box.shape, self.stored_dtype)), out)
        return out

    def _read_stored(self, box: Box, out: NDArray[Any]) -> NDArray[Any]:
        """Read a box as it is stored."""
        places, stored = self._stored(box)
        others = tuple(i for i in range(len(AXES)) if i not in places)  # one voxel each
        array = out.transpose(*others, *places).squeeze(tuple(range(len(others))))
        num_lead = len(self._lead.start)
        region = self._page_region(stored[num_lead:])
        pages = stored[:num_lead]
        # Views, not copies: a page gets five axes, of length 1 where it lacks one.
        five = tuple(slice(None) if axis in self._page_axes else None for axis in range(5))
        for index in indices(pages):
            page = array[tuple(i - start for i, start in zip(index, pages.start, strict=True))]
            self._read_page(flatten(index, self._lead), region, page[five])
        return out

    @property
    def tells_absent(self) -> bool:
        return True

    def absent(self, cells: Sequence[Box]) -> list[Box]:
        return [cell for cell in cells if not any(self._byte_counts(cell))]

    def _byte_counts(self, box: Box) -> Iterator[int]:
        """The stored size of each segment that a box touches."""
        stored, num_lead = self._stored(box)[1], len(self._lead.start)
        segments = self._grid.touching(self._page_region(stored[num_lead:]))
        for index in indices(stored[:num_lead]):
            with self.file.filehandle.lock:
                counts = self.series[flatten(index, self._lead)].databytecounts
            for cell in indices(segments):
                yield counts[flatten(cell, self._cells)]

    def _stored(self, box: Box) -> tuple[list[int], Box]:
        """The places of the stored axes among t c z y x, and a box along the stored axes."""
        places = [AXES.index(axis) for axis in self.stored_axes]
        return places, Box(tuple(box.start[i] for i in places), tuple(box.stop[i] for i in places))

    def with_cache(self, num_bytes: int) -> TiffSource:
        return replace(self, cache_bytes=num_bytes)

    def decoding(self, decoded: Callable[[int, int], NDArray[Any] | None]) -> TiffSource:
        """This source, with segments from a cache that it shares with others."""
        sharing = replace(self, cache_bytes=0)
        sharing._decoded = decoded
        return sharing

    def _page_region(self, box: Box) -> Box:
        start, stop = [0] * 5, [1] * 5
        for place, axis in enumerate(self._page_axes):
            start[axis], stop[axis] = box.start[place], box.stop[place]
        return Box(tuple(start), tuple(stop))

    def _read_page(self, number: int, region: Box, out: NDArray[Any]) -> None:
        # Axis by axis, not as boxes: a strip may be of one row, which decodes in as little time.
        along = [
            [(i, slice(max(i * step, low) - low, min((i + 1) * step, high) - low),
              slice(max(low - i * step, 0), min(high - i * step, step)))
             for i in range(low // step, -(-high // step))]
            for low, high, step in zip(region.start, region.stop, self._grid.step, strict=True)
        ]  # fmt: skip
        for index, place, part in (zip(*each, strict=True) for each in product(*along)):
            segment = self._segment(number, flatten(index, self._cells))
            out[place] = self._left_out if segment is None else segment[part[1:]]

    def _segment(self, page_number: int, number: int) -> NDArray[Any] | None:
        try:
            return self._decoded(page_number, number)
        except (ValueError, RuntimeError, OSError, IndexError) as error:
            place = f"{self.name}: page {page_number}, segment {number}"
            raise OSError(f"{place}: {describe(error)}") from error


def _decode(file: Any, series: Any, page_number: int, number: int) -> NDArray[Any] | None:
    with file.filehandle.lock:  # one file position; pages are parsed on first use
        page = series[page_number]
        if page is None:
            raise ValueError("the page is missing from the file")
        if not page.databytecounts[number]:
            return None
        handle = page.parent.filehandle
        if handle.closed:  # a further file of a set
            handle.open()
            weakref.finalize(file, handle.close)
        handle.seek(page.dataoffsets[number])
        encoded = handle.read(page.databytecounts[number])
    if len(encoded) < page.databytecounts[number]:
        raise ValueError(
            f"the file ends after {len(encoded)} bytes of {page.databytecounts[number]}"
        )
    options = {}
    if page.jpegtables is not None:
        options = {"jpegtables": page.jpegtables, "jpegheader": page.keyframe.jpegheader}
    segment: NDArray[Any] | None = page.keyframe.decode(encoded, number, **options)[0]
    if segment is None:
        raise ValueError("the segment cannot be decoded")
    return segment


def open_ometiff_source(
    path: str, *, level: int, cache_bytes: int, name: str, raw: bool = False,
    axes: str | None = None, series: int | None = None, inside: str = "",
) -> TiffSource | MemorySource:  # fmt: skip
    """Open a series of a TIFF file, or a ``level`` of its pyramid.

    Samples that are stored in one piece, and are the values, are mapped into memory; else segments
    are read and decoded.
    """
    where, file_path = local_file(path, name)
    if inside:
        raise UsageError(f"{where}: a TIFF file holds series, not names; --series N takes one")
    try:
        with _no_complaints(where):
            file = tifffile.TiffFile(file_path)
            file.filehandle.set_lock(True)
            # The last of the sources that share the file closes it.
            weakref.finalize(file, file.filehandle.close)
            check_files(file, where)
            number = chosen_series(file, series, where)
            levels = file.series[number].levels
            num_pages = len(file.pages)
    except UsageError:
        raise
    except (ValueError, RuntimeError, IndexError, OSError) as error:
        raise UsageError(f"{where}: not a readable TIFF file: {describe(error)}") from error
    if not 0 <= level < len(levels):
        raise UsageError(f"{where}: level {level} does not exist; {len(levels)} levels do")
    _check_size(file, number, num_pages, where)
    chosen = levels[level]
    letters, notes = axes_of(chosen, axes, where)
    address = str(file_path.resolve())
    stamp = source_fingerprint(address, *file_stamp(file_path), level, number, letters)
    packing = None if raw else packing_in(file, file.series[number], where)
    frame = frame_of(file, number, level, letters)
    frame["notes"] = (*notes, *frame["notes"], *([packing.note] if packing else ()))
    if chosen.dataoffset is None or packing is not None:
        _check_ends(chosen, where)
        stored = check_dtype(chosen.dtype, where)
        frame["notes"] += _cost_of(math.prod(_segment_shape(chosen.keyframe)) * stored.itemsize)
        return TiffSource(
            path, file, chosen, letters, stored, address, stamp, packing, cache_bytes, **frame
        )
    dtype = chosen.dtype.newbyteorder(file.byteorder)
    needed = chosen.dataoffset + math.prod(chosen.shape) * dtype.itemsize
    if (size := file_path.stat().st_size) < needed:
        raise UsageError(f"{where}: is shorter than its header says: {size} bytes of {needed}")
    mapped: Any = np.memmap(file_path, dtype, "r", chosen.dataoffset, chosen.shape)
    return MemorySource(
        name=path,
        array=to_five(mapped, letters),
        dtype=check_dtype(dtype, where),
        axes=canonical(letters),
        address=address,
        fingerprint=stamp,
        mapped=mapped.base,
        **frame,
    )


def _cost_of(segment: int) -> tuple[str, ...]:
    """A sentence on segments of so many bytes, if they are large."""
    if segment <= _LARGE_SEGMENT:
        return ()
    return (
        (
            f"the input is stored in segments of {format_bytes(segment)}, and each is decoded as a "
            "whole; penstock convert IN OUT.zarr makes an array that is read in parts"
        ),
    )


@contextmanager
def _no_complaints(where: str) -> Iterator[None]:
    """Turn what tifffile logs in this thread into a `UsageError`."""
    logger, thread = logging.getLogger("tifffile"), threading.get_ident()
    complaints: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.thread != thread or record.levelno < logging.WARNING:
            return True
        if not _HARMLESS.search(message := record.getMessage()):
            complaints.append(message)
        return False

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
        # The first complaint says more than later ones, or an exception, that follow from it.
        if complaints:
            first = complaints[0].splitlines()[0]
            raise UsageError(f"{where}: is truncated or corrupt; tifffile says: {first}")


def _check_size(file: Any, number: int, num_pages: int, where: str) -> None:
    """Refuse a series whose size differs from its metadata or from the number of pages."""
    series, pixels = file.series[number], pixels_of(file, number)
    size = math.prod(series.shape)
    if pixels is not None:
        shape = [int(pixels.get(f"Size{axis.upper()}", 0)) for axis in AXES]
        source = "its OME metadata"
    else:
        shaped = file.shaped_metadata or ()
        shape = list(shaped[number].get("shape", ())) if number < len(shaped) else []
        source = "its metadata"
    if shape and math.prod(shape) not in (0, size):
        raise UsageError(
            f"{where}: is truncated or corrupt: {source} gives the shape {tuple(shape)}, the file "
            f"has {series.shape}"
        )
    if not series.axes.endswith(series.keyframe.axes):
        raise UsageError(
            f"{where}: pages of axes {series.keyframe.axes} in a series of axes {series.axes}"
        )
    stored_by_page = series.dataoffset is None and series.kind in ("shaped", "imagej")
    if stored_by_page and len(series) > num_pages:
        raise UsageError(f"{where}: is truncated: {num_pages} pages of {len(series)} are there")


def _check_ends(series: Any, where: str) -> None:
    """Refuse a file that ends before its first or its last page does: to look at every page would
    take long."""
    for page in filter(None, (series[0], series[-1])):
        size = page.parent.filehandle.size
        ends = map(sum, zip(page.dataoffsets, page.databytecounts, strict=False))
        if (end := max(ends, default=0)) > size:
            raise UsageError(
                f"{where}: is truncated: a page ends at byte {end}, the file at {size}"
            )


def _segment_shape(page: Any) -> tuple[int, ...]:
    samples = page.shaped[4]
    if page.is_tiled:
        return (1, page.tiledepth, page.tilelength, page.tilewidth, samples)
    return (1, 1, min(page.rowsperstrip, page.imagelength), page.imagewidth, samples)
