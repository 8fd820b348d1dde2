"""The conditions of a machine: what the kernel says of them, and what is doubtful about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.instruments import conditions

from .kit import ENVIRONMENT, GPU, NOW, limits_of


@pytest.mark.parametrize(
    ("environment", "now", "words"),
    [
        ({}, {}, []),
        (limits_of(affinity=2), {}, ["2 of the 8 cores"]),
        (limits_of(cgroup_cpus=1.5), {}, ["1.50 cores"]),
        (limits_of(affinity=1, cgroup_cpus=1.5), {}, ["1 of the 8"]),
        ({}, {"governor": "powersave"}, ["powersave"]),
        ({}, {"throttled": 3}, ["3 times"]),
        ({}, {"steal_percent": 4.0}, ["4.0 %"]),
        ({}, {"swapped": 2**29}, ["512 MiB lie in swap"]),
        ({}, {"busy": [{"name": "x", "pid": 1, "cores": 1.5}]}, ["1.5 of 8"]),
        ({}, {"gpus": [GPU | {"processes": [7, 8]}]}, ["2 processes"]),
        ({}, {"gpus": [GPU | {"throttle_reasons": 0x44}]}, ["power cap", "temperature"]),
        ({}, {"gpus": [GPU | {"throttle_reasons": 0x01}]}, []),  # idle
        ({}, {"gpus": [GPU | dict.fromkeys(set(GPU) - {"index"})]}, []),  # all missing
        ({}, dict.fromkeys(("governor", "throttled", "steal_percent", "gpus")), []),
    ],
)
def test_warnings(environment: dict[str, Any], now: dict[str, Any], words: list[str]) -> None:
    said = conditions.condition_warnings(ENVIRONMENT | environment, NOW | now)
    assert len(said) == len(words)
    for sentence, word in zip(said, words, strict=True):
        assert word in sentence and sentence.endswith(".")


def test_settings_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "SYS", tmp_path)
    assert conditions._read("cpu*/cpufreq/scaling_governor") == []
    cpu = tmp_path / "devices/system/cpu"
    for path, text in {
        "cpu0/cpufreq/scaling_governor": "powersave\n",
        "cpu1/cpufreq/scaling_governor": "powersave\n",
        "cpu0/thermal_throttle/package_throttle_count": "2\n",
        "cpu1/thermal_throttle/package_throttle_count": "2\n",
    }.items():
        (cpu / path).parent.mkdir(parents=True, exist_ok=True)
        (cpu / path).write_text(text)
    monkeypatch.setattr(conditions, "_busy", list)
    now = conditions.read_conditions()
    assert now["governor"] == "powersave"
    assert now["throttled"] == 2  # each core of a package says the package's count
