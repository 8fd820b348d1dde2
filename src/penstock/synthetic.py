"""Synthetic light-sheet volumes with a known truth, and the noise of a camera.

A stand-in for a microscope in demos, training and tests: no file and no download, the same numbers
from the same seed (up to the rounding of exp and sin on another processor). It imitates how such
data looks to a denoiser, not how neurons grow.

Intensities are ADU, the counts that a camera gives out; lengths are voxels; axes are z, y, x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float32]

CAMERA_OFFSET = 100.0
"""ADU that the camera gives where no light falls."""
PSF_SIGMA = (1.6, 1.0, 1.0)
"""Blur of the microscope along z, y, x, as the standard deviation of a Gaussian in voxels."""
VOXELS_PER_CELL = 600_000
"""One cell body for each so many voxels, and two axons that only pass through."""


@dataclass(frozen=True, slots=True)
class Path:
    """A neurite as a string of beads, half a voxel apart."""

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
    num_cells = max(1, round(float(np.prod(size)) / VOXELS_PER_CELL))
    paths: list[Path] = []
    for _ in range(num_cells):
        peak = _log_uniform(rng, 300, 2000)
        center = rng.uniform(0, size)
        _add_soma(volume, center, peak, rng)
        for _ in range(rng.integers(3, 6)):
            direction = rng.normal(size=3)
            radius = rng.uniform(0.7, 1.3)
            paths += _branches(center, direction, radius, peak * rng.uniform(0.5, 1.0), 220, rng)
    for _ in range(2 * num_cells):
        start, direction = rng.uniform(0, size), rng.normal(size=3)
        peak = _log_uniform(rng, 60, 600)
        for sense in (direction, -direction):
            paths += _branches(start, sense, rng.uniform(0.3, 0.7), peak, 300, rng)
    _add_beads(volume, paths)
    return volume


def noisy(
    clean: ArrayLike,
    seed: int,
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


def _background(size: tuple[int, int, int], rng: np.random.Generator) -> FloatArray:
    """Light above the offset: 20 to 60 ADU, uneven over the field of view and over a few cells."""
    field = _smooth_noise(size, 80, rng) + 0.35 * _smooth_noise(size, 12, rng)
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


def _add_beads(volume: FloatArray, paths: Sequence[Path]) -> None:
    """Add each bead, blurred: a Gaussian that is exact between voxels, so nothing is jagged."""
    points = np.concatenate([path.points for path in paths])
    radii = np.concatenate([path.radii for path in paths])
    peaks = np.concatenate([path.peaks for path in paths])
    sigmas = np.sqrt(np.square(radii)[:, None] + np.square(PSF_SIGMA))
    # Beads of spacing d and height h lay a tube whose axis has height h sqrt(2 pi) sigma / d; sigma
    # along the path depends on its direction, for which the geometric mean stands in.
    heights = peaks * 0.5 / (np.sqrt(2 * np.pi) * np.prod(sigmas, axis=1) ** (1 / 3))
    reach = np.ceil(3.5 * sigmas.max(axis=1)).astype(int)
    nearest = np.rint(points).astype(int)
    inside = (
        (nearest > -reach[:, None]) & (nearest < np.array(volume.shape) + reach[:, None])
    ).all(axis=1)
    flat = volume.reshape(-1)
    for span in np.unique(reach[inside]):
        offsets = np.arange(-span, span + 1)
        chosen = np.flatnonzero(inside & (reach == span))
        # A few thousand beads at a time: each turns into hundreds of voxels.
        for some in np.array_split(chosen, 1 + chosen.size // 4096):
            places = nearest[some][:, :, None] + offsets
            shapes = np.exp(
                -0.5 * np.square((places - points[some][:, :, None]) / sigmas[some][:, :, None])
            ).astype(np.float32)
            limits = np.array(volume.shape)[:, None]
            shapes[(places < 0) | (places >= limits)] = 0
            places = np.clip(places, 0, limits - 1)
            index = np.ravel_multi_index(_crossed(places), volume.shape)
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


def _add_soma(
    volume: FloatArray, center: NDArray[np.float64], peak: float, rng: np.random.Generator
) -> None:
    """Add a cell body: a lopsided ellipsoid with a blurred rim and a dimmer nucleus."""
    radii = rng.uniform(4.5, 8.5, size=3)
    low = np.maximum(np.floor(center - 2 * radii), 0).astype(int)
    high = np.minimum(np.ceil(center + 2 * radii) + 1, volume.shape).astype(int)
    if (low >= high).any():
        return
    axes = [np.arange(a, b) - c for a, b, c in zip(low, high, center, strict=True)]
    z, y, x = np.meshgrid(*axes, indexing="ij", sparse=True)
    lean = rng.uniform(-0.4, 0.4, size=3)
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
    volume[box] += (peak * (body - 0.35 * nucleus)).astype(np.float32)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))
