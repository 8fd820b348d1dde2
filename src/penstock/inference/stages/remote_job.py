"""A job as a process sees it that has neither model nor device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...base import InferConfig
from ...data import Resampling, Sink
from ..opening.heads import HeadFacts
from ..opening.network_voxels import frame_of_outputs
from ..opening.outputs import open_outputs
from ..opening.selection import open_input
from ..planning.plan import Plan

if TYPE_CHECKING:
    from ..opening.job import Job


@dataclass(frozen=True)
class RemoteJob:
    """A job as a worker of a cluster has opened it, for the client. It can be begun and completed
    like a `Job`, but not computed."""

    config: InferConfig
    plan: Plan
    fingerprint: dict[str, Any]
    maker: dict[str, Any]
    run_dir: Path | str | None
    selected: tuple[Sequence[int], Sequence[int]]
    """Times and channels of the input."""
    at_once: int
    """Number of channels that the model takes."""
    head_facts: Sequence[HeadFacts]
    way: Resampling | None
    """The way from the input to what the network sees; None if that is the same grid."""
    counts: bool
    """True if the values of the input are to be counted for percentiles."""

    @cached_property
    def sinks(self) -> list[Sink]:
        """The outputs, opened here with what the worker has found out about the model's heads."""
        source = frame_of_outputs(self.config, open_input(self.config), self.way)
        outputs = open_outputs(self.config, source, self.selected, self.at_once, self.head_facts)
        return [output.sink for output in outputs]


Runnable: TypeAlias = "Job | RemoteJob"
"""A job that can be begun and completed."""
