"""The plan of a job, made before any data is read: counts, bytes, amplifications and memory.

A `Plan` is arithmetic on shapes. It opens nothing and reads nothing; `facts` gathers what it needs,
and `run` carries it out. A job that does not fit is refused here, with the two numbers and the flag
that helps. If workers share the parts, these either compute their borders twice or spill them. The
plan states the cost of both ways and takes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...base import InferConfig, Refused, format_bytes, format_count, plural, significant
from ..tiling.geometry import Block, Geometry, PatchShape
from ..tiling.parts import Extent, Parts
from ..tiling.traffic import BlockShape, CacheLevel, largest_block, open_peak, reads
from .borders import Ways, weigh
from .cuts import JobCut, cuts
from .memory import (
    Facts,
    HostMemory,
    block_budget,
    block_bytes_of,
    block_voxel_bytes,
    blocks_bytes,
    cache_bytes,
    chunks_of_block,
    computing_bytes,
    device_bytes,
    in_words,
    pinned_blocks,
    unit_voxel_bytes,
)
from .spill_room import Spill, SpillTable


@dataclass(frozen=True, slots=True)
class Plan:
    """A job in numbers. All are computed, but a cluster may measure the time of a patch."""

    facts: Facts
    geometry: Geometry
    shape: PatchShape
    batch: int
    num_units: int
    num_blocks: int
    num_patches: int
    block_budget: int
    """Bytes of blocks under way for each device, from the start of reading to the end of
    stitching; see `block_bytes`."""
    write_budget: int
    """Bytes of finished units that may wait to be written."""
    cache_bytes: int
    memory: HostMemory
    memory_limit: int
    device_peak: int | None
    batch_bytes: int
    """Bytes of a forward and its patches. A smaller batch takes fewer."""
    voxels: int
    """Number of voxels of all volumes, with each channel group counted once, as for throughput."""
    read_bytes: int
    """Decoded bytes that are read, amplification included."""
    statistics_bytes: int
    """Decoded bytes that are read to find global percentiles."""
    input_bytes: int
    output_bytes: int
    parts: Parts | None = None
    """The parts that several processes share; None if one does the job alone."""
    spill: Spill | None = None
    """The bytes that parts spill; None if they compute their borders twice."""
    spill_limit: int | None = None
    """Most bytes that may be spilled at once; None for no limit."""
    ways: Ways | None = None
    """Both ways to treat borders, if the job has the choice."""

    @property
    def extent(self) -> Extent:
        """What the whole job computes and writes."""
        return Extent(self.num_units, self.num_patches, self.voxels)

    @property
    def patch_amplification(self) -> float:
        """Computed voxels per voxel of the volume."""
        return self.num_patches * math.prod(self.shape.patch) / self.voxels

    @property
    def read_amplification(self) -> float:
        """Decoded bytes per byte of the input."""
        return self.read_bytes / self.input_bytes

    @property
    def write_amplification(self) -> float:
        """Always 1, as a unit is whole chunks and is written once. Other units are refused."""
        return 1.0

    def block_bytes(self, block: Block | BlockShape) -> int:
        """Bytes that a block takes on the host.

        Args:
            block: A block, or the shape of one.

        Returns:
            Bytes of the array as read and of the outputs.
        """
        return block_bytes_of(self.facts, block.read.size, block.support.size)

    @property
    def largest_block_bytes(self) -> int:
        return self.block_bytes(largest_block(self.geometry))

    @property
    def pinned_blocks(self) -> int:
        """Number of blocks that are read into pinned memory at once."""
        return pinned_blocks(self.facts, self.block_budget, largest_block(self.geometry))

    @property
    def read_buffer_bytes(self) -> int:
        """Bytes of a buffer that can hold any block as read."""
        return largest_block(self.geometry).hull.size * self.facts.in_bytes

    @property
    def block_buffer_bytes(self) -> int:
        """Bytes of a buffer that can hold one head of any block."""
        return largest_block(self.geometry).support.size * max(block_voxel_bytes(self.facts))

    @property
    def unit_buffer_bytes(self) -> int:
        """Bytes of a buffer that can hold one head of any unit, as sums or as it is written."""
        return math.prod(self.geometry.unit) * max(unit_voxel_bytes(self.facts))

    def refuse(self) -> None:
        """Raise `Refused` if the host or a device cannot hold the job."""
        if self.memory.total > self.memory_limit:
            causes = ("base", "forward", "assembly", "blocks", "writing", "decoding")
            parts = {name: getattr(self.memory, name) for name in causes}
            cure = {
                "base": "a smaller model",
                "forward": "a smaller --batch or --patch",
                "assembly": f"a smaller --block (now {in_words(self.geometry.unit)})",
                "blocks": "fewer --prep-workers",
                "writing": "fewer --writer-workers",
                "decoding": "an input of smaller chunks",
            }[max(parts, key=lambda n: parts[n])]
            raise Refused(
                f"this job needs {format_bytes(self.memory.total)} of host memory but may take "
                f"{format_bytes(self.memory_limit)}; give {cure} or a larger --max-memory"
            )
        peak, limit = 0 if self.spill is None else self.spill.peak, self.spill_limit
        if limit is not None and peak > limit:
            raise Refused(
                f"this job spills up to {format_bytes(peak)} at once but may spill "
                f"{format_bytes(limit)}; give a larger --max-spill or --spill never"
            )
        free = self.facts.device_bytes
        if self.device_peak is not None and free is not None and self.device_peak > free:
            raise Refused(
                f"this job needs {format_bytes(self.device_peak)} on each device but "
                f"{format_bytes(free)} are free; give a smaller --batch (now {self.batch})"
            )

    def lines(self) -> Iterator[tuple[str, str]]:
        """The plan in words, line by line: (what, how much)."""
        geometry, memory, facts, size = self.geometry, self.memory, self.facts, format_bytes
        volumes = plural(facts.num_volumes, "volume")
        yield "volume", f"{in_words(geometry.domain.shape)} voxels, {volumes}"
        patches = f"{format_count(self.num_patches)} patches in batches of {self.batch}"
        shape = (
            f"{in_words(self.shape.patch)}, overlap {in_words(self.shape.overlap)}, {geometry.seam}"
        )
        yield "patch", f"{shape}; {patches}"
        yield from (("head", head) for head in facts.heads)
        if facts.arithmetic:
            yield "arithmetic", facts.arithmetic
        per_block, unit = in_words(geometry.patches_per_block), in_words(geometry.unit)
        blocks = f"{format_count(self.num_blocks)} blocks of {per_block} patches"
        if self.num_blocks == self.num_units:
            blocks = f"{format_count(self.num_blocks)} blocks, one for each to write"
        yield "to compute", blocks
        yield "to write", f"{format_count(self.num_units)} blocks of {unit} voxels"
        if len(geometry.regions) > 1:
            yield (
                "regions",
                f"{format_count(len(geometry.regions))} of {in_words(geometry.region)} voxels",
            )
        yield (
            "amplification",
            (
                f"patches {significant(self.patch_amplification)}, "
                f"reading {significant(self.read_amplification)}, "
                f"writing {significant(self.write_amplification)}"
            ),
        )
        yield from self._part_lines()
        extra = f", {size(self.statistics_bytes)} more for percentiles"
        yield (
            "reads",
            (
                f"{size(self.read_bytes)} decoded for {size(self.input_bytes)} of input"
                f"{extra if self.statistics_bytes else ''}"
            ),
        )
        yield "computes", f"{format_count(self.num_patches * math.prod(self.shape.patch))} voxels"
        yield "writes", f"{size(self.output_bytes)} before compression"
        yield "host memory", f"{size(memory.total)} of {size(self.memory_limit)} at most"
        for part in memory.__slots__:
            yield f"  {part}", size(getattr(memory, part))
        if self.device_peak is not None:
            yield "device memory", f"{size(self.device_peak)} on each device"
        if facts.forward_bytes is None:
            yield "note", "the model could not be sized in advance: its own memory is not counted"
        if long := _long_axes(self):
            yield (
                "note",
                (
                    f"along {' and '.join(long)} the patch is at least twice as long as the "
                    "volume, and most of what is computed there is reflected; a smaller --patch "
                    "computes less, if the model takes it"
                ),
            )
        yield from (("note", note) for note in facts.notes)

    def _part_lines(self) -> Iterator[tuple[str, str]]:
        if self.parts is None:
            return
        shape, count = in_words(self.parts.step), format_count(len(self.parts))
        yield "parts", f"{count} of {shape} voxels"
        if len(self.parts) < self.parts.workers:
            more = f"a smaller --block (now {in_words(self.geometry.unit)}) gives more"
            yield "note", f"there are fewer parts than {self.parts.workers} workers; {more}"
        if self.ways is not None:
            yield from self.ways.lines()
        elif self.spill is not None:
            yield "  spill", self.spill.line()


def make_plan(
    config: InferConfig,
    facts: Facts,
    shape: PatchShape,
    part_shape: tuple[int, ...] | None = None,
) -> Plan:
    """Choose what the user left open, check what they set, count everything.

    Of all regions and read caches that fit the memory, the plan takes those that compute and read
    least: the region is the whole volume if that fits. If several processes share the job, it is
    cut into parts, and a region lies in one part. ``part_shape`` is given if the parts are fixed
    already, as other processes work on them.

    Raises `UsageError` for a block that does not match the output's chunks. A job that does not fit
    is still planned, so that the plan can be shown; `Plan.refuse` raises the error.
    """
    choice = config.spill if config.shared_by is not None and not config.is_element else "never"
    if config.normalize == "percentile":  # each unit has its own patches
        choice = "never"
    if part_shape is not None or choice == "never":
        return _cheapest(config, facts, shape, part_shape, spills=choice == "always")
    recomputed, spilled = (
        _cheapest(config, facts, shape, None, spills=spills) for spills in (False, True)
    )
    if len(recomputed.parts or ()) == len(spilled.parts or ()) == 1:
        return recomputed
    assert recomputed.parts is not None and spilled.parts is not None and spilled.spill is not None
    fits = spilled.memory.total <= spilled.memory_limit
    ways = weigh(
        config, facts,
        (recomputed.parts, recomputed.read_bytes), (spilled.parts, spilled.read_bytes),
        spilled.spill, fits=fits,
    )  # fmt: skip
    return replace(spilled if ways.spills else recomputed, ways=ways)


def _cheapest(
    config: InferConfig,
    facts: Facts,
    shape: PatchShape,
    part_shape: tuple[int, ...] | None,
    *,
    spills: bool,
) -> Plan:
    """The cheapest plan that fits the memory, or else the one that takes the least."""
    limit = _memory_limit(config, facts)
    compared = cuts(config, facts, shape, part_shape, spills=spills)
    plans = [plan for cut in compared for plan in _plans_of(config, facts, cut, limit)]
    fitting = [plan for plan in plans if plan.memory.total <= limit]
    if not fitting:
        return min(plans, key=lambda plan: plan.memory.total)
    return min(fitting, key=_cost)


def _long_axes(plan: Plan) -> list[str]:
    """The axes along which the patch is at least twice as long as the volume."""
    sides = zip("zyx", plan.shape.patch, plan.geometry.domain.shape, strict=True)
    return [axis for axis, side, size in sides if side >= 2 * size]


def plans_by_parts(
    config: InferConfig, facts: Facts, shape: PatchShape, *, spills: bool = False
) -> Iterator[Plan]:
    """Plans of a job with more and more parts, up to one part for each unit. Plans that do not fit
    the memory are left out. With ``spills``, parts spill their borders.

    Each plan is the one that ``--parts`` gives for its number of parts.
    """
    limit, least = _memory_limit(config, facts), 1
    while True:
        in_parts = config.model_copy(update={"parts": least})
        cut = next(cuts(in_parts, facts, shape, None, spills=spills))
        plans = _plans_of(config, facts, cut, limit)
        if fitting := [plan for plan in plans if plan.memory.total <= limit]:
            yield min(fitting, key=_cost)
        assert cut.parts is not None
        if cut.parts.step == cut.geometry.unit or len(cut.parts) < least:
            return
        least = 2 * len(cut.parts)


def _memory_limit(config: InferConfig, facts: Facts) -> int:
    return config.max_memory or facts.base_bytes + int(0.8 * facts.available_bytes)


def _cost(plan: Plan) -> float:
    return plan.patch_amplification + plan.read_amplification / 4


def _plans_of(config: InferConfig, facts: Facts, cut: JobCut, limit: int) -> Iterator[Plan]:
    """The plans of a cut, one for each level of the cache."""
    levels: tuple[CacheLevel, ...] = ("layer", "row", "none") if facts.source_caches else ("none",)
    plan = _count(config, facts, cut, limit)
    for level in levels:
        cached, decoded = reads(cut.geometry, facts.source_chunk, level, origin=facts.source_origin)
        cache = cache_bytes(facts, cached)
        decoding = max(0, plan.memory.decoding - cache)
        yield replace(
            plan,
            cache_bytes=cache,
            memory=replace(plan.memory, cache=cache, decoding=decoding),
            read_bytes=decoded * facts.in_bytes * facts.num_volumes,
        )


def _count(config: InferConfig, facts: Facts, cut: JobCut, limit: int) -> Plan:
    """The plan of a cut that reads nothing and caches nothing."""
    shape, geometry = cut.shape, cut.geometry
    volume, num_volumes = geometry.domain.size, facts.num_volumes
    patch, largest = math.prod(shape.patch), largest_block(geometry)
    budget = block_budget(
        facts,
        block_bytes_of(facts, patch, patch),
        block_bytes_of(facts, largest.read.size, largest.support.size),
        config.prep_workers,
        config.max_inflight_batches,
    )
    computing, buffers = computing_bytes(facts, patch)
    batch_bytes = facts.batch * patch * facts.work_itemsize
    unit = min(math.prod(geometry.unit), volume)
    waiting = min((config.writer_workers + 1) * unit, volume * num_volumes)
    writing = waiting * sum(unit_voxel_bytes(facts))
    if geometry.seam == "blend":  # each writer converts sums to the dtype of the sink
        writing += config.writer_workers * unit * facts.out_bytes
    at_once = min(facts.cores, config.prep_workers * chunks_of_block(facts, largest))
    # The most voxels of open units, either of a part or of a unit that is being joined.
    held = open_peak(replace(geometry, spills=False))
    if geometry.spills:
        held = max(held, 2 * unit)
    passes = 0 if config.normalize != "global" else 2 if facts.source_itemsize > 2 else 1
    return Plan(
        facts=facts,
        geometry=geometry,
        shape=shape,
        batch=facts.batch,
        num_units=len(geometry.units) * num_volumes,
        num_blocks=geometry.count_blocks() * num_volumes,
        num_patches=geometry.count_patches() * num_volumes,
        block_budget=budget,
        write_budget=(config.writer_workers + 1) * unit * facts.out_bytes,
        cache_bytes=0,
        memory=HostMemory(
            base=facts.base_bytes,
            forward=computing + batch_bytes if facts.on_host else 0,
            blocks=blocks_bytes(facts, budget, largest),
            assembly=held * sum(unit_voxel_bytes(facts)),
            writing=writing,
            cache=0,
            decoding=at_once * facts.chunk_bytes,
        ),
        memory_limit=limit,
        device_peak=None if facts.on_host else device_bytes(facts, computing, buffers, budget),
        batch_bytes=computing - facts.cast_bytes + buffers,
        voxels=volume * num_volumes,
        read_bytes=0,
        statistics_bytes=passes * volume * facts.in_bytes * num_volumes,
        input_bytes=volume * facts.in_bytes * num_volumes,
        output_bytes=volume * facts.out_bytes * num_volumes,
        parts=cut.parts,
        spill=SpillTable(cut.parts, facts).spill if geometry.spills and cut.parts else None,
        spill_limit=config.max_spill,
    )
