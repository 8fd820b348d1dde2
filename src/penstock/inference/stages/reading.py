"""Read blocks: which blocks are wanted, their voxels and percentiles, and values that are not
finite."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Flow, Pool
from ...data import ChunkCounter, Scaling, block_scaling, indices, reflect
from ..lanes.blocks import Loaded
from ..opening.job import Job
from ..tiling.geometry import Block, block_halo, narrowed
from ..tiling.parts import Part
from ..tiling.traffic import read_range
from .retries import Retries
from .spill import Spilled


def wanted_blocks(
    job: Job,
    written: Set[tuple[int, ...]],
    parts: Iterable[Part] | None = None,
    spilled: Spilled | None = None,
) -> Iterator[Block]:
    """The blocks of a job, or of some ``parts`` of it, in visiting order. Patches whose units are
    all ``written`` are left out. If parts spill, ``spilled`` says which units are wanted.

    The numbers of the blocks are consecutive.
    """
    number, geometry = itertools.count(), job.geometry
    boxes = (
        ((volume, geometry.domain) for volume in range(len(job.volumes)))
        if parts is None
        else ((part.volume, part.box) for part in parts)
    )
    for volume, box in boxes:
        for block in geometry.blocks_in(box, volume=volume):
            if spilled is not None:
                units = spilled.wanted_of(block)
            elif written:
                support = block.support & geometry.reach(block)
                touched = indices(geometry.units.touching(support))
                units = [unit for unit in touched if (volume, *unit) not in written]
            else:
                yield replace(block, number=next(number))
                continue
            if units:
                yield replace(narrowed(geometry, block, units), number=next(number))


class BlockReader:
    """Reads the blocks of a job, in any number of threads."""

    def __init__(
        self,
        job: Job,
        scalings: Mapping[int, Scaling],
        pool: Pool,
        flow: Flow,
        retries: Retries,
        chunks: ChunkCounter | None = None,
    ) -> None:
        """``scalings`` are those of whole volumes; empty if each block has its own. ``chunks``
        has counted the chunks that earlier parts have read."""
        self.job, self.scalings, self.pool = job, scalings, pool
        self.flow, self.retries = flow, retries
        self.chunks = chunks or ChunkCounter(job.source, job.volumes, job.config.missing)

    def fetch(self, block: Block) -> NDArray[Any]:
        """Read the voxels of ``block.read``, reflected past the volume's edge.

        The result has the shape (channels, z, y, x). It is a contiguous view of an array of the
        pool: if it had gaps, a copy to a GPU would go through memory that is not pinned.
        """
        job, domain = self.job, self.job.geometry.domain
        # Every voxel past the edge has its mirror image in ``inside``; both lie in ``hull``.
        inside = read_range(block.read, domain)
        hull = block.read.hull(inside)
        shape = (job.net.model.in_channels, *hull.shape)
        whole = self.pool.take(shape, job.source.dtype)
        part = whole[(slice(None), *inside.within(hull))]
        owned = block.core & job.geometry.reach(block)

        def read() -> None:
            job.volumes[block.volume].read(job.source, inside, part)
            self.chunks.look(block.volume, owned, inside, part)

        self.retries.run(self.flow, job.source.name, f"read {block}", read)
        for axis in range(3):
            low, high = domain.start[axis], domain.stop[axis]
            if low <= hull.start[axis] and hull.stop[axis] <= high:
                continue
            seen = np.arange(block.read.start[axis], block.read.stop[axis])
            outside = seen[(seen < low) | (seen >= high)]
            planes = np.moveaxis(whole, axis + 1, 0)
            origin = hull.start[axis]
            planes[outside - origin] = planes[reflect(outside, low, high) - origin]
        return _compact(whole, block.read.within(hull))

    def prepare(self, block: Block, array: NDArray[Any]) -> Loaded:
        """Find the block's scaling, and replace values that are not finite by its lower bound."""
        scaling = self.scalings.get(block.volume) or self._own_scaling(block, array)
        if array.dtype.kind != "f":
            return Loaded(block, array, scaling)
        support = block.support.within(block.read)
        invalid: NDArray[np.bool_] | None = None
        for z in range(array.shape[1]):  # plane by plane: a mask of the whole block is large
            plane = array[:, z]
            spoilt = ~np.isfinite(plane)
            if not spoilt.any():
                continue
            plane[spoilt] = scaling.lower
            if invalid is None:
                invalid = np.zeros(block.support.shape, np.bool_)
            if support[0].start <= z < support[0].stop:
                invalid[z - support[0].start] = spoilt.any(axis=0)[support[1:]]
        return Loaded(block, array, scaling, invalid)

    def _own_scaling(self, block: Block, array: NDArray[Any]) -> Scaling:
        """Percentiles of the write unit and its halo."""
        config, geometry = self.job.config, self.job.geometry
        unit = geometry.regions[block.region]
        halo = block_halo(config, geometry)
        seen = unit.grow(halo, halo) & geometry.domain
        part = array[(slice(None), *seen.within(block.read))]
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
