"""One GPU as its driver sees it, through NVML; what NVML does not say is None."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

_READINGS = {
    # name: (function of NVML, its arguments after the handle by the names of its constants)
    "sm_mhz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",)),
    "memory_mhz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_MEM",)),
    "celsius": ("nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",)),
    "milliwatts": ("nvmlDeviceGetPowerUsage", ()),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
}


class Gpu:
    """It makes no CUDA context, so it may be asked before torch holds any of the device."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        try:
            nvml = import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # no package, or no driver
            return
        index = device.index or 0
        try:
            # torch counts the devices that CUDA_VISIBLE_DEVICES leaves, NVML all of them.
            uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:
            try:
                self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError:
                return
        self._nvml = nvml

    def used(self) -> int | None:
        """Bytes that the driver counts on the device, of all processes."""
        if self._nvml is None:
            return None
        try:
            version = self._nvml.nvmlMemory_v2  # the first counts what the driver reserves as used
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=version).used)
        except self._nvml.NVMLError:
            return None

    def clocks(self) -> dict[str, int | None]:
        """Clocks, temperature, power, and a bit for each reason why the clocks are held down."""
        return {name: self._ask(*reading) for name, reading in _READINGS.items()}

    def _ask(self, function: str, arguments: tuple[str, ...]) -> int | None:
        if self._nvml is None:
            return None
        try:
            constants = (getattr(self._nvml, name) for name in arguments)
            return int(getattr(self._nvml, function)(self._handle, *constants))
        except (self._nvml.NVMLError, AttributeError):
            return None
