"""The knobs of voxel size: that of the input, that of the network, and the way between both."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import BeforeValidator

from .knobs import Knobs, Names, as_number, flag, many

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf)", re.IGNORECASE)


def _checked(value: object) -> object:
    """Sizes as words; refuses what is no size."""
    words = tuple(str(word) for word in many(value))  # type: ignore[attr-defined]
    if words != ("none",):
        sizes_of(words)
    return words


def sizes_of(words: tuple[str, ...]) -> tuple[tuple[float, ...], str]:
    """Sizes along z y x and their unit, empty where none is said.

    Args:
        words: The words of a flag.

    Returns:
        Three sizes, and the unit.

    Raises:
        ValueError: They say no sizes.

    >>> sizes_of(("2", "0.5", "0.5", "um")), sizes_of(("4um",))
    (((2.0, 0.5, 0.5), 'um'), ((4.0, 4.0, 4.0), 'um'))
    """
    text = " ".join(words).replace(",", " ")
    numbers = [match[0] for match in _NUMBER.finditer(text)]
    unit = {word for word in _NUMBER.sub(" ", text).split() if word}
    sizes = tuple(float(number) for number in numbers)
    if len(sizes) not in (1, 3) or len(unit) > 1:
        raise ValueError(f"{text!r} is not a size, or one for each of z y x, as 2 0.5 0.5 um")
    if not all(0 < size < math.inf for size in sizes):
        raise ValueError(f"{text!r}: a size is a number above 0")
    return sizes * (4 - len(sizes)) if len(sizes) == 1 else sizes, "".join(unit)


Sizes = Annotated[Names, BeforeValidator(_checked)]
"""One number for every axis, or one for each of z y x, and perhaps a unit."""


class VoxelSize(Knobs):
    """The knobs of voxel size."""

    voxel_size: Sizes | None = flag(
        None,
        help="voxel size that the network was trained at, z y x, in the unit of the input or with "
        "one, as 2 0.5 0.5 um: blocks are resampled to it and back. none: as the input is "
        "(default: what the model says)",
        group="voxel size",
    )
    in_voxel_size: Sizes | None = flag(
        None, help="voxel size of the input, likewise, whatever the input says", group="voxel size"
    )
    resample_order: Annotated[Literal[0, 1, 3], BeforeValidator(as_number)] = flag(
        3,
        help="how the input is interpolated: 0 nearest, 1 linear, 3 cubic spline. Outputs go back "
        "by this order too, but at most by 1, and labels by the nearest voxel",
        group="voxel size",
    )
    output_voxel_size: Literal["input", "network"] = flag(
        "input",
        help="grid of the outputs: that of the input, or that of --voxel-size",
        group="voxel size",
    )
