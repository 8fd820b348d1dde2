"""A run that several processes share, in four steps that any scheduler may start:

    --prepare           makes output and run folder, and fixes the parts
    --statistics i/n    counts the values of a share, for percentiles of the whole volume
    --part i/n          writes a share of the parts
    --finish            checks that nothing is missing, and closes the output

Each part writes the same bytes however often it is done, so a step needs no lease on its share. A
step that was killed is started again, with the same ``n`` or another: it skips what logs name.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator

from ...base import Incomplete, group_by, number_ranges, plural, share_of
from ..opening.job import Job
from ..planning.plan import missing_parts, written_in
from ..run_folder.journal import EndRequest, Journal, Prepared
from ..stages.beginning import begun, joined
from ..stages.output_levels import completed
from ..stages.pipeline import compute
from ..stages.run import Run
from ..stages.statistics import Counting
from ..stages.summary import Progress, Summary, merged, summaries_of
from ..stages.watch import with_own_files

StepOutcome = tuple[str, Summary | None]
"""A sentence that says what a step has done, and the summary of a share for --part, of the whole
job for --finish, else None."""


def run_step(
    job: Job,
    progress: Callable[[Progress], None] | None = None,
    request: EndRequest | None = None,
) -> StepOutcome:
    """Do one step of an array of processes that share a job.

    Args:
        job: The job, opened; its settings name the step.
        progress: A function that is called with the progress while parts are computed.
        request: Asks the step to end early; complete blocks are written.

    Returns:
        What was done.

    Raises:
        UsageError: An earlier step is missing, or the run folder is that of another run.
        StageError: A stage failed. The error names the stage and the place.
        Incomplete: --finish found that blocks are missing.
    """
    job.plan.refuse()
    config = job.config
    if config.prepare:
        return _prepare(job)
    if config.statistics is not None:
        return _count(job, *share_of(config.statistics), request)
    if config.part is not None:
        return _write(job, *share_of(config.part), progress, request)
    return _finish(job)


def _prepare(job: Job) -> StepOutcome:
    elements = job.config.workers or 1
    with begun(job, Prepared(job.geometry.part, elements)) as (journal, lock):
        Run(job, journal, lock).open_outputs()
        lock.hand_over()  # it stays the run's until --finish
    counting = f"--statistics i/{elements} for each i, then " * job.values.counted
    return (
        f"Prepared {plural(len(job.plan.parts), 'part')} for {plural(elements, 'element')} in "
        f"{journal.folder}; next {counting}--part i/{elements}, then --finish"
    ), None


@contextlib.contextmanager
def _joined(job: Job, step: str, numbers: range, request: EndRequest | None) -> Iterator[Run]:
    """The run of which this process does a step, such as ``--part 3/8``, in a context in which it
    computes. ``numbers`` are the parts of the step."""
    name = step.strip("-").replace(" ", "-").replace("/", "-of-")
    job.config = with_own_files(job.config, name)
    # Each start has files of its own, so its name ends with what no other start has.
    with joined(job, f"{name}-{uuid.uuid4().hex[:8]}") as (journal, lock):
        journal.skipped = sum(written_in(job.plan.parts, n, journal.done) for n in numbers)
        run = Run(job, journal, lock, request, numbers)
        with run.at_work():
            yield run


def _count(job: Job, element: int, elements: int, request: EndRequest | None) -> StepOutcome:
    if not job.values.counted:
        return "Nothing to count: no percentiles of the whole volume are wanted", None
    with _joined(job, f"--statistics {element}/{elements}", range(0), request) as run:
        return Counting(run).count(element, elements), None


def _write(
    job: Job,
    element: int,
    elements: int,
    progress: Callable[[Progress], None] | None,
    request: EndRequest | None,
) -> StepOutcome:
    numbers = job.plan.parts.share(element, elements)
    with _joined(job, f"--part {element}/{elements}", numbers, request) as run:
        run.open_outputs()
        run.journal.join()
        try:
            compute(run, numbers, Counting(run).scalings(elements), progress)
        finally:  # what a start has done counts for the job's summary, also if it is cut short
            run.keep_summary()
        run.watch.check_written(f"run --part {element}/{elements} again")
        return f"Wrote {plural(len(numbers), 'part')} of {len(job.plan.parts)}", run.watch.summary()


def _finish(job: Job) -> StepOutcome:
    """Check that every block is noted in a log, close the outputs, and free their lock."""
    with joined(job, None, ends=True) as (journal, lock):
        if missing := missing_parts(job.plan, journal.done):
            lock.hand_over()  # parts are still to come
            raise _lacking(job, missing)
        summary = completed(job, journal, lock, _together(job, journal), EndRequest())
    return "Complete: all blocks are written", summary


def _lacking(job: Job, missing: dict[int, int]) -> Incomplete:
    """The error that says which shares are to be started again."""
    elements, parts = Prepared.read(job.run_dir).elements, job.plan.parts
    again = [
        element
        for element in range(1, elements + 1)
        if not missing.keys().isdisjoint(parts.share(element, elements))
    ]
    numbers = number_ranges(again)
    which = f"--part i/{elements} for each i of {numbers}, each in a process of its own"
    if len(again) == 1:  # --array 2 would be two elements
        which, numbers = f"--part {numbers}/{elements}", f"{numbers}-{numbers}"
    return Incomplete(
        f"{sum(missing.values()):,} of {job.plan.num_blocks:,} blocks are not written, in "
        f"{plural(len(missing), 'part')} of {len(parts)} ({number_ranges([*missing])}); run "
        f"again with {which} (in SLURM penstock slurm submit --array {numbers} -- infer ... "
        f"--part %a/{elements})"
    )


def _together(job: Job, journal: Journal) -> Summary:
    """What all elements did, as if they had run side by side."""
    summaries = summaries_of(journal.folder, "part-*")
    counts = job.plan.num_blocks, job.plan.facts.cores
    each = {
        element: merged(
            {writer: summaries[writer] for writer in starts},
            sum(summaries[writer].seconds for writer in starts),
            *counts,
        )
        for element, starts in group_by(summaries, lambda name: name.rpartition("-")[0]).items()
    }
    longest = max((summary.seconds for summary in each.values()), default=0.0)
    return merged(
        each, longest, *counts,
        ["The time is that of the slowest element; they may have run one after the other"
         if each else "No element has left its times: each was killed after its last block"],
    )  # fmt: skip
