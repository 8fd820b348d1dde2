"""Compute some blocks of a run anew from its input, and compare them with what is stored.

A block goes through the same geometry as in the run, so the code, versions and machine that made it
must give the same bits. On others, which may change the last digits, nothing is computed.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..base import UsageError, VerifyConfig
from ..data import Box, OutputLock, Sink
from .opening.job import Job
from .repair import reopened
from .run_folder.block_log import Key
from .run_folder.block_set import BlockSet
from .run_folder.folder import read_document
from .run_folder.journal import Journal, differing
from .run_folder.names import SCALINGS_FILE
from .run_folder.reader import RunFolder, Stored
from .stages.pipeline import compute
from .stages.run import Run
from .stages.statistics import find_scalings
from .verify import Finding, Proof

_OF_DEVICES = ("devices", "arithmetic")
"""Facts of a job that depend on its devices."""


@dataclass
class Recomputed:
    """The blocks that were computed anew, and how they compare."""

    sampled: int
    population: int
    """Number of blocks from which the sample was drawn."""
    equal: int = 0
    """Blocks that have the same bits."""
    findings: list[Finding] = field(default_factory=list)


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
    here = {**{name: job.fingerprint()[name] for name in _OF_DEVICES}, **job.maker()}
    if (name := differing(before, here)) is not None:
        raise UsageError(
            f"--recompute: the run in {run.folder} had {name} {before.get(name)!r}, and here it is "
            f"{here[name]!r}, so its bits need not be the same; recompute where they are"
        )
    done = Recomputed(len(keys), len(run.notes.keys() - proof.bad))
    comparison = _StoredComparison(run, job, keys, done)
    journal = Journal(None, {})
    journal.statistics = read_document(run.folder, SCALINGS_FILE) or {}
    journal.done = BlockSet(run.keys())
    journal.done -= {*keys}
    anew = Run(job, journal, OutputLock())
    with anew.at_work():
        scalings = find_scalings(anew)
        compute(anew, range(len(anew.parts)), scalings, lambda now: progress(now.blocks_done))
    comparison.finish()
    return done


class _StoredComparison:
    """Takes the place of a job's sinks, and compares what would be written with what is stored."""

    def __init__(self, run: RunFolder, job: Job, keys: Sequence[Key], done: Recomputed) -> None:
        self.run, self.done = run, done
        self.left = {key: len(job.outputs) for key in keys}
        """Number of outputs of each block that are not compared yet, or differ."""
        self.lock = threading.Lock()
        for number, output in enumerate(job.outputs):
            sink = cast("Sink", _ComparingSink(self, number, output.sink))
            job.outputs[number] = replace(output, sink=sink)

    def compare(self, number: int, box: Box, array: NDArray[Any]) -> None:
        stored = self.run.outputs[number]
        key = self._key(stored, box)
        before = stored.written.source.read(box)
        bits = np.dtype(f"u{array.dtype.itemsize}")
        same = np.array_equal(before.view(bits), array.view(bits))
        with self.lock:
            self.left[key] -= same
            if not same:
                what = "has other values when computed anew"
                self.done.findings.append(Finding(key, "different", stored.written.name, what))

    def _key(self, stored: Stored, box: Box) -> Key:
        volume = [tuple(place) for place in stored.places].index(box.start[:2])
        there = box[2:].shift(tuple(-shift for shift in stored.offset))
        block = stored.grid.back().box(there)
        return (volume, *self.run.blocks.touching(block).start)

    def finish(self) -> None:
        """Count the blocks once all are compared."""
        self.done.equal = sum(not left for left in self.left.values())


class _ComparingSink:
    """A sink that compares and stores nothing."""

    def __init__(self, comparison: _StoredComparison, number: int, sink: Sink) -> None:
        self.comparison, self.number = comparison, number
        self.name, self.dtype, self.domain = sink.name, sink.dtype, sink.domain
        array = getattr(comparison.run.outputs[number].written.source, "array", None)
        self.fill = getattr(array, "fill_value", None) or 0

    def write(self, box: Box, array: NDArray[Any]) -> None:
        self.comparison.compare(self.number, box, array)
