"""The workers that run the tasks of a job: any worker, until one is left out; then a list."""

from __future__ import annotations

from dataclasses import dataclass, field

from .workers import Workers


@dataclass(slots=True)
class Placement:
    """The workers that are present, and those of them that take tasks of this job."""

    workers: Workers
    lanes: int = 0
    """Number of tasks that can run at the same time now."""
    present: int = 0
    """Number of workers that are present, including those that are left out."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Addresses of workers that get no more tasks, each with the reason."""
    fit: frozenset[str] | None = None
    """Addresses of the workers that take tasks; None if any worker does."""
    resources: dict[str, float] | None = None
    """The share of a worker's resources that a task takes."""

    def look(self) -> None:
        """Look which workers are present, and replace those that are gone if possible.

        Raises:
            PenstockError: SLURM refused a job.
            UsageError: No worker that was there so far may take part.
            Incomplete: No worker that fits is there, and the time to wait for one is over.
        """
        self.lanes = self.workers.attend(self.unfit.keys())
        self.resources = self.workers.resources or None
        self.unfit |= self.workers.strangers()
        present = self.workers.hosts().keys()
        self.present = len(present)
        self.fit = frozenset(present - self.unfit.keys()) if self.unfit else None

    def strands(self, placed: frozenset[str] | None) -> bool:
        """Whether none of the workers that a task may run on is left.

        Args:
            placed: Addresses of these workers; None for any worker, because a new one may come.
        """
        return placed is not None and placed.isdisjoint(self.fit or ())
