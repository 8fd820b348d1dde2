"""Synthetic radar scenes: sea, ships, land.

A stand-in for xView3, so that preprocessing, training and scores can be tried without two
terabytes. One seed always gives the same numbers. The scenes hold what a detector must learn, but
not everything that an oceanographer would expect.

    sigma0 = (sea x texture + hulls  or  land) x speckle + noise of the instrument
             sea:    falls with incidence, varies with the wind, K-distributed: gamma x gamma
             hulls:  bright ellipses, brighter with length; fishing boats are small and depolarise,
                     platforms are round and no vessels

Coordinates are (row, column) of pixels of 10 m. A scene is made strip by strip, so that one of
30,000 x 30,000 pixels needs no more memory than its strips and the maps at `PITCH`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, require

FloatArray = NDArray[np.float32]
Kind = Literal["fishing", "vessel", "platform"]

PITCH = 10
"""Pixels along a side of a cell of the maps of elevation and wind."""
STRIP = 256
"""Rows that are made at once."""
LOOKS = 4.4
"""Equivalent number of looks of a Sentinel-1 GRD product: the shape of its gamma speckle."""
REACH = 40
"""Distance in pixels beyond which a target leaves no trace."""
APART = 25
"""Least pixels between two labelled targets."""
_KINDS: tuple[Kind, ...] = ("fishing", "vessel", "platform")
_LENGTHS = {"fishing": (14, 60), "vessel": (50, 380), "platform": (30, 120)}
_VV_DB = {"fishing": -9.0, "vessel": -4.0, "platform": 3.0}
_VH_BELOW_VV = {"fishing": 5.0, "vessel": 8.0, "platform": 13.0}


@dataclass(frozen=True, slots=True)
class Target:
    """Something at sea that has a label."""

    row: float
    column: float
    kind: Kind
    length_m: float
    heading: float
    """Radians, from down the rows towards right along the columns."""
    vv_db: float
    """Peak sigma0, before speckle."""
    vh_db: float
    contrast_db: float
    """Decibels of the peak above the usual sea, in the better channel."""
    shore_km: float
    """Distance to the nearest vertex of the shoreline; infinite where there is none."""


class SyntheticScene:
    """One scene. Its maps and targets are made at once, its pixels by `strips`."""

    def __init__(self, size: tuple[int, int], seed: int, num_targets: int = 40) -> None:
        if min(size) < 4 * PITCH:
            raise UsageError(f"--size {size[0]} {size[1]}: each side must be at least {4 * PITCH}")
        self.size, self.seed = size, seed
        rng = np.random.default_rng([seed, 0])
        cells = (-(-size[0] // PITCH), -(-size[1] // PITCH))
        self.elevation = _elevation(cells, rng)
        """Metres in each cell, above 0 on land, shape (rows / PITCH, columns / PITCH)."""
        self.roughness = _smooth_noise(cells, 1.6, rng).astype(np.float32)
        """The wind's trace on the sea, in dB."""
        self._sea_vv_db = float(rng.uniform(-18, -14))
        self._sea_vh_db = self._sea_vv_db - 10
        self.shoreline = _contours(self.elevation)
        """Arrays of shape (n, 2), row and column; none in open sea."""
        self.targets = self._place(num_targets, rng)

    def strips(self) -> Iterator[tuple[int, FloatArray, FloatArray]]:
        """The first row of each strip, its VH and its VV in dB, shape (rows, columns), from top to
        bottom; NaN outside the swath."""
        for first in range(0, self.size[0], STRIP):
            rows = np.arange(first, min(first + STRIP, self.size[0]))
            yield first, *self._strip(rows, np.random.default_rng([self.seed, 1, first]))

    def _strip(
        self, rows: NDArray[np.intp], rng: np.random.Generator
    ) -> tuple[FloatArray, FloatArray]:
        columns = np.arange(self.size[1])
        cells = np.ix_(rows // PITCH, columns // PITCH)
        land, wind = self.elevation[cells] > 0, self.roughness[cells]
        texture = rng.standard_gamma(8, land.shape, np.float32) / 8
        swath = np.linspace(2.5, -2.5, self.size[1], dtype=np.float32)
        vv = np.where(land, _linear(1.5 * wind - 10), _linear(wind + swath + self._sea_vv_db))
        vh = np.where(land, vv / 5, _linear(wind + swath / 2 + self._sea_vh_db))
        vv, vh = vv * texture, vh * texture
        for target in self.targets:
            self._draw(target, int(rows[0]), vv, vh)
        decibels = []
        for power, floor in ((vh, 10**-3.3), (vv, 10**-3.0)):
            speckle = rng.standard_gamma(LOOKS, land.shape, np.float32) / LOOKS
            values = 10 * np.log10((power + floor) * speckle + 1e-6)
            values[self._outside(rows[:, None], columns)] = np.nan
            decibels.append(values.astype(np.float32))
        return decibels[0], decibels[1]

    def _draw(self, target: Target, first: int, vv: FloatArray, vh: FloatArray) -> None:
        """Add one target to the strip that begins at row ``first``."""
        top, left = int(target.row) - REACH, int(target.column) - REACH
        rows = slice(max(top - first, 0), max(top - first + 2 * REACH + 1, 0))
        columns = slice(max(left, 0), left + 2 * REACH + 1)
        here = np.s_[rows, columns]
        down = np.arange(first, first + len(vv))[rows, None] - target.row
        right = np.arange(vv.shape[1])[columns] - target.column
        along = down * np.cos(target.heading) + right * np.sin(target.heading)
        across = right * np.cos(target.heading) - down * np.sin(target.heading)
        # No hull is thinner than the radar's own resolution.
        slender = 1 if target.kind == "platform" else 5
        half_length, half_beam = (np.hypot(target.length_m / 10 / n, 1.8) / 2 for n in (1, slender))
        hull = np.exp(-(((along / half_length) ** 2 + (across / half_beam) ** 2) ** 2))
        vv[here] += hull * 10 ** (target.vv_db / 10)
        vh[here] += hull * 10 ** (target.vh_db / 10)

    def _place(self, wanted: int, rng: np.random.Generator) -> tuple[Target, ...]:
        """Targets at random places at sea, far enough from each other."""
        targets: list[Target] = []
        for spot in rng.uniform((2, 2), np.array(self.size) - 3, (80 * wanted + 200, 2)):
            apart = (np.hypot(spot[0] - t.row, spot[1] - t.column) for t in targets)
            cell = tuple((spot // PITCH).astype(int))
            at_sea = self.elevation[cell] < -8 and not self._outside(spot[0], spot[1], 4)
            if len(targets) < wanted and at_sea and min(apart, default=np.inf) >= APART:
                targets.append(self._target(float(spot[0]), float(spot[1]), rng))
        return tuple(targets)

    def _target(self, row: float, column: float, rng: np.random.Generator) -> Target:
        kind = _KINDS[rng.choice(3, p=[0.35, 0.45, 0.2])]
        length = float(np.exp(rng.uniform(*np.log(_LENGTHS[kind]))))
        vv = _VV_DB[kind] + 6 * float(np.log10(length / 50)) + float(rng.normal(0, 3))
        vh = vv - _VH_BELOW_VV[kind] + float(rng.normal())
        above_sea = vv - self._sea_vv_db, vh - self._sea_vh_db
        vertices = np.concatenate([np.full((1, 2), np.inf), *self.shoreline])
        shore = float(np.hypot(*(vertices - (row, column)).T).min()) * 0.01
        heading = float(rng.uniform(0, 2 * np.pi))
        return Target(row, column, kind, length, heading, vv, vh, max(above_sea), shore)

    def _outside(self, rows: Any, columns: Any, margin: float = 0) -> Any:
        """Whether pixels lie outside the swath, which leans as an orbit does."""
        height, width = self.size
        wedge = 0.025 * width
        left = wedge * (1 - rows / height) + margin
        return (columns < left) | (columns >= left + width - wedge - 2 * margin)


def _elevation(cells: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    """Land on one side of most scenes, islands in some, open sea in one of five."""
    angle = rng.uniform(0, 2 * np.pi)
    down, right = np.meshgrid(*(np.linspace(-1, 1, side) for side in cells), indexing="ij")
    slope = down * np.cos(angle) + right * np.sin(angle)
    field = 0.6 * _smooth_noise(cells, 2.2, rng) + 1.2 * slope
    dry = rng.uniform(0.05, 0.3)
    sea_level = float(field.max()) + 0.2 if rng.random() < 0.2 else np.quantile(field, 1 - dry)
    metres = (field - sea_level) * 400
    return np.asarray(np.where(metres < 0, 2 * metres, metres), np.float32)


def _smooth_noise(
    cells: tuple[int, int], slope: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Noise whose amplitude falls with wave number to ``slope``; mean 0, standard deviation 1."""
    wave = np.hypot(np.fft.fftfreq(cells[0])[:, None], np.fft.rfftfreq(cells[1]))
    wave[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(rng.standard_normal(cells)) * wave**-slope, s=cells)
    return np.asarray(field / field.std())


def _contours(elevation: FloatArray) -> list[NDArray[np.float64]]:
    """The shores between land and sea, as lines of (row, column) pixels."""
    lines = require("contourpy", "scenes").contour_generator(z=elevation).lines(0.0)
    return [(np.asarray(line, np.float64)[:, ::-1] + 0.5) * PITCH for line in lines]


def _linear(decibels: NDArray[Any]) -> FloatArray:
    return np.asarray(np.power(np.float32(10), decibels / np.float32(10)), np.float32)
