"""The progress of an inference, and the summary at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from pydantic import TypeAdapter

from ...base import SUMMARY_FILE, format_bytes, format_seconds, group_by, plural
from ...data import ChunkCount
from ...instruments import StageTotals, bottleneck
from ..opening.heads import Clipped
from ..run_folder.folder import Folder
from ..run_folder.names import own_name

CLIPPED_SHARE = 0.01
"""Share of an output's values. The summary says so if more are clipped to its dtype's range."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job."""

    patches_done: int
    """Patches that the model has computed."""
    patches_planned: int
    blocks_done: int
    """Blocks that are written."""
    blocks_planned: int
    seconds: float
    mb_per_second: float
    """Raw input bytes through the model per second, in units of 10^6."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was left out of a job, as it is no sample."""

    computed: int
    """Patches that were computed."""
    patches: int
    """Patches that were left out."""
    voxels: int
    """Voxels that were given the fill value, in blocks that this run has written."""
    seconds: float | None
    """Seconds that a device would have taken for the patches that were left out, at the pace of the
    others; None if there were none."""

    def line(self, of: int) -> str:
        """The same in words. ``of`` is the number of voxels that were written."""
        patches = f"{self.computed:,} of {plural(self.computed + self.patches, 'patch')}"
        saved = "" if self.seconds is None else f"; about {format_seconds(self.seconds)} saved"
        filled = f"{100 * self.voxels / max(1, of):.1f} % of the voxels have the fill value"
        return f"Sample: {patches} computed, {filled}{saved}"


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The work of one of several processes."""

    name: str
    seconds: float
    """Seconds in which it computed parts."""
    voxels: int

    @property
    def mvox_per_second(self) -> float:
        return self.voxels / self.seconds / 1e6 if self.seconds else 0.0


@dataclass(frozen=True)
class Summary:
    """The result of a job: counts, times and sentences."""

    seconds: float
    voxels: int
    input_bytes: int
    """Raw bytes of the input that this run turned into output."""
    blocks_written: int
    blocks_skipped: int
    """Blocks that an earlier run has written, and this run has skipped."""
    blocks_planned: int
    stages: dict[str, StageTotals]
    bound_by: str
    cpu_seconds: float
    """Seconds of processor time of this process, all threads added up."""
    peak_rss: int | None
    """Most bytes seen in the process tree. None if memory was not sampled."""
    planned_peak: int
    clipped: tuple[Clipped, ...] = ()
    """One entry for each head: the values that were clipped to the range of its output's dtype."""
    not_finite: int = 0
    """Voxels of the input that this run read as NaN or infinite, in any channel."""
    left_out: LeftOut | None = None
    """Patches and voxels without sample. None if all was computed."""
    chunks: ChunkCount | None = None
    """Chunks of the input that this run read. None if the input does not tell which it holds."""
    unlocked: tuple[str, ...] = ()
    """One sentence for each output, or run folder, that was not locked, with the reason."""
    retries: int = 0
    """Reads and writes that failed and were tried again, each try counted."""
    retry_seconds: float = 0.0
    """Seconds that these took, all threads added up."""
    requests_repeated: int = 0
    """Requests to S3 or Google Cloud Storage that TensorStore sent again by itself."""
    workers: tuple[WorkerShare, ...] = ()
    """One entry for each process, if several shared the job."""
    startup_seconds: float = 0.0
    """Seconds before the first part of a job on a cluster began, for opening and percentiles."""
    values: str = ""
    """The scaling of values before the network saw them, in words."""
    seams: str = ""
    """The seams between patches in words: exact or not; empty if nothing is known."""
    notes: tuple[str, ...] = ()
    """Sentences on what else the reader should know, such as workers that died."""

    @property
    def mb_per_second(self) -> float:
        """Raw input bytes per second, in units of 10^6; NaN if no process left its times."""
        return self.input_bytes / (self.seconds or math.nan) / 1e6

    @property
    def mvox_per_second(self) -> float:
        return self.voxels / (self.seconds or math.nan) / 1e6

    def lines(self) -> Iterator[str]:
        """The summary in words."""
        if self.seconds:
            yield f"Total time: {self.seconds:.2f} s"
            of_all = "" if self.left_out is None else " of the volume, sample or not"
            yield f"Throughput: {self.mb_per_second:.2f} MB/s{of_all}"
            yield f"            {self.mvox_per_second:.2f} Mvox/s"
        yield from self._worker_lines()
        for name, stage in self.stages.items():
            yield (
                f"  {name:<10} busy {format_seconds(stage.busy):>12}   waited "
                f"{format_seconds(stage.waited):>12}   in {plural(stage.threads, 'thread')}"
            )
        yield self.bound_by
        yield from self._input_lines()
        if self.peak_rss is not None:
            yield (
                f"Peak memory: {format_bytes(self.peak_rss)} of {format_bytes(self.planned_peak)} "
                "planned"
            )
        for head in self.clipped:
            if head.share > CLIPPED_SHARE:
                yield head.line()
        if self.not_finite:
            yield (
                f"Not finite: {plural(self.not_finite, 'voxel')} of the input; the output has NaN "
                "there, or 0 if it holds integers"
            )
        if self.left_out is not None:
            yield self.left_out.line(self.voxels)
        if self.chunks is not None and self.chunks.absent:
            yield self.chunks.line()
        if self.retries or self.requests_repeated:
            yield (
                f"Retries: reads and writes failed {plural(self.retries, 'time')} and were tried "
                f"again, {format_seconds(self.retry_seconds)} in all threads; TensorStore sent "
                f"{plural(self.requests_repeated, 'request')} again"
            )
        yield from (f"Not locked: {why}" for why in self.unlocked)
        yield from self.notes
        skipped = f", {self.blocks_skipped} by an earlier run" if self.blocks_skipped else ""
        yield f"Blocks written: {self.blocks_written} of {self.blocks_planned} planned{skipped}"

    def _input_lines(self) -> Iterator[str]:
        """How values are scaled and how the volume is cut for the network."""
        if self.values:
            counted = self.stages.get("statistics")
            cost = "; the input was read once more for them, and to count took threads "
            spent = f"{cost}{format_seconds(counted.busy)}" if counted else ""
            yield f"Values: {self.values}{spent}"
        if self.seams:
            yield f"Seams: {self.seams}"

    def _worker_lines(self) -> Iterator[str]:
        """How evenly several processes worked."""
        rates = [worker.mvox_per_second for worker in self.workers if worker.voxels]
        if rates:
            each = f"{min(rates):.2f} to {max(rates):.2f} Mvox/s each while at work"
            yield f"Workers: {len(self.workers)}, {each}"
        if self.startup_seconds:
            yield f"Start: the first part was begun after {format_seconds(self.startup_seconds)}"


def summaries_of(folder: Folder | None, writers: str) -> dict[str, Summary]:
    """The summaries that several processes left in a run folder, by the names of the processes,
    which match the pattern ``writers``."""
    names = () if folder is None else folder.names(own_name(SUMMARY_FILE, writers))
    each = {name: folder.read(name) for name in names} if folder is not None else {}
    read = TypeAdapter(Summary).validate_json
    return {
        name.removeprefix("summary-").removesuffix(".json"): read(text or b"")
        for name, text in each.items()
    }


def merged(
    each: Mapping[str, Summary],
    seconds: float,
    planned: int,
    cores: int,
    notes: Sequence[str] = (),
) -> Summary:
    """The summary of a job that several processes shared.

    Args:
        each: What each process did, by its name; none may be missing.
        seconds: How long the job took.
        planned: The blocks of the job.
        cores: Those that each process may use, as the plan has them: this machine's may be others.
        notes: Sentences for `Summary.notes`.

    Returns:
        Sums over the processes. Threads and peaks are those of the process with the most.
    """
    shares = [*each.values()]
    stages = _added_stages([share.stages for share in shares])
    worked = sum(share.seconds for share in shares)
    written = sum(share.blocks_written for share in shares)
    cpu_seconds = sum(share.cpu_seconds for share in shares)
    chunks = [share.chunks for share in shares if share.chunks is not None]
    peaks = [share.peak_rss for share in shares if share.peak_rss is not None]
    return Summary(
        seconds=seconds,
        voxels=sum(share.voxels for share in shares),
        input_bytes=sum(share.input_bytes for share in shares),
        blocks_written=written,
        # Two processes may have written one block, so the sum may exceed the plan.
        blocks_skipped=max(0, planned - written),
        blocks_planned=planned,
        stages=stages,
        # As if one process had done all, so that cores in use are those of each.
        bound_by=bottleneck(stages, worked, cpu_seconds, cores, len(shares)),
        cpu_seconds=cpu_seconds,
        peak_rss=max(peaks, default=None),
        planned_peak=max((share.planned_peak for share in shares), default=0),
        clipped=tuple(map(_added_clipped, zip(*(share.clipped for share in shares), strict=True))),
        not_finite=sum(share.not_finite for share in shares),
        left_out=_added_left_out([s.left_out for s in shares if s.left_out is not None]),
        chunks=ChunkCount(sum(c.read for c in chunks), sum(c.absent for c in chunks))
        if chunks
        else None,
        unlocked=tuple(dict.fromkeys(why for share in shares for why in share.unlocked)),
        retries=sum(share.retries for share in shares),
        retry_seconds=sum(share.retry_seconds for share in shares),
        requests_repeated=sum(share.requests_repeated for share in shares),
        workers=tuple(
            WorkerShare(name, share.seconds, share.voxels) for name, share in each.items()
        ),
        values=next((share.values for share in shares), ""),
        seams=next((share.seams for share in shares), ""),
        notes=tuple(notes),
    )


def _added_stages(each: Sequence[Mapping[str, StageTotals]]) -> dict[str, StageTotals]:
    pairs = group_by((item for stages in each for item in stages.items()), itemgetter(0))
    return {
        name: StageTotals(
            busy=sum(stage.busy for _, stage in some),
            waited=sum(stage.waited for _, stage in some),
            count=sum(stage.count for _, stage in some),
            threads=max(stage.threads for _, stage in some),
        )
        for name, some in pairs.items()
    }


def _added_left_out(each: Sequence[LeftOut]) -> LeftOut | None:
    if not each:
        return None
    saved = [share.seconds for share in each if share.seconds is not None]
    return LeftOut(
        sum(share.computed for share in each),
        sum(share.patches for share in each),
        sum(share.voxels for share in each),
        sum(saved) if saved else None,
    )


def _added_clipped(heads: Sequence[Clipped]) -> Clipped:
    clipped, values = sum(head.clipped for head in heads), sum(head.values for head in heads)
    return replace(heads[0], clipped=clipped, values=values)
