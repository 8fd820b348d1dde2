"""Run a job on the workers of a cluster: the client's side, which needs neither model nor device.

A worker opens the job and plans it. The client locks the outputs, gives the parts out one by one,
and at the end checks in the logs that every unit is written. If the client is killed, another one
goes on with ``--resume``.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...base import (
    Incomplete,
    InferConfig,
    PenstockError,
    UsageError,
    format_bytes,
    format_seconds,
    plural,
)
from ...cluster import Absence, TaskFailure, Tasks, Workers, connected, worker_notes
from ...data import Claims, Sink, is_transient, open_source
from ...instruments import Nvml
from ..opening.outputs import open_outputs
from ..planning.plan import Plan
from ..planning.spill_room import SpillRoom, SpillTable, lying
from ..run_folder.ending import EndRequest
from ..run_folder.journal import SPILL_FOLDER, WORKERS_FILE, Journal, Prepared
from ..run_folder.local import LocalFolder
from ..stages.beginning import begun
from ..stages.retries import patiently
from ..stages.summary import Progress, Summary, merged
from ..tiling.parts import Parts
from . import ahead, station
from .completeness import maker_notes, missing_parts, voxels_of
from .openers import error_of, opened_on
from .settled import logs_of, settled, whole
from .turns import Turns, turn_of
from .visibility import check_seen

SHARES_PER_LANE = 4
"""Number of shares, for each worker, into which the counting of the input's values is cut."""
LOOK_S = 1.0
"""Seconds between two counts of the workers."""
_READ = TypeAdapter(Summary).validate_python


@dataclass(frozen=True)
class RemoteJob:
    """A job that workers have opened, with the outputs opened here."""

    config: InferConfig
    opened: station.Opened

    @property
    def plan(self) -> Plan:
        """The plan that the worker has made."""
        return self.opened.plan

    @property
    def parts(self) -> Parts:
        assert self.plan.parts is not None
        return self.plan.parts

    @property
    def run_dir(self) -> Path | str | None:
        return self.opened.run_dir

    @cached_property
    def sinks(self) -> list[Sink]:
        """The outputs, opened here with what the worker has found out about the model's heads."""
        opened, source = self.opened, open_source(self.config.in_spec, level=self.config.level)
        outputs = open_outputs(
            self.config, source, opened.selected, opened.at_once, opened.head_parts, opened.kinds
        )
        return [output.sink for output in outputs]

    def fingerprint(self) -> dict[str, Any]:
        return self.opened.fingerprint

    def maker(self) -> dict[str, Any]:
        return self.opened.maker


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
    address, config = str(config.cluster), settled(config)
    request = request or EndRequest()
    absence = Absence(config.worker_timeout, say, lambda: request.why)
    gpus, logs = len(Nvml()()), logs_of(config)
    with connected(address, gpus, config.workers, logs, absence, ahead.__name__) as workers:
        workers.wait()
        peers = workers.peers()
        if config.workers is None:
            config = config.model_copy(update={"workers": workers.expected})
        job = RemoteJob(config, opened_on(workers, config, peers, request))
        show(job.plan)
        job.plan.refuse()
        if job.run_dir is None:
            raise UsageError("--cluster needs an output that several processes can open")
        check_seen(job.run_dir, workers)
        began = time.monotonic()
        with begun(job, _prepared(job, workers)) as (journal, claims):
            for sink in job.sinks:
                patiently(config.retry_for, sink.name, sink.create, lambda nothing: journal)
            client = _Client(job, workers, journal, claims, peers, progress, request)
            summary = client.run(began)
            patiently(config.retry_for, "the lock", claims.confirm)
            for sink in job.sinks:
                sink.close()
    journal.save("summary.json", asdict(summary))
    return summary


def _prepared(job: RemoteJob, workers: Workers) -> Prepared:
    """How the run is cut. A resumed run keeps the shares in which its values were counted."""
    elements = SHARES_PER_LANE * workers.expected
    with contextlib.suppress(UsageError):
        if job.config.resumes:
            elements = Prepared.read(job.run_dir).elements
    return Prepared(job.parts.step, elements, job.plan.geometry.spills)


class _Presence:
    """Adds up the seconds for which each worker that may take parts is there."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.seconds = workers, 0.0
        self.looked: float | None = None

    def look(self, tasks: Tasks, least_s: float = LOOK_S) -> None:
        """Add the time since the last call, if that is at least ``least_s``, for each worker."""
        now = time.monotonic()
        if self.looked is not None and now - self.looked < least_s:
            return
        here = tasks.placement.present
        if tasks.placement.unfit:
            here = len(self.workers.hosts().keys() - tasks.placement.unfit.keys())
        self.seconds += here * (now - (self.looked or now))
        self.looked = now


class _Client:
    """Gives the parts of a job to the workers, and collects their results."""

    def __init__(
        self,
        job: RemoteJob,
        workers: Workers,
        journal: Journal,
        claims: Claims,
        peers: int,
        progress: Callable[[Progress], None] | None,
        request: EndRequest,
    ) -> None:
        self.job, self.workers, self.journal, self.claims = job, workers, journal, claims
        self.progress, self.request = progress, request
        config = job.config.model_copy(
            update={
                "resume": True,
                "overwrite": False,
                "run_dir": whole(job.run_dir),
                "spill": "always" if job.plan.geometry.spills else "never",
                # On a CPU, each worker takes as many for a forward as the one that plans.
                "threads": job.config.threads or job.opened.maker["threads"],
            }
        )
        self.order = station.JobOrder(
            f"penstock-{uuid.uuid4().hex[:12]}", config, job.parts.step,
            _prepared(job, workers).elements, journal.run, claims.owner, peers,
        )  # fmt: skip
        self.words: dict[str, dict[str, Any]] = {}
        """The last progress message of each worker."""
        self.summaries: dict[str, Summary] = {}
        """The last summary of each worker."""
        self.failed: dict[str, str] = {}
        """Parts that were given up, with the reasons."""
        self.rounds: list[Tasks] = []
        """The tasks of each round of counting, and then those of computing."""
        self.standing: dict[str, int] = {}
        """Numbers of workers as last saved for ``penstock status``: present, died and so on."""
        self.began = 0.0
        self.first: float | None = None
        """When the first part was begun."""
        self.presence = _Presence(workers)

    def run(self, began: float) -> Summary:
        """Count, compute, and check that nothing is missing. ``began`` is when the job began."""
        self.began = began
        topic, before = self.order.topic, voxels_of(self.job.plan, self.journal.done)
        try:
            if self.job.opened.counts:
                self._count()
            self._compute()
        finally:
            if not isinstance(sys.exception(), KeyboardInterrupt):  # a second signal: at once
                within = self.job.config.grace + 2 * station.MARGIN_S
                for summary in self.workers.ask(station.leave, topic, within_s=within):
                    if summary is not None:
                        self._keep(summary)
        self.journal.refresh()
        self._check_complete()
        if self.journal.folder is not None:
            self.journal.folder.delete(f"{SPILL_FOLDER}/")
        self.presence.look(self.rounds[-1], 0)
        seconds, plan = time.monotonic() - began, self.job.plan
        notes = [*worker_notes(self.rounds, "part")]
        if self.job.config.mixed_arithmetic or self.job.config.resume_anyway:
            notes += maker_notes(self.journal)
        planned, skipped, voxels = plan.num_units, self.journal.skipped, plan.voxels - before
        halved, retried = len(self.journal.halved()), self.journal.retried
        return replace(
            merged(self.summaries, seconds, planned, halved, notes, retried),
            # From the logs, as workers that died did not report their last units.
            units_written=planned - skipped,
            units_skipped=skipped,
            voxels=voxels,
            input_bytes=round(plan.input_bytes * voxels / plan.voxels),
            worker_seconds=self.presence.seconds or None,
            startup_seconds=(self.first or self.began) - self.began,
        )

    def _count(self) -> None:
        """Count the values of the input. Those of more than 16 bits take two rounds."""
        missing = True
        while missing and not self.request.why:
            for function, count in ((station.count_task, self.order.elements), (station.lacks, 1)):
                for outcome in self._tasks(function).run(range(count), self._attend):
                    if isinstance(outcome.result, TaskFailure):
                        raise error_of(outcome.result)
                    missing = outcome.result == "lacking"

    def _compute(self) -> None:
        """Give out the parts that are not done, and stop if too many fail."""
        tasks, done = self._tasks(station.part_task), self.journal.done
        lacking = missing_parts(self.job.plan, done) if done else None
        parts, room = self.job.parts, self._room()
        turns = Turns(parts, lacking, lambda: self.request.why, room)
        for outcome in tasks.run(turns, self._tick):
            if isinstance(outcome.result, TaskFailure):
                if outcome.result.exit_code == 2:
                    raise error_of(outcome.result)
                self.failed[str(turn_of(outcome.number, parts))] = outcome.result.sentence
                many = len(self.failed) > self.job.config.max_failed_parts
                if many or outcome.result.ends_job or tasks.is_over(outcome.result):
                    return
                turns.given_up(outcome.number)
            else:
                self._keep(outcome.result)
                turns.done(outcome.number)
        if turns.is_stuck:
            limit = format_bytes(self.job.config.max_spill or 0)
            self.failed["others"] = f"spilled pieces leave no room for them (--max-spill {limit})"

    def _room(self) -> SpillRoom | None:
        """The room for spilled pieces, less those that an earlier start has left."""
        folder, config, parts = self.journal.folder, self.job.config, self.job.parts
        if not parts.geometry.spills or not isinstance(folder, LocalFolder):
            return None
        pieces = folder.path / SPILL_FOLDER / self.journal.run
        table = SpillTable(parts, self.job.plan.facts)
        return SpillRoom(table, config.max_spill, partial(lying, pieces, parts), self.journal.done)

    def _tasks(self, function: Callable[..., Any]) -> Tasks:
        config = self.job.config
        limits = (config.part_retries, config.retry_for)
        tasks = Tasks(self.workers, function, self.order, self.order.topic, *limits)
        self.rounds.append(tasks)
        return tasks

    def _keep(self, result: dict[str, Any]) -> None:
        self.summaries[result["name"]] = _READ(result["summary"])

    def _attend(self, word: dict[str, Any] | None) -> None:
        """Look after the claims, a request to end, and the workers."""
        try:
            self.claims.check()
        except PenstockError as error:  # workers report it themselves if it lasts
            if not is_transient(error):
                raise
        if self.request.why:
            self._ask_end()
        self._say_standing()

    def _tick(self, word: dict[str, Any] | None) -> None:
        """Note a progress message of a worker, and show the progress of all."""
        self._attend(word)
        if self.first is None and word is not None:
            self.first = time.monotonic()
        if self.first is not None:
            self.presence.look(self.rounds[-1])
        if word is not None and "patches" in word:
            self.words[word["name"]] = word
        if self.progress is None:
            return
        plan, seconds = self.job.plan, time.monotonic() - self.began
        patches, units, voxels = (
            sum(each[what] for each in self.words.values())
            for what in ("patches", "units", "voxels")
        )
        left = plan.num_units - self.journal.skipped
        rate = voxels / plan.voxels * plan.input_bytes / seconds / 1e6
        planned = round(plan.num_patches * left / plan.num_units)
        self.progress(Progress(min(patches, planned), planned, units, left, seconds, rate))

    def _say_standing(self) -> None:
        """Save the numbers of workers for ``penstock status`` whenever they change."""
        deaths, retried = (sum(getattr(t, n) for t in self.rounds) for n in ("deaths", "retried"))
        unfit = {address for tasks in self.rounds for address in tasks.placement.unfit}
        present = self.rounds[-1].placement.present
        standing = {"present": present, "died": deaths, "retried": retried, "unfit": len(unfit)}
        if standing != self.standing:
            self.standing = standing
            with contextlib.suppress(OSError):
                self.journal.save(WORKERS_FILE, standing)

    def _ask_end(self) -> None:
        """Ask the workers once to write the units that are complete, and wait for them."""
        tasks, within = self.rounds[-1], self.job.config.grace + station.MARGIN_S
        if not tasks.ends:
            tasks.ends = True
            self.workers.absence.say(
                f"{self.request.why}: workers write the blocks that are complete, for "
                f"{format_seconds(within)} at most; a second signal ends the job at once"
            )
            asked = (station.ask_end, self.order.topic, self.request.why)
            self.workers.ask(*asked, within_s=station.MARGIN_S)
        self.request.check(within)

    def _check_complete(self) -> None:
        """Raise `Incomplete` unless every unit is noted in a log."""
        lacking = missing_parts(self.job.plan, self.journal.done)
        if not lacking:
            return
        why = f" when {self.request.why} ended the job" if self.request.why else ""
        reasons = "; ".join(f"{name}: {text}" for name, text in [*self.failed.items()][:3])
        raise Incomplete(
            f"{sum(lacking.values())} of {self.job.plan.num_units} blocks, in "
            f"{plural(len(lacking), 'part')}, are not written{why}"
            f"{f' ({reasons})' if reasons else ''}; run again with --resume"
        )
