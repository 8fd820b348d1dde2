"""``penstock doctor``: what this machine is, and what limits it.

A value that cannot be read is reported as missing; nothing is guessed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import (
    Overwriting,
    add_flags,
    check_outputs,
    format_bytes,
    from_flags,
    json_text,
    plural,
    significant,
    write_output,
)
from ..instruments import collect_environment

Block = Mapping[str, Any]
MISSING = "not readable here"


EXAMPLES = """
penstock doctor
penstock doctor --json machine.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all that is printed to this file"
    )
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    replace = from_flags(Overwriting, args).overwrite
    check_outputs(("--json", args.json), replace=replace)
    block = collect_environment()
    for section in (machine, libraries, limited):
        title, lines = section(block)
        print(title, *(f"  {line}" for line in lines), "", sep="\n", flush=True)
    if args.json:
        write_output("--json", args.json, json_text({"environment": block}), replace=replace)
    return 0


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
        f"affinity     {f'{affinity} of ' + plural(cores, 'core') if affinity else MISSING}",
        f"cgroup       {granted}, {format_bytes(memory) if memory else 'all memory'}",
    ]
    return "Limits", lines
