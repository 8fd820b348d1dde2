"""What is counted of objects in a block, and merged exactly over blocks.

Counts, sums of coordinates and faces are integers. Sums of intensities are float64, added in the
order of voxels and blocks: exact for integers up to 2**53.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import require
from ...data import Box, Source
from .components import LocalLabels

Measures = dict[str, NDArray]  # type: ignore[type-arg]
"""Arrays by name, with a row for each object."""
_MERGED_BY = {"low": np.minimum, "first": np.minimum, "high": np.maximum, "max": np.maximum,
              "at_border": np.logical_or}  # fmt: skip
"""The columns that are not added, and their merges."""


def voxels_of(labels: LocalLabels) -> NDArray[np.int64]:
    """The number of voxels of each object of a block."""
    counts = np.zeros(len(labels.first) + 1, np.int64)
    for plane in labels.array:  # numpy makes 64-bit integers of what it counts
        counts += np.bincount(plane.reshape(-1), minlength=len(counts))
    return counts[1:]


class Extents(NamedTuple):
    """Where objects 1, 2 ... of an array are, a row for each."""

    ends: NDArray[np.int64]
    """The first and the last coordinate along z y x, shape (objects, 3, 2)."""
    centroids: NDArray[np.float64]
    voxels: NDArray[np.int64]


def extents_of(labels: NDArray[Any], count: int) -> Extents:
    """Where the objects of an array are.

    Args:
        labels: Numbers from 0 to ``count``.
        count: The number of objects.

    Returns:
        Their extents, in coordinates of the array.
    """
    counted = require("cc3d", "label").statistics(labels, no_slice_conversion=True)
    # cc3d gives first and last coordinates in turn.
    ends = counted["bounding_boxes"][1 : count + 1].astype(np.int64).reshape(count, 3, 2)
    voxels = counted["voxel_counts"][1 : count + 1].astype(np.int64)
    return Extents(ends, counted["centroids"][1 : count + 1], voxels)


def measure_block(
    labels: LocalLabels, box: Box, image: Source | None, channels: tuple[int, ...]
) -> Measures:
    """Measure the objects of a block.

    Args:
        labels: The objects.
        box: The block.
        image: The image whose intensities are counted.
        channels: Its channels.

    Returns:
        ``voxels``; ``low`` and ``high``, the boxes of objects (z y x, half-open); ``sums`` of the
        coordinates of their voxels; ``faces`` along z y x between an object and what is not in it,
        or not in the block; ``sum`` and ``max`` of each channel.
    """
    count = len(labels.first)
    ends, centroids, counts = extents_of(labels.array, count)
    origin, voxels = np.array(box.start[2:], np.int64), counts[:, None]
    sums = np.rint(centroids * voxels).astype(np.int64)
    measures: Measures = {
        "voxels": counts,
        "low": ends[:, :, 0] + origin,
        "high": ends[:, :, 1] + origin + 1,
        "sums": sums + voxels * origin,
        "faces": np.stack([_faces(labels.array, axis, count) for axis in range(3)], axis=1),
    }
    if image is not None:
        measures |= _intensities(labels.array, count, box, image, channels)
    return measures


def _faces(labels: NDArray[np.integer], axis: int, count: int) -> NDArray[np.int64]:
    """Faces of objects along an axis, those on the faces of the block among them."""
    ahead = np.moveaxis(labels, axis, 0)
    here, there = ahead[:-1], ahead[1:]
    differ = here != there
    sides = (here[differ], there[differ], ahead[0].reshape(-1), ahead[-1].reshape(-1))
    return sum((np.bincount(side, minlength=count + 1)[1:] for side in sides),
               np.zeros(count, np.int64))  # fmt: skip


def _intensities(
    labels: NDArray[np.integer], count: int, box: Box, image: Source, channels: tuple[int, ...]
) -> Measures:
    inside = labels.reshape(-1) > 0
    numbers = labels.reshape(-1)[inside]
    total, most = np.zeros((count, len(channels))), np.full((count, len(channels)), -np.inf)
    for place, channel in enumerate(channels):
        there = Box((box.start[0], channel), (box.stop[0], channel + 1)) + box[2:]
        values = image.read(there).reshape(-1)[inside].astype(np.float64)
        total[:, place] = np.bincount(numbers, values, count + 1)[1:]
        np.maximum.at(most[:, place], numbers.astype(np.int64) - 1, values)
    return {"sum": total, "max": most}


def empty_measures(like: Mapping[str, NDArray], count: int) -> Measures:  # type: ignore[type-arg]
    """Measures of objects of which nothing is counted yet."""
    most = np.iinfo(np.int64).max
    start = {"low": most, "first": most, "high": np.iinfo(np.int64).min, "max": -np.inf}
    return {
        name: np.full((count, *part.shape[1:]), start.get(name, 0), part.dtype)
        for name, part in like.items()
    }


def add_measures(total: Measures, ids: NDArray[np.int64], part: Measures) -> None:
    """Merge the measures of a block into those of all objects.

    Args:
        total: The measures of all objects; object 1 is in row 0.
        ids: The numbers of the objects of the block; 0 for those that are left out.
        part: The measures of the block.
    """
    kept = ids > 0
    for name, column in part.items():
        _MERGED_BY.get(name, np.add).at(total[name], ids[kept] - 1, column[kept])
