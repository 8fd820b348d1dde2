"""Reads an output again, and finds the run that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base import at_home, scrub
from ..box import Box, Grid, indices
from .added import added_store
from .file_formats import ending_of
from .file_sink import scratch_of, source_of_tiles
from .frames import to_five
from .kvstore import (
    address,
    explained_errors,
    kvstore_of,
    local_path,
    open_kvstore,
    store_folder,
    ts,
)
from .open import open_source, parse_spec
from .protocols import AXES, Source, Spec
from .tensorstore import box_of, settled

_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
"""TensorStore's codes for damaged bytes. Other codes, of a network or of rights, say nothing about
the bytes."""


@dataclass
class Written:
    """An output, open for reading; a `protocols.Located`."""

    source: Source
    local_path: Path | None
    address: str
    root: Any
    name: str
    is_file: bool = False
    """True for one file, in which no block can be written again."""


def open_written(spec: Spec, name: str) -> Written:
    """Open an output as the sink of the same spec names it. Nothing is changed.

    Args:
        spec: a path, a URL or a TensorStore spec, as for `open_sink`.
        name: its name in messages.

    Returns:
        The output.

    Raises:
        UsageError: it cannot be opened.
    """
    parsed = parse_spec(spec, name)
    if not isinstance(parsed, str):
        array = open_source(parsed, raw=True, name=name)
        place = ts.Spec(settled(parsed)).kvstore
        folder = store_folder(parsed, local_path(place))
        root = open_kvstore(place, name) if place else None
        return Written(array, folder, address(place), root, array.name)
    if added_store(parsed) is not None:
        theirs = open_source(parsed, name=name)
        path = None if "://" in parsed else Path(parsed)
        return Written(theirs, path, theirs.address, None, theirs.name)
    source, is_file = _open_place(parsed, name)
    root = open_kvstore(kvstore_of(parsed), name)
    place = root.spec()
    return Written(source, local_path(place), address(place), root, scrub(parsed), is_file)


def _open_place(place: str, name: str) -> tuple[Source, bool]:
    """An output at a path or URL, and whether it is a file by now: else its scratch has its
    blocks."""
    if ending_of(place) is None:
        return open_source(place, raw=True, name=name), False
    path = at_home(place)
    if not (scratch := scratch_of(path)).is_dir():
        return open_source(place, raw=True, name=name), True
    return source_of_tiles(path, open_source(str(scratch), raw=True, name=name), name), False


def is_damage(error: Exception) -> bool:
    """Whether bytes were read that cannot be decoded.

    Args:
        error: the error that `Source.read` raised.

    Returns:
        False if the store did not give its bytes.
    """
    if isinstance(error, OSError) and error.errno is None:  # of a library that decodes a file
        return True
    text = str(error.__cause__ or error)
    of_the_system = "os_error_code" in text or "http_response_code" in text
    return text.partition(":")[0] in _DAMAGE and not of_the_system


def discard_damaged(written: Written, box: Box) -> int:
    """Empty the chunks in a box that cannot be decoded.

    A chunk that the edge of the array cuts is read before it is written, as only a part of it is,
    and so could not be mended.

    Args:
        written: the output.
        box: the box, t c z y x.

    Returns:
        The number of chunks that were emptied.

    Raises:
        UsageError: the store does not answer, or may not be written.
    """
    array = getattr(written.source, "array", None)
    spec = {} if array is None else array.spec().to_json()
    metadata, transform = spec.get("metadata", {}), spec.pop("transform", {})
    shape = next((key for key in ("shape", "dimensions") if key in metadata), None)
    if array is None or shape is None or "output" in transform:  # a view, or no store of chunks
        return 0
    # As an array of whole chunks, each of which may be written without being read.
    chunk = array.chunk_layout.write_chunk.shape
    metadata[shape] = [-(-n // c) * c for n, c in zip(metadata[shape], chunk, strict=True)]
    count = 0
    with explained_errors(written.name):
        whole = ts.open(spec, open=True, assume_metadata=True).result()
        view = to_five(whole, getattr(written.source, "stored_axes", AXES))
        cell_shape = tuple(n or 1 for n in view.chunk_layout.write_chunk.shape)
        grid = Grid(box_of(view.domain), cell_shape, (0,) * 5)
        for cell in map(grid.cell, indices(grid.touching(box))):
            try:
                view[cell.slices].read().result()
            except (ValueError, OSError) as error:
                if not is_damage(error):
                    raise
                fill = view.fill_value
                view[cell.slices].write(0 if fill is None else fill).result()
                count += 1
    return count
