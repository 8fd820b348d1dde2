"""Synthetic light-sheet volumes with a known truth, and the noise of a camera.

A stand-in for a microscope in demos, training and tests, without files and downloads. One seed
always gives the same numbers (up to the rounding of exp and sin on another processor). It imitates
how such data looks to a denoiser, not how neurons grow.

Intensities are ADU, the counts that a camera gives out; lengths are voxels; axes are z, y, x.

A `clean_volume` is made whole; a `Specimen` mirrors one into a volume without end, any box of which
follows from a random seed and the box's place. `write_volume` writes one piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base import StageError, in_order
from .box import Box, Grid, indices
from .neurites import FloatArray, add_beads, add_soma, grown
from .packed.data_folder import check_outside, check_room
from .stores.lock import OutputLock
from .stores.lock_place import is_locked
from .stores.open import open_sink, open_source
from .stores.protocols import Sink

CAMERA_OFFSET = 100.0
"""ADU that the camera gives where no light falls."""
PERIOD = (96, 192, 192)
"""Voxels along z, y, x of the `clean_volume` that a `Specimen` mirrors."""
NOISE_TILE = (8, 64, 64)
"""Shape of the boxes in which a `Specimen` draws its noise, each from a seed of its own."""
PIECE = 128
"""The side of a piece in voxels: several smaller chunks are made and written together."""
_DTYPE = np.dtype(np.uint16)
_FIRST = Box((0, 0), (1, 1))
"""The one time and the one channel of a volume."""


def clean_volume(shape: Sequence[int], seed: int) -> FloatArray:
    """A noiseless volume: branching neurites and cell bodies over a dim, uneven background.

    The offset is 100 ADU, the background 20 to 60 above it, and structures tens to 3000 above that
    (more where some cross), all blurred by `PSF_SIGMA`. The volume's faces cut structures, as in a
    crop of something larger.

    Args:
        shape: voxels along z, y, x.
        seed: the random seed.

    Returns:
        ADU as float32, shape (z, y, x).
    """
    size = (int(shape[0]), int(shape[1]), int(shape[2]))
    rng = np.random.default_rng(seed)
    field = _smooth_noise(size, 80, rng) + 0.35 * _smooth_noise(size, 12, rng)
    # A fixed curve, not the volume's own extremes: a volume's corner is as dim in a larger volume.
    volume: FloatArray = np.asarray(CAMERA_OFFSET + (40 + 20 * np.tanh(0.8 * field)), np.float32)
    somas, beads = grown(size, rng)
    for soma in somas:
        add_soma(volume, soma)
    add_beads(volume, beads)
    return volume


def noisy(
    clean: ArrayLike,
    seed: int | Sequence[int],
    *,
    gain: float = 10.0,
    read_noise: float = 10.0,
    offset: float = CAMERA_OFFSET,
) -> NDArray[np.uint16]:
    """A camera's image of a clean volume: photons counted, read out with noise, rounded.

    A voxel has mean ``clean`` and variance ``gain * (clean - offset) + read_noise**2``, until the
    16 bits clip it.

    Args:
        clean: ADU, any shape.
        seed: the random seed.
        gain: ADU for each photo-electron.
        read_noise: the standard deviation that every voxel gets, in ADU.
        offset: the ADU where no light falls.

    Returns:
        ADU as uint16, of the same shape.
    """
    rng = np.random.default_rng(seed)
    light = np.maximum(np.asarray(clean, np.float32) - np.float32(offset), 0)
    adu: NDArray[np.float64] = rng.poisson(light / gain) * gain + offset
    adu += read_noise * rng.standard_normal(adu.shape, np.float32)
    return np.clip(np.rint(adu), 0, 65535).astype(np.uint16)


class Specimen:
    """A synthetic microscopy volume without end in any direction. The voxels of a box follow from
    the seed and the coordinates; the size of the box and earlier calls play no part.

    It is one `clean_volume` of the size of `PERIOD`, mirrored at its faces, so that no structure
    ends there. Its noise never comes again. The period is held; all other memory is in proportion
    to the box, so that a volume of any size can be written piece by piece.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._period = clean_volume(PERIOD, seed)

    def clean(self, box: Box) -> FloatArray:
        """The noiseless volume in a box (z, y, x): ADU, of the shape of ``box``."""
        places = []
        for start, stop, length in zip(box.start, box.stop, PERIOD, strict=True):
            there = np.arange(start, stop) % (2 * length)
            places.append(np.minimum(there, 2 * length - 1 - there))
        return self._period[np.ix_(*places)]

    def without_noise(self, box: Box) -> NDArray[np.uint16]:
        """`clean`, rounded to uint16."""
        return np.clip(np.rint(self.clean(box)), 0, 65535).astype(np.uint16)

    def image(self, box: Box) -> NDArray[np.uint16]:
        """The box as the camera of `noisy` sees it: ADU, of the shape of ``box`` (z, y, x)."""
        image = np.empty(box.shape, np.uint16)
        tiles = Grid(box, NOISE_TILE)
        for index in indices(tiles.cells):
            # A Poisson variate uses up more or fewer numbers by its mean, so tiles are made whole.
            tile = Box.of(np.multiply(index, NOISE_TILE).tolist(), NOISE_TILE)
            part = tiles.cell(index)
            seen = noisy(self.clean(tile), [self._seed, *index])
            image[part.within(box)] = seen[part.within(tile)]
        return image


def write_volume(
    root: Path,
    shape: Sequence[int],
    make: Callable[[Box], NDArray[np.uint16]],
    *,
    chunks: Sequence[int],
    shards: Sequence[int] | None,
    workers: int,
    overwrite: bool,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Write a volume of uint16 (z, y, x) as OME-Zarr, or as N5 where ``root`` ends in ``.n5``.

    Memory depends on the pieces and not on the volume. The result does not depend on ``workers``.

    Args:
        root: the folder to write.
        shape: voxels along z, y, x.
        make: gives the voxels of any box.
        chunks: the shape of a chunk.
        shards: the shape of a shard, None for none.
        workers: threads; each makes and writes a piece: some chunks, or one shard.
        overwrite: replace a store that is there.
        progress: called with the number of voxels that are done.

    Raises:
        UsageError: the folder holds other files, or cannot be written.
        Refused: the disk is too full.
        StageError: a piece failed.
    """
    domain, done = Box.of((0, 0, 0), tuple(shape)), 0
    check_outside(root)
    check_room(root, domain.size * _DTYPE.itemsize, f"{domain.size} voxels", "--shape")
    sink = open_sink(
        str(root),
        domain=_FIRST + domain,
        dtype=_DTYPE,
        like=open_source(np.zeros((1, 1, 1), _DTYPE)),  # so that one plane has an axis z too
        chunks=chunks,
        shards=shards,
        overwrite=overwrite,
        name="OUT",
    )
    create_anew(sink)

    def write_piece(piece: Box) -> int:
        try:
            sink.write(_FIRST + piece, make(piece)[None, None])
            return piece.size
        except Exception as error:
            raise StageError("generate", f"{piece} of {root}", error) from error

    for size in in_order(write_piece, Grid(domain, _piece(sink.write_grid[2:])), workers):
        done += size
        progress(done)
    sink.close()


def create_anew(sink: Sink) -> None:
    """Create an output that no run writes; `UsageError` where one is writing there."""
    if is_locked(sink):  # of a run that has ended: this is its output no more
        with OutputLock.briefly([sink]) as lock:
            lock.name()
    sink.create()


def _piece(chunk: Sequence[int]) -> tuple[int, ...]:
    """The shape of a piece: whole chunks, up to `PIECE` along each axis and its cube in all.

    >>> _piece((64, 128, 128)), _piece((1, 512, 512)), _piece((256, 256, 256))
    ((128, 128, 128), (8, 512, 512), (256, 256, 256))
    """
    sides = list(chunk)
    for axis, side in enumerate(chunk):
        sides[axis] *= max(1, min(math.ceil(PIECE / side), PIECE**3 // math.prod(sides)))
    return tuple(sides)


def _smooth_noise(size: tuple[int, int, int], period: int, rng: np.random.Generator) -> FloatArray:
    """Gaussian noise of unit variance with no detail finer than ``period`` voxels."""
    field = rng.standard_normal([length // period + 5 for length in size], np.float32)
    for length in size:
        knots = (np.arange(length // period + 5) - 2) * period
        distance = (np.arange(length)[:, None] - knots[None, :]) / period
        weights = np.exp(-0.5 * np.square(distance / 0.7))
        weights /= np.sqrt(np.square(weights).sum(axis=1, keepdims=True))
        # Each turn uses up the first axis and appends its smooth counterpart as the last.
        field = np.tensordot(field, weights.astype(np.float32), axes=(0, 1))
    return field
