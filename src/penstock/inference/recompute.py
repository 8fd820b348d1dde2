"""Compute some blocks of a run anew from its input, and compare them with what is stored.

A block goes through the same geometry as in the run, so the code, versions and machine that made it
must give the same bits. Others may change the last digits, within a tolerance.
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

_TOLERANCE = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-4}


@dataclass
class Recomputed:
    """The blocks that were computed anew, and how they compare."""

    sampled: int
    population: int
    """Number of blocks from which the sample was drawn."""
    tolerances: Sequence[float]
    """The tolerance of each output; see `VerifyConfig`."""
    equal: int = 0
    """Blocks that have the same bits."""
    near: int = 0
    """Blocks that differ within the tolerance, as the run was made elsewhere."""
    largest: float = 0.0
    """The largest difference among those blocks, on the scale of the tolerance."""
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
        config: The model and the devices, and the tolerance for a run that was made by other
            code, versions or machines, whose bits may differ.
        progress: A function that is called with the number of blocks that are done.

    Returns:
        How the blocks compare.

    Raises:
        UsageError: Input, model or weights are not there or are not those of the run.
        StageError: A stage failed.
    """
    try:
        job = reopened(run, config)
    except UsageError as error:
        raise UsageError(f"--recompute: {error}") from error
    kinds = [kind for _, kind, _ in run.fingerprint["heads"]]
    tolerances = [
        _tolerance(stored, kind) if config.tolerance is None else config.tolerance
        for stored, kind in zip(run.outputs, kinds, strict=True)
    ]
    done = Recomputed(len(keys), len(run.notes.keys() - proof.bad), tolerances)
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


def _tolerance(stored: Stored, kind: str) -> float:
    dtype = stored.written.source.dtype
    if kind == "labels" or dtype.kind == "b":
        return 0
    return _TOLERANCE.get(dtype.name, 1)


class _StoredComparison:
    """Takes the place of a job's sinks, and compares what would be written with what is stored."""

    def __init__(self, run: RunFolder, job: Job, keys: Sequence[Key], done: Recomputed) -> None:
        self.run, self.done = run, done
        now, before = job.fingerprint(), run.fingerprint
        alike = all(before.get(name) == now[name] for name in ("devices", "arithmetic"))
        self.same = alike and differing(run.content.get("maker", {}), job.maker()) is None
        """Whether the same code, versions and kind of machine made the run."""
        self.differences: dict[Key, list[float | None]] = {key: [] for key in keys}
        """The largest difference of each block, for each output; None for equal bits."""
        self.lock = threading.Lock()
        for number, output in enumerate(job.outputs):
            sink = cast("Sink", _ComparingSink(self, number, output.sink))
            job.outputs[number] = replace(output, sink=sink)

    def compare(self, number: int, box: Box, array: NDArray[Any]) -> None:
        stored = self.run.outputs[number]
        key = self._key(stored, box)
        difference = difference_of(stored.written.source.read(box), array)
        with self.lock:
            self.differences[key].append(difference)
            if difference is None:
                return
            if self.same or not difference <= self.done.tolerances[number]:
                limit = "" if self.same else f", more than {self.done.tolerances[number]:g},"
                what = f"differs by up to {difference:.3g}{limit} when computed anew"
                self.done.findings.append(Finding(key, "different", stored.written.name, what))

    def _key(self, stored: Stored, box: Box) -> Key:
        volume = [tuple(place) for place in stored.places].index(box.start[:2])
        block = box[2:].shift(tuple(-shift for shift in stored.offset))
        return (volume, *self.run.blocks.touching(block).start)

    def finish(self) -> None:
        """Count the blocks once all are compared."""
        bad = {finding.key for finding in self.done.findings}
        for key in self.differences.keys() - bad:
            largest = max((d for d in self.differences[key] if d is not None), default=None)
            self.done.equal += largest is None
            self.done.near += largest is not None
            self.done.largest = max(self.done.largest, largest or 0.0)


class _ComparingSink:
    """A sink that compares and stores nothing."""

    def __init__(self, comparison: _StoredComparison, number: int, sink: Sink) -> None:
        self.comparison, self.number = comparison, number
        self.name, self.dtype, self.domain = sink.name, sink.dtype, sink.domain

    def write(self, box: Box, array: NDArray[Any]) -> None:
        self.comparison.compare(self.number, box, array)


def difference_of(one: NDArray[Any], other: NDArray[Any]) -> float | None:
    """The largest difference of two arrays of one dtype; None if all bits are equal.

    For floats it is relative to the largest absolute value of ``one``. It is infinite if only one
    of two values is finite.
    """
    bits = np.dtype(f"u{one.dtype.itemsize}")
    if np.array_equal(one.view(bits), other.view(bits)):
        return None
    if one.dtype.kind != "f":
        if one.dtype.kind == "b":
            return 1.0
        spread = np.maximum(one, other) - np.minimum(one, other)
        return float(spread.view(bits).max())  # unsigned: it may not fit the signed dtype
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    if not (np.isfinite(one) & np.isfinite(other))[~same].all():
        return math.inf
    a, b = one[~same].astype(np.float64), other[~same].astype(np.float64)
    scale = np.abs(one, where=np.isfinite(one), out=np.zeros(one.shape)).max()
    return float(np.abs(a - b).max(initial=0.0) / scale) if scale else math.inf
