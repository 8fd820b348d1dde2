"""Groups of a Zarr or N5 store: the attributes that one has, the images and arrays below it.

A group that holds several things is refused with their names, so that never the first of them is
taken in silence, and the user names one by its path. The only one is taken.

An output in the folder ``labels`` of an image is one of its labels. ``image.ome.zarr/labels/cells``
says that it is a label image, and ``image.ome.zarr/labels`` lists its names, by which viewers find
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ...base import UsageError, as_usage_error, parsed_json, scrub, well_formed
from .cf_packing import NAMES, number_of, packing_of
from .kvstore import kvstore_of, local_path, open_kvstore, reader_of
from .ome_levels import Level, array_below, described, image_of, image_of_n5
from .protocols import SeveralArrays, in_words, is_n5, listed

Read = Callable[[str], bytes | None]
"""The bytes of a key of a store; None where it has no such key."""
_DEPTH = 4  # of arrays below a group
_MARKERS = ("zarr.json", ".zarray", "attributes.json")


class Group:
    """The metadata of a group of a Zarr or N5 store. Every method raises `UsageError` for what is
    malformed."""

    def __init__(self, read: Read, where: str, root: Any = None) -> None:
        """``where`` is what messages begin with, ``root`` the open ``ts.KvStore`` if it is one."""
        self.read, self.where, self.root = read, where, root

    @classmethod
    def at(cls, path: str, flag: str = "") -> Group:
        """The group at a path or URL, which ``flag`` takes."""
        where = f"{flag} {scrub(path)}".strip()
        return cls.of(open_kvstore(kvstore_of(path), where), where)

    @classmethod
    def of(cls, root: Any, where: str) -> Group:
        """The group at an open ``ts.KvStore``."""
        return cls(reader_of(root, where), where, root)

    def json(self, key: str) -> dict[str, Any]:
        """The JSON object of a key; empty where there is none."""
        stored = self.read(key)
        with as_usage_error(f"{self.where}: {key} is not valid JSON", ValueError):
            parsed = parsed_json(b"{}" if stored is None else stored)
        if not isinstance(parsed, dict):
            kind = type(parsed).__name__
            raise UsageError(f"{self.where}: {key} holds a {kind}, not an object of JSON")
        return parsed

    @cached_property
    def document(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The file with the group's attributes: its key, what it holds, and in that the attributes
        of OME, empty if it has none. They may be changed before `write`."""
        document = self.json("zarr.json")
        attributes = document.get("attributes") or {}
        ome = attributes.get("ome") if isinstance(attributes, dict) else None
        if isinstance(ome, dict) and ome:
            return "zarr.json", document, ome
        document = self.json(".zattrs")
        return ".zattrs", document, document

    @property
    def ome(self) -> dict[str, Any]:
        """The attributes of OME."""
        return self.document[2]

    @cached_property
    def shown(self) -> dict[str, Any]:
        """The attributes of OME, or for a group of N5 what these would say of its levels."""
        says = {} if self.ome else self.json("attributes.json")
        if self.ome or not (says or is_n5(self.where)) or _shape(says):
            return self.ome
        with well_formed(f"{self.where}: its metadata is malformed"):
            each = (self.json(f"s{number}/attributes.json") for number in count())
            levels = list(takewhile(_shape, each))
            return image_of_n5(says, levels) if levels else self.ome

    @property
    def driver(self) -> str:
        """TensorStore's driver for the group's arrays."""
        if self.shown is not self.ome:
            return "n5"
        return "zarr3" if self.document[0] == "zarr.json" else "zarr"

    def image(self, series: int | None = None) -> Mapping[str, Any]:
        """The image, as its ``multiscales`` describe it: the only one, or that of ``series``."""
        with well_formed(f"{self.where}: its metadata is malformed"):
            return image_of(self.ome, series, self.where)

    def level(self, number: int, series: int | None = None) -> Level:
        """One level of an image."""
        with well_formed(f"{self.where}: its metadata is malformed"):
            return described(self.shown, number, self.where, series)

    def level_called(self, name: str) -> Level | None:
        """The level of an image whose array has a name below the group; None if it is none."""
        with well_formed(f"{self.where}: its metadata is malformed"):
            for series, image in enumerate(self.shown.get("multiscales", ())):
                for number, dataset in enumerate(image["datasets"]):
                    if str(dataset["path"]).strip("/") == name:
                        return self.level(number, series)
        return None

    def write(self) -> None:
        """Write the file with the attributes anew. A list of all metadata would be out of date, and
        readers look without one."""
        key, document, _ = self.document
        document.pop("consolidated_metadata", None)
        self.root.write(key, json.dumps(document, indent=2, allow_nan=False).encode()).result()
        self.root.write(".zmetadata", None).result()

    def only_below(self, folder: Path | None, place: str) -> str | None:
        """The path or URL of the only image or array in a group; None for what is no such group.

        Args:
            folder: Its folder; None where it is not on this machine.
            place: Its path or URL.

        Raises:
            UsageError: It has none, or several; the sentence names them.
        """
        if any(map(_shape, map(self.json, _MARKERS))):
            return None
        with well_formed(f"{self.where}: its metadata is malformed"):
            said = _choices(self) or _arrays(self, folder) or _zipped(self)
        if said is None:
            return None
        kind, names = said
        if not names:
            raise UsageError(
                f"{self.where}: is {kind}, and none is listed in it; name one by its path"
            )
        paths = [array_below(name, self.where).strip("/") for name, _ in names]
        if len(paths) == 1 and PurePosixPath(paths[0]).parts:
            return joined(place, paths[0])
        raise SeveralArrays(
            f"{self.where}: is {kind} ({listed(names)}); name one, such as "
            f"{joined(self.where, paths[0])}",
            [(joined(place, path), more) for path, (_, more) in zip(paths, names, strict=True)],
        )


def image_at(place: str, flag: str) -> tuple[str, Group]:
    """The image or array at a path or URL, or the only one below it, which ``flag`` takes: its
    place, and its group."""
    for _ in range(_DEPTH):
        group = Group.at(place, flag)
        only = None
        if "multiscales" not in group.shown:
            only = group.only_below(local_path(group.root.spec()), place)
        if only is None:
            break
        place = only
    return place, group


def zarr2_meant(group: Group, folder: str) -> dict[str, Any]:
    """What a spec says of a Zarr 2 array where TensorStore refuses how its metadata says it, or
    takes it for something else: the checksum of Zstandard, the fill value of integers as a text,
    and chunks in folders of which old writers say nothing.

    Args:
        group: The group that it lies in.
        folder: Its folder there, with a slash at the end; empty for the group's own.

    Returns:
        Members of a spec; none where the metadata are read as they stand.
    """
    said = array = group.json(f"{folder}.zarray")
    if isinstance(codec := said.get("compressor"), dict) and codec.get("id") == "zstd":
        plain = {key: each for key, each in codec.items() if key != "checksum"}
        said = {**said, "compressor": plain}
    fill, is_whole = said.get("fill_value"), str(said.get("dtype"))[1:2] in "iu"
    if isinstance(fill, str) and (is_whole or not fill):
        with suppress(ValueError):
            said = {**said, "fill_value": int(fill) if fill else None}
    rank = len(_shape(said))
    if rank > 1 and "dimension_separator" not in said and _is_nested(group, folder, rank):
        said = {**said, "dimension_separator": "/"}
    return {} if said == array else {"metadata": said, "assume_metadata": True}


def _is_nested(group: Group, folder: str, rank: int) -> bool:
    """Whether the chunks of an array lie in folders. Of one that is not on this machine only the
    first chunk is asked for, as not all servers list what they have."""
    from .kvstore import local_path

    place = local_path(group.root.spec())
    if place is None:
        return group.read(f"{folder}{'/'.join('0' * rank)}") is not None
    chunks = (each for each in (place / folder).iterdir() if each.name[0].isdigit())
    return next((each.is_dir() for each in chunks), False)


def joined(place: str, name: str) -> str:
    """The path or URL of what lies below another.

    Args:
        place: The other; a query of its URL, such as a signature, stays at the end.
        name: The path below it.

    Returns:
        The path or URL.

    >>> joined("https://host/a.zarr?sig=b", "0")
    'https://host/a.zarr/0?sig=b'
    """
    head, mark, query = place.partition("?") if "://" in place else (place, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def first_level_of(place: str) -> str:
    """The largest array of an OME-Zarr image; else the place itself.

    Raises:
        UsageError: It is a group of several images or arrays; the sentence lists them.
    """
    folder, is_remote = Path(place), "://" in place
    if not (is_remote or folder.is_dir()):
        return place
    group = Group.at(place) if is_remote else Group(_reader(folder), place)
    if "multiscales" in group.shown:
        return joined(place, group.level(0).path)
    if is_remote:  # its groups need not be listed
        return place
    only = group.only_below(folder, place)
    return place if only is None else first_level_of(only)


def check_not_packed(place: str) -> None:
    """Refuse a Zarr array whose numbers stand for others, which a loader does not decode.

    Args:
        place: The path or URL of the array.

    Raises:
        UsageError: It is packed; the sentence names what says so.
    """
    folder = place.removeprefix("file://")
    group = Group.at(place) if "://" in folder else Group(_reader(Path(folder)), place)
    try:
        if array := group.json("zarr.json"):
            kind, said = array["data_type"], None
        else:
            array = {**group.json(".zarray"), "attributes": group.json(".zattrs")}
            kind, said = array["dtype"], array["fill_value"]
        dtype, attributes = np.dtype(kind).newbyteorder("="), dict(array.get("attributes", {}))
        fill = None if said is None else number_of(said, dtype)
    except (KeyError, TypeError, ValueError):
        return  # no array, or one whose reader says what is wrong with it
    if packing_of(attributes, dtype, group.where, fill) is not None:
        by = ", ".join(f"{each} {attributes[each]}" for each in NAMES if each in attributes)
        raise UsageError(
            f"{group.where}: its numbers are packed ({by or f'fill value {fill:g}'}), and a loader "
            "reads them as they are stored: give --raw if that is meant, or store values"
        )


def _reader(folder: Path) -> Read:
    def read(key: str) -> bytes | None:
        return (folder / key).read_bytes() if (folder / key).is_file() else None

    return read


def _shape(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of an array by its metadata; empty for what is none."""
    shape = metadata.get("shape", metadata.get("dimensions"))
    return tuple(shape) if isinstance(shape, list) else ()


def _choices(group: Group) -> tuple[str, list[tuple[str, str]]] | None:
    """What a group of OME is, and the paths in it; None for any other group."""
    ome = group.ome
    if "plate" in ome:
        return "a plate of wells", [(well["path"], "") for well in ome["plate"]["wells"]]
    if "well" in ome:
        return "a well of fields", [(image["path"], "") for image in ome["well"]["images"]]
    if isinstance(ome.get("labels"), list):
        return "a group of label images", [(name, "") for name in ome["labels"]]
    if "bioformats2raw.layout" in ome:
        below = Group(lambda key: group.read(f"OME/{key}"), group.where)
        series = below.ome.get("series") or takewhile(
            lambda name: group.read(f"{name}/.zattrs") or group.read(f"{name}/zarr.json"),
            map(str, range(100)),
        )
        return "a group of images", [(name, "") for name in series]
    return None


def _arrays(group: Group, folder: Path | None) -> tuple[str, list[tuple[str, str]]] | None:
    """The arrays of a group, with their shapes; None for what is no group."""
    is_v3 = group.json("zarr.json").get("node_type") == "group"
    if not is_v3 and not any(map(group.read, (".zgroup", "attributes.json"))):
        return None
    arrays = dict(_below(folder)) or dict(_listed(group))
    return "a group of arrays", [
        (path, in_words(shape))
        for path, shape in sorted(arrays.items()) if len(shape) > 1
    ]  # fmt: skip


def _zipped(group: Group) -> tuple[str, list[tuple[str, str]]] | None:
    """What lies in a zip file, or in a folder of one; None for anything else."""
    if group.root is None or group.root.spec().to_json()["driver"] != "zip":
        return None
    keys = (key.decode() for key in group.root.list().result())
    names = {name for name, mark, _ in (key.partition("/") for key in keys) if mark}
    return ("a zip file of folders", [(name, "") for name in sorted(names)]) if names else None


def _listed(group: Group) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The arrays that a group's own list of metadata has, with their shapes."""
    for key, metadata in (group.json(".zmetadata").get("metadata") or {}).items():
        if key.endswith("/.zarray"):
            yield key.removesuffix("/.zarray"), _shape(metadata)
    v3 = group.json("zarr.json").get("consolidated_metadata") or {}
    for key, metadata in (v3.get("metadata") or {}).items():
        if metadata.get("node_type") == "array":
            yield key, _shape(metadata)


def _below(folder: Path | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The arrays in the folders below a folder, with their shapes. The levels of an image are one,
    by the name of the image."""
    for here, folders, _ in os.walk(folder) if folder else ():
        place = Path(here).relative_to(folder or "")
        group, first = Group(_reader(Path(here)), here), ""
        with suppress(UsageError):
            first = f"{group.level(0).path}/" if "multiscales" in group.shown else ""
        shape = next(filter(None, (_shape(group.json(f"{first}{key}")) for key in _MARKERS)), ())
        if shape:
            yield place.as_posix(), shape
        if shape or len(place.parts) >= _DEPTH:
            folders.clear()


def label_place(path: str) -> tuple[str, str, str] | None:
    """The image that a path is a label of, the folder of its labels, and the name there.

    >>> label_place("brain.ome.zarr/labels/cells")
    ('brain.ome.zarr', 'brain.ome.zarr/labels', 'cells')
    """
    labels, _, name = path.rstrip("/").rpartition("/")
    image, _, folder = labels.rpartition("/")
    return (image, labels, name) if image and folder == "labels" else None


def register_label(path: str, name: str) -> bool:
    """Name a label image in the list of its image, unless it is named there.

    Args:
        path: The label image, which is there.
        name: The flag that messages name.

    Returns:
        False if the path is of no label, or the folder above lies in no image.

    Raises:
        UsageError: The metadata of the image or of its labels cannot be read.
    """
    place = label_place(path)
    if place is None:
        return False
    image, labels, label = place
    if "multiscales" not in Group.at(image, name).ome:
        return False
    group = Group.at(labels, name)
    if Group.at(path, name).read("zarr.json"):
        whole = {"zarr_format": 3, "node_type": "group", **group.json("zarr.json")}
        holds = whole.setdefault("attributes", {}).setdefault("ome", {"version": "0.5"})
        documents = {"zarr.json": whole}
    else:
        holds = group.json(".zattrs")
        documents = {".zgroup": {"zarr_format": 2}, ".zattrs": holds}
    names = holds.setdefault("labels", [])
    if label not in names:
        names.append(label)
        for key, document in documents.items():
            group.root.write(key, json.dumps(document, indent=2).encode()).result()
    return True
