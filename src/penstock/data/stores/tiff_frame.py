"""What the metadata of a TIFF file say: series, axes, sizes, channels, and what numbers stand for.

OME's XML, ImageJ's description and the tags of GeoTIFF, LSM, STK and SVS are read. Axis letters are
those of tifffile: ``S`` (samples, as in RGB) counts as c, and ``Q`` or ``I`` (a stack of unknown
meaning) as z where there is no other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from xml.etree import ElementTree

import numpy as np

from .cf_packing import Packing, packing_of, same_in_all
from .frames import Sizes, said_of, shown_channel, sizes_of, unit_name
from .ome_levels import array_below
from .protocols import check_dtype, chosen_of, in_words
from .raster import ALPHA_IS_READ, AS_STORED, MASK_STAYS, POINTS_STAY, TURN_STAYS, UNITS_STAY

_REDUCED_OR_MASK = 0b101
"""Bits of NewSubfileType: a page that is a smaller copy of another, or its mask."""
_BESIDE = (("svs", "Thumbnail"), ("svs", "Label"), ("svs", "Macro"))
"""The pictures beside the one of a slide, by tifffile's kinds and names."""
_CODEC = {"NONE": "", "ADOBE_DEFLATE": "deflate", "PACKBITS": "packbits"}
PLAIN = ("shaped", "generic", "uniform")
_INSTRUMENTS = ("lsm", "stk", "svs")
_READ_KINDS = ("ome", "imagej", *_INSTRUMENTS, *PLAIN)
"""Kinds of tifffile's series whose metadata is read here, or that have none."""
_RESOLUTION_UNIT = 296
_NODATA = 42113
_ORIENTATION = 274
_TIE_POINTS, _RPCS = 33922, 50844
_METRE = 9001
"""The code of the metre among the linear units of EPSG."""
PLACED = (33550, 33922, 34264, 34735, _NODATA)
"""Tags that only a GeoTIFF has: pixel scale, tie point, matrix, keys of the CRS, no-data."""


def check_files(file: Any, where: str) -> None:
    """Refuse an OME-TIFF of several files of which one is not below its folder."""
    root = _parsed(file.ome_metadata)
    if root is None:
        return
    for uuid in root.iter():
        if (named := uuid.get("FileName")) is not None and uuid.text != root.get("UUID"):
            array_below(named, where)


def chosen_series(file: Any, said: int | None, where: str) -> int:
    """The number of the series to read: the only one of pictures, or the one that is asked for."""
    words = {
        number: " ".join(f"{each.name} {in_words(each.shape)}".split())
        for number, each in enumerate(file.series)
    }
    pictures = {
        number: words[number] for number, each in enumerate(file.series)
        if not int(each.keyframe.subfiletype) & _REDUCED_OR_MASK
        and (each.kind, each.name) not in _BESIDE
    }  # fmt: skip
    return chosen_of((said is None and pictures) or words, said, "series", where)


def is_written_by_page(all_series: Sequence[Any]) -> bool:
    """Whether the series are pages of one image that a program wrote one by one with tifffile, as
    imageio does: each is a page, and all are alike."""
    kinds = {(each.kind, each.shape, each.dtype, len(each.pages)) for each in all_series}
    shown = {(kind, pages) for kind, _, _, pages in kinds}
    return len(all_series) > 1 and len(kinds) == 1 and shown == {("shaped", 1)}


def axes_of(series: Any, said: str | None) -> tuple[str, list[str]]:
    """The axes of a series in stored order, and sentences on how they were understood. ``said`` are
    those that the user gives."""
    letters = series.axes.replace("S", "C")
    unknown = [letter for letter in "QI" if letter in letters and "Z" not in letters]
    for letter in unknown:
        letters = letters.replace(letter, "Z")
    taken = (
        "the input does not say what its pages are, and they are taken for z; --axes, such as "
        f"--axes {letters.lower().replace('z', 't')}, says otherwise"
    )
    return letters, [taken] if unknown and said is None else []


def pixels_of(file: Any, number: int) -> ElementTree.Element | None:
    """OME's metadata of a series; None if there is none or it is not XML."""
    root = _parsed(file.ome_metadata)
    images = [] if root is None else root.findall("./{*}Image/{*}Pixels")
    # An image of which the file holds no page is no series.
    return images[number] if len(images) == len(file.series) else None


def _parsed(text: str | None) -> ElementTree.Element | None:
    """The root of an XML text; None if it is none."""
    try:
        return ElementTree.fromstring(text or "")
    except ElementTree.ParseError:
        return None


def packing_in(file: Any, series: Any, where: str) -> Packing | None:
    """What the tags of a GeoTIFF say of its numbers: no-data, scale and offset."""
    page, attributes = series.keyframe, dict[str, Any]()
    bands, samples = _bands(file), range(page.samplesperpixel)
    if (nodata := _nodata(page)) is not None:
        attributes["_FillValue"] = nodata
    for role, name, default in (("scale", "scale_factor", "1"), ("offset", "add_offset", "0")):
        values = [bands.get(i, {}).get(role, default) for i in samples]
        attributes[name] = same_in_all(values, role, where)
    return packing_of(attributes, check_dtype(series.dtype, where), where)


def _nodata(page: Any) -> str | None:
    tag = page.tags.get(_NODATA)
    return None if tag is None else str(tag.value).strip(" \0")


def left_out(page: Any, dtype: np.dtype[Any]) -> Any:
    """The value of the pixels that a file leaves out: no data, as GDAL has it, else 0."""
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            return np.float64(_nodata(page) or 0).astype(dtype)
    except ValueError:  # no number
        return dtype.type(0)


def frame_of(file: Any, number: int, level: int, labels: str) -> dict[str, Any]:
    """The members of `OpenedArray` that say what the voxels of a level of a series are."""
    series = file.series[number]
    pixels, imagej = pixels_of(file, number), file.imagej_metadata or {}
    if pixels is not None:
        sizes, channels = _ome_sizes(pixels), _ome_channels(pixels)
    elif imagej:
        sizes, channels = _imagej_sizes(series.keyframe, imagej), _imagej_channels(imagej)
    elif series.kind in _INSTRUMENTS:
        sizes, channels = _instrument_sizes(file, series.keyframe), _lsm_channels(file)
    else:
        bands, samples = _bands(file), range(series.keyframe.samplesperpixel)
        sizes = _ground_sizes(series.keyframe)
        channels = [shown_channel(bands.get(i, {}).get("description")) for i in samples]
    # A coarser level of a pyramid spans the same space in fewer voxels: centres lie further in.
    sides = zip(labels.lower(), series.shape, series.levels[level].shape, strict=True)
    times = {axis: whole / side for axis, whole, side in sides}
    codec = getattr(series.keyframe.compression, "name", "NONE")  # ImageJ leaves it out
    return {
        "sizes": {
            axis: (size * by, unit, ((by - 1) / 2 - first) * size)
            for axis, (size, unit, first) in sizes.items()
            for by in [times.get(axis, 1.0)]
        },
        "omero": channels,
        "bands": "S" in series.axes,
        "georeferenced": number == 0 and any(tag in series.keyframe.tags for tag in PLACED),
        "codec": _CODEC.get(codec, codec.lower()),
    }


def _ome_sizes(pixels: ElementTree.Element) -> Sizes:
    keys = {"t": ("TimeIncrement", "s")}
    keys |= {axis: (f"PhysicalSize{axis.upper()}", "µm") for axis in "zyx"}
    return sizes_of(
        (axis, pixels.get(key), unit_name(pixels.get(f"{key}Unit", unit)), 0.0)
        for axis, (key, unit) in keys.items()
    )


def _ome_channels(pixels: ElementTree.Element) -> list[dict[str, Any]]:
    channels = pixels.findall("./{*}Channel")
    return [shown_channel(each.get("Name"), _rgb(each.get("Color"))) for each in channels]


def _rgb(said: str | None) -> str | None:
    """A colour by its signed number of red, green, blue and alpha."""
    with suppress(ValueError):
        return f"{(int(said or '') >> 8) & 0xFFFFFF:06X}"
    return None


def _ground_sizes(page: Any) -> Sizes:
    """The size of a pixel on the ground, if the file is a GeoTIFF."""
    said = page.geotiff_tags or {}
    unit = "meter" if said.get("ProjLinearUnitsGeoKey") == _METRE else None
    rows = np.asarray(said.get("ModelTransformation", np.zeros((2, 2))))[:2, :2]
    turned = rows[0, 1] or rows[1, 0]  # of a raster with south above
    along = said.get("ModelPixelScale") or (() if turned else np.abs(np.diag(rows)))
    sizes = zip("xy", along, strict=False)
    return sizes_of((axis, abs(size), unit, 0.0) for axis, size in sizes if size)  # west at right


def _imagej_sizes(page: Any, imagej: Mapping[str, Any]) -> Sizes:
    resolution = (page.tags.valueof(name) for name in ("XResolution", "YResolution"))
    along_x, along_y = (said[1] / said[0] if said and said[0] else None for said in resolution)
    each = {"x": along_x, "y": along_y, "z": imagej.get("spacing")}
    unit = _imagej_unit(imagej.get("unit"))
    units = {axis: _imagej_unit(imagej.get(f"{axis}unit")) or unit for axis in each}
    seconds = _imagej_unit(imagej.get("tunit", "sec"))
    return sizes_of([
        ("t", imagej.get("finterval"), seconds, 0.0),
        *(
            (axis, size, units[axis], float(imagej.get(f"{axis}origin") or 0))
            for axis, size in each.items()
            if units[axis] is not None
        ),
    ])  # fmt: skip


def _imagej_unit(said: Any) -> str | None:
    """A unit of ImageJ, which writes the micro sign as an escape."""
    return unit_name(str(said or "").replace("\\u00B5", "µ").replace("\\u00b5", "µ"))


def _imagej_channels(imagej: Mapping[str, Any]) -> list[dict[str, Any]]:
    count = int(imagej.get("channels", 1))
    labels, tables = imagej.get("Labels") or (), imagej.get("LUTs") or ()
    ends = list(imagej.get("Ranges") or ())
    if not ends and count == 1 and {"min", "max"} <= imagej.keys():
        ends = [imagej["min"], imagej["max"]]
    windows = [ends[2 * i : 2 * i + 2] for i in range(count)] if len(ends) == 2 * count else []
    return [
        shown_channel(
            labels[i] if len(labels) == count else None,  # else they are of pages
            bytes(np.asarray(tables[i])[:, -1]).hex() if len(tables) == count else None,
            dict(zip(("start", "end"), windows[i], strict=True)) if windows else None,
        )
        for i in range(count)
    ]


def _instrument_sizes(file: Any, page: Any) -> Sizes:
    """The sizes that LSM of Zeiss, STK of MetaMorph and SVS of Aperio say."""
    said: list[tuple[str, Any, str | None, float]]
    if lsm := file.lsm_metadata:
        said = [(axis, lsm[f"VoxelSize{axis.upper()}"] * 1e6, "micrometer", 0.0) for axis in "zyx"]
        said.append(("t", lsm.get("TimeIntervall"), "second", 0.0))
    elif stk := file.stk_metadata:
        unit = unit_name(stk.get("CalibrationUnits", ""))
        each = {axis: stk.get(f"{axis.upper()}Calibration") for axis in "yx"}
        each["z"] = np.median(stk.get("ZDistance", 0.0))
        said = [(axis, unit and size, unit, 0.0) for axis, size in each.items()]
    else:
        size = re.search(r"\bMPP = ([\d.]+)", page.description)
        said = [(axis, size and size[1], "micrometer", 0.0) for axis in "yx"]
    return sizes_of(said)


def _lsm_channels(file: Any) -> list[dict[str, Any]]:
    colours = (file.lsm_metadata or {}).get("ChannelColors", {})
    each = zip(colours.get("ColorNames", ()), colours.get("Colors", ()), strict=False)
    return [shown_channel(name, bytes(colour[:3]).hex()) for name, colour in each]


def _bands(file: Any) -> dict[int, dict[str, str]]:
    """The items of GDAL's metadata that have a role, by band and role."""
    bands: dict[int, dict[str, str]] = {}
    root = _parsed(file.gdal_metadata)
    for item in () if root is None else root.iter("Item"):
        role, band = item.get("role"), item.get("sample", "")
        if role and band.isdecimal():
            bands.setdefault(int(band), {})[role] = item.text or ""
    return bands


def lost(file: Any, series: Any) -> list[str]:
    """Sentences on what the file says and no output gets."""
    page, points = series.keyframe, series.keyframe.tags.get(_TIE_POINTS)
    shown, extra = getattr(page.photometric, "name", ""), page.extrasamples
    units = (roles.get("unittype", "") for roles in _bands(file).values())
    said = ", ".join(dict.fromkeys(filter(None, units)))
    by_length = series.kind in PLAIN and page.tags.valueof(_RESOLUTION_UNIT, 1) in (2, 3)
    return said_of({
        MASK_STAYS: any(int(each.keyframe.subfiletype) & 0b100 for each in file.series),
        # One point is a corner.
        POINTS_STAY: _RPCS in page.tags or (points is not None and points.count > 6),
        ALPHA_IS_READ: any(each.name in ("ASSOCALPHA", "UNASSALPHA") for each in extra),
        UNITS_STAY.format(said): said,
        TURN_STAYS: page.tags.valueof(_ORIENTATION, 1) > 1,
        AS_STORED.format(shown): shown in ("MINISWHITE", "PALETTE"),
        "the input's resolution by inch or centimetre is not taken for the size of voxels":
            by_length,
        "the input's OME metadata is no XML, or not of its images, and goes no further":
            file.ome_metadata and pixels_of(file, 0) is None,
        f"the input is a TIFF of kind {series.kind}, whose sizes and channels are not read":
            series.kind not in _READ_KINDS,
    })  # fmt: skip
