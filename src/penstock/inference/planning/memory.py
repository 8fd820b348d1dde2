"""The memory that a job needs on the host and on a device, in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from ...data import Box, Resampling
from ...models import Steps
from ..tiling.stitch import planes_at_once
from ..tiling.traffic import BrickShape

LIBRARY_BYTES = 2 * 32 * 2**20
"""Most bytes of torch's workspaces for cuBLAS and cuBLASLt, as on a Hopper GPU."""
LEVEL_VOXEL_BYTES = 4
"""Bytes that halving a block takes for each of its voxels, at most."""
RUNTIME_BYTES = 80 * 2**20
"""Bytes of thread stacks, arenas and codecs, measured as benchmarks/README.md says."""
HEAP_GAPS = 0.15
"""Bytes of the heap of a CPU that lie idle between the tensors of a forward, as a share of these:
tensors of other sizes do not fit into what earlier ones left. Of UNets 0.06 was measured at patches
of 64 cubed, and up to 0.11 at 144 cubed on a busy machine."""
KEPT_GAPS = 0.07
"""The same between chunks of the cache and open blocks, as a share of these: 0.06 was measured of
800 MiB."""
CPU_FORWARD = 2
"""Number of patches in one forward on a CPU, for any batch, so that results do not depend on the
batch. For one patch, torch uses its own kernels for small convolutions, which are a quarter to a
third slower than oneDNN's. More than two patches do not fit the CPU's cache."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about source, sinks, model and machine that a plan is computed from."""

    domain: Box
    """Spatial domain of the source, z y x."""
    source_itemsize: int
    source_chunk: tuple[int, ...]
    """Spatial shape of a chunk, z y x."""
    chunk_bytes: int
    """Bytes of a decoded chunk, over all its axes."""
    source_origin: tuple[int, ...]
    """A corner of the source's chunk grid, z y x."""
    source_cache: int | None
    """Bytes of decoded chunks that the source keeps by the spec, 0 if it can keep none. None:
    the plan chooses."""
    num_volumes: int
    """Number of volumes, which are pairs of time point and channel group."""
    batch: int
    """Number of patches of a batch."""
    in_channels: int
    out_channels: int
    """Number of channels of all heads."""
    out_bytes: int
    """Bytes of a voxel, over all outputs."""
    brick_voxel_bytes: tuple[int, ...]
    """Bytes of a voxel of a brick, for each head. A blended head holds sums."""
    block_voxel_bytes: tuple[int, ...]
    """Bytes of a voxel of a block, for each head, and of what says where there is sample. A buffer
    holds sums, then what is written."""
    summed: bool
    """True if bricks of any head are added up."""
    flag_bytes: int
    """Bytes of flags for a voxel of a brick. For a float input they say whether it is finite. With
    a sample they also say what is inside, what reaches the limit, and what is left out."""
    write_grids: tuple[tuple[int, ...], ...]
    """Spatial write grid of each sink."""
    anchor: tuple[int, ...]
    """A corner of the sinks' chunk grids, z y x, in source coordinates."""
    weight_bytes: int
    forward_bytes: int | None
    """Most bytes that one forward of a full batch takes. None if unknown."""
    devices: tuple[str, ...]
    """Device types, one for each device."""
    base_bytes: int
    """Bytes that this process holds already, model weights included."""
    available_bytes: int
    """Bytes that the machine can still give to this process."""
    cores: int
    """Number of cores that can decode chunks at once."""
    device_bytes: int | None
    """Free bytes of the device that has the fewest. None on the CPU."""
    steps: Steps = "context"
    """The way in which patches follow each other."""
    inner: Box | None = None
    """The box in which patches are laid out; None for the whole domain."""
    way: Resampling | None = None
    """The way from the input to what the network sees; None if that is the same grid."""
    back: Resampling | None = None
    """The way from what the network gives to the grid of blocks; None if that is the same."""
    count_passes: int = 0
    """Times that the input is read to count its values."""
    stored_share: float = 1.0
    """Bytes of the input for one byte of what the network sees."""
    output_bytes: int = 0
    """Bytes of all outputs before compression."""
    packed_itemsize: int = 0
    """Bytes of a stored number, where it is no value itself, else 0."""
    cast_bytes: int = 0
    """Bytes of the weights in half precision, which autocast keeps in addition to the others."""
    work_itemsize: int = 4
    """Bytes of a value while patches are normalised before the forward, and scaled back after."""
    said: tuple[tuple[str, str], ...] = ()
    """Lines of the printed plan about sample, the scaling of values, and heads."""
    sample_bytes: int = 0
    """Bytes of mask and coarse level that are kept decoded."""
    seams: str = ""
    """The seams between patches in words: exact or not; empty if nothing is known."""
    seam_error: Mapping[str, Any] | None = None
    """Measured difference of tiles from a larger input, as the run's record has it."""
    arithmetic: str = ""
    """Torch, instruction set, threads and GPUs, for the printed plan. The last bits of sums depend
    on them."""
    level_bytes: int = 0
    """Bytes that the first level below outputs may take while blocks come."""
    making_bytes: int = 0
    """Bytes that files take which are made of their blocks at the end."""
    notes: tuple[str, ...] = ()
    """Sentences for the printed plan about how the model is run."""

    @property
    def written(self) -> Box:
        """Spatial domain of the outputs, z y x."""
        return self.domain if self.back is None else self.back.to

    @property
    def on_host(self) -> bool:
        """Whether the model runs on the CPU alone."""
        return all(device == "cpu" for device in self.devices)

    @property
    def in_bytes(self) -> int:
        """Bytes of a voxel of a volume, over all its channels."""
        return self.in_channels * self.source_itemsize


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Predicted peak of host memory in bytes, by cause."""

    base: int
    forward: int
    bricks: int
    assembly: int
    writing: int
    cache: int
    decoding: int
    """Bytes of decoded chunks that do not fit into the cache."""
    runtime: int = RUNTIME_BYTES
    levels: int = 0
    """Bytes of the first level below outputs, of which not all blocks have come."""
    making: int = 0
    """Bytes for files that are made once all blocks are written: what the stages held stays in the
    heap."""

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__slots__)


def resident_bytes() -> int:
    """Bytes of memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


def chunks_of_brick(facts: Facts, brick: BrickShape) -> int:
    """Most chunks of the source that a brick touches."""
    # The worst place for a brick to begin is the last voxel of a chunk.
    lengths = zip(brick.read.shape, facts.source_chunk, facts.domain.shape, strict=True)
    return math.prod(min(-(-(n - 1) // chunk) + 1, -(-all_ // chunk)) for n, chunk, all_ in lengths)


def brick_bytes_of(facts: Facts, read: int, support: int) -> int:
    """Bytes of a brick: the array as read and the outputs. Both buffers are reused by later
    bricks."""
    return read * facts.in_bytes + support * (sum(facts.brick_voxel_bytes) + facts.flag_bytes)


def brick_budget(facts: Facts, patch: int, brick: int, workers: int, batches: int | None) -> int:
    """Bytes that bricks under way may take, for each device.

    ``patch`` is the size of a brick of one patch in bytes, ``brick`` that of the largest brick, and
    ``batches`` is the most batches that the user allows. A batch can hold patches of as many bricks
    as it has rows, and frees none of them before it is full. So there must be room for all of them,
    and for one more brick.
    """
    least = facts.batch * patch + 2 * brick
    budget = least + max(1, workers // len(facts.devices)) * brick
    return budget if batches is None else min(budget, max(least, batches * facts.batch * patch))


def pinned_bricks(facts: Facts, budget: int, largest: BrickShape) -> int:
    """Number of the largest bricks that lie in pinned memory at once, for all CUDA devices."""
    brick = brick_bytes_of(facts, largest.read.size, largest.support.size)
    return facts.devices.count("cuda") * (budget // brick)


def finishing_bytes(facts: Facts, block: tuple[int, ...]) -> int:
    """Most bytes that a writer takes as a block of sums becomes what is written: the block, and
    copies of the planes that are finished at once."""
    if not facts.summed and facts.back is None:
        return 0
    size = min(math.prod(block), facts.written.size) * facts.out_bytes
    most = max(facts.brick_voxel_bytes)
    if facts.back is None:
        return size
    whole = most * max(math.prod(block), math.prod(facts.back.most_needed(block)))
    return size + facts.back.bytes_for((planes_at_once(block[0], whole), *block[1:]), most)


def bricks_bytes(facts: Facts, budget: int, largest: BrickShape) -> int:
    """Bytes of bricks under way on the host, for all devices.

    For a CUDA device, the arrays as read and the outputs are in pinned memory. Torch pins powers of
    two and keeps pinned memory. Small bricks that find no pinned buffer of their size come on top.
    """
    heads = (largest.support.size * count for count in facts.brick_voxel_bytes)
    arrays = (largest.hull.size * facts.in_bytes, *heads)
    pinned = sum(1 << (count - 1).bit_length() for count in arrays)
    return len(facts.devices) * budget + pinned_bricks(facts, budget, largest) * pinned


def device_bytes(facts: Facts, computing: int, buffers: int, budget: int) -> int:
    """Bytes on each device. ``computing`` includes the copies that cuDNN makes of the input and
    output of a convolution, and its workspaces, where the forward was measured on the device."""
    return facts.weight_bytes + computing + buffers + budget + LIBRARY_BYTES


def computing_bytes(facts: Facts, patch: int) -> tuple[int, int]:
    """Peak bytes of a full batch's forward, and bytes of its input and output patches."""
    channels = facts.in_channels + facts.out_channels
    buffers = facts.batch * patch * facts.work_itemsize * channels
    return max(facts.forward_bytes or 0, buffers) + facts.cast_bytes, buffers


def cache_bytes(facts: Facts, voxels: int) -> int:
    """Bytes of a read cache that holds ``voxels`` of each channel."""
    if facts.source_cache is not None:
        return facts.source_cache
    # With a margin for the store's records of each chunk: a cache that is one chunk too small for
    # what is read again is useless.
    held = int(voxels * facts.in_bytes * facts.stored_share)
    return held + held // 32 + 2**20 if held else 0
