"""The place of a worker in a job of a cluster, in this process: it hangs, or its client is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.base.errors import Incomplete, StageError
from penstock.cluster import UnfitWorker, WorkerLeaves
from penstock.inference.opening import identity
from penstock.inference.opening.job import Job
from penstock.inference.run_folder.ending import EndRequest
from penstock.inference.run_folder.journal import Prepared
from penstock.inference.run_folder.log_file import LogFile
from penstock.inference.sharing import station, statistics
from penstock.inference.sharing.station import JobOrder, part_task
from penstock.inference.stages.beginning import begun

from .cluster_kit import HANGS, eventually
from .kit import Array
from .test_spill_run import settings, values, volume

__all__ = ["volume"]  # a fixture
Begin = Callable[..., JobOrder]
FOLDER = Path("out.zarr.penstock")


class Dask:
    """What a task asks of Dask: it says whether a client waits, and counts workers that leave."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left, self.wanted = 0, True
        patch.setattr(station, "tell_begun", lambda *_: None)
        patch.setattr(station, "tell_progress", lambda *_, **__: None)
        patch.setattr(station, "leave_after_task", self.leave)
        patch.setattr(station, "still_wanted", lambda: lambda: self.wanted)

    def leave(self) -> None:
        self.left += 1


@pytest.fixture
def dask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dask]:
    yield Dask(monkeypatch)
    for place in [*station._STATIONS.values()]:
        place.close()
    station._STATIONS.clear()


@pytest.fixture
def order() -> Iterator[Begin]:
    """Begins a job as a client does."""
    with contextlib.ExitStack() as clients:

        def begin(**knobs: Any) -> JobOrder:
            job = Job(settings(**{"cluster": "local:2", "workers": 2, "parts": 4, **knobs}))
            assert job.plan.parts is not None
            step = job.plan.parts.step
            journal, claims = clients.enter_context(begun(job, Prepared(step, 1)))
            for sink in job.sinks:
                sink.create()
            config = job.config.model_copy(update={"resume": True, "run_dir": FOLDER.absolute()})
            return JobOrder("topic", config, step, 1, journal.run, claims.owner, 1)

        yield begin


def test_a_worker_whose_stage_hangs_leaves_and_other_parts_are_not_judged_by_it(
    dask: Dask, order: Begin, volume: Array
) -> None:
    Path("hangs.py").write_text(HANGS)
    Path("hangs").touch()
    given = order(model_type="hangs.py:net", stall_timeout=600, spill="never")
    worker = station._station(given).worker
    worker.watch.watchdog.clock = lambda: 1000.0 if Path("hung").exists() else 0.0
    with pytest.raises(StageError, match="no progress for 10 min"):
        part_task(given, 0)
    assert dask.left == 1
    with pytest.raises(WorkerLeaves, match="a stage that hangs"):
        part_task(given, 1)
    worker.watch.request = EndRequest()  # as if it did not leave: the thread still hangs
    worker.compute(range(len(worker.parts)), {})
    assert np.allclose(values("out.zarr")[0, 0], volume, atol=0.01)
    Path("hangs").unlink()


def test_a_place_that_no_task_comes_to_is_given_up_and_taken_again(
    dask: Dask, order: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = order()
    monkeypatch.setattr(station, "IDLE_S", 0.05)
    names = {part_task(given, 0)["name"]}
    for _ in eventually(30):
        if not any(map(is_held, FOLDER.glob("done-*.log"))):
            break
    assert not station._STATIONS
    monkeypatch.setattr(station, "IDLE_S", 60)
    second = part_task(given, 1)
    names.add(second["name"])
    assert len(names) == 2 and second["summary"]["units_written"] > 0
    assert {log.name for log in FOLDER.glob("done-*.log")} == {f"done-{n}.log" for n in names}


def test_a_worker_reads_what_was_counted_in_a_round_once(
    dask: Dask, order: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task would read all that was counted before it."""
    given, read, merge = order(normalize="global"), [], statistics._merge

    def noted(packed: bytes | None, histograms: Any) -> None:
        read.append(packed)
        merge(packed, histograms)

    monkeypatch.setattr(statistics, "_merge", noted)
    for _ in range(2):  # float32 is counted in two rounds
        assert station.lacks(given, 0) == "lacking"
        assert station.count_task(given, 0) == "counted"
    assert station.lacks(given, 0) == "known"
    assert part_task(given, 0)["summary"]["units_written"] > 0
    assert len(read) == 2


def test_a_part_that_nobody_waits_for_ends(dask: Dask, order: Begin) -> None:
    given, dask.wanted = order(), False
    with pytest.raises(Incomplete, match="nobody waits for the part"):
        part_task(given, 0)
    dask.wanted = True
    assert part_task(given, 0)["summary"]["units_written"] > 0
    assert not (FOLDER / "error.txt").exists()


def is_held(log: Path) -> bool:
    """Whether a process, maybe this one, writes a log."""
    try:
        LogFile(log).close()
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("name", ["torch", "threads"])
def test_a_worker_of_another_maker_is_left_out_by_what_differs(
    name: str, dask: Dask, order: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, ours = order(), identity.maker
    other = {"torch": "1.13.0", "threads": 7}[name]
    monkeypatch.setattr(identity, "maker", lambda *args: {**ours(*args), name: other})
    with pytest.raises(UnfitWorker) as caught:
        part_task(given, 0)
    said = str(caught.value)
    assert f"it has {name} {other!r}, and the run was made with" in said
    assert said.endswith("which may change voxels; --mixed-arithmetic takes such workers as well")
    assert "--resume" not in said and "--overwrite" not in said


def test_a_worker_that_does_not_see_the_weights_is_left_out(dask: Dask, order: Begin) -> None:
    """The client and another worker have seen them."""
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.GELU(), nn.Conv3d(4, 1, 3, padding=1))
    torch.save(net.state_dict(), "net.pt")
    given = order(weights="net.pt")
    Path("net.pt").unlink()
    with pytest.raises(UnfitWorker, match=r"--weights net\.pt: there is no such file"):
        part_task(given, 0)
