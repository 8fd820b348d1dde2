"""Scenarios that misbehave, and a program that runs the real worker on them without torch.

python tests/bench/zoo.py REQUEST.json FD         the worker, with a measuring loop of one step
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MIB = 2**20


class Animal:
    """One that behaves; the others step in their own way."""

    device = "cpu"

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case = case
        self.facts: dict[str, Any] = {"kind": type(self).__name__}

    def step(self, phase: Any) -> Mapping[str, float]:
        phase("forward")
        return {"samples": 1.0}

    def close(self) -> None:
        pass


def check(case: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every case is valid."""
    return {**case, "checked": True}, {"kind": "Animal"}


class Placed(Animal):
    """Tells where it runs, and with which threads."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        super().__init__(case)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self.facts |= {name: os.environ.get(name) for name in names}
        self.facts |= {"folder": str(Path.cwd()), "data": Path(case["data"]).read_text()}


class Writes(Animal):
    """Writes a folder, as a training does."""

    def step(self, phase: Any) -> Mapping[str, float]:
        out = Path(self.case["output_dir"])
        out.mkdir(exist_ok=True)
        (out / "result").write_text("done")
        return super().step(phase)


class HostOom(Animal):
    """Takes all it is given, in pieces that are alive when the last is refused."""

    def step(self, phase: Any) -> Mapping[str, float]:
        pieces = []
        while True:
            pieces.append(bytearray(self.case.get("piece", 16 * MIB)))


class CgroupOom(Animal):
    """Enters a control group that is smaller than what it writes to."""

    def step(self, phase: Any) -> Mapping[str, float]:
        Path(self.case["group"], "cgroup.procs").write_text(str(os.getpid()))
        return {"bytes": len(b"x" * self.case["bytes"])}


class Killed(Animal):
    def step(self, phase: Any) -> Mapping[str, float]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class Segfault(Animal):
    def step(self, phase: Any) -> Mapping[str, float]:
        import ctypes

        ctypes.string_at(0)
        return {}


class BadAlloc(Animal):
    """What a C++ thread does where memory is refused."""

    def step(self, phase: Any) -> Mapping[str, float]:
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
        os.abort()


class Hang(Animal):
    """Holds memory, and stays. It tells ``fifo`` its process id and holds that open too."""

    def step(self, phase: Any) -> Mapping[str, float]:
        held = b"x" * self.case.get("bytes", 0)
        for _ in range(self.case.get("children", 0)):
            if os.fork() == 0:
                break
        if "fifo" in self.case:
            os.write(os.open(self.case["fifo"], os.O_WRONLY), b"up\n")
        while True:
            signal.pause()
            assert held is not None


class Babble(Animal):
    """Megabytes of no meaning, on both streams; a model may print."""

    def step(self, phase: Any) -> Mapping[str, float]:
        for stream in (sys.stdout, sys.stderr):
            for _ in range(4 * 16):
                stream.buffer.write(b'{"result": {}}\n\xff\xfe' * (MIB // 16 // 17))
            stream.buffer.write(b"the end\n")
            stream.flush()
        return super().step(phase)


class WrongShape(Animal):
    def step(self, phase: Any) -> Mapping[str, float]:
        from penstock.bench.scenarios import WrongResult

        raise WrongResult("the output has shape (1, 64, 64), not (1, 256, 256)")


class Unsupported(Animal):
    def __init__(self, case: Mapping[str, Any]) -> None:
        from penstock.base.errors import UsageError

        raise UsageError("--dtype float16 is not supported on cpu")


class Raises(Animal):
    def step(self, phase: Any) -> Mapping[str, float]:
        raise KeyError("no such layer\nsecond line")


class Exits(Animal):
    def step(self, phase: Any) -> Mapping[str, float]:
        sys.exit(self.case["code"])


class Leaves(Animal):
    """Ends well, and leaves a process behind that holds every descriptor open."""

    def step(self, phase: Any) -> Mapping[str, float]:
        import subprocess

        hold = f"exec 3>{self.case['fifo']}; echo up >&3; echo up; exec sleep 100"
        left = subprocess.Popen(
            ["/bin/sh", "-c", hold],
            stdout=subprocess.PIPE,
            close_fds=False,
            start_new_session=self.case["escapes"],
        )
        assert left.stdout is not None and left.stdout.readline()
        self.facts["left"] = left.pid
        return super().step(phase)


class CrashesAtExit(Animal):
    """Its result is out before it dies."""

    def close(self) -> None:
        import atexit

        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)


class NotFinite(Animal):
    """No number that JSON knows."""

    def step(self, phase: Any) -> Mapping[str, float]:
        return {"samples": float("nan")}


def _measure(scenario: Any, rules: Any, report: Callable[[str], None]) -> dict[str, Any]:
    report("warmup")
    report("measure")
    work = scenario.step(lambda name: nullcontext())
    return {
        "work": dict(work),
        "samples_s": {"step": [0.5, 0.25, 1.0]},
        "stop": "budget",
        "warmup": {"first_s": 1.0},
        "memory": {},
        "facts": dict(scenario.facts),
    }


class NoTorch:
    """Torch is not installed, as far as the worker sees: to import it takes most of a launch."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "torch":
            raise ModuleNotFoundError(name)


def measuring_loop() -> ModuleType:
    """In place of `penstock.bench.measure`: one step, which is not timed."""
    loop = ModuleType("penstock.bench.measure")
    loop.measure_scenario = _measure  # type: ignore[attr-defined]
    loop.Rules = SimpleNamespace(model_validate=dict)  # type: ignore[attr-defined]
    return loop


if __name__ == "__main__":
    sys.modules["penstock.bench.measure"] = measuring_loop()
    sys.meta_path.insert(0, NoTorch())
    from penstock.bench.launch.worker import main

    sys.exit(main(*sys.argv[1:]))
