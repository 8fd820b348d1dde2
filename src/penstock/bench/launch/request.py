"""The request to a worker. It has a file of its own, so that a worker imports nothing else and
starts fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What a worker is asked to do."""

    scenario: str
    case: Mapping[str, Any]
    task: Literal["measure", "check"] = "measure"
    """``ask_worker`` resolves and validates the case and measures nothing."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `measure.Rules`: when to stop."""
    memory_limit: int | None = None
    """Bytes of private memory that the kernel lets the worker map; Linux only."""
