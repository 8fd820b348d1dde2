"""The queues between the stages of a job, and the equipment that the stages share."""

from __future__ import annotations

from ...base import Budget, Channel, Flow
from ..lanes.bricks import Computed, Loaded
from ..lanes.equipment import Equipment
from ..opening.job import Job
from ..tiling.stitch import Block


class Queues:
    """The channels of a job, each bounded by a budget of bytes, and the equipment of its stages."""

    def __init__(self, job: Job, equipment: Equipment | None = None) -> None:
        """``equipment`` is what an earlier part of the job left."""
        plan, lanes = job.plan, len(job.devices)
        self.flow = Flow()
        self.equipment = equipment or Equipment(job)
        self.readers = max(1, job.config.prep_workers // lanes)
        """Number of threads that read for each lane."""
        self.room = [Budget(self.flow, plan.brick_budget) for _ in job.devices]
        """Budgets of bytes, one for each lane, for bricks from the start of reading to the end of
        stitching."""
        self.loaded: list[Channel[Loaded]] = [Channel(self.flow, self.readers) for _ in job.devices]
        self.computed: Channel[tuple[int, Computed]] = Channel(self.flow, lanes)
        """Computed bricks, each with the index of its lane."""
        self.write_room = Budget(self.flow, plan.write_budget)
        self.whole: Channel[Block] = Channel(self.flow)
        bricks = lanes * plan.brick_budget // plan.largest_brick_bytes
        self.limits = {
            "prep": bricks,
            "stitch": bricks,
            "write-0": job.config.writer_workers + 1,
        }
        """How many items fit into each queue, by its name in the metrics."""

    def lengths(self) -> dict[str, float]:
        """How many items wait in each queue now."""
        return {
            "prep": sum(map(len, self.loaded)),
            "stitch": len(self.computed),
            "write-0": len(self.whole),
        }
