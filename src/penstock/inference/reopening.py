"""Open the job of a run again, by what its run folder says, without running code that it names."""

from __future__ import annotations

from ..base import RUN_FILE, InferConfig, UsageError, VerifyConfig, build
from ..models import REGISTRY, check_model_name
from .opening.job import Job
from .run_folder.journal import Journal
from .run_folder.reader import RunFolder

_OF_ONE_START = frozenset(
    "overwrite resume require_lock take_over trace metrics_json "
    "part parts workers prepare statistics finish cluster".split()
)
"""Settings of a run that do not change its voxels."""
_OF_MACHINE = frozenset(("outputs", "devices", "arithmetic"))
"""Facts that may differ from those of the run, as they depend on the machine."""


def reopened(run: RunFolder, config: VerifyConfig) -> Job:
    """Open the job of a run again.

    A run folder may come from a stranger, and most models are code. So a model that the folder
    names is taken only from our registry, or if the user trusts the folder.

    Args:
        run: The run.
        config: What the user says: the model, whether it is trusted, and the devices.

    Returns:
        The job. It writes into the outputs of the run.

    Raises:
        UsageError: Input, model or weights are not there, are not those of the run, or are not
            trusted.
    """
    if str(run.fingerprint.get("input")).startswith("memory"):
        raise UsageError("the input of the run was an array in memory")
    names = InferConfig.model_fields.keys() - _OF_ONE_START
    settings = {name: value for name, value in run.settings.items() if name in names}
    ours = {
        "out_spec": run.specs,
        "run_dir": run.folder.place,
        "resume": True,
        "model_type": _model(run, config),
        "trust_model": config.trust_model,
    }
    if config.devices is not None:
        ours["devices"] = config.devices
    job = Job(build(InferConfig, settings, ours))
    job.plan.refuse()
    now, before = Journal(None, job.fingerprint()).fingerprint, run.fingerprint
    for name, value in now.items():
        if name not in _OF_MACHINE and before.get(name) != value:
            raise UsageError(
                f"the run had {name} {before.get(name)!r}, now it is {value!r}; so its blocks "
                "cannot be computed again"
            )
    return job


def _model(run: RunFolder, config: VerifyConfig) -> str:
    named = config.model or str(run.settings.get("model_type"))
    if config.model is None and named not in REGISTRY and not config.trust_model:
        raise UsageError(
            f"{run.folder}/{RUN_FILE} names the model {named}, which may run code: name it "
            "yourself with --model, or trust the run folder with --trust-model"
        )
    check_model_name(named, "--model")
    return named
