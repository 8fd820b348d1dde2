"""A job on many workers, on paper: when it would end, what is computed twice, who waits for whom.

    T = statistics + work * (1 + redone) / (workers up * speed) + tail

``work`` counts the patches of all parts, those on borders for each side. A failed worker loses what
it did in open units, `Redo.mean_lost` of a part in the mean; where failures are frequent, what is
redone fails again, so a stretch of t seconds without a note takes ``(exp(t / mtbf) - 1) * mtbf``.
Store and scheduler each hold so many patches per second, which all workers share. The tail is the
time in which workers find no more parts: half of one in the mean, or more if a slow worker has it.

`simulation` plays the same job; `scale_report` puts both into words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...base import InferConfig, ScaleConfig
from ..tiling.part_work import PartWork, part_work
from .borders import spill_rate
from .plan import Plan

HOPELESS = 10
"""A job is given up after so many times the time of workers that never fail."""
_FREQUENT = 50.0
"""Failures within one part at which no part is ever done."""
_ROUNDS = 1000

BoundBy = Literal["the workers", "the store", "the scheduler"]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a job, and what they share."""

    workers: int
    rate: float
    """Voxels per second of a worker that computes no borders of parts."""
    mtbf: float | None = None
    """Mean seconds between two failures of a worker. None: they do not fail."""
    restart: float | None = None
    """Seconds until a failed worker is back. None: never."""
    slow_share: float = 0.0
    """Share of the workers that are slow."""
    slowness: float = 1.0
    """The time of a slow worker over that of another one."""
    bandwidth: float | None = None
    """Bytes per second of the store. None: more than the workers need."""
    tasks_per_second: float = math.inf
    """Parts per second that the scheduler holds."""

    @classmethod
    def of(cls, config: ScaleConfig, workers: int, rate: float) -> Fleet:
        """The fleet of some settings."""
        return cls(
            workers, rate, config.mtbf, config.restart, config.slow_share, config.slowness,
            config.bandwidth, config.tasks_per_second,
        )  # fmt: skip

    @property
    def slow(self) -> int:
        """Number of slow workers."""
        return round(self.slow_share * self.workers)

    @property
    def fast(self) -> int:
        """Number of other workers."""
        return self.workers - self.slow

    def share_up(self, seconds: float) -> float:
        """The mean share of the workers that is up, from the start until then."""
        if self.mtbf is None or not seconds:
            return 1.0
        if self.restart is None:
            return -math.expm1(-seconds / self.mtbf) * self.mtbf / seconds
        up = self.mtbf / (self.mtbf + self.restart)
        if not self.restart:
            return 1.0
        turns = seconds * (1 / self.mtbf + 1 / self.restart)
        return up + (1 - up) * -math.expm1(-turns) / turns


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a job that is cut into parts, and the rates at which it can be done."""

    work: PartWork
    speed: float
    """Patches per second of a worker."""
    store: float = math.inf
    """Patches per second that the store holds."""
    scheduler: float = math.inf
    """Patches per second that the scheduler holds, by the mean part."""
    before: float = 0.0
    """Seconds before the first part, in which values are counted."""

    @property
    def most(self) -> float:
        """Patches per second that all workers together cannot exceed."""
        return min(self.store, self.scheduler)


def load_of(config: InferConfig, plan: Plan, fleet: Fleet) -> Load:
    """The work of a plan.

    Args:
        config: The settings of the job.
        plan: A plan that is cut into parts.
        fleet: The workers.

    Returns:
        Its patches, and how many of them a worker and the store hold per second.
    """
    assert plan.parts is not None
    work, bandwidth = part_work(plan.parts), fleet.bandwidth
    bytes_each = (plan.read_bytes + plan.output_bytes) / plan.num_patches
    seconds = plan.voxels / fleet.rate / patches_of_one(config, plan)
    if plan.spill is not None:  # which is written and read
        seconds += 2 * plan.spill.bytes / spill_rate(plan.facts) / plan.num_patches
    return Load(
        work,
        speed=1 / seconds,
        store=math.inf if bandwidth is None else bandwidth / bytes_each,
        scheduler=fleet.tasks_per_second * work.mean,
        before=0.0 if bandwidth is None else plan.statistics_bytes / bandwidth,
    )


def patches_of_one(config: InferConfig, plan: Plan) -> int:
    """The patches that a single process would compute."""
    if config.normalize == "percentile":  # of each unit, whoever computes it
        return plan.num_patches
    geometry = plan.geometry
    return geometry.patches_for(geometry.domain).size * plan.facts.num_volumes


def shared_speeds(load: Load, fleet: Fleet, fast: float, slow: float) -> tuple[float, float, float]:
    """The speed of workers that share a store and a scheduler.

    Args:
        load: The work of the job.
        fleet: The workers.
        fast: Number of fast workers at work.
        slow: Number of slow ones.

    Returns:
        Patches per second of a fast worker, of a slow one, and of all.
    """
    full, lame = load.speed, load.speed / fleet.slowness
    if fast * full + slow * lame <= load.most:
        return full, lame, fast * full + slow * lame
    even = load.most / (fast + slow)
    if even <= lame:
        return even, even, load.most
    return (load.most - slow * lame) / fast, lame, load.most


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of a job, by formula."""

    seconds: float
    """Seconds until the last unit is written; infinite if too few workers live that long."""
    before: float
    """Seconds of them before the first part."""
    tail: float
    """Seconds of them in which workers find no more parts."""
    failures: float
    redone: float
    """Patches computed again, as a share of those of all parts."""
    tasks: float
    """Parts given out, those of dead workers each time."""
    bound_by: BoundBy

    @property
    def tasks_per_second(self) -> float:
        """Parts given out per second, once counting is over."""
        return self.tasks / (self.seconds - self.before)


def expect(load: Load, fleet: Fleet) -> Expected:
    """When a job would end.

    Args:
        load: Its work.
        fleet: The workers.

    Returns:
        Expected values.
    """
    seconds = _seconds(load, fleet)
    if math.isinf(seconds):
        return Expected(seconds, load.before, 0.0, math.inf, math.inf, math.inf, "the workers")
    up = fleet.share_up(seconds)
    failures = 0.0 if fleet.mtbf is None else fleet.workers * up * seconds / fleet.mtbf
    speed, _, together = shared_speeds(load, fleet, fleet.fast * up, fleet.slow * up)
    redone = _slowdown(load, fleet, speed) - 1
    busy = load.work.total * (1 + redone) / together
    bound: BoundBy = "the workers"
    if together >= load.most:
        bound = "the store" if load.store <= load.scheduler else "the scheduler"
    return Expected(
        load.before + seconds, load.before, seconds - busy, failures, redone,
        len(load.work) + failures, bound,
    )  # fmt: skip


def without_failures(load: Load, fleet: Fleet) -> float:
    """The least seconds of workers that never fail, with a slow one in the largest part.

    Args:
        load: The work of the job.
        fleet: The workers.

    Returns:
        Seconds.
    """
    together = shared_speeds(load, fleet, fleet.fast, fleet.slow)[2]
    return max(load.work.total / together, load.work.largest * fleet.slowness / load.speed)


def _seconds(load: Load, fleet: Fleet) -> float:
    """Seconds of a job once values are counted; infinite if too few workers live that long."""
    seconds = without_failures(load, fleet)
    limit = HOPELESS * seconds
    for _ in range(_ROUNDS):
        before, seconds = seconds, _seconds_if_up(load, fleet, fleet.share_up(seconds))
        if seconds > limit:
            break
        if abs(seconds - before) < 1e-6 * seconds:
            return seconds
    return math.inf


def _seconds_if_up(load: Load, fleet: Fleet, up: float) -> float:
    """The seconds of a job while a mean share of the workers is up."""
    work, workers = load.work, fleet.workers * up
    speed, _, together = shared_speeds(load, fleet, fleet.fast * up, fleet.slow * up)
    if fleet.mtbf is None and not fleet.slow and work.largest == work.mean:
        return _in_turns(load, fleet.workers)
    last = work.of_last(math.ceil(workers))
    under_way = min(workers, len(work)) * last / 2
    ends = [_drained(load, workers, together, load.speed, workers - fleet.slow * up)]
    if fleet.slow:
        lame = load.speed / fleet.slowness
        ends.append(_drained(load, workers, together, lame, fleet.slow * up))
    seconds = (work.total * _slowdown(load, fleet, speed) - under_way) / together + max(ends)
    if fleet.mtbf is not None:
        deaths = workers * last / speed / fleet.mtbf / 2
        seconds += 2 * work.redo.mean_lost * last / speed * deaths / (1 + deaths)
    return seconds


def _in_turns(load: Load, workers: int) -> float:
    """The seconds of equal workers that never fail and do equal parts."""
    turns, rest = divmod(len(load.work), workers)
    patches = load.work.mean
    seconds = turns * patches / min(load.speed, load.most / workers)
    return seconds + (patches / min(load.speed, load.most / rest) if rest else 0.0)


def _drained(load: Load, workers: float, together: float, speed: float, kind: float) -> float:
    """The seconds from the last part that is given out until workers of a kind are done.

    A worker gets its own ``speed``, or an even share of what store and scheduler hold if that is
    less. Each worker of the ``kind`` is somewhere in its last part. Where the last parts are small,
    a part that was begun before them may end last.
    """
    alone = min(1.0, load.most / speed / workers)
    """The share of workers that get their own speed together."""
    each = alone / speed + workers / load.most * (1 - alone**2) / 2
    along_z, along_y, along_x = load.work.axes
    column, plane = max(along_y) * max(along_x), sum(along_y) * sum(along_x)
    after, ends = 0, []
    for patches in reversed(along_z):
        ends.append(kind / (kind + 1) * patches * column * each - after * plane / together)
        after += patches
    return max(ends)


def _slowdown(load: Load, fleet: Fleet, speed: float) -> float:
    """Patches computed for each patch of the parts, where workers fail."""
    if fleet.mtbf is None:
        return 1.0
    stretch = 2 * load.work.redo.mean_lost * load.work.mean / speed / fleet.mtbf
    if stretch > _FREQUENT:
        return math.inf
    return math.expm1(stretch) / stretch if stretch else 1.0
