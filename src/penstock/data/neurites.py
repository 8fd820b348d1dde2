"""Neurites and cell bodies: random ones are grown and drawn into a volume.

Intensities are ADU, the counts that a camera gives out; lengths are voxels; axes are z, y, x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
