"""The levels of an OME-Zarr image, by its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from ...base import UsageError, plural
from .frames import axis_letter, physical_size, shown_channel, to_tczyx, unit_name
from .protocols import AXES, check_level, chosen_of


def array_below(path: Any, where: str) -> str:
    """The path of an array, a group or a file as the metadata above it have it.

    Raises `UsageError` if it leads out of the group: a file of a stranger must not choose what is
    read.
    """
    if not isinstance(path, str):
        raise UsageError(f"{where}: its metadata names {path!r}, which is no path")
    parts = PurePosixPath(unquote(path).replace("\\", "/")).parts
    if ".." in parts or parts[:1] == ("/",) or set(path) & set(":|?#\0"):
        raise UsageError(f"{where}: its metadata names {path!r}, which is not below it")
    return path


@dataclass(frozen=True, slots=True)
class Level:
    """One level of an image. What goes by axis is in the order of the stored axes."""

    path: str
    labels: tuple[str, ...]
    """The names of the axes; ``t`` or ``c`` for one whose type says so."""
    scale: tuple[float, ...] | None
    """The size of a voxel."""
    translation: tuple[float, ...]
    """The position of the first voxel."""
    units: tuple[str | None, ...]
    version: str
    omero: tuple[Mapping[str, Any], ...]
    """See `Framed.omero`."""
    holds_labels: bool

    def frame(self, axes: str, num_channels: int) -> dict[str, Any]:
        """The members of `Framed` for the array, whose stored axes have these letters."""
        fits = len(self.omero) in (0, num_channels)
        note = (
            f"its omero metadata has {plural(len(self.omero), 'channel')} and the array has "
            f"{num_channels}, so names and colours of channels go no further"
        )
        return {
            "scale": self.scale and to_tczyx(self.scale, axes, 1.0),
            "translation": to_tczyx(self.translation, axes, 0.0),
            "units": to_tczyx(self.units, axes, None),
            "omero": self.omero if fits else (),
            "holds_labels": self.holds_labels,
            "notes": () if fits else (note,),
        }


def image_of(attributes: Mapping[str, Any], series: int | None, where: str) -> Mapping[str, Any]:
    """The image of a group, as its ``multiscales`` describe it: the only one, or that of
    ``series``."""
    if "multiscales" not in attributes:
        raise UsageError(f"{where}: is no OME-Zarr image; penstock convert IN OUT makes a new one")
    images: Sequence[Mapping[str, Any]] = attributes["multiscales"]
    names = {number: str(image.get("name", "")) for number, image in enumerate(images)}
    return images[chosen_of(names, series, "images", where)]


def described(
    attributes: Mapping[str, Any], level: int, where: str, series: int | None = None
) -> Level:
    """One level of an image, by the attributes of its group."""
    multiscale = image_of(attributes, series, where)
    datasets = multiscale["datasets"]
    check_level(level, len(datasets), where)
    if "coordinateSystems" in multiscale:
        raise UsageError(f"{where}: has coordinate systems, as OME-Zarr 0.6; 0.1 to 0.5 are read")
    # Axes were texts in 0.3 and not written down before that.
    axes = [{"name": a} if isinstance(a, str) else a for a in multiscale.get("axes", AXES)]
    omero = attributes.get("omero")
    channels = omero.get("channels") if isinstance(omero, Mapping) else None
    return Level(
        path=array_below(datasets[level]["path"], where),
        labels=tuple(map(_label, axes)),
        **transform_of(datasets[level], len(axes), multiscale, where),
        units=tuple(unit_name(axis.get("unit") or "") for axis in axes),
        version=str(attributes.get("version") or multiscale.get("version", "0.4")),
        omero=tuple(
            shown_channel(each.get("label"), each.get("color"), each.get("window"))
            for each in (channels if isinstance(channels, list) else ())
            if isinstance(each, Mapping)
        ),
        holds_labels=holds_labels(attributes),
    )


def holds_labels(attributes: Mapping[str, Any]) -> bool:
    """Whether a group is one of labels: it says so, or its levels have the most frequent values of
    those above."""
    modes = any(each.get("type") == "mode" for each in attributes.get("multiscales", ()))
    return modes or "image-label" in attributes


def image_of_n5(says: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What OME-Zarr would say of a group of N5 with the levels ``s0``, ``s1`` and further of one
    image, as N5-viewer, BigDataViewer, Paintera and COSEM write them.

    Args:
        says: The attributes of the group.
        levels: The attributes of each level.
    """
    first = levels[0]
    whole = {**first, **says}
    axes = whole.get("axes") or "xyzct"[: len(first["dimensions"])]
    said = whole.get("pixelResolution") or whole.get("resolution") or ()
    sizes = said["dimensions"] if isinstance(said, Mapping) else said
    units = [said.get("unit")] * len(sizes) if isinstance(said, Mapping) else whole.get("units", ())
    datasets = []
    for number, level in enumerate(levels):
        halved = zip(first["dimensions"], level["dimensions"], strict=True)
        factors = level.get("downsamplingFactors") or [round(all_ / few) for all_, few in halved]
        scale = [size * float(factor) for size, factor in zip(sizes, factors, strict=False)]
        # A voxel lies at the middle of those that it was made of.
        place = [size * (factor - 1.0) / 2 for size, factor in zip(sizes, factors, strict=False)]
        if by_axis := level.get("transform"):  # of COSEM, in the order of its own axes
            turned = [by_axis["axes"].index(axis) for axis in axes]
            scale, place = ([by_axis[key][i] for i in turned] for key in ("scale", "translate"))
            units = [by_axis["units"][i] for i in turned]
        rest = len(axes) - len(scale)
        moves = transformations([*scale, *[1.0] * rest], [*place, *[0.0] * rest]) if scale else ()
        datasets.append({"path": f"s{number}", "coordinateTransformations": moves})
    named = [
        {"name": axis, "unit": unit}
        for axis, unit in zip_longest(axes, units[: len(axes)], fillvalue="")
    ]
    return {"multiscales": [{"version": "n5", "axes": named, "datasets": datasets}]}


def transformations(scale: Sequence[float], translation: Sequence[float]) -> list[dict[str, Any]]:
    """The transformations of a dataset by the size of its voxels and the place of the first one."""
    moves: list[dict[str, Any]] = [{"type": "scale", "scale": scale}]
    if any(translation):
        moves.append({"type": "translation", "translation": translation})
    return moves


def _label(axis: Mapping[str, Any]) -> str:
    name, kind = str(axis["name"]), axis.get("type")
    if axis_letter(name) not in tuple(AXES) and kind in ("time", "channel"):
        return str(kind)
    return name


def transform_of(
    dataset: Mapping[str, Any], rank: int, multiscale: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The size of a voxel and the position of the first one.

    Transformations apply in order, the dataset's before those of all the datasets; so a later scale
    scales an earlier translation.
    """
    transformations = [
        transformation
        for holder in (dataset, multiscale)
        for transformation in holder.get("coordinateTransformations", ())
    ]
    sizes, position = [1.0] * rank, [0.0] * rank
    for transformation in transformations:
        kind = transformation["type"]
        if kind not in ("identity", "scale", "translation") or "path" in transformation:
            raise UsageError(
                f"{where}: its metadata places it by a transformation of type {kind}"
                f"{' in a file' * ('path' in transformation)}; only scale and translation are read"
            )
        numbers = transformation.get(kind, [1.0] * rank)
        if len(numbers) != rank:
            raise UsageError(
                f"{where}: has a {kind} of {plural(len(numbers), 'number')} for "
                f"{plural(rank, 'axis')}"
            )
        for axis, number in enumerate(numbers):
            if kind == "scale":
                factor = physical_size(number) or 1.0
                sizes[axis] *= factor
                position[axis] *= factor
            elif kind == "translation":
                position[axis] += float(number)
    has_scale = any(transformation["type"] == "scale" for transformation in transformations)
    return {
        "scale": tuple(sizes) if has_scale else None,
        "translation": tuple(position),
    }
