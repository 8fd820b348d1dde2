"""Run a model over a volume larger than memory.

A run opens its folder, locks the outputs, finds the scalings, runs the `Pipeline`, and sums up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..base import (
    Incomplete,
    InferConfig,
    build,
    cuda_flags_kept,
    frozen_garbage,
    modes_kept,
    speaks_python,
)
from ..data import Claims
from ..models import set_cuda_flags
from .opening.job import Job
from .run_folder.ending import EndRequest
from .run_folder.journal import Journal
from .stages.beginning import begun
from .stages.pipeline import Pipeline
from .stages.queues import Queues
from .stages.reading import BlockReader, wanted_blocks
from .stages.statistics import find_scalings
from .stages.summary import Progress, Summary
from .stages.watch import Watch, forgoing


@speaks_python(InferConfig, model_type="model")
def run_inference(
    in_spec: Any,
    out_spec: Any,
    *,
    model: Any,
    progress: Callable[[Progress], None] | None = None,
    **knobs: Any,
) -> Summary:
    """Run a model over a volume and write the result.

    Args:
        in_spec: The input: a path, a URL, a TensorStore spec or a numpy array. It has 2 to 5 axes,
            the last ones of t c z y x.
        out_spec: The output, given like the input; several for a model with several heads.
        model: A name, a reference, a file or an ``nn.Module`` that maps (batch, channels, z, y, x)
            to the same spatial shape.
        progress: A function that is called with the progress while the job runs.
        knobs: The fields of `InferConfig`, which are the flags of ``penstock infer``.

    Returns:
        The times of the stages, and what was written.

    Raises:
        UsageError: The job cannot be done as asked. Nothing was created.
        Refused: The memory of the host or of a device does not hold the job.
        StageError: A stage failed. The error names the stage and the block.
        Incomplete: A block is missing at the end.
    """
    named = {"in_spec": in_spec, "out_spec": out_spec, "model_type": model}
    with modes_kept(model):
        return run_job(Job(build(InferConfig, named, knobs)), progress)


def run_job(
    job: Job,
    progress: Callable[[Progress], None] | None = None,
    request: EndRequest | None = None,
) -> Summary:
    """Carry out the plan of a job. On success every planned block has been written.

    Args:
        job: The job, opened.
        progress: A function that is called with the progress while the job runs.
        request: Asks the job to end early.

    Returns:
        The times of the stages, and what was written.

    Raises:
        UsageError: Another process writes the output, or the run folder cannot be used.
        Refused: The memory of the host or of a device does not hold the job.
        StageError: A stage failed. The error names the stage and the block.
        Incomplete: A block is missing at the end.
    """
    job.plan.refuse()
    with begun(job) as (journal, claims), cuda_flags_kept():
        set_cuda_flags(job.config.tf32, job.config.cudnn_benchmark)
        summary = _carry_out(job, journal, claims, progress, request or EndRequest())
    with forgoing(f"--run-dir {job.run_dir}: summary.json"):
        journal.save("summary.json", asdict(summary))
    return summary


def _carry_out(
    job: Job,
    journal: Journal,
    claims: Claims,
    progress: Callable[[Progress], None] | None,
    request: EndRequest,
) -> Summary:
    """Write every unit."""
    queues = Queues(job)
    watch = Watch(job, journal, queues, request)
    watch.create_sinks()
    with watch.sampling(), frozen_garbage():
        scalings = find_scalings(job, journal, watch)
        reader = BlockReader(job, scalings, queues.equipment.read_pool, queues.flow, watch.retries)
        blocks = wanted_blocks(job, journal.done)
        Pipeline(job, journal, claims, queues, watch, reader, blocks).run(progress)
    if journal.written + journal.skipped != watch.extent.units:
        why = f" when {request.why} ended the job" if request.why else ""
        raise Incomplete(
            f"{journal.written} of {watch.extent.units} blocks were written{why}; "
            "run again with --resume"
        )
    watch.retries.run(queues.flow, "the lock", "confirm", claims.confirm)
    summary = watch.summary(reader.chunks.count, (*claims.lacking, *journal.lacking))
    for sink in job.sinks:
        sink.close()
    return summary
