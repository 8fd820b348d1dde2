"""Use of a machine now: processor, memory, disks and network by its processes; its GPUs, as NVML
shows them, and the one that torch computes on. A value that NVML lacks is None."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psutil

if TYPE_CHECKING:
    import torch

ProcessKey = tuple[int, float]
"""The process id and the time when that process began, because ids are used again."""
Pair = tuple[int, int]
"""Bytes (read, written) or (sent, received), counted since a fixed moment."""
Answer = TypeVar("Answer")


class Usage(NamedTuple):
    """Memory and threads of one process now, and its use of processor and disk since it began."""

    cpu_seconds: float
    rss: int
    threads: int
    disk: Pair | None
    """Bytes (read, written); None where the system does not say."""


Processes = Mapping[ProcessKey, Usage]


class ThisMachine:
    """Readings of this machine, and of a process (this one by default) with all below it. A method
    may raise, or return None for a value that cannot be read.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(pid)

    def processes(self) -> Processes:
        """This process and all below it."""
        usages = {}
        for process in process_tree(self._root):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
                usages[process.pid, process.create_time()] = self._usage(process)
        return usages

    def pss(self) -> int | None:
        """Bytes of the same processes, with shared pages divided among them."""
        total = 0
        for process in process_tree(self._root):
            with contextlib.suppress(psutil.NoSuchProcess):
                pss: int | None = getattr(process.memory_full_info(), "pss", None)
                if pss is None:
                    return None
                total += pss
        return total

    def disk(self) -> Pair | None:
        """Bytes that every process has read and written."""
        counters = psutil.disk_io_counters(nowrap=False)
        return counters and (counters.read_bytes, counters.write_bytes)

    def network(self) -> Pair | None:
        """Bytes that every process has sent and received."""
        counters = psutil.net_io_counters(nowrap=False)
        return counters and (counters.bytes_sent, counters.bytes_recv)

    @staticmethod
    def _usage(process: psutil.Process) -> Usage:
        with process.oneshot():
            cpu = process.cpu_times()
            disk = None
            if hasattr(process, "io_counters"):  # macOS has none
                with contextlib.suppress(psutil.AccessDenied):
                    io = process.io_counters()
                    disk = io.read_bytes, io.write_bytes
            return Usage(
                cpu.user + cpu.system, process.memory_info().rss, process.num_threads(), disk
            )


def process_tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and all below it, itself first."""
    try:
        below = _below(root.pid)
    except OSError:  # no such lists, or no such process any more
        return [root, *root.children(recursive=True)]
    tree = [root]
    for pid in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree.append(psutil.Process(pid))
    return tree


def _below(root: int) -> list[int]:
    """Ids of the processes below one, by the lists that Linux keeps of children. psutil asks each
    process of the machine for its parent.

    Raises `OSError` where there are none.
    """
    Path(f"/proc/{root}/task/{root}/children").read_bytes()
    tree = [root]
    for pid in tree:  # it grows meanwhile
        with contextlib.suppress(OSError):  # the process has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    tree += map(int, (thread / "children").read_text().split())
    return tree[1:]


def peak_rss() -> int:
    """The most bytes that this process has held.

    Linux counts it for the program that runs (VmHWM). `getrusage` also counts what the parent held
    when it started this process, which may be much more.
    """
    with contextlib.suppress(OSError, KeyError):
        return kernel_memory()["VmHWM"]
    try:
        import resource
    except ImportError:  # Windows
        held = psutil.Process().memory_info()
        return int(getattr(held, "peak_wset", held.rss))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def kernel_memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Linux's counts of a process's memory, in bytes by their names: VmHWM is the peak.

    Raises:
        OSError: there is no such file.
    """
    fields = re.findall(r"(\w+):\s+(\d+) kB", status.read_text())
    return {name: int(kib) * 1024 for name, kib in fields}


_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


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
        import torch

        cards = [handle for _, _, handle in self._find()]
        uuid = torch.cuda.get_device_properties(index).uuid
        for kind in ("GPU", "MIG"):
            with contextlib.suppress(self._nvml.NVMLError):
                return self._nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
        modes = [self._ask(lambda nvml, c: int(nvml.nvmlDeviceGetMigMode(c)[0]), c) for c in cards]
        whole = [card for card, is_cut in zip(cards, modes, strict=True) if not is_cut]
        return whole[0] if len(cards) == len(whole) == 1 else None

    def _of_card(self, question: Question) -> int | None:
        return None if self._handle is None else self._ask(question, self._handle)
