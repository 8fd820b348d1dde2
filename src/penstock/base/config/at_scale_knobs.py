"""The knobs of ``penstock plan`` alone, which describe the workers of a large job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from .knobs import Bytes, Knobs, flag, folder_place


def _rate(value: object) -> object:
    """Voxels per second, or the folder of a run that measured them."""
    try:
        rate = float(str(value))
    except ValueError:
        return folder_place(value)
    if not 0 < rate < math.inf:
        raise ValueError(f"{value} is not a number of voxels per second above 0")
    return rate


class ScaleConfig(Knobs):
    """The knobs of ``penstock plan`` that describe workers and store."""

    rate: Annotated[float | Path | str, BeforeValidator(_rate)] | None = flag(
        None,
        help="voxels per second of one worker, or the run folder of an infer that measured them",
    )
    bandwidth: Annotated[Bytes, Field(ge=1)] | None = flag(
        None,
        help="bytes per second that the store serves to all workers together, such as 20GB "
        "(default: more than they need)",
        unit="bytes a second",
    )
