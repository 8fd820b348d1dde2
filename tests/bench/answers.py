"""A worker of ``bench model`` that makes its answers up. It needs no network and no torch."""

import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

Say = Callable[[Mapping[str, Any]], None]


def answer(request: Mapping[str, Any], say: Say) -> int:
    """Say what a worker says, and return its exit code. A fragile model ends the process."""
    case = request["case"]
    if case["model"] == "nets:fragile":
        return -signal.SIGABRT
    batch, side = case["batch"], int(case["tile"])
    facts = {"model": case["model"], "parameters": 10, "model_bytes": 40, "structure": "0" * 16,
             "tile_shape": [side, side], "channels": 3, "process_bytes": 2000}  # fmt: skip
    if request["task"] == "check":
        if case["model"] == "unknown":
            return _fail(say, "unsupported", "--model 'unknown' is unknown")
        say({"result": {"case": {**case, "device": "cpu", "channels": 3}, "facts": facts}})
        return 0
    pixels = batch * side**2
    if batch == 64 or (case["budget"] and 1000 + 4 * pixels > case["budget"]):
        return _fail(say, "oom_host", "no room")
    assert case["device"] == "cpu" and request["memory_limit"] == case["budget"]
    seconds = [1e-3 + 1e-6 * pixels * (1 + n / 1e3) for n in range(10)]
    say({"result": {
        "work": {"samples": batch, "pixels": pixels, "useful_pixels": pixels},
        "samples_s": {"step": seconds}, "stop": "precise",
        "warmup": {"settled": side != 32}, "facts": facts,
        "memory": {"host_peak": 1000 + 4 * pixels}}})  # fmt: skip
    return 0


def _fail(say: Say, status: str, message: str) -> int:
    say({"failed": {"status": status, "stage": "measure", "message": message}})
    return 1


def line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
