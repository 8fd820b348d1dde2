"""Where there is sample: inside a box, where a mask is not 0, and where values reach a limit.

A patch is computed if one of the voxels that it contributes to is sample. The patch grid is fixed,
so what is left out depends neither on blocks nor on parts. The output has its fill value wherever a
patch that contributes was left out, and outside the box and the mask.

Some networks crop their input to the box of voxels that are not 0. It is found from outside to
inside, chunk by chunk. So little is read where a volume has no border of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import InferConfig, UsageError, plural
from ...data import METERS, Box, Grid, Source, open_source, placed_over
from ...models import Recipe
from .selection import Volume, named_range, open_input

_CACHE_BYTES = 32 * 2**20
"""Decoded bytes of a mask that are kept, as the bricks around a chunk share it."""


class Nearest:
    """For each voxel of one array, the voxel of another that lies nearest to it in the world."""

    def __init__(self, of: Source, to: Source, flag: str) -> None:
        """``of`` is the array whose voxels are given, ``to`` the one that ``flag`` names.

        Raises `UsageError` if it is not known where one lies over the other, or if they are apart.
        """
        self.domain = to.domain[2:]
        self._maps = [(0.0, 1.0)] * 3
        sized = [each for each in (of, to) if each.scale is not None]
        # A size without a unit counts voxels of the other array, where that says none.
        counted = len(sized) == 1 and not any(sized[0].units[2:])
        if len(sized) == 2 or counted:
            self._maps = [_map(of, to, axis, flag) for axis in (2, 3, 4)]
        elif of.domain[2:] != self.domain:
            lacks = to.name if to.scale is None else of.name
            raise UsageError(
                f"{flag} {to.name} has {self.domain.shape} voxels along z y x and the input "
                f"{of.domain.shape[2:]}, and {lacks} says no size of a voxel: it is not known "
                "where one lies over the other"
            )
        for axis, name in enumerate("zyx"):
            low, high = of.domain.start[axis + 2], of.domain.stop[axis + 2]
            first, last = self.along(axis, low, low + 1)[0], self.along(axis, high - 1, high)[0]
            low, high = min(first, last), max(first, last)  # an axis may run backwards
            if high < self.domain.start[axis] or low >= self.domain.stop[axis]:
                raise UsageError(f"{flag} {to.name} does not overlap the input: along {name} apart")

    def along(self, axis: int, start: int, stop: int) -> NDArray[np.int64]:
        """The voxels that are nearest to those from start to stop along z, y or x (0, 1 or 2)."""
        first, step = self._maps[axis]
        return np.floor(first + step * np.arange(start, stop) + 0.5).astype(np.int64)

    def overlay(self, box: Box, read: Callable[[Box], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """What is true of the nearest voxels, for each voxel of a box; false beyond the array.

        ``read`` says what is true of a box of the other array.
        """
        places = [
            self.along(axis, *ends)
            for axis, ends in enumerate(zip(box.start, box.stop, strict=True))
        ]
        limits = zip(places, self.domain.start, self.domain.stop, strict=True)
        valid = [(near >= start) & (near < stop) for near, start, stop in limits]
        inside = np.zeros(box.shape, np.bool_)
        if all(each.any() for each in valid):
            nearest = [near[each] for near, each in zip(places, valid, strict=True)]
            hull = Box(
                tuple(int(near.min()) for near in nearest),
                tuple(int(near.max()) + 1 for near in nearest),
            )
            of_hull = [near - start for near, start in zip(nearest, hull.start, strict=True)]
            inside[np.ix_(*valid)] = read(hull)[np.ix_(*of_hull)]
        return inside


def _map(of: Source, to: Source, axis: int, flag: str) -> tuple[float, float]:
    """Where voxel 0 of one array lies in another along an axis, and the distance of the next."""
    size_of, size_to = (1.0 if each.scale is None else each.scale[axis] for each in (of, to))
    unit = 1.0
    ours, theirs = of.units[axis], to.units[axis]
    if ours and theirs and ours != theirs:
        if not {ours, theirs} <= METERS.keys():
            raise UsageError(f"{flag} {to.name} is measured in {theirs} and the input in {ours}")
        unit = METERS[ours] / METERS[theirs]
    first = (of.translation[axis] * unit - to.translation[axis]) / size_to
    return first, size_of * unit / size_to


def box_of(config: InferConfig, source: Source) -> Box | None:
    """The box of the settings, z y x, None for all of the input.

    Raises `UsageError` unless it is a part of the input.
    """
    return None if config.box is None else _box(config.box, source)


class SampleRegion:
    """Where an input, at its own or another level, holds what is to be computed."""

    def __init__(self, config: InferConfig, source: Source, seen: Source) -> None:
        """``seen`` is the input on the grid that the network sees.

        Raises `UsageError` for a box or mask that is not of the input ``source``.
        """
        self.source, self.seen, self.skip_below = source, seen, config.skip_below
        self.cuts = config.mask_output == "yes"
        """Whether the output has its fill value outside box and mask, also in patches that are
        computed."""
        self.box = box_of(config, source)
        self.mask = self.coarse = None
        if config.mask is not None:
            mask = open_source(config.mask, name="--mask")
            if mask.domain.shape[1] > 1 or mask.domain.shape[0] not in (1, source.domain.shape[0]):
                raise UsageError(
                    f"--mask {mask.name} has {plural(mask.domain.shape[0], 'time point')} and "
                    f"{plural(mask.domain.shape[1], 'channel')}; it must have one channel, and "
                    "one time point or those of the input"
                )
            self.mask = mask.with_cache(_CACHE_BYTES)
            if (place := placed_over(mask, source, f"--mask {mask.name}")) is not None:
                self.mask.units, (self.mask.scale, self.mask.translation) = source.units, place
            elif mask.scale is None and mask.domain[2:] == source.domain[2:]:
                self.mask.scale, self.mask.units = source.scale, source.units
                self.mask.translation = source.translation
            self.of_mask = Nearest(seen, self.mask, "--mask")
        if config.skip_level is not None:
            self.coarse = open_input(config, config.skip_level).with_cache(_CACHE_BYTES)
            self.of_coarse = Nearest(seen, self.coarse, "--skip-level: the level")
        self.overlays = [each for each in (self.mask, self.coarse) if each is not None]

    @property
    def facts(self) -> dict[str, Any]:
        """What decides which voxels are sample, for the identity of a run."""
        return {
            "box": self.box and [self.box.start, self.box.stop],
            "overlays": [each.fingerprint for each in self.overlays],
            "skip_below": self.skip_below,
            "cuts": self.cuts,
        }

    @property
    def cache_bytes(self) -> int:
        """Most bytes that mask and coarse level take, with a chunk that is decoded."""
        chunks = (int(np.prod(each.chunks)) * each.dtype.itemsize for each in self.overlays)
        return sum(each.cache_bytes for each in self.overlays) + sum(chunks)

    def line(self) -> str:
        """What is computed, in words."""
        where = []
        if self.box is not None:
            sides = zip(self.box.start, self.box.stop, strict=True)
            where.append(f"inside {' x '.join(f'{a}:{b}' for a, b in sides)}")
        where += [f"inside {self.mask.name}"] if self.mask else []
        if self.skip_below is not None:
            how = "" if self.coarse is None else f", an estimate by {self.coarse.name}"
            where.append(f"in patches that reach {self.skip_below:g}{how}")
        return f"only {' and '.join(where)}; the counts here are those of the whole volume"

    def inside(self, volume: Volume, box: Box, of: Source | None = None) -> NDArray[np.bool_]:
        """The voxels of a box, z y x, that lie in the box and in the mask of the user.

        Args:
            volume: The time point and the channels.
            box: Voxels of ``of``.
            of: The input at the level, or on the grid, that the box is of; what the network sees by
                default.

        Returns:
            True for each voxel inside, in the shape of the box.
        """
        of = of or self.seen
        other = of is not self.seen
        axes = [np.ones(side, np.bool_) for side in box.shape]
        if (limits := self.box) is not None:
            level = None if of is self.source else Nearest(of, self.source, "--norm-level")
            for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
                places = np.arange(start, stop) if level is None else level.along(axis, start, stop)
                axes[axis] = (places >= limits.start[axis]) & (places < limits.stop[axis])
            if not all(each.any() for each in axes):
                return np.zeros(box.shape, np.bool_)
        inside = axes[0][:, None, None] & axes[1][:, None] & axes[2]
        if (mask := self.mask) is not None:
            nearest = Nearest(of, mask, "--mask") if other else self.of_mask
            time = volume.t if mask.domain.shape[0] > 1 else mask.domain.start[0]
            of_mask = Volume(time, (mask.domain.start[1],))
            inside &= nearest.overlay(
                box,
                # NaN is not known to be sample.
                lambda hull: _hits(mask, of_mask, hull, lambda v: (v != 0) & np.isfinite(v)),
            )
        return inside

    def reaches(
        self, volume: Volume, box: Box, inside: NDArray[np.bool_], array: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """The voxels of a box that are sample.

        Args:
            volume: The time point and the channels.
            box: A box, z y x.
            inside: What `inside` says of it.
            array: Its values, shape (channels, z, y, x).

        Returns:
            True for each voxel inside that reaches the limit in any channel. NaN does not.
        """
        if (limit := self.skip_below) is None:
            return inside
        if (coarse := self.coarse) is None:
            return inside & (array >= limit).any(axis=0)
        return inside & self.of_coarse.overlay(
            box, lambda hull: _hits(coarse, volume, hull, lambda values: values >= limit)
        )


def _hits(
    source: Source, volume: Volume, box: Box, test: Callable[[NDArray[Any]], NDArray[np.bool_]]
) -> NDArray[np.bool_]:
    """Whether any channel of each voxel of a box passes a test."""
    return np.asarray(test(volume.array(source, box)).any(axis=0))


def _box(said: Sequence[str], source: Source) -> Box:
    """The box of ranges such as ``0:64``, one for each of z y x, or of y x.

    Raises `UsageError` unless it is a part of the source.
    """
    domain, ranges = source.domain[2:], [part for text in said for part in str(text).split(",")]
    if len(ranges) == 2 and domain.shape[0] == 1:
        ranges = [":", *ranges]
    words = f"--box {' '.join(map(str, said))}"
    if len(ranges) != 3:
        raise UsageError(
            f"{words} has {plural(len(ranges), 'range')}; give one for each of z y x, as 0:64"
        )
    bounds = []
    for name, text, low, high in zip("zyx", ranges, domain.start, domain.stop, strict=True):
        try:
            named = named_range(text, low, high)
        except (ValueError, TypeError):
            named = range(0)
        if named.step != 1 or not low <= named.start < named.stop <= high:
            raise UsageError(
                f"{words}: {name} of the input goes from {low} to {high}, and {text!r} is no range "
                "of it, such as 0:64 or :"
            )
        bounds.append((named.start, named.stop))
    return Box(*zip(*bounds, strict=True))


def open_sample(config: InferConfig, source: Source, seen: Source) -> SampleRegion | None:
    """Where there is sample, or None if all is to be computed. ``seen`` is the input on the grid
    that the network sees.

    Raises `UsageError` for a box or a mask that is not of the input.
    """
    if config.box is None and config.mask is None and config.skip_below is None:
        return None
    return SampleRegion(config, source, seen)


def cropped(
    config: InferConfig,
    recipe: Recipe | None,
    source: Source,
    volumes: Sequence[Volume],
    begun: Mapping[str, Any],
) -> tuple[InferConfig, list[str]]:
    """The settings with the box to which a recipe crops, where the user names no place.

    Args:
        config: The settings.
        recipe: The recipe of the network; None if it has none.
        source: The input.
        volumes: The volumes of the job.
        begun: The run.json of the run that the job goes on with, which has the box, if that left
            out anything; empty if there is none.

    Returns:
        The settings, and a sentence if such a box was found.

    Raises:
        UsageError: The boxes of several volumes differ.
    """
    if recipe is None or not recipe.crops or config.box is not None or config.mask is not None:
        return config, []
    if settings := begun.get("settings"):
        box = settings.get("box")
        return config.model_copy(update={"box": box and tuple(box)}), []
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


def nonzero_box(source: Source, volume: Volume) -> Box:
    """The least box that holds all voxels that are not 0 in any channel; all if there is none."""
    box = source.domain[2:]
    for axis in range(3):
        first, last = (_outermost(source, volume, box, axis, step) for step in (1, -1))
        if first is None or last is None:
            return source.domain[2:]
        start, stop = list(box.start), list(box.stop)
        start[axis], stop[axis] = first, last + 1
        box = Box(tuple(start), tuple(stop))
    return box


def _outermost(source: Source, volume: Volume, box: Box, axis: int, step: int) -> int | None:
    """The outermost plane of a box along an axis that has a voxel other than 0; None without any.
    A ``step`` of 1 searches from the start of the box, one of -1 from its stop."""
    chunk = source.chunks[2:]
    sides = tuple(chunk[axis] if each == axis else side for each, side in enumerate(box.shape))
    slabs = Grid(box, sides, source.grid_origin[2:])
    others = tuple(each for each in range(4) if each != axis + 1)
    for number in range(len(slabs))[::step]:
        slab = slabs[number]
        hits = np.zeros(slab.shape[axis], np.bool_)
        for piece in Grid(slab, chunk, source.grid_origin[2:]):
            hits |= (volume.array(source, piece) != 0).any(axis=others)
            # The outermost plane of the slab has one: nothing further in can change the answer.
            if hits[::step][0]:
                break
        if hits.any():
            return slab.start[axis] + int(np.flatnonzero(hits)[::step][0])
    return None
