"""Read bricks: which bricks are wanted, their voxels and percentiles, and values that are not
finite."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data import Scaling, block_scaling, indices, reflect
from ..lanes.bricks import Loaded
from ..opening.job import Job
from ..tiling.geometry import Brick, block_halo, narrowed
from ..tiling.traffic import read_range
from .run import Run


def wanted_bricks(
    job: Job, written: Set[tuple[int, ...]], numbers: Iterable[int] | None = None
) -> Iterator[Brick]:
    """The bricks of the parts with these ``numbers``, of all by default, in visiting order.

    Patches whose blocks are all ``written`` are left out. The numbers of the bricks have no gaps,
    as stages wait for the next one.
    """
    number, parts, blocks = itertools.count(), job.plan.parts, job.geometry.blocks
    for brick in parts.bricks(range(len(parts)) if numbers is None else numbers):
        if not written:
            yield replace(brick, number=next(number))
            continue
        touched = indices(blocks.touching(brick.support & job.geometry.reach(brick)))
        wanted = [block for block in touched if (brick.volume, *block) not in written]
        if wanted:
            yield replace(narrowed(job.geometry, brick, wanted), number=next(number))


class BrickReader:
    """Reads the bricks of a job, in any number of threads."""

    def __init__(self, run: Run, scalings: Mapping[int, Scaling]) -> None:
        """``scalings`` are those of whole volumes; empty if each block has its own."""
        self.job, self.scalings, self.chunks = run.job, scalings, run.chunks
        self.pool, self.flow = run.queues.equipment.read_pool, run.queues.flow
        self.retries = run.watch.retries

    def fetch(self, brick: Brick) -> NDArray[Any]:
        """Read the voxels of ``brick.read``, reflected past the volume's edge.

        The result has the shape (channels, z, y, x). It is a contiguous view of an array of the
        pool: if it had gaps, a copy to a GPU would go through memory that is not pinned.
        """
        job, domain = self.job, self.job.geometry.domain
        # Every voxel past the edge has its mirror image in ``inside``; both lie in ``hull``.
        inside = read_range(brick.read, domain)
        hull = brick.read.hull(inside)
        shape = (job.net.model.in_channels, *hull.shape)
        whole = self.pool.take(shape, job.source.dtype)
        part = whole[(slice(None), *inside.within(hull))]
        owned = brick.core & job.geometry.reach(brick)

        def read() -> None:
            job.volumes[brick.volume].read(job.source, inside, part)
            self.chunks.look(brick.volume, owned, inside, part)

        self.retries.run(self.flow, job.source.name, f"read {brick}", read)
        for axis in range(3):
            low, high = domain.start[axis], domain.stop[axis]
            if low <= hull.start[axis] and hull.stop[axis] <= high:
                continue
            seen = np.arange(brick.read.start[axis], brick.read.stop[axis])
            outside = seen[(seen < low) | (seen >= high)]
            planes = np.moveaxis(whole, axis + 1, 0)
            origin = hull.start[axis]
            planes[outside - origin] = planes[reflect(outside, low, high) - origin]
        return _compact(whole, brick.read.within(hull))

    def prepare(self, brick: Brick, array: NDArray[Any]) -> Loaded:
        """Find the brick's scaling, and replace values that are not finite by its lower bound."""
        scaling = self.scalings.get(brick.volume) or self._own_scaling(brick, array)
        if array.dtype.kind != "f":
            return Loaded(brick, array, scaling)
        support = brick.support.within(brick.read)
        invalid: NDArray[np.bool_] | None = None
        for z in range(array.shape[1]):  # plane by plane: a mask of the whole brick is large
            plane = array[:, z]
            spoilt = ~np.isfinite(plane)
            if not spoilt.any():
                continue
            plane[spoilt] = scaling.lower
            if invalid is None:
                invalid = np.zeros(brick.support.shape, np.bool_)
            if support[0].start <= z < support[0].stop:
                invalid[z - support[0].start] = spoilt.any(axis=0)[support[1:]]
        return Loaded(brick, array, scaling, invalid)

    def _own_scaling(self, brick: Brick, array: NDArray[Any]) -> Scaling:
        """Percentiles of the block and its halo."""
        config, geometry = self.job.config, self.job.geometry
        block = geometry.parts[brick.part]
        halo = block_halo(config, geometry)
        seen = block.grow(halo, halo) & geometry.domain
        part = array[(slice(None), *seen.within(brick.read))]
        return block_scaling(part, config.norm_lower, config.norm_upper, config.eps)


def _compact(whole: NDArray[Any], box: Sequence[slice]) -> NDArray[Any]:
    """A box of an array (channels, z, y, x). It is moved to the array's front if it has gaps."""
    part = whole[(slice(None), *box)]
    if part.flags.c_contiguous:
        return part
    front = whole.reshape(-1)[: part.size].reshape(part.shape)
    for plane in np.ndindex(part.shape[:2]):  # in order, so that no value overwrites a later one
        front[plane] = part[plane]
    return front
