"""Synthetic weather: random fields with a power-law spectrum, in the geometry of the seed.

A `World` is a few hundred thousand random waves that travel. A field at any time is their sum, in
closed form, so any sample can be made alone, by any thread, and is the same each time. Channels
are as alike as those of a real atmosphere: thirteen levels are mixed from four modes, the time
steps of a sample follow from one another, land and height never change, and the clocks and the
sun are smooth. The presets are those of the training that the seed measured: its channels, in its
order, and its chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .packed.format import ArrayLayout, channel_name

FloatArray = NDArray[np.float32]

LEVELS = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
"""Pressure levels, in hPa."""
STEPS_PER_DAY = 8
"""Time steps of a day; the seed's data are three-hourly."""

_LARGEST = 3.0  # cycles around the globe: below it the spectrum is flat, so that no wave rules
_MODES = 4  # independent fields that the levels of one variable are mixed from
_DRIFT = 1.5  # cells eastward that a field moves in a step
_CHURN = 0.1  # radians by which a wave of one cycle around the globe strays in a step


@dataclass(frozen=True, slots=True)
class Variable:
    """A random variable: its mean and spread at the highest and the lowest level."""

    mean: tuple[float, float]
    spread: tuple[float, float]
    levels: tuple[int, ...] = ()
    """Levels in hPa; empty for a variable of the surface."""
    log_normal: bool = False
    """Positive, and the mean is the median."""


RANDOM = {
    "tmp": Variable((205, 288), (6, 14), LEVELS),
    "spfh": Variable((3e-6, 9e-3), (0.2, 0.6), LEVELS, log_normal=True),
    "ugrd": Variable((12, -1), (14, 6), LEVELS),
    "vgrd": Variable((0, 0), (9, 5), LEVELS),
    "dzdt": Variable((0, 0), (0.01, 0.03), LEVELS),
    "delz": Variable((-2600, -190), (70, 8), LEVELS),
    "pressfc": Variable((98_500, 98_500), (1_200, 1_200)),
    "ugrd10m": Variable((-0.5, -0.5), (5, 5)),
    "vgrd10m": Variable((0.2, 0.2), (4.5, 4.5)),
    "tmp2m": Variable((287, 287), (13, 13)),
    "spfh2m": Variable((8e-3, 8e-3), (0.6, 0.6), log_normal=True),
    "prateb_ave": Variable((2e-5, 2e-5), (0.8, 0.8), log_normal=True),
    "ulwrf_avetoa": Variable((235, 235), (35, 35)),
}
SUN, STATIC = "dswrf_avetoa", ("land_static", "hgtsfc_static")
CLOCKS = ("year_progress_sin", "year_progress_cos", "day_progress_sin", "day_progress_cos")

_UPPER_AIR = ("tmp", "spfh", "ugrd", "vgrd", "dzdt", "delz")
_SURFACE = ("pressfc", "ugrd10m", "vgrd10m", "tmp2m", "spfh2m")
_FORCINGS = (SUN, *CLOCKS)

_INPUTS = (
    *((name, t) for name in (*_UPPER_AIR, *_SURFACE, *_FORCINGS, *STATIC) for t in (-1, 0)),
    *((name, 1) for name in (*_FORCINGS, *STATIC)),
)
_TARGETS = tuple((name, 1) for name in (*_UPPER_AIR, *_SURFACE))


@dataclass(frozen=True, slots=True)
class Preset:
    """The channels of a data set, their layout and their chunks."""

    arrays: Mapping[str, tuple[tuple[str, int], ...]]
    """Variables of each array and their steps from the sample's time, in order."""
    chunk: int
    """Channels in a chunk, which holds the whole globe for one sample."""

    def layouts(self, grid: tuple[int, int]) -> dict[str, ArrayLayout]:
        """The layout of each array by its name, on a grid of (lat, lon) cells."""
        return {name: self._layout(variables, grid) for name, variables in self.arrays.items()}

    def _layout(self, variables: tuple[tuple[str, int], ...], grid: tuple[int, int]) -> ArrayLayout:
        names = tuple(
            channel_name(variable, None if level is None else str(level), offset)
            for variable, offset in variables
            for level in _levels(variable)
        )
        return ArrayLayout((*grid, len(names)), (*grid, self.chunk), names)


PRESETS = {
    "ufs-p1": Preset({"inputs": _INPUTS, "targets": _TARGETS}, 13),
    # Seventeen divides 187 and 85, so no chunk is padded.
    "ufs-p2": Preset(
        {"inputs": _INPUTS, "targets": (*_TARGETS, ("prateb_ave", 1), ("ulwrf_avetoa", 1))}, 17
    ),
}


def _levels(variable: str) -> tuple[int | None, ...]:
    return RANDOM[variable].levels or (None,) if variable in RANDOM else (None,)


class World:
    """Every variable at every time step, from one seed.

    The amplitude of a wave of k cycles around the globe falls as ``k ** -2`` for large k.
    """

    def __init__(self, grid: tuple[int, int], seed: int) -> None:
        self.grid = grid
        num_lat, num_lon = grid
        # Cells of longitude and latitude are alike, so both count in cycles around the globe.
        north = np.fft.fftfreq(num_lat, 1 / num_lon)[:, None]
        east = np.fft.rfftfreq(num_lon, 1 / num_lon)[None, :]
        cycles = np.hypot(north, east)
        amplitude = 1 / (_LARGEST**2 + cycles**2)
        amplitude[0, 0] = 0  # a field has mean 0
        # All waves but those of the first and the last column stand for their mirror image too.
        copies = np.where((east == 0) | (east == num_lon / 2), 1, 2)
        amplitude /= np.sqrt((copies * amplitude**2).sum())
        advance = 2 * np.pi * _DRIFT * np.broadcast_to(east, cycles.shape) / num_lon
        self._waves: dict[str, NDArray[np.complex64]] = {}
        self._speeds: dict[str, FloatArray] = {}
        for number, name in enumerate((*RANDOM, *STATIC)):
            rng = np.random.default_rng([seed, number])
            shape = (_MODES if _levels(name)[0] else 1, *cycles.shape)
            real, imaginary = rng.standard_normal((2, *shape)) * np.sqrt(0.5)
            self._waves[name] = (amplitude * (real + 1j * imaginary)).astype(np.complex64)
            churn = _CHURN * np.sqrt(cycles) * rng.standard_normal(shape)
            self._speeds[name] = (advance + churn).astype(np.float32)
        height = self._random_fields(STATIC[1], 0)
        self._static: dict[str, FloatArray] = {
            "land_static": (height > 0.4).astype(np.float32),
            "hgtsfc_static": np.maximum(height - np.float32(0.4), 0) * np.float32(900),
        }
        self._lat = np.deg2rad((np.arange(num_lat) + 0.5) / num_lat * 180 - 90)[:, None]
        self._lon = (np.arange(num_lon) / num_lon)[None, :]

    def values(self, variable: str, time: int) -> FloatArray:
        """A variable at a time step.

        Args:
            variable: its name.
            time: the step, `STEPS_PER_DAY` a day.

        Returns:
            Shape (levels, lat, lon); 1 level for a variable of the surface.
        """
        if variable in STATIC:
            return self._static[variable]
        if variable not in RANDOM:
            smooth = self._sun(time) if variable == SUN else self._clock(variable, time)
            return np.asarray(np.broadcast_to(smooth, (1, *self.grid)), np.float32)
        about = RANDOM[variable]
        fields = self._random_fields(variable, time)
        height = np.linspace(0, 1, len(about.levels) or 1, dtype=np.float32)[:, None, None]
        if about.levels:
            # Ever finer modes along the column, ever weaker: neighbouring levels are much alike.
            number = np.arange(_MODES)
            mix = 0.5**number * np.cos(np.pi * height[:, :, 0] * number)
            mix /= np.linalg.norm(mix, axis=1, keepdims=True)
            fields = np.tensordot(mix.astype(np.float32), fields, axes=1)
        top, bottom = np.log(about.mean) if about.log_normal else about.mean
        fields = fields * (about.spread[0] + (about.spread[1] - about.spread[0]) * height)
        fields += top + (bottom - top) * height
        if about.log_normal:
            np.exp(fields, out=fields)
        return np.asarray(fields, np.float32)

    def sample(self, preset: Preset, time: int) -> dict[str, FloatArray]:
        """The arrays of one sample.

        Args:
            preset: its channels and their layout.
            time: the step of its last inputs.

        Returns:
            Each array by its name, laid out as `Preset.layouts` says.
        """
        return {
            name: layout.stacked(self.values(of, time + step) for of, step in preset.arrays[name])
            for name, layout in preset.layouts(self.grid).items()
        }

    def _random_fields(self, variable: str, time: int) -> FloatArray:
        """Gaussian fields of mean 0 and variance 1 or nearly, shape (modes, lat, lon)."""
        phases = self._speeds[variable] * np.float32(time)
        waves = self._waves[variable] * np.exp(-1j * phases)
        return np.asarray(np.fft.irfft2(waves, self.grid, norm="forward"), np.float32)

    def _clock(self, variable: str, time: int) -> NDArray[np.float64]:
        """Sine or cosine of the share of the year or, by longitude, of the day that has passed."""
        days = time / STEPS_PER_DAY
        gone = days / 365.25 if variable.startswith("year") else days + self._lon
        turn = 2 * np.pi * np.asarray(gone % 1)
        return np.asarray(np.sin(turn) if variable.endswith("sin") else np.cos(turn))

    def _sun(self, time: int) -> NDArray[np.float64]:
        """Sunlight on the top of the atmosphere in W / m2: none at night."""
        days = time / STEPS_PER_DAY
        tilt = np.deg2rad(-23.44) * np.cos(2 * np.pi * (days + 10) / 365.25)
        noon = -np.cos(2 * np.pi * ((days + self._lon) % 1))
        height = np.sin(self._lat) * np.sin(tilt) + np.cos(self._lat) * np.cos(tilt) * noon
        return np.asarray(1361 * np.maximum(height, 0))
