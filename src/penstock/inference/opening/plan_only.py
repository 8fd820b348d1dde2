"""Plan jobs: with torch if it is installed, or without it for models whose facts are known."""

from __future__ import annotations

from typing import Any

from ...base import InferConfig, build, modes_kept, speaks_python
from ..planning.plan import Plan
from .draft import Draft


@speaks_python(InferConfig, model_type="model")
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
        MissingDependency: Torch is needed and not installed.
    """
    named = {"in_spec": in_spec, "out_spec": out_spec, "model_type": model}
    with modes_kept(model):
        return plan_job(build(InferConfig, named, knobs))


def plan_job(config: InferConfig) -> Plan:
    """The plan of a job. Without torch, the registry of models gives the kinds of heads, and the
    memory of torch itself is not counted. Everything else is the same.

    Raises:
        UsageError: The job cannot be done as asked.
        MissingDependency: The job cannot be planned without torch.
    """
    try:
        from .job import Job
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return Draft(config).plan
    return Job(config).plan
