"""The request to a worker, in its own module, so that a worker imports nothing else and starts
fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The scenario and case that a worker measures or checks, and the rules and limits for that."""

    scenario: str
    case: Mapping[str, Any]
    task: Literal["measure", "check"] = "measure"
    """``check`` resolves and validates the case and measures nothing; see `ask_worker`."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `measure.Rules`: when to stop."""
    memory_limit: int | None = None
    """The limit in bytes of the worker's private memory, enforced by the kernel; Linux only."""
