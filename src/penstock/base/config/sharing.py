"""The knobs of a job that several processes share: a cluster's workers, or an array's elements."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, model_validator

from .knobs import Overwriting, Positive, Seconds, flag


def _share(value: object) -> str:
    element, _, elements = str(value).partition("/")
    numbers = re.fullmatch(r"[1-9]\d*/[1-9]\d*", str(value), re.ASCII)
    if numbers is None or int(element) > int(elements):
        raise ValueError(f"{str(value)!r} is not an element such as 1/64, counted from 1")
    return str(value)


Share = Annotated[str, BeforeValidator(_share)]
"""``3/64``: an element of an array, counted from 1, and the number of elements."""


def share_of(text: str) -> tuple[int, int]:
    """The element and the number of elements in a text such as ``3/64``."""
    element, _, elements = text.partition("/")
    return int(element), int(elements)


class OnWorkers(Overwriting):
    """Workers of a cluster, and how long a job waits for them."""

    groups: ClassVar = {
        "workers and parts": "cluster worker_timeout",
    }

    cluster: str | None = flag(
        None,
        help="workers of Dask: local or local:N, processes of this machine, or the address of a "
        "scheduler, such as tcp://HOST:8786",
    )
    worker_timeout: Seconds = flag(
        86400.0,
        help="how long a job of a cluster waits while no worker is there, or while workers die "
        "and nothing is done, before it ends with exit code 3 (default: 24h)",
    )


class Stepwise(OnWorkers):
    """The knobs of a job of which each process does a step, as the elements of an array do."""

    groups: ClassVar = {
        "workers and parts": "prepare part finish",
    }

    prepare: bool = flag(
        False, help="make output and run folder for an array of --part i/n, and write no block"
    )
    part: Share | None = flag(
        None, help="i/n: element i of n, counted from 1, writes its share of the parts"
    )
    finish: bool = flag(
        False, help="check that all elements have written their shares, and close the output"
    )

    @property
    def step_flags(self) -> list[str]:
        """The flags of steps that are given."""
        steps = ("prepare", "statistics", "part", "finish")
        return [f"--{name}" for name in steps if getattr(self, name, None)]

    @property
    def is_element(self) -> bool:
        """Whether the process does one step of an array."""
        return bool(self.step_flags)

    @property
    def joins(self) -> bool:
        """Whether the process joins a run that --prepare began."""
        return self.is_element and not self.prepare

    @model_validator(mode="after")
    def _one_step(self) -> Stepwise:
        given = self.step_flags
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are two steps of an array; give one")
        if given and self.cluster is not None:
            raise ValueError(f"{given[0]} is a step of an array; --cluster does all of a job")
        return self


class Sharing(Stepwise):
    """The knobs that divide a job into parts among processes."""

    groups: ClassVar = {
        "workers and parts": "workers parts statistics",
    }

    workers: Positive | None = flag(
        None,
        help="workers that the job is cut for (default: those of the cluster, or the elements of "
        "the array)",
    )
    parts: Positive | None = flag(
        None, help="least number of parts that the job is cut into (default: as workers need)"
    )
    statistics: Share | None = flag(
        None,
        help="i/n: element i of n counts its share of the values for percentiles of the whole "
        "volume, after --prepare",
    )

    @property
    def shared_by(self) -> int | None:
        """Number of processes that share the job; None for one that does it alone."""
        for share in (self.part, self.statistics):
            if share is not None:
                return self.workers or share_of(share)[1]
        return self.workers or (1 if self.is_element or self.parts else None)

    @model_validator(mode="after")
    def _cut_for(self) -> Sharing:
        if self.prepare and self.workers is None:
            raise ValueError("--prepare needs --workers N, the number of elements of the array")
        return self
