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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe, format_bytes, plural, require
from ..box import Box, Grid, flatten, indices
from . import raster
from .cf_packing import Packing
from .protocols import AXES, check_dtype, check_level
from .sliced import Asked, OpenedArray, Readable, decoded_once, in_turn
from .tiff_frame import (
    PLACED,
    PLAIN,
    axes_of,
    check_files,
    chosen_series,
    frame_of,
    is_written_by_page,
    left_out,
    lost,
    packing_in,
    pixels_of,
)

tifffile = require("tifffile", "infer")

# Warnings of tifffile about files whose voxels can all be read.
_HARMLESS = re.compile(
    r"ParseError|GDAL_NODATA|_metadata>|Datetime|coercing|correcting LSM|read_uic1tag|not stitched"
)
_LARGE_SEGMENT = 2**28
"""The size above which a plan says what a segment costs."""


class TiffPages(Readable):
    """One series of a TIFF file, along its stored axes.

    tifffile sees a page in five dimensions: planar samples, z, y, x, interleaved samples. A
    segment, which is a tile or a strip, is one cell of a grid over a page. Decoded segments are
    kept, so that neighbouring blocks decode a strip they share only once.
    """

    def __init__(self, file: Any, series: Any, where: str, cache_bytes: int) -> None:
        self._file, self._series, self._where = file, series, where
        self.shape, self.dtype = series.shape, check_dtype(series.dtype, where)
        page = series.keyframe
        self._grid = Grid(Box((0,) * 5, page.shaped), _segment_shape(page))
        self._cells = self._grid.cells  # which costs as much as a small segment
        sample_axis = 0 if page.shaped[0] > 1 else 4
        self._page_axes = [{"Z": 1, "Y": 2, "X": 3}.get(a, sample_axis) for a in page.axes]
        self.rank = len(self.shape) - len(page.axes)
        self._lead = Box((0,) * self.rank, self.shape[: self.rank])
        self._left_out = left_out(page, self.dtype)
        # Of its own: a read of several pages takes as many, and would not be every second one.
        self._page_turns = count()
        self.chunks = (*(1,) * self.rank, *(self._grid.step[axis] for axis in self._page_axes))
        self.segment_bytes = math.prod(self._grid.step) * self.dtype.itemsize
        self.decode = partial(_decode, file, series)
        self.decoded = decoded_once(self.decode, cache_bytes // self.segment_bytes)
        """Where segments come from; planes of several files share one cache."""

    def read_frame(
        self, place: tuple[int, ...], inside: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        # Views, not copies: a page gets five axes, of length 1 where it lacks one.
        five = tuple(slice(None) if axis in self._page_axes else None for axis in range(5))
        self._read_page(flatten(place, self._lead), self._page_region(inside), out[five])

    def is_absent(self, index: tuple[slice, ...]) -> bool:
        """Whether the file holds no segment that a part touches."""
        segments = self._grid.touching(self._page_region(index[self.rank :]))
        for place in self.places(index):
            with self._file.filehandle.lock:
                counts = self._series[flatten(place, self._lead)].databytecounts
            if any(counts[flatten(cell, self._cells)] for cell in indices(segments)):
                return False
        return True

    def _page_region(self, inside: tuple[slice, ...]) -> Box:
        start, stop = [0] * 5, [1] * 5
        for axis, part in zip(self._page_axes, inside, strict=True):
            start[axis], stop[axis] = part.start, part.stop
        return Box(tuple(start), tuple(stop))

    def _read_page(self, number: int, region: Box, out: NDArray[Any]) -> None:
        # Axis by axis, not as boxes: a strip may be of one row, which decodes in as little time.
        along = [
            [(i, slice(max(i * step, low) - low, min((i + 1) * step, high) - low),
              slice(max(low - i * step, 0), min(high - i * step, step)))
             for i in range(low // step, -(-high // step))]
            for low, high, step in zip(region.start, region.stop, self._grid.step, strict=True)
        ]  # fmt: skip
        cells = (zip(*each, strict=True) for each in product(*along))
        for index, place, part in in_turn(cells, next(self._page_turns)):
            segment = self._segment(number, flatten(index, self._cells))
            out[place] = self._left_out if segment is None else segment[part[1:]]

    def _segment(self, page_number: int, number: int) -> NDArray[Any] | None:
        try:
            return self.decoded(page_number, number)
        except (ValueError, RuntimeError, OSError, IndexError) as error:
            place = f"{self._where}: page {page_number}, segment {number}"
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


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open a series of a TIFF file, or a level of its pyramid.

    Samples that are stored in one piece, and are the values, are mapped into memory; else segments
    are read and decoded.
    """
    where = asked.where
    with _no_complaints(where):
        file = _file_of(asked)
        if asked.series is None and is_written_by_page(file.series):
            file = _file_of(asked, is_shaped=False)
        check_files(file, where)
        number = chosen_series(file, asked.series, where)
        series = file.series[number]
        levels = series.levels
        num_pages = len(file.pages)
    placed = any(tag in series.keyframe.tags for tag in PLACED)
    is_raster = series.kind in PLAIN and len(series.pages) == 1  # of more GDAL has the first
    if is_raster and raster.is_explained_beside(asked.file, placed=placed):
        return raster.open_array(asked, cache_bytes)
    check_level(asked.level, len(levels), where)
    _check_size(file, number, num_pages, where)
    packing = None if asked.raw else packing_in(file, series, where)
    return _opened(file, number, packing, asked, cache_bytes)


def _file_of(asked: Asked, **kinds: bool) -> Any:
    """The open file, which the last of the arrays that share it closes."""
    file = tifffile.TiffFile(asked.file, **kinds)
    file.filehandle.set_lock(True)
    weakref.finalize(file, file.filehandle.close)
    return file


def _opened(
    file: Any, number: int, packing: Packing | None, asked: Asked, cache_bytes: int
) -> OpenedArray:
    chosen = file.series[number].levels[asked.level]
    labels, notes = axes_of(chosen, asked.axes)
    frame = frame_of(file, number, asked.level, labels)
    if chosen.dataoffset is None or packing is not None:
        _check_ends(chosen, asked.where)
        chosen.keyframe.decode(None, 0)  # an error if there is no decoder
        pages = TiffPages(file, chosen, asked.where, cache_bytes)
        return OpenedArray(
            array=pages,
            labels=labels,
            chunks=pages.chunks,
            packing=packing,
            cache_bytes=cache_bytes,
            again=partial(_opened, file, number, packing, asked),
            notes=[*notes, *lost(file, chosen), *_cost_of(pages.segment_bytes)],
            **frame,
        )
    dtype = chosen.dtype.newbyteorder(file.byteorder)
    needed = chosen.dataoffset + math.prod(chosen.shape) * dtype.itemsize
    if (size := asked.file.stat().st_size) < needed:
        raise UsageError(
            f"{asked.where}: is shorter than its header says: {size} bytes of {needed}"
        )
    mapped = np.memmap(asked.file, dtype, "r", chosen.dataoffset, chosen.shape)
    notes = [*notes, *lost(file, chosen)]
    return OpenedArray(array=mapped, labels=labels, chunks=(1,) * mapped.ndim, notes=notes, **frame)


def _cost_of(segment: int) -> Iterator[str]:
    """A sentence on segments of so many bytes, if they are large."""
    if segment > _LARGE_SEGMENT:
        yield (
            f"the input is stored in segments of {format_bytes(segment)}, and each is decoded as a "
            "whole; penstock convert IN OUT.zarr makes an array that is read in parts"
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
    whole, page = (each.axes.replace("S", "C") for each in (series, series.keyframe))
    if not whole.endswith(page):
        raise UsageError(
            f"{where}: pages of axes {series.keyframe.axes} in a series of axes {series.axes}"
        )
    stored_by_page = series.dataoffset is None and series.kind in ("shaped", "imagej")
    if stored_by_page and len(series) > num_pages:
        raise UsageError(
            f"{where}: is truncated: {plural(num_pages, 'page')} of {len(series)} are there"
        )


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
