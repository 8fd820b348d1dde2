"""The workers that tasks of a job run on: any, until one is left out; then the others by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from .workers import Workers


@dataclass(slots=True)
class Placement:
    """Which workers are there, and which of them take tasks of this job."""

    workers: Workers
    lanes: int = 0
    """Tasks that can run at a time now."""
    present: int = 0
    """Number of workers that are there, those that are left out among them."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Addresses of workers that get no more tasks, each with the reason."""
    fit: frozenset[str] | None = None
    """Addresses of the workers that take tasks; None if any worker does."""
    resources: dict[str, float] | None = None
    """The share of a worker's resources that a task takes."""

    def look(self) -> None:
        """Ask which workers are there. Those that are gone are replaced where that can be.

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
        """Whether no worker is left of those that a task may run on.

        Args:
            placed: Their addresses; None for any worker, of which one may come.
        """
        return placed is not None and placed.isdisjoint(self.fit or ())
