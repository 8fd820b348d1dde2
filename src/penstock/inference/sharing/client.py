"""Run a job, or label, on the workers of a cluster: the client's side.

It needs neither model nor device: a worker opens the job and plans it. The client creates the
outputs, gives the shares out, and at the end checks in the logs that every block is written. If the
client is killed, another one goes on with ``--resume``.
"""

from __future__ import annotations

import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...base import (
    Incomplete,
    InferConfig,
    LabelConfig,
    UsageError,
    format_seconds,
    plural,
    share_of,
)
from ...cluster import FailedItem, Workers, connect, share, share_pieces, wait_for_worker
from ...data import absolute_spec
from ...instruments import Nvml
from ..objects.block_work import BlockOrder, Round, do_order
from ..objects.label_job import NUMBERED_BY
from ..objects.label_run import LabelSummary
from ..objects.labelling import Labelling, Show
from ..planning.plan import Plan, missing_parts, voxels_of, written_in
from ..run_folder.journal import EndRequest, Journal, Prepared
from ..stages.beginning import begun
from ..stages.output_levels import completed
from ..stages.remote_job import RemoteJob
from ..stages.retries import patiently
from ..stages.summary import Progress, Summary, merged, summaries_of
from . import on_worker as worker_side
from .on_worker import MARGIN_S, JobOrder

SHARES_PER_WORKER = 16
"""Number of shares, for each worker, into which the parts are cut at most. With fewer, the last
worker would end late; with more, Dask would have much to do for little."""
COUNTS_PER_WORKER = 4
"""The same for the values of the input. To count is quick, and each share is a file."""
OPENERS = 3
"""Number of workers that fail to open the job before it is given up: the fault may be the user's,
and a cluster may have a thousand workers."""
AnyConfig = TypeVar("AnyConfig", InferConfig, LabelConfig)


def run_on_cluster(
    config: InferConfig,
    show: Callable[[Plan], None] = lambda plan: None,
    progress: Callable[[Progress], None] | None = None,
    request: EndRequest | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Summary:
    """Run a model over a volume on the workers of a cluster.

    Args:
        config: The settings of the job; ``cluster`` names the workers.
        show: A function that is called with the plan.
        progress: A function that is called with the progress while the job runs.
        request: Asks the job to end early.
        say: A function that is called with a sentence now and then, while no worker is there.

    Returns:
        The summary of what all workers did.

    Raises:
        UsageError: The job cannot be done as asked. Nothing was created.
        Incomplete: Parts failed, no worker came, or the job was asked to end; ``--resume`` goes on.
        PenstockError: The scheduler does not answer any more.
    """
    config, request = settled(config), request or EndRequest()
    with connect(
        config, say, gpus=len(Nvml()()),
        preload="penstock.inference.opening.job",  # so that workers load torch side by side
    ) as workers:  # fmt: skip
        wait_for_worker(workers, lambda: request.check(0))
        if config.workers is None:
            config = config.model_copy(update={"workers": len(workers.fit)})
        job = _opened_on(workers, config, request)
        show(job.plan)
        job.plan.refuse()
        if job.run_dir is None:
            raise UsageError("--cluster needs an output that several processes can open")
        with begun(job, Prepared(job.plan.geometry.part, config.workers or 1)) as (journal, lock):
            for sink in job.sinks:
                patiently(config.retry_for, sink.name, sink.create)
            client = _Client(job, workers, journal, progress, request, say)
            return completed(job, journal, lock, client.run(), request)


def _opened_on(workers: Workers, config: InferConfig, request: EndRequest) -> RemoteJob:
    """The job, opened by a worker. Raises the error of a worker if none can open it."""
    ((_, job),) = share(
        workers, worker_side.open_job, [(config, workers.peers(), platform.node())],
        progress=lambda: request.check(0), most_unfit=OPENERS + len(workers.left_out),
    )  # fmt: skip
    if isinstance(job, FailedItem):
        raise job.error()
    assert isinstance(job, RemoteJob)
    # To plan a job is not to do a share of it: the only worker may not see the run or the weights.
    workers.served = False
    return job


def settled(config: AnyConfig) -> AnyConfig:
    """The settings with all paths made absolute.

    Raises `UsageError` for a model, input or output in memory, which no other process can open.
    """
    given = ((name, getattr(config, name, None), make) for name, make in _ABSOLUTE.items())
    changes = {name: make(value) for name, value, make in given if value is not None}
    return config.model_copy(update=changes)


def absolute_array(name: str, spec: Any) -> Any:
    """`absolute_spec` of a flag, or of each of several.

    Raises `UsageError` for an array, which no other process can open.
    """
    if isinstance(spec, tuple):
        return tuple(absolute_array(name, each) for each in spec)
    if not isinstance(spec, str | Path | dict):
        raise UsageError("--cluster needs an input and outputs that workers open, not arrays")
    return absolute_spec(spec, name)


def absolute_place(place: Any) -> Any:
    """Make a path absolute. Return URLs as they are."""
    return place if "://" in str(place) else type(place)(Path(place).absolute())


def absolute_reference(name: Any) -> str:
    """Make the path in ``FILE`` or ``FILE:FUNCTION`` absolute. Return other names as they are.

    Raises `UsageError` for a module, which no other process can open.
    """
    if not isinstance(name, str):
        raise UsageError("--cluster needs a model by name, reference or file, not a module")
    place, colon, function = name.rpartition(":")
    file = Path(place if colon else function)
    return f"{file.absolute()}{colon}{function if colon else ''}" if file.is_file() else name


_ARRAYS = "in_spec out_spec mask intensity".split()
_PLACES = "weights run_dir table trace metrics_json".split()
_ABSOLUTE: Mapping[str, Callable[[Any], Any]] = {
    **{name: partial(absolute_array, f"--{name.replace('_', '-')}") for name in _ARRAYS},
    **dict.fromkeys(_PLACES, absolute_place),
    **dict.fromkeys(("model_type", "decoder"), absolute_reference),
}
"""Functions that make settings absolute, by the names of those that name a place."""


class _Client:
    """Gives the shares of a job to the workers, and follows what they write."""

    def __init__(
        self,
        job: RemoteJob,
        workers: Workers,
        journal: Journal,
        progress: Callable[[Progress], None] | None,
        request: EndRequest,
        say: Callable[[str], None],
    ) -> None:
        self.job, self.workers, self.journal = job, workers, journal
        self.progress, self.request, self.say = progress, request, say
        config = job.config.model_copy(
            update={
                "resume": True,
                "overwrite": False,
                "run_dir": absolute_place(job.run_dir),
                # On a CPU, each worker takes as many for a forward as the one that plans.
                "threads": job.config.threads or job.maker["threads"],
            }
        )
        self.order = JobOrder(
            uuid.uuid4().hex[:12], config, job.plan.geometry.part, journal.run, workers.peers()
        )
        self.began = time.monotonic()

    def run(self) -> Summary:
        """Count, compute, and check that nothing is missing."""
        before, startup = voxels_of(self.job.plan, self.journal.done), 0.0
        shared_by = self.job.config.workers or 1
        try:
            # A client that goes on may find all written, and then nothing needs to be counted.
            lacks = len(self.journal.done) < self.job.plan.num_blocks
            complete = not (lacks and self.job.counts)
            while not complete and not self.request.why:  # more than 16 bits take two rounds
                done = self._shared(worker_side.count_share_of, COUNTS_PER_WORKER * shared_by)
                complete = True in done
            startup = time.monotonic() - self.began
            if lacks and not self.request.why:
                elements = min(SHARES_PER_WORKER * shared_by, len(self.job.plan.parts))
                self._shared(worker_side.compute_share_of, elements)
        finally:
            if not isinstance(sys.exception(), KeyboardInterrupt):  # a second signal: at once
                self._leave("the client")
        self._look()
        self._check_complete()
        return self._summary(before, startup)

    def _shared(self, function: Callable[[tuple[JobOrder, str]], Any], elements: int) -> list[Any]:
        """Have workers do all shares. Returns what the function returned for each."""
        done = share_pieces(
            self.workers, function, (f"{each}/{elements}" for each in range(1, elements + 1)),
            "share", "run again with --resume",
            work_of=lambda share: (self.order, share), progress=self._tick, saved=self._saved,
            ending=self._ends,
        )  # fmt: skip
        return [value for _, value in done]

    def _saved(self, share: str) -> int:
        """Number of blocks of a share that are written."""
        parts = self.job.plan.parts
        return sum(written_in(parts, n, self.journal.done) for n in parts.share(*share_of(share)))

    def _tick(self) -> int:
        """Look into the logs, and raise if the workers take too long to end.

        Returns the number of blocks written, which `share` takes as the progress of the job.
        """
        self.request.check(self.job.config.grace + MARGIN_S)
        self._look()
        return len(self.journal.done)

    def _look(self) -> None:
        """Read the logs, and show the progress. Before each write a worker looks at the lock."""
        self.journal.refresh()
        if self.progress is not None:
            seconds = time.monotonic() - self.began
            self.progress(_progress(self.job.plan, self.journal, seconds))

    def _ends(self) -> bool:
        """Whether the job is to end. Then workers are asked to write the blocks that are complete,
        once, as `share` does not ask again."""
        if why := self.request.why:
            self.say(
                f"{why}: workers write the blocks that are complete, for "
                f"{format_seconds(self.job.config.grace + MARGIN_S)} at most; a second signal ends "
                "the job at once"
            )
            self._leave(why)
        return bool(why)

    def _leave(self, why: str) -> None:
        """Have workers close the job, once they have written the blocks that are complete."""
        within = self.job.config.grace + MARGIN_S
        self.workers.ask_each(worker_side.leave, self.order.topic, why, within_s=within)

    def _check_complete(self) -> None:
        """Raise `Incomplete` unless every block is noted in a log."""
        if lacking := missing_parts(self.job.plan, self.journal.done):
            why = f" when {self.request.why} ended the job" if self.request.why else ""
            raise Incomplete(
                f"{sum(lacking.values()):,} of {plural(self.job.plan.num_blocks, 'block')}, in "
                f"{plural(len(lacking), 'part')}, are not written{why}; run again with --resume"
            )

    def _summary(self, before: int, startup: float) -> Summary:
        """What all workers did together. ``before`` is the number of voxels of earlier starts, and
        ``startup`` the seconds until the first share of the parts was given out."""
        seconds, plan, journal = time.monotonic() - self.began, self.job.plan, self.journal
        planned, skipped, voxels = plan.num_blocks, journal.skipped, plan.voxels - before
        each = summaries_of(journal.folder, f"*-{self.order.topic}")
        return replace(
            merged(each, seconds, planned, plan.facts.cores, self.workers.notes("share")),
            # From the logs, as workers that died did not report their last blocks.
            blocks_written=planned - skipped,
            blocks_skipped=skipped,
            voxels=voxels,
            input_bytes=round(plan.input_bytes * voxels / plan.voxels),
            startup_seconds=startup,
        )


def _progress(plan: Plan, journal: Journal, seconds: float) -> Progress:
    """The progress of all workers. Patches are estimated, as logs list blocks."""
    left, blocks = plan.num_blocks - journal.skipped, len(journal.done) - journal.skipped
    patches = round(plan.num_patches * left / plan.num_blocks)
    rate = blocks / plan.num_blocks * plan.input_bytes / seconds / 1e6
    return Progress(round(patches * blocks / max(1, left)), patches, blocks, left, seconds, rate)


def label_on_cluster(
    config: LabelConfig,
    begins: Callable[[Labelling], Show],
    say: Callable[[str], None] = lambda sentence: None,
) -> LabelSummary:
    """Label an array on the workers of a cluster.

    Args:
        config: The settings; ``cluster`` names the workers.
        begins: Called with the labelling once it is opened; gives what is called with the voxels
            that are done.
        say: Called with a sentence now and then, while no worker is there.

    Returns:
        What was done.

    Raises:
        UsageError: The labelling cannot be done as it is asked for.
        Incomplete: Blocks failed, or no worker came; ``--resume`` goes on.
    """
    labelling = Labelling(settled(config))
    with connect(
        config, say, libraries=NUMBERED_BY, preload="penstock.inference.objects.block_work"
    ) as workers:
        wait_for_worker(workers)  # before the outputs are made

        def over(each: Round, lacking: Sequence[int]) -> Iterator[tuple[int, str]]:
            topic = uuid.uuid4().hex
            yield from share_pieces(
                workers, do_order, lacking, "block", "run again with --resume",
                work_of=lambda n: BlockOrder(each, n, topic),
            )  # fmt: skip

        return labelling.run(begins(labelling), over)
