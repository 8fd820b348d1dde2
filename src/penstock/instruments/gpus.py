"""GPUs as NVML shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

TelemetryRow = dict[str, Any]
Question = Callable[[Any, Any], Any]
"""A function of NVML's module and the handle of a GPU, such as one that reads its memory."""


def memory_used(nvml: Any, handle: Any) -> int:
    """Bytes in use on a GPU, by all processes, as nvidia-smi counts them."""
    # The first version of the call counts what the driver reserves as used; nvidia-smi and the
    # second do not.
    return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)


USE: Mapping[str, Question] = {
    "util_percent": lambda nvml, gpu: int(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    "memory_bytes": memory_used,
}


class Nvml:
    """Reads every GPU through NVML; none where the library or the driver is absent.

    A call returns a row for each GPU: its index, its name and the answer to each question, None
    where a GPU has none. NVML begins at the first call, which may take seconds on a server with
    idle GPUs. It is never shut down, since other code of the process may use it.

    Args:
        questions: the questions by the key of their answer; use and memory by default.
    """

    def __init__(self, questions: Mapping[str, Question] = USE) -> None:
        self._questions = questions
        self._nvml: Any = None
        self._gpus: list[tuple[int, str, Any]] | None = None

    def __call__(self) -> list[TelemetryRow]:
        if self._gpus is None:
            self._gpus = self._find()
        return [
            {"index": index, "name": name}
            | {key: self._ask(question, handle) for key, question in self._questions.items()}
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

    def _ask(self, question: Question, handle: Any) -> Any:
        try:
            return question(self._nvml, handle)
        # Not supported, as utilisation is not on a MIG slice, or not in this version of NVML.
        except (self._nvml.NVMLError, AttributeError):
            return None


def gpus_or_none(questions: Mapping[str, Question]) -> list[TelemetryRow] | None:
    """The rows of `Nvml`; None where there is a driver that does not answer."""
    try:
        return Nvml(questions)()
    except Exception:  # NVML's errors have no type that is known before NVML is imported
        return None
