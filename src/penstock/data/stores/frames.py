"""The frame of an array: its axes by name, the place of its voxels in the world, its channels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base import UsageError, plural
from .protocols import AXES

_NAMES = {
    "t": "time times timepoint timepoints date datetime valid_time month frame frames",
    "c": "channel channels band bands wavelength",
    "z": "depth level levels lev plev height altitude pressure pressure_level isobaricinhpa slice "
    "plane",
    "y": "lat latitude northing row rows rlat yc south_north projection_y_coordinate",
    "x": "lon long longitude easting col cols column columns rlon xc west_east "
    "projection_x_coordinate",
}
"""The names that the field gives to axes, in lower case."""
_LETTERS = {name: letter for letter, names in _NAMES.items() for name in names.split()}
_UNITS = {
    "pm": "picometer",
    "Å": "angstrom",
    "nm": "nanometer",
    "micron": "micrometer",
    "microns": "micrometer",
    "um": "micrometer",
    "µm": "micrometer",  # the micro sign, U+00B5
    "μm": "micrometer",  # the Greek letter, U+03BC
    "mm": "millimeter",
    "cm": "centimeter",
    "m": "meter",
    "metre": "meter",
    "km": "kilometer",
    "ms": "millisecond",
    "s": "second",
    "sec": "second",
    "min": "minute",
    "h": "hour",
    # A distance in these says nothing of the world.
    **dict.fromkeys(("pixel", "pixels", "voxel", "voxels", "reference frame"), ""),
}
METERS = {
    "picometer": 1e-12, "angstrom": 1e-10, "nanometer": 1e-9, "micrometer": 1e-6,
    "millimeter": 1e-3, "centimeter": 1e-2, "meter": 1.0, "kilometer": 1e3,
}  # fmt: skip
"""The metres of each unit of length."""
_COLORS = ("FF00FF", "00FF00", "00FFFF", "FFFF00", "FF0000", "0000FF")


@dataclass(eq=False, repr=False, kw_only=True)
class Described:
    """What an array says of itself, besides the place of its voxels."""

    omero: Sequence[Mapping[str, Any]] = ()
    """Names and colours of channels: ``label``, ``color`` (RRGGBB) and ``window`` (``start``,
    ``end``, and perhaps ``min`` and ``max``) of each. Empty where nothing is known."""
    notes: Sequence[str] = ()
    """Sentences on how the metadata were understood, and on what of them goes no further."""
    codec: str = ""
    """The encoding of chunks in a word or two; empty where they are plain, or it is unknown."""
    bands: bool = False
    """True if channels are samples of one picture, such as the bands of a raster."""
    georeferenced: bool = False
    """True for a raster with a CRS, a transform or no-data, which `georeference_of` reads."""
    holds_labels: bool = False
    """True for an array that says that its values are labels, as only OME-Zarr does."""
    affine: Sequence[Sequence[float]] | None = None
    """The matrix from a voxel x y z to the world, where scale and translation cannot say it: axes
    are turned or flipped. None elsewhere."""


@dataclass(eq=False, repr=False, kw_only=True)
class Framed(Described):
    """What the sources of ours say of their frame; these three are those of `Source`."""

    scale: tuple[float, ...] | None = None
    units: tuple[str | None, ...] = (None,) * 5
    translation: tuple[float, ...] = (0.0,) * 5


def shown_channel(label: Any = None, color: Any = None, window: Any = None) -> dict[str, Any]:
    """An entry of ``omero``. It gets those members whose value is of the right kind."""
    shown: dict[str, Any] = {}
    if isinstance(label, str) and label.strip():
        shown["label"] = label
    if isinstance(color, str) and re.fullmatch("[0-9A-Fa-f]{6}", color):
        shown["color"] = color.upper()
    if isinstance(window, Mapping) and {"start", "end"} <= window.keys():
        ends = {key: window[key] for key in ("min", "max", "start", "end") if key in window}
        if all(isinstance(end, int | float) and math.isfinite(end) for end in ends.values()):
            shown["window"] = ends
    return shown


def shown_channels(
    channels: Sequence[Mapping[str, Any]], dtype: np.dtype[Any]
) -> dict[str, list[dict[str, Any]]]:
    """The member ``omero`` of a group.

    Args:
        channels: What is known of each, as `Framed.omero`.
        dtype: That of the image.

    Returns:
        The member; a colour that is not known is white where there is one channel, and else one of
        six; a window that is not known is the range of the dtype, 0 to 1 for floats.
    """
    held = np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = (int(held.min), int(held.max)) if held else (0, 1)
    shown = []
    for number, each in enumerate(channels):
        window = {"start": low, "end": high, **each.get("window", {})}
        ends = {"min": min(low, window["start"]), "max": max(high, window["end"])}
        color = _COLORS[number % len(_COLORS)] if len(channels) > 1 else "FFFFFF"
        shown.append({"color": color, "active": True, **each, "window": ends | window})
    return {"channels": shown}


def name_axes(labels: Sequence[str] | None, rank: int, where: str, hint: str = "") -> str:
    """The axes of an array, one letter each in stored order; by rank where it has no labels.

    ``hint`` ends a refusal of the labels.

    >>> name_axes(None, 3, "here"), name_axes(["lon", "Lat", "channel"], 3, "here")
    ('zyx', 'xyc')
    """
    if labels is not None and len(labels) != rank:
        raise UsageError(f"{where}: {plural(rank, 'dimension')} but axes {list(labels)}{hint}")
    # By these names xarray says that it knows none.
    if labels is None or list(labels) == [f"dim_{i}" for i in range(rank)]:
        if not 2 <= rank <= len(AXES):
            raise UsageError(f"{where}: {plural(rank, 'dimension')}; 2 to 5 can be read")
        return AXES[-rank:]
    letters = [axis_letter(label) for label in labels]
    if any(letter not in list(AXES) for letter in letters) or len(set(letters)) < len(letters):
        raise UsageError(
            f"{where}: axes {list(labels)}; each must be one of {', '.join(AXES)} and appear "
            f"once{hint}"
        )
    if not {"y", "x"} <= set(letters):
        raise UsageError(f"{where}: axes {list(labels)} lack y or x{hint}")
    return "".join(letters)


def source_axes(
    said: str | None, labels: Sequence[str] | None, rank: int, where: str
) -> tuple[str, list[str]]:
    """The axes of an input, as `name_axes`, and sentences on what they were taken for.

    ``said`` are the letters that the user gives, whatever ``labels`` the input has.
    """
    if said is not None:
        return name_axes(list(said), rank, f"{where} with --axes {said}"), []
    axes = name_axes(labels, rank, where, "; --axes, such as --axes tyx, says what they are")
    named = [{"time": "t", "channel": "c"}.get(each.lower(), each.lower()) for each in labels or ()]
    if not labels or named == list(axes) or named[0] == "dim_0":
        return axes, []
    taken = f"the input's dimensions {', '.join(labels)} are taken for {', '.join(axes)}"
    return axes, [f"{taken}; --axes says otherwise"]


def axis_letter(label: str) -> str:
    """``t``, ``c``, ``z``, ``y`` or ``x`` for the name of such an axis, else the name."""
    return _LETTERS.get(label.lower(), label.lower())


def to_tczyx(values: Sequence[Any], axes: str, default: Any) -> tuple[Any, ...]:
    """Values along ``axes`` in the order t c z y x, with ``default`` where there is no such axis.

    >>> to_tczyx([7, 8], "xy", 1)
    (1, 1, 1, 8, 7)
    """
    return tuple(values[axes.index(axis)] if axis in axes else default for axis in AXES)


def canonical(axes: str) -> str:
    """The same axes in the order t c z y x."""
    return "".join(axis for axis in AXES if axis in axes)


def to_five(array: Any, axes: str) -> Any:
    """A view of ``array`` (numpy or TensorStore) along t c z y x; new axes have length 1."""
    ordered = array.transpose([axes.index(axis) for axis in canonical(axes)])
    return ordered[tuple(slice(None) if axis in axes else None for axis in AXES)]


def physical_size(value: Any) -> float | None:
    """The size of a voxel by its metadata; None where it is unknown. Other programs write an
    unknown size as 0, as an empty text or as a number that is not finite.

    >>> physical_size("0.5"), physical_size(""), physical_size(float("nan"))
    (0.5, None, None)
    """
    try:
        size = float(value)
    except (TypeError, ValueError):
        return None
    return size if size and math.isfinite(size) else None


Sizes = Mapping[str, tuple[float, str | None, float]]
"""The size of a voxel, its unit, and the position of the first one, by axis."""


def sizes_of(said: Iterable[tuple[str, Any, str | None, float]]) -> dict[str, Any]:
    """The sizes that a file gives, without those that it leaves unknown.

    Args:
        said: An axis, the size of a voxel along it as it stands in the file, its unit, and the
            position of the first one.

    Returns:
        A mapping as `Sizes` is.
    """
    read = ((axis, physical_size(value), unit, place) for axis, value, unit, place in said)
    return {axis: (size, unit, place) for axis, size, unit, place in read if size is not None}


def spaced_sizes(
    coordinates: Iterable[tuple[str, Any, Mapping[str, Any]]],
) -> tuple[dict[str, Any], list[str]]:
    """The sizes of the axes whose coordinates lie evenly, in a unit of length, as plain numbers.

    Args:
        coordinates: The name of an axis, its coordinates, and their attributes.

    Returns:
        A mapping as `Sizes` is, and a sentence on the axes that have other coordinates.
    """
    said, others = [], []
    for name, places, attributes in coordinates:
        unit = unit_name(str(attributes.get("units", "")))
        packed = attributes.keys() & {"scale_factor", "add_offset"}
        if unit in METERS and not packed and len(places.shape) == 1 and places.shape[0] > 1:
            each = np.asarray(places[:])
            steps = np.diff(each.astype(float))
            rounded = np.abs(each).max() * np.finfo(each.dtype).eps if each.dtype.kind == "f" else 0
            if np.allclose(steps, steps.mean(), rtol=1e-3, atol=2 * rounded):
                said.append((axis_letter(name), steps.mean(), unit, float(each[0])))
                continue
        others.append(name)
    names = ", ".join(others)
    lost = (
        f"the input's coordinates along {names} are not evenly spaced lengths: they go no further"
    )
    return sizes_of(said), [lost] * bool(others)


def sized_axes(
    sizes: Sizes, axes: str, labels: Sequence[str]
) -> tuple[list[tuple[float, str | None, float]], list[str]]:
    """Size, unit and place of each of t c z y x, and sentences on axes that run backwards.

    Args:
        sizes: What is known of them.
        axes: The letters of the stored axes. An axis of space that the user calls another one keeps
            its size.
        labels: What the file calls these.
    """
    called = dict(zip(axes, map(axis_letter, labels), strict=False))
    sized, notes = [], []
    for axis in AXES:
        stored = called.get(axis, axis)
        said = stored if {stored, axis} <= set("zyx") else axis
        size, unit, place = sizes.get(said, (1.0, None, 0.0))
        if size < 0:
            notes.append(f"the input runs backwards along {axis}, and only its size goes further")
        sized.append((abs(size), unit, place if size > 0 else 0.0))
    return sized, notes


def said_of(sentences: Mapping[str, Any]) -> list[str]:
    """The sentences whose value is true."""
    return [sentence for sentence, is_so in sentences.items() if is_so]


def unit_name(symbol: str) -> str | None:
    """A unit in full, as OME-Zarr writes it; None for the empty symbol and for pixels.

    >>> unit_name("um"), unit_name("micrometer")
    ('micrometer', 'micrometer')
    """
    return _UNITS.get(symbol.strip(), symbol.strip()) or None
