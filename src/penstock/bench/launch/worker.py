"""The worker: measures one case in its own process, and reports on a pipe.

    python -m penstock.bench.launch.worker REQUEST.json FD

It writes a line of JSON on the descriptor FD for each stage as the stage begins, then a line with
the result or the failure. Standard output and standard error are left to the model. `supervisor`
starts it.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ...base import UsageError, causes_of, describe, end_with_parent, where_in_users_code
from ..scenarios import WrongResult, find, make
from .request import Launch

if TYPE_CHECKING:
    from ...instruments import Status

BALLAST_BYTES = 4 * 2**20
"""Bytes held from the start and freed when memory runs out, so that a failure can be reported."""

# Torch has an error type only for a device's memory. The words of its other errors for memory:
_HOST = ("DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory")
_HOST_IF_LIMITED = ("could not create a memory", "could not create a primitive", "start new thread")
"""Words of oneDNN for any error, and of Python for too many threads. With a memory limit they
mean too little memory."""
_DEVICE = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Answers:
    """The pipe to the supervisor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.stage = "start"

    def begin(self, stage: str) -> None:
        self.stage = stage
        self.say({"stage": stage})

    def say(self, message: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(message, allow_nan=False).encode() + b"\n")


def main(request_path: str, descriptor: str) -> int:
    """Measure or check the case of a request; the exit code is 0 with a result, 1 with a
    failure.
    """
    began = time.perf_counter()
    end_with_parent()
    faulthandler.enable(all_threads=False)
    answers = Answers(int(descriptor))
    launch = Launch(**json.loads(Path(request_path).read_text()))
    ballast = bytearray(BALLAST_BYTES)
    try:
        answers.begin("setup")
        if launch.memory_limit is not None:
            limit_memory(launch.memory_limit)
        result = _check(launch) if launch.task == "check" else _measure(launch, answers, began)
        answers.begin("report")
        answers.say({"result": result})
    except Exception as error:
        del ballast
        status = status_of(error, limited=launch.memory_limit is not None)
        kind = f"{type(error).__name__}: " if status == "crash" else ""
        message, place = kind + describe(error), where_in_users_code(error)
        message += place * (place not in message)
        failed = {"status": status, "stage": answers.stage, "message": message}
        answers.say({"failed": {**failed, "facts": getattr(error, "facts", {})}})
        for link in causes_of(error):  # its frames hold the tensors that filled the memory
            traceback.clear_frames(link.__traceback__)
        traceback.print_exception(error)
        return 1
    return 0


def limit_memory(most: int) -> None:
    """Limit the private memory of this process; allocations beyond it fail.

    The kernel counts the heap and private mappings, touched or not, with those of torch and its
    libraries. It does not count files and memory that processes share. Raises `UsageError` on
    systems other than Linux, which do not enforce it on mappings.
    """
    if sys.platform != "linux":
        raise UsageError(f"a memory limit ({most} bytes) can be enforced on Linux only")
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def status_of(error: BaseException, *, limited: bool) -> Status:
    """The kind of failure of an exception, or of the one that caused it."""
    kinds = (_kind(link, limited) for link in causes_of(error))
    return next((kind for kind in kinds if kind is not None), "crash")


def _kind(error: BaseException, limited: bool) -> Status | None:
    if isinstance(error, UsageError | NotImplementedError):
        return "unsupported"
    if isinstance(error, WrongResult):
        return "wrong_result"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return "oom_host"
    if not isinstance(error, RuntimeError | ImportError):
        return None
    text = str(error)
    if any(words in text for words in _HOST + (_HOST_IF_LIMITED if limited else ())):
        return "oom_host"
    # torch.OutOfMemoryError is a RuntimeError, which in every version has these words.
    return "oom_device" if any(words in text for words in _DEVICE) else None


def _check(launch: Launch) -> dict[str, Any]:
    """The answer of the function ``check`` in the scenario's module."""
    from ..measure import host_memory

    check = find(launch.scenario)[0].check
    # The memory that a limit counts before there is a model: Python, torch and libraries.
    needed = host_memory()["host_counted"]
    case, facts = check(launch.case)
    return {"case": case, "facts": {**facts, "process_bytes": needed}}


def _measure(launch: Launch, answers: Answers, began: float) -> dict[str, Any]:
    with contextlib.suppress(ModuleNotFoundError):  # some scenarios need no torch
        import torch  # noqa: F401 - under the limit, and part of the baseline
    from .. import measure

    baseline = psutil.Process().memory_info().rss
    scenario = make(launch.scenario, launch.case)
    setup_s = time.perf_counter() - began
    rules = measure.Rules.model_validate(launch.rules)
    result = measure.measure_scenario(scenario, rules, answers.begin)
    result["warmup"]["setup_s"] = setup_s
    result["memory"]["host_baseline"] = baseline
    if "torch" in sys.modules:
        from ...instruments import torch_flags

        result["environment"] = {"torch": torch_flags()}
    # After a failure nothing is closed: the process ends, and closing might fail too.
    scenario.close()
    return result


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
