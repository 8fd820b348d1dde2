"""A job on many workers, by formula: when it ends, what is computed again, and what bounds it.

    T = statistics + work * (1 + redone) / (workers up * speed) + tail

``work`` counts the patches of all parts, and those on borders once for each side. A failed worker
loses what it did in open units, on average the share `Redo.mean_lost` of a part. If failures are
frequent, redone work fails again, so t seconds of work without a note take
``(exp(t / mtbf) - 1) * mtbf`` seconds. Store and scheduler each serve a limited number of patches
per second, which all workers share. The tail is the time in which workers find no more parts: the
time of half a part on average, or more if a slow worker has the last one.

`simulation` simulates the same job; `scale_report` puts both into words.
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
"""A job is given up once it takes this many times as long as with workers that never fail."""
_FREQUENT = 50.0
"""Expected failures within one part above which no part is ever done."""
_ROUNDS = 1000

BoundBy = Literal["the workers", "the store", "the scheduler"]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a job, and what they share."""

    workers: int
    rate: float
    """Voxels per second of a worker, without the borders of parts."""
    mtbf: float | None = None
    """Mean seconds between two failures of a worker. None: they do not fail."""
    restart: float | None = None
    """Seconds until a failed worker is back. None: never."""
    slow_share: float = 0.0
    """Share of the workers that are slow."""
    slowness: float = 1.0
    """The time that a slow worker takes over that of another one."""
    bandwidth: float | None = None
    """Bytes per second of the store. None: more than the workers need."""
    tasks_per_second: float = math.inf
    """Tasks per second that the scheduler can give out."""

    @classmethod
    def of(cls, config: ScaleConfig, workers: int, rate: float) -> Fleet:
        """The fleet that the settings describe."""
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
        """The mean share of the workers that is up during the first ``seconds``."""
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
    """Patches per second that the store can serve."""
    scheduler: float = math.inf
    """Patches per second that the scheduler can give out, in parts of mean size and their joins."""
    before: float = 0.0
    """Seconds before the first part, in which values are counted."""
    joins: int = 0
    """Number of tasks that join what parts have spilled: one for each part, or none."""

    @property
    def most(self) -> float:
        """Most patches per second of all workers together."""
        return min(self.store, self.scheduler)


def load_of(config: InferConfig, plan: Plan, fleet: Fleet) -> Load:
    """The work of a plan.

    Args:
        config: The settings of the job.
        plan: A plan that is cut into parts.
        fleet: The workers.

    Returns:
        Its patches, and how many per second a worker, the store and the scheduler can do.
    """
    assert plan.parts is not None
    work, bandwidth = part_work(plan.parts), fleet.bandwidth
    seconds = plan.voxels / fleet.rate / patches_of_one(config, plan)
    scratch, joins = 0, 0
    if plan.spill is not None:
        scratch, joins = plan.spill.moved, len(work)
        seconds += scratch / spill_rate(plan.facts) / plan.num_patches
    # The scratch lies beside the output, so the same store serves it.
    bytes_each = (plan.read_bytes + plan.output_bytes + scratch) / plan.num_patches
    return Load(
        work,
        speed=1 / seconds,
        store=math.inf if bandwidth is None else bandwidth / bytes_each,
        scheduler=fleet.tasks_per_second * work.total / (len(work) + joins),
        before=0.0 if bandwidth is None else plan.statistics_bytes / bandwidth,
        joins=joins,
    )


def patches_of_one(config: InferConfig, plan: Plan) -> int:
    """The patches that a single process would compute."""
    if config.normalize == "percentile":  # each unit has its own patches in any case
        return plan.num_patches
    geometry = plan.geometry
    return geometry.patches_for(geometry.domain).size * plan.facts.num_volumes


def shared_speeds(load: Load, fleet: Fleet, fast: float, slow: float) -> tuple[float, float, float]:
    """The speed of workers that share a store and a scheduler.

    Args:
        load: The work of the job.
        fleet: The workers.
        fast: Number of busy fast workers.
        slow: Number of busy slow workers.

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
    """Seconds of these before the first part."""
    tail: float
    """Seconds of these in which workers find no more parts."""
    failures: float
    redone: float
    """Patches computed again, as a share of the patches of all parts."""
    tasks: float
    """Parts and joins given out. Parts of dead workers count each time."""
    bound_by: BoundBy

    @property
    def tasks_per_second(self) -> float:
        """Tasks given out per second, once counting is over."""
        return self.tasks / (self.seconds - self.before)


def expect(load: Load, fleet: Fleet) -> Expected:
    """Compute when a job is expected to end.

    Args:
        load: The work of the job.
        fleet: The workers.

    Returns:
        The expected values.
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
        len(load.work) + load.joins + failures, bound,
    )  # fmt: skip


def without_failures(load: Load, fleet: Fleet) -> float:
    """Least seconds of a job if workers never fail and a slow one has the largest part.

    Args:
        load: The work of the job.
        fleet: The workers.

    Returns:
        Seconds.
    """
    together = shared_speeds(load, fleet, fleet.fast, fleet.slow)[2]
    return max(load.work.total / together, load.work.largest * fleet.slowness / load.speed)


def _seconds(load: Load, fleet: Fleet) -> float:
    """Seconds of a job after its values are counted; infinite if too few workers live that long."""
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
    """The seconds of a job if, on average, the share ``up`` of the workers is up."""
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
    """The seconds of a job of equal parts on equal workers that never fail."""
    turns, rest = divmod(len(load.work), workers)
    patches = load.work.mean
    seconds = turns * patches / min(load.speed, load.most / workers)
    return seconds + (patches / min(load.speed, load.most / rest) if rest else 0.0)


def _drained(load: Load, workers: float, together: float, speed: float, kind: float) -> float:
    """The seconds from when the last part is given out until workers of a kind are done.

    A worker computes at its own ``speed``, or at an even share of what store and scheduler serve if
    that is less. ``kind`` is the number of workers of the kind; each is at a random point of its
    last part. If the last parts are small, a part that was begun before them may end last.
    """
    alone = min(1.0, load.most / speed / workers)
    """Share of workers that can compute at their own speed at once."""
    each = alone / speed + workers / load.most * (1 - alone**2) / 2
    along_z, along_y, along_x = load.work.axes
    column, plane = max(along_y) * max(along_x), sum(along_y) * sum(along_x)
    after, ends = 0, []
    for patches in reversed(along_z):
        ends.append(kind / (kind + 1) * patches * column * each - after * plane / together)
        after += patches
    return max(ends)


def _slowdown(load: Load, fleet: Fleet, speed: float) -> float:
    """Patches computed per patch of the parts, if workers fail."""
    if fleet.mtbf is None:
        return 1.0
    stretch = 2 * load.work.redo.mean_lost * load.work.mean / speed / fleet.mtbf
    if stretch > _FREQUENT:
        return math.inf
    return math.expm1(stretch) / stretch if stretch else 1.0
