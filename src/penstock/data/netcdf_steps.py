"""The axes of a NetCDF file by what it says of them, and gaps between its steps in time."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import UsageError
from .stores.cf_packing import packing_of

_CF = {
    "time": ("T", "time", ".+ since .+"),
    "latitude": ("Y", "lat|latitude", "degrees?_?(north|n)"),
    "longitude": ("X", "lon|longitude", "degrees?_?(east|e)"),
}
"""The letter of an axis by the CF conventions and, as patterns, its names and units."""
_OTHER_TIMES = ("Times", "XTIME", "valid_time")
"""Variables that say when a step is, in files whose axis of time has no coordinate of its own."""


def is_axis(dataset: Any, axis: str, what: str) -> bool:
    """Whether an axis is time, latitude or longitude, by its attributes or its name."""
    letter, names, units = _CF[what]
    about = dataset.variables[axis].attrs if axis in dataset.variables else {}
    return bool(
        about.get("axis") == letter
        or about.get("standard_name") == what
        or re.fullmatch(units, str(about.get("units", "")), re.IGNORECASE)
        or re.fullmatch(names, axis, re.IGNORECASE)
    )


def values_of(variable: Any) -> NDArray[Any]:
    """The values of a variable that xarray left as stored, decoded by the CF conventions."""
    stored: NDArray[Any] = variable.values
    if stored.dtype.kind not in "iuf":
        return stored
    stored = stored.astype(stored.dtype.newbyteorder("="), copy=False)
    packing = packing_of(variable.attrs, stored.dtype, str(variable.name))
    if packing is None:
        return stored
    values = np.empty(stored.shape, packing.dtype)
    packing.decode(stored, values)
    return values


def _times(dataset: Any, axis: str, where: str, *, needed: bool) -> NDArray[Any] | None:
    """The times of the steps of an axis, by its coordinate or another variable. None if there is no
    such variable; also if it cannot be read and the times are not ``needed``.

    Numbers without units that read as dates, such as 20000131 and 200001, are dates.
    """
    beside = [
        str(name)
        for name, variable in dataset.variables.items()
        if variable.dims == (axis,)
        and (is_axis(dataset, str(name), "time") or str(name) in _OTHER_TIMES)
        and not str(variable.attrs.get("standard_name")).startswith("forecast_")
    ]
    name = next(iter([axis] * (axis in dataset.coords) or beside), None)
    if name is None:
        return None
    times, units = values_of(dataset[name]), str(dataset[name].attrs.get("units", ""))
    if "%" in units:
        raise UsageError(
            f"{where}: {name} has units {units!r}, and the distance of two such steps is not their "
            "difference; give it units such as days since 2000-01-01"
        )
    if times.dtype.kind in "iuf":
        dates = None if units else _dates_of_numbers(times)
        return times if dates is None else dates
    if not is_axis(dataset, name, "time") and name not in _OTHER_TIMES:
        return None  # names of samples
    try:  # WRF writes 2000-01-31_06:00:00
        return np.char.replace(times.astype(str), "_", "T").astype("M8[s]")
    except ValueError as error:
        if not needed:
            return None
        raise UsageError(f"{where}: {name} holds {str(times[0])!r}, which is no date") from error


def _dates_of_numbers(times: NDArray[Any]) -> NDArray[Any] | None:
    """Numbers such as 20000131 or 200001 as dates; None if they are none."""
    if not np.isfinite(times).all() or (times < 0).any():
        return None
    texts = times.astype(np.int64).astype(str)
    unit = {"6": "M", "8": "D"}.get("".join({str(len(text)) for text in texts}))
    if unit is None:
        return None
    dates = [f"{text[:4]}-{text[4:6]}-{text[6:]}".rstrip("-") for text in texts]
    try:
        return np.array(dates, f"M8[{unit}]")
    except ValueError:
        return None


def gaps_of(
    dataset: Any, axis: str, reach: tuple[int, int], where: str
) -> tuple[float | None, NDArray[np.bool_]]:
    """The usual distance of two steps, and for each pair of neighbours whether theirs is another.

    ``reach`` are the first and the last step of a sample, relative to its own. Months differ in
    length, so only a distance of more than one and a half of the usual one, or of less than two
    thirds, is another.

    Raises `UsageError` if steps of a sample would not be in order, or if their distance cannot be
    told.
    """
    steps = dataset.sizes[axis]
    times = _times(dataset, axis, where, needed=reach != (0, 0))
    times = np.arange(steps) if times is None else times
    if steps < 2:
        return None, np.zeros(0, bool)
    apart = np.diff(times.astype(np.float64))
    wrong = np.flatnonzero(~(apart > 0))
    if wrong.size and reach != (0, 0):
        first = int(wrong[0])
        raise UsageError(
            f"{where}: {axis} does not increase from step {first} to {first + 1} ({times[first]} "
            f"to {times[first + 1]}), so steps beside each other are no neighbours; sort the file, "
            "and leave each time in it once"
        )
    usual = float(np.sort(apart)[len(apart) // 2])  # one that is there
    return usual, (apart > 1.5 * usual) | (1.5 * apart < usual)
