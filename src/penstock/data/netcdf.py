"""A NetCDF file as samples of stacked channels: xarray reads it, and `packed.write` writes it.

Variables, time steps and levels become one axis of channels, in this order, the levels innermost,
as in the seed. A variable without an axis of samples is the same in all samples. Variables with the
bounds of cells are left out. Values are decoded by the CF conventions (scale, offset, missing and
not valid to NaN) and cast to float32.

The axis of the samples is time by the CF conventions, else an unlimited axis, else the first.
Latitude and longitude are those of the others that the file says are, wherever they stand, else the
last two, in either order. The rest are levels. The package `cf_xarray` is not enough: it looks at
coordinates only, and does not recognise an axis without them by its name, such as ``time``, ``lat``
and ``lon``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import UsageError, as_usage_error, plural, require
from .netcdf_steps import gaps_of, is_axis, values_of
from .packed.format import ArrayLayout, channel_name

_BOUNDS = ("bounds", "climatology")
"""Attributes that name the variable with the bounds of cells."""


@dataclass(frozen=True)
class Axes:
    """The names of the axes of a file."""

    samples: str
    horizontal: tuple[str, str]
    """Latitude and longitude."""

    @classmethod
    def of(cls, dataset: Any, series: Sequence[Any]) -> Axes:
        """The axes of a file whose variables of three axes and more are ``series``."""
        names = dict.fromkeys(str(axis) for variable in series for axis in variable.dims)
        times = (axis for axis in names if is_axis(dataset, axis, "time"))
        unlimited = (axis for axis in names if axis in dataset.encoding.get("unlimited_dims", ()))
        samples = next(itertools.chain(times, unlimited, names))
        others = next(_but(each, samples) for each in series if samples in each.dims)
        for latitude, longitude in itertools.permutations(others, 2):
            if is_axis(dataset, latitude, "latitude") and is_axis(dataset, longitude, "longitude"):
                return cls(samples, (latitude, longitude))
        a, b = others[-2:]
        turned = is_axis(dataset, a, "longitude") or is_axis(dataset, b, "latitude")
        return cls(samples, (b, a) if turned else (a, b))

    def fit(self, variable: Any) -> bool:
        """Whether a variable has latitude and longitude."""
        return {*self.horizontal} <= {*variable.dims}

    def levels(self, dataset: Any, variable: Any) -> list[str | None]:
        """Names of the levels, in order; a single None for a variable without levels."""
        between = [axis for axis in _but(variable, self.samples) if axis not in self.horizontal]
        if not between:
            return [None]
        labels = [
            [_label(value) for value in values_of(dataset[axis])]
            if axis in dataset.coords
            else [str(i) for i in range(dataset.sizes[axis])]
            for axis in between
        ]
        return ["_".join(parts) for parts in itertools.product(*labels)]


@dataclass(frozen=True)
class Stacked:
    """The samples of a file."""

    layouts: dict[str, ArrayLayout]
    ids: Sequence[int]
    """The step of the file that is offset 0 of each sample."""
    step: float | None
    """The usual distance of two steps, in the units of their coordinate; None without one."""
    over_gaps: int
    """The number of samples that are left out, as their steps lie on both sides of a gap."""
    offsets: tuple[int, ...]
    """Steps of the inputs, relative to the sample's time."""
    left_out: tuple[str, ...]
    """Variables of two axes and more that were not chosen and cannot be inputs."""
    groups: tuple[str, ...]
    """Groups of the file, which are not read."""
    _dataset: Any
    _variables: dict[str, tuple[tuple[str, int], ...]]
    _axes: Axes

    def sample(self, index: int) -> dict[str, NDArray[np.float32]]:
        """The arrays of one sample by name, shaped as `layouts` says."""
        return {
            name: layout.stacked(
                self._levels(variable, self.ids[index] + offset)
                for variable, offset in self._variables[name]
            )
            for name, layout in self.layouts.items()
        }

    def _levels(self, variable: str, step: int) -> NDArray[Any]:
        """A variable at a step of the file, shape (levels, lat, lon)."""
        values = self._dataset[variable]
        if self._axes.samples in values.dims:
            values = values.isel({self._axes.samples: step})
        decoded = values_of(values.transpose(..., *self._axes.horizontal))
        return decoded.reshape(-1, *decoded.shape[-2:])

    def covered(self) -> dict[str, float]:
        """How many degrees of latitude and of longitude the cells cover, where the file says."""
        dataset, degrees = self._dataset, {}
        for name, axis in zip(("latitude", "longitude"), self._axes.horizontal, strict=True):
            if axis in dataset.coords and dataset.sizes[axis] > 1 and is_axis(dataset, axis, name):
                steps = np.abs(np.diff(dataset[axis].values))
                degrees[name] = float(np.median(steps)) * dataset.sizes[axis]
        return degrees

    def close(self) -> None:
        """Close the file."""
        self._dataset.close()


def open_netcdf(
    path: Path,
    *,
    inputs: Sequence[str] | None,
    targets: Sequence[str] | None,
    offsets: Sequence[int] | None,
    target_offset: int,
    samples: int | None,
) -> Stacked:
    """Open a file and lay its samples out; no values are read.

    Args:
        path: a NetCDF file.
        inputs: variables of the inputs; all of the right shape by default.
        targets: variables of the targets; the inputs that vary by default.
        offsets: steps of the inputs; by default -1 and 0, or 0 alone in a file too short for both.
        target_offset: the step of the targets.
        samples: how many samples; all that the file gives by default.

    Returns:
        The samples of the file. Close them when they are read.

    Raises:
        UsageError: the file cannot be read, lacks what was asked for, or has steps in disorder.
    """
    where = f"--from {path}"
    with contextlib.ExitStack() as opened:  # closes the file if it is refused
        dataset, groups = _open(path, where)
        opened.enter_context(dataset)
        bounds = {str(v.attrs.get(about)) for v in dataset.variables.values() for about in _BOUNDS}
        numeric = {
            str(name): variable
            for name, variable in dataset.data_vars.items()
            if variable.dtype.kind in "fiub" and name not in bounds
        }
        _check_there(numeric, {"--inputs": inputs, "--targets": targets}, where)
        series = [v for n, v in numeric.items() if v.ndim >= 3 and (not inputs or n in inputs)]
        if not series:
            unread = f"; its groups ({', '.join(groups)}) are not read" if groups else ""
            what = "no variable has an axis of samples, latitude and longitude"
            raise UsageError(f"{where}: {what}{unread}")
        axes = Axes.of(dataset, series)
        inputs, targets, left_out = _choose(numeric, axes, inputs, targets, where)
        steps = dataset.sizes[axes.samples]
        if offsets is None:
            offsets = (-1, 0) if steps > max(0, target_offset) - min(-1, target_offset) else (0,)
        ids, step, over_gaps = _ids(dataset, axes.samples, offsets, target_offset, samples, where)
        variables = {
            "inputs": tuple(
                (name, offset)
                for name in inputs
                for offset in (offsets if axes.samples in numeric[name].dims else (0,))
            ),
            "targets": tuple((name, target_offset) for name in targets),
        }
        layouts = _layouts(dataset, axes, variables)
        opened.pop_all()
    return Stacked(
        layouts, ids, step, over_gaps, tuple(offsets), left_out, groups, dataset, variables, axes
    )


def _open(path: Path, where: str) -> tuple[Any, tuple[str, ...]]:
    """A file's dataset as it is stored, and its groups, as xarray reads the root alone."""
    if not path.is_file():
        raise UsageError(f"{where} is not a file")
    xarray = require("xarray", "loaders")
    require("netCDF4", "loaders")
    with as_usage_error(f"{where} is not a NetCDF file", OSError, ValueError):
        store = xarray.backends.NetCDF4DataStore.open(path)
        # Times are not used, not all can be decoded, and a period in seconds is a number.
        dataset = xarray.open_dataset(
            store, cache=False, mask_and_scale=False, decode_times=False, decode_timedelta=False
        )
    return dataset, tuple(store.ds.groups)


def _check_there(
    numeric: Mapping[str, Any], chosen: Mapping[str, Sequence[str] | None], where: str
) -> None:
    for flag, names in chosen.items():
        for name in names or ():
            if name not in numeric:
                raise UsageError(
                    f"{flag} {name}: {where} has no such variable of numbers; it has "
                    f"{', '.join(numeric) or 'none'}"
                )


def _choose(
    numeric: Mapping[str, Any],
    axes: Axes,
    inputs: Sequence[str] | None,
    targets: Sequence[str] | None,
    where: str,
) -> tuple[Sequence[str], Sequence[str], tuple[str, ...]]:
    """The inputs, the targets, and the variables that nobody chose and that cannot be inputs."""
    left_out: tuple[str, ...] = ()
    if inputs is None:
        inputs = [name for name, variable in numeric.items() if axes.fit(variable)]
        others = set(numeric) - {*inputs, *(targets or ())}
        left_out = tuple(n for n, v in numeric.items() if n in others and v.ndim > 1)
    if targets is None:
        targets = [name for name in inputs if axes.samples in numeric[name].dims]
    for name in (*inputs, *targets):
        if not axes.fit(numeric[name]):
            raise UsageError(
                f"{where}: {name} has axes {', '.join(map(str, numeric[name].dims))}; it must "
                f"have {', '.join(axes.horizontal)}"
            )
    return inputs, targets, left_out


def _ids(
    dataset: Any,
    axis: str,
    offsets: Sequence[int],
    target_offset: int,
    samples: int | None,
    where: str,
) -> tuple[list[int], float | None, int]:
    """The steps of a file from which all offsets stay within it and cross no gap, the usual
    distance of two steps, and the number of samples that would cross one."""
    low, high = min(*offsets, target_offset, 0), max(*offsets, target_offset, 0)
    step, gaps = gaps_of(dataset, axis, (low, high), where)
    before = np.concatenate([[0], np.cumsum(gaps)])
    inside = range(-low, len(before) - high)
    ids = [i for i in inside if before[i + high] == before[i + low]]
    crossing = len(inside) - len(ids)
    if not ids:
        raise UsageError(
            f"{where}: {axis} has {plural(len(before), 'step')}, too "
            f"few{' without a gap' * bool(crossing)} for --offsets {' '.join(map(str, offsets))} "
            f"and --target-offset {target_offset}"
        )
    if samples is not None and samples > len(ids):
        raise UsageError(f"--samples {samples}: {where} gives {len(ids)}")
    return ids[:samples], step, crossing


def _layouts(
    dataset: Any, axes: Axes, variables: Mapping[str, Sequence[tuple[str, int]]]
) -> dict[str, ArrayLayout]:
    grid = tuple(dataset.sizes[axis] for axis in axes.horizontal)
    names = {name for some in variables.values() for name, _ in some}
    levels = {name: axes.levels(dataset, dataset[name]) for name in names}
    varies = {name: axes.samples in dataset[name].dims for name in names}
    # A chunk holds the levels of one variable at one time, as in the seed's data.
    chunk = max(map(len, levels.values()))
    layouts = {}
    for array, some in variables.items():
        channels = tuple(
            channel_name(name, level, offset if varies[name] else None)
            for name, offset in some
            for level in levels[name]
        )
        layouts[array] = ArrayLayout(
            (*grid, len(channels)),
            (*grid, min(chunk, len(channels))),
            channels,
        )
    return layouts


def _but(variable: Any, samples: str) -> list[str]:
    """The axes of a variable but that of the samples."""
    return [str(axis) for axis in variable.dims if axis != samples]


def _label(value: Any) -> str:
    """A coordinate as text: ``500`` for 500.0 too."""
    return f"{value:.10g}" if isinstance(value, np.floating) else str(value)
