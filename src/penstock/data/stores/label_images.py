"""Label images of OME-Zarr: an output in the folder ``labels`` of an image is one of its labels.

image.ome.zarr/labels/cells      says that it is a label image, and of which image
image.ome.zarr/labels            lists its names, by which viewers find them
"""

from __future__ import annotations

import json
from typing import Any

from .zarr_groups import Group

_OF_VERSION: dict[str, tuple[str, dict[str, Any]]] = {
    "0.4": (".zattrs", {}),
    "0.5": ("zarr.json", {"zarr_format": 3, "node_type": "group"}),
}
"""The file of a group's attributes, and what else it holds."""


def label_place(path: str) -> tuple[str, str, str] | None:
    """The image that a path is a label of, the folder of its labels, and the name there.

    >>> label_place("brain.ome.zarr/labels/cells")
    ('brain.ome.zarr', 'brain.ome.zarr/labels', 'cells')
    """
    labels, _, name = path.rstrip("/").rpartition("/")
    image, _, folder = labels.rpartition("/")
    return (image, labels, name) if image and folder == "labels" else None


def says_label(version: str) -> dict[str, Any]:
    """What a label image says of itself, in the metadata of its group."""
    source = {"source": {"image": "../../"}}
    return {"image-label": {"version": version, **source} if version == "0.4" else source}


def is_labels(path: str, name: str) -> bool:
    """Whether an image is one of labels.

    Args:
        path: The OME-Zarr group, or an array.
        name: The flag that messages name.

    Returns:
        True if its group says so, or if its levels have the most frequent values of those above.

    Raises:
        UsageError: Its metadata cannot be read.
    """
    attributes = Group.at(path, name).ome
    modes = any(each.get("type") == "mode" for each in attributes.get("multiscales", ()))
    return modes or "image-label" in attributes


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
    version = "0.5" if Group.at(path, name).driver == "zarr3" else "0.4"
    key, document = _OF_VERSION[version]
    group = Group.at(labels, name)
    document = {**document, **group.json(key)}
    holds = document
    if version == "0.5":
        holds = document.setdefault("attributes", {}).setdefault("ome", {"version": version})
    names = holds.setdefault("labels", [])
    if label not in names:
        names.append(label)
        if version == "0.4":
            group.root.write(".zgroup", json.dumps({"zarr_format": 2}).encode()).result()
        group.root.write(key, json.dumps(document, indent=2).encode()).result()
    return True
