"""The steps of a rank: their times, their rows on disk, and the checkpoints between them."""

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.instruments.spans import DevicePhaseTimer, PhaseTimer

from ..device_queue import DeviceQueue
from .kit import rows

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_phases_add_up_to_the_step() -> None:
    ticks = iter([0.0, 1.0, 3.0, 3.5, 10.0, 10.0, 12.0])
    timer = PhaseTimer(lambda: next(ticks))
    timer.begin()
    for phase in ("data_wait", "forward", "data_wait"):
        timer.end_phase(phase)
    timer.end()
    timer.begin()
    timer.end_phase("data_wait")
    timer.end_phase("forward")
    timer.end()
    assert timer.drain() == [
        {"step": 3.5, "data_wait": 1.5, "forward": 2.0},
        {"step": 2.0, "data_wait": 0.0, "forward": 2.0},
    ]
    assert timer.drain() == []


def queue() -> DeviceQueue:
    """One in which the host, whose clock stands at 0, queues work in no time."""
    return DeviceQueue(SimpleNamespace(now=0.0), queueing_s=0.0)


def test_phases_of_a_device_with_batches_that_add_up() -> None:
    """The host waits 1 and 20 s for data, and launches in no time."""
    stream = queue()
    timer = DevicePhaseTimer(stream)
    timer.begin()
    for wait, forward in ((1.0, 4.0), (20.0, 5.0)):
        stream.clock.now += wait
        timer.end_phase("data_wait")
        stream.launch(0.5)
        timer.end_phase("transfer")
        stream.launch(forward)
        timer.end_phase("forward")
    stream.launch(100)
    timer.end_phase("optimizer")
    timer.end()
    assert timer.drain() == [  # of the 20 s the device had work for 4.5
        {"step": 126.5, "data_wait": 16.5, "transfer": 1.0, "forward": 9.0, "optimizer": 100.0}
    ]


@pytest.mark.parametrize(
    ("loading", "wait", "step"),
    [pytest.param(0.75, 0.0, 1.0, id="ahead"), pytest.param(1.5, 0.5, 1.5, id="behind")],
)
def test_a_wait_for_data_is_the_devices(loading: float, wait: float, step: float) -> None:
    """A device that computes for 1 s a step does not wait for a loader that is quicker, though the
    host does; and the host, which only queues, knows no step's length."""
    stream = queue()
    timer = DevicePhaseTimer(stream)
    for _ in range(4):
        timer.begin()
        stream.clock.now += loading
        timer.end_phase("data_wait")
        stream.launch(1.0)
        timer.end_phase("forward")
        timer.end()
    first, *others = timer.drain()
    assert first == {"step": loading + 1, "data_wait": loading, "forward": 1.0}
    assert others == [{"step": step, "data_wait": wait, "forward": 1.0}] * 3
    assert timer.drain() == []


def test_half_a_row_of_a_killed_process_is_no_step(tmp_path) -> None:
    from penstock.training.results import StepLog

    log = StepLog(tmp_path, 0, 0)
    for step in (1, 2, 3):
        log.add(step, 0, 8, 0.5, {"step": 0.25})
    log.close()
    log.path.write_text(log.path.read_text()[:-9])
    log = StepLog(tmp_path, 0, 3)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"], "on disk before a step is taken"
    log.add(3, 0, 8, 0.5, {"step": 0.25})
    assert log.summary()["step"] == {"total_s": 0.75, "median_s": 0.25}
    log.close()


def test_the_best_epoch_is_the_earlier_of_equal_ones(tmp_path) -> None:
    from penstock.training.checkpoint import Checkpoints

    kept = Checkpoints(tmp_path, lambda *_: None, writes=True, judge="rmse", higher=False)
    scores = [math.nan, math.nan, 3.0, math.nan, 2.0, 2.0, 5.0, 1.0]
    firsts = [kept.rank(epoch, {"rmse": score}) for epoch, score in enumerate(scores)]
    assert firsts == [True, False, True, False, True, False, False, True]
    assert kept.best == {"score": 1.0, "epoch": 7, "scores": {"rmse": 1.0}}


def test_a_write_that_fails_leaves_the_checkpoint_before(tmp_path) -> None:
    from penstock.training.checkpoint import Checkpoints

    def write(path: Path, state: Mapping[str, Any]) -> None:
        path.write_text(state["text"][:3])
        if state["text"] == "second":
            raise OSError("disk full")

    kept = Checkpoints(tmp_path, write, writes=True, judge="x", higher=True)
    kept.save({"text": "first"})
    with pytest.raises(OSError, match="disk full"):
        kept.save({"text": "second"})
    assert (tmp_path / "checkpoints" / "last.pt").read_text() == "fir"
