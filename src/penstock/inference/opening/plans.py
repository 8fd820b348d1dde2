"""The plan of a job that is not run."""

from __future__ import annotations

from typing import Any

from ...base import InferConfig, build, modes_kept, names_parameters
from ..planning.plan import Plan
from .job import Job


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
        return plan_job(build(InferConfig, named, knobs))


def plan_job(config: InferConfig) -> Plan:
    """The plan of a job.

    Raises:
        UsageError: The job cannot be done as asked.
    """
    return Job(config).plan
