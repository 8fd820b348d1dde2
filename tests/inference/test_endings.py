"""Jobs that hang, or are asked to end: what is whole is kept, a resume goes on; what is told."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import penstock
from penstock.base import Incomplete, StageError, lock_file
from penstock.cli import main
from penstock.data.stores.in_memory import MemorySink
from penstock.inference import RunLook
from penstock.inference import run as infer
from penstock.inference.run_folder.folder import Notes
from penstock.inference.run_folder.journal import EndRequest
from penstock.inference.stages import retries, watch
from penstock.inference.stages.watch import Watchdog
from penstock.instruments import Clock

from ..preloaded import started
from .faulty_s3 import distinct, write_model
from .kit import SMALL, arange, job, values

SLOW = "if x.device.type != 'meta':\n    time.sleep(float(os.environ.get('NAP', 0)))\nreturn x"
"""A model that is slow where the environment says so."""
ALONE = ("--patch", 16, "--batch", 1)
"""Each brick is one forward."""
STUCK = (
    "import pathlib\n"
    "if x.device.type != 'meta' and len(x) == 2 and (x == 0).any():\n"
    "    while pathlib.Path({0!r}).exists():\n"
    "        time.sleep(0.1)\n"
    "return x"
)


def words(folder: Path, model: str, *more: Any, side: int = 32) -> list[str]:
    """A job of so many blocks as blocks of 16 are in the volume; each is one block to compute."""
    if not (folder / "in.npy").exists():
        np.save(folder / "in.npy", distinct(side))
    given = ["--in-spec", folder / "in.npy", "--out-spec", folder / "out.zarr", "--model-type",
             model, "--patch", 8, "--overlap", 0, "--block", 16, "--chunks", 16, "--devices", "cpu",
             "--normalize", "percentile", "--head-kind", "intensity", "--metrics-interval", 0.1,
             *more]  # fmt: skip
    return ["infer", *map(str, given)]


def blocks(folder: Path) -> int:
    log = folder / "out.zarr.penstock/done.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def until(ready: Callable[[], bool], process: BaseProcess, folder: Path) -> None:
    while not ready():
        assert process.is_alive(), (folder / "said").read_text()
        time.sleep(0.01)


def ended(process: BaseProcess, folder: Path) -> str:
    """The last line of what a process said that ended with 3."""
    process.join(300)
    said = (folder / "said").read_text()
    assert process.exitcode == 3, said
    return said.strip().splitlines()[-1]


def test_what_is_whole_is_written_after_a_signal(tmp_path, monkeypatch, capsys) -> None:
    command = words(tmp_path, write_model(tmp_path, "slow", SLOW), *ALONE, side=48)
    with monkeypatch.context() as patch:
        patch.setenv("NAP", "0.05")
        process = started(tmp_path, command)
    until(lambda: blocks(tmp_path) >= 2, process, tmp_path)
    os.kill(process.pid or 0, signal.SIGUSR1)
    before = blocks(tmp_path)
    error = ended(process, tmp_path)
    assert before < blocks(tmp_path) < 27  # those whose bricks had been read, and no more
    assert error == (
        f"penstock infer: {blocks(tmp_path)} of 27 blocks were written when SIGUSR1 ended "
        "the job; run again with --resume"
    )
    code, line = said(capsys, tmp_path / "out.zarr")
    assert code == 3 and line.startswith(f"ended: {blocks(tmp_path)} of 27 blocks are written (")
    assert line.endswith(f"{error.removeprefix('penstock infer: ')}\n")
    assert main([*command, "--resume"]) == 0
    assert (values(tmp_path / "out.zarr") == distinct(48)).all()
    assert not (tmp_path / "out.zarr.penstock/ended.json").exists()


def test_what_takes_longer_than_the_grace_is_left(tmp_path, monkeypatch) -> None:
    command = words(tmp_path, write_model(tmp_path, "slow", SLOW), *ALONE, "--grace", "soon")
    assert main(command) == 2  # no such time
    monkeypatch.setenv("NAP", "0.3")
    process = started(tmp_path, [*command[:-1], "0.2s"])
    until(lambda: blocks(tmp_path) >= 1, process, tmp_path)
    os.kill(process.pid or 0, signal.SIGTERM)
    assert ended(process, tmp_path) == (
        "penstock infer: SIGTERM ended the job; run again with --resume"
    )


def test_a_request_before_the_first_block_reads_none(tmp_path) -> None:
    started_job, request = job(tmp_path, normalize="global"), EndRequest()
    request.ask("SIGTERM")
    with pytest.raises(Incomplete, match=r"SIGTERM ended the job; run again with --resume$"):
        infer.run_job(started_job, request=request)
    assert infer.run_job(job(tmp_path, normalize="global")).blocks_written == 27


def test_a_request_after_the_last_block_ends_nothing(tmp_path) -> None:
    request = EndRequest()

    def ask(progress: penstock.Progress) -> None:
        if progress.blocks_done == progress.blocks_planned:
            request.ask("SIGTERM")

    assert infer.run_job(job(tmp_path), ask, request).blocks_written == 27


@pytest.mark.slow
def test_a_model_that_never_returns_ends_the_job_and_the_run_resumes(tmp_path) -> None:
    stuck, folder = tmp_path / "stuck", tmp_path / "out.zarr.penstock"
    stuck.touch()
    volume = distinct(32)
    volume[20, 20, 20] = 0
    np.save(tmp_path / "in.npy", volume)
    model = write_model(tmp_path, "stuck_model", STUCK.format(str(stuck)))
    command = words(
        tmp_path, model, "--patch", 16, "--normalize", "none", "--stall-timeout", "0.5s"
    )
    last = ended(started(tmp_path, command), tmp_path)
    assert last.startswith("penstock infer: forward failed at brick ")
    assert "no progress for 500 ms (--stall-timeout)" in last
    assert f"{folder}/stacks.txt has the stack of each thread; run again with" in last
    stacks = (folder / "stacks.txt").read_text()
    assert "stuck_model.py" in stacks and stacks.count("hread 0x") > 3
    stuck.unlink()
    assert main([*command, "--resume", "--stall-timeout", "0"]) == 0
    assert (values(tmp_path / "out.zarr") == volume).all()
    assert not (folder / "stacks.txt").exists()


def test_progress_within_a_block_is_no_stall(tmp_path, monkeypatch) -> None:
    """A block of many batches takes longer than the watchdog waits; no batch does."""
    now, dogs = [0.0], list["Watchdog"]()

    class Timed(Watchdog):
        """It looks at the forwards alone, and goes by their clock."""

        def __init__(self, limit_s: float, stacks: Path | None, clock: Clock) -> None:
            super().__init__(limit_s, stacks, lambda: now[0])
            dogs.append(self)

        def working(self, stage: str, where: object) -> Any:
            return super().working(stage, where) if stage == "forward" else nullcontext()

    def takes_long(net: nn.Identity, x: Tensor) -> Tensor:
        now[0] += 0.4
        for dog in dogs:
            dog.check()
        return x

    monkeypatch.setattr(watch, "Watchdog", Timed)
    monkeypatch.setattr(nn.Identity, "forward", takes_long)
    assert infer.run_job(job(tmp_path, stall_timeout=1, batch=1)).blocks_written == 27
    monkeypatch.setattr(Timed, "progressed", lambda dog: None)
    with pytest.raises(StageError, match=r"no progress for 1\.00 s"):
        infer.run_job(job(tmp_path, stall_timeout=1, batch=1, overwrite=True))


def test_a_stall_names_the_oldest_work(tmp_path) -> None:
    now = [0.0]
    dog = Watchdog(10, None, lambda: now[0])
    with dog.working("forward", "brick 3"):
        now[0] = 8
        dog.progressed()
        now[0] = 15
        dog.check()
        with dog.working("note", "a part of it"):
            now[0] = 24
            dog.check()
        now[0] = 33
        dog.check()
        now[0] = 35
        with pytest.raises(StageError, match=r"^forward failed at brick 3: no progress for 10.0 s"):
            dog.check()
    dog.check()
    patient = Watchdog(0, None, lambda: now[0])
    with patient.working("read", "x"):
        now[0] = 1e9
        patient.check()


def said(capsys, *words: object) -> tuple[int, str]:
    code = main(["status", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out or printed.err


def test_a_run_is_at_work_then_killed_then_done(tmp_path, here, capsys, monkeypatch) -> None:
    command = words(tmp_path, write_model(tmp_path, "slow", SLOW))
    with monkeypatch.context() as patch:
        patch.setenv("NAP", "0.1")
        process = started(tmp_path, command)
    line = ""
    while not re.search(r"[1-9] of 8 blocks .*blocks/s, .* left", line):
        assert process.is_alive(), line
        if Path("out.zarr.penstock/run.json").exists():
            code, line = said(capsys, "out.zarr")
            assert code == 0 and line.startswith("running: ")
        time.sleep(0.05)
    assert len(line.splitlines()) == 1
    process.kill()
    process.join()
    code, line = said(capsys, "out.zarr.penstock/")
    assert code == 3
    assert re.fullmatch(
        r"killed: [1-7] of 8 blocks are written \([\d.]+%\); no process writes it; penstock infer "
        r"--resume goes on\n",
        line,
    )
    assert main([*command, "--resume"]) == 0
    capsys.readouterr()
    assert said(capsys, tmp_path / "out.zarr", "--watch") == (
        0, "done: 8 of 8 blocks are written (100.0%)\n"
    )  # fmt: skip


def rows_of(path: Path, began: float, *counts: int) -> None:
    lines = [json.dumps({"schema": 1})]
    for number, count in enumerate(counts):
        gauges = {"blocks_written": count}
        lines.append(json.dumps({"t": number, "time": began + number, "gauges": gauges}))
    path.write_text("\n".join([*lines, '{"time": 12']))  # the last line is torn


@pytest.fixture(scope="module")
def _done(tmp_path_factory) -> Path:
    """The folder of a run of 27 blocks that is done."""
    place = tmp_path_factory.mktemp("done")
    infer.run_job(job(place))
    return place / "run"


@pytest.fixture
def folder(_done: Path, tmp_path) -> Path:
    return shutil.copytree(_done, tmp_path / "run")


def test_rates_of_several_processes_add_up(folder: Path) -> None:
    now = time.time()
    (folder / "summary.json").unlink()
    os.utime(folder / "run.json", (now - 20, now - 20))
    rows_of(folder / "metrics.jsonl", now - 5, 0, 2, 4)
    rows_of(folder / "metrics-b.jsonl", now - 5, 0, 3, 6)
    rows_of(folder / "metrics-1.jsonl", now - 500, 0, 30, 60)  # of an earlier start
    with (folder / "done.log").open("a") as log:
        assert lock_file(log)
        status = RunLook(folder).status()  # the log is held in another open file of this process
        assert (status.state, status.blocks_done) == ("running", 27)
        assert status.per_second == pytest.approx(5)
    status = RunLook(folder).status()
    assert (status.state, status.per_second) == ("killed", None)


def test_the_faults_of_a_process_that_died_are_no_news(folder: Path) -> None:
    """Its rows say that a store was away."""
    now = time.time()
    os.utime(folder / "run.json", (now - 2000, now - 2000))
    rows_of(folder / "metrics-b.jsonl", now - 5, 0, 3, 6)
    gauges = {"blocks_written": 2, "failing_seconds": 90.0, "retry_for": 900.0}
    row = json.dumps({"t": 1, "time": now - 1000, "gauges": gauges})
    (folder / "metrics-a.jsonl").write_text(f"{row}\n")
    with (folder / "done-b.log").open("a") as log:
        assert lock_file(log)
        line = RunLook(folder).status().line()
    assert line.startswith("running: 27 of 27 blocks are written (100.0%), ")
    assert "failing" not in line


@pytest.mark.parametrize("locked", [True, False], ids=["folder", "bucket"])
def test_a_run_that_ends_during_a_look_is_not_called_incomplete(
    locked: bool, folder: Path,
    monkeypatch,
) -> None:  # fmt: skip
    """Its last block and its summary come when the logs have just been read."""
    log, summary = folder / "done.log", folder / "summary.json"
    *lines, last = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines))
    summary = summary.rename(folder / "kept.json")
    file, blocks = log.open("a"), Notes.blocks

    def just_before(self: Notes) -> object:
        seen = len(blocks(self))
        if not file.closed:
            file.write(last)
            file.close()
            summary.rename(folder / "summary.json")
        return range(seen)

    monkeypatch.setattr(Notes, "blocks", just_before)
    look = RunLook(folder)
    if locked:
        assert lock_file(file)
    else:
        monkeypatch.setattr(look.folder, "at_work", lambda: None)
    line = look.status().line()
    assert line.startswith(f"{'running' if locked else 'begun'}: 26 of 27 blocks")
    assert "repair" not in line
    assert look.status().line() == "done: 27 of 27 blocks are written (100.0%)"


@pytest.mark.slow
def test_a_run_that_awaits_parts_is_told_from_a_killed_one(tmp_path, capsys, here) -> None:
    command = words(tmp_path, "identity")
    for step, begins in (
        (["--prepare", "--workers", "2"], "prepared: 0 of 8 blocks are written (0.0%); next is"),
        (["--part", "1/2"], "prepared: 4 of 8 blocks are written (50.0%); next is infer --part"),
    ):
        assert main([*command, *step]) == 0
        capsys.readouterr()
        code, line = said(capsys, "out.zarr")
        assert code == 3 and line.startswith(begins)
    Path("out.zarr.penstock/done-part-2-of-2.log").touch()  # this part was killed
    assert said(capsys, "out.zarr")[1].startswith("killed: 4 of 8")
    assert main([*command, "--part", "2/2"]) == main([*command, "--finish"]) == 0
    capsys.readouterr()
    assert said(capsys, "out.zarr") == (0, "done: 8 of 8 blocks are written (100.0%)\n")


@pytest.mark.slow
def test_the_folder_of_a_remote_output_is_where_the_job_began(
    s3_endpoint: str, tmp_path, capsys,
    monkeypatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.chdir(tmp_path)
    out = "s3://test-bucket/some/out.zarr"
    penstock.run_inference(arange((8, 8, 8)), out, **SMALL)
    assert said(capsys, out)[1].startswith("done: 1 of 1 blocks")


def test_a_run_whose_store_is_away_says_for_how_long(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(retries, "LONGEST_S", 0.05)
    write, lines = MemorySink.write, list[str]()

    def away(self: MemorySink, *args: Any) -> None:
        if not lines:
            raise ConnectionResetError("reset by peer")
        write(self, *args)

    def look(progress: penstock.Progress) -> None:
        status = RunLook(tmp_path / "run").status()
        if status.failing is not None and status.failing[0] > 0:
            lines.append(status.line())

    monkeypatch.setattr(MemorySink, "write", away)
    infer.run_job(job(tmp_path, metrics_interval=0.1, retry_for="1min"), look)
    assert lines[0].startswith("running: 0 of 27 blocks")
    assert re.search(r"a store has been failing for .*s of 1 min 0 s at most", lines[0])
    assert RunLook(tmp_path / "run").status().failing is None


@pytest.mark.parametrize("words", [["nowhere"], ["."], ["damaged"]])
def test_what_is_no_run_is_refused(words, capsys, here) -> None:
    Path("damaged").mkdir()
    Path("damaged/run.json").write_text("{")
    code, line = said(capsys, *words)
    assert code == 2 and len(line.strip().splitlines()) == 1
    assert line.startswith("penstock status: ")
