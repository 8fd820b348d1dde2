"""How viewers show the channels of an OME-Zarr image: the member ``omero`` of its group.

Its schema wants a colour and a window of every channel. While blocks are written a window that is
not known is the range of the dtype. `add_windows` counts it once the image is whole, over boxes of
its coarsest level, so that it depends on nothing but the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..box import Box
from ..grid import Grid
from ..normalize import Histogram
from .frames import shown_channels
from .pyramid import level_of
from .tensorstore import TensorStoreSource, plainly
from .zarr_groups import Group, is_labels

_PERCENTILES = (0.5, 99.8)
_COUNTED = (1, 1, 16, 256, 256)
"""The shape of a box that is counted."""
_MOST = 64
"""The most boxes that are counted, of all channels; at least one of each."""


def add_windows(path: str, channels: Sequence[Mapping[str, Any]] = (), name: str = "") -> bool:
    """Give the channels of an image windows by percentiles of its values.

    Args:
        path: The OME-Zarr group, which is whole.
        channels: What is known of each, with which the group was begun. Its windows stay.
        name: The flag that messages name.

    Returns:
        False if nothing was changed: the image is of labels, or its group says more than it was
        begun with.

    Raises:
        UsageError: It cannot be read.
    """
    group = Group.at(path, name)
    ome, last = group.ome, len(group.image()["datasets"]) - 1
    if is_labels(path, name):
        return False
    level = level_of(path, last, name)
    begun = shown_channels(channels, level.dtype) if any(channels) else None
    if ome.get("omero") != begun:
        return False
    first, count = level.domain.start[1], level.domain.shape[1]
    shown = [dict(each) for each in channels] or [{} for _ in range(count)]
    for number, each in enumerate(shown):
        if "window" not in each:
            each["window"] = _window(level, first + number, max(1, _MOST // count))
    ome["omero"] = shown_channels(shown, level.dtype)
    group.write()
    return True


def _window(level: TensorStoreSource, channel: int, most: int) -> dict[str, float]:
    """The window of a channel, by boxes that are spread evenly over it."""
    start, stop = list(level.domain.start), list(level.domain.stop)
    start[1], stop[1] = channel, channel + 1
    cells = Grid(Box(tuple(start), tuple(stop)), _COUNTED, tuple(start))
    number = min(len(cells), most)
    places = [(2 * place + 1) * len(cells) // (2 * number) for place in range(number)]
    histogram = Histogram(level.dtype)
    while not histogram.done:
        for place in places:
            with plainly():
                histogram.add(level.read(cells[place]))
        histogram.advance(_PERCENTILES)
    if not histogram.count:  # nothing is finite
        return {"start": 0, "end": 1}
    least, low, high, greatest = map(histogram.percentile, (0, *_PERCENTILES, 100))
    if low == high:  # nearly all is background
        low, high = least, greatest
    whole = level.dtype.kind in "iub"
    if whole:
        low, high = math.floor(low), math.ceil(high)
    if low == high:
        high = low + max(1, abs(low))
    window = {"start": low, "end": high}
    return window if whole else {"min": least, "max": greatest, **window}
