"""The progress of an inference, and the summary at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..base import format_bytes, format_seconds
from ..data import ChunkCount
from ..instruments import StageTotals
from .heads import Clipped

CLIPPED_SHARE = 0.01
"""Share of an output's values. The summary says so if more are clipped to its dtype's range."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come."""

    patches_done: int
    """Patches that the model has run."""
    patches_planned: int
    units_done: int
    """Units that are written."""
    units_planned: int
    seconds: float
    mb_per_second: float
    """Raw input bytes through the model per second, in units of 10^6."""


@dataclass(frozen=True)
class Summary:
    """What a job did."""

    seconds: float
    voxels: int
    input_bytes: int
    """Raw bytes of the input that this run turned into output."""
    units_written: int
    units_skipped: int
    """Units that an earlier run has written and this run left alone."""
    units_planned: int
    stages: dict[str, StageTotals]
    bound_by: str
    cpu_seconds: float
    """Seconds of processor time of this process, all threads added up."""
    peak_rss: int | None
    """Most bytes seen in the process tree. None if memory was not sampled."""
    planned_peak: int
    clipped: tuple[Clipped, ...] = ()
    """One entry for each head: the values that were clipped to the range of its output's dtype."""
    chunks: ChunkCount | None = None
    """Chunks of the input that this run read. None if the input does not tell which it holds."""
    unlocked: tuple[str, ...] = ()
    """One sentence for each output, or run folder, that was not locked, with the reason."""

    @property
    def mb_per_second(self) -> float:
        """Raw input bytes per second, in units of 10^6."""
        return self.input_bytes / self.seconds / 1e6

    @property
    def mvox_per_second(self) -> float:
        return self.voxels / self.seconds / 1e6

    def lines(self) -> Iterator[str]:
        """The summary for a reader."""
        yield f"Total time: {self.seconds:.2f} s"
        yield f"Throughput: {self.mb_per_second:.2f} MB/s"
        yield f"            {self.mvox_per_second:.2f} Mvox/s"
        for name, stage in self.stages.items():
            yield (
                f"  {name:<10} busy {format_seconds(stage.busy):>12}   waited "
                f"{format_seconds(stage.waited):>12}   in {stage.threads} thread(s)"
            )
        yield self.bound_by
        if self.peak_rss is not None:
            yield (
                f"Peak memory: {format_bytes(self.peak_rss)} of {format_bytes(self.planned_peak)} "
                "planned"
            )
        for head in self.clipped:
            if head.share > CLIPPED_SHARE:
                yield head.line()
        if self.chunks is not None and self.chunks.absent:
            yield self.chunks.line()
        yield from (f"Not locked: {why}" for why in self.unlocked)
        skipped = f", {self.units_skipped} by an earlier run" if self.units_skipped else ""
        yield f"Blocks written: {self.units_written} of {self.units_planned} planned{skipped}"
