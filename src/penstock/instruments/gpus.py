"""GPUs as NVML shows them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

TelemetryRow = dict[str, Any]


class Nvml:
    """Reads every GPU through NVML; none where the library or the driver is absent.

    It begins at the first call, which may take seconds on a server with idle GPUs. It is never
    shut down: NVML counts its users, and the process may have others.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: list[tuple[int, str, Any]] | None = None

    def __call__(self) -> list[TelemetryRow]:
        if self._gpus is None:
            self._gpus = self._find()
        return [
            {
                "index": index,
                "name": name,
                "util_percent": self._ask(self._utilisation, handle),
                "memory_bytes": self._ask(self._memory, handle),
            }
            for index, name, handle in self._gpus
        ]

    def _find(self) -> list[tuple[int, str, Any]]:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return []
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # no driver
            return []
        self._nvml = nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [(i, str(nvml.nvmlDeviceGetName(h)), h) for i, h in enumerate(handles)]

    def _utilisation(self, handle: Any) -> int:
        return int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)

    def _memory(self, handle: Any) -> int:
        # The first version of the call counts what the driver reserves as used; nvidia-smi and
        # the second do not.
        return int(
            self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2).used
        )

    def _ask(self, read: Callable[[Any], int], handle: Any) -> int | None:
        try:
            return read(handle)
        except self._nvml.NVMLError:  # not supported: utilisation on a MIG slice, for example
            return None
