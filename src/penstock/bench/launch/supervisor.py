"""The supervisor: runs each launch in a fresh process, and makes a record of any end of it.

    supervisor                           worker, leader of its own session
        | -- the request, a file -------------> |
        | <-- stages, then the result, a pipe - |
        | <-- stderr, its last 4 kB ----------- |   stdout goes nowhere: the model may print
        | -- the memory of its process tree ->  |   read from outside, ten times a second

The supervisor waits for a message, and looks ten times a second at the memory of the process, at
its end and at the deadline. The result comes through the pipe. How the process ended
matters only if no result came: then the kernel's counter of out-of-memory kills shows whether the
kernel or another process killed it.

A supervisor that is interrupted kills the worker's whole process group. When the supervisor is
killed, the worker ends with it (`orphans`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import psutil
from pydantic import ValidationError
from pydantic_core import from_json

from ...base import UsageError, describe, for_children, scrubbed
from ...instruments import (
    Failure,
    Record,
    Status,
    ThisMachine,
    case_key,
    cgroup_folders,
    collect_environment,
    kernel_memory,
)
from .request import Launch

WORKER = (sys.executable, "-m", "penstock.bench.launch.worker")
STDERR_BYTES = 4096
SAMPLE_EVERY_S = 0.1
SAMPLE_SHARE = 0.05
"""The fraction of a core that watching a process tree may use."""
DIE_WITHIN_S = 10.0
"""The seconds that a killed process may hang in the kernel, for example on a dead mount."""
PIPE_BYTES = 2**20
"""The maximum size of a pipe's buffer in bytes."""


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """The folder and variables of a worker: by default those of this process."""

    folder: Path | None = None
    variables: Mapping[str, str] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the place for the record's environment."""
    wanted: Callable[[], bool] | None = None
    """Called now and then; when it returns False, the worker is killed."""


def run_launch(
    launch: Launch, *, command: Sequence[str] | None = None, place: LaunchPlace = LaunchPlace()
) -> Record:
    """Run a worker to its end, or until its time is over. Its failure is a record too.

    Args:
        launch: what to measure, and how.
        command: a program to run in place of the worker. It gets the path of the request and the
            file descriptor to answer on as further arguments.
        place: where the worker runs.

    Returns:
        The record of the launch, also if it failed.

    Raises:
        UsageError: the system has no process groups.
    """
    if not hasattr(os, "killpg"):
        raise UsageError(
            "what is measured runs in a process group of its own, which this system does not have; "
            "benchmarks, suites and tuning run on Linux and macOS, and on Windows under WSL"
        )
    began = datetime.now().astimezone().isoformat(timespec="milliseconds")
    surroundings = {**collect_environment(place.folder, place.variables), **place.facts}
    kills = oom_kills()
    ending = _run(command or WORKER, launch, place)
    killed = [source for source, count in oom_kills().items() if count > kills.get(source, 0)]
    fate = fate_of(ending, launch.timeout_s, killed, counted=bool(kills))

    stated = {"scenario": launch.scenario, "launch": launch.number, "order": launch.order}
    stated |= {"id": uuid.uuid4().hex, "time": began, "key": ""}
    try:
        record = _record(launch, outcome(ending, fate) | stated, ending, surroundings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        fault = f"its answer is not a record: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        stated |= failure("crash", "report", fault, ending)
        return _record(launch, stated, ending, surroundings)
    if record.ok and ending.exit != 0:  # while it unloads a driver, say; the answer still counts
        return record.model_copy(update={"facts": {**record.facts, "ended": fate[1]}})
    return record


def _record(
    launch: Launch, stated: Mapping[str, Any], ending: Ending, surroundings: dict[str, Any]
) -> Record:
    """The record: the worker's answer and what the supervisor measured, without secrets."""
    bare = Record.model_validate({"case": dict(launch.case), **stated})
    # A launch may end between two readings of its memory.
    held = [count for count in (ending.peak, bare.memory.host_baseline) if count is not None]
    peaks = {"host_peak": max(held, default=None)}
    if bare.memory.host_peak_kernel is None:
        peaks["host_peak_kernel"] = ending.peak_kernel
    seen = {
        "key": case_key(bare.scenario, bare.case),
        "case": scrubbed(bare.case),
        "facts": scrubbed(bare.facts),
        "error": bare.error and bare.error.model_copy(update=scrubbed(dict(bare.error))),
        "memory": bare.memory.model_copy(update=peaks),
        "environment": {**surroundings, **bare.environment},
    }
    return bare.model_copy(update=seen)


def _run(command: Sequence[str], launch: Launch, place: LaunchPlace) -> Ending:
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(asdict(launch)))
        answers, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                [*command, str(path), str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs,),
                start_new_session=True,
                env=for_children(place.variables),
                cwd=place.folder,
            )
        except OSError as error:
            os.close(answers)
            return Ending(None, refused=describe(error))
        finally:
            os.close(theirs)
        with os.fdopen(answers, "rb", buffering=0) as pipe:
            return _supervise(process, pipe, launch.timeout_s, place.wanted)


def _supervise(
    process: subprocess.Popen[bytes],
    pipe: IO[bytes],
    timeout_s: float,
    wanted: Callable[[], bool] | None,
) -> Ending:
    """Listen until the process has ended. Nothing of its group outlives this call."""
    said, stderr = bytearray(), bytearray()
    watch, timed_out = _MemoryWatch(process.pid), False
    deadline = time.monotonic() + timeout_s
    assert process.stderr is not None
    with process.stderr, selectors.DefaultSelector() as selector:
        with contextlib.suppress(OSError):  # if memory runs out, the kernel kills it before us
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        selector.register(pipe, selectors.EVENT_READ, (said, None))
        selector.register(process.stderr, selectors.EVENT_READ, (stderr, STDERR_BYTES))
        try:
            while not _has_ended(process):
                for key, _ in selector.select(SAMPLE_EVERY_S):
                    if not _take(key):  # it has closed its end and goes on
                        selector.unregister(key.fileobj)
                watch.look()
                given_up = wanted is not None and not timed_out and not wanted()
                if given_up or time.monotonic() >= deadline:
                    if timed_out:
                        break  # it was killed, and would not die
                    timed_out = True
                    _kill(process)
                    deadline = time.monotonic() + DIE_WITHIN_S
        finally:
            _kill(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DIE_WITHIN_S)
        # Its last output is in the pipes. They may stay open: a process that it started in another
        # session may hold them.
        for key in list(selector.get_map().values()):
            os.set_blocking(key.fd, False)
            with contextlib.suppress(BlockingIOError):
                _take(key)
    return Ending(
        process.returncode,
        timed_out=timed_out,
        said=bytes(said),
        stderr=bytes(stderr),
        peak=watch.peak,
        peak_kernel=watch.peak_kernel,
    )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):  # an older macOS, which cannot look without reaping
        return process.poll() is not None
    # It is not reaped, so that no other process group can get its number before it is killed.
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def _take(key: selectors.SelectorKey) -> bytes:
    buffer, most = key.data
    chunk = os.read(key.fd, PIPE_BYTES)
    buffer += chunk
    if most is not None:
        del buffer[:-most]
    return chunk


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class _MemoryWatch:
    """The highest memory of a process tree, of a reading now and then."""

    def __init__(self, pid: int) -> None:
        self.peak: int | None = None
        """Bytes of the tree: RSS, or PSS of several processes, which share pages."""
        self.peak_kernel: int | None = None
        """Bytes of the root alone, as the kernel counts them."""
        self._status = Path(f"/proc/{pid}/status")
        self._tree = ThisMachine(pid)
        self._next = 0.0

    def look(self) -> None:
        """Read the memory, unless that was done a moment ago."""
        began = time.monotonic()
        if began < self._next:
            return
        with contextlib.suppress(psutil.Error, OSError):  # it is gone, or not ours to see
            processes = self._tree.processes()
            held = sum(usage.rss for usage in processes.values())
            if len(processes) > 1:
                pss = self._tree.pss()
                # 0 if all have been killed since: their RSS would count shared pages for each.
                held = held if pss is None else pss
            self.peak = max(held, self.peak or 0) or None  # a process that has ended holds 0
            # Linux also has no peak of a process that has ended.
            self.peak_kernel = kernel_memory(self._status).get("VmHWM", self.peak_kernel)
        took = time.monotonic() - began
        self._next = began + max(SAMPLE_EVERY_S, took / SAMPLE_SHARE)


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
