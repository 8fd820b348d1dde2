"""A cluster whose workers leave, stall or lose their network, and whose stores fail for a while."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main

from .cluster_kit import (
    SMALL,
    WORDS,
    Scheduler,
    eventually,
    hidden_from,
    infer,
    place,
    scheduler,
    write_input,
    written,
    written_alone,
)
from .kit import values

__all__ = ["place", "scheduler"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

FOLDER = Path("out.zarr.penstock")
FEWER = (32, 48, 48)
"""A volume of 18 blocks."""


@pytest.fixture
def client() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(
        address: str, *more: str, model: str = "net.py:slow", out: str = "out.zarr"
    ) -> subprocess.Popen[str]:
        words = [*WORDS, "--out-spec", out, "--cluster", address, *more]
        words[words.index("net.py:slow")] = model
        started.append(subprocess.Popen(
            [sys.executable, "-m", "penstock", "infer", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
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
    return " ".join(json.loads((FOLDER / "summary.json").read_text())["notes"])


def blocks_in(logs: Sequence[Path]) -> int:
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return sum(line[0].isdigit() for line in lines)


@pytest.mark.slow
def test_a_worker_that_is_asked_to_leave_writes_what_is_whole_and_is_not_blamed(
    scheduler: Scheduler, client: Start
) -> None:
    """Of the only part, so that all of it is given out again."""
    write_input(FEWER)
    each = ("--normalize", "percentile")  # one block to compute for each to write
    alone = written_alone(*each)
    leaver = scheduler.worker(nanny=True)
    few = (*each, "--parts", "1", "--max-inflight-batches", "4")
    job = client(scheduler.address, *few, model="net.py:slower")
    for _ in eventually():
        if len([*written(FOLDER)]) >= 2:
            break
    log = [*FOLDER.glob("done-*.log")]
    leaver.send_signal(signal.SIGTERM)
    leaver.wait(300)
    assert 2 <= blocks_in(log) < 18  # a block that is complete may or may not wait just then
    assert job.poll() is None
    Path("hurry").touch()
    scheduler.worker()
    code, said = ended(job)
    assert code == 0, said
    assert "died" not in notes() and "failed" not in notes()
    assert np.array_equal(values("out.zarr"), alone)
    assert blocks_in([*FOLDER.glob("done-*.log")]) == 18  # none of them twice


@pytest.mark.slow
# Pairs: each signal as the first, with and without a second, of one worker and of two.
@pytest.mark.parametrize(("signals", "workers"), [("INT", "local:2"), ("TERM INT", "local:1")])
def test_a_client_that_is_asked_to_end_has_its_workers_write_what_is_whole(
    signals: str, workers: str, client: Start, capsys
) -> None:
    """Ctrl-C goes to all processes of a terminal. A second signal waits for no worker: of those,
    each could go on for ten minutes."""
    write_input(FEWER)
    each = ("--normalize", "percentile", "--parts", "2", "--max-inflight-batches", "4")
    first, *second = (getattr(signal, f"SIG{name}") for name in signals.split())
    job = client(workers, *each, "--grace", "600s", model="net.py:slower")
    for _ in eventually():
        if len([*written(FOLDER)]) >= 3:
            break
    os.killpg(job.pid, first) if first == signal.SIGINT else job.send_signal(first)
    answer = f"{first.name}: workers write the blocks that are complete, for 10 min 5 s at most"
    assert any(answer in line for line in job.stderr or ()), "all that it said held no answer"
    for number in second:
        job.send_signal(number)
    code, said = ended(job)
    Path("hurry").touch()
    assert code == 3, said
    assert "Traceback" not in said
    blocks = blocks_in([*FOLDER.glob("done-*.log")])
    assert 3 <= blocks < 18
    why = "interrupted" if second else f"are not written when {first.name} ended the job"
    assert why in said
    assert main(["status", "out.zarr"]) == 3
    line = capsys.readouterr().out
    # A second signal may come when the first has just ended the job, which is noted by then.
    noted = why in line or (second and f"{first.name} ended the job" in line)
    assert line.startswith(f"ended: {blocks} of 18 blocks") and noted
    assert "died" not in line
    if not second:
        each = (*each, "--model-type", "net.py:slower")
        assert infer(*each, "--resume") == 0
        assert json.loads((FOLDER / "summary.json").read_text())["blocks_skipped"] == blocks
        assert np.array_equal(values("out.zarr"), written_alone(*each))


@pytest.mark.slow
def test_what_a_worker_lacks_is_named_with_its_host(scheduler: Scheduler, capsys) -> None:
    """It is on a host of its own, where the folder ``own`` is empty, and there is no GPU."""
    write_input(SMALL)
    Path("own").mkdir()
    hidden = hidden_from("own")
    for name in ("net.py", "in.npy"):
        shutil.copy(name, "own")
    Path("own/net.pt").write_bytes(b"looked for by the worker, and not there")
    scheduler.worker(within=hidden)
    for words, said in {
        ("--model-type", "own/net.py:slow"): "own/net.py:slow: there is no file ",
        ("--weights", "own/net.pt"): "own/net.pt: there is no such file",
        ("--in-spec", "own/in.npy"): "own/in.npy: no such file",
        ("--devices", "cuda"): "--devices cuda: this machine has cpu",
    }.items():
        assert infer(*words, "--cluster", scheduler.address) == 2
        *_, line = capsys.readouterr().err.splitlines()
        # Of a worker that comes late, more is said before.
        assert line.startswith("penstock infer: ") and "on the worker n9: --" in line
        assert said in line
    assert not Path("out.zarr").exists() and not FOLDER.exists()
    assert infer("--cluster", scheduler.address, "--run-dir", "own/run") == 2
    said = capsys.readouterr().err
    assert "does not see the run there; give --run-dir s3://BUCKET/PREFIX" in said
    assert infer("--cluster", scheduler.address, "--run-dir", "run", "--overwrite") == 0


@pytest.mark.slow
def test_a_worker_without_this_penstock_is_named(scheduler: Scheduler, client: Start) -> None:
    """Python finds another package of that name there."""
    Path("theirs/penstock").mkdir(parents=True)
    Path("theirs/penstock/__init__.py").write_text("")
    scheduler.worker(path=str(Path("theirs").absolute()))
    code, said = ended(client(scheduler.address))
    assert code == 2, said
    sentence = said.strip().splitlines()[-1]
    assert sentence.startswith("penstock infer: ")
    assert "it lacks this Penstock (" in sentence
    assert not Path("out.zarr").exists() and not FOLDER.exists()
