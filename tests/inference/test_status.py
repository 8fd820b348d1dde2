"""What a run folder says of its run: at work, done, ended, killed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base.files import lock_file
from penstock.cli import main
from penstock.data.stores.memory import MemorySink, MemorySource
from penstock.inference import run as infer
from penstock.inference.run_folder import ending
from penstock.inference.stages import retries
from penstock.inference.status import read_status

from ..preloaded import started
from .faulty_s3 import distinct, write_model
from .kit import SMALL, arange, job


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["status", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out or printed.err


def test_a_run_is_at_work_then_killed_then_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", distinct(32))
    slow = "if x.device.type != 'meta':\n    time.sleep(float(os.environ.get('NAP', 0)))\nreturn x"
    command = ["infer", "--in-spec", "in.npy", "--out-spec",
               "out.zarr", "--model-type", write_model(tmp_path, "slow", slow), "--patch", "8",
               "--overlap", "0", "--block", "16", "--chunks", "16", "--devices", "cpu",
               "--head-kind", "intensity", "--metrics-interval", "0.1"]  # fmt: skip
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


def test_a_run_that_ended_says_why_and_which_faults_it_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_S", 0.001)
    request, failed, reads = ending.EndRequest(), threading.Event(), itertools.count()
    read, write = MemorySource.read, MemorySink.write

    def fails_once(self: MemorySink, *args: Any) -> None:
        if not failed.is_set():
            request.ask("SIGTERM")
            failed.set()
            raise ConnectionResetError("reset by peer")
        write(self, *args)

    def waits(self: MemorySource, *args: Any) -> Any:
        assert next(reads) < 20 or failed.wait(60)  # some are not read yet when the job is to end
        return read(self, *args)

    monkeypatch.setattr(MemorySink, "write", fails_once)
    monkeypatch.setattr(MemorySource, "read", waits)
    with pytest.raises(penstock.Incomplete):
        infer.run_job(job(tmp_path, normalize="percentile"), request=request)
    code, line = said(capsys, tmp_path / "run")
    assert code == 3
    assert re.fullmatch(
        r"ended: \d+ of 27 blocks are written \([\d.]+%\), 1 fault tried again in .*s; last fault "
        r"20\S+ \S+: write block .*: reset by peer; \d+ of 27 blocks were written when SIGTERM "
        r"ended the job; run again with --resume\n",
        line,
    )


def rows_of(path: Path, began: float, *counts: int) -> None:
    lines = [json.dumps({"schema": 1})]
    for number, count in enumerate(counts):
        gauges = {"blocks_written": count, "retries": number, "retry_seconds": 0.5 * number}
        lines.append(json.dumps({"t": number, "time": began + number, "gauges": gauges}))
    path.write_text("\n".join([*lines, '{"time": 12']))  # the last line is torn


@pytest.fixture(scope="module")
def _done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 27 units that is done."""
    place = tmp_path_factory.mktemp("done")
    infer.run_job(job(place))
    return place / "run"


@pytest.fixture
def folder(_done: Path, tmp_path: Path) -> Path:
    """A copy of it."""
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
        assert read_status(folder).state == "running"  # in another open file of this process
        assert read_status(folder).per_second == pytest.approx(5)
        assert read_status(folder).retries == 4
        assert read_status(folder).complete
    assert read_status(folder).state == "killed"
    assert read_status(folder).per_second is None


def test_a_job_on_a_cluster_says_how_its_workers_stand(folder: Path) -> None:
    """The rows of the worker that died tell of a store that was away, and are no news."""
    now = time.time()
    os.utime(folder / "run.json", (now - 2000, now - 2000))
    workers = {"present": 3, "died": 1, "unfit": 1, "retried": 2}
    (folder / "workers.json").write_text(json.dumps(workers))
    of = "3 workers, 1 worker died, 1 worker left out, 2 parts failed and tried again"
    rows_of(folder / "metrics-b.jsonl", now - 5, 0, 3, 6)
    gauges = {"blocks_written": 2, "failing_seconds": 90.0, "retry_for": 900.0, "retries": 7}
    row = json.dumps({"t": 1, "time": now - 1000, "gauges": gauges})
    (folder / "metrics-a.jsonl").write_text(f"{row}\n")
    with (folder / "done-b.log").open("a") as log:
        assert lock_file(log)
        line = read_status(folder).line()
    assert line.startswith("running: 27 of 27 blocks are written (100.0%), " + of)
    assert "failing" not in line and "9 faults tried again" in line
    assert "3 workers" not in read_status(folder).line()
    assert "1 worker died" in read_status(folder).line()


def test_the_folder_of_a_remote_output_is_where_the_job_began(
    s3_endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.chdir(tmp_path)
    out = "s3://test-bucket/some/out.zarr"
    penstock.run_inference(arange((8, 8, 8)), out, **SMALL)
    assert said(capsys, out)[1].startswith("done: 1 of 1 blocks")


def test_a_run_whose_store_is_away_says_for_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "LONGEST_S", 0.05)
    write, lines = MemorySink.write, list[str]()

    def away(self: MemorySink, *args: Any) -> None:
        if not lines:
            raise ConnectionResetError("reset by peer")
        write(self, *args)

    def look(progress: penstock.Progress) -> None:
        status = read_status(tmp_path / "run")
        if status.failing is not None and status.failing[0] > 0:
            lines.append(status.line())

    monkeypatch.setattr(MemorySink, "write", away)
    infer.run_job(job(tmp_path, metrics_interval=0.1, retry_for="1min"), look)
    assert lines[0].startswith("running: 0 of 27 blocks")
    assert re.search(r"a store has been failing for .*s of 1 min 0 s at most", lines[0])
    assert read_status(tmp_path / "run").failing is None


@pytest.mark.parametrize("words", [["nowhere"], ["."], ["damaged"], ["damaged", "--every", "0"]])
def test_what_is_no_run_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("damaged").mkdir()
    Path("damaged/run.json").write_text("{")
    code, line = said(capsys, *words)
    assert code == 2 and len(line.strip().splitlines()) == 1
    assert line.startswith("penstock status: ")
