"""Synthetic light-sheet volumes with a known truth, and the noise of a camera.

A stand-in for a microscope in demos, training and tests: no file and no download, the same numbers
from the same seed (up to the rounding of exp and sin on another processor). It imitates how such
data looks to a denoiser, not how neurons grow.

Intensities are ADU, the counts that a camera gives out; lengths are voxels; axes are z, y, x.

A `clean_volume` is made whole. A `Specimen` has no end and gives any box of itself, in memory that
goes with the box, so that a volume of any size can be written piece by piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .box import Box
from .grid import Grid, indices

FloatArray = NDArray[np.float32]

CAMERA_OFFSET = 100.0
"""ADU that the camera gives where no light falls."""
PSF_SIGMA = (1.6, 1.0, 1.0)
"""Blur of the microscope along z, y, x, as the standard deviation of a Gaussian in voxels."""
VOXELS_PER_CELL = 600_000
"""One cell body for each so many voxels, and two axons that only pass through."""
PERIOD = (240, 480, 480)
"""After so many voxels along z, y, x the structures of a `Specimen` come again; its noise never."""
NOISE_TILE = (8, 64, 64)
"""The boxes in which a `Specimen` draws its noise, each from a seed of its own."""
_AT_ONCE = (128, 128, 128)
"""The most of a `Specimen` that is made at once: whole tiles."""

_COARSE, _FINE, _FINE_SHARE = 80, 12, 0.35
"""Of the background: the knots of its two fields are so far apart; the second counts for less."""
_TAPS = range(-2, 4)
"""Of a periodic field: the knots that a voxel sees. Those further off weigh less than 1e-4."""
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
class Path:
    """A neurite as a string of beads, half a voxel apart; or many of them."""

    points: NDArray[np.float64]
    """Shape (beads, 3)."""
    radii: NDArray[np.float64]
    """Standard deviation across the neurite before blur, shape (beads,)."""
    peaks: NDArray[np.float64]
    """Intensity on the axis after blur, shape (beads,)."""


def clean_volume(shape: Sequence[int], seed: int) -> FloatArray:
    """A noiseless volume: branching neurites and cell bodies over a dim, uneven background.

    Shape (z, y, x), ADU: the offset of 100, a background of 20 to 60 above it, and structures from
    tens to 3000 above that (more where some cross), all blurred by `PSF_SIGMA`. Structures are cut
    by the volume's faces, as in a crop of something larger.
    """
    size = (int(shape[0]), int(shape[1]), int(shape[2]))
    rng = np.random.default_rng(seed)
    volume = CAMERA_OFFSET + _background(size, rng)
    somas, beads = _grown(size, rng)
    for soma in somas:
        _add_soma(volume, soma)
    _add_beads(volume, beads)
    return volume


class Specimen:
    """Microscopy without end in any direction; what lies in a box follows from the seed and from
    where the box is, and not from its size or from what was looked at before.

    It is what a `clean_volume` of the size of `PERIOD` would show, had it no faces: what leaves
    through one of them comes in through the opposite one. The beads of that period, some 50 MB, are
    held; whatever else is taken goes with the box.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = np.random.default_rng(seed)
        self._knots = [
            rng.standard_normal([length // apart for length in PERIOD], np.float32)
            for apart in (_COARSE, _FINE)
        ]
        somas, beads = _grown(PERIOD, rng)
        self._beads, self._margin = _around(beads), _furthest(beads)
        self._somas = [image for soma in somas for image in _images(soma)]

    def clean(self, box: Box) -> FloatArray:
        """What is there without noise, of the shape of ``box`` (z, y, x), in ADU."""
        volume = np.empty(box.shape, np.float32)
        for part in Grid(box, PERIOD):
            home = tuple(a % length for a, length in zip(part.start, PERIOD, strict=True))
            volume[part.within(box)] = self._in_period(Box.of(home, part.shape))
        return volume

    def without_noise(self, box: Box) -> NDArray[np.uint16]:
        """`clean`, rounded."""
        return np.clip(np.rint(self.clean(box)), 0, 65535).astype(np.uint16)

    def image(self, box: Box) -> NDArray[np.uint16]:
        """What the camera of `noisy` makes of it, of the shape of ``box`` (z, y, x)."""
        image = np.empty(box.shape, np.uint16)
        for part in Grid(box, _AT_ONCE):
            image[part.within(box)] = self._seen(part)
        return image

    def _seen(self, box: Box) -> NDArray[np.uint16]:
        # How many numbers a Poisson variate uses up depends on its mean, so tiles are made whole.
        tiles = Grid(box, NOISE_TILE)
        ends = (np.multiply(end, NOISE_TILE) for end in (tiles.cells.start, tiles.cells.stop))
        whole = Box(*(tuple(end.tolist()) for end in ends))
        clean = self.clean(whole)
        image = np.empty(box.shape, np.uint16)
        for index in indices(tiles.cells):
            tile = Box.of(np.multiply(index, NOISE_TILE).tolist(), NOISE_TILE)
            part = tiles.cell(index)
            seen = noisy(clean[tile.within(whole)], [self._seed, *index])
            image[part.within(box)] = seen[part.within(tile)]
        return image

    def _in_period(self, box: Box) -> FloatArray:
        """`clean` of a box that lies within the period at the origin."""
        asked = box
        # One voxel more at the low faces, where `_add_beads` leaves out a last trace of some beads.
        box = box.grow((1,) * 3, (0,) * 3)
        field = _periodic(self._knots[0], _COARSE, box)
        field += np.float32(_FINE_SHARE) * _periodic(self._knots[1], _FINE, box)
        volume = CAMERA_OFFSET + _brightness(field)
        for soma in self._somas:
            _add_soma(volume, soma, box.start)
        # They are sorted by z, so that those of a slab are quickly at hand.
        beads, margin = self._beads, self._margin
        first, last = np.searchsorted(
            beads.points[:, 0], (box.start[0] - margin, box.stop[0] + margin)
        )
        own = slice(first, last)
        beads = Path(beads.points[own], beads.radii[own], beads.peaks[own])
        _add_beads(volume, beads, box.start)
        return volume[asked.within(box)]


def noisy(
    clean: ArrayLike,
    seed: int | Sequence[int],
    *,
    gain: float = 10.0,
    read_noise: float = 10.0,
    offset: float = CAMERA_OFFSET,
) -> NDArray[np.uint16]:
    """What a camera makes of a clean volume in ADU: photons counted, then read, then rounded.

    ``gain`` is ADU for each photo-electron, ``read_noise`` the standard deviation in ADU that
    every voxel gets, ``offset`` the ADU of no light. So a voxel has mean ``clean`` and variance
    ``gain * (clean - offset) + read_noise**2``, until the 16 bits clip it.
    """
    rng = np.random.default_rng(seed)
    light = np.maximum(np.asarray(clean, np.float32) - np.float32(offset), 0)
    adu: NDArray[np.float64] = rng.poisson(light / gain) * gain + offset
    adu += read_noise * rng.standard_normal(adu.shape, np.float32)
    return np.clip(np.rint(adu), 0, 65535).astype(np.uint16)


def psnr(reference: ArrayLike, image: ArrayLike, data_range: float | None = None) -> float:
    """Peak signal-to-noise ratio in decibels: ``20 log10(peak / RMS error)``.

    The peak is ``data_range``, by default the reference's maximum less its minimum. Equal images
    give infinity.

    >>> psnr([0.0, 10.0], [1.0, 9.0])
    20.0
    """
    expected, got = np.asarray(reference, np.float64), np.asarray(image, np.float64)
    if expected.shape != got.shape:
        raise ValueError(f"the reference has shape {expected.shape}, the image {got.shape}")
    peak = float(np.ptp(expected)) if data_range is None else float(data_range)
    if not peak > 0:
        raise ValueError(f"the peak is {peak:g}; a flat reference needs a data_range above 0")
    rms = float(np.sqrt(np.mean(np.square(expected - got))))
    return float(20 * np.log10(peak / rms)) if rms else float("inf")


def _grown(size: tuple[int, int, int], rng: np.random.Generator) -> tuple[list[Soma], Path]:
    """The cells of a volume and all that grows in it."""
    num_cells = max(1, round(float(np.prod(size)) / VOXELS_PER_CELL))
    somas: list[Soma] = []
    paths: list[Path] = []
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
    return somas, _joined(paths)


def _joined(paths: Sequence[Path]) -> Path:
    return Path(
        np.concatenate([path.points for path in paths]),
        np.concatenate([path.radii for path in paths]),
        np.concatenate([path.peaks for path in paths]),
    )


def _background(size: tuple[int, int, int], rng: np.random.Generator) -> FloatArray:
    """Light above the offset: 20 to 60 ADU, uneven over the field of view and over a few cells."""
    field = _smooth_noise(size, _COARSE, rng) + _FINE_SHARE * _smooth_noise(size, _FINE, rng)
    return _brightness(field)


def _brightness(field: FloatArray) -> FloatArray:
    # A fixed curve, not the volume's own extremes: a volume's corner is as dim in a larger volume.
    return np.asarray(40 + 20 * np.tanh(0.8 * field), np.float32)


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


def _periodic(knots: FloatArray, apart: int, box: Box) -> FloatArray:
    """Like `_smooth_noise`, of knots that are as many as a period has, within a box.

    Each voxel is a sum of the same terms in the same order whatever the box is, which a product of
    matrices would not promise.
    """
    field = knots
    for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        places = np.arange(start, stop)
        nearest = places // apart
        weights = [np.exp(-0.5 * np.square((places / apart - nearest - t) / 0.7)) for t in _TAPS]
        norm = np.sqrt(sum(np.square(weight) for weight in weights))
        along = [-1 if a == axis else 1 for a in range(3)]
        summed: Any = 0
        for tap, weight in zip(_TAPS, weights, strict=True):
            share = (weight / norm).astype(np.float32).reshape(along)
            summed = summed + share * field.take((nearest + tap) % knots.shape[axis], axis)
        field = summed
    return field


def _around(beads: Path) -> Path:
    """The beads of a period and those of its neighbours that reach into it, sorted by z."""
    points = beads.points % PERIOD
    margin = _furthest(beads)
    which = np.arange(len(points))
    for axis, length in enumerate(PERIOD):
        low, high = points[:, axis] < margin, points[:, axis] > length - margin
        step = np.eye(3)[axis] * length
        points = np.concatenate([points, points[low] + step, points[high] - step])
        which = np.concatenate([which, which[low], which[high]])
    by_z = np.argsort(points[:, 0], kind="stable")
    points, which = points[by_z], which[by_z]
    return Path(points, beads.radii[which], beads.peaks[which])


def _images(soma: Soma) -> Iterator[Soma]:
    """A cell body of a period, as often as it reaches into the period."""
    reach = 2 * soma.radii + 2
    for by in itertools.product((-1, 0, 1), repeat=3):
        center = soma.center + np.multiply(by, PERIOD)
        if ((center > -reach) & (center < PERIOD + reach)).all():
            yield Soma(center, soma.peak, soma.radii, soma.lean)


def _branches(
    start: NDArray[np.float64],
    direction: NDArray[np.float64],
    radius: float,
    peak: float,
    length: float,
    rng: np.random.Generator,
    depth: int = 0,
) -> Iterator[Path]:
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
    yield Path(points, radii, peaks)
    if depth < 3:
        for _ in range(rng.poisson(1.6)):
            bead = int(rng.integers(beads // 6, beads))
            turned = heading[bead] + rng.normal(scale=0.6, size=3)
            yield from _branches(
                points[bead], turned, 0.8 * radii[bead], 0.75 * peak, 0.6 * length, rng, depth + 1
            )


def _furthest(beads: Path) -> int:
    """Voxels beyond which no bead is seen."""
    widest = np.sqrt(np.square(beads.radii.max(initial=0)) + np.square(PSF_SIGMA)).max()
    return int(np.ceil(3.5 * widest)) + 1


def _add_beads(volume: FloatArray, beads: Path, start: Sequence[int] = (0, 0, 0)) -> None:
    """Add each bead, blurred: a Gaussian that is exact between voxels, so nothing is jagged.

    ``start`` is where the volume's first voxel lies. What a voxel gets, and in which order, does
    not depend on what else is in the volume.
    """
    low, margin = np.array(start), _furthest(beads)
    high = low + volume.shape
    near = ((beads.points > low - margin) & (beads.points < high + margin)).all(axis=1)
    points, radii, peaks = beads.points[near], beads.radii[near], beads.peaks[near]
    sigmas = np.sqrt(np.square(radii)[:, None] + np.square(PSF_SIGMA))
    # Beads of spacing d and height h lay a tube whose axis has height h sqrt(2 pi) sigma / d; sigma
    # along the path depends on its direction, for which the geometric mean stands in.
    heights = peaks * 0.5 / (np.sqrt(2 * np.pi) * np.prod(sigmas, axis=1) ** (1 / 3))
    reach = np.ceil(3.5 * sigmas.max(axis=1)).astype(int)
    nearest = np.rint(points).astype(int)
    inside = ((nearest > low - reach[:, None]) & (nearest < high + reach[:, None])).all(axis=1)
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
            places -= low[:, None]
            limits = np.array(volume.shape)[:, None]
            shapes[(places < 0) | (places >= limits)] = 0
            strides = np.array([volume.shape[1] * volume.shape[2], volume.shape[2], 1])[:, None]
            z, y, x = _crossed(np.clip(places, 0, limits - 1) * strides)
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


def _add_soma(volume: FloatArray, soma: Soma, start: Sequence[int] = (0, 0, 0)) -> None:
    """Add a cell body with a blurred rim and a dimmer nucleus; ``start`` as in `_add_beads`."""
    center, radii, lean = soma.center, soma.radii, soma.lean
    low = np.maximum(np.floor(center - 2 * radii), start).astype(int)
    high = np.minimum(np.ceil(center + 2 * radii) + 1, np.add(start, volume.shape)).astype(int)
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
    box = tuple(slice(a, b) for a, b in zip(low - start, high - start, strict=True))
    volume[box] += (soma.peak * (body - 0.35 * nucleus)).astype(np.float32)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))
