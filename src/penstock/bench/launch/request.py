"""A launch as it is asked for, in its own module, so that a worker imports nothing else and starts
fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a case: what a worker measures or checks, and by which rules."""

    scenario: str
    case: Mapping[str, Any]
    timeout_s: float
    """The seconds after which it is killed."""
    number: int = 0
    """Its number among the launches of the case, from 0."""
    order: int | None = None
    """Its index in the sweep's order; None outside a sweep."""
    task: Literal["measure", "check"] = "measure"
    """``check`` resolves and validates the case and measures nothing; see `ask_worker`."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `measure.Rules`: when to stop."""
    memory_limit: int | None = None
    """The limit in bytes of the worker's private memory, enforced by the kernel; Linux only."""


def series_rules(samples: int, warmup: int = 0) -> dict[str, Any]:
    """Rules of a launch in which every step is a sample, and all launches have the same number.

    Args:
        samples: The samples of a launch.
        warmup: The steps before the first sample.

    Returns:
        The fields of `measure.Rules`.
    """
    return {"seconds": 0.0, "precision": 0.0, "warmup_samples": warmup, "series": samples}
