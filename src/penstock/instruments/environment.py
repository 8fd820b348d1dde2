"""The environment block of a record: the machine of a launch, and its other load.

    machine      processor, cores, physical_cores, memory_bytes, architecture, system, kernel
    machine_key  a hash of what stays the same; records with other keys are not compared
    limits       the part that this process may use: affinity, cgroup_cpus, cgroup_memory_bytes
    gpus         by NVML; empty where there are none, null where reading them failed
    libraries    versions
    git          commit and dirty of the repository that the launch's folder lies in
    variables    environment variables that steer threads and devices; no others are read
    load         one_minute, busy_processes: those of others above a tenth of a core
    worker       of a launch on a worker of a cluster: its host and address, the part of the host
                 that no other case took meanwhile, and how many cases ran beside it

A value that cannot be read is null. Only `torch_flags` imports torch, for a process that has
imported it anyway.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from .. import __version__
from ..base import canonical, installed_version
from .machine import ProcessKey, Question, gpus_or_none, process_tree

Block = dict[str, Any]

LIBRARIES = (
    "numpy", "torch", "triton", "zarr", "tensorstore", "bitsandbytes", "peft",
)  # fmt: skip
ENVIRONMENT_VARIABLES = (
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "KMP_AFFINITY",
    "KMP_BLOCKTIME", "MALLOC_ARENA_MAX", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
BUSY = 0.1
"""Cores above which a process counts as busy."""
WATCH_S = 0.25
"""Seconds to watch others: the kernel counts time in ticks of 10 ms, too coarse for less."""
ANSWER_WITHIN_S = 5.0


def collect_environment(
    folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> Block:
    """Read the block. It takes a quarter of a second, in which it watches the other processes.

    Args:
        folder: the folder that the launch runs in; None for the current directory.
        variables: those of the launch; None for those of this process.

    Returns:
        The block.
    """
    variables = os.environ if variables is None else variables
    began, before = time.perf_counter(), _cpu_seconds_of_others()
    machine, gpus = _machine(), gpus_or_none(_OF_GPUS)
    block: Block = {
        "machine": machine,
        "machine_key": machine_key(machine, gpus),
        "limits": _limits(),
        "gpus": gpus,
        "libraries": {"python": platform.python_version(), "penstock": __version__}
        | {name: installed_version(name) for name in LIBRARIES},
        "git": _git(folder),
        "variables": {name: variables[name] for name in ENVIRONMENT_VARIABLES if name in variables},
    }
    time.sleep(max(0.0, began + WATCH_S - time.perf_counter()))
    after, seconds = _cpu_seconds_of_others(), time.perf_counter() - began
    busy = [key for key in after if after[key] - before.get(key, 0.0) > BUSY * seconds]
    block["load"] = {"one_minute": psutil.getloadavg()[0], "busy_processes": len(busy)}
    return block


def machine_key(machine: Block, gpus: list[Block] | None) -> str:
    """A hash of the properties of a machine that stay the same from day to day.

    Clocks and free memory do not. The same machine reports a few MB more or less of memory from one
    kernel to the next, so memory counts in GiB.
    """
    memory = machine["memory_bytes"]
    stable = [
        machine["processor"],
        machine["cores"],
        memory and round(memory / 2**30),
        machine["architecture"],
        gpus and [gpu["name"] for gpu in gpus],
    ]
    return hashlib.sha256(canonical(stable).encode()).hexdigest()[:16]


@functools.cache
def this_machine_key() -> str:
    """The `machine_key` of the machine that this process runs on."""
    return machine_key(_machine(), gpus_or_none(_OF_GPUS))


def machine_and_commit() -> Block:
    """The machine of a run and the commit of the folder that it was started in, as
    ``machine_key`` and ``git``. Comparisons of runs need both."""
    return {"machine_key": this_machine_key(), "git": _git()}


def torch_flags() -> Block:
    """The build of torch, and the switches that change its speed or its precision."""
    import torch

    cuda = torch.cuda.is_available()
    cudnn = torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": cudnn.allow_tf32},
        "cudnn_benchmark": cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version() if cuda else None,
        "device_capability": list(torch.cuda.get_device_capability()) if cuda else None,
    }


def _machine() -> Block:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "architecture": platform.machine(),
        "system": platform.system(),
        "kernel": platform.release(),
    }


def _processor() -> str | None:
    """The name of its model. `platform.processor` is empty on most Linux systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    if sys.platform == "darwin":
        return _said(["sysctl", "-n", "machdep.cpu.brand_string"])
    return platform.processor() or None


_OF_GPUS: Mapping[str, Question] = {
    "memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "driver": lambda nvml, gpu: nvml.nvmlSystemGetDriverVersion(),
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "ecc": lambda nvml, gpu: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),
    "mig": lambda nvml, gpu: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]),
    # The most for this card in this slot: the link itself slows down when it is idle.
    "pcie_generation": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "pcie_width": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
}
"""The questions whose answers stay the same while a job runs."""


CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cgroup_folders(controller: str) -> list[Path]:
    """The control groups that hold this process, innermost first, of both versions of cgroups.

    In a container the names may be those of the host, and only the outermost folder is there.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        inner = root / name.lstrip("/")
        around = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
        folders += [folder for folder in around if folder.is_dir()]
    return folders


def available_memory() -> int:
    """Bytes that this process could still take: those of the machine, or of the control group with
    the fewest left.
    """
    left = [_left_in(folder) for folder in cgroup_folders("memory")]
    return int(min([psutil.virtual_memory().available, *(n for n in left if n is not None)]))


def _left_in(folder: Path) -> int | None:
    """Bytes that a control group has left, by either version's files; None where it has no limit.

    Pages of files that nobody uses count as free: the kernel drops them before it refuses memory.
    """
    for limit, used, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such file, or the limit is "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            with contextlib.suppress(OSError, ValueError):
                words = (folder / "memory.stat").read_text().split()
                left += int(words[words.index(unused) + 1])
            return left
    return None


def _limits() -> Block:
    cpus, memory = [], []
    for folder in cgroup_folders("cpu"):
        share = _numbers(folder / "cpu.max") or [
            *_numbers(folder / "cpu.cfs_quota_us"),
            *_numbers(folder / "cpu.cfs_period_us"),
        ]
        if len(share) == 2 and share[0] > 0:  # else "max", or -1: all that there is
            cpus.append(share[0] / share[1])
    for folder in cgroup_folders("memory"):
        memory += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
    # Where there is no limit, version 1 gives a number beyond the memory of any machine.
    real = [limit for limit in memory if limit < psutil.virtual_memory().total]
    return {
        "affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cgroup_cpus": min(cpus, default=None),
        "cgroup_memory_bytes": min(real, default=None),
    }


def _numbers(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split() if word != "max"]
    except OSError:
        return []


def _git(folder: Path | None = None) -> Block | None:
    """Commit and changes. Files that git does not track, such as results, do not make it dirty."""
    status = ask_git(["status", "--porcelain=v2", "--branch", "--untracked-files=no"], folder)
    if status is None:
        return None
    lines = status.splitlines()
    oid = next((line.split()[-1] for line in lines if line.startswith("# branch.oid")), None)
    return {
        "commit": None if oid == "(initial)" else oid,
        "dirty": any(not line.startswith("#") for line in lines),
    }


def ask_git(words: Sequence[str], folder: Path | None = None) -> str | None:
    """Ask git.

    Args:
        words: the words behind ``git``.
        folder: the folder to run it in; None for the current folder.

    Returns:
        Its output; None where it fails, is absent or does not answer in time.
    """
    # A file monitor is a program that a repository may name; it is not ours to start.
    return _said(["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words], folder)


def _said(command: list[str], folder: Path | None = None) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=ANSWER_WITHIN_S,
            check=True,
            cwd=folder,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_seconds_of_others() -> dict[ProcessKey, float]:
    """Processor time of every process but this one and those below it."""
    ours = {process.pid for process in process_tree(psutil.Process())}
    counted = {}
    for process in psutil.process_iter():
        # One by one: what psutil does to ask several things at once takes longer than to ask.
        with contextlib.suppress(psutil.Error):  # it has ended, or is not ours to see
            if process.pid not in ours:
                times = process.cpu_times()
                counted[process.pid, process.create_time()] = times.user + times.system
    return counted


def commit_of(git: Mapping[str, Any] | None) -> str | None:
    """The commit of a git block, with ``+dirty``; None where there is none."""
    return f"{git['commit']}{'+dirty' * git['dirty']}" if git and git.get("commit") else None
