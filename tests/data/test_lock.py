"""The lock of an output: who gets it, who is kept out, and what a member of a run may do."""

import json
import os
import platform
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.data import Box, Sink, open_sink, open_source
from penstock.data.stores import lock_place as room
from penstock.data.stores.lock import Lost, OutputLock, run_at


def output(path: Path) -> Sink:
    like = open_source(np.zeros((1, 1, 8), "uint8"))
    return open_sink(str(path), domain=Box((0,) * 5, (1, 1, 1, 1, 8)), dtype=like.dtype, like=like)


@pytest.fixture
def sinks(tmp_path) -> list[Sink]:
    return [output(tmp_path / "out.zarr")]


@pytest.fixture
def away(monkeypatch) -> Any:
    """Makes this process one of another machine from then on."""
    return lambda: monkeypatch.setattr(room, "_machine", lambda: "another")


def test_of_many_runs_that_want_an_output_at_once_one_gets_it(tmp_path) -> None:
    barrier = threading.Barrier(8)

    def wants(number: int) -> OutputLock | UsageError:
        sink = output(tmp_path / "out.zarr")
        barrier.wait()
        try:
            return OutputLock.take([sink], f"run {number}")
        except UsageError as refused:
            return refused

    for _ in range(4):
        with ThreadPoolExecutor(8) as threads:
            got = [*threads.map(wants, range(8))]
        (lock,) = (each for each in got if isinstance(each, OutputLock))
        lock.check()
        lock.release()


def test_the_same_run_is_never_refused_and_another_until_it_is_released(sinks: list[Sink]) -> None:
    first = OutputLock.take(sinks, "a", folder="/runs/a")
    second = OutputLock.take(sinks, "a")
    first.release()  # the lock is the second one's by now
    with pytest.raises(UsageError, match=r"is writing it for run a since .*; end it first$"):
        OutputLock.take(sinks, "b", take_over=True)  # no knob takes it from a process that lives
    second.check()
    second.release()
    assert run_at(sinks[0]) is None, "the run ended before it made the output"
    third = OutputLock.take(sinks, "b")
    third.name()
    third.release()
    assert run_at(sinks[0]) == "b"


def test_the_lock_of_an_ended_process_is_taken(tmp_path, sinks: list[Sink], away: Any) -> None:
    """Of one that is not there any more, and of one whose number another process has by now."""
    killed, lock = subprocess.Popen(["true"]), tmp_path / "out.zarr.penstock-lock"
    killed.wait()
    OutputLock.take(sinks, "killed", folder="run")
    mine = lock.read_text()

    def of(process: int) -> str:
        return mine.replace(f'"pid": {os.getpid()}', f'"pid": {process}')

    lock.write_text(re.sub(r'"started": [\d.]+', '"started": 1.0', of(os.getppid())))
    OutputLock.take(sinks, "b").release()
    before = of(killed.pid)
    lock.write_text(before)
    OutputLock.take(sinks, "b").release()
    lock.write_text(before)
    away()
    with pytest.raises(UsageError, match=rf"run killed of run holds it .*process {killed.pid} on"):
        OutputLock.take(sinks, "b")
    assert lock.read_text() == before
    OutputLock.take(sinks, "b", take_over=True).check()


def test_a_run_without_its_folder_holds_nothing(tmp_path, sinks: list[Sink], monkeypatch) -> None:
    """That of an array, and one of before a reboot; not one in another container."""
    folder, file = tmp_path / "out.zarr.penstock", tmp_path / "out.zarr.penstock-lock"
    host, boot, space = platform.node(), "boot", "pid:[1]"
    monkeypatch.setattr(room, "_machine", lambda: f"{host} {boot} {space}")

    def refused() -> bool:
        try:
            OutputLock.take(sinks, "b").release()
        except UsageError as error:
            return f"of {folder} holds it" in str(error)
        return False

    OutputLock.take(sinks, "a", folder=folder)
    held = file.read_text()
    space = "pid:[2]"
    assert refused(), "its process may live in another container"
    boot = "next boot"
    folder.mkdir()
    assert refused(), "it may be gone on with"
    folder.rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(room.platform, "node", lambda: "another")
        assert refused() and file.read_text() == held
    assert not refused()
    prepared = OutputLock.take(sinks, "a", folder=folder)
    folder.mkdir()
    prepared.hand_over()
    assert refused()
    folder.rmdir()
    assert not refused()
    with pytest.raises(Lost, match="has taken it"):
        prepared.check()


def test_a_run_whose_output_was_taken_over_writes_nothing(sinks: list[Sink], away: Any) -> None:
    first = OutputLock.take(sinks, "a")
    member = OutputLock.take(sinks, "a", member=True)
    away()
    second = OutputLock.take(sinks, "b", take_over=True)
    for lost in (first, member):
        with pytest.raises(Lost, match=r"this run has lost .*: run b has taken it; nothing more"):
            lost.check()
        lost.release()
    second.check()
    with pytest.raises(Lost):
        OutputLock.take(sinks, "a", member=True)


def test_members_join_a_lock_that_is_handed_over(sinks: list[Sink], tmp_path) -> None:
    with pytest.raises(Lost, match="was removed"):
        OutputLock.take(sinks, "a", member=True)
    prepared = OutputLock.take(sinks, "a")
    prepared.name()
    prepared.hand_over()
    prepared.release()
    with pytest.raises(UsageError, match=r"no single process on .*--take-over takes the output$"):
        OutputLock.take(sinks, "b")
    member = OutputLock.take(sinks, "a", member=True)
    member.check()
    member.release()
    (held,) = json.loads((tmp_path / "out.zarr.penstock-lock").read_text())["outputs"].values()
    assert held["made_by"] == "a" and held["holder"]["pid"] is None
    OutputLock.take(sinks, "a").release()
    member.check()  # released, and still its run's
    OutputLock.take(sinks, "b")
    with pytest.raises(Lost):
        member.check()
