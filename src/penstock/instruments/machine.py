"""Use of a machine by its processes, now: processor, memory, disks, network."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

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
