"""A machine as the instruments see it, in good order."""

from __future__ import annotations

from typing import Any

ENVIRONMENT: dict[str, Any] = {
    "machine": {
        "processor": "Some CPU", "cores": 8, "physical_cores": 4, "memory_bytes": 16 * 2**30,
        "architecture": "x86_64", "system": "Linux", "kernel": "6.1",
    },
    "machine_key": "0123456789abcdef",
    "limits": {"affinity": 8, "cgroup_cpus": None, "cgroup_memory_bytes": None},
    "gpus": [],
    "libraries": {"python": "3.11", "torch": "2.13.0+cpu", "triton": None},
    "variables": {},
}  # fmt: skip


def limits_of(**changes: Any) -> dict[str, Any]:
    return ENVIRONMENT | {"limits": ENVIRONMENT["limits"] | changes}
