"""A folder or a pattern of TIFF files, each a plane of a volume, in the order of their numbers."""

from __future__ import annotations

import copy
import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...base import (
    UsageError,
    as_usage_error,
    in_order,
    natural,
    plural,
    system_errors,
    usable_cores,
)
from .protocols import in_words
from .sliced import Asked, OpenedArray, Readable, decoded_once, read_into

_OPEN = 256
"""Planes that are kept open. Each is a file, of which a process may have about a thousand."""
_NUMBER = re.compile(r"\d+")
_SHOWN = 6  # names in a message
_MARKERS = ("zarr.json", ".zarray", ".zgroup", "attributes.json", "info")  # of a store


def plane_files(path: str) -> list[Path] | None:
    """The TIFF files that a folder or a pattern means, else its DICOM files, in natural order; None
    for anything else."""
    place = Path(path).expanduser()
    if "://" in path:
        return None
    if glob.has_magic(path) and not place.exists():
        files = [Path(name) for name in glob.glob(str(place))]  # noqa: PTH207 -- absolute ones too
    elif place.is_dir() and not any((place / marker).exists() for marker in _MARKERS):
        inside = [file for file in place.iterdir() if file.is_file()]
        files = [file for file in inside if file.suffix.lower() in (".tif", ".tiff")]
        files = files or [file for file in inside if is_slice(file)]
    else:
        return None
    if not files and not glob.has_magic(path):
        return None
    return sorted(files, key=lambda file: natural(file.name))


def is_slice(file: Path) -> bool:
    """True for a DICOM file of pictures, and not for the index of a medium."""
    if file.name == "DICOMDIR":
        return False
    with system_errors(str(file)), file.open("rb") as stream:
        return stream.read(132)[128:] == b"DICM"


def check_numbers(files: Sequence[Path], where: str) -> None:
    """Refuse files between whose numbers some are missing, or of which two have one number."""
    numbers = [[int(each) for each in _NUMBER.findall(file.name)] for file in files]
    if len({len(each) for each in numbers}) != 1 or not numbers[0]:
        return  # named otherwise: their order by name is what there is
    columns = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if len(columns) > 1:
        raise UsageError(
            f"{where}: its {plural(len(files), 'file')} differ in {len(columns)} numbers, such as "
            f"{files[0].name} and {files[-1].name}: planes of one channel and one time make a "
            "volume; name them by a pattern, in quotes"
        )
    if columns:
        lacking = sorted({*range(columns[0][0], columns[0][-1])} - {*columns[0]})
        steps = {b - a for a, b in zip(columns[0], columns[0][1:], strict=False)}
        if lacking and len(steps) > 1:  # every second plane is no gap
            shown = ", ".join(map(str, lacking[:_SHOWN])) + ", ..." * (len(lacking) > _SHOWN)
            raise UsageError(
                f"{where}: {plural(len(lacking), 'plane')} missing between {files[0].name} and "
                f"{files[-1].name}: {shown}"
            )


class _Planes(Readable):
    """Planes that lie in a file each, along z and the axes of a plane."""

    def __init__(
        self, files: Sequence[Path], open_plane: Callable[[Path], OpenedArray],
        opened: Sequence[Any], cache_bytes: int,
    ) -> None:  # fmt: skip
        """``opened`` are the arrays of the first planes."""
        self.shape, self.dtype = (len(files), *opened[0].shape), opened[0].dtype
        self.rank = 1
        # One cache for all planes, as a brick touches some of them, each in some segments.
        kept = cache_bytes // self.segment_bytes(opened) if self.segment_bytes(opened) else 0

        @lru_cache(_OPEN)
        def plane(z: int) -> Any:
            array: Any = opened[z] if z < len(opened) else open_plane(files[z]).array
            if hasattr(array, "segment_bytes"):
                array = copy.copy(array)
                array.decoded = partial(decoded, z)
            return array

        decoded = decoded_once(lambda z, *place: plane(z).decode(*place), kept)
        self._plane = plane

    @staticmethod
    def segment_bytes(opened: Sequence[Any]) -> int:
        """The most bytes that a plane decodes at once; 0 if all are mapped."""
        return max(int(getattr(each, "segment_bytes", 0)) for each in opened)

    def read_frame(
        self, place: tuple[int, ...], inside: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        read_into(self._plane(*place), inside, out)


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open TIFF files as the planes of one volume."""
    from . import ometiff

    files, where = asked.files, asked.where
    if not files:
        raise UsageError(f"{where}: no file has such a name")
    check_numbers(files, where)

    def plane(file: Path) -> OpenedArray:
        place = f"{where}: {file.name}"
        with as_usage_error(f"{place}: not a readable TIFF file"):
            of_file = replace(asked, path=str(file), where=place, files=())
            opened = ometiff.open_array(of_file, 0)
        return replace(opened, labels=asked.axes[1:].upper()) if asked.axes else opened

    first, kept = plane(files[0]), list[Any]()
    for file, opened in zip(files, in_order(plane, files, usable_cores()), strict=True):
        kept += [opened.array] if len(kept) < _OPEN else []
        if "Z" in (opened.labels or ()):
            raise UsageError(
                f"{where}: {file.name} holds several planes itself; name one such file, or a "
                "folder of single planes"
            )
        has, wanted = (_words(each) for each in (opened, first))
        if has != wanted:
            raise UsageError(f"{where}: {file.name}: has {has}, where {files[0].name} has {wanted}")
    return _stacked(first, files, plane, kept, cache_bytes)


def _stacked(
    first: OpenedArray, files: Sequence[Path], open_plane: Callable[[Path], OpenedArray],
    kept: Sequence[Any], cache_bytes: int,
) -> OpenedArray:  # fmt: skip
    """The volume of planes that are all like the first."""
    planes = _Planes(files, open_plane, kept, cache_bytes)
    return replace(
        first,
        array=planes,
        labels=["Z", *(first.labels or ())],
        chunks=(1, *first.chunks),
        cache_bytes=cache_bytes if planes.segment_bytes(kept) else 0,
        again=partial(_stacked, first, files, open_plane, kept),
    )


def _words(plane: OpenedArray) -> str:
    axes = f", axes {''.join(plane.labels or ())}" if len(plane.array.shape) > 2 else ""
    packing = f", {plane.packing}" if plane.packing else ""
    return f"{in_words(plane.array.shape)} of {plane.array.dtype}{axes}{packing}"
