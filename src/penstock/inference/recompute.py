"""Compute some units of a run anew from its input, and compare them with what is stored.

A unit goes through the same geometry as in the run, so the same code, versions and machine must
give the same bits. Others may change the last digits, within a tolerance.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..base import (
    InferConfig,
    UsageError,
    build,
    cuda_flags_kept,
    frozen_garbage,
)
from ..data import Box, Claims, Sink, flatten, indices
from ..models import check_model_name, set_cuda_flags
from .opening.job import Job
from .run_folder.ending import EndRequest
from .run_folder.files import halved_in, read_document
from .run_folder.journal import Journal
from .run_folder.reader import RunFolder, Stored
from .run_folder.unit_log import Key
from .stages.pipeline import Pipeline
from .stages.queues import Queues
from .stages.reading import BlockReader
from .stages.statistics import find_scalings
from .stages.summary import Progress
from .stages.watch import Watch
from .tiling.geometry import Block, Geometry, narrowed
from .verify import Finding, Proof

NOT_AGAIN = frozenset(
    "overwrite replace resume resume_anyway require_lock trace metrics_json "
    "part parts workers prepare statistics finish cluster spill max_spill spill_rate".split()
)
"""Settings of a run that do not change its voxels."""
_OF_MACHINE = frozenset(("outputs", "devices", "arithmetic"))
"""Facts that may differ from those of the run, as they depend on the machine."""
_TOLERANCE = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-4}


@dataclass
class Recomputed:
    """The units that were computed anew, and how they compare."""

    sampled: int
    population: int
    """Number of units from which the sample was drawn."""
    tolerances: Sequence[float]
    """The tolerance of each output; see `VerifyConfig`."""
    equal: int = 0
    """Units that have the same bits."""
    near: int = 0
    """Units of another maker, or with patches in smaller batches, that differ within the
    tolerance."""
    halved: int = 0
    """Units with patches in smaller batches, as memory ran out in the run or now."""
    largest: float = 0.0
    """The largest difference among those units, on the scale of the tolerance."""
    findings: list[Finding] = field(default_factory=list)

    def chance(self, damaged: int) -> float:
        """The probability that the sample has one of ``damaged`` units at random places."""
        if damaged > self.population - self.sampled:
            return 1.0
        # Of each damaged unit, that it is not drawn either if those before it are not.
        others = self.population - np.arange(damaged)
        return -math.expm1(np.log1p(-self.sampled / others).sum())


def sample(run: RunFolder, proof: Proof, share: float, seed: int) -> list[Key]:
    """Pick units of a run at random, among those that are written and not damaged.

    Args:
        run: The run.
        proof: The result of `verify_run`.
        share: The share of the units to pick.
        seed: Seed of the random numbers.

    Returns:
        The units.

    Raises:
        UsageError: There is no such unit.
    """
    keys = sorted(run.notes.keys() - proof.bad)
    if not keys:
        raise UsageError("--recompute: no block of the run is intact")
    return random.Random(seed).sample(keys, math.ceil(share * len(keys)))


def recompute_units(
    run: RunFolder,
    proof: Proof,
    keys: Sequence[Key],
    progress: Callable[[int], None],
    *,
    devices: Sequence[str] | None = None,
    tolerance: float | None = None,
) -> Recomputed:
    """Compute some units anew, and compare them with what is stored.

    Args:
        run: The run.
        proof: The result of `verify_run`.
        keys: The units.
        progress: A function that is called with the number of units that are done.
        devices: The devices to compute on; by default those of the run.
        tolerance: The tolerance for units whose bits may differ: those of another maker, and those
            with patches in smaller batches. By default it follows from each output.

    Returns:
        How the units compare.

    Raises:
        UsageError: Input, model or weights are not there or are not those of the run.
        StageError: A stage failed.
    """
    job, statistics = _reopen(run, devices)
    kinds = [kind for _, kind, _ in run.fingerprint["heads"]]
    pairs = zip(run.outputs, kinds, strict=True)
    tolerances = [
        _tolerance(stored, kind) if tolerance is None else tolerance for stored, kind in pairs
    ]
    done = Recomputed(len(keys), len(run.notes.keys() - proof.bad), tolerances)
    comparison = _StoredComparison(run, job, keys, done)
    _compute(job, keys, statistics, progress, comparison)
    comparison.finish()
    return done


def _reopen(run: RunFolder, devices: Sequence[str] | None) -> tuple[Job, dict[str, Any]]:
    """The job of a run, opened again, and the percentiles that the run has saved."""
    if str(run.fingerprint.get("input")).startswith("memory"):
        raise UsageError("--recompute: the input of the run was an array in memory")
    names = InferConfig.model_fields.keys() - NOT_AGAIN
    settings = {name: value for name, value in run.settings.items() if name in names}
    try:
        check_model_name(settings.get("model_type"), "--model-type")
        ours: dict[str, Any] = {"out_spec": run.specs, "run_dir": run.folder.place, "resume": True}
        if devices is not None:
            ours["devices"] = devices
        job = Job(build(InferConfig, settings, ours))
        job.plan.refuse()
    except UsageError as error:
        raise UsageError(f"--recompute: {error}") from error
    now, before = Journal(None, job.fingerprint()).fingerprint, run.fingerprint
    for name, value in now.items():
        if name not in _OF_MACHINE and before.get(name, value) != value:
            raise UsageError(
                f"--recompute: the run had {name} {before[name]!r}, now it is {value!r}; so its "
                "blocks cannot be computed again"
            )
    return job, read_document(run.folder, "statistics.json") or {}


def _compute(
    job: Job,
    keys: Sequence[Key],
    statistics: Mapping[str, Any],
    progress: Callable[[int], None],
    comparison: _StoredComparison,
) -> None:
    """Run a job over some of its units only."""
    journal = Journal(None, {})
    journal.statistics = dict(statistics)
    units, wanted = job.geometry.units, set(keys)
    for block in blocks_for(job.geometry, keys):
        reached = block.support & job.geometry.regions[block.region]
        journal.done |= {(block.volume, *index) for index in indices(units.touching(reached))}
    journal.done -= wanted
    queues = Queues(job)
    watch = Watch(job, journal, queues, EndRequest())
    comparison.halved_now = watch.halvings.units

    def tell(now: Progress) -> None:
        progress(now.units_done)

    with cuda_flags_kept(), frozen_garbage():
        set_cuda_flags(job.config.tf32, job.config.cudnn_benchmark)
        scalings = find_scalings(job, journal, watch)
        reader = BlockReader(job, scalings, queues.equipment.read_pool, queues.flow, watch.retries)
        blocks = blocks_for(job.geometry, keys)
        Pipeline(job, journal, Claims(), queues, watch, reader, blocks).run(tell)


def blocks_for(geometry: Geometry, keys: Sequence[Key]) -> Iterator[Block]:
    """The blocks that contribute to some units, narrowed to the patches that these need. They come
    in visiting order and are numbered without gaps."""
    regions, number = geometry.regions, itertools.count()
    wanted: dict[tuple[int, int], dict[int, list[list[int]]]] = {}
    for volume, *index in keys:
        cell = geometry.units.cell(index)
        place = regions.touching(cell).start
        blocks = geometry.blocks_of(regions.cell(place))
        units = wanted.setdefault((volume, flatten(place, regions.cells)), {})
        for at in indices(blocks.touching(geometry.patches_for(cell))):
            units.setdefault(flatten(at, blocks.cells), []).append(index)
    for (volume, region), units in sorted(wanted.items()):
        blocks = geometry.blocks_of(regions[region])
        for flat in sorted(units):
            patches = blocks[flat]
            core, support = geometry.core_of(patches), geometry.support_of(patches)
            block = Block(
                next(number), volume, region, patches, core, support, geometry.read_of(patches)
            )
            yield narrowed(geometry, block, units[flat])


def _tolerance(stored: Stored, kind: str) -> float:
    dtype = stored.written.source.dtype
    if kind == "labels" or dtype.kind == "b":
        return 0
    return _TOLERANCE.get(dtype.name, 1)


class _StoredComparison:
    """Takes the place of a job's sinks, and compares what would be written with what is stored."""

    def __init__(self, run: RunFolder, job: Job, keys: Sequence[Key], done: Recomputed) -> None:
        self.run, self.done = run, done
        mine, now, before = job.maker(), job.fingerprint(), run.fingerprint
        alike = all(before.get(name) == now[name] for name in ("devices", "arithmetic"))
        self.same = [
            alike and all(maker.get(name) == mine[name] for name in mine) for maker in run.makers
        ]
        self.halved: Set[Key] = halved_in(run.folder)
        """Units with patches in smaller batches in the run, so that their bits may differ."""
        self.halved_now: Set[Key] = frozenset()
        """Units with patches in smaller batches when they are computed anew."""
        self.differences: dict[Key, list[float | None]] = {key: [] for key in keys}
        """The largest difference of each unit, for each output; None for equal bits."""
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
            maker = self.run.notes[key].maker
            same = maker < len(self.same) and self.same[maker] and not self._is_halved(key)
            if same or not difference <= self.done.tolerances[number]:
                limit = "" if same else f", more than {self.done.tolerances[number]:g},"
                what = f"differs by up to {difference:.3g}{limit} when computed anew"
                self.done.findings.append(Finding(key, "different", stored.written.name, what))

    def _is_halved(self, key: Key) -> bool:
        return key in self.halved or key in self.halved_now

    def _key(self, stored: Stored, box: Box) -> Key:
        volume = [tuple(place) for place in stored.places].index(box.start[:2])
        unit = box[2:].shift(tuple(-shift for shift in stored.offset))
        return (volume, *self.run.units.touching(unit).start)

    def finish(self) -> None:
        """Count the units once all are compared."""
        self.done.halved = sum(map(self._is_halved, self.differences))
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
