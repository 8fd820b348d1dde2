"""Read bricks: which bricks are wanted, their voxels and percentiles, and values that are not
finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data import Box, Scaling, indices, reflect
from ..lanes.bricks import Loaded
from ..opening.job import Job
from ..opening.net import spoilt_masks
from ..tiling.geometry import Brick, block_halo, narrowed
from ..tiling.traffic import read_range
from .run import Run
from .statistics import known_values


def wanted_bricks(
    job: Job, written: Set[tuple[int, ...]], numbers: Iterable[int] | None = None
) -> Iterator[Brick]:
    """The bricks of the parts with these ``numbers``, of all by default, in visiting order.

    Patches whose blocks are all ``written`` are left out. The numbers of the bricks have no gaps,
    as stages wait for the next one.
    """
    number, blocks = itertools.count(), job.geometry.blocks
    if not written:
        yield from job.plan.parts.bricks(numbers)
        return
    for brick in job.plan.parts.bricks(numbers):
        touched = indices(blocks.touching(job.geometry.reach(brick)))
        wanted = [block for block in touched if (brick.volume, *block) not in written]
        if wanted:
            yield replace(narrowed(job.geometry, brick, wanted), number=next(number))


class BrickReader:
    """Reads the bricks of a job, in any number of threads."""

    def __init__(self, run: Run, scalings: Mapping[int, tuple[Scaling, ...]]) -> None:
        """``scalings`` are those of whole volumes; empty if each block has its own."""
        self.job, self.scalings, self.chunks = run.job, scalings, run.watch.chunks
        self.pool, self.flow = run.queues.equipment.read_pool, run.queues.flow
        self.retries, self.source = run.watch.retries, run.job.source
        if run.job.values.first:
            self.source = self.source.normalised_by(known_values(run, scalings))  # type: ignore[attr-defined]

    def fetch(self, brick: Brick) -> Loaded:
        """Read a brick, unless none of it lies inside the box and the mask of the user."""
        sample, inside = self.job.sample, None
        if sample is not None:
            look = partial(sample.inside, self.job.volumes[brick.volume], brick.support)
            inside = self.retries.run(self.flow, "the mask", f"read {brick}", look)
            if not inside.any():
                return Loaded(replace(brick, needed=frozenset()), None)
        return Loaded(brick, self._array(brick), inside=inside)

    def _array(self, brick: Brick) -> NDArray[Any]:
        """The voxels of ``brick.read``, reflected past the volume's edge.

        The result has the shape (channels, z, y, x). It is a contiguous view of an array of the
        pool: if it had gaps, a copy to a GPU would go through memory that is not pinned.
        """
        job, domain = self.job, self.job.geometry.domain
        # Every voxel past the edge has its mirror image in ``inside``; both lie in ``hull``.
        inside = read_range(brick.read, domain)
        hull = brick.read.hull(inside)
        whole = self.pool.take((job.net.model.in_channels, *hull.shape), job.source.dtype)
        part = whole[(slice(None), *inside.within(hull))]
        owned = job.geometry.owned(brick)

        def read() -> None:
            job.volumes[brick.volume].read(self.source, inside, part)
            self.chunks.look(brick.volume, owned, inside, part)

        self.retries.run(self.flow, job.source.name, f"read {brick}", read)
        # Axis by axis, each over what those before it have filled: so corners are filled, too.
        for axis in range(3):
            low, high = domain.start[axis], domain.stop[axis]
            if low <= hull.start[axis] and hull.stop[axis] <= high:
                continue
            seen = np.arange(brick.read.start[axis], brick.read.stop[axis])
            outside = seen[(seen < low) | (seen >= high)]
            planes = np.moveaxis(whole, axis + 1, 0)
            origin = hull.start[axis]
            near = reflect(outside, low, high)
            if job.sliding.fill == "edge":
                near = outside.clip(low, high - 1)
            planes[outside - origin] = planes[near - origin]
        return _compact(whole, brick.read.within(hull))

    def prepare(self, loaded: Loaded) -> None:
        """Leave out the patches without sample, find the brick's scaling, and replace values that
        are not finite."""
        if loaded.inside is not None:
            self._leave_out(loaded, loaded.inside)
        brick, array = loaded.brick, loaded.array
        if array is None:
            return
        of_volume = self.scalings.get(brick.volume)
        loaded.scalings = of_volume or (self._own_scaling(brick, array),)
        if array.dtype.kind != "f":
            return
        ends = _ends(array)
        if not np.isfinite(ends).all():
            loaded.invalid = self._replaced(loaded, array)
            ends = _ends(array)
        loaded.beyond = max(ends[1], -ends[0]) > float(np.finfo(np.float32).max)

    def _replaced(self, loaded: Loaded, array: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Replace values that are not finite by the lower bound of their scaling, in place. Returns
        where they were, as `Loaded.invalid`."""
        brick = loaded.brick
        # If the source normalises, values are normalised by now, and their lower bound is 0.
        first = self.job.values.first
        lowers = [0.0 if first else scaling.lower for scaling in loaded.scalings]
        support = brick.support.within(brick.read)
        invalid: NDArray[np.bool_] | None = None
        for z in range(array.shape[1]):  # plane by plane: a mask of the whole brick is large
            plane = array[:, z]
            spoilt = ~np.isfinite(plane)
            if not spoilt.any():
                continue
            plane[spoilt] = np.broadcast_to(np.reshape(lowers, (-1, 1, 1)), plane.shape)[spoilt]
            if spoilt_masks(self.job.net, self.job.config) == 1:
                spoilt = spoilt.any(axis=0, keepdims=True)
            if invalid is None:
                invalid = np.zeros((len(spoilt), *brick.support.shape), np.bool_)
            if support[0].start <= z < support[0].stop:
                invalid[:, z - support[0].start] = spoilt[:, *support[1:]]
        return invalid

    def _leave_out(self, loaded: Loaded, inside: NDArray[np.bool_]) -> None:
        """Keep the patches that contribute to a voxel of sample. Where another one contributes, the
        output gets its fill value."""
        brick, array, sample = loaded.brick, loaded.array, self.job.sample
        assert array is not None and sample is not None
        values = array[(slice(None), *brick.support.within(brick.read))]
        hits = sample.reaches(self.job.volumes[brick.volume], brick.support, inside, values)
        absent = ~inside if sample.cuts else np.zeros_like(inside)
        needed = set()
        for index in brick.each_patch():
            patch = self.job.geometry.support_of(Box.of(index, (1, 1, 1)))
            place = patch.within(brick.support)
            if hits[place].any():
                needed.add(index)
            else:
                absent[place] = True
        loaded.brick = replace(brick, needed=frozenset(needed))
        loaded.absent, loaded.inside = absent, None
        if not needed:
            self.pool.give(array)
            loaded.array = None

    def _own_scaling(self, brick: Brick, array: NDArray[Any]) -> Scaling:
        """Percentiles of the block and its halo."""
        config, geometry = self.job.config, self.job.geometry
        # In this mode each block is a part, and a brick: see `planning.cuts`.
        block = geometry.needed(geometry.parts[brick.part])
        halo = block_halo(config, geometry)
        seen = block.grow(halo, halo) & geometry.domain
        part = array[(slice(None), *seen.within(brick.read))]
        if self.job.sample is not None:
            part = part[:, self.job.sample.inside(self.job.volumes[brick.volume], seen)]
        return self.job.values.each[0].of_array(part)


def _ends(array: NDArray[Any]) -> tuple[float, float]:
    """The least and the largest of floats; NaN if one is. For half floats, which take long to
    compare, both are NaN."""
    if array.dtype.itemsize == 2:
        return math.nan, math.nan
    return float(array.min()), float(array.max())


def _compact(whole: NDArray[Any], box: Sequence[slice]) -> NDArray[Any]:
    """A box of an array (channels, z, y, x). It is moved to the array's front if it has gaps."""
    part = whole[(slice(None), *box)]
    if part.flags.c_contiguous:
        return part
    front = whole.reshape(-1)[: part.size].reshape(part.shape)
    for plane in np.ndindex(part.shape[:2]):  # in order, so that no value overwrites a later one
        front[plane] = part[plane]
    return front
