"""A folder or a pattern of TIFF files, each a plane of a volume, in the order of their numbers."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...base import UsageError, in_order, natural, plural, system_errors, usable_cores
from ..box import Box
from .frames import Framed
from .in_memory import HoldsAll
from .protocols import file_stamp, source_fingerprint
from .sliced import decoded_once

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


class PlanesSource(HoldsAll, Framed):
    """Reads planes that lie in a file each; made by `open_planes_source`."""

    def __init__(
        self, name: str, files: Sequence[Path], open_plane: Any, opened: Sequence[Any], stamp: str,
        cache_bytes: int,
    ) -> None:  # fmt: skip
        """``opened`` are the first planes, each with no cache."""
        first = opened[0]
        frame = {key: getattr(first, key) for key in Framed.__dataclass_fields__}
        super().__init__(**frame)
        self._arguments = (name, files, open_plane, opened, stamp)
        segment = max(map(_segment_bytes, opened))
        self.cache_bytes = cache_bytes if segment else 0
        self.name, self.dtype = name, first.dtype
        shape, chunks = list(first.domain.shape), list(first.chunks)
        shape[2], chunks[2] = len(files), 1
        self.domain = Box((0,) * 5, tuple(shape))
        self.chunks = tuple(chunks)
        self.axes = "".join(axis for axis in "tczyx" if axis in first.axes + "z")
        self.address, self.fingerprint = str(files[0].resolve().parent), stamp
        self.packed_itemsize = getattr(first, "packed_itemsize", 0)

        @lru_cache(_OPEN)
        def plane(z: int) -> Any:
            plane = opened[z] if z < len(opened) else open_plane(files[z])
            return plane.decoding(partial(decoded, z)) if _segment_bytes(plane) else plane

        def decode(z: int, *place: int) -> NDArray[Any] | None:
            segment: NDArray[Any] | None = plane(z).decode(*place)
            return segment

        # One cache for all planes, as a brick touches some of them, each in some segments.
        decoded = decoded_once(decode, self.cache_bytes // segment if segment else 0)

        self._plane = plane

    def fill(self, box: Box, out: NDArray[Any]) -> None:
        for z in range(box.start[2], box.stop[2]):
            start, stop = list(box.start), list(box.stop)
            start[2], stop[2] = 0, 1
            at = z - box.start[2]
            self._plane(z).read(Box(tuple(start), tuple(stop)), out[:, :, at : at + 1])

    def with_cache(self, num_bytes: int) -> PlanesSource:
        return PlanesSource(*self._arguments, num_bytes)


def open_planes_source(
    path: str, files: Sequence[Path], *, level: int, cache_bytes: int, name: str, raw: bool,
    axes: str | None, series: int | None,
) -> PlanesSource:  # fmt: skip
    """Open TIFF files as the planes of one volume.

    Args:
        path: The folder or pattern.
        files: Its files, in order along z.
        level: The level of each file's pyramid.
        cache_bytes: The most decoded bytes that are kept of all.
        name: The flag that messages name.
        raw: Read what is stored.
        axes: The letters of a plane's axes, as the user says.
        series: The series of each file.

    Raises:
        UsageError: None is there, planes are missing, or they differ in size or dtype.
    """
    from .ometiff import open_ometiff_source

    where = f"{name} {path}"
    if not files:
        raise UsageError(f"{where}: no file has such a name")
    check_numbers(files, where)
    settings: Mapping[str, Any] = {"level": level, "raw": raw, "axes": axes, "series": series}

    def plane(file: Path) -> Any:
        return open_ometiff_source(str(file), cache_bytes=0, name=name, **settings)

    first, kept = plane(files[0]), list[Any]()
    for file, opened in zip(files, in_order(plane, files, usable_cores()), strict=True):
        kept += [opened] if len(kept) < _OPEN else []
        if opened.domain.shape[2] > 1:
            raise UsageError(
                f"{name} {file}: holds {opened.domain.shape[2]} planes itself; name one such file, "
                "or a folder of single planes"
            )
        if (opened.domain, opened.dtype) != (first.domain, first.dtype):
            raise UsageError(
                f"{name} {file}: has {_words(opened)}, where {files[0].name} has {_words(first)}"
            )
    stamps = [file_stamp(file) for file in files]
    stamp = source_fingerprint(str(files[0].resolve().parent), stamps, level, first.axes)
    return PlanesSource(path, files, plane, kept, stamp, cache_bytes)


def _segment_bytes(plane: Any) -> int:
    """The size of what a plane decodes at once; 0 if it is mapped."""
    return getattr(plane, "segment_bytes", 0)


def _words(source: Any) -> str:
    channels, _, y, x = source.domain.shape[1:]
    return f"{y} x {x} of {source.dtype}" + f", {channels} channels" * (channels > 1)
