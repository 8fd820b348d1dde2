"""The box of voxels that are not 0, to which some networks crop their input.

It is found from outside to inside, chunk by chunk. So little is read where a volume has no border
of zeros, and else the border.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base import InferConfig, UsageError
from ...data import Box, Grid, ResampledSource, Source
from ...models import Recipe
from .sample import SampleRegion
from .selection import Volume


def cropped(
    config: InferConfig, recipe: Recipe | None, source: Source, volumes: Sequence[Volume]
) -> tuple[InferConfig, list[str]]:
    """The settings with the box to which a recipe crops, where the user names no place.

    Args:
        config: The settings.
        recipe: The recipe of the network; None if it has none.
        source: The input.
        volumes: The volumes of the job.

    Returns:
        The settings, and a sentence if there is such a box.

    Raises:
        UsageError: The boxes of several volumes differ.
    """
    if recipe is None or not recipe.crops or config.box is not None or config.mask is not None:
        return config, []
    boxes = {nonzero_box(source, volume) for volume in volumes}
    if len(boxes) > 1:
        raise UsageError(
            f"{recipe.place} crops each volume to what is not 0, and the boxes of these "
            f"{len(volumes)} differ; run them one by one by --t and --c, or give a --box for all"
        )
    (box,) = boxes
    if box == source.domain[2:]:
        return config, []
    ranges = tuple(f"{low}:{high}" for low, high in zip(box.start, box.stop, strict=True))
    note = (
        f"--box {' '.join(ranges)}, outside of which the input is 0: {recipe.place} crops to it, "
        "and the output has its fill value elsewhere"
    )
    return config.model_copy(update={"box": ranges}), [note]


def seen_of_crop(
    recipe: Recipe | None, sample: SampleRegion | None, source: Source
) -> tuple[Source, Box | None]:
    """What a network that crops sees, and the box in which its patches are laid out.

    Args:
        recipe: The recipe of the network; None if it has none.
        sample: Where there is sample, in the box of the settings; None if all is.
        source: The input on the network's grid.

    Returns:
        The input, which is not mixed with what lies beyond the box where it is resampled; and the
        box on its grid, None for all.
    """
    box = sample.box if sample and recipe and recipe.crops else None
    if box is None or not isinstance(source, ResampledSource):
        return source, box
    way = source.resampling
    return ResampledSource(source.source, way, box), way.back(1).needed(box)


def nonzero_box(source: Source, volume: Volume) -> Box:
    """The least box that holds all voxels that are not 0 in any channel; all if there is none."""
    box = source.domain[2:]
    for axis in range(3):
        first = _first(source, volume, box, axis, backwards=False)
        if first is None:
            return source.domain[2:]
        last = _first(source, volume, box, axis, backwards=True)
        assert last is not None
        start, stop = list(box.start), list(box.stop)
        start[axis], stop[axis] = first, last + 1
        box = Box(tuple(start), tuple(stop))
    return box


def _first(source: Source, volume: Volume, box: Box, axis: int, *, backwards: bool) -> int | None:
    """The outermost plane of a box along an axis with a voxel that is not 0; None without any."""
    chunk = source.chunks[2:]
    step = tuple(chunk[axis] if each == axis else side for each, side in enumerate(box.shape))
    slabs = Grid(box, step, source.grid_origin[2:])
    others = tuple(each for each in range(4) if each != axis + 1)
    numbers = range(len(slabs))
    for number in reversed(numbers) if backwards else numbers:
        slab = slabs[number]
        hits = np.zeros(slab.shape[axis], np.bool_)
        for piece in Grid(slab, chunk, source.grid_origin[2:]):
            array = np.empty((len(volume.channels), *piece.shape), source.dtype)
            volume.read(source, piece, array)
            hits |= (array != 0).any(axis=others)
            if hits[-1 if backwards else 0]:
                break
        if hits.any():
            planes = np.flatnonzero(hits)
            return slab.start[axis] + int(planes[-1 if backwards else 0])
    return None
