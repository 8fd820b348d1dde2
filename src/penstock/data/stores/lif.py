"""LIF files of Leica by liffile: images that lie in the file one after another, each mapped."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from typing import Any

from numpy.typing import NDArray

from ...base import UsageError, require
from .frames import Sizes, shown_channel, sizes_of, unit_name
from .protocols import chosen_of, in_words, listed
from .sliced import Asked, FrameStack, OpenedArray

_DIMENSIONS = {"1": "x", "2": "y", "3": "z", "4": "t"}
"""The axis of each dimension that has a size, by its number in the file."""
_COLOURS = {
    "red": "FF0000", "green": "00FF00", "blue": "0000FF", "cyan": "00FFFF", "magenta": "FF00FF",
    "yellow": "FFFF00", "gray": "FFFFFF",
}  # fmt: skip
"""The colours of the look-up tables that have the name of one."""
_IMAGE = "./Data/Image/ImageDescription"
_MICROMETERS = 1e6  # in a meter, the unit of a LIF file


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open an image of a LIF file, by its number or by its name, with those of the folders that it
    is in."""
    with ExitStack() as opening:
        lif = opening.enter_context(require("liffile", "lif").LifFile(asked.file))
        if lif.type.name != "LIF":  # others name files of which they are made
            raise UsageError(f"{asked.where}: is {lif.type.name}, not a LIF file")
        opened = _opened(_chosen(list(lif.images), asked), asked.where)
        weakref.finalize(opened.array, opening.pop_all().close)
    return opened


def _chosen(images: list[Any], asked: Asked) -> Any:
    if not asked.inside:
        words = {n: f"{each.path} {in_words(each.shape)}" for n, each in enumerate(images)}
        return images[chosen_of(words, asked.series, "images", asked.where)]
    for image in images:
        if image.path == asked.inside.strip("/"):
            return image
    names = listed([(image.path, in_words(image.shape)) for image in images])
    raise UsageError(f"{asked.where}: has no image {asked.inside}; it holds {names or 'none'}")


def _opened(image: Any, where: str) -> OpenedArray:
    if image.is_flim:
        raise UsageError(f"{where}: {image.path} holds times of photons, which are not read")
    labels = [_letter(label) for label in image.dims]
    array: Any
    if "S" in image.dims:  # the library turns blue, green and red round, frame by frame
        frames, lock = image.frames, threading.Lock()

        def read(place: tuple[int, ...]) -> NDArray[Any]:
            with lock:  # one file position
                frame: NDArray[Any] = frames[place]
            return frame

        shape = frames.frame_shape
        array = FrameStack(image.shape[: -len(shape)], shape, image.dtype, read)
        labels = [_letter(label) for label in frames.dims]
    else:
        array = image.asarray(out="memmap")
    shown = image.xml_element.findall(f"{_IMAGE}/Channels/ChannelDescription")
    return OpenedArray(
        array=array,
        labels=labels,
        chunks=(*(1,) * (len(labels) - 2), *array.shape[-2:]),
        sizes=_sizes(image),
        omero=[
            shown_channel(name, _COLOURS.get(name.lower()))
            for name in (each.get("LUTName", "") for each in shown)
        ],
        bands="S" in image.dims,
    )


def _letter(label: str) -> str:
    return "c" if label == "S" else label.lower()


def _sizes(image: Any) -> Sizes:
    says = image.xml_element.findall(f"{_IMAGE}/Dimensions/DimensionDescription")
    return sizes_of(_size(each) for each in says if each.get("DimID") in _DIMENSIONS)


def _size(says: Any) -> tuple[str, float, str | None, float]:
    """The axis of a dimension, and its size, unit and origin."""
    unit, count = says.get("Unit", ""), int(says.get("NumberOfElements", 1))
    long, unit = (_MICROMETERS, "micrometer") if unit == "m" else (1.0, unit)
    # The length is that from the first element to the last.
    size = long * float(says.get("Length", 0)) / max(1, count - 1)
    axis, origin = _DIMENSIONS[says.get("DimID")], long * float(says.get("Origin", 0))
    return axis, size, unit_name(unit), origin
