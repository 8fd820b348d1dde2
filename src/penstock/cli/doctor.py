"""``penstock doctor``: what this machine is, what limits it, how noisy it is, what it can do.

What cannot be read is said to be missing, and nothing is put in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ..base import (
    Replacing,
    UsageError,
    add_flags,
    check_outputs,
    format_bytes,
    from_flags,
    significant,
    writing_output,
)
from ..bench import LAUNCHES, SweepStep, default_ledger, measure_roofs, noise_floor
from ..instruments import BUSY, ENVIRONMENT_VARIABLES, Ledger, Nvml, collect_environment
from .bench import check_ledger

Block = Mapping[str, Any]
SYS = Path("/sys")
WATCH_S = 1.0
NOISY = 0.05
"""A noise floor above this hides most of what people look for."""
THROTTLE_COUNTS = "cpu*/thermal_throttle/package_throttle_count"
"""Each core says the count of its package, since the machine was started."""
MISSING = "not readable here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda:1, mps (default: a GPU where there is one)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where the disk is measured (default: here)"
    )
    parser.add_argument(
        "--effort", choices=LAUNCHES, default="quick", help="more launches (default: %(default)s)"
    )
    parser.add_argument("--no-measure", action="store_true", help="look and start nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it to this file")
    parser.add_argument(
        "--ledger", type=Path, metavar="FOLDER", help="keep the records here (default: the cache)"
    )
    add_flags(parser, Replacing)


def run(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        raise UsageError(f"--folder {args.folder} is not a folder")
    if args.json and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: {args.json.parent} is not a folder")
    replace = from_flags(Replacing, args).replace
    check_outputs(("--json", args.json), replace=replace)
    if args.ledger is not None:
        check_ledger(Ledger(args.ledger))
    block, now = collect_environment(), readings()
    device = pick_device(args.device, block)
    for section in (machine, libraries, limited, tenants):
        show(*section(block, now))
    findings: dict[str, Any] = {"environment": block, "readings": now, "device": device}
    if not args.no_measure:
        ledger = Ledger(args.ledger) if args.ledger else default_ledger()
        noise = noise_floor(device, args.effort, ledger, progress=_progress("noise floor"))
        if noise["threshold"] is None and args.device != "auto":
            raise UsageError(f"--device {device} cannot be measured: {noise['note']}")
        show("Noise floor", noise_lines(noise, device))
        dtypes = ["float32", "bfloat16"] + ["float16"] * device.startswith("cuda")
        tops = measure_roofs(
            device, dtypes, args.folder, args.effort, ledger, progress=_progress("roofs")
        )
        show(f"Measured roofs of {device}", roof_lines(tops))
        print(f"The records are in {ledger.path}.\n")
        findings |= {"noise": noise, "roofs": tops, "ledger": str(ledger.path)}
    findings["warnings"] = warnings(block, now, findings.get("noise"))
    show("Warnings", findings["warnings"] or ["none"])
    if args.json:
        try:
            with writing_output(args.json, replace=replace) as draft:
                draft.write_text(json.dumps(findings, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise UsageError(f"--json {args.json} cannot be written: {error.strerror}") from error
    return 0


def pick_device(asked: str, block: Block) -> str:
    """``auto`` without torch: a GPU that NVML shows, where the torch here is one for GPUs.

    >>> pick_device("auto", {"gpus": [{}], "libraries": {"torch": "2.13.0+cpu"}})
    'cpu'
    """
    if asked == "cuda":
        return "cuda:0"
    if asked != "auto":
        return asked
    torch = block["libraries"].get("torch") or "+cpu"
    return "cuda:0" if block["gpus"] and not torch.endswith("+cpu") else "cpu"


def show(title: str, lines: Sequence[str]) -> None:
    print(title, *(f"  {line}" for line in lines), "", sep="\n", flush=True)


def _progress(what: str) -> Callable[[SweepStep], None]:
    """A line that is written over, where somebody is looking."""

    def say(step: SweepStep) -> None:
        if sys.stderr.isatty():
            end = "\r" if step.record is None else "\r\x1b[K"
            # The stream itself, as the cursor is moved.
            stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
            print(f"{what}: launch {step.number + 1} of {step.total}", end=end, file=stream)

    return say


def machine(block: Block, now: Block) -> tuple[str, list[str]]:
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
    lines += [
        f"governor     {now['governor'] or MISSING}",
        f"turbo        {_on_off(now['turbo'])}",
        f"huge pages   {now['huge_pages'] or MISSING}",
        f"key          {block['machine_key']}",
    ]
    return "Machine", lines


def libraries(block: Block, now: Block) -> tuple[str, list[str]]:
    found = block["libraries"]
    there = [f"{name} {version}" for name, version in found.items() if version]
    absent = [name for name, version in found.items() if not version]
    lines = [", ".join(there)]
    if absent:
        lines.append(f"not installed: {', '.join(absent)}")
    lines += [
        f"{name}={value}"
        for name, value in block["variables"].items()
        if name in ENVIRONMENT_VARIABLES
    ]
    return "Libraries", lines


def limited(block: Block, now: Block) -> tuple[str, list[str]]:
    limits, cores = block["limits"], block["machine"]["cores"]
    affinity, quota = limits["affinity"], limits["cgroup_cpus"]
    memory, swap = limits["cgroup_memory_bytes"], now["swap"]
    granted = f"{significant(quota)} cores" if quota else "all cores"
    lines = [
        f"affinity     {f'{affinity} of {cores} cores' if affinity else MISSING}",
        f"cgroup       {granted}, {format_bytes(memory) if memory else 'all memory'}",
        f"swap         {'none' if not swap['total'] else _used(swap)}",
    ]
    shown = [f"{name} {value}" for name, value in now["ulimits"].items() if value is not None]
    lines.append(f"ulimits      {', '.join(shown) or 'none'}")
    return "Limits", lines


def tenants(block: Block, now: Block) -> tuple[str, list[str]]:
    lines = [
        f"{tenant['name']} (process {tenant['pid']}) used {tenant['cores']:.1f} cores"
        for tenant in now["busy"]
    ]
    lines = lines or [f"no process of others used more than {BUSY:.0%} of a core in {WATCH_S:g} s"]
    if now["gpus"] is None:
        lines.append("GPU processes: unknown, NVML did not answer")
    for gpu in now["gpus"] or ():
        others = gpu["processes"]
        said = MISSING if others is None else f"{len(others)} processes of others"
        lines.append(f"GPU {gpu['index']}: {said}")
    return "Other tenants", lines


def noise_lines(noise: Block, device: str) -> list[str]:
    if noise["threshold"] is None:
        return [f"not measured: {noise['note']}"]
    spread, threshold = 100 * noise["spread"], 100 * noise["threshold"]
    ratio, low, high = (100 * (noise[name] - 1) for name in ("ratio", "low", "high"))
    interval = f"95 % interval {low:+.1f} to {high:+.1f} %"
    return [
        f"{noise['n']} launches of one matrix product on {device} lie within {spread:.1f} %.",
        f"As two sides of a comparison they differ by {ratio:+.1f} % ({interval}).",
        f"Differences under {threshold:.1f} % cannot be told from noise here.",
    ]


def roof_lines(tops: Mapping[str, Block]) -> list[str]:
    lines = []
    for name, roof in tops.items():
        if roof["value"] is None:
            lines.append(f"{name:<16} not measured: {roof['note']}")
            continue
        text = f"{name:<16} {_rate(roof['value'], roof['unit']):>14}"
        spread = "no interval"
        if roof["low"] is not None and roof["high"] is not None:
            ends = (_rate(roof[end], roof["unit"]) for end in ("low", "high"))
            spread = "95 % interval {} to {}".format(*ends)
        launches = "1 launch" if roof["n"] == 1 else f"{roof['n']} launches"
        lines.append(f"{text}   {spread}, {launches}" + (roof["note"] and f"; {roof['note']}"))
    return lines


def _rate(value: float, unit: str) -> str:
    """
    >>> _rate(1.234e12, "flop/s"), _rate(5.6e9, "B/s")
    ('1.23 Tflop/s', '5.60 GB/s')
    """
    for power, prefix in ((5, "P"), (4, "T"), (3, "G"), (2, "M")):
        if value >= 1000**power:
            return f"{significant(value / 1000**power)} {prefix}{unit}"
    return f"{significant(value)} {unit}"


def _on_off(switch: bool | None) -> str:
    return MISSING if switch is None else "on" if switch else "off"


def _used(swap: Block) -> str:
    return f"{format_bytes(swap['used'])} of {format_bytes(swap['total'])} in use"


THROTTLES = {
    # bits of NVML's clock event reasons
    0x04: "its power cap",
    0x08: "a hardware slowdown",
    0x20: "its software's limit of temperature",
    0x40: "its hardware's limit of temperature",
    0x80: "a power brake",
}


def warnings(block: Block, now: Block, noise: Block | None) -> list[str]:
    """What makes measurements here worse than they could be, a sentence each."""
    return list(_warnings(block, now, noise))


def _warnings(block: Block, now: Block, noise: Block | None) -> Iterator[str]:
    cores, limits = block["machine"]["cores"], block["limits"]
    if limits["affinity"] and limits["affinity"] < cores:
        yield f"This process may use {limits['affinity']} of the {cores} cores."
    quota = limits["cgroup_cpus"]
    if quota and quota < (limits["affinity"] or cores):
        yield (
            f"A control group grants {significant(quota)} cores; threads beyond that are stopped "
            "for parts of every tenth of a second: set --threads."
        )
    if now["governor"] and now["governor"] != "performance":
        yield f"The governor is {now['governor']}: clocks follow the load; short steps are slow."
    if now["turbo"]:
        yield "Turbo is on: a cool or idle processor is faster than a warm or busy one."
    if now["throttled"]:
        yield f"Heat has held the processor's clocks down {now['throttled']} times since boot."
    if now["steal_percent"] is not None and now["steal_percent"] >= 1:
        yield f"The hypervisor took {now['steal_percent']:.1f} % of the processor for others."
    if now["swap"]["used"]:
        yield f"Memory is short or was: {_used(now['swap'])} of swap."
    if now["busy"]:
        total = sum(tenant["cores"] for tenant in now["busy"])
        yield f"Other processes use {total:.1f} of {cores} cores."
    for gpu in now["gpus"] or ():
        yield from _gpu_warnings(gpu)
    if noise and noise["n"] and noise["disturbed"]:
        yield (
            f"Other processes were busy as {noise['disturbed']} of {noise['n']} launches of the "
            "noise floor began: part of this noise is theirs."
        )
    if noise and noise["threshold"] is not None and noise["threshold"] > NOISY:
        yield (
            f"The noise floor is {100 * noise['threshold']:.1f} %: try --effort rigorous, or a "
            "quieter machine."
        )


def _gpu_warnings(gpu: Block) -> Iterator[str]:
    name = f"GPU {gpu['index']}"
    if gpu["processes"]:
        yield f"{name} is used by {len(gpu['processes'])} processes of others."
    for bit, cause in THROTTLES.items():
        if (gpu["throttle_reasons"] or 0) & bit:
            yield f"{name}'s clocks are held down by {cause}."
    limit, usual = gpu["power_limit_w"], gpu["power_default_w"]
    if limit and usual and limit < usual:
        yield f"{name} is capped at {limit:.0f} W of its usual {usual:.0f} W."


def readings() -> dict[str, Any]:
    """What of this machine changes from hour to hour; null where it is not readable."""
    swap = psutil.swap_memory()
    stolen = getattr(psutil.cpu_times(), "steal", None)
    busy = _busy()
    steal = None if stolen is None else psutil.cpu_times().steal - stolen
    try:
        gpus = _Gpus()()
    except Exception:  # NVML's errors have no type that is known before NVML is imported
        gpus = None
    return {
        "governor": " and ".join(sorted(set(_read("cpu*/cpufreq/scaling_governor")))) or None,
        "turbo": _turbo(),
        "huge_pages": _chosen(SYS / "kernel/mm/transparent_hugepage/enabled"),
        "throttled": max(map(int, _read(THROTTLE_COUNTS)), default=None),
        "steal_percent": None
        if steal is None
        else 100 * steal / WATCH_S / (psutil.cpu_count() or 1),
        "swap": {"total": swap.total, "used": swap.used},
        "ulimits": _ulimits(),
        "busy": busy,
        "gpus": gpus,
    }


def _read(pattern: str) -> list[str]:
    found = []
    for path in sorted((SYS / "devices/system/cpu").glob(pattern)):
        with contextlib.suppress(OSError):
            found.append(path.read_text().strip())
    return found


def _turbo() -> bool | None:
    """Two drivers, two spellings."""
    if no_turbo := _read("intel_pstate/no_turbo"):
        return no_turbo == ["0"]
    boost = _read("cpufreq/boost")
    return boost == ["1"] if boost else None


def _chosen(path: Path) -> str | None:
    """``madvise`` of ``always [madvise] never``."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        return None


def _ulimits() -> dict[str, str | None]:
    try:
        import resource
    except ImportError:  # Windows
        return {}
    names = {
        "address space": "RLIMIT_AS", "data": "RLIMIT_DATA", "locked memory": "RLIMIT_MEMLOCK",
        "open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC",
    }  # fmt: skip
    found: dict[str, str | None] = {}
    for name, constant in names.items():
        if hasattr(resource, constant):
            soft, _ = resource.getrlimit(getattr(resource, constant))
            sized = str(soft) if name in ("open files", "processes") else format_bytes(soft)
            found[name] = None if soft == resource.RLIM_INFINITY else sized
    return found


def _busy() -> list[dict[str, Any]]:
    """Processes of others that use the processor, the busiest first."""
    this = psutil.Process()
    ours = {this.pid, *(child.pid for child in this.children(recursive=True))}
    others = [p for p in psutil.process_iter(["name"]) if p.pid not in ours]
    for process in others:
        with contextlib.suppress(psutil.Error):
            process.cpu_percent()  # the next reading counts from here
    psutil.cpu_percent(WATCH_S)  # waits
    found = []
    for process in others:
        with contextlib.suppress(psutil.Error):
            cores = process.cpu_percent() / 100
            if cores > BUSY:
                found.append({"pid": process.pid, "name": process.info["name"], "cores": cores})
    return sorted(found, key=lambda tenant: -tenant["cores"])


class _Gpus(Nvml):
    """Who uses each GPU and what holds its clocks down."""

    def __call__(self) -> list[dict[str, Any]]:
        found = self._find()
        nvml = self._nvml
        questions: dict[str, Callable[[Any], Any]] = {
            "processes": lambda gpu: [
                p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            ],
            "throttle_reasons": lambda gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            "celsius": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "power_limit_w": lambda gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
            "power_default_w": lambda gpu: (
                nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000
            ),
        }
        return [
            {"index": index} | {key: self._ask(ask, gpu) for key, ask in questions.items()}
            for index, _, gpu in found
        ]
