"""Compute the lost and damaged blocks of a run again, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from ..base import SUMMARY_FILE, UsageError, VerifyConfig, system_errors
from ..data import discard_damaged
from .reopening import reopened
from .run import run_job
from .run_folder.reader import RunFolder
from .stages.summary import Progress, Summary
from .verify import Proof


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
