"""The queues between the stages of a job, and the memory that waiting items may take."""

from __future__ import annotations

from ...base import Budget, Channel, Flow
from ..lanes.blocks import Computed, Loaded
from ..lanes.equipment import Equipment
from ..opening.job import Job
from ..tiling.stitch import Unit
from .spill import Piece


class Queues:
    """The channels of a job, each bounded by a budget of bytes, and the equipment of its stages."""

    def __init__(self, job: Job, equipment: Equipment | None = None) -> None:
        """``equipment`` is what an earlier part of the job left."""
        self.job, plan, lanes = job, job.plan, len(job.devices)
        self.flow = Flow()
        self.equipment = equipment or Equipment(job)
        self.readers = max(1, job.config.prep_workers // lanes)
        """Number of threads that read for each lane."""
        self.room = [Budget(self.flow, plan.block_budget) for _ in job.devices]
        """Budgets of bytes, one for each lane, for blocks from the start of reading to the end of
        stitching."""
        self.loaded: list[Channel[Loaded]] = [Channel(self.flow, self.readers) for _ in job.devices]
        self.computed: Channel[tuple[int, Computed]] = Channel(self.flow, lanes)
        """Computed blocks, each with the index of its lane."""
        self.write_room = Budget(self.flow, plan.write_budget)
        self.whole: Channel[Unit | Piece] = Channel(self.flow)

    def limits(self) -> dict[str, int]:
        """How many items fit into each queue, by its name in the metrics."""
        plan = self.job.plan
        blocks = len(self.room) * plan.block_budget // plan.largest_block_bytes
        return {"prep": blocks, "stitch": blocks, "write-0": self.job.config.writer_workers + 1}

    def lengths(self) -> dict[str, float]:
        """How many items wait in each queue now."""
        return {
            "prep": sum(map(len, self.loaded)),
            "stitch": len(self.computed),
            "write-0": len(self.whole),
        }
