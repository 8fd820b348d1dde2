"""A cluster whose workers leave, stall or lose their network, and whose stores fail for a while."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main

from .cluster_kit import (
    WORDS,
    Scheduler,
    Stall,
    alone,
    eventually,
    infer,
    place,
    scheduler,
    values,
    written,
)
from .faulty_s3 import door_to, get, new
from .kit import Array

__all__ = ["alone", "place", "scheduler"]  # fixtures

pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

FOLDER = Path("out.zarr.penstock")


@pytest.fixture
def client() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a job on the workers of a scheduler, in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(
        address: str, *more: str, model: str = "net.py:slow", out: str = "out.zarr"
    ) -> subprocess.Popen[str]:
        words = [*WORDS, "--out-spec", out, "--cluster", address, *more]
        words[words.index("net.py:slow")] = model
        started.append(subprocess.Popen(
            [sys.executable, "-m", "penstock", "infer", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., subprocess.Popen[str]]


def ended(job: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and the last words on standard error."""
    out, said = job.communicate(timeout=500)
    return job.returncode, f"{said[-2000:]}\n{out[-2000:]}"


def notes() -> str:
    """What the summary says of the workers."""
    return " ".join(json.loads((FOLDER / "summary.json").read_text())["notes"])


def units_in(logs: Sequence[Path]) -> int:
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return sum(line[0].isdigit() for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("nanny", [False, True], ids=["alone", "nanny"])
def test_a_worker_that_is_asked_to_leave_writes_what_is_whole_and_is_not_blamed(
    nanny: bool, scheduler: Scheduler, client: Start
) -> None:
    """Of the only part, so that all of it is given out again."""
    each = ("--normalize", "percentile")  # one block to compute for each to write
    assert infer(*each, out="alone.zarr") == 0
    leaver = scheduler.worker(nanny=nanny)
    few = (*each, "--parts", "1", "--max-inflight-batches", "4")
    job = client(scheduler.address, *few, model="net.py:slower")
    for _ in eventually():
        if len([*written(FOLDER)]) >= 2:
            break
    log = [*FOLDER.glob("done-*.log")]
    leaver.send_signal(signal.SIGTERM)
    before = units_in(log)
    leaver.wait(300)
    assert before < units_in(log) < 60
    assert job.poll() is None
    scheduler.worker()
    code, said = ended(job)
    assert code == 0, said
    assert "died" not in notes() and "failed" not in notes()
    assert np.array_equal(values("out.zarr"), values("alone.zarr"))
    assert units_in([*FOLDER.glob("done-*.log")]) == 60  # none of them twice


@pytest.mark.slow
@pytest.mark.parametrize("for_ever", [False, True], ids=["a while", "for ever"])
@pytest.mark.parametrize("what", ["network", "process"])
def test_a_worker_that_falls_silent_is_done_without(
    what: str, for_ever: bool, client: Start, alone: Array, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker without a network goes on to write, while another one does the same part."""
    scheduler = Scheduler(DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL="60s")
    stall = Stall()
    try:
        silent = scheduler.worker(stall=stall)
        scheduler.worker()
        job = client(scheduler.address, "--parts", "40", model="net.py:slower")
        for _ in eventually():
            logs = [*FOLDER.glob("done-*.log")]
            if len(logs) == 2 and all(units_in([log]) for log in logs):
                break
        if what == "network":
            stall.open.clear()
        else:
            silent.send_signal(signal.SIGSTOP)
        time.sleep(8)
        assert main(["status", "out.zarr"]) == 0
        assert re.match(r"running: \d+ of 60 .*, 2 workers, ", capsys.readouterr().out)
        if not for_ever:
            stall.open.set()
            silent.send_signal(signal.SIGCONT)
        code, said = ended(job)
        assert code == 0, said
        assert ("1 worker died on the way" in notes()) == for_ever
        assert "failed" not in notes() and "Left out" not in notes()
        assert np.array_equal(values("out.zarr"), alone)
        assert main(["status", "out.zarr"]) == 0
        assert (", 1 worker died" in capsys.readouterr().out) == for_ever
    finally:
        stall.close()
        scheduler.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["older", "shadowed"])
def test_workers_of_another_penstock_are_named_and_do_nothing(
    kind: str, scheduler: Scheduler, client: Start
) -> None:
    """One is older by what is installed; of the other, Python finds a package of that name."""
    if kind == "older":
        Path("theirs/penstock_dl-0.0.1.dist-info").mkdir(parents=True)
        about = Path("theirs/penstock_dl-0.0.1.dist-info/METADATA")
        about.write_text("Metadata-Version: 2.1\nName: penstock-dl\nVersion: 0.0.1\n")
    else:
        Path("theirs/penstock").mkdir(parents=True)
        Path("theirs/penstock/__init__.py").write_text("")
    scheduler.worker(path=str(Path("theirs").absolute()))
    code, said = ended(client(scheduler.address))
    assert code == 2, said
    sentence = said.strip().splitlines()[-1]
    assert sentence.startswith("penstock infer: ")
    why = {
        "older": "it has Penstock 0.0.1, here it is",
        "shadowed": "it has Penstock not at all, here",
    }
    assert why[kind] in sentence
    assert not Path("out.zarr").exists() and not FOLDER.exists()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [4, 45], ids=["a moment", "longer than a lease"])
def test_a_store_that_is_restarted_is_waited_for_by_client_and_workers(
    seconds: float, s3_endpoint: str, client: Start, alone: Array
) -> None:
    with door_to(s3_endpoint) as door:
        once = {"context": {"s3_request_retries": {"max_retries": 1, "initial_delay": "10ms"}}}
        out = {**new(door, "out", alone[0, 0], 16), **once}
        job = client("local:2", "--parts", "12", "--run-dir", str(FOLDER), out=json.dumps(out))
        for _ in eventually():
            if len([*written(FOLDER)]) >= 3:
                break
        door.close()
        time.sleep(seconds)
        assert job.poll() is None
        door.open()
        code, said = ended(job)
        assert code == 0, said
        assert np.array_equal(get(door, "out"), alone[0, 0])
    assert "died" not in notes() and "failed" not in notes()
    rows = [*FOLDER.glob("retries-*.jsonl")]
    assert rows and "Could not connect" in rows[0].read_text()
    assert json.loads((FOLDER / "summary.json").read_text())["retries"] > 0
    units = units_in([*FOLDER.glob("done-*.log")])
    assert units == 60
