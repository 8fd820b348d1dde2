"""The knobs of ``penstock plan`` alone, which describe the workers of a large job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from ..units import parse_seconds
from .knobs import Bytes, Knobs, Natural, Positive, Seconds, flag, folder_place

RUNS = 20
"""Number of simulated runs by default. Their interval spans nearly all of them."""


def _rate(value: object) -> object:
    """Voxels per second, or the folder of a run that measured them."""
    try:
        rate = float(str(value))
    except ValueError:
        return folder_place(value)
    if not 0 < rate < math.inf:
        raise ValueError(f"{value} is not a number of voxels per second above 0")
    return rate


def _hours(value: object) -> float:
    """The seconds of a time; a number without a unit counts hours."""
    try:
        return 3600 * float(str(value))
    except ValueError:
        return parse_seconds(str(value))


def _stragglers(value: object) -> str:
    share, _, factor = str(value).partition(":")
    try:
        fits = float(share.removesuffix("%")) > 0 and 1 < float(factor) < math.inf
    except ValueError:
        fits = False
    if not fits or _share(share) > 1:
        raise ValueError(f"{str(value)!r} is not SHARE:FACTOR, such as 2%:3 or 0.02:3")
    return str(value)


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


_Above = Field(gt=0, allow_inf_nan=False)


class ScaleConfig(Knobs):
    """The knobs of ``penstock plan`` that describe workers, store and scheduler."""

    rate: Annotated[float | Path | str, BeforeValidator(_rate)] | None = flag(
        None,
        help="voxels per second of one worker, or the run folder of an infer that measured them",
    )
    mtbf: Annotated[float, BeforeValidator(_hours), _Above] | None = flag(
        None,
        help="mean time between two failures of a worker, in hours or with a unit such as 30d "
        "(default: workers do not fail)",
    )
    restart: Seconds | None = flag(
        None, help="time until a failed worker is back, such as 10min (default: never)"
    )
    stragglers: Annotated[str, BeforeValidator(_stragglers)] | None = flag(
        None, help="SHARE:FACTOR, such as 2%:3: that share of workers takes 3 times as long"
    )
    bandwidth: Annotated[Bytes, Field(ge=1)] | None = flag(
        None,
        help="bytes per second that the store serves to all workers together, such as 20GB "
        "(default: more than they need)",
        unit="bytes a second",
    )
    tasks_per_second: Annotated[float, _Above] = flag(
        1000.0,
        help="tasks per second that the scheduler can start (default: 1000, since Dask's "
        "documentation says that each task takes it about 1 ms)",
        unit="tasks a second",
    )
    simulate: tuple[Positive] | tuple[()] | None = flag(
        None, help=f"simulate the job, this many times (default: {RUNS} times)"
    )
    seed: Natural = flag(0, help="seed of the simulation")

    @property
    def runs(self) -> int:
        """Number of times to simulate the job; 0 for none."""
        if self.simulate is None:
            return 0
        return self.simulate[0] if self.simulate else RUNS

    @property
    def slow_share(self) -> float:
        """The share of workers that are slow."""
        return _share(self.stragglers.partition(":")[0]) if self.stragglers else 0.0

    @property
    def slowness(self) -> float:
        """How many times as long a slow worker takes."""
        return float(self.stragglers.partition(":")[2]) if self.stragglers else 1.0

    @model_validator(mode="after")
    def _goes_together(self) -> ScaleConfig:
        if self.restart is not None and self.mtbf is None:
            raise ValueError("--restart has no effect without --mtbf")
        if self.rate is None:
            for name in ("mtbf", "stragglers", "simulate"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"--{name} has no effect without --rate, the voxels per second of one "
                        "worker or the folder of a run"
                    )
        return self
