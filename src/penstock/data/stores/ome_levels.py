"""The levels of an OME-Zarr image, by its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ...base import UsageError, parsed_json
from .protocols import AXES, axis_letter, physical_size


def array_below(path: str, where: str) -> str:
    """The path of an array as the metadata of a group has it.

    Raises `UsageError` if it leads out of the group: a file of a stranger must not choose what is
    read.
    """
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if ".." in parts or parts[:1] == ("/",) or ":" in path or "|" in path:
        raise UsageError(f"{where}: its metadata names the array {path!r}, which is not below it")
    return path


def described(attributes: Mapping[str, Any], level: int, where: str) -> dict[str, Any]:
    """Path, axis labels, scale, translation, units and version of one level."""
    multiscale = attributes["multiscales"][0]
    datasets = multiscale["datasets"]
    if not 0 <= level < len(datasets):
        raise UsageError(f"{where}: level {level} does not exist; 0 to {len(datasets) - 1} do")
    # Axes were texts in 0.3 and not written down before that.
    axes = [{"name": a} if isinstance(a, str) else a for a in multiscale.get("axes", AXES)]
    labels = [axis["name"] for axis in axes]
    return {
        "path": array_below(datasets[level]["path"], where),
        "labels": labels,
        **_transform(datasets[level], labels, multiscale),
        "units": {axis_letter(axis["name"]): axis.get("unit") for axis in axes},
        "ome_version": attributes.get("version") or multiscale.get("version", "0.4"),
    }


def _transform(
    dataset: Mapping[str, Any], labels: Sequence[str], multiscale: Mapping[str, Any]
) -> dict[str, dict[str, float] | None]:
    """The size of a voxel and the position of the first one, by axis.

    Transformations apply in order, the dataset's before those of all the datasets; so a later scale
    scales an earlier translation.
    """
    transformations = [
        transformation
        for holder in (dataset, multiscale)
        for transformation in holder.get("coordinateTransformations", ())
    ]
    sizes, position = [1.0] * len(labels), [0.0] * len(labels)
    for transformation in transformations:
        kind = transformation["type"]
        for axis in range(len(labels)):
            if kind == "scale":
                factor = physical_size(transformation["scale"][axis]) or 1.0
                sizes[axis] *= factor
                position[axis] *= factor
            elif kind == "translation":
                position[axis] += float(transformation["translation"][axis])
    letters = [axis_letter(label) for label in labels]
    has_scale = any(transformation["type"] == "scale" for transformation in transformations)
    return {
        "scale": dict(zip(letters, sizes, strict=True)) if has_scale else None,
        "translation": dict(zip(letters, position, strict=True)),
    }


def first_level_of(place: str) -> str:
    """The largest array of an OME-Zarr image in a folder of this machine; else the place itself."""
    # To read a pipe would wait for ever for its other end.
    for marker in filter(lambda name: Path(place, name).is_file(), (".zattrs", "zarr.json")):
        try:
            document = parsed_json(Path(place, marker).read_text())
            attributes = document if marker == ".zattrs" else document["attributes"]
            image = attributes.get("ome", attributes)["multiscales"][0]
            return f"{place}/{array_below(image['datasets'][0]['path'], place)}"
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            continue  # no image by this file
    return place
