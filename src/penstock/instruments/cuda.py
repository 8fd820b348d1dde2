"""One GPU as its driver sees it, through NVML; what NVML does not say is None."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .gpus import Nvml, memory_used

_READINGS = {
    # name: (function of NVML, its arguments after the handle by the names of its constants)
    "sm_mhz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",)),
    "memory_mhz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_MEM",)),
    "celsius": ("nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",)),
    "milliwatts": ("nvmlDeviceGetPowerUsage", ()),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
}


class Gpu(Nvml):
    """It makes no CUDA context, so it may be asked before torch holds any of the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._handle: Any = None
        with contextlib.suppress(Exception):  # no driver; NVML's own have no type known here
            self._handle = self._handle_of(device.index or 0)

    def used(self) -> int | None:
        """Bytes that the driver counts on the device, of all processes."""
        return None if self._handle is None else self._ask(memory_used, self._handle)

    def clocks(self) -> dict[str, int | None]:
        """Clocks, temperature, power, and a bit for each reason why the clocks are held down."""
        return {name: self._reading(*reading) for name, reading in _READINGS.items()}

    def _handle_of(self, index: int) -> Any:
        """By its UUID, for torch counts the devices that CUDA_VISIBLE_DEVICES leaves and NVML all
        of them; a slice of a card (MIG) has one too. None where NVML does not know it: only a card
        that is alone and whole could be no other.
        """
        cards = [handle for _, _, handle in self._find()]
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # torch 2.5
        for kind in ("GPU", "MIG"):
            with contextlib.suppress(self._nvml.NVMLError):
                return self._nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
        whole = [card for card in cards if not self._ask(_is_cut, card)]
        return whole[0] if len(cards) == len(whole) == 1 else None

    def _reading(self, function: str, arguments: tuple[str, ...]) -> int | None:
        if self._handle is None:
            return None
        try:
            constants = (getattr(self._nvml, name) for name in arguments)
            return int(getattr(self._nvml, function)(self._handle, *constants))
        except (self._nvml.NVMLError, AttributeError):
            return None


def _is_cut(nvml: Any, card: Any) -> int:
    return int(nvml.nvmlDeviceGetMigMode(card)[0])
