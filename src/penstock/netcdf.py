"""A NetCDF file as samples of stacked channels: what xarray reads, as `dataset` packs it.

Variables, time steps and levels become one axis of channels, in this order, the levels innermost;
so did the seed. A variable's first axis is that of the samples, its last two are latitude and
longitude, and what lies between are levels. One that has no axis of samples is the same in all.
Values are those of xarray, decoded (scale, offset, missing to NaN), cast to float32.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dataset import Layout, channel_name
from .errors import UsageError, describe, require


@dataclass(frozen=True)
class Stacked:
    """The samples of a file."""

    layouts: dict[str, Layout]
    ids: range
    """Of each sample, the step along the file's first axis that its offset 0 is."""
    offsets: tuple[int, ...]
    """Steps that the inputs are taken from."""
    _dataset: Any
    _variables: dict[str, tuple[tuple[str, int], ...]]
    _dim: str

    def sample(self, index: int) -> dict[str, NDArray[np.float32]]:
        made = {}
        for name, layout in self.layouts.items():
            array = np.empty(layout.shape, np.float32)
            first = 0
            for variable, offset in self._variables[name]:
                values = self._dataset[variable]
                if self._dim in values.dims:
                    values = values.isel({self._dim: self.ids[index] + offset})
                levels = values.values.reshape(-1, *layout.shape[:2])
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
            return xarray.open_dataset(path, engine="netcdf4", cache=False)
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
    numeric = {str(name): v for name, v in dataset.data_vars.items() if v.dtype.kind in "fiu"}
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
    dim, horizontal = str(series[0].dims[0]), series[0].dims[-2:]
    if inputs is None:
        inputs = [n for n, v in numeric.items() if v.dims[-2:] == horizontal]
    if targets is None:
        targets = [name for name in inputs if dim in numeric[name].dims]
    for name in (*inputs, *targets):
        variable = numeric[name]
        if variable.dims[-2:] != horizontal or dim in variable.dims[1:]:
            raise UsageError(
                f"{where}: {name} has axes {', '.join(map(str, variable.dims))}; it must end in "
                f"{', '.join(map(str, horizontal))}, and {dim} may only come first"
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
        layouts[name] = Layout(
            ("lat", "lon", "channels"),
            (*grid, len(channels)),
            (*grid, min(chunk, len(channels))),
            channels,
        )
    return Stacked(layouts, ids, tuple(offsets), dataset, variables, dim)


def _levels(dataset: Any, variable: Any, dim: str) -> list[str | None]:
    """Names of what lies between the first axis and the last two, None for a single unnamed one."""
    between = [axis for axis in variable.dims[:-2] if axis != dim]
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
