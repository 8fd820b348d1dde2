"""The measuring loop, under a clock that the tests turn."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench import Rules, measure_scenario
from penstock.bench import measure as under_test
from penstock.bench.scenarios import Phase, WrongResult

from ..device_queue import DeviceQueue
from ..preloaded import started

RULES = Rules(seconds=5.0, precision=0.01)


class Clock:
    """Stands still until it is turned."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """Each step takes the seconds that come next, a quarter of them in phase ``forward``."""

    device = "cpu"

    def __init__(self, clock: Clock, seconds: Iterator[float]) -> None:
        self.facts: Mapping[str, Any] = {"model": "scripted"}
        self.work: dict[str, float] = {"samples": 2}
        self.steps = 0
        self._clock, self._seconds = clock, seconds

    def step(self, phase: Phase) -> Mapping[str, float]:
        seconds = next(self._seconds)
        self.steps += 1
        self._clock.now += seconds / 4
        phase("forward")
        self._clock.now += seconds * 3 / 4
        return dict(self.work)

    def close(self) -> None: ...


def run(seconds: Iterator[float], rules: Rules = RULES) -> tuple[dict[str, Any], list[str]]:
    clock, stages = Clock(), list[str]()
    return measure_scenario(Scripted(clock, seconds), rules, stages.append, clock), stages


def test_a_steady_scenario() -> None:
    result, stages = run(chain([3.0, 0.2, 0.03], repeat(0.02)))
    assert stages == ["warmup", "measure"]
    assert result["warmup"]["first_s"] == pytest.approx(3.0)
    assert result["warmup"]["samples_s"][:2] == pytest.approx([0.2, 0.03])
    assert result["warmup"]["settled"] is True
    assert result["warmup"]["compile_s"] is None
    assert result["stop"] == "precise"
    assert result["steps_per_sample"] == 1
    assert result["samples_s"]["step"] == pytest.approx([0.02] * len(result["samples_s"]["step"]))
    assert len(result["samples_s"]["step"]) >= RULES.min_samples
    assert result["samples_s"]["forward"] == pytest.approx(
        [s / 4 for s in result["samples_s"]["step"]]
    )
    assert result["work"] == {"samples": 2}
    assert result["facts"] == {"model": "scripted"}
    assert result["clocks"] == []


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [
        (2e-5, 50),  # blocks of a millisecond
        (2e-3, 1),
        (0.3, 1),
    ],
)
def test_short_steps_are_timed_together(step_s: float, steps: int) -> None:
    result, _ = run(repeat(step_s))
    assert result["steps_per_sample"] == steps
    assert result["samples_s"]["step"][0] == pytest.approx(step_s)
    assert result["samples_s"]["forward"][0] == pytest.approx(step_s / 4)


def test_what_never_settles_is_said_to_be_unstable() -> None:
    result, _ = run(0.01 * 1.05**n for n in range(10_000))
    assert result["warmup"]["settled"] is False
    assert sum(result["warmup"]["samples_s"]) <= RULES.warmup_seconds * 1.1


def test_sampling_ends_with_its_budget() -> None:
    noise = np.random.default_rng(0).lognormal(math.log(0.4), 0.5, 10_000)
    result, _ = run(iter(noise.tolist()))
    spent = sum(result["samples_s"]["step"])
    assert result["stop"] == "budget"
    assert RULES.seconds <= spent < RULES.seconds + noise.max()


@given(st.floats(1e-5, 0.1), st.floats(0, 0.4), st.integers(0, 99))
def test_samples_are_never_dropped_and_it_always_ends(step: float, noise: float, seed: int) -> None:
    """All steps are accounted for: one first, the warm-up's, and whole windows."""
    clock = Clock()
    values = step * np.random.default_rng(seed).lognormal(0, noise, 5_000)
    scenario = Scripted(clock, chain(values.tolist(), repeat(step)))
    result = measure_scenario(scenario, RULES, lambda _: None, clock)
    samples, warmup = result["samples_s"]["step"], result["warmup"]["samples_s"]
    assert scenario.steps == 1 + len(warmup) + len(samples) * result["steps_per_sample"]
    assert result["stop"] in ("precise", "noise_stable", "budget")
    timed = result["warmup"]["first_s"] + sum(warmup) + sum(samples) * result["steps_per_sample"]
    assert timed == pytest.approx(clock.now - 100.0)


def test_a_step_of_other_work_is_a_wrong_result() -> None:
    clock = Clock()
    scenario = Scripted(clock, repeat(0.01))

    def changing(phase: Phase) -> Mapping[str, float]:
        scenario.work["samples"] = 2 if scenario.steps < 5 else 1
        return Scripted.step(scenario, phase)

    scenario.step = changing  # type: ignore[method-assign]
    with pytest.raises(WrongResult, match=r"'samples': 1.*'samples': 2"):
        measure_scenario(scenario, RULES, lambda _: None, clock)


def test_a_window_on_a_device_is_synchronised_once_and_read_after() -> None:
    clock = Clock()
    backend = DeviceQueue(clock)

    class Queued(Scripted):
        def step(self, phase: Phase) -> Mapping[str, float]:
            backend.launch(0.010)
            phase("forward")
            backend.launch(0.020)
            phase("backward")
            return self.work

    windows = under_test.Windows(Queued(clock, repeat(0)), clock, backend)
    made = []
    for _ in range(3):
        syncs, seconds = backend.syncs, windows.sample(4)
        assert backend.syncs - syncs <= 3, "with nothing queued, at the end, and as it is read"
        assert seconds["device"] == pytest.approx((0.001 + 4 * 0.030) / 4)
        assert seconds["step"] == pytest.approx((0.001 + 4 * 0.030) / 4), "the host ran ahead"
        assert seconds["forward"] == pytest.approx(0.010, abs=0.001)
        assert seconds["backward"] == pytest.approx(0.020, abs=0.001)
        made.append(backend.events)
    assert made[1] == made[2], "events are made once"


def test_device_memory_and_clocks(monkeypatch) -> None:
    """The driver is asked between windows, and its peak is above what it held before the launch."""
    import torch

    clock = Clock()
    backend = DeviceQueue(clock)
    backend.memory_allocated = lambda: 10
    backend.max_memory_allocated = lambda: 20
    backend.max_memory_reserved = lambda: 30
    backend.memory_stats = lambda: {"num_alloc_retries": 2}
    backend.set_device = lambda device: None
    monkeypatch.setattr(torch, "cuda", backend)
    held = chain([1700, 1900], repeat(1800))
    gpu = SimpleNamespace(used=lambda: next(held), clocks=lambda: {"sm_mhz": 1980})
    monkeypatch.setattr("penstock.bench.measure.Gpu", lambda device: gpu)

    scenario = Scripted(clock, repeat(0.3))
    scenario.device = "cuda:0"
    scenario.driver_before = 400  # type: ignore[attr-defined]
    result = measure_scenario(scenario, RULES, lambda _: None, clock)
    host = dict.fromkeys(("host_peak_kernel", "host_shared", "host_counted"))
    assert result["memory"] | host == {
        **host,
        "device_allocated": 10,
        "device_peak": 20,
        "device_reserved": 30,
        "device_driver": 1500,
        "alloc_retries": 2,
    }
    times = [reading.pop("t") for reading in result["clocks"]]
    assert result["clocks"] == [{"sm_mhz": 1980}] * len(times)
    assert len(times) >= 3 and min(np.diff(times)[:-1]) >= under_test.CLOCKS_EVERY_S


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count")
def test_what_a_limit_counts_is_the_peak_of_what_was_mapped_touched_or_not(tmp_path) -> None:
    """In a process of its own: 512 MiB that nobody touched count, and go on counting when gone."""
    code = (
        "import mmap, json\n"
        "from penstock.bench.measure import host_memory\n"
        "before = host_memory()\n"
        "mmap.mmap(-1, 2**29, flags=mmap.MAP_PRIVATE).close()\n"
        "print(json.dumps([before, host_memory()]))"
    )
    started(tmp_path, code=code).join()
    before, after = json.loads((tmp_path / "said").read_text())
    assert after["host_counted"] - before["host_counted"] > 0.9 * 2**29
    assert after["host_peak_kernel"] - before["host_peak_kernel"] < 2**27


@pytest.mark.parametrize(("steps", "phases"), [(1, 0), (1, 3), (50, 3)])
def test_inside_a_window_nothing_but_its_phases_reads_the_clock(steps: int, phases: int) -> None:
    """What the loop itself adds to a step is one comparison of its work."""
    clock, readings = Clock(), 0

    def counted() -> float:
        nonlocal readings
        readings += 1
        return clock()

    class Empty(Scripted):
        def step(self, phase: Phase) -> Mapping[str, float]:
            for number in range(phases):
                clock.now += 1e-3
                phase(str(number))
            clock.now += 1e-3
            return self.work

    windows = under_test.Windows(Empty(clock, repeat(0)), counted, None)
    windows.sample(1)
    readings = 0
    seconds = windows.sample(steps)
    # Two around the window, one at its begin and its end, and one after each phase and each step.
    assert readings == 4 + (phases + 1) * steps * (phases > 0)
    names = {"step": 1e-3 * (phases + 1)} | {str(n): 1e-3 for n in range(phases)}
    assert seconds == pytest.approx(names)
