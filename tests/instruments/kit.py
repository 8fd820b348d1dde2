"""A machine as the instruments see it, and a driver of its GPUs."""

from types import SimpleNamespace
from typing import Any

GIB = 2**30

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


class Driver:
    """NVML of some cards, ``{UUID: whether it is cut}``, and of the slices of those that are.

    A handle is the UUID, and its clock the number in it.
    """

    NVMLError = type("NVMLError", (Exception,), {})
    nvmlMemory_v2 = 2
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = "sm", "memory", "celsius"

    def __init__(self, cards: dict[str, bool], slices: tuple[str, ...] = ()) -> None:
        self.cards, self.slices = cards, slices

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.cards)[index]

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA A100"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (*self.cards, *self.slices):
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[bool, bool]:
        if handle == "GPU-old":
            raise self.NVMLError("not supported")
        return self.cards[handle], False

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if self.cards[handle]:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> Any:
        return SimpleNamespace(used=(1 if handle in self.slices else 5) * GIB)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: str) -> int:
        if handle in self.slices:
            raise self.NVMLError("not supported")
        return 1980
