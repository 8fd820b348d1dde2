"""What the attributes of an array say of its numbers, by the CF conventions.

    value = scale_factor * stored + add_offset
    NaN where stored is _FillValue or a missing_value, or lies outside valid_range

xarray writes these attributes, and Zarr itself knows nothing of them.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError

_MISSING = ("_FillValue", "missing_value")
NAMES = (
    *_MISSING, "scale_factor", "add_offset", "valid_range", "valid_min", "valid_max", "_Unsigned",
)  # fmt: skip
"""The attributes that say what numbers stand for."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How stored numbers stand for values."""

    stored: np.dtype[Any]
    """The dtype of the stored numbers; with a sign or without as ``_Unsigned`` says."""
    scale: float
    offset: float
    missing: tuple[float, ...]
    """Stored numbers that stand for no value."""
    lowest: float
    highest: float

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values: float32 if it has all digits of the stored numbers."""
        fits = self.stored.itemsize <= 2 or self.stored == np.float32
        return np.dtype(np.float32 if fits else np.float64)

    def __str__(self) -> str:
        text = f"{self.scale:g} * stored + {self.offset:g}"
        if self.missing:
            text += f", NaN where stored is {' or '.join(f'{each:g}' for each in self.missing)}"
        if np.isfinite([self.lowest, self.highest]).any():
            text += f", NaN outside {self.lowest:g} to {self.highest:g}"
        return text

    @property
    def note(self) -> str:
        """The sentence that a plan has on it."""
        return f"the input's attributes say value = {self}; --raw reads what is stored"

    def decode(self, stored: NDArray[Any], out: NDArray[Any]) -> None:
        """Put the values into ``out``, which has the shape (..., y, x), plane by plane."""
        for plane in np.ndindex(stored.shape[:-2]):
            numbers = stored[plane].view(self.stored)
            absent = np.isin(numbers, np.asarray(self.missing, self.stored))
            absent |= (numbers < self.lowest) | (numbers > self.highest)
            out[plane] = np.where(absent, np.nan, numbers * np.float64(self.scale) + self.offset)


def packing_of(
    attributes: Mapping[str, Any], dtype: np.dtype[Any], where: str, fill: float | None = None
) -> Packing | None:
    """The packing of an array.

    Args:
        attributes: Its attributes.
        dtype: The dtype of what is stored, in native byte order.
        where: What messages begin with.
        fill: The fill value of Zarr 2, where xarray has no other place for the missing value.

    Returns:
        The packing, or None where stored numbers are the values.

    Raises:
        UsageError: An attribute has no such value as it should have.
    """

    def numbers(name: str, count: int | None = None) -> list[float]:
        said = attributes.get(name)
        said = said.tolist() if isinstance(said, np.ndarray) else said
        listed = said if isinstance(said, list | tuple) else [] if said is None else [said]
        try:
            read = [number_of(each, dtype) for each in listed]
        except (ValueError, TypeError, struct.error, binascii.Error) as error:
            raise UsageError(f"{where}: its {name} is {said!r}, which is no number") from error
        if count is not None and read and len(read) != count:
            raise UsageError(f"{where}: its {name} is {said!r}; it must have {count} numbers")
        return read

    says = {"true": "u", "false": "i"}.get(str(attributes.get("_Unsigned", "")).lower())
    turned = dtype.kind in "iu" and says not in (None, dtype.kind)
    stored = np.dtype(f"{says}{dtype.itemsize}") if turned else dtype
    scale, offset = numbers("scale_factor", 1) or [1.0], numbers("add_offset", 1) or [0.0]
    ends = numbers("valid_range", 2) or [-np.inf, np.inf]
    lowest, highest = numbers("valid_min", 1) or ends[:1], numbers("valid_max", 1) or ends[1:]
    missing = [each for name in _MISSING for each in numbers(name)]
    packed = attributes.keys() & {"scale_factor", "add_offset"}
    by_xarray = dtype.kind in "iuf" and "_ARRAY_DIMENSIONS" in attributes
    # Others write these names too, with a fill value of 0, and their zeros are values.
    if fill is not None and (packed or (by_xarray and fill != 0)):
        missing.append(fill)
    if not (scale[0] and math.isfinite(scale[0]) and math.isfinite(offset[0])):
        raise UsageError(
            f"{where}: its scale_factor is {scale[0]:g} and its add_offset {offset[0]:g}, which "
            "leave nothing of the stored numbers; --raw reads those"
        )
    if turned:  # such a file says -1 for 255, or 255 for -1
        missing, lowest, highest = (_turned(each, stored) for each in (missing, lowest, highest))
    # A NaN stands for no value already, and a number that the dtype does not hold is nowhere.
    missing = [each for each in dict.fromkeys(missing) if not math.isnan(each)]
    if stored.kind in "iu":
        held = np.iinfo(stored)
        missing = [each for each in missing if held.min <= each <= held.max]
    packing = Packing(stored, scale[0], offset[0], tuple(missing), lowest[0], highest[0])
    plain = Packing(dtype, 1.0, 0.0, (), -np.inf, np.inf)
    return None if packing == plain else packing


def same_in_all(values: Sequence[Any], kind: str, where: str) -> Any:
    """The value of all bands of a raster; `UsageError` where they have different ones."""
    if len({str(value) for value in values}) > 1:  # a NaN is not equal to itself
        raise UsageError(
            f"{where}: its bands have different values of {kind}; --raw reads what is stored"
        )
    return values[0]


def _turned(numbers: Sequence[float], stored: np.dtype[Any]) -> list[float]:
    """Numbers in the range of the dtype ``stored``, where an attribute has the same bits as signed
    in place of unsigned, or the other way round."""
    size, least = 256**stored.itemsize, int(np.iinfo(stored).min)
    return [each if math.isinf(each) else (each - least) % size + least for each in numbers]


def number_of(said: Any, dtype: np.dtype[Any]) -> float:
    """A number of an attribute of an array: a whole one for integers, as no float has all digits of
    one of 64 bits. For Zarr 3 xarray writes the fill value of floats in base64."""
    if dtype.kind in "iu" and not isinstance(said, float):
        with suppress(ValueError):
            return int(said)
    if isinstance(said, str) and dtype.kind == "f":
        try:
            return float(said)
        except ValueError:
            return float(struct.unpack("<d", base64.standard_b64decode(said))[0])
    return float(said)
