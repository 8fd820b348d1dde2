"""The bytes that a plan needs on the host and on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from ..data import Box
from .traffic import BlockShape

RUNTIME_BYTES = 80 * 2**20
"""Thread stacks, arenas and what codecs hold: measured, see benchmarks/README.md."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan must know of source, sinks, model and machine."""

    domain: Box
    """Spatial domain of the source, z y x."""
    source_itemsize: int
    source_chunk: tuple[int, ...]
    """Spatial, z y x."""
    chunk_bytes: int
    """Of a chunk when it is decoded, all its axes."""
    source_origin: tuple[int, ...]
    """A corner of the source's chunk grid."""
    source_is_float: bool
    source_cache: int | None
    """Bytes of decoded chunks that the source keeps by the user's own word; None: ours to set."""
    source_caches: bool
    """Whether the source can keep decoded chunks at all."""
    num_volumes: int
    """(t, channel group) pairs."""
    batch: int
    """Patches gathered before a forward."""
    in_channels: int
    out_channels: tuple[int, ...]
    """Of each head."""
    out_itemsizes: tuple[int, ...]
    sum_itemsizes: tuple[int, ...]
    """Of what each head's patches are added up in; 0 for a head that is not blended."""
    write_grids: tuple[tuple[int, ...], ...]
    """Spatial write grid of each sink."""
    anchor: tuple[int, ...]
    """Where the sinks' chunk grids begin, in source coordinates."""
    weight_bytes: int
    forward_bytes: int | None
    """Most bytes in one forward of a full batch, None where unknown."""
    devices: tuple[str, ...]
    """Device types, one for each device."""
    base_bytes: int
    """What this process holds already, model weights included."""
    available_bytes: int
    """What the machine could still give it."""
    cores: int
    """That decode chunks at once."""
    device_bytes: int | None
    """Free memory of the smallest device, None on the CPU."""
    cast_bytes: int = 0
    """Of the weights in half precision, which autocast keeps beside them."""
    work_itemsize: int = 4
    """Of what patches are normalised and brought back in."""
    heads: tuple[str, ...] = ()
    """What each head is taken for, for a reader."""
    notes: tuple[str, ...] = ()
    """What the plan should say of how the model is run."""

    @property
    def on_host(self) -> bool:
        """Whether the model runs on the CPU alone."""
        return all(device == "cpu" for device in self.devices)

    @property
    def in_bytes(self) -> int:
        """Bytes for each voxel of a volume, all its channels."""
        return self.in_channels * self.source_itemsize

    @property
    def out_bytes(self) -> int:
        """Bytes for each voxel of all outputs."""
        pairs = zip(self.out_channels, self.out_itemsizes, strict=True)
        return sum(channels * itemsize for channels, itemsize in pairs)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Predicted peak of host memory, by cause, bytes."""

    base: int
    forward: int
    blocks: int
    assembly: int
    writing: int
    cache: int
    decoding: int
    """Chunks that are decoded, and too many for the cache."""
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__slots__)


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


def chunks_of_block(facts: Facts, block: BlockShape) -> int:
    """Chunks of the source that a block touches at most."""
    lengths = zip(block.read.shape, facts.source_chunk, facts.domain.shape, strict=True)
    return math.prod(min(-(-(n - 1) // chunk) + 1, -(-all_ // chunk)) for n, chunk, all_ in lengths)


def block_bytes_of(facts: Facts, read: int, support: int) -> int:
    """What was read and what came of it: memory of both is kept for the next block. Of floats, also
    a byte for each voxel that says whether it was finite."""
    came = support * (sum(block_voxel_bytes(facts)) + facts.source_is_float)
    return read * facts.in_bytes + came


def block_voxel_bytes(facts: Facts) -> list[int]:
    """Bytes for each voxel of a block, head by head: of sums where it is blended."""
    each = zip(facts.out_channels, facts.out_itemsizes, facts.sum_itemsizes, strict=True)
    return [channels * (sums or out) for channels, out, sums in each]


def unit_voxel_bytes(facts: Facts) -> list[int]:
    """The same of a unit, whose buffers hold sums and, cast from these, what is written."""
    each = zip(facts.out_channels, facts.out_itemsizes, facts.sum_itemsizes, strict=True)
    return [channels * max(sums, out) for channels, out, sums in each]


def block_budget(facts: Facts, patch: int, block: int, workers: int, batches: int | None) -> int:
    """Bytes of blocks under way for each device; ``patch`` and ``block`` are those of a block of
    one patch and of the largest, ``batches`` is the most that the user allows.

    A batch under way can hold patches of as many blocks as it has rows, and none of these is let
    go before the batch is full: there must be room for all of them and for one block more.
    """
    least = facts.batch * patch + 2 * block
    budget = least + max(1, workers // len(facts.devices)) * block
    return budget if batches is None else min(budget, max(least, batches * facts.batch * patch))


def blocks_bytes(facts: Facts, budget: int, read: int) -> int:
    """Blocks under way on the host, for all devices; ``read`` is what the largest block sees."""
    blocks = len(facts.devices) * budget
    if not facts.on_host:
        # Two blocks of each go up at a time; torch pins memory in powers of two.
        blocks += len(facts.devices) * 2 * (1 << (read * facts.in_bytes - 1).bit_length())
    return blocks


def computing_bytes(facts: Facts, patch: int) -> tuple[int, int]:
    """A forward of a full batch at its peak, and its patches on their way in and out."""
    channels = facts.in_channels + sum(facts.out_channels)
    buffers = facts.batch * patch * facts.work_itemsize * channels
    return max(facts.forward_bytes or 0, buffers) + facts.cast_bytes, buffers


def cache_bytes(facts: Facts, voxels: int) -> int:
    """A read cache that holds so many voxels of each channel."""
    if facts.source_cache is not None:
        return facts.source_cache
    # What a store notes of each chunk counts, too; a cache that holds all but one chunk of what
    # comes round again holds none of it.
    held = voxels * facts.in_bytes
    return held + held // 32 + 2**20 if held else 0


def in_words(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)
