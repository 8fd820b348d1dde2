"""Synthetic radar scenes: sea, ships, land and everything that looks like a ship.

A stand-in for xView3, so that preprocessing, training and scores can be tried without two
terabytes. One seed always gives the same numbers. The scenes hold what a detector must learn, but
not everything that an oceanographer would expect.

    sigma0 = (sea x wakes + hulls + sidelobes  or  land) x speckle + noise of the instrument
             sea:      falls with incidence, varies with the wind, K-distributed: gamma x gamma
             hulls:    bright ellipses, brighter with length; fishing boats are small and depolarise
             platforms and turbines: bright, round, strong sidelobes, no wake, and no vessels
             clutter:  rocks and breakers close to land, bright, unlabelled

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

PITCH = 10
"""Pixels between the nodes of the maps of elevation and wind."""
STRIP = 256
"""Rows that are made at once."""
LOOKS = 4.4
"""Equivalent number of looks of a Sentinel-1 GRD product: the shape of its gamma speckle."""
REACH = 96
"""Distance in pixels beyond which a target leaves no trace."""
APART = 25
"""Least pixels between two labelled targets."""
NEAR_SHORE = 1.9
"""Kilometres from the shore within which a quarter of the targets are sought."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something at sea that has a label."""

    row: float
    column: float
    kind: Literal["fishing", "vessel", "platform"]
    length_m: float
    heading: float
    """Radians, from down the rows towards right along the columns."""
    vv_db: float
    """Peak sigma0, before speckle."""
    vh_db: float
    wake: bool
    contrast_db: float
    """Decibels of the peak above the sea around it, in the better channel."""
    shore_km: float
    """Distance to the nearest vertex of the shoreline; infinite where there is none."""


class SyntheticScene:
    """One scene. Its maps and targets are made at once, its pixels by `strips`."""

    def __init__(self, size: tuple[int, int], seed: int, num_targets: int = 40) -> None:
        if min(size) < 4 * PITCH:
            raise UsageError(f"--size {size[0]} {size[1]}: each side must be at least {4 * PITCH}")
        self.size, self.seed = size, seed
        rng = np.random.default_rng([seed, 0])
        nodes = (-(-size[0] // PITCH) + 1, -(-size[1] // PITCH) + 1)
        self.elevation = _elevation(nodes, rng)
        """Metres at each node, above 0 on land, shape (rows / PITCH + 1, columns / PITCH + 1)."""
        self.roughness = _power_law(nodes, 1.6, rng).astype(np.float32)
        """The wind's trace on the sea, in dB."""
        self.wind_speed = float(rng.uniform(3, 12)) + self.roughness
        self.wind_direction = float(rng.uniform(0, 360)) + 15 * _power_law(nodes, 2.0, rng)
        self._sea_vv_db = float(rng.uniform(-18, -14))
        self._sea_vh_db = self._sea_vv_db - float(rng.uniform(9, 11))
        self._wedge = float(rng.uniform(0.01, 0.04))
        self.shoreline = _contours(self.elevation)
        """Arrays of shape (n, 2), row and column; none in open sea."""
        self.targets = self._place(num_targets, rng)
        self._rocks = self._place_rocks(rng)

    def strips(self) -> Iterator[tuple[int, FloatArray, FloatArray]]:
        """The first row of each strip, its VH and its VV in dB, shape (rows, columns), from top to
        bottom; NaN outside the swath."""
        for first in range(0, self.size[0], STRIP):
            stop = min(first + STRIP, self.size[0])
            rng = np.random.default_rng([self.seed, 1, first])
            vh, vv = self._strip(first, stop, rng)
            outside = self._outside(np.arange(first, stop)[:, None], np.arange(self.size[1]))
            vh[outside] = vv[outside] = np.nan
            yield first, vh, vv

    def _strip(
        self, first: int, stop: int, rng: np.random.Generator
    ) -> tuple[FloatArray, FloatArray]:
        shape = (stop - first, self.size[1])
        height = self._refined(self.elevation, first, stop)
        wind = self._refined(self.roughness, first, stop)
        swath = np.linspace(2.5, -2.5, self.size[1], dtype=np.float32)
        vv = _linear(wind + swath + np.float32(self._sea_vv_db))
        vh = _linear(wind + swath / 2 + np.float32(self._sea_vh_db))
        texture = _blocks(rng, 8.0, shape)
        breakers = (height > -6) & (height <= 0)
        texture[breakers] *= rng.standard_gamma(0.7, breakers.sum(), np.float32) / np.float32(0.5)
        vv *= texture
        vh *= texture
        for target in self.targets:
            self._draw(target, first, vv, vh)
        for row, column, power in self._rocks:
            if first <= row < stop:
                vv[int(row) - first, int(column)] += power
                vh[int(row) - first, int(column)] += power * np.float32(0.04)
        land = height > 0
        if land.any():
            ground = _linear(1.5 * wind[land] - 10) * _blocks(rng, 1.5, shape)[land]
            houses = rng.random(ground.size, np.float32) < 3e-4
            ground[houses] *= 30
            vv[land], vh[land] = ground, ground * np.float32(0.2)
        decibels = []
        for power, floor in ((vh, 10**-3.3), (vv, 10**-3.0)):
            speckle = rng.standard_gamma(LOOKS, shape, np.float32) / np.float32(LOOKS)
            decibels.append(10 * np.log10((power + np.float32(floor)) * speckle + np.float32(1e-6)))
        return decibels[0], decibels[1]

    def _draw(self, target: Target, first: int, vv: FloatArray, vh: FloatArray) -> None:
        """Add one target to the strip that begins at row ``first``."""
        top, left = int(target.row) - REACH, int(target.column) - REACH
        rows = slice(max(top, first), min(top + 2 * REACH + 1, first + vv.shape[0]))
        columns = slice(max(left, 0), min(left + 2 * REACH + 1, vv.shape[1]))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return
        down = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] - target.row
        right = np.arange(columns.start, columns.stop, dtype=np.float32) - target.column
        along = down * np.cos(target.heading) + right * np.sin(target.heading)
        across = right * np.cos(target.heading) - down * np.sin(target.heading)
        shape = _hull(target, along, across) + _sidelobes(target, down, right)
        here = (slice(rows.start - first, rows.stop - first), columns)
        if target.wake:
            sea = _wake(along, across)
            vv[here] *= sea
            vh[here] *= 1 + (sea - 1) / 2
        vv[here] += shape * np.float32(10 ** (target.vv_db / 10))
        vh[here] += shape * np.float32(10 ** (target.vh_db / 10))

    # --- what is where -----------------------------------------------------------------------

    def _place(self, wanted: int, rng: np.random.Generator) -> tuple[Target, ...]:
        spots = rng.uniform((2, 2), np.array(self.size) - 3, (80 * wanted + 200, 2))
        spots = spots[self._height(spots) < -8]
        spots = spots[~self._outside(spots[:, 0], spots[:, 1], margin=4)]
        shore = self._shore_km(spots)
        # A quarter of the targets lie near the shore, if there is one, so these come first.
        near = np.flatnonzero(shore <= NEAR_SHORE)[: wanted // 4 * 3]
        rest = np.setdiff1d(np.arange(len(spots)), near, assume_unique=True)
        taken: list[int] = []
        for candidates, most in ((near, wanted // 4), (rest, wanted)):
            for index in candidates:
                if len(taken) >= most:
                    break
                apart = np.hypot(*(spots[taken] - spots[index]).T) if taken else np.array([np.inf])
                if apart.min() >= APART:
                    taken.append(int(index))
        return tuple(self._target(spots[index], float(shore[index]), rng) for index in taken)

    def _target(self, spot: NDArray[np.float64], shore: float, rng: np.random.Generator) -> Target:
        row, column = float(spot[0]), float(spot[1])
        kinds: tuple[Literal["fishing", "vessel", "platform"], ...] = (
            "fishing",
            "vessel",
            "platform",
        )
        kind = kinds[rng.choice(3, p=[0.35, 0.45, 0.2])]
        low, high = {"fishing": (14, 60), "vessel": (50, 380), "platform": (30, 120)}[kind]
        length = float(np.exp(rng.uniform(np.log(low), np.log(high))))
        vv = {"fishing": -9.0, "vessel": -4.0, "platform": 3.0}[kind]
        vv += 6 * float(np.log10(length / 50)) + float(rng.normal(0, 3))
        vh = vv - {"fishing": 5.0, "vessel": 8.0, "platform": 13.0}[kind] + float(rng.normal())
        swath = 2.5 - 5 * column / self.size[1]
        wind = float(self.roughness[int(row / PITCH), int(column / PITCH)])
        contrast = max(
            vv - (self._sea_vv_db + wind + swath), vh - (self._sea_vh_db + wind + swath / 2)
        )
        moving = kind != "platform" and bool(rng.random() < 0.6)
        heading = float(rng.uniform(0, 2 * np.pi))
        return Target(row, column, kind, length, heading, vv, vh, moving, contrast, shore)

    def _place_rocks(self, rng: np.random.Generator) -> FloatArray:
        """Row, column and power of bright points in shallow water, shape (n, 3)."""
        if not self.shoreline:
            return np.zeros((0, 3), np.float32)
        vertices = np.concatenate(self.shoreline)
        some = vertices[rng.random(len(vertices)) < 0.08]
        spots = some + rng.normal(0, 2.5 * PITCH, some.shape)
        inside = np.all((spots >= 0) & (spots < np.array(self.size)), axis=1)
        spots = spots[inside]
        spots = spots[self._height(spots) < 0]
        power = 10 ** (rng.uniform(-9, -2, len(spots)) / 10)
        return np.column_stack([spots, power]).astype(np.float32)

    def _outside(
        self, rows: NDArray[Any], columns: NDArray[Any], margin: float = 0
    ) -> NDArray[np.bool_]:
        """Whether pixels lie outside the swath, which leans as an orbit does."""
        height, width = self.size
        wedge = self._wedge * width
        down = rows / height
        left, right = wedge * (1 - down) + margin, width - wedge * down - margin
        return np.asarray((columns < left) | (columns >= right))

    def _height(self, spots: NDArray[np.float64]) -> NDArray[np.float64]:
        ndimage = require("scipy.ndimage", "scenes")
        height = ndimage.map_coordinates(self.elevation, spots.T / PITCH, order=1)
        return np.asarray(height, np.float64)

    def _shore_km(self, spots: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self.shoreline or not len(spots):
            return np.full(len(spots), np.inf)
        tree = require("scipy.spatial", "scenes").cKDTree(np.concatenate(self.shoreline))
        return np.asarray(tree.query(spots)[0] * 0.01)

    def _refined(self, nodes: FloatArray, first: int, stop: int) -> FloatArray:
        """Rows ``first`` to ``stop`` of a map of nodes at every pixel, linear in between."""

        def between(values: FloatArray, at: NDArray[np.float32]) -> FloatArray:
            lower = np.minimum(at.astype(np.intp), len(values) - 2)
            part = (at - lower)[:, None]
            return np.asarray(values[lower] * (1 - part) + values[lower + 1] * part)

        rows = np.arange(first, stop, dtype=np.float32) / np.float32(PITCH)
        columns = np.arange(self.size[1], dtype=np.float32) / np.float32(PITCH)
        return np.ascontiguousarray(between(between(nodes, rows).T, columns).T)


def _hull(target: Target, along: NDArray[Any], across: NDArray[Any]) -> NDArray[Any]:
    """Power over its peak. No hull is thinner than the radar's own resolution."""
    length = target.length_m / 10
    beam = length if target.kind == "platform" else length / (3.5 if length < 6 else 6.0)
    half_length, half_beam = np.hypot(length, 1.8) / 2, np.hypot(beam, 1.8) / 2
    radius = (along / half_length) ** 2 + (across / half_beam) ** 2
    hull = 0.6 * np.exp(-(radius**2))
    # A bright point on deck: the bridge at the stern of a ship, else in the middle.
    stern = -0.35 * length if target.kind == "vessel" else 0.0
    deck = np.exp(-(((along - stern) / 1.3) ** 2 + (across / 1.3) ** 2))
    return np.asarray(hull + deck, np.float32)


def _sidelobes(target: Target, down: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """The cross of a bright point: decaying lobes along azimuth (rows) and range (columns)."""
    level = 0.25 if target.kind == "platform" else 0.06
    reach = 3 + target.length_m / 20
    lobes = np.zeros(np.broadcast_shapes(down.shape, right.shape), np.float32)
    for near, far in ((right, down), (down, right)):
        away = np.abs(far)
        decay = np.cos(np.pi * away / 2) ** 2 / (1 + away / reach) ** 2
        lobes += np.exp(-((near / 0.8) ** 2)) * decay * (away < REACH / 2)
    return np.float32(level) * lobes


def _wake(along: NDArray[Any], across: NDArray[Any]) -> NDArray[Any]:
    """A factor on the sea's power: dark where it was churned, bright at the wake's arms."""
    behind = np.clip(-along, 0, None)
    fade = np.exp(-behind / 40) * (behind > 1)
    churned = np.exp(-((across / (1 + behind / 30)) ** 2))
    arms = np.exp(-((np.abs(across) - 0.35 * behind) ** 2) / 2)
    return np.asarray(1 + fade * (0.9 * arms - 0.65 * churned), np.float32)


def _elevation(nodes: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    """Land on one side of most scenes, islands in some, open sea in one of five."""
    field = _power_law(nodes, 2.2, rng)
    angle = rng.uniform(0, 2 * np.pi)
    down, right = np.meshgrid(
        np.linspace(-1, 1, nodes[0]), np.linspace(-1, 1, nodes[1]), indexing="ij"
    )
    field = 0.6 * field + 1.2 * (down * np.cos(angle) + right * np.sin(angle))
    dry = 0.0 if rng.random() < 0.2 else rng.uniform(0.05, 0.3)
    sea_level = np.quantile(field, 1 - dry) if dry else float(field.max()) + 0.2
    metres = (field - sea_level) * 400
    return np.asarray(np.where(metres < 0, 2 * metres, metres), np.float32)


def _power_law(
    nodes: tuple[int, int], slope: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Noise whose amplitude falls with wave number to ``slope``; mean 0, standard deviation 1."""
    wave = np.hypot(np.fft.fftfreq(nodes[0])[:, None], np.fft.rfftfreq(nodes[1]))
    wave[0, 0] = 1
    amplitude = wave**-slope
    amplitude[0, 0] = 0
    waves = np.fft.rfft2(rng.standard_normal(nodes)) * amplitude
    field = np.fft.irfft2(waves, s=nodes)
    return np.asarray(field / field.std())


def _contours(elevation: FloatArray) -> list[NDArray[np.float64]]:
    """The shores between land and sea, as lines of (row, column) pixels."""
    if not (elevation > 0).any():
        return []
    lines = require("contourpy", "scenes").contour_generator(z=elevation).lines(0.0)
    return [np.asarray(line, np.float64)[:, ::-1] * PITCH for line in lines]


def _blocks(rng: np.random.Generator, shape_parameter: float, size: tuple[int, int]) -> FloatArray:
    """Gamma texture of mean 1, constant over blocks of 2 x 2 pixels."""
    coarse = (-(-size[0] // 2), -(-size[1] // 2))
    values = rng.standard_gamma(shape_parameter, coarse, np.float32) / np.float32(shape_parameter)
    return values.repeat(2, axis=0).repeat(2, axis=1)[: size[0], : size[1]]


def _linear(decibels: NDArray[Any]) -> FloatArray:
    return np.asarray(np.power(np.float32(10), decibels / np.float32(10)), np.float32)
