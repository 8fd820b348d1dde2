"""Run a job on the workers of a cluster: the client's side, which needs neither model nor device.

A worker opens the job and plans it. The client creates the outputs, gives the shares out, and at
the end checks in the logs that every block is written. If the client is killed, another one goes on
with ``--resume``.
"""

from __future__ import annotations

import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...base import (
    SUMMARY_FILE,
    Incomplete,
    InferConfig,
    PenstockError,
    UsageError,
    format_seconds,
    plural,
)
from ...cluster import FailedItem, Workers, connect, share, wait_for_worker
from ...data import OutputLock, is_transient
from ...instruments import Nvml
from ..planning.plan import Plan, missing_parts, voxels_of, written_in
from ..run_folder.ending import EndRequest
from ..run_folder.journal import Journal, Prepared
from ..stages.beginning import begun
from ..stages.output_levels import with_rest
from ..stages.retries import patiently
from ..stages.summary import Progress, Summary, merged
from . import on_worker as worker_side
from .on_worker import MARGIN_S, JobOrder, RemoteJob, Share

SHARES_PER_WORKER = 16
"""Number of shares, for each worker, into which the parts are cut at most. With fewer, the last
worker would end late; with more, Dask would have much to do for little."""
COUNTS_PER_WORKER = 4
"""The same for the values of the input. To count is quick, and each share is a file."""
OPENERS = 3
"""Number of workers that fail to open the job before it is given up: the fault may be the user's,
and a cluster may have a thousand workers."""
LOOK_S = 1.0
"""Seconds between two looks into the logs and at the workers."""
_READ = TypeAdapter(Summary).validate_python


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
    config, request = _settled(config), request or EndRequest()
    preload = "penstock.inference.opening.job"  # so that workers load torch side by side
    with connect(config, say, gpus=len(Nvml()()), preload=preload) as workers:
        wait_for_worker(workers, lambda: request.check(0))
        if config.workers is None:
            config = config.model_copy(update={"workers": len(workers.fit)})
        job = _opened_on(workers, config, request)
        show(job.plan)
        job.plan.refuse()
        if job.run_dir is None:
            raise UsageError("--cluster needs an output that several processes can open")
        began = time.monotonic()
        elements = config.workers or 1
        with begun(job, Prepared(job.plan.geometry.part, elements)) as (journal, lock):
            for sink in job.sinks:
                patiently(config.retry_for, sink.name, sink.create)
            client = _Client(job, workers, journal, lock, progress, request, say)
            summary = client.run(began)
            patiently(config.retry_for, "the lock", lock.check)
            for sink in job.sinks:
                patiently(config.retry_for, sink.name, sink.close)
            summary = with_rest(summary, config, job.sinks, job.head_facts, request)
    journal.save(SUMMARY_FILE, asdict(summary))
    return summary


def _opened_on(workers: Workers, config: InferConfig, request: EndRequest) -> RemoteJob:
    """The job, opened by a worker. Raises the error of a worker if none can open it."""
    order = config, workers.peers(), platform.node()
    shared = share(
        workers, worker_side.open_job, [order],
        progress=lambda: request.check(0), most_unfit=OPENERS + len(workers.left_out),
    )  # fmt: skip
    ((_, job),) = shared
    if isinstance(job, FailedItem):
        raise job.error()
    assert isinstance(job, RemoteJob)
    # To plan a job is not to do a share of it: the only worker may not see the run or the weights.
    workers.served = False
    return job


def _settled(config: InferConfig) -> InferConfig:
    """The settings with all paths made absolute.

    Raises `UsageError` for a model, input or output in memory, which no other process can open.
    """
    if not isinstance(config.model_type, str):
        raise UsageError("--cluster needs a model by name, reference or file, not a module")
    specs = [config.in_spec, *config.out_spec]
    if any(not isinstance(spec, str | Path | dict) for spec in specs):
        raise UsageError("--cluster needs an input and outputs that workers open, not arrays")
    folders = {name: _whole(getattr(config, name)) for name in ("weights", "run_dir")}
    return config.model_copy(
        update={
            **folders,
            "in_spec": absolute_place(config.in_spec),
            "out_spec": tuple(map(absolute_place, config.out_spec)),
            "model_type": absolute_reference(config.model_type),
        }
    )


def absolute_reference(name: str) -> str:
    """Make the path in ``FILE`` or ``FILE:FUNCTION`` absolute. Return other names as they are."""
    place, colon, function = name.rpartition(":")
    file = Path(place if colon else function)
    return f"{file.absolute()}{colon}{function if colon else ''}" if file.is_file() else name


def absolute_place(spec: Any) -> Any:
    """Make a path absolute. Return URLs and TensorStore's JSON as they are."""
    text = str(spec)
    if isinstance(spec, dict) or "://" in text or text.lstrip().startswith("{"):
        return spec
    return str(Path(text).absolute())


def _whole(path: Path | str | None) -> Path | str | None:
    """Make a local path absolute. Return a URL as it is."""
    return path.absolute() if isinstance(path, Path) else path


class _Client:
    """Gives the shares of a job to the workers, and collects their results."""

    def __init__(
        self,
        job: RemoteJob,
        workers: Workers,
        journal: Journal,
        lock: OutputLock,
        progress: Callable[[Progress], None] | None,
        request: EndRequest,
        say: Callable[[str], None],
    ) -> None:
        self.job, self.workers, self.journal, self.lock = job, workers, journal, lock
        self.progress, self.request, self.say = progress, request, say
        config = job.config.model_copy(
            update={
                "resume": True,
                "overwrite": False,
                "run_dir": _whole(job.run_dir),
                # On a CPU, each worker takes as many for a forward as the one that plans.
                "threads": job.config.threads or job.made_by["threads"],
            }
        )
        self.order = JobOrder(
            f"penstock-{uuid.uuid4().hex[:12]}", config, job.plan.geometry.part, journal.run,
            workers.peers(),
        )  # fmt: skip
        self.summaries: dict[str, Summary] = {}
        """The last summary of each worker."""
        self.failed: dict[str, str] = {}
        """Shares that were given up, with the reasons."""
        self.began = self.looked = time.monotonic()
        self.first: float | None = None
        """When the first share of the parts was given out."""
        self.asked_end = False

    def run(self, began: float) -> Summary:
        """Count, compute, and check that nothing is missing. ``began`` is when the job began."""
        self.began = began
        before = voxels_of(self.job.plan, self.journal.done)
        try:
            if self.job.counts:
                self._count()
            self._compute()
        finally:
            if not isinstance(sys.exception(), KeyboardInterrupt):  # a second signal: at once
                within = self.job.config.grace + 2 * MARGIN_S
                for result in self.workers.ask(
                    worker_side.leave, self.order.topic, within_s=within
                ):
                    if result is not None:
                        self._keep(result)
        self._look()
        self._check_complete()
        return self._summary(before)

    def _count(self) -> None:
        """Count the values of the input. Those of more than 16 bits take two rounds."""
        complete = False
        while not complete and not self.request.why:
            elements = COUNTS_PER_WORKER * (self.job.config.workers or 1)
            for _, value in self._shared(worker_side.count_share_of, elements):
                if isinstance(value, FailedItem):
                    raise value.error()
                complete = complete or value

    def _compute(self) -> None:
        """Give out the shares that are not done, and stop if too many fail."""
        self.first = self.looked = time.monotonic()
        elements = SHARES_PER_WORKER * (self.job.config.workers or 1)
        elements = min(elements, len(self.job.plan.parts))
        for shared, value in self._shared(worker_side.compute_share_of, elements, left_only=True):
            if not isinstance(value, FailedItem):
                self._keep(value)
                continue
            if value.exit_code == UsageError.exit_code:
                raise value.error()
            self.failed[f"share {shared.element} of {elements}"] = value.sentence
            if len(self.failed) > self.job.config.max_failed_parts or value.ends_job:
                return

    def _shared(
        self, function: Callable[[Share], Any], elements: int, left_only: bool = False
    ) -> Iterator[tuple[Share, Any]]:
        """Have workers do all shares, or only those that have blocks ``left``."""
        shares = (Share(self.order, each, elements) for each in range(1, elements + 1))
        wanted = filter(self._left, shares) if left_only else shares
        return share(
            self.workers, function, wanted,
            progress=self._tick, saved=self._saved, ending=lambda: bool(self.request.why),
        )  # fmt: skip

    def _saved(self, shared: Share) -> int:
        """Number of blocks of a share that are written."""
        numbers = self.job.plan.parts.share(shared.element, shared.elements)
        return sum(written_in(self.job.plan.parts, n, self.journal.done) for n in numbers)

    def _left(self, shared: Share) -> bool:
        """Whether a share has blocks that are not written."""
        parts = self.job.plan.parts
        return (
            self._saved(shared) < parts.extent(parts.share(shared.element, shared.elements)).blocks
        )

    def _keep(self, result: dict[str, Any]) -> None:
        self.summaries[result["name"]] = _READ(result["summary"])

    def _tick(self) -> int:
        """Attend to a request to end, and look into the logs now and then.

        Returns the number of blocks written, which `share` takes as the progress of the job.
        """
        if self.request.why:
            self._ask_end()
        if time.monotonic() - self.looked >= LOOK_S:
            self._look()
        return len(self.journal.done)

    def _look(self) -> None:
        """Read the logs, and show the progress."""
        self.looked = now = time.monotonic()
        try:
            self.lock.check()
        except PenstockError as error:  # workers report it themselves if it lasts
            if not is_transient(error):
                raise
        self.journal.refresh()
        if self.progress is not None:
            self.progress(_progress(self.job.plan, self.journal, now - self.began))

    def _ask_end(self) -> None:
        """Ask the workers once to write the blocks that are complete, and wait for them."""
        within = self.job.config.grace + MARGIN_S
        if not self.asked_end:
            self.asked_end = True
            self.say(
                f"{self.request.why}: workers write the blocks that are complete, for "
                f"{format_seconds(within)} at most; a second signal ends the job at once"
            )
            asked = (worker_side.ask_end, self.order.topic, self.request.why)
            self.workers.ask(*asked, within_s=MARGIN_S)
        self.request.check(within)

    def _check_complete(self) -> None:
        """Raise `Incomplete` unless every block is noted in a log."""
        lacking = missing_parts(self.job.plan, self.journal.done)
        if not lacking:
            return
        why = f" when {self.request.why} ended the job" if self.request.why else ""
        reasons = "; ".join(f"{name}: {text}" for name, text in [*self.failed.items()][:3])
        raise Incomplete(
            f"{sum(lacking.values())} of {self.job.plan.num_blocks} blocks, in "
            f"{plural(len(lacking), 'part')}, are not written{why}"
            f"{f' ({reasons})' if reasons else ''}; run again with --resume"
        )

    def _summary(self, before: int) -> Summary:
        """What all workers did together. ``before`` is the number of voxels of earlier starts."""
        seconds, plan, journal = time.monotonic() - self.began, self.job.plan, self.journal
        notes = self.workers.notes("share")
        planned, skipped, voxels = plan.num_blocks, journal.skipped, plan.voxels - before
        together = merged(self.summaries, seconds, planned, notes)
        return replace(
            together,
            # From the logs, as workers that died did not report their last blocks.
            blocks_written=planned - skipped,
            blocks_skipped=skipped,
            voxels=voxels,
            input_bytes=round(plan.input_bytes * voxels / plan.voxels),
            startup_seconds=(self.first or self.began) - self.began,
        )


def _progress(plan: Plan, journal: Journal, seconds: float) -> Progress:
    """The progress of all workers. Patches are estimated, as logs list blocks."""
    left, blocks = plan.num_blocks - journal.skipped, len(journal.done) - journal.skipped
    patches = round(plan.num_patches * left / plan.num_blocks)
    rate = blocks / plan.num_blocks * plan.input_bytes / seconds / 1e6
    return Progress(round(patches * blocks / max(1, left)), patches, blocks, left, seconds, rate)
