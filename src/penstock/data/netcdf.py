"""A NetCDF file as samples of stacked channels: what xarray reads, as `dataset` packs it.

Variables, time steps and levels become one axis of channels, in this order, the levels innermost;
so did the seed. The axis of the samples is time, by the CF conventions, else one without a limit,
else the first; of the others the last two are latitude and longitude, in this order or turned into
it, and the rest are levels. A variable that has no axis of samples is the same in all, and bounds
of cells are no variables.
Values are those of xarray, decoded (scale, offset, missing to NaN), cast to float32.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import UsageError, describe, require
from .packed.format import ArrayLayout, channel_name

_BOUNDS = ("bounds", "climatology")
"""Attributes that name another variable, of the ends of cells."""


@dataclass(frozen=True)
class Stacked:
    """The samples of a file."""

    layouts: dict[str, ArrayLayout]
    ids: range
    """Of each sample, the step of the file that its offset 0 is."""
    offsets: tuple[int, ...]
    """Steps that the inputs are taken from."""
    left_out: tuple[str, ...]
    """Variables of two axes and more that were not chosen and cannot be inputs."""
    _dataset: Any
    _variables: dict[str, tuple[tuple[str, int], ...]]
    _dim: str
    _horizontal: tuple[str, str]

    def sample(self, index: int) -> dict[str, NDArray[np.float32]]:
        made = {}
        for name, layout in self.layouts.items():
            array = np.empty(layout.shape, np.float32)
            first = 0
            for variable, offset in self._variables[name]:
                values = self._dataset[variable]
                if self._dim in values.dims:
                    values = values.isel({self._dim: self.ids[index] + offset})
                values = values.transpose(..., *self._horizontal).values
                levels = values.reshape(-1, *layout.shape[:2])
                array[..., first : first + len(levels)] = np.moveaxis(levels, 0, -1)
                first += len(levels)
            made[name] = array
        return made

    def close(self) -> None:
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

    Without ``inputs`` every variable of the right shape is one, without ``targets`` they are the
    inputs that vary. Without ``offsets`` the inputs are of steps -1 and 0, or of 0 alone in a file
    that is too short for both.
    """
    where = f"--from {path}"
    dataset = _open(path, where)
    try:
        return _lay_out(dataset, where, inputs, targets, offsets, target_offset, samples)
    except BaseException:
        dataset.close()
        raise


def _open(path: Path, where: str) -> Any:
    if not path.is_file():
        raise UsageError(f"{where} is not a file")
    xarray = require("xarray", "loaders")
    require("netCDF4", "loaders")
    try:
        with warnings.catch_warnings():
            # Integers are often said to have a missing value that no integer can be.
            warnings.simplefilter("ignore", xarray.SerializationWarning)
            # Times are not used, not all can be decoded, and a period in seconds is a number.
            return xarray.open_dataset(
                path, engine="netcdf4", cache=False, decode_times=False, decode_timedelta=False
            )
    except (OSError, ValueError) as error:
        raise UsageError(f"{where} is no NetCDF file: {describe(error)}") from error


def _lay_out(
    dataset: Any,
    where: str,
    inputs: Sequence[str] | None,
    targets: Sequence[str] | None,
    offsets: Sequence[int] | None,
    target_offset: int,
    samples: int | None,
) -> Stacked:
    bounds = {str(v.attrs.get(about)) for v in dataset.variables.values() for about in _BOUNDS}
    numeric = {
        str(name): v
        for name, v in dataset.data_vars.items()
        if v.dtype.kind in "fiu" and name not in bounds
    }
    for flag, names in (("--inputs", inputs or ()), ("--targets", targets or ())):
        for name in names:
            if name not in numeric:
                raise UsageError(
                    f"{flag} {name}: {where} has no such variable of numbers; it has "
                    f"{', '.join(numeric) or 'none'}"
                )
    series = [v for name, v in numeric.items() if v.ndim >= 3 and (not inputs or name in inputs)]
    if not series:
        raise UsageError(f"{where}: no variable has an axis of samples, latitude and longitude")
    dim, horizontal = _axes(dataset, series)
    left_out: tuple[str, ...] = ()
    if inputs is None:
        inputs = [n for n, v in numeric.items() if {*_others(v, dim)[-2:]} == {*horizontal}]
        others = set(numeric) - {*inputs, *(targets or ())}
        left_out = tuple(n for n, v in numeric.items() if n in others and v.ndim > 1)
    if targets is None:
        targets = [name for name in inputs if dim in numeric[name].dims]
    for name in (*inputs, *targets):
        variable = numeric[name]
        if {*_others(variable, dim)[-2:]} != {*horizontal}:
            raise UsageError(
                f"{where}: {name} has axes {', '.join(map(str, variable.dims))}; it must end in "
                f"{', '.join(horizontal)}"
            )
    steps = dataset.sizes[dim]
    if offsets is None:
        offsets = (-1, 0) if steps > max(0, target_offset) - min(-1, target_offset) else (0,)
    first = max(0, -min(*offsets, target_offset, 0))
    last = steps - max(*offsets, target_offset, 0)
    if first >= last:
        raise UsageError(
            f"{where}: {dim} has {steps} steps, too few for --offsets "
            f"{' '.join(map(str, offsets))} and --target-offset {target_offset}"
        )
    if samples is not None and samples > last - first:
        raise UsageError(f"--samples {samples}: {where} gives {last - first}")
    ids = range(first, last if samples is None else first + samples)
    grid = tuple(dataset.sizes[axis] for axis in horizontal)
    variables = {
        "inputs": tuple(
            (name, offset)
            for name in inputs
            for offset in (offsets if dim in numeric[name].dims else (0,))
        ),
        "targets": tuple((name, target_offset) for name in targets),
    }
    levels = {name: _levels(dataset, numeric[name], dim) for name in {*inputs, *targets}}
    # A chunk holds the levels of one variable at one time, as in the seed's data.
    chunk = max(map(len, levels.values()))
    layouts = {}
    for name, some in variables.items():
        channels = tuple(
            channel_name(variable, level, offset if dim in numeric[variable].dims else None)
            for variable, offset in some
            for level in levels[variable]
        )
        layouts[name] = ArrayLayout(
            ("lat", "lon", "channels"),
            (*grid, len(channels)),
            (*grid, min(chunk, len(channels))),
            channels,
        )
    return Stacked(layouts, ids, tuple(offsets), left_out, dataset, variables, dim, horizontal)


_CF = {
    "time": ("T", "time", ".+ since .+"),
    "latitude": ("Y", "lat|latitude", "degrees?_?(north|n)"),
    "longitude": ("X", "lon|longitude", "degrees?_?(east|e)"),
}
"""What tells an axis by the CF conventions: letter, and as patterns names and units."""


def _axes(dataset: Any, series: Sequence[Any]) -> tuple[str, tuple[str, str]]:
    """The axis of the samples; latitude and longitude."""
    found = dict.fromkeys(str(axis) for variable in series for axis in variable.dims)
    times = (axis for axis in found if _is(dataset, axis, "time"))
    unlimited = (axis for axis in found if axis in dataset.encoding.get("unlimited_dims", ()))
    dim = next(itertools.chain(times, unlimited, found))
    a, b = next(_others(variable, dim) for variable in series if dim in variable.dims)[-2:]
    turned = _is(dataset, a, "longitude") or _is(dataset, b, "latitude")
    return dim, (b, a) if turned else (a, b)


def _others(variable: Any, dim: str) -> list[str]:
    """The axes of a variable but that of the samples."""
    return [str(axis) for axis in variable.dims if axis != dim]


def _is(dataset: Any, axis: str, what: str) -> bool:
    """Whether an axis is time, latitude or longitude, by what is said of it or by its name."""
    letter, names, units = _CF[what]
    about = dataset[axis].attrs if axis in dataset.coords else {}
    return bool(
        about.get("axis") == letter
        or about.get("standard_name") == what
        or re.fullmatch(units, str(about.get("units", "")), re.IGNORECASE)
        or re.fullmatch(names, axis, re.IGNORECASE)
    )


def _levels(dataset: Any, variable: Any, dim: str) -> list[str | None]:
    """Names of what lies along the levels, None for a single unnamed one."""
    between = _others(variable, dim)[:-2]
    if not between:
        return [None]
    labels = [
        [_label(value) for value in dataset[axis].values]
        if axis in dataset.coords
        else [str(i) for i in range(dataset.sizes[axis])]
        for axis in between
    ]
    return ["_".join(parts) for parts in itertools.product(*labels)]


def _label(value: Any) -> str:
    """``500`` for 500.0 too."""
    return f"{value:.10g}" if isinstance(value, np.floating) else str(value)
