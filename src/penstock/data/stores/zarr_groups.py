"""Groups of a Zarr or N5 store: the attributes that one has, the images and arrays below it.

A group that holds several things is refused with their names, so that never the first of them is
taken in silence. The user names one by its path; no path of a stranger's metadata is followed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...base import UsageError, parsed_json
from .ome_levels import Level, array_below, described, image_of
from .protocols import SeveralArrays, in_words, listed

Read = Callable[[str], bytes | None]
"""The bytes of a key of a store; None where it has no such key."""
_DEPTH = 4  # of arrays below a group


def read_json(read: Read, key: str, where: str) -> dict[str, Any]:
    """The JSON object of a key; empty where there is none.

    Raises `UsageError` for what is no JSON object.
    """
    try:
        parsed = parsed_json(read(key) or b"{}")
    except ValueError as error:
        raise UsageError(f"{where}: {key} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"{where}: {key} holds a {type(parsed).__name__}, not an object of JSON")
    return parsed


def read_attributes(read: Read, where: str) -> tuple[str, dict[str, Any]]:
    """TensorStore's driver for a group's arrays, and its OME attributes, empty if it has none."""
    attributes = read_json(read, "zarr.json", where).get("attributes") or {}
    ome = attributes.get("ome") if isinstance(attributes, dict) else None
    if isinstance(ome, dict) and ome:
        return "zarr3", ome
    return "zarr", read_json(read, ".zattrs", where)


def group_document(read: Read, where: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The metadata file of a group with images: its key, what it holds, and in that the OME
    attributes, which may be changed before `write_group`."""
    for key in ("zarr.json", ".zattrs"):
        document = read_json(read, key, where)
        attributes = document.get("attributes", document)
        ome = attributes.get("ome", attributes)
        if "multiscales" in ome:
            return key, document, ome
    raise UsageError(f"{where}: is no OME-Zarr image; penstock convert IN OUT makes a new one")


def write_group(root: Any, key: str, document: dict[str, Any]) -> None:
    """Write the metadata file of a group anew. A list of all metadata would be out of date, and
    readers look without one."""
    document.pop("consolidated_metadata", None)
    root.write(key, json.dumps(document, indent=2, allow_nan=False).encode()).result()
    root.write(".zmetadata", None).result()


def check_array(
    read: Read, folder: Path | None, attributes: Mapping[str, Any], place: str, flag: str
) -> None:
    """Refuse a group that is no array, with a sentence that names what may be taken from it.

    Args:
        read: Reads the group's keys.
        folder: Its folder; None where it is not on this machine.
        attributes: Its OME attributes.
        place: Its path or URL.
        flag: The flag that took it; may be empty.

    Raises:
        UsageError: It is such a group.
    """
    where = f"{flag} {place}".strip()
    if any(map(_shape, (read_json(read, key, where) for key in _MARKERS))):
        return
    try:
        said = _choices(read, attributes, where) or _arrays(read, folder, where)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: its metadata is malformed: {error!r}") from error
    if said is None:
        return
    kind, names = said
    if not names:
        raise UsageError(f"{where}: is {kind}, and none is listed in it; name one by its path")
    paths = [array_below(name, where).strip("/") for name, _ in names]
    raise SeveralArrays(
        f"{where}: is {kind} ({listed(names)}); name one, such as "
        f"{flag} {joined(place, paths[0])}".replace("  ", " "),
        [(joined(place, path), more) for path, (_, more) in zip(paths, names, strict=True)],
    )


def joined(place: str, name: str) -> str:
    """The path or URL of what lies below another. Names come before the query of a URL."""
    head, mark, query = place.partition("?") if "://" in place else (place, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def level_of(read: Read, name: str, where: str) -> Level | None:
    """The level of an image whose array is called ``name`` below the group; None if it is none."""
    attributes = read_attributes(read, where)[1]
    for series, image in enumerate(attributes.get("multiscales", ())):
        for number, dataset in enumerate(image["datasets"]):
            if str(dataset["path"]).strip("/") == name:
                return described(attributes, number, where, series)
    return None


def first_level_of(place: str) -> str:
    """The largest array of an OME-Zarr image in a folder of this machine; else the place itself.

    Raises:
        UsageError: It is a group of several images or arrays; the sentence lists them.
    """
    folder = Path(place)
    if "://" in place or not folder.is_dir():
        return place

    read = _reader(folder)
    attributes = read_attributes(read, place)[1]
    if "multiscales" not in attributes:
        check_array(read, folder, attributes, place, "")
        return place
    try:
        path = image_of(attributes, None, place)["datasets"][0]["path"]
        return f"{place}/{array_below(path, place)}"
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{place}: its multiscales metadata is malformed: {error!r}") from error


def _reader(folder: Path) -> Read:
    def read(key: str) -> bytes | None:
        return (folder / key).read_bytes() if (folder / key).is_file() else None

    return read


_MARKERS = ("zarr.json", ".zarray", "attributes.json")


def _shape(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of an array by its metadata; empty for what is none."""
    shape = metadata.get("shape", metadata.get("dimensions"))
    return tuple(shape) if isinstance(shape, list) else ()


def _choices(
    read: Read, attributes: Mapping[str, Any], where: str
) -> tuple[str, list[tuple[str, str]]] | None:
    """What a group of OME is, and the paths in it; None for any other group."""
    if "plate" in attributes:
        return "a plate of wells", [(well["path"], "") for well in attributes["plate"]["wells"]]
    if "well" in attributes:
        fields = attributes["well"]["images"]
        return "a well of fields", [(image["path"], "") for image in fields]
    if isinstance(attributes.get("labels"), list):
        return "a group of label images", [(name, "") for name in attributes["labels"]]
    if "bioformats2raw.layout" in attributes:

        def below(key: str) -> bytes | None:
            return read(f"OME/{key}")

        series = read_attributes(below, where)[1].get("series") or takewhile(
            lambda name: read(f"{name}/.zattrs") or read(f"{name}/zarr.json"), map(str, range(100))
        )
        return "a group of images", [(name, "") for name in series]
    return None


def _arrays(
    read: Read, folder: Path | None, where: str
) -> tuple[str, list[tuple[str, str]]] | None:
    """The arrays of a group, with their shapes; None for what is no group."""
    v3 = read_json(read, "zarr.json", where)
    if v3.get("node_type") != "group" and not any(map(read, (".zgroup", "attributes.json"))):
        return None
    arrays = dict(_listed(read, where)) or dict(_below(folder))
    return "a group of arrays", [
        (path, in_words(shape))
        for path, shape in sorted(arrays.items()) if len(shape) > 1
    ]  # fmt: skip


def _listed(read: Read, where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The arrays that a group's own list of metadata has, with their shapes."""
    for key, metadata in (read_json(read, ".zmetadata", where).get("metadata") or {}).items():
        if key.endswith("/.zarray"):
            yield key.removesuffix("/.zarray"), _shape(metadata)
    v3 = read_json(read, "zarr.json", where).get("consolidated_metadata") or {}
    for key, metadata in (v3.get("metadata") or {}).items():
        if metadata.get("node_type") == "array":
            yield key, _shape(metadata)


def _below(folder: Path | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The arrays in the folders below a folder, with their shapes."""
    for here, folders, files in os.walk(folder) if folder else ():
        place = Path(here).relative_to(folder or "")
        for marker in set(_MARKERS) & set(files):
            shape = _shape(read_json(_reader(Path(here)), marker, here))
            if shape:
                yield place.as_posix(), shape
                folders.clear()
        if len(place.parts) >= _DEPTH:
            folders.clear()
