"""CZI files of Zeiss by pylibCZIrw: a scene of tiles, of which a block decodes those it touches.
A level of its pyramid is a scene of its own tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, require
from .frames import Sizes, shown_channel, sizes_of
from .protocols import check_level, chosen_of, in_words
from .sliced import Asked, OpenedArray, Readable

_DTYPES = {
    "Gray8": "uint8", "Gray16": "uint16", "Gray32Float": "float32",
    "Bgr24": "uint8", "Bgr48": "uint16", "Bgr96Float": "float32",
}  # fmt: skip
_AXES = "tzcyx"
_DIMENSIONS = "./Metadata/Information/Image/Dimensions"
_MICROMETERS = 1e6  # in a meter, the unit of a CZI file
_EVEN = 0.01
"""The part of the interval between times by which one may differ."""


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open a scene of a CZI file. What no tile covers is 0."""
    czi = require("pylibCZIrw.czi", "czi")
    keeps = czi.CacheOptions(max_memory_usage=cache_bytes) if cache_bytes else None
    reader = czi.CziReader(str(asked.file), cache_options=keeps)
    rectangles = reader.scenes_bounding_rectangle_no_pyramid
    # A file without scenes is one picture.
    all_scenes = rectangles or {0: reader.total_bounding_rectangle_no_pyramid}
    words = {number: in_words((each.h, each.w)) for number, each in all_scenes.items()}
    number = chosen_of(words, asked.series, "scenes", asked.where)
    scene, rectangle = number if rectangles else None, all_scenes[number]
    tiles, covered = _tiles(reader, scene, rectangle, asked.level)
    if not tiles:
        raise UsageError(f"{asked.where}: holds no tile")
    check_level(asked.level, len(tiles), asked.where)
    by = sorted(tiles)[asked.level]
    array = _TiledScene(reader, scene, rectangle, by, asked.where)
    first = (rectangle.x, rectangle.y, 1, 1)
    reader.read(first, {"T": 0, "Z": 0, "C": 0}, scene)  # an axis that begins elsewhere is an error
    says = ElementTree.fromstring(reader.raw_metadata)
    whole = math.prod(array.shape[:3]) // array.samples * rectangle.w * rectangle.h
    gaps = f"the input's tiles cover at most {100 * covered / whole:.3g} % of it; gaps read as 0"
    return OpenedArray(
        array=array,
        labels=_AXES,
        chunks=(1, 1, array.samples, *map(min, tiles[by], array.shape[3:])),
        sizes=_sizes(says, {"x": rectangle.x, "y": rectangle.y}, by),
        omero=_channels(says),
        bands=array.samples > 1,
        notes=[gaps] if covered < whole else [],
        cache_bytes=cache_bytes,
        again=partial(open_array, asked),
    )


class _TiledScene(Readable):
    """One scene as t z c y x, and the samples of a colour picture as channels."""

    def __init__(self, reader: Any, scene: int | None, rectangle: Any, by: int, where: str) -> None:
        """``by`` is how many voxels of the first level one of this level is long."""
        self._reader, self._scene, self._rectangle, self._by = reader, scene, rectangle, by
        kinds = set(reader.pixel_types.values())
        if len(kinds) > 1 or not kinds <= _DTYPES.keys():
            raise UsageError(f"{where}: its channels are of {', '.join(sorted(kinds))}")
        (kind,) = kinds
        self.samples = 3 if kind.startswith("Bgr") else 1
        self.dtype = np.dtype(_DTYPES[kind])
        # All axes but x and y begin at 0.
        ends = {axis: stop for axis, (_, stop) in reader.total_bounding_box_no_pyramid.items()}
        if others := [axis for axis, n in ends.items() if n > 1 and axis not in "TZCYX"]:
            raise UsageError(f"{where}: has {ends[others[0]]} along {others[0]}, which is not read")
        channels, sides = ends["C"] * self.samples, (rectangle.h // by, rectangle.w // by)
        self._ends = ends
        self.shape = (ends["T"], ends["Z"], channels, *sides)
        self.rank = 2

    def read_frame(
        self, place: tuple[int, ...], inside: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        channels, planes, region = self._planes(place, inside)
        pictures = {
            plane["C"]: self._reader.read(region, plane, self._scene, 1 / self._by)
            for plane in planes
        }
        for number, channel in enumerate(channels):
            c, sample = divmod(channel, self.samples)
            # Stored are blue, green and red.
            out[number] = pictures[c][..., self.samples - 1 - sample]

    def is_absent(self, index: tuple[slice, ...]) -> bool:
        """Whether no tile covers a part."""
        numbers: list[int] = []

        def add(number: int, tile: Any) -> bool:
            numbers.append(number)
            return False

        of_scene = {} if self._scene is None else {"S": self._scene}
        for place in self.places(index):
            _, planes, region = self._planes(place, index[self.rank :])
            for plane in planes:
                # Tiles of one plane may lack its axis.
                stored = {axis: n for axis, n in plane.items() if self._ends[axis] > 1} | of_scene
                self._reader.enumerate_subblocks_subset(
                    add, stored or None, region, only_layer0=True
                )
                if numbers:
                    return False
        return True

    def _planes(
        self, place: tuple[int, ...], inside: tuple[slice, ...]
    ) -> tuple[range, list[dict[str, int]], tuple[int, ...]]:
        """The channels of a part of a frame, the planes of the file that hold them, and the region
        of these as x, y, width and height."""
        channels, rows, columns = (
            range(*part.indices(side)) for part, side in zip(inside, self.shape[2:], strict=True)
        )
        by, x, y = self._by, self._rectangle.x, self._rectangle.y
        region = x + columns.start * by, y + rows.start * by, len(columns) * by, len(rows) * by
        stored = sorted({channel // self.samples for channel in channels})
        return channels, [{"T": place[0], "Z": place[1], "C": c} for c in stored], region


def _tiles(
    reader: Any, scene: int | None, rectangle: Any, level: int
) -> tuple[dict[int, tuple[int, int]], int]:
    """The rows and columns of a tile of each level of a scene, and the number of voxels in tiles of
    the first level. The key of a level is the side of its voxels, in voxels of the first level. For
    ``level`` 0 only the first level is looked at."""
    tiles: dict[int, tuple[int, int]] = {}
    covered = 0

    def add(number: int, tile: Any) -> bool:
        nonlocal covered
        covers, holds = tile.logicalRect, tile.physicalSize
        by = round((covers.w + covers.h) / (holds.w + holds.h))
        tiles.setdefault(by, (holds.h, holds.w))
        covered += covers.w * covers.h * (by == 1)
        return True

    plane = None if scene is None else {"S": scene}
    reader.enumerate_subblocks_subset(add, plane, rectangle, only_layer0=level == 0)
    return tiles, covered


def _channels(says: ElementTree.Element) -> list[dict[str, Any]]:
    """The names of channels, and the colours in which the microscope shows them."""
    channels = says.findall(f"{_DIMENSIONS}/Channels/Channel")
    displayed = says.findall("./Metadata/DisplaySetting/Channels/Channel")
    looks = {each.get("Id"): each for each in displayed}
    # Some have another number there.
    in_place = displayed if len(displayed) == len(channels) else channels
    return [
        shown_channel(each.get("Name") or look.get("Name"), (look.findtext("Color") or "")[-6:])
        for each, at in zip(channels, in_place, strict=True)
        for look in [looks.get(each.get("Id"), at)]
    ]


def _interval(says: ElementTree.Element) -> Any:
    """The seconds from one time to the next: those of its times, if they are evenly spaced, else
    what the file gives."""
    positions = says.find(f"{_DIMENSIONS}/T/Positions")
    if positions is None:
        return None
    steps = np.diff(np.array((positions.findtext("List/Offsets") or "").split(), float))
    if steps.size and np.allclose(steps, steps.mean(), rtol=_EVEN):
        return steps.mean()
    return positions.findtext("Interval/Increment")


def _sizes(says: ElementTree.Element, corner: Mapping[str, int], by: int) -> Sizes:
    """The sizes of voxels. A voxel's centre is that of the ``by`` by ``by`` that it is made of."""
    distances = says.findall("./Metadata/Scaling/Items/Distance")
    meters = {each.get("Id", "").lower(): each.findtext("Value") for each in distances}
    sizes = sizes_of([
        ("t", _interval(says), "second", 0.0),
        *((axis, meters.get(axis), "micrometer", 0.0) for axis in "zyx"),
    ])  # fmt: skip
    for axis in sizes.keys() & {*"zyx"}:
        size, longer = sizes[axis][0] * _MICROMETERS, by if axis in corner else 1
        place = corner.get(axis, 0) + (longer - 1) / 2
        sizes[axis] = size * longer, "micrometer", size * place
    return sizes
