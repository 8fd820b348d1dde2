"""The knobs of the decoders that are built in, which ``--decoder-option`` sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .knobs import Knobs, Positive, build, check_file, flag, many


def _numbers(value: object) -> object:
    """The numbers in ``1,2,2``."""
    return value.split(",") if isinstance(value, str) else many(value)


def _offsets(value: object) -> object:
    """The offsets in ``-1,0,0/0,-1,0``."""
    return value.split("/") if isinstance(value, str) else value


Sizes = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...],
    BeforeValidator(_numbers),
    Field(min_length=2, max_length=3),
]
Offset = Annotated[tuple[int, ...], BeforeValidator(_numbers), Field(min_length=2, max_length=3)]


class StarKnobs(Knobs):
    """The options of ``--decoder stardist``."""

    model: Path | None = flag(
        None, help="folder of a StarDist model, which says rays, grid and thresholds"
    )
    nms: Annotated[float, Field(ge=0, le=1)] | None = flag(
        None, help="overlap above which the less likely of two objects goes (default: 0.4)"
    )
    anisotropy: Sizes | None = flag(
        None, help="of the golden spiral along which distances z y x are given without a model"
    )
    grid: Annotated[tuple[Positive, ...], BeforeValidator(_numbers)] = flag(
        (1, 1, 1), help="voxels of the image for one of the scores, z y x"
    )


class FlowKnobs(Knobs):
    """The options of ``--decoder cellpose``."""

    niter: Positive = flag(200, help="steps along the flows")
    flow_threshold: Annotated[float, Field(ge=0)] = flag(
        0.4, help="in a plane: the most that the flows of an object may err; 0 for any"
    )


class AffinityKnobs(Knobs):
    """The options of ``--decoder affinities``."""

    offsets: Annotated[tuple[Offset, ...], BeforeValidator(_offsets)] = flag(
        help="the neighbour that each channel is about, z y x: those by faces come first"
    )
    strides: Annotated[tuple[Positive, ...], BeforeValidator(_numbers)] | None = flag(
        None, help="take other neighbours at every so many voxels, z y x"
    )


DECODERS: Mapping[str, type[Knobs]] = {
    "watershed": Knobs,
    "stardist": StarKnobs,
    "cellpose": FlowKnobs,
    "affinities": AffinityKnobs,
}
"""The decoders that are built in."""


def decoder_knobs(decoder: str, options: Mapping[str, Any]) -> Knobs:
    """The options of a decoder.

    Args:
        decoder: Its name, or ``FILE.py:FUNCTION``, which has none.
        options: Texts by name.

    Returns:
        The options, of the class in `DECODERS`.

    Raises:
        UsageError: An option is wrong, or there is none of that name.
    """
    kind = DECODERS.get(decoder, Knobs)
    check_file(kind, options, f"--decoder-option of {decoder}", whole=True)
    return build(kind, options)
