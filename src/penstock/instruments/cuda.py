"""One GPU as its driver sees it, through NVML; a value that NVML lacks is None."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from .gpus import Nvml, Question, memory_used

_READINGS: Mapping[str, Question] = {
    "sm_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "milliwatts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu),
    "throttle_reasons": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
}


class Gpu(Nvml):
    """One GPU of torch's. Reading NVML creates no CUDA context, so it works before torch takes
    memory of the GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._handle: Any = None
        with contextlib.suppress(
            Exception
        ):  # no driver, or an error of NVML, whose classes are not imported
            self._handle = self._handle_of(device.index or 0)

    def used(self) -> int | None:
        """Bytes that the driver counts on the device, of all processes."""
        return self._of_card(memory_used)

    def clocks(self) -> dict[str, int | None]:
        """Clocks, temperature, power, and a bit for each reason why the clocks are held down."""
        return {name: self._of_card(reading) for name, reading in _READINGS.items()}

    def _handle_of(self, index: int) -> Any:
        """The handle of torch's device, by its UUID: torch counts the devices that
        CUDA_VISIBLE_DEVICES leaves, and NVML all of them. A slice of a card (MIG) has a UUID too.
        None where NVML does not know it, unless there is one card only and it is whole.
        """
        cards = [handle for _, _, handle in self._find()]
        uuid = torch.cuda.get_device_properties(index).uuid
        for kind in ("GPU", "MIG"):
            with contextlib.suppress(self._nvml.NVMLError):
                return self._nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
        whole = [card for card in cards if not self._ask(_is_cut, card)]
        return whole[0] if len(cards) == len(whole) == 1 else None

    def _of_card(self, question: Question) -> int | None:
        return None if self._handle is None else self._ask(question, self._handle)


def _is_cut(nvml: Any, card: Any) -> int:
    return int(nvml.nvmlDeviceGetMigMode(card)[0])
