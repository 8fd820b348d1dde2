"""The outcome of a launch: its answer, or else how its process ended.

The kernel's counter of out-of-memory kills shows whether the kernel or another process killed a
worker.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from ...instruments import Failure, Status, cgroup_folders


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker, as the supervisor saw it."""

    exit: int | None
    """The exit code of `subprocess`; None if it did not start, or did not end when killed."""
    refused: str = ""
    """The reason why it did not start."""
    timed_out: bool = False
    said: bytes = b""
    """The bytes that came through the pipe."""
    stderr: bytes = b""
    peak: int | None = None
    peak_kernel: int | None = None


def outcome(ending: Ending, fate: tuple[Status, str]) -> dict[str, Any]:
    """The fields of the record, from the worker's answer, or else from its end."""
    stage, answer = _parsed(ending.said)
    if "result" in answer:
        return {**answer["result"], "status": "ok"}
    failed = answer.get("failed", {})
    status, message = failed.get("status", fate[0]), failed.get("message", fate[1])
    fields = failure(status, failed.get("stage", stage), message, ending)
    return {**fields, "facts": failed.get("facts", {})}


def failure(status: Status, stage: str, message: str, ending: Ending) -> dict[str, Any]:
    """The fields of the record of a launch that failed."""
    stderr = ending.stderr.decode(errors="replace")
    return {"status": status, "error": Failure(stage=stage, message=message, stderr=stderr)}


def _parsed(said: bytes) -> tuple[str, dict[str, Any]]:
    """The last stage, and the last message with a ``result`` or ``failed``; {} if none came."""
    stage, answer = "start", {}
    for line in said.split(b"\n")[:-1]:  # a line without its newline was cut short
        try:
            message = from_json(line, allow_inf_nan=False)
        except ValueError:  # the user's code wrote on a descriptor that it does not own
            continue
        if isinstance(message, dict):
            stage = message.get("stage", stage)
            if any(isinstance(message.get(name), dict) for name in ("result", "failed")):
                answer = message
    return stage, answer


def fate_of(
    ending: Ending, timeout_s: float, killed: Sequence[str], *, counted: bool
) -> tuple[Status, str]:
    """A status and a sentence for how a process ended.

    Args:
        ending: its end, as the supervisor saw it.
        timeout_s: the time limit in seconds.
        killed: the counters of kills for memory that rose during the launch.
        counted: whether such counters can be read here.

    Returns:
        The status, and the sentence.
    """
    if ending.timed_out:
        return "timeout", f"it was killed after {timeout_s:g} s"
    if ending.exit is None:
        return "crash", f"it could not be started: {ending.refused}"
    if ending.exit >= 0:
        return "crash", f"it ended with exit code {ending.exit} and no result"
    number = -ending.exit
    if number == signal.SIGKILL and killed:
        return "oom_host", f"the kernel killed it for memory ({killed[0]} counts it)"
    if number == signal.SIGKILL and not counted:
        return "oom_host", (
            "it was killed (SIGKILL), for memory it seems: no counter of the kernel's kills can "
            "be read here"
        )
    if number == signal.SIGABRT and b"std::bad_alloc" in ending.stderr:
        return "oom_host", "it aborted for want of memory (std::bad_alloc)"
    names = {member.value: member.name for member in signal.Signals}
    return "crash", f"it died of {names.get(number, f'signal {number}')}"


def oom_kills() -> dict[str, int]:
    """How often the kernel has killed for memory, by the file that counts it."""
    sources = [Path("/proc/vmstat")]
    for folder in cgroup_folders("memory"):
        sources += [folder / "memory.events", folder / "memory.oom_control"]
    counts = {}
    for source in sources:
        with contextlib.suppress(OSError):
            for line in source.read_text().splitlines():
                if line.startswith("oom_kill "):
                    counts[str(source)] = int(line.split()[1])
    return counts
