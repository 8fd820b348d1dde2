"""``penstock doctor``: what this machine is, what limits it, how noisy it is.

A value that cannot be read is reported as missing; nothing is guessed.
"""

from __future__ import annotations

import argparse
import json
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
from ..instruments import collect_environment
from .progress import say

Block = Mapping[str, Any]
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
        "--json", type=Path, metavar="FILE", help="write all that is printed to this file"
    )
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    replace = from_flags(Overwriting, args).overwrite
    check_outputs(("--json", args.json), replace=replace)
    block, ledger = collect_environment(), default_ledger()
    device = default_device(block) if args.device == "auto" else args.device
    for section in (machine, libraries, limited):
        show(*section(block))
    say("measuring the noise floor, in fresh processes")
    noise = noise_floor(device, ledger)
    if noise["threshold"] is None and args.device != "auto":
        raise UsageError(f"--device {device} cannot be measured: {noise['note']}")
    show("Noise floor", noise_lines(noise, device))
    print(f"The records are in {ledger.path}.\n")
    if args.json:
        findings = {"environment": block, "device": device, "noise": noise}
        text = json.dumps(findings, indent=2, allow_nan=False) + "\n"
        write_output("--json", args.json, text, replace=replace)
    return 0


def default_device(block: Block) -> str:
    """The first GPU if NVML shows one and the installed torch is built for GPUs, else the CPU.
    Torch is not imported.

    >>> default_device({"gpus": [{}], "libraries": {"torch": "2.13.0+cpu"}})
    'cpu'
    """
    torch = block["libraries"].get("torch")
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
    if not block["gpus"]:
        why = "unknown: NVML did not answer" if block["gpus"] is None else "none that NVML shows"
        lines.append(f"GPUs         {why}")
    for gpu in block["gpus"] or ():
        memory = MISSING if gpu["memory_bytes"] is None else format_bytes(gpu["memory_bytes"])
        lines.append(
            f"GPU {gpu['index']}        {gpu['name']}, {memory}, driver {gpu['driver'] or MISSING}"
        )
    return "Machine", lines


def libraries(block: Block) -> tuple[str, list[str]]:
    versions = block["libraries"].items()
    return "Libraries", [", ".join(f"{name} {version}" for name, version in versions if version)]


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
