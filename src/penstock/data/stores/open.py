"""Opens a source or a sink by path, URL, spec or array: the one place that chooses a store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import (
    UsageError,
    as_usage_error,
    at_home,
    blaming,
    is_array,
    parsed_json,
    scrub,
    system_errors,
)
from ..box import Box
from ..levels import Rule
from . import in_memory as memory
from .added import (
    OURS,
    PLANES,
    RASTER,
    SLICES,
    TIFF,
    Format,
    added_store,
    and_added,
    checked,
    format_of,
)
from .file_formats import ENDINGS, ending_of
from .file_sink import open_file_sink
from .kvstore import place_and_name
from .omezarr import open_omezarr_sink, open_omezarr_source
from .planes import is_slice, plane_files
from .protocols import (
    AXES,
    LONGEST,
    NoSuchLevel,
    Sink,
    Source,
    Spec,
    check_dtype,
    file_stamp,
    is_file,
    is_n5,
    suffix_of,
)
from .sliced import Asked, SlicedSource
from .tensorstore import settled
from .tensorstore_open import open_tensorstore_sink, open_tensorstore_source
from .zarr_groups import joined


def open_source(
    spec: Spec | NDArray[Any],
    *,
    level: int = 0,
    cache_bytes: int = 0,
    raw: bool = False,
    axes: str | None = None,
    series: int | None = None,
    name: str = "--in-spec",
) -> Source:
    """Open an array for reading.

    Args:
        spec: a TensorStore spec (mapping, inline JSON or a ``.json`` file), a path or URL of an
            OME-Zarr group or of a Zarr, N5 or precomputed array, a ``.tif`` or ``.npy`` file, a
            place that another package opens (docs/extending.md), or a numpy array.
        level: the resolution level of OME-Zarr or TIFF.
        cache_bytes: the most decoded bytes that the store keeps.
        raw: read the numbers of a Zarr array as they are stored, whatever ``scale_factor``,
            ``_FillValue`` and the other attributes of the CF conventions say of them; likewise
            those of a GeoTIFF.
        axes: the letters of the stored axes, such as ``"tyx"``, whatever the array says of them.
        series: the image to take where a file, a folder or an OME-Zarr group holds several.
        name: the flag that messages name.

    Returns:
        The source, with five axes t c z y x.

    Raises:
        UsageError: it cannot be opened, is empty, or has axes or a dtype that Penstock cannot take.
    """
    settings = {"level": level, "name": name, "raw": raw, "axes": axes, "series": series}
    source = _open_source(spec, settings, cache_bytes)
    where = name if source.name == name else f"{name} {source.name}"
    for axis, length in zip(AXES, source.domain.shape, strict=True):
        if length == 0:
            raise UsageError(f"{where}: has 0 along {axis}; there is nothing to read")
        if length > LONGEST:
            raise UsageError(
                f"{where}: its metadata claims {length} along {axis}, and an axis has at most "
                f"{LONGEST}"
            )
    return source


def _open_source(spec: Spec | NDArray[Any], settings: dict[str, Any], cache_bytes: int) -> Source:
    name, level, series = (settings[key] for key in ("name", "level", "series"))
    parsed = spec if isinstance(spec, np.ndarray) else parse_spec(spec, name)
    if not isinstance(parsed, str) and (level or series is not None):
        what, kind = ("level", NoSuchLevel) if level else ("series", UsageError)
        wanted = f"{what} {level or series}"
        raise kind(f"{name}: {wanted} is asked, but only OME-Zarr and files have such")
    if isinstance(parsed, np.ndarray):
        return memory.open_array_source(parsed, name=name, axes=settings["axes"])
    if isinstance(parsed, dict):
        kept = {key: settings[key] for key in ("name", "raw", "axes")}
        return open_tensorstore_source(parsed, cache_bytes=cache_bytes, **kept)
    place, inside = place_and_name(parsed)
    files = None if inside else plane_files(place)
    form = format_of(place)
    if files is not None:
        of_file = format_of(files[0].name) if files else None
        is_series = bool(files) and is_slice(files[0])
        form = SLICES if is_series else replace(of_file or TIFF, room=PLANES)
    if form is not None:
        choices = {key: settings[key] for key in ("level", "series", "raw", "axes")}
        where = f"{name} {scrub(place)}"
        asked = Asked(path=place, where=where, inside=inside, files=files or (), **choices)
        return _open_file(form, asked, cache_bytes)
    if (added := added_store(parsed)) is not None:
        return _open_added(added, parsed, settings, cache_bytes)
    whole = joined(place, inside.strip("/")) if inside else parsed
    return open_omezarr_source(whole, cache_bytes=cache_bytes, **settings)


_HINTS = {"series": "; --series N takes one", "inside": "; name an array as FILE::NAME"}


def _open_file(form: Format, asked: Asked, cache_bytes: int) -> SlicedSource:
    """A source over a file of a format, or over several files."""
    choices = {"level": asked.level, "series": asked.series is not None, "inside": asked.inside}
    for choice, is_made in choices.items():
        if is_made and choice not in form.takes:
            words = {"level": "levels", "inside": "arrays by name"}.get(choice, choice)
            hints = [_HINTS[other] for other in form.takes.split() if choice != "level" != other]
            kind = NoSuchLevel if choice == "level" else UsageError
            raise kind(f"{asked.where}: {form.title}s have no {words}{''.join(hints)}")
    remote, files = "://" in asked.path, asked.files or [asked.file]
    pattern = "*" in asked.path.partition("?")[0]  # and not in the query of a signed URL
    if remote and (form is not RASTER or pattern):
        what = "files of a pattern" if pattern else f"{form.title}s"
        raise UsageError(f"{asked.where}: {what} are read from this machine; copy them here")
    if form.room != PLANES and not (remote or is_file(files[0], asked.where)):
        raise UsageError(f"{asked.where}: no such file")
    with as_usage_error(f"{asked.where}: not a readable {form.title}"):
        opened = import_module(f".{form.room}", __package__).open_array(asked, cache_bytes)
    address = asked.path if remote else str(asked.file.resolve())
    if form.room == PLANES:  # which says of what its axes are as the user does
        asked = replace(asked, axes=None)
    beside = [each.with_name(f"{each.name}.aux.xml") for each in files]
    beside += [asked.file.with_suffix(ending) for ending in (".hdr", ".img") if not asked.files]
    whole = [] if remote else [*files, *(each for each in beside if each.is_file())]
    stamps = [fact for each in whole for fact in file_stamp(each)]
    return SlicedSource(opened, asked, address, stamps)


def _open_added(added: Any, place: str, settings: Mapping[str, Any], cache_bytes: int) -> Source:
    """A source of another package's store."""
    where = f"{settings['name']} {place}"
    if settings["axes"] is not None or settings["series"] is not None:
        raise UsageError(f"{where}: a store of another package takes no axes and no series")
    theirs = {key: settings[key] for key in ("level", "name")}
    try:
        with blaming(added, where):
            opened = added.load().open_source(place, cache_bytes=cache_bytes, **theirs)
            return checked(opened, Source, where)
    except UsageError as error:  # of which another package has one kind
        if settings["level"]:
            raise NoSuchLevel(error.with_flags) from error
        raise


def coarser_levels(path: str, first: Source, **chosen: Any) -> Iterator[tuple[int, Source]]:
    """The levels of an array below the first, and their numbers.

    Args:
        path: The array.
        first: Its first level.
        chosen: Further arguments of `open_source`, such as the name of the path in messages.

    Yields:
        The number of a level, and the level.

    Raises:
        UsageError: A level is there and cannot be opened.
    """
    for number in itertools.count(1):
        try:
            level = open_source(path, level=number, **chosen)
        except NoSuchLevel:
            return
        if level.domain == first.domain:  # another package's store may take no notice of levels
            return
        yield number, level


def coarsest_level(
    path: str, first: Source, across: Sequence[int], side: int, **chosen: Any
) -> tuple[Source, int]:
    """The coarsest level of an array that has so many voxels along an axis; the first if none has.

    Args:
        path: The array.
        first: Its first level.
        across: The places of the axes that count.
        side: The number of voxels.
        chosen: Further arguments of `open_source`.

    Returns:
        The level, and its number.

    Raises:
        UsageError: A level is there and cannot be opened.
    """
    coarsest = first, 0
    for number, level in coarser_levels(path, first, **chosen):
        if max(level.domain.shape[axis] for axis in across) < side:
            break
        coarsest = level, number
    return coarsest


def open_sink(
    spec: Spec | NDArray[Any],
    *,
    domain: Box,
    dtype: np.dtype[Any],
    like: Source | None = None,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    ome_version: str | None = None,
    at: Sequence[int] | None = None,
    files: bool = False,
    rule: Rule | None = None,
    name: str = "--out-spec",
) -> Sink:
    """Open an array for writing. Nothing is created or deleted before `Sink.create`.

    Args:
        spec: the output. A TensorStore spec describes it in full. A path or URL becomes an N5
            array if it is or is in a ``.n5``, else an OME-Zarr group with the array at ``0``. A
            numpy array is written in place.
        domain: the box of the output (t c z y x), where the spec leaves it open.
        dtype: the dtype of the output, where the spec leaves it open.
        like: the source whose axes, scale and position an OME-Zarr output takes.
        chunks: the shape of a chunk (z y x, or t c z y x).
        shards: the shape of a shard, likewise.
        overwrite: replace an output that exists.
        resume: write into an output that exists; if a killed run was deleting it, delete the rest.
        ome_version: ``"0.4"`` or ``"0.5"``; ``"plain"`` for a Zarr array (v3) without a group.
        at: the coordinate of the first voxel in ``like``; by default that in ``domain``.
        files: take paths of files, such as ``.tif``: `make_file` makes them of the sink's scratch.
        rule: how voxels become one of a level of a file; None if it is to have no levels.
        name: the flag that messages name.

    Returns:
        The sink.

    Raises:
        UsageError: it cannot be written, or exists already.
    """
    dtype = check_dtype(dtype, name)
    if isinstance(spec, np.ndarray):
        return memory.open_array_sink(spec, name=name)
    settings: dict[str, Any] = {
        "domain": domain, "dtype": dtype, "like": like, "chunks": chunks, "shards": shards,
        "overwrite": overwrite, "resume": resume, "ome_version": ome_version, "at": at,
    }  # fmt: skip
    parsed = parse_spec(spec, name)
    if ome_version is not None:
        _check_is_zarr(parsed, ome_version, name)
    if isinstance(parsed, str) and files and ending_of(parsed) is not None:
        sink: Sink = open_file_sink(parsed, **settings, rule=rule, name=name)
    else:
        sink = _open_new(parsed, name, settings, ", ".join(f"*{e}" for e in ENDINGS if files))
    _check_place(sink.local_path, name)
    return sink


def _check_is_zarr(place: str | dict[str, Any], version: str, name: str) -> None:
    """Refuse a version of OME-Zarr for what is none."""
    if isinstance(place, dict) or ending_of(place) is not None or is_n5(place):
        flag = "--plain" if version == "plain" else f"--ome-zarr {version}"
        raise UsageError(f"{name} {scrub(str(place))}: {flag} is for a .zarr by its path alone")


def _check_place(place: Path | None, name: str) -> None:
    """Refuse a path to an output that leads through a broken link, or into an array."""
    for each in (place, *place.parents) if place is not None else ():
        if each.is_symlink() and not each.exists():
            raise UsageError(
                f"{name} {each}: is a link to {each.readlink()}, which does not exist; make that, "
                "or give its path"
            )
        if each != place and is_array(each):
            raise UsageError(f"{name} {place}: lies inside the array {each}; give a place outside")


def _open_new(
    place: str | dict[str, Any], name: str, settings: Mapping[str, Any], files: str
) -> Sink:
    """The sink of an array, or of a group with one. ``files`` is what else a refusal names."""
    if isinstance(place, dict):
        taken = {key: settings[key] for key in ("domain", "dtype", "overwrite", "resume")}
        return open_tensorstore_sink(place, **taken, name=name)
    suffix, where = suffix_of(place), f"{name} {place}"
    if not OURS.get(suffix, True):
        raise UsageError(
            f"{where}: cannot write {suffix}; give OME-Zarr (*.zarr), N5 (*.n5), "
            f"{files and f'a file ({files}), '}or any TensorStore spec{and_added()}"
        )
    if (added := added_store(place)) is not None:
        with blaming(added, where):
            store = added.load()
            if not hasattr(store, "open_sink"):
                raise UsageError(f"{where}: {suffix} can be read and not written")
            return checked(store.open_sink(place, **settings, name=name), Sink, where)
    return open_omezarr_sink(place, **settings, name=name)


def parse_spec(text_or_mapping: Spec, name: str = "--in-spec") -> dict[str, Any] | str:
    """A TensorStore spec as a dict, or the plain path or URL that it is instead.

    >>> parse_spec('{"driver": "zarr"}')
    {'driver': 'zarr'}
    >>> parse_spec("s3://bucket/volume.zarr")
    's3://bucket/volume.zarr'
    """
    if isinstance(text_or_mapping, Mapping):
        return dict(text_or_mapping)
    if not isinstance(text_or_mapping, str | os.PathLike):
        kind = type(text_or_mapping).__name__
        raise UsageError(
            f"{name}: a value of type {kind} is no path, URL, TensorStore spec or numpy array"
        )
    text = str(text_or_mapping).strip()
    if text.startswith("{") and not os.path.lexists(text):
        return _parse_json(text, name)
    path = at_home(text)
    where = f"{name} {path}"
    if path.suffix == ".json" and is_file(path, where):
        with system_errors(where):
            return _parse_json(path.read_text(encoding="utf-8", errors="replace"), where)
    return text


def absolute_spec(spec: Spec, name: str) -> dict[str, Any] | str:
    """The same place for a process in any folder.

    Args:
        spec: As for `open_source`, but no array.
        name: Its flag, for messages.

    Returns:
        The spec with absolute paths, those in TensorStore's JSON too. URLs are as they are.
    """
    parsed = parse_spec(spec, name)
    if isinstance(parsed, dict):
        placed: dict[str, Any] = settled(parsed)
        return placed
    return parsed if "://" in parsed else str(Path(parsed).absolute())


def _parse_json(text: str, where: str) -> dict[str, Any]:
    with as_usage_error(f"{where}: not valid JSON", ValueError):
        parsed = parsed_json(text)
    if not isinstance(parsed, dict):
        raise UsageError(f"{where}: expected a JSON object, got {type(parsed).__name__}")
    if "driver" not in parsed:
        what = "a list of kerchunk's references" if "refs" in parsed else "JSON"
        raise UsageError(
            f"{where}: {what}, and no TensorStore spec, which names a driver; copy what it stands "
            "for into a Zarr array, or give that file"
        )
    return parsed
