"""The plan of a job, made before any data is read: counts, bytes, amplifications and memory.

A `Plan` is arithmetic on shapes. It opens nothing and reads nothing; `opening.job` gathers the
facts that it needs, and `run` carries it out. A job that does not fit is refused here, with the two
numbers and the flag that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

from ...base import InferConfig, Refused, format_bytes, format_count, noun, plural, significant
from ...data import Box, in_words
from ..run_folder.block_log import BlockSet
from ..tiling.geometry import Brick, Geometry, PatchShape
from ..tiling.parts import Extent, Parts
from ..tiling.traffic import BrickShape, CacheLevel, largest_brick, open_peak, reads
from .cuts import cuts
from .memory import (
    CPU_FORWARD,
    HEAP_GAPS,
    KEPT_GAPS,
    LEVEL_VOXEL_BYTES,
    RUNTIME_BYTES,
    Facts,
    HostMemory,
    brick_budget,
    brick_bytes_of,
    bricks_bytes,
    cache_bytes,
    chunks_of_brick,
    computing_bytes,
    device_bytes,
    finishing_bytes,
    pinned_bricks,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A job in numbers, all of them computed."""

    facts: Facts
    geometry: Geometry
    num_blocks: int
    num_bricks: int
    num_patches: int
    brick_budget: int
    """Bytes of bricks under way for each device, from the start of reading to the end of
    stitching; see `brick_bytes`."""
    write_budget: int
    """Bytes of finished blocks that may wait to be written."""
    memory: HostMemory
    memory_limit: int
    device_peak: int | None
    voxels: int
    """Number of voxels of all volumes, with each channel group counted once, as for throughput."""
    read_bytes: int
    """Decoded bytes that are read, amplification included."""
    statistics_bytes: int
    """Decoded bytes that are read to find global percentiles."""
    input_bytes: int
    output_bytes: int
    own_patches: bool
    """True if each block has percentiles, and so patches, of its own."""
    workers: int
    """Number of processes that share the parts."""

    @property
    def parts(self) -> Parts:
        """The parts of the job. A process that does it alone computes all of them, in turn."""
        return Parts(self.geometry, self.facts.num_volumes)

    @property
    def border_amplification(self) -> float:
        """Patches computed per patch that one part, as large as the volume, would take."""
        if self.own_patches:
            return 1.0
        one = self.geometry.patches_for(self.geometry.written).size * self.facts.num_volumes
        return self.num_patches / one

    @property
    def extent(self) -> Extent:
        """What the whole job computes and writes."""
        return Extent(self.num_blocks, self.num_patches, self.voxels)

    @property
    def patch_amplification(self) -> float:
        """Computed voxels per voxel of the volume."""
        voxels = self.geometry.domain.size * self.facts.num_volumes
        return self.num_patches * math.prod(self.geometry.patch) / voxels

    @property
    def read_amplification(self) -> float:
        """Decoded bytes per byte of the input."""
        return self.read_bytes / self.input_bytes

    def brick_bytes(self, brick: Brick | BrickShape) -> int:
        """Bytes that a brick takes on the host.

        Args:
            brick: A brick, or the shape of one.

        Returns:
            Bytes of the array as read and of the outputs.
        """
        return brick_bytes_of(self.facts, brick.read.size, brick.support.size)

    @property
    def largest_brick_bytes(self) -> int:
        return self.brick_bytes(largest_brick(self.geometry))

    @property
    def pinned_bricks(self) -> int:
        """Number of bricks that are read into pinned memory at once."""
        return pinned_bricks(self.facts, self.brick_budget, largest_brick(self.geometry))

    @property
    def read_buffer_bytes(self) -> int:
        """Bytes of a buffer that can hold any brick as read."""
        return largest_brick(self.geometry).hull.size * self.facts.in_bytes

    @property
    def brick_buffer_bytes(self) -> int:
        """Bytes of a buffer that can hold one head of any brick."""
        return largest_brick(self.geometry).support.size * max(self.facts.brick_voxel_bytes)

    @property
    def block_buffer_bytes(self) -> int:
        """Bytes of a buffer that can hold one head of any block, as sums or as it is written."""
        voxels = max(math.prod(self.geometry.block), math.prod(self.geometry.held))
        return voxels * max(self.facts.block_voxel_bytes)

    def refuse(self) -> None:
        """Raise `Refused` if the host or a device cannot hold the job."""
        if self.memory.total > self.memory_limit:
            # Those that a flag, or another model or input, makes smaller.
            causes = ("base", "forward", "assembly", "bricks", "writing", "decoding")
            # Blocks are held on the network's grid, which may be the finer one.
            finer = self.facts.domain.size > self.facts.written.size
            coarser = "a larger --voxel-size" if finer else None
            # A forward is of few patches for any batch, which is held beside them.
            batch = "--batch or " if self.facts.batch > CPU_FORWARD else ""
            cure = {
                "base": "a smaller model",
                "forward": f"a smaller {batch}--patch (now {in_words(self.geometry.patch)})",
                "assembly": coarser or f"a smaller --block (now {in_words(self.geometry.block)})",
                "bricks": "fewer --prep-workers",
                "writing": coarser or "fewer --writer-workers",
                "decoding": "an input of smaller chunks",
            }[max(causes, key=lambda name: getattr(self.memory, name))]
            raise Refused(
                f"this job needs {format_bytes(self.memory.total)} of host memory but may take "
                f"{format_bytes(self.memory_limit)}; give {cure} or a larger --max-memory"
            )
        free = self.facts.device_bytes
        if self.device_peak is not None and free is not None and self.device_peak > free:
            raise Refused(
                f"this job needs {format_bytes(self.device_peak)} on each device but "
                f"{format_bytes(free)} are free; give a smaller --batch (now {self.facts.batch})"
            )

    def lines(self) -> Iterator[tuple[str, str]]:
        """The plan in words, line by line: (what, how much)."""
        geometry, memory, facts, size = self.geometry, self.memory, self.facts, format_bytes
        volumes = plural(facts.num_volumes, "volume")
        yield "volume", f"{in_words(geometry.written.shape)} voxels, {volumes}"
        patches = f"{_counted(self.num_patches, 'patch')} in batches of {facts.batch}"
        sides = f"{in_words(geometry.patch)}, overlap {in_words(geometry.overlap)}, {geometry.seam}"
        yield "patch", f"{sides}; {patches}"
        if facts.seams:
            yield "seams", facts.seams
        yield from facts.said
        if facts.arithmetic:
            yield "arithmetic", facts.arithmetic
        per_brick, block = in_words(geometry.patches_per_brick), in_words(geometry.block)
        bricks = f"{_counted(self.num_bricks, 'brick')} of {per_brick} patches"
        if self.num_bricks == self.num_blocks:
            bricks = f"{_counted(self.num_bricks, 'brick')}, one for each block"
        yield "to compute", bricks
        yield "to write", f"{_counted(self.num_blocks, 'block')} of {block} voxels"
        yield from self._part_lines()
        yield (
            "amplification",
            (
                f"patches {significant(self.patch_amplification)}, "
                f"reading {significant(self.read_amplification)}, "
                "writing 1.00"  # a block is whole chunks and is written once
            ),
        )
        extra = f", {size(self.statistics_bytes)} more to count values"
        yield (
            "reads",
            (
                f"{size(self.read_bytes)} decoded for {size(self.input_bytes)} of input"
                f"{extra if self.statistics_bytes else ''}"
            ),
        )
        yield (
            "computes",
            f"{format_count(self.num_patches * math.prod(self.geometry.patch))} voxels",
        )
        yield "writes", f"{size(self.output_bytes)} before compression"
        yield "host memory", f"{size(memory.total)} of {size(self.memory_limit)} at most"
        for part in memory.__slots__:
            if part not in ("levels", "making") or getattr(memory, part):
                yield f"  {part}", size(getattr(memory, part))
        if self.device_peak is not None:
            yield "device memory", f"{size(self.device_peak)} on each device"
        if facts.forward_bytes is None:
            yield "note", "the model could not be sized in advance: its own memory is not counted"
        yield from (("note", note) for note in facts.notes)

    def _part_lines(self) -> Iterator[tuple[str, str]]:
        """The parts, and what it costs to compute patches on their borders for both sides."""
        count = len(self.parts)
        if count > 1 and self.own_patches:
            yield "parts", f"{format_count(count)}, one for each block"
        elif count > 1:
            shape, times = in_words(self.geometry.part), significant(self.border_amplification)
            borders = f"for their borders patches are computed {times} times"
            yield "parts", f"{format_count(count)} of {shape} voxels; {borders}"
        if count < self.workers:
            more = f"a smaller --block (now {in_words(self.geometry.block)}) gives more"
            yield "note", f"there are fewer parts than {self.workers} workers; {more}"


def make_plan(
    config: InferConfig,
    facts: Facts,
    shape: PatchShape,
    part_shape: tuple[int, ...] | None = None,
) -> Plan:
    """Choose what the user left open, check what they set, count everything.

    Of all parts and read caches that fit the memory, the plan takes those that compute and read
    least: one part is the whole volume if that fits. If several processes share the job, there are
    parts for all of them. ``part_shape`` is that of parts that other processes work on already.

    Raises `UsageError` for a block that does not match the output's chunks. A job that does not fit
    is still planned, so that the plan can be shown; `Plan.refuse` raises the error.
    """
    limit = config.max_memory or facts.base_bytes + int(0.8 * facts.available_bytes)
    compared = cuts(config, facts, shape, part_shape)
    plans = [plan for cut in compared for plan in _plans_of(config, facts, cut, limit)]
    fitting = [plan for plan in plans if plan.memory.total <= limit]
    if not fitting:
        # It will be refused, with the fewest bytes that would do.
        return min(plans, key=lambda plan: plan.memory.total)
    best = min(
        fitting,
        key=lambda plan: (
            # A patch that is computed again counts like four that are decoded again: a judgement,
            # which nobody has measured.
            plan.patch_amplification + plan.read_amplification / 4,
            # Then the smallest cache; but what is decoded to count values may be read again.
            not facts.count_passes and plan.memory.cache,
        ),
    )
    if not facts.level_bytes:
        return best
    levels = facts.level_bytes + LEVEL_VOXEL_BYTES * math.prod(best.geometry.block)
    # Levels get what is left. What does not fit is made at the end, so it never costs a plan.
    levels = min(levels, limit - best.memory.total)
    return replace(best, memory=replace(best.memory, levels=levels))


def _counted(count: int, thing: str) -> str:
    """A count in short form, such as ``18.9 k blocks``, as a petabyte has many."""
    return f"{format_count(count)} {noun(count, thing)}"


def _plans_of(config: InferConfig, facts: Facts, geometry: Geometry, limit: int) -> Iterator[Plan]:
    """The plans of a cut, one for each level of the cache."""
    levels: tuple[CacheLevel, ...] = ("layer", "row", "none")
    if facts.source_cache == 0:
        levels = ("none",)
    plan = _count(config, facts, geometry, limit)
    for level in levels:
        cached, decoded = reads(geometry, facts.source_chunk, level, origin=facts.source_origin)
        cache = cache_bytes(facts, cached)
        # Chunks that were decoded lie in the cache, as far as it holds them.
        decoding = max(0, plan.memory.decoding - cache)
        runtime = RUNTIME_BYTES + int(KEPT_GAPS * (cache + plan.memory.assembly))
        yield replace(
            plan,
            memory=replace(plan.memory, cache=cache, decoding=decoding, runtime=runtime),
            read_bytes=int(decoded * facts.in_bytes * facts.stored_share) * facts.num_volumes,
        )


def _count(config: InferConfig, facts: Facts, geometry: Geometry, limit: int) -> Plan:
    """The plan of a cut that reads nothing and caches nothing."""
    volume, num_volumes = geometry.written.size, facts.num_volumes
    stored = int(geometry.domain.size * facts.in_bytes * facts.stored_share) * num_volumes
    patch, largest = math.prod(geometry.patch), largest_brick(geometry)
    budget = brick_budget(
        facts,
        brick_bytes_of(facts, patch, patch),
        brick_bytes_of(facts, largest.read.size, largest.support.size),
        config.prep_workers,
        config.max_inflight_batches,
    )
    computing, buffers = computing_bytes(facts, patch)
    batch_bytes = facts.batch * patch * facts.work_itemsize
    gaps = int(HEAP_GAPS * (facts.forward_bytes or 0))
    # Whole chunks may be more than the volume.
    block = min(math.prod(geometry.block), volume)
    # One block for each writer, and one that waits, so that no writer is idle after its block.
    held = min(math.prod(geometry.held), geometry.domain.size)
    waiting = min((config.writer_workers + 1) * held, geometry.domain.size * num_volumes)
    writing = waiting * sum(facts.block_voxel_bytes)
    writing += config.writer_workers * finishing_bytes(facts, geometry.block)
    # TensorStore decodes chunks in threads of its own, one for each core.
    at_once = min(facts.cores, config.prep_workers * chunks_of_brick(facts, largest))
    unpacking = config.prep_workers * largest.hull.size * facts.packed_itemsize
    if facts.way is not None:
        made = facts.way.bytes_for(largest.hull.shape, facts.source_itemsize)
        unpacking += config.prep_workers * made
    return Plan(
        facts=facts,
        geometry=geometry,
        num_blocks=len(geometry.blocks) * num_volumes,
        num_bricks=geometry.count_bricks() * num_volumes,
        num_patches=geometry.count_patches() * num_volumes,
        brick_budget=budget,
        write_budget=(config.writer_workers + 1) * block * facts.out_bytes,
        memory=HostMemory(
            base=facts.base_bytes,
            forward=computing + batch_bytes + gaps if facts.on_host else 0,
            bricks=bricks_bytes(facts, budget, largest) + unpacking,
            assembly=open_peak(geometry) * sum(facts.block_voxel_bytes),
            writing=writing,
            cache=0,
            decoding=at_once * facts.chunk_bytes + facts.sample_bytes,
            making=facts.making_bytes,
        ),
        memory_limit=limit,
        device_peak=None if facts.on_host else device_bytes(facts, computing, buffers, budget),
        voxels=volume * num_volumes,
        read_bytes=0,
        statistics_bytes=facts.count_passes * stored,
        input_bytes=stored,
        output_bytes=facts.output_bytes or volume * facts.out_bytes * num_volumes,
        own_patches=config.normalize == "percentile",
        workers=config.shared_by or 1,
    )


def written_in(parts: Parts, number: int, done: BlockSet) -> int:
    """Number of blocks of a part that are ``done``."""
    part = parts[number]
    return done.count(part.volume, parts.blocks(part))


def missing_parts(plan: Plan, done: BlockSet) -> dict[int, int]:
    """The parts that lack blocks, and how many blocks each lacks.

    ``done`` are the blocks that are written.
    """
    parts = plan.parts
    if len(done) == plan.num_blocks:
        return {}
    lacking = (
        (part.number, parts.blocks(part).size - written_in(parts, part.number, done))
        for part in parts
    )
    return {number: count for number, count in lacking if count}


def voxels_of(plan: Plan, done: BlockSet) -> int:
    """Number of voxels in blocks."""
    blocks = plan.geometry.blocks
    boxes = [  # of blocks that are equally large: the first and the last of an axis may be cut
        Box(*zip(*box, strict=True))
        for box in product(*map(_alike, blocks.cells.start, blocks.cells.stop))
    ]
    return sum(
        done.count(volume, box) * blocks.cell(box.start).size
        for volume in range(plan.facts.num_volumes)
        for box in boxes
    )


def _alike(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The first block of an axis, the last, and those between."""
    return pairwise(sorted({first, first + 1, stop - 1, stop}))
