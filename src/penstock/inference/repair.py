"""Open the job of a run again, by what its run folder says, without running code that it names; and
compute the lost and damaged blocks of a run again, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from ..base import (
    RUN_FILE,
    SUMMARY_FILE,
    InferConfig,
    UsageError,
    VerifyConfig,
    build,
    system_errors,
)
from ..data import discard_damaged, no_block_again
from ..models import REGISTRY, check_model_name
from .opening.job import Job
from .run import run_job
from .run_folder.journal import Journal
from .run_folder.names import is_label_run
from .run_folder.reader import RunFolder
from .stages.summary import Progress, Summary
from .verify import Proof

_OF_ONE_START = frozenset(
    "overwrite resume take_over trace metrics_json "
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
    if is_label_run(run.content):
        raise UsageError(
            "blocks of labels are made again by penstock verify OUTPUT --forget, and then penstock "
            "label as before with --resume"
        )
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


def repair_run(
    run: RunFolder,
    proof: Proof,
    config: VerifyConfig,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Compute the blocks of a run that are not proven again, and write them where they were.

    Args:
        run: The run.
        proof: What is wrong with it, as `verify_run` and `recompute_blocks` have found.
        config: The model and the devices, as for `recompute_blocks`.
        progress: A function that is called with the progress.

    Returns:
        What was computed and written.

    Raises:
        UsageError: Another process writes the run, or its input or model is not there, is not that
            of the run or is not trusted. Nothing was changed.
        StageError: A stage failed. The error names the stage and the place.
    """
    job = reopened(run, config)  # before anything is changed
    take_off(run, proof)
    return run_job(job, progress)


def take_off(run: RunFolder, proof: Proof) -> int:
    """Take the blocks that are not proven off the list of what is written, and empty their chunks
    if these cannot be decoded, so that a resumed run writes them.

    Args:
        run: The run.
        proof: What is wrong with it.

    Returns:
        Number of blocks that were on the list.

    Raises:
        UsageError: Another process writes the run, or the list cannot be written.
    """
    lost = sorted(run.notes.keys() & proof.bad)
    for stored in run.outputs:
        if lost and stored.written.is_file:
            raise UsageError(no_block_again(stored.written.name))
    with system_errors(str(run.folder)):
        # The lock of an output keeps other runs away, and not a part of the same run.
        if run.folder.at_work():
            raise UsageError(f"another process is writing the run in {run.folder}")
        # Chunks first: if a kill comes between, what the list still names is found missing.
        for key in lost:
            for stored in run.outputs:
                discard_damaged(stored.written, stored.box(key[0], run.blocks.cell(key[1:])))
        if lost:
            run.folder.forget(str(run.content.get("run")), lost)
        run.folder.delete(SUMMARY_FILE)  # it says that the run is done
    return len(lost)
