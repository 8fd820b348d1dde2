"""The environment block of a record: the machine, its limits, its GPUs, the commit."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.instruments import environment

MIB = 2**20


_LOOK = environment._cpu_seconds_of_others


@pytest.fixture(autouse=True)
def _watched(monkeypatch) -> None:
    """Here other processes are looked at, which no other test does."""
    monkeypatch.setattr(environment, "_cpu_seconds_of_others", _LOOK)


def test_processes_that_take_a_core_are_counted(monkeypatch) -> None:
    def process(pid: int, *cpu_seconds: float) -> Any:
        each = iter(SimpleNamespace(user=seconds, system=0.0) for seconds in cpu_seconds)
        return SimpleNamespace(pid=pid, create_time=lambda: 0.0, cpu_times=lambda: next(each))

    there = [process(-1, 5.0, 500.0), process(-2, 7.0, 7.0), process(os.getpid(), 5.0, 500.0)]
    monkeypatch.setattr(environment.psutil, "process_iter", lambda: there)
    assert environment.collect_environment()["load"]["busy_processes"] == 1


def test_a_machine_is_known_again_by_what_stays() -> None:
    machine = environment.collect_environment()["machine"]
    key = environment.machine_key(machine, [{"name": "H100", "memory_bytes": 80}])
    near = machine | {"kernel": "other", "memory_bytes": machine["memory_bytes"] + MIB}
    assert environment.machine_key(near, [{"name": "H100", "memory_bytes": 79}]) == key
    others = [
        environment.machine_key(machine | {"processor": "other"}, [{"name": "H100"}]),
        environment.machine_key(machine | {"cores": 1000}, [{"name": "H100"}]),
        environment.machine_key(machine, [{"name": "A100"}]),
        environment.machine_key(machine, []),
    ]
    assert key not in others and len(set(others)) == 4


@pytest.mark.parametrize(
    ("membership", "files", "cpus", "memory"),
    [
        ("0::/a/b", {"a/memory.max": "1048576", "a/b/memory.max": "max",
                     "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5, 1048576),
        ("4:memory:/a\n2:cpu,cpuacct:/a", {
            "memory/a/memory.limit_in_bytes": "2097152",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000",
            "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0.5, 2097152),
        # A container that is told the host's names.
        ("0::/docker/123", {"memory.max": "1048576", "cpu.max": "200000 100000"}, 2.0, 1048576),
        ("0::/", {}, None, None),
    ],
    ids=["v2", "v1", "container", "none"],
)  # fmt: skip
def test_the_tightest_limit_of_the_groups_around_us_counts(
    membership: str, files: dict[str, str], cpus: float | None, memory: int | None,
    tmp_path, monkeypatch,
) -> None:  # fmt: skip
    for name, text in {"membership": membership, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(environment, "CGROUPS", tmp_path)
    monkeypatch.setattr(environment, "MEMBERSHIP", tmp_path / "membership")
    limits = environment.collect_environment()["limits"]
    assert (limits["cgroup_cpus"], limits["cgroup_memory_bytes"]) == (cpus, memory)


def test_a_commit_is_named_and_a_changed_file_makes_it_dirty(tmp_path, monkeypatch) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.collect_environment()["git"] is None
    git("init", "-q")
    assert environment.collect_environment()["git"] == {"commit": None, "dirty": False}
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "results.jsonl").write_text("not tracked")
    assert environment.collect_environment()["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "code.py").write_text("2")
    assert environment.collect_environment()["git"] == {"commit": commit, "dirty": True}


def test_no_variable_is_read_but_those_listed(monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    variables = environment.collect_environment()["variables"]
    assert variables["OMP_NUM_THREADS"] == "3"
    assert set(variables) <= set(environment.ENVIRONMENT_VARIABLES)
    assert "secret" not in str(environment.collect_environment())


class Nvml:
    """A driver of one card whose ECC cannot be read."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetName": "NVIDIA H100", "nvmlSystemGetDriverVersion": "570.1",
            "nvmlDeviceGetEnforcedPowerLimit": 700_000, "nvmlDeviceGetMigMode": (0, 0),
            "nvmlDeviceGetMaxPcieLinkGeneration": 5, "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }  # fmt: skip
        if name == "nvmlDeviceGetMemoryInfo":
            return lambda gpu: type("Memory", (), {"total": 85 * 10**9})
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in answers:
            raise self.NVMLError("not supported")
        return lambda *_: answers[name]


def test_what_a_gpu_does_not_say_is_null(monkeypatch) -> None:
    driver = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    assert environment.collect_environment()["gpus"] == [
        {"index": 0, "name": "NVIDIA H100", "memory_bytes": 85 * 10**9, "driver": "570.1",
         "power_limit_w": 700.0, "ecc": None, "mig": False, "pcie_generation": 5,
         "pcie_width": 16}
    ]  # fmt: skip
    monkeypatch.setattr(driver, "nvmlDeviceGetCount", contextlib.suppress, raising=False)
    assert environment.collect_environment()["gpus"] is None  # a driver, and no answer
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert environment.collect_environment()["gpus"] == []
