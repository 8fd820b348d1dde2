"""Run a model over a volume larger than memory.

A run opens its folder, locks the outputs, finds the scalings, runs the `Pipeline`, and sums up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base import InferConfig, UsageError, build, modes_kept, names_parameters
from .opening.job import Job
from .planning.plan import Plan
from .run_folder.journal import EndRequest
from .stages.beginning import begun
from .stages.output_levels import completed
from .stages.pipeline import compute
from .stages.run import Run
from .stages.statistics import find_scalings
from .stages.summary import Progress, Summary


@names_parameters(InferConfig, model_type="model")
def plan_inference(in_spec: Any, out_spec: Any, *, model: Any, **knobs: Any) -> Plan:
    """Plan what `run_inference` would do, without doing it.

    Args:
        in_spec: As for `run_inference`.
        out_spec: As for `run_inference`.
        model: As for `run_inference`.
        knobs: As for `run_inference`.

    Returns:
        Counts, bytes and memory of the job.

    Raises:
        UsageError: The job cannot be done as asked. Nothing was created.
    """
    named = {"in_spec": in_spec, "out_spec": out_spec, "model_type": model}
    with modes_kept(model):
        return Job(build(InferConfig, named, knobs)).plan


@names_parameters(InferConfig, model_type="model")
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
            to the same spatial shape, or to one of so many times as many or as few voxels.
        progress: A function that is called with the progress while the job runs.
        knobs: The fields of `InferConfig`, which are the flags of ``penstock infer``.

    Returns:
        The times of the stages, and what was written.

    Raises:
        UsageError: The job cannot be done as asked. Nothing was created.
        Refused: The memory of the host or of a device does not hold the job.
        StageError: A stage failed. The error names the stage and the place.
        Incomplete: A block is missing at the end.
    """
    named = {"in_spec": in_spec, "out_spec": out_spec, "model_type": model}
    with modes_kept(model):
        config = build(InferConfig, named, knobs)
        if shared := [*config.step_flags, *["--cluster"] * (config.cluster is not None)]:
            raise UsageError(
                f"{shared[0]}: run_inference does a whole job in this process; the command "
                "`penstock infer` shares a job among several"
            )
        return run_job(Job(config), progress)


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
        StageError: A stage failed. The error names the stage and the place.
        Incomplete: A block is missing at the end.
    """
    job.plan.refuse()
    with begun(job) as (journal, lock):
        run = Run(job, journal, lock, request)
        run.open_outputs()
        with run.at_work():
            compute(run, range(len(run.parts)), find_scalings(run), progress)
        run.watch.check_written("run again with --resume")
        return completed(job, journal, lock, run.watch.summary(), run.request)
