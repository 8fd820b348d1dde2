"""The conditions of a machine, which change from hour to hour: clocks, heat, swap, other tenants.

A value that cannot be read is None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from ..base import format_bytes, significant
from .environment import BUSY
from .gpus import Question, gpus_or_none
from .machine import process_tree

Block = Mapping[str, Any]
SYS = Path("/sys")
CONDITIONS_WATCH_S = 1.0
THROTTLE_COUNTS = "cpu*/thermal_throttle/package_throttle_count"
"""Files with the count of each core's package since the machine was started."""
THROTTLES = {
    # bits of NVML's clock event reasons
    0x04: "its power cap",
    0x08: "a hardware slowdown",
    0x20: "its software's limit of temperature",
    0x40: "its hardware's limit of temperature",
    0x80: "a power brake",
}


def read_conditions() -> dict[str, Any]:
    """Read all conditions. It takes a second, in which it watches the other processes."""
    stolen = getattr(psutil.cpu_times(), "steal", None)
    busy = _busy()
    steal = None if stolen is None else psutil.cpu_times().steal - stolen
    gpus = gpus_or_none(_OF_GPUS)
    for gpu in gpus or ():
        del gpu["name"]  # it does not change
    return {
        "governor": " and ".join(sorted(set(_read("cpu*/cpufreq/scaling_governor")))) or None,
        "throttled": max(map(int, _read(THROTTLE_COUNTS)), default=None),
        "steal_percent": None
        if steal is None
        else 100 * steal / CONDITIONS_WATCH_S / (psutil.cpu_count() or 1),
        "swapped": psutil.swap_memory().used,
        "busy": busy,
        "gpus": gpus,
    }


def _read(pattern: str) -> list[str]:
    texts = []
    for path in sorted((SYS / "devices/system/cpu").glob(pattern)):
        with contextlib.suppress(OSError):
            texts.append(path.read_text().strip())
    return texts


def _busy() -> list[dict[str, Any]]:
    """Other processes that use the processor, the busiest first."""
    ours = {process.pid for process in process_tree(psutil.Process())}
    others = [p for p in psutil.process_iter(["name"]) if p.pid not in ours]
    for process in others:
        with contextlib.suppress(psutil.Error):
            process.cpu_percent()  # the next reading counts from here
    psutil.cpu_percent(CONDITIONS_WATCH_S)  # waits
    busy = []
    for process in others:
        with contextlib.suppress(psutil.Error):
            cores = process.cpu_percent() / 100
            if cores > BUSY:
                busy.append({"pid": process.pid, "name": process.info["name"], "cores": cores})
    return sorted(busy, key=lambda tenant: -tenant["cores"])


_OF_GPUS: Mapping[str, Question] = {
    "processes": lambda nvml, gpu: [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)],
    "throttle_reasons": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
}
"""Questions on the processes that use a GPU and on what holds its clocks down."""


def condition_warnings(environment: Block, now: Block) -> list[str]:
    """Reasons why measurements on this machine may be worse than they could be.

    Args:
        environment: the machine, from `collect_environment`.
        now: its conditions, from `read_conditions`.

    Returns:
        A sentence for each.
    """
    cores = environment["machine"]["cores"]
    return [
        *_of_limits(environment["limits"], cores),
        *_of_processor(now),
        *_of_others(now, cores),
        *(sentence for gpu in now["gpus"] or () for sentence in _of_gpu(gpu)),
    ]


def _of_limits(limits: Block, cores: int) -> Iterator[str]:
    if limits["affinity"] and limits["affinity"] < cores:
        yield f"This process may use {limits['affinity']} of the {cores} cores."
    quota = limits["cgroup_cpus"]
    if quota and quota < (limits["affinity"] or cores):
        yield (
            f"A control group grants {significant(quota)} cores; threads beyond that are stopped "
            "for parts of every tenth of a second: set --threads."
        )


def _of_processor(now: Block) -> Iterator[str]:
    if now["governor"] and now["governor"] != "performance":
        yield f"The governor is {now['governor']}: clocks follow the load; short steps are slow."
    if now["throttled"]:
        yield f"Heat has held the processor's clocks down {now['throttled']} times since boot."


def _of_others(now: Block, cores: int) -> Iterator[str]:
    if now["steal_percent"] is not None and now["steal_percent"] >= 1:
        yield f"The hypervisor took {now['steal_percent']:.1f} % of the processor for others."
    if now["swapped"]:
        yield f"Memory is short or was: {format_bytes(now['swapped'])} lie in swap."
    if now["busy"]:
        total = sum(tenant["cores"] for tenant in now["busy"])
        yield f"Other processes use {total:.1f} of {cores} cores."


def _of_gpu(gpu: Block) -> Iterator[str]:
    name = f"GPU {gpu['index']}"
    if gpu["processes"]:
        yield f"{name} is used by {len(gpu['processes'])} processes of others."
    for bit, cause in THROTTLES.items():
        if (gpu["throttle_reasons"] or 0) & bit:
            yield f"{name}'s clocks are held down by {cause}."
