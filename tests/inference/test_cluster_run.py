"""A volume on the workers of a cluster: real processes, which are killed, join late or differ."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.cli import main
from penstock.cluster import tasks
from penstock.inference.run_folder.local import folder_at

from ..preloaded import forked_workers, started
from .cluster_kit import (
    QUICK,
    SHAPE,
    SMALL,
    WORDS,
    Scheduler,
    alone,
    eventually,
    infer,
    make_blocks_small,
    other_torch,
    place,
    scheduler,
    values,
    write_input,
    written,
    written_alone,
)
from .kit import Array

__all__ = ["alone", "place", "scheduler"]  # fixtures

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def workers_of(client: int) -> list[psutil.Process]:
    """The processes of a local cluster that compute: those that have a log of their own open."""
    return [
        process
        for process in psutil.Process(client).children(recursive=True)
        if any("done-" in file.path for file in _files(process))
    ]


def _files(process: psutil.Process) -> list[Any]:
    try:
        return process.open_files()
    except psutil.Error:
        return []


class Killer:
    """Kills a worker at random moments, so many times. Before each death there is progress: on a
    busy machine three of them would else meet one task, or the first meet none."""

    def __init__(self, times: int, pause: float) -> None:
        self.left, self.pause, self.random = times, pause, random.Random(0)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._kill)

    def __enter__(self) -> Killer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _kill(self) -> None:
        before = 0
        while self.left and not self.ended.wait(self.pause * (0.5 + self.random.random())):
            workers, now = workers_of(os.getpid()), before
            with contextlib.suppress(OSError):  # another run removes the logs
                now = len([*written(Path("out.zarr.penstock"))])
            if workers and now != before:
                self.random.choice(workers).kill()
                self.left, before = self.left - 1, now
        Path("hold").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("kills", "spill"),
    [
        (1, "never"),
        pytest.param(20, "never", marks=pytest.mark.slow),
        pytest.param(3, "always", marks=pytest.mark.slow),
    ],
)
def test_workers_that_are_killed_at_random_change_no_byte(
    kills: int, spill: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words: tuple[str, ...] = ("--parts", "30")
    if spill == "always":
        make_blocks_small(monkeypatch)
    if kills == 1:
        write_input(SMALL)
        words = QUICK
    alone = written_alone(*words)
    before = dict(os.environ)  # torch may have added to it by now
    # Those of a small volume would else be done before one is killed. So two make 4 of 6 blocks.
    Path("hold").write_text("16")
    with forked_workers(), Killer(kills, pause={1: 0.1, 3: 0.5, 20: 0.7}[kills]) as killer:
        words = ("--cluster", "local:2", "--spill", spill, *words)
        code = infer(*words)
        for _ in range(3 * kills):
            if code in (1, 2) or (code == 0 and not killer.left):
                break  # a part may be the one of three deaths, and is left for another run
            code = infer(*words, "--resume" if code == 3 else "--overwrite")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert killer.left == 0
    assert dict(os.environ) == before
    assert np.array_equal(values("out.zarr"), alone)
    assert " died " in said.out + said.err
    assert len(list(Path("out.zarr.penstock").glob("done-*.log"))) >= 2
    summary = json.loads(Path("out.zarr.penstock/summary.json").read_text())
    whole = summary["voxels"] == alone.size  # those of workers that died among them
    assert whole or summary["units_skipped"], "a part that was given up is done by another run"
    assert ("join" in summary["stages"]) == (spill == "always")
    assert not Path("out.zarr.penstock/spill").exists()


@pytest.mark.parametrize(
    ("workers", "run_dir", "spill"),
    [
        ("one of a scheduler", "out.zarr.penstock", "never"),
        pytest.param("two of a scheduler", "out.zarr.penstock", "never", marks=pytest.mark.slow),
        # Pairs: each place of the run folder and each way to spill, on workers of this machine.
        pytest.param("local:2", "out.zarr.penstock", "always", marks=pytest.mark.slow),
        pytest.param("local:2", "s3://test-bucket/runs/shared", "never", marks=pytest.mark.slow),
    ],
)
def test_a_client_that_is_killed_is_taken_over_by_another(
    workers: str, run_dir: str, spill: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if "://" in run_dir:
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
    folder = folder_at(run_dir if "://" in run_dir else Path(run_dir))
    if spill == "always":
        make_blocks_small(monkeypatch)
    with contextlib.ExitStack() as stack:
        more, units = ("--model-type", "net.py:held", "--parts", "30"), 5
        if few := workers == "one of a scheduler":
            write_input(SMALL)
            more, units = QUICK, 2
        if "scheduler" in workers:
            scheduler = stack.enter_context(contextlib.closing(Scheduler()))
            scheduler.worker()
            if not few:
                scheduler.worker()
            workers = scheduler.address
        alone = written_alone(*more)
        more = (*more, "--cluster", workers, "--run-dir", run_dir)
        if few:
            assert infer(*more, *OVERLAP) == 2  # it is a worker that says so
            assert TOO_MUCH in capsys.readouterr().err
            assert not Path("out.zarr").exists()
        words = ["infer", *WORDS, "--out-spec", "out.zarr", *more, "--spill", spill]
        Path("hold").touch()  # it cannot end before it is killed, however busy the machine
        client = started(Path.cwd(), words)
        for _ in eventually():
            run = json.loads(folder.read("run.json") or b"{}").get("run")
            if run and len(folder.notes(run).fresh()) >= units:
                break
        client.kill()
        client.join()
        Path("hold").unlink()
        more = (*more, "--spill", "auto" if spill == "always" else spill)  # as the run began
        stack.enter_context(forked_workers())
        assert infer(*more, "--resume") == 0, capsys.readouterr().err
        summary = json.loads(folder.read("summary.json") or b"")
        assert infer(*more, "--resume") == 0, "nothing is left to do"
    assert np.array_equal(values("out.zarr"), alone)
    assert summary["units_skipped"] >= units
    assert ("join" in summary["stages"]) == (spill == "always")
    assert main(["verify", "out.zarr", "--run-dir", run_dir]) == 0
    assert main(["status", run_dir]) == 0
    assert Path("out.zarr.penstock").exists() == (run_dir == "out.zarr.penstock")


POISON = """
import os, signal, torch
from torch import nn

class Poison(nn.Module):
    def forward(self, x):
        if (x > 5).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x

def poison():
    return Poison()
"""


@pytest.mark.parametrize("deaths", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_part_that_kills_its_workers_is_given_up_and_the_others_are_written(
    deaths: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = deaths < tasks.DEATHS
    monkeypatch.setattr(tasks, "DEATHS", deaths)
    array = np.zeros(SMALL if few else SHAPE, "float32")
    array[-1, -1, -1] = 9
    np.save("in.npy", array)
    Path("poison.py").write_text(POISON)
    workers, parts = ("local:1", "3") if few else ("local:2", "8")
    with forked_workers():
        assert infer("--model-type", "poison.py:poison", "--normalize", "none", "--parts", parts,
                     "--cluster", workers, "--max-failed-parts", "1") == 3  # fmt: skip
    said = capsys.readouterr().err
    assert "in 1 part, are not written" in said
    assert f"{deaths} workers died on it" in said


OVERLAP = ("--overlap", "99")
TOO_MUCH = "--overlap 99 must be less than"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--cluster", "nowhere"), 2, "is none of local, local:N, slurm, slurm:PRESET and an"),
        (("--cluster", "local:1", "--part", "1/2"), 2, "--part is a step of an array"),
        pytest.param(("--cluster", "local:1", *OVERLAP), 2, TOO_MUCH, marks=pytest.mark.slow),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with forked_workers():
        assert infer(*words) == code
    assert said in capsys.readouterr().err
    assert not Path("out.zarr").exists()


# --- a scheduler of the user's own ---------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_joins_late_takes_part(scheduler: Scheduler, alone: Array) -> None:
    scheduler.worker()
    words = [*WORDS, "--out-spec", "out.zarr", "--cluster", scheduler.address, "--parts", "40"]
    words[words.index("net.py:slow")] = "net.py:held"
    Path("hold").touch()  # it cannot end before the other one is there, however busy the machine
    client = started(Path.cwd(), ["infer", *words])
    for _ in eventually():
        if [*written(Path("out.zarr.penstock"))]:
            break
    scheduler.worker()
    for _ in eventually():
        if len([*Path("out.zarr.penstock").glob("done-*.log")]) == 2:
            break
    Path("hold").unlink()
    client.join()
    assert client.exitcode == 0, Path("said").read_text()
    assert np.array_equal(values("out.zarr"), alone)
    assert len([*Path("out.zarr.penstock").glob("done-*.log")]) == 2


@pytest.mark.slow
def test_a_run_folder_that_a_worker_does_not_see_is_refused(
    scheduler: Scheduler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs own && exec "$@"', "sh")
    if subprocess.run([*hidden, "true"], check=False, capture_output=True).returncode:
        pytest.skip("it takes the rights of root to mount a disk")
    scheduler.worker(within=hidden)
    assert infer("--cluster", scheduler.address, "--run-dir", "own/run") == 2
    assert "workers on 127.0.0.1 do not see this folder; give --run-dir s3://BUCKET/PREFIX" in (
        capsys.readouterr().err
    )
    assert not Path("out.zarr").exists() and not [*Path("own").iterdir()]
    assert infer("--cluster", scheduler.address, "--run-dir", "run") == 0


@pytest.mark.slow
def test_a_stopped_worker_of_a_dead_client_writes_nothing_into_a_new_output(
    scheduler: Scheduler, alone: Array
) -> None:
    worker = scheduler.worker()
    words = [*WORDS, "--out-spec", "out.zarr", "--cluster", scheduler.address, "--parts", "4"]
    client = started(Path.cwd(), ["infer", *words])
    for _ in eventually():
        if len([*written(Path("out.zarr.penstock"))]) >= 3:
            break
    worker.send_signal(signal.SIGSTOP)
    client.kill()
    client.join()
    before = Path("out.zarr.penstock/run.json").read_bytes()
    words = [*WORDS, "--out-spec", "out.zarr", "--overwrite", "--overlap", "0"]
    taker = started(Path.cwd(), ["infer", *words])
    for _ in range(100):  # if a write was stopped, the other one waits until it has ended
        with contextlib.suppress(FileNotFoundError):
            if Path("out.zarr.penstock/run.json").read_bytes() != before:
                break
        time.sleep(0.05)
    worker.send_signal(signal.SIGCONT)
    taker.join()
    assert taker.exitcode == 0, Path("said").read_text()
    anew = values("out.zarr")
    with distributed.Client(scheduler.address) as asked:
        for _ in eventually():  # until it has ended what it was at, and heard that nobody waits
            if not any(asked.processing().values()) and not any(asked.call_stack().values()):
                break
    assert np.array_equal(values("out.zarr"), anew)
    assert not np.array_equal(anew, alone)
    assert main(["verify", "out.zarr"]) == 0


@pytest.mark.slow
def test_a_worker_of_another_arithmetic_is_left_out_unless_it_is_allowed(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.worker()
    scheduler.worker(path=other_torch())
    words = ["infer", *WORDS, "--cluster", scheduler.address, "--parts", "9"]
    mixed = [*words, "--out-spec", "mixed.zarr", "--mixed-arithmetic", "--overwrite"]
    for _ in eventually():
        assert main([*mixed, "--workers", "2"]) == 0
        if len(logs_in("mixed.zarr")) == 2:
            break
    said = capsys.readouterr().out
    assert "Left out" not in said
    assert re.search(r"Mixed arithmetic: \d+ blocks with torch \S+; \d+ blocks with torch", said)
    assert main([*words, "--out-spec", "out.zarr"]) == 0  # whatever the processes did before
    assert len(logs_in("out.zarr")) == 1
    said = capsys.readouterr().out
    assert "Left out: tcp://" in said and "tried again" not in said
    assert re.search(r"it has torch '\S+', and the run was made with '\S+', which", said)
    assert "--resume" not in said


def logs_in(output: str) -> list[Path]:
    """The logs of the workers that wrote an output."""
    return [*Path(f"{output}.penstock").glob("done-*.log")]
