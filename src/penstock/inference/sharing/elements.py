"""A run in an array of independent processes: no scheduler gives them parts.

    --prepare           makes output and run folder, and fixes the parts
    --statistics i/n    counts the values of a share, for percentiles of the whole volume
    --part i/n          writes a share of the parts
    --finish            checks that nothing is missing, and closes the output

The elements of an array share the lock of the output, under an owner that is named after the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter

from ...base import Incomplete, UsageError, plural, share_of
from ...cluster import joined_elements
from ...data import Claims, owner_of_array
from ..opening.job import Job
from ..run_folder.ending import EndRequest
from ..run_folder.journal import Journal, OtherMaker, Prepared
from ..run_folder.log_file import own_name
from ..stages.beginning import begun
from ..stages.queues import Queues
from ..stages.retries import patiently
from ..stages.summary import Progress, Summary, merged
from ..stages.watch import Watch
from .completeness import missing_parts, written_in
from .statistics import count_share, folder_of, needs_counting, shared_scalings
from .worker import Worker, parts_of

_READ = TypeAdapter(Summary).validate_json


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step of an array has done."""

    sentence: str
    summary: Summary | None = None
    """The summary of a share for --part, of the whole job for --finish, else None."""


def run_step(
    job: Job,
    progress: Callable[[Progress], None] | None = None,
    request: EndRequest | None = None,
) -> StepOutcome:
    """Do one step of an array of processes that share a job.

    Args:
        job: The job, opened; its settings name the step.
        progress: A function that is called with the progress while parts are computed.
        request: Asks the step to end early; complete units are written.

    Returns:
        What was done.

    Raises:
        UsageError: An earlier step is missing, or the run folder is that of another run.
        StageError: A stage failed. The error names the stage and the block.
        Incomplete: --finish found that blocks are missing.
    """
    job.plan.refuse()
    config = job.config
    if config.prepare:
        return _prepare(job)
    if config.statistics is not None:
        return _count(job, share_of(config.statistics), request or EndRequest())
    if config.part is not None:
        return _write(job, share_of(config.part), progress, request or EndRequest())
    return _finish(job)


def _prepare(job: Job) -> StepOutcome:
    elements = job.config.workers or 1
    prepared = Prepared(parts_of(job).step, elements)
    parts_of(job).share(1, elements)
    with begun(job, prepared) as (journal, claims):
        Watch(job, journal, Queues(job), EndRequest()).create_sinks()
        patiently(job.config.retry_for, "the lock", claims.confirm)
    parts = plural(len(parts_of(job)), "part")
    counting = f"--statistics i/{prepared.elements} for each i, then " * needs_counting(job)
    return StepOutcome(
        f"Prepared {parts} for {plural(prepared.elements, 'element')} in {journal.folder}; "
        f"next {counting}--part i/{prepared.elements}, then --finish"
    )


@contextlib.contextmanager
def _joined(job: Job, flag: str, element: int, elements: int) -> Iterator[Journal]:
    """The journal of a prepared run, in which this element writes under a name of its own."""
    prepared = Prepared.read(job.run_dir)
    if elements != prepared.elements:
        raise UsageError(
            f"{flag} {element}/{elements}: the run in {job.run_dir} is prepared for "
            f"{plural(prepared.elements, 'element')}"
        )
    journal = _opened(job, f"{flag} {element}/{elements}")
    journal.writer = f"{flag.strip('-')}-{element}-of-{elements}"
    with contextlib.closing(journal):
        yield journal


def _opened(job: Job, step: str) -> Journal:
    """The journal of a prepared run. ``step`` names the step in errors."""
    anyway = job.config.resume_anyway
    try:
        return Journal.open(job.run_dir, job.fingerprint(), job.maker(), resume=True, anyway=anyway)
    except OtherMaker as error:
        raise UsageError(
            f"{step}: {error.difference}; --resume-anyway goes on and notes which blocks are whose"
        ) from error


def _count(job: Job, share: tuple[int, int], request: EndRequest) -> StepOutcome:
    element, elements = share
    if not needs_counting(job):
        return StepOutcome("Nothing to count: no percentiles of the whole volume are wanted")
    with _joined(job, "--statistics", element, elements) as journal:
        watch = Watch(job, journal, Queues(job), request)
        with watch.sampling():
            counted = count_share(job, watch, folder_of(journal), element, elements)
            if counted is None or not counted.missing:
                with contextlib.suppress(UsageError):  # a second round is needed
                    shared_scalings(job, journal, elements)
                    return StepOutcome("Counted; the percentiles are known, next is --part")
    assert counted is not None
    return StepOutcome(
        f"Counted in round {counted.number}; missing: {plural(len(counted.missing), 'share')}"
    )


def _write(
    job: Job,
    share: tuple[int, int],
    progress: Callable[[Progress], None] | None,
    request: EndRequest,
) -> StepOutcome:
    element, elements = share
    with _joined(job, "--part", element, elements) as journal:
        scalings = shared_scalings(job, journal, elements)
        parts = parts_of(job)
        numbers = parts.share(element, elements)
        journal.skipped = sum(written_in(parts, number, journal.done) for number in numbers)
        journal.join()
        owner = owner_of_array(journal.run)
        claims = patiently(
            job.config.retry_for,
            "the lock",
            lambda: Claims.join(job.sinks, journal.run, owner, beats=True),
            lambda claims: journal,
        )
        with contextlib.closing(claims):
            worker = Worker(job, journal, claims, request, numbers)
            worker.watch.create_sinks()
            with worker.at_work():
                worker.compute(numbers, scalings, progress)
            summary = worker.summary()
            _keep(journal, summary)
            if summary.units_written + summary.units_skipped != summary.units_planned:
                raise Incomplete(
                    f"{summary.units_written} of {summary.units_planned} blocks of this share were "
                    f"written when {request.why} ended it; run --part {element}/{elements} again"
                )
            patiently(job.config.retry_for, "the lock", claims.confirm)
    return StepOutcome(_said_of_share(job, numbers), summary)


def _keep(journal: Journal, summary: Summary) -> None:
    """Save what an element did, added to what its earlier starts did."""
    name = journal.own_name("summary.json")
    if (saved := folder_of(journal).read(name)) is not None:
        earlier = _READ(saved)
        seconds = earlier.seconds + summary.seconds
        each, planned = {"": earlier, "again": summary}, summary.units_planned
        both = merged(each, seconds, planned, halved=summary.halved)  # counts earlier starts too
        summary = replace(both, workers=())
    journal.save(name, asdict(summary))


def _said_of_share(job: Job, numbers: range) -> str:
    return f"Wrote {plural(len(numbers), 'part')} of {len(parts_of(job))}"


def _finish(job: Job) -> StepOutcome:
    """Check that every unit is noted in a log, close the outputs, and free their locks."""
    elements = Prepared.read(job.run_dir).elements
    journal = _opened(job, "--finish")
    if missing := missing_parts(job.plan, journal.done):
        parts = parts_of(job)
        shares = [parts.share(element, elements) for element in range(1, elements + 1)]
        again = [
            element
            for element, share in enumerate(shares, 1)
            if not missing.keys().isdisjoint(share)
        ]
        numbers = joined_elements(again)
        which = f"--part i/{elements} for each i of {numbers}, each in a process of its own"
        if len(again) == 1:  # --array 2 would be two elements
            which, numbers = f"--part {numbers}/{elements}", f"{numbers}-{numbers}"
        raise Incomplete(
            f"{sum(missing.values())} of {job.plan.num_units} blocks are not written, in "
            f"{plural(len(missing), 'part')} of {len(parts)} ({joined_elements([*missing])}); run "
            f"again with {which} (in SLURM penstock slurm submit --array {numbers} -- infer ... "
            f"--part %a/{elements})"
        )
    owner = owner_of_array(journal.run)
    claims = patiently(
        job.config.retry_for,
        "the lock",
        lambda: Claims.join(job.sinks, journal.run, owner, beats=True, ends=True),
        lambda claims: journal,
    )
    with contextlib.closing(claims):
        patiently(job.config.retry_for, "the lock", claims.confirm, lambda nothing: journal)
        for sink in job.sinks:
            sink.close()
    summary = _together(job, journal)
    journal.save("summary.json", asdict(summary))
    return StepOutcome(f"Complete: all {plural(job.plan.num_units, 'block')} are written", summary)


def _together(job: Job, journal: Journal) -> Summary:
    """What all elements did, as if they had run side by side."""
    folder, each = folder_of(journal), {}
    for name in folder.names(own_name("summary.json", "part-*")):
        saved = folder.read(name)
        each[name.removeprefix("summary-").removesuffix(".json")] = _READ(saved or b"")
    seconds = max((summary.seconds for summary in each.values()), default=0.0)
    note = "The time is that of the slowest element; they may have run one after the other"
    halved = len(journal.halved())
    return merged(each, seconds, job.plan.num_units, halved, [note], journal.retried)
