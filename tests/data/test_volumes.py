"""Synthetic volumes: the same from the same seed, and a camera whose noise has known moments."""

import numpy as np
import pytest

from penstock.data.volumes import CAMERA_OFFSET, clean_volume, noisy

SHAPE = (24, 40, 56)


def test_a_seed_is_a_volume() -> None:
    volume = clean_volume(SHAPE, seed=5)
    assert volume.shape == SHAPE
    assert volume.dtype == np.float32
    np.testing.assert_array_equal(volume, clean_volume(SHAPE, seed=5))
    assert not np.array_equal(volume, clean_volume(SHAPE, seed=6))


def test_noise_is_a_function_of_its_seed() -> None:
    clean = clean_volume(SHAPE, seed=1)
    image = noisy(clean, seed=2)
    assert image.dtype == np.uint16
    np.testing.assert_array_equal(image, noisy(clean, seed=2))
    assert not np.array_equal(image, noisy(clean, seed=3))


def test_variance_rises_with_the_mean_by_the_gain() -> None:
    gain, read_noise = 7.0, 12.0
    levels = CAMERA_OFFSET + np.array([0.0, 50.0, 200.0, 1000.0, 3000.0])
    clean = np.repeat(levels[:, None], 100_000, axis=1)
    image = noisy(clean, seed=0, gain=gain, read_noise=read_noise).astype(np.float64)
    mean, variance = image.mean(axis=1), image.var(axis=1)
    np.testing.assert_allclose(mean, levels, atol=5 * np.sqrt(variance / 100_000).max())
    slope, rest = np.polyfit(mean - CAMERA_OFFSET, variance, 1)
    assert slope == pytest.approx(gain, rel=0.03)
    # Rounding to whole counts adds a twelfth.
    assert variance[0] == pytest.approx(read_noise**2 + 1 / 12, rel=0.03)
    assert rest == pytest.approx(read_noise**2, abs=60)


def test_sixteen_bits_clip() -> None:
    assert noisy(np.full(4, 80_000.0), seed=0).tolist() == [65535] * 4
    assert noisy(np.full(4, 0.0), seed=0, offset=0.0, read_noise=0.0).tolist() == [0] * 4
