"""Compute blocks of a run again: those that are lost or damaged, to write them; or some that are
intact, to compare them with what is stored.

The job of a run is opened by what its run folder says, without running code that it names. A block
goes through the same geometry as in the run, so the code, versions and machine that made it must
give the same bits. On others, which may change the last digits, nothing is compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from ..base import (
    RUN_FILE,
    SUMMARY_FILE,
    InferConfig,
    UsageError,
    VerifyConfig,
    build,
    system_errors,
)
from ..data import OutputLock, Sink, discard_damaged, no_block_again
from ..models import REGISTRY, check_model_name
from .opening.job import Job
from .run import run_job
from .run_folder.block_log import BlockSet, Key
from .run_folder.folder import differing, read_document
from .run_folder.journal import Journal
from .run_folder.names import SCALINGS_FILE, is_label_run
from .run_folder.reader import RunFolder, Stored
from .stages.pipeline import compute
from .stages.run import Run
from .stages.statistics import find_scalings
from .stages.summary import Progress, Summary
from .verify import Finding, Proof, Recomputed

_OF_ONE_START = frozenset(
    "overwrite resume take_over trace metrics_json "
    "part parts workers prepare statistics finish cluster".split()
)
"""Settings of a run that do not change its voxels."""
_OF_DEVICES = ("devices", "arithmetic")
"""Facts of a job that depend on its devices."""


def reopened(run: RunFolder, config: VerifyConfig, *, take_over: bool = False) -> Job:
    """Open the job of a run again.

    A run folder may come from a stranger, and most models are code. So a model that the folder
    names is taken only from our registry, or if the user trusts the folder.

    Args:
        run: The run.
        config: What the user says: the model, whether it is trusted, and the devices.
        take_over: Whether the job takes outputs that another run has locked, as for `infer`.

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
        "take_over": take_over,
        "model_type": _model(run, config),
        "trust_model": config.trust_model,
    }
    if config.devices is not None:
        ours["devices"] = config.devices
    job = Job(build(InferConfig, settings, ours))
    job.plan.refuse()
    facts, before = Journal(None, job.fingerprint).fingerprint, run.fingerprint
    now = {name: value for name, value in facts.items() if name not in ("outputs", *_OF_DEVICES)}
    if (name := differing(before, now)) is not None:
        raise UsageError(
            f"the run had {name} {before.get(name)!r}, now it is {now[name]!r}; so its blocks "
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
    *,
    take_over: bool = False,
) -> Summary:
    """Compute the blocks of a run that are not proven again, and write them where they were.

    Args:
        run: The run.
        proof: What is wrong with it, as `verify_run` and `recompute_blocks` have found.
        config: The model and the devices, as for `recompute_blocks`.
        progress: A function that is called with the progress.
        take_over: Whether to take outputs that another run has locked, as for `infer`.

    Returns:
        What was computed and written.

    Raises:
        UsageError: Another process writes the run, or its input or model is not there, is not that
            of the run or is not trusted. Nothing was changed.
        StageError: A stage failed. The error names the stage and the place.
    """
    job = reopened(run, config, take_over=take_over)  # before anything is changed
    take_off(run, proof)
    return run_job(job, progress)


def take_off(run: RunFolder, proof: Proof) -> int:
    """Take the blocks that are not proven off the list of what is written, so that a resumed run
    writes them. Chunks of them that cannot be decoded are emptied.

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
        for key in sorted(proof.bad):  # also those whose line is lost: they are written, too
            for stored in run.outputs:
                discard_damaged(stored.written, stored.box(key[0], run.blocks.cell(key[1:])))
        if lost:
            run.folder.forget(str(run.content.get("run")), lost)
        run.folder.delete(SUMMARY_FILE)  # it says that the run is done
    return len(lost)


def sample(run: RunFolder, proof: Proof, share: float, seed: int) -> list[Key]:
    """Pick blocks of a run at random, among those that are written and not damaged.

    Args:
        run: The run.
        proof: The result of `verify_run`.
        share: The share of the blocks to pick.
        seed: Seed of the random numbers.

    Returns:
        The blocks.

    Raises:
        UsageError: There is no such block.
    """
    keys = sorted(run.notes.keys() - proof.bad)
    if not keys:
        raise UsageError("--recompute: no block of the run is intact")
    return random.Random(seed).sample(keys, math.ceil(share * len(keys)))


def recompute_blocks(
    run: RunFolder,
    proof: Proof,
    keys: Sequence[Key],
    config: VerifyConfig,
    progress: Callable[[int], None],
) -> Recomputed:
    """Compute some blocks anew, and compare them with what is stored.

    Args:
        run: The run.
        proof: The result of `verify_run`.
        keys: The blocks.
        config: The model and the devices.
        progress: A function that is called with the number of blocks that are done.

    Returns:
        How the blocks compare.

    Raises:
        UsageError: Input, model or weights are not there or are not those of the run, or it was
            made with other code, versions or another kind of machine.
        StageError: A stage failed.
    """
    try:
        job = reopened(run, config)
    except UsageError as error:
        raise UsageError(f"--recompute: {error}") from error
    before = {**run.fingerprint, **run.content.get("maker", {})}
    here = {**{name: job.fingerprint[name] for name in _OF_DEVICES}, **job.maker}
    if (name := differing(before, here)) is not None:
        raise UsageError(
            f"--recompute: the run in {run.folder} had {name} {before.get(name)!r}, and here it is "
            f"{here[name]!r}, so its bits need not be the same; recompute where they are"
        )
    for number, output in enumerate(job.outputs):
        sink = cast("Sink", _NoSink(run.outputs[number], output.sink))
        job.outputs[number] = replace(output, sink=sink)
    journal = _ComparingJournal(run)
    journal.statistics = read_document(run.folder, SCALINGS_FILE) or {}
    # All but these count as done, and so are not computed.
    journal.done = BlockSet(run.keys())
    journal.done -= {*keys}
    anew = Run(job, journal, OutputLock())
    with anew.at_work():
        scalings = find_scalings(anew)
        compute(anew, range(len(anew.parts)), scalings, lambda now: progress(now.blocks_done))
    return Recomputed(len(keys), len(run.notes.keys() - proof.bad), journal.findings)


class _NoSink:
    """Takes the place of a sink, and writes nothing."""

    def __init__(self, stored: Stored, sink: Sink) -> None:
        self.name, self.dtype = sink.name, sink.dtype
        array = getattr(stored.written.source, "array", None)
        self.fill = getattr(array, "fill_value", None) or 0

    def write(self, box: object, array: object) -> None:
        """Do nothing: the journal compares the checks of the values."""


class _ComparingJournal(Journal):
    """A journal that keeps nothing, and compares the checks of blocks with those of a run. What
    the run has stored has the checks that it noted, as it is verified."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(None, {})
        self.earlier, self.findings = run, list[Finding]()

    def note(self, key: Key, voxels: int, checks: Sequence[str] = ()) -> None:
        super().note(key, voxels)
        pairs = zip(checks, self.earlier.notes[key], self.earlier.outputs, strict=True)
        self.findings += [
            Finding(key, "different", stored.written.name, "has other values when computed anew")
            for check, noted, stored in pairs
            if check != noted
        ]
