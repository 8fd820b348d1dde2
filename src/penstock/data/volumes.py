"""Synthetic light-sheet volumes with a known truth, and the noise of a camera.

A stand-in for a microscope in demos, training and tests, without files and downloads. One seed
always gives the same numbers (up to the rounding of exp and sin on another processor). It imitates
how such data looks to a denoiser, not how neurons grow.

Intensities are ADU, the counts that a camera gives out; lengths are voxels; axes are z, y, x.

Neurites and cell bodies are grown at random and drawn into a volume.

A `clean_volume` is made whole; a `Specimen` mirrors one into a volume without end, any box of which
follows from a random seed and the box's place. `write_volume` writes one piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base import StageError, in_order
from .box import Box, Grid, indices
from .packed.data_folder import check_outside, check_room
from .stores.lock import OutputLock
from .stores.lock_place import has_lock
from .stores.open import open_sink, open_source
from .stores.protocols import Sink

FloatArray = NDArray[np.float32]

PSF_SIGMA = (1.6, 1.0, 1.0)
"""Blur of the microscope along z, y, x, as the standard deviation of a Gaussian in voxels."""
VOXELS_PER_CELL = 600_000
"""One cell body for each so many voxels, and two axons that only pass through."""
_KERNEL_VOXELS = 1 << 18
"""Beads are added so many at a time that they cover no more voxels than this."""


@dataclass(frozen=True, slots=True)
class Soma:
    """A cell body: a lopsided ellipsoid."""

    center: NDArray[np.float64]
    """Shape (3,)."""
    peak: float
    radii: NDArray[np.float64]
    lean: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Beads:
    """A neurite as a string of beads, half a voxel apart; or many of them."""

    points: NDArray[np.float64]
    """Shape (beads, 3)."""
    radii: NDArray[np.float64]
    """Standard deviation across the neurite before blur, shape (beads,)."""
    peaks: NDArray[np.float64]
    """Intensity on the axis after blur, shape (beads,)."""


def grown(size: tuple[int, int, int], rng: np.random.Generator) -> tuple[list[Soma], Beads]:
    """Random cell bodies and neurites for a volume of ``size`` voxels along z, y, x."""
    num_cells = max(1, round(float(np.prod(size)) / VOXELS_PER_CELL))
    somas: list[Soma] = []
    paths: list[Beads] = []
    for _ in range(num_cells):
        peak = _log_uniform(rng, 300, 2000)
        center = rng.uniform(0, size)
        radii, lean = rng.uniform(4.5, 8.5, size=3), rng.uniform(-0.4, 0.4, size=3)
        somas.append(Soma(center, peak, radii, lean))
        for _ in range(rng.integers(3, 6)):
            direction = rng.normal(size=3)
            radius = rng.uniform(0.7, 1.3)
            paths += _branches(center, direction, radius, peak * rng.uniform(0.5, 1.0), 220, rng)
    for _ in range(2 * num_cells):
        start, direction = rng.uniform(0, size), rng.normal(size=3)
        peak = _log_uniform(rng, 60, 600)
        for sense in (direction, -direction):
            paths += _branches(start, sense, rng.uniform(0.3, 0.7), peak, 300, rng)
    return somas, Beads(
        np.concatenate([path.points for path in paths]),
        np.concatenate([path.radii for path in paths]),
        np.concatenate([path.peaks for path in paths]),
    )


def _branches(
    start: NDArray[np.float64],
    direction: NDArray[np.float64],
    radius: float,
    peak: float,
    length: float,
    rng: np.random.Generator,
    depth: int = 0,
) -> Iterator[Beads]:
    """One neurite and, thinner and shorter, what branches off it."""
    beads = max(8, round(2 * length * rng.uniform(0.5, 1.0)))
    # The heading is a slow random walk, so that a neurite wanders and does not kink.
    heading = direction / np.linalg.norm(direction) + np.cumsum(
        rng.normal(scale=0.035, size=(beads, 3)), axis=0
    )
    heading /= np.linalg.norm(heading, axis=1, keepdims=True)
    points = start + np.cumsum(0.5 * heading, axis=0)
    along = np.linspace(0, 1, beads)
    # Swellings (boutons): a few narrow peaks of radius and of light along the way.
    spots = rng.uniform(0, beads, size=rng.poisson(beads / 40))
    swelling = np.exp(-0.5 * np.square((np.arange(beads)[:, None] - spots) / 3)).sum(axis=1)
    radii = radius * (1 - 0.6 * along) * (1 + 0.4 * np.minimum(swelling, 1.5))
    peaks = peak * (1 - 0.4 * along) * (1 + 0.8 * np.minimum(swelling, 1.5))
    yield Beads(points, radii, peaks)
    if depth < 3:
        for _ in range(rng.poisson(1.6)):
            bead = int(rng.integers(beads // 6, beads))
            turned = heading[bead] + rng.normal(scale=0.6, size=3)
            yield from _branches(
                points[bead], turned, 0.8 * radii[bead], 0.75 * peak, 0.6 * length, rng, depth + 1
            )


def add_beads(volume: FloatArray, beads: Beads) -> None:
    """Add each bead, blurred: a Gaussian that is exact between voxels, so nothing is jagged."""
    points, radii, peaks = beads.points, beads.radii, beads.peaks
    limits = np.array(volume.shape)
    sigmas = np.sqrt(np.square(radii)[:, None] + np.square(PSF_SIGMA))
    # Beads of spacing d and height h lay a tube whose axis has height h sqrt(2 pi) sigma / d; sigma
    # along the path depends on its direction, for which the geometric mean stands in.
    heights = peaks * 0.5 / (np.sqrt(2 * np.pi) * np.prod(sigmas, axis=1) ** (1 / 3))
    reach = np.ceil(3.5 * sigmas.max(axis=1)).astype(int)
    nearest = np.rint(points).astype(int)
    inside = ((nearest > -reach[:, None]) & (nearest < limits + reach[:, None])).all(axis=1)
    flat = volume.reshape(-1)
    for span in np.unique(reach[inside]):
        offsets = np.arange(-span, span + 1)
        chosen = np.flatnonzero(inside & (reach == span))
        # Some beads at a time: each turns into hundreds of voxels.
        for some in np.array_split(chosen, 1 + chosen.size * len(offsets) ** 3 // _KERNEL_VOXELS):
            places = nearest[some][:, :, None] + offsets
            shapes = np.exp(
                -0.5 * np.square((places - points[some][:, :, None]) / sigmas[some][:, :, None])
            ).astype(np.float32)
            shapes[(places < 0) | (places >= limits[:, None])] = 0
            strides = np.array([volume.shape[1] * volume.shape[2], volume.shape[2], 1])[:, None]
            z, y, x = _crossed(np.clip(places, 0, limits[:, None] - 1) * strides)
            index = z + y + x
            z, y, x = _crossed(shapes)
            light = heights[some].astype(np.float32)[:, None, None, None] * z * y * x
            np.add.at(flat, index.reshape(-1), light.reshape(-1))


def _crossed(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Shape (n, 3, k) as three arrays that broadcast to (n, k, k, k)."""
    return (
        values[:, 0, :, None, None],
        values[:, 1, None, :, None],
        values[:, 2, None, None, :],
    )


def add_soma(volume: FloatArray, soma: Soma) -> None:
    """Add a cell body with a blurred rim and a dimmer nucleus."""
    center, radii, lean = soma.center, soma.radii, soma.lean
    low = np.maximum(np.floor(center - 2 * radii), 0).astype(int)
    high = np.minimum(np.ceil(center + 2 * radii) + 1, volume.shape).astype(int)
    if (low >= high).any():
        return
    axes = [np.arange(a, b) - c for a, b, c in zip(low, high, center, strict=True)]
    z, y, x = np.meshgrid(*axes, indexing="ij", sparse=True)
    distance = np.sqrt(
        np.square((z + lean[0] * y) / radii[0])
        + np.square((y + lean[1] * x) / radii[1])
        + np.square((x + lean[2] * z) / radii[2])
    )
    # A logistic rim of this width is as soft as an edge that a Gaussian of 1.3 voxels has blurred.
    rim = 0.6 * 1.3 / radii.mean()
    body = 1 / (1 + np.exp(np.minimum((distance - 1) / rim, 50)))
    nucleus = 1 / (1 + np.exp(np.minimum((distance - 0.45) / rim, 50)))
    box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    volume[box] += (soma.peak * (body - 0.35 * nucleus)).astype(np.float32)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


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
    if has_lock(sink):  # of a run that has ended: this is its output no more
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
