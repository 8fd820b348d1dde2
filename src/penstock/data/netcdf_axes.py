"""The axes of a NetCDF file: samples, latitude and longitude, and levels.

The axis of the samples is time by the CF conventions, else an unlimited axis, else the first. Of
the others the last two are latitude and longitude, in either order, and the rest are levels. The
package `cf_xarray` is not enough: it looks at coordinates only, and does not recognise an axis
without them by its name, such as ``time``, ``lat`` and ``lon``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_CF = {
    "time": ("T", "time", ".+ since .+"),
    "latitude": ("Y", "lat|latitude", "degrees?_?(north|n)"),
    "longitude": ("X", "lon|longitude", "degrees?_?(east|e)"),
}
"""The letter of an axis by the CF conventions and, as patterns, its names and units."""


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
        times = (axis for axis in names if _is(dataset, axis, "time"))
        unlimited = (axis for axis in names if axis in dataset.encoding.get("unlimited_dims", ()))
        samples = next(itertools.chain(times, unlimited, names))
        ends = (_but(variable, samples)[-2:] for variable in series if samples in variable.dims)
        a, b = next(ends)
        turned = _is(dataset, a, "longitude") or _is(dataset, b, "latitude")
        return cls(samples, (b, a) if turned else (a, b))

    def fit(self, variable: Any) -> bool:
        """Whether a variable has latitude and longitude, in any order, as its last axes."""
        return {*_but(variable, self.samples)[-2:]} == {*self.horizontal}

    def levels(self, dataset: Any, variable: Any) -> list[str | None]:
        """Names of the levels, in order; a single None for a variable without levels."""
        between = _but(variable, self.samples)[:-2]
        if not between:
            return [None]
        labels = [
            [_label(value) for value in dataset[axis].values]
            if axis in dataset.coords
            else [str(i) for i in range(dataset.sizes[axis])]
            for axis in between
        ]
        return ["_".join(parts) for parts in itertools.product(*labels)]


def _but(variable: Any, samples: str) -> list[str]:
    """The axes of a variable but that of the samples."""
    return [str(axis) for axis in variable.dims if axis != samples]


def _is(dataset: Any, axis: str, what: str) -> bool:
    """Whether an axis is time, latitude or longitude, by its attributes or its name."""
    letter, names, units = _CF[what]
    about = dataset[axis].attrs if axis in dataset.coords else {}
    return bool(
        about.get("axis") == letter
        or about.get("standard_name") == what
        or re.fullmatch(units, str(about.get("units", "")), re.IGNORECASE)
        or re.fullmatch(names, axis, re.IGNORECASE)
    )


def _label(value: Any) -> str:
    """A coordinate as text: ``500`` for 500.0 too."""
    return f"{value:.10g}" if isinstance(value, np.floating) else str(value)
