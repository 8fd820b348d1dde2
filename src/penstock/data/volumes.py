"""Synthetic light-sheet volumes with a known truth, and the noise of a camera.

A stand-in for a microscope in demos, training and tests, without files and downloads. One seed
always gives the same numbers (up to the rounding of exp and sin on another processor). It imitates
how such data looks to a denoiser, not how neurons grow.

Intensities are ADU, the counts that a camera gives out; lengths are voxels; axes are z, y, x.

A `clean_volume` is made whole; a `Specimen` (`specimen`) gives any box of a volume without end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .neurites import FloatArray, add_beads, add_soma, grown

CAMERA_OFFSET = 100.0
"""ADU that the camera gives where no light falls."""
COARSE, FINE, FINE_SHARE = 80, 12, 0.35
"""Voxels between the knots of the background's two fields, and the weight of the second."""


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
    field = _smooth_noise(size, COARSE, rng) + FINE_SHARE * _smooth_noise(size, FINE, rng)
    volume = CAMERA_OFFSET + brightness(field)
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


def psnr(reference: ArrayLike, image: ArrayLike, data_range: float | None = None) -> float:
    """Peak signal-to-noise ratio in decibels: ``20 log10(peak / RMS error)``.

    Args:
        reference: the truth.
        image: the image to compare with it, of the same shape.
        data_range: the peak; by default the reference's maximum less its minimum.

    Returns:
        Decibels; infinity for equal images.

    Raises:
        ValueError: the shapes differ, or the peak is not above 0.

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


def brightness(field: FloatArray) -> FloatArray:
    """Light above the offset, 20 to 60 ADU, from a field of unit variance."""
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
