"""The ways to cut a job into blocks and parts.

A `Plan` is made for each way, and the cheapest one that fits the memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...base import InferConfig, UsageError
from ...data import in_words
from ..tiling.geometry import Geometry, PatchShape, per_axis
from ..tiling.parts import Parts, fit_parts
from .memory import Facts

BRICK_VOXELS = 6_100_000
"""Most voxels that a brick reads. Small bricks take little memory while they are under way; at less
than this the cost of a brick begins to show."""
_DEEP = (2, 1, 1)
"""The weight of a side of a brick, z y x: the one that counts least grows next. Bricks are half as
deep as wide, as the read cache holds the chunks of a layer of them."""
BLOCK_VOXELS = 2**21
"""Most voxels in a block whose size is chosen here: a chunk of 128 cubed. Small blocks are written
sooner, so a kill loses less, and one that is a brick need not be copied."""
OWN_BLOCK_VOXELS = 2**24
"""Most voxels of a block that has its own percentiles, and so its own patches (256 cubed). With
smaller blocks too many patches would be computed twice."""


def cuts(
    config: InferConfig, facts: Facts, shape: PatchShape, part: tuple[int, ...] | None
) -> Iterator[Geometry]:
    """The cuts to compare, the largest parts first. ``part`` is the shape of parts of a run that
    other processes may work on.

    Raises `UsageError` for a block that does not match the output's chunks.
    """
    grid = tuple(math.lcm(*axis) for axis in zip(*facts.write_grids, strict=True))
    # A block is held on the network's grid, which may have more voxels.
    held = max(facts.written.size, facts.domain.size)
    most = BLOCK_VOXELS * facts.written.size // held
    if config.normalize == "percentile":
        most = OWN_BLOCK_VOXELS
    block = block_shape(config.block, grid, facts.written.shape, most)
    geometry = _geometry(config, facts, shape, block)
    if part is not None:
        yield replace(geometry, part=part)
    elif config.normalize == "percentile":  # each block has percentiles, and so patches, of its own
        yield geometry
    elif config.shared_by is None:
        for part in _parts_of_one_process(facts, block):
            yield replace(geometry, part=part)
    else:
        least, count = config.parts or 1, 0
        while count < least:
            part = fit_parts(geometry, facts.num_volumes, config.shared_by, least)
            yield (cut := replace(geometry, part=part))
            count = len(Parts(cut, facts.num_volumes))
            # Each block is a part, or no way to cut gives more.
            if count < least or part == block:
                return
            # Next, parts of half the size, which hold less: these may not fit into the memory.
            least = 2 * count


def _parts_of_one_process(facts: Facts, block: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Shapes of parts to compare: the whole volume, and smaller ones that hold fewer open blocks.
    They are not cut along z, as bricks sweep it."""
    # One more, as the corner of the chunk grid may lie within the volume, which then begins with a
    # cut block.
    blocks = [-(-n // u) + 1 for n, u in zip(facts.written.shape, block, strict=True)]
    while True:
        yield tuple(n * u for n, u in zip(blocks, block, strict=True))
        # The longer one of y and x is halved, as long as it has several blocks.
        axis = 1 if blocks[1] * block[1] >= blocks[2] * block[2] else 2
        if blocks[axis] == 1:
            axis = 3 - axis
        if blocks[axis] == 1:
            return
        blocks[axis] = -(-blocks[axis] // 2)


def block_shape(
    said: Sequence[int] | None, grid: Sequence[int], extent: Sequence[int], most: int
) -> tuple[int, ...]:
    """The shape of a block, z y x.

    Args:
        said: What --block says, None if it is left open.
        grid: The least shape of whole chunks of every output.
        extent: The shape of the outputs.
        most: Most voxels of a block that is chosen here.

    Returns:
        What is said, cut to the outputs. Without it, whole chunks that are nearly a cube.

    Raises:
        UsageError: What is said is not whole chunks.
    """
    if said is None:
        block = list(grid)
        while True:
            growing = [a for a in range(3) if block[a] < extent[a]]
            axis = min(growing, key=lambda a: (block[a], -a), default=None)
            if axis is None or math.prod(block) * 2 > most:
                return tuple(block)
            block[axis] *= 2
    asked = per_axis(said, plane=False, thin=grid[0])
    whole = tuple(-(-min(b, n) // g) * g for b, g, n in zip(asked, grid, extent, strict=True))
    if any(b % g and b < n for b, g, n in zip(asked, grid, extent, strict=True)):
        words, fit = (" ".join(map(str, sides)) for sides in (said, whole[len(said) == 2 :]))
        raise UsageError(
            f"--block {words}: a block is whole chunks (or shards) of the output, and these are "
            f"{in_words(grid)} voxels, z y x; give --block {fit}"
        )
    return whole


def _geometry(
    config: InferConfig,
    facts: Facts,
    shape: PatchShape,
    block: tuple[int, ...],
) -> Geometry:
    """The geometry in which each block is a part."""
    blended = config.seam_mode == "blend" and facts.summed
    geometry = Geometry(
        domain=facts.domain,
        back=facts.back,
        patch=shape.patch,
        overlap=shape.overlap,
        seam="blend" if blended else "trim",
        block=block,
        anchor=facts.anchor,
        part=block,
        patches_per_brick=(1, 1, 1),
        steps=facts.steps,
        inner=facts.inner,
    )
    stride, counts = geometry.stride, geometry.patches.shape
    if config.normalize == "percentile":
        # Each part is one brick, as its percentiles are needed before its first patch. Bricks end
        # at multiples of this in the global grid, so it must cover the whole grid.
        per_brick = [*counts]
    else:
        per_brick = [1, 1, 1]
        # A block that is one brick is written as it is.
        while stride != block and (growing := [a for a in range(3) if per_brick[a] < counts[a]]):
            axis = min(growing, key=lambda a: (per_brick[a] * stride[a] * _DEEP[a], -a))
            per_brick[axis] += 1
            read = (n * s + o for n, s, o in zip(per_brick, stride, shape.overlap, strict=True))
            if math.prod(read) * facts.in_channels > BRICK_VOXELS:
                per_brick[axis] -= 1
                break
        # As many bricks of sides that are as equal as can be.
        per_brick = [-(-n // -(-n // most)) for n, most in zip(counts, per_brick, strict=True)]
    return replace(geometry, patches_per_brick=tuple(per_brick))
