"""A volume on the workers of a cluster: the client, which has neither model nor device.

A worker opens the job and plans it. The client claims the outputs, gives the parts out one by one,
and at the end proves by the logs that every unit is written. It can be killed: another one goes on
with ``--resume``.
"""

from __future__ import annotations

import contextlib
import platform
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..base import Incomplete, InferConfig, PenstockError, UsageError, plural
from ..cluster import Absence, TaskFailure, Tasks, Workers, connected, worker_notes
from ..data import Claims, Sink, is_transient, open_source
from ..instruments import Nvml
from . import station
from .beginning import begun
from .completeness import missing_parts
from .ending import EndRequest
from .journal import SPILL_FOLDER, WORKERS_FILE, Journal, Prepared
from .outputs import open_outputs
from .parts import Parts
from .plan import Plan
from .retries import patiently
from .shared_folder import check_seen
from .summary import Progress, Summary, merged
from .turns import Turns

SHARES_PER_LANE = 4
"""Shares in which the values of the input are counted, for each task that can run at a time."""
_READ = TypeAdapter(Summary).validate_python


@dataclass(frozen=True)
class RemoteJob:
    """A job that workers have opened, with the outputs opened here."""

    config: InferConfig
    opened: station.Opened

    @property
    def plan(self) -> Plan:
        """What the worker has planned."""
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
        """The outputs, by what the worker knows of the model's heads."""
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
        request: By this the job can be asked to end.
        say: A function that is called now and then with a sentence, while there is no worker.

    Returns:
        What the workers did together.

    Raises:
        UsageError: The job cannot be done as asked. Nothing was created.
        Incomplete: Parts failed, no worker came, or the job was asked to end; ``--resume`` goes on.
        PenstockError: The scheduler is gone.
    """
    address, config = str(config.cluster), _settled(config)
    request = request or EndRequest()
    absence = Absence(config.worker_timeout, say, lambda: request.why)
    gpus, logs = len(Nvml()()), _logs_of(config)
    with connected(address, gpus, config.workers, logs, absence) as workers:
        workers.wait()
        peers = workers.peers()
        if config.workers is None:
            config = config.model_copy(update={"workers": workers.expected})
        job = RemoteJob(config, _opened(workers, config, peers))
        show(job.plan)
        job.plan.refuse()
        if job.run_dir is None:
            raise UsageError("--cluster needs an output that several processes can open")
        check_seen(job.run_dir, workers)
        began = time.monotonic()
        with begun(job, _prepared(job, workers)) as (journal, claims):
            for sink in job.sinks:
                patiently(config.retry_for, sink.name, sink.create)
            client = _Client(job, workers, journal, claims, peers, progress, request)
            summary = client.run(began)
            patiently(config.retry_for, "the lock", claims.confirm)
            for sink in job.sinks:
                sink.close()
    journal.save("summary.json", asdict(summary))
    return summary


def _settled(config: InferConfig) -> InferConfig:
    """The settings with the places of this process, which workers may not share, made absolute.

    Raises `UsageError` for what no other process can open.
    """
    if not isinstance(config.model_type, str):
        raise UsageError("--cluster needs a model by name, reference or file, not a module")
    specs = [config.in_spec, *config.out_spec]
    if any(not isinstance(spec, str | Path | dict) for spec in specs):
        raise UsageError("--cluster needs an input and outputs that workers open, not arrays")
    name, colon, function = config.model_type.rpartition(":")
    file = Path(name if colon else function)
    model = config.model_type
    if file.is_file():
        model = f"{file.absolute()}{colon}{function if colon else ''}"
    folders = {name: _whole(getattr(config, name)) for name in ("weights", "run_dir")}
    return config.model_copy(
        update={
            **folders,
            "in_spec": _absolute(config.in_spec),
            "out_spec": tuple(map(_absolute, config.out_spec)),
            "model_type": model,
        }
    )


def _logs_of(config: InferConfig) -> Path:
    """The folder of the logs of jobs that are workers: beside the run folder where it is known."""
    spec = str(config.out_spec[0])
    local = not isinstance(config.out_spec[0], dict) and not re.search(r"://|[{|]", spec)
    beside = Path(f"{spec.rstrip('/')}.penstock" if local else "penstock")
    run = config.run_dir if isinstance(config.run_dir, Path) else beside
    return run.with_name(f"{run.name}.workers").absolute()


def _absolute(spec: Any) -> Any:
    """A path from the root. URLs and the JSON of TensorStore are left as they are."""
    text = str(spec)
    if isinstance(spec, dict) or "://" in text or text.lstrip().startswith("{"):
        return spec
    return str(Path(text).absolute())


def _opened(workers: Workers, config: InferConfig, peers: int) -> station.Opened:
    """The job as a worker opens it. Raises `UsageError` with what it says if it cannot."""
    order = (config, peers, platform.node())
    tasks = Tasks(workers, station.open_task, order, f"open-{uuid.uuid4().hex[:12]}", 0)
    (outcome,) = tasks.run([0], lambda word: None)
    if isinstance(outcome.result, TaskFailure):
        raise _error(outcome.result)
    opened: station.Opened = outcome.result
    return opened


def _error(failure: TaskFailure) -> PenstockError:
    """The error that a worker met, for this process's exit code."""
    kinds = {2: UsageError, 3: Incomplete}
    return kinds.get(failure.exit_code, PenstockError)(failure.sentence)


def _prepared(job: RemoteJob, workers: Workers) -> Prepared:
    """How the run is cut. A resumed run goes on with the shares that its values were counted in."""
    elements = SHARES_PER_LANE * workers.expected
    with contextlib.suppress(UsageError):
        if job.config.resumes:
            elements = Prepared.read(job.run_dir).elements
    return Prepared(job.parts.step, elements, job.plan.geometry.spills)


class _Client:
    """Gives the parts of a job to the workers, and gathers what they tell."""

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
                "run_dir": _whole(job.run_dir),
                "spill": "always" if job.plan.geometry.spills else "never",
            }
        )
        self.order = station.JobOrder(
            f"penstock-{uuid.uuid4().hex[:12]}", config, job.parts.step,
            _prepared(job, workers).elements, journal.run, claims.owner, peers,
        )  # fmt: skip
        self.words: dict[str, dict[str, Any]] = {}
        """The last word of each worker on its progress."""
        self.summaries: dict[str, Summary] = {}
        """What each worker has done."""
        self.failed: dict[str, str] = {}
        """Parts that were given up, each with the reason."""
        self.rounds: list[Tasks] = []
        """The tasks of each round: of counting, and of computing."""
        self.standing: dict[str, int] = {}
        """How the workers stand, as the run folder has it."""
        self.began = 0.0
        self.first: float | None = None
        """When the first part was begun."""

    def run(self, began: float) -> Summary:
        """Count, compute, and prove that nothing is missing. ``began`` is when the job began."""
        self.began = began
        topic = self.order.topic
        try:
            if self.job.opened.counts:
                self._count()
            self._compute()
        finally:
            within = self.job.config.grace + 2 * station.MARGIN_S
            for summary in self.workers.ask(station.leave, topic, within_s=within):
                if summary is not None:
                    self._keep(summary)
        self.journal.refresh()
        self._check_complete()
        if self.journal.folder is not None:
            self.journal.folder.delete(f"{SPILL_FOLDER}/")
        seconds = time.monotonic() - began
        notes = [*worker_notes(self.rounds, "part")]
        planned, skipped = self.job.plan.num_units, self.journal.skipped
        return replace(
            merged(self.summaries, seconds, planned, len(self.journal.halved()), notes),
            # By the logs: workers that died have not told of their last units.
            units_written=planned - skipped,
            units_skipped=skipped,
            startup_seconds=(self.first or self.began) - self.began,
        )

    def _count(self) -> None:
        """Count the values of the input: once, or twice where they are wide."""
        missing = True
        while missing:
            for function, count in ((station.count_task, self.order.elements), (station.lacks, 1)):
                for outcome in self._tasks(function).run(range(count), lambda word: None):
                    if isinstance(outcome.result, TaskFailure):
                        raise _error(outcome.result)
                    missing = outcome.result == "lacking"

    def _compute(self) -> None:
        """Give out the parts that are not done, and stop where too many fail."""
        tasks, done = self._tasks(station.part_task), self.journal.done
        lacking = missing_parts(self.job.plan, done) if done else None
        turns = Turns(self.job.parts, lacking, lambda: self.request.why)
        for outcome in tasks.run(turns, self._tick):
            if isinstance(outcome.result, TaskFailure):
                if outcome.result.exit_code == 2:
                    raise _error(outcome.result)
                self.failed[turns.name(outcome.number)] = outcome.result.sentence
                many = len(self.failed) > self.job.config.max_failed_parts
                if many or tasks.is_over(outcome.result):
                    break
            else:
                self._keep(outcome.result)
                turns.done(outcome.number)

    def _tasks(self, function: Callable[..., Any]) -> Tasks:
        config = self.job.config
        limits = (config.part_retries, config.retry_for)
        tasks = Tasks(self.workers, function, self.order, self.order.topic, *limits)
        self.rounds.append(tasks)
        return tasks

    def _keep(self, result: dict[str, Any]) -> None:
        self.summaries[result["name"]] = _READ(result["summary"])

    def _tick(self, word: dict[str, Any] | None) -> None:
        """Take in what a worker told, and show the progress of all."""
        try:
            self.claims.check()
        except PenstockError as error:  # workers that write will say so if it lasts
            if not is_transient(error):
                raise
        if self.request.why:
            self._ask_end()
        if self.first is None and word is not None:
            self.first = time.monotonic()
        if word is not None and "patches" in word:
            self.words[word["name"]] = word
        self._say_standing()
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
        """Keep how the workers stand for ``penstock status``, as often as it changes."""
        deaths, retried = (sum(getattr(t, n) for t in self.rounds) for n in ("deaths", "retried"))
        unfit = {address for tasks in self.rounds for address in tasks.unfit}
        present = self.rounds[-1].present
        standing = {"present": present, "died": deaths, "retried": retried, "unfit": len(unfit)}
        if standing != self.standing:
            self.standing = standing
            with contextlib.suppress(OSError):
                self.journal.save(WORKERS_FILE, standing)

    def _ask_end(self) -> None:
        """Ask the workers once to write what is whole, and wait no longer than they may take."""
        tasks = self.rounds[-1]
        if not tasks.ends:
            tasks.ends = True
            asked = (station.ask_end, self.order.topic, self.request.why)
            self.workers.ask(*asked, within_s=station.MARGIN_S)
        self.request.check(self.job.config.grace + station.MARGIN_S)

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


def _whole(path: Path | str | None) -> Path | str | None:
    return path.absolute() if isinstance(path, Path) else path
