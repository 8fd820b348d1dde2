"""``penstock doctor``: what this machine is, what limits it, how noisy it is, what it can do.

A value that cannot be read is reported as missing; nothing is guessed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import (
    Overwriting,
    UsageError,
    add_flags,
    check_outputs,
    format_bytes,
    from_flags,
    significant,
    write_output,
)
from ..bench import default_ledger, noise_floor
from ..instruments import Ledger, collect_environment
from .benchmarks import check_ledger
from .progress import say

Block = Mapping[str, Any]
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
MISSING = "not readable here"


EXAMPLES = """
penstock doctor
penstock doctor --json machine.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        help="device to measure: cpu, cuda:1, mps (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--no-measure", action="store_true", help="look at the machine and measure nothing"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all that is printed to this file"
    )
    parser.add_argument(
        "--ledger",
        type=Path,
        metavar="FOLDER",
        help="folder of the records (default: in the user's cache)",
    )
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    if args.json and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: {args.json.parent} is not a folder")
    replace = from_flags(Overwriting, args).overwrite
    read = [] if args.ledger is None else [Ledger(args.ledger).path]
    check_outputs(("--json", args.json), replace=replace, inputs=read)
    if args.ledger is not None:
        check_ledger(Ledger(args.ledger))
    check_device_name(args.device)
    block = collect_environment()
    device = pick_device(args.device, block)
    for section in (machine, libraries, limited):
        show(*section(block))
    findings: dict[str, Any] = {"environment": block, "device": device}
    if not args.no_measure:
        ledger = Ledger(args.ledger) if args.ledger else default_ledger()
        say("measuring the noise floor, in fresh processes")
        noise = noise_floor(device, ledger)
        if noise["threshold"] is None and args.device != "auto":
            raise UsageError(f"--device {device} cannot be measured: {noise['note']}")
        show("Noise floor", noise_lines(noise, device))
        print(f"The records are in {ledger.path}.\n")
        findings |= {"noise": noise, "ledger": str(ledger.path)}
    if args.json:
        text = json.dumps(findings, indent=2, allow_nan=False) + "\n"
        write_output("--json", args.json, text, replace=replace)
    return 0


def check_device_name(asked: str) -> None:
    """Raise `UsageError` if ``asked`` names no device."""
    if not DEVICE.fullmatch(asked):
        raise UsageError(f"--device {asked} is not a device; give auto, cpu, cuda, cuda:1 or mps")


def pick_device(asked: str, block: Block) -> str:
    """Resolve a device name without importing torch.

    ``auto`` is the first GPU if NVML shows one and the installed torch is built for GPUs, and
    otherwise the CPU.

    Raises `UsageError` for a GPU that this torch cannot use.

    >>> pick_device("auto", {"gpus": [{}], "libraries": {"torch": "2.13.0+cpu"}})
    'cpu'
    """
    torch = block["libraries"].get("torch")
    if asked.startswith("cuda") and torch and torch.endswith("+cpu"):
        raise UsageError(
            f"--device {asked} cannot be measured: torch {torch} is built without CUDA"
        )
    if asked == "cuda":
        return "cuda:0"
    if asked != "auto":
        return asked
    return "cuda:0" if block["gpus"] and torch and not torch.endswith("+cpu") else "cpu"


def show(title: str, lines: Sequence[str]) -> None:
    print(title, *(f"  {line}" for line in lines), "", sep="\n", flush=True)


def machine(block: Block) -> tuple[str, list[str]]:
    of = block["machine"]
    physical = of["physical_cores"] or "unknown"
    lines = [
        f"processor    {of['processor'] or MISSING}",
        f"cores        {of['cores']}, {physical} of them physical",
        f"memory       {format_bytes(of['memory_bytes'])}",
        f"system       {of['system']} {of['kernel']}, {of['architecture']}",
    ]
    if block["gpus"] is None:
        lines.append("GPUs         unknown: NVML did not answer")
    elif not block["gpus"]:
        lines.append("GPUs         none that NVML shows")
    for gpu in block["gpus"] or ():
        memory = MISSING if gpu["memory_bytes"] is None else format_bytes(gpu["memory_bytes"])
        lines.append(
            f"GPU {gpu['index']}        {gpu['name']}, {memory}, driver {gpu['driver'] or MISSING}"
        )
    return "Machine", lines


def libraries(block: Block) -> tuple[str, list[str]]:
    versions = block["libraries"].items()
    there = [f"{name} {version}" for name, version in versions if version]
    absent = [name for name, version in versions if not version]
    lines = [", ".join(there)]
    if absent:
        lines.append(f"not installed: {', '.join(absent)}")
    return "Libraries", lines


def limited(block: Block) -> tuple[str, list[str]]:
    limits, cores = block["limits"], block["machine"]["cores"]
    affinity, quota = limits["affinity"], limits["cgroup_cpus"]
    memory = limits["cgroup_memory_bytes"]
    granted = f"{significant(quota)} cores" if quota else "all cores"
    lines = [
        f"affinity     {f'{affinity} of {cores} cores' if affinity else MISSING}",
        f"cgroup       {granted}, {format_bytes(memory) if memory else 'all memory'}",
    ]
    return "Limits", lines


def noise_lines(noise: Block, device: str) -> list[str]:
    if noise["threshold"] is None:
        return [f"not measured: {noise['note']}"]
    spread, threshold = 100 * noise["spread"], 100 * noise["threshold"]
    ratio, low, high = (100 * (noise[name] - 1) for name in ("ratio", "low", "high"))
    interval = f"95 % interval {low:+.1f} to {high:+.1f} %"
    busy = f"; others were busy as {noise['disturbed']} of them began" * bool(noise["disturbed"])
    return [
        f"{noise['n']} launches of one matrix product on {device} lie within {spread:.1f} %{busy}.",
        f"As two sides of a comparison they differ by {ratio:+.1f} % ({interval}).",
        f"Differences under {threshold:.1f} % cannot be distinguished from noise here.",
    ]
