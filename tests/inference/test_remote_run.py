"""A run folder in a bucket: objects written whole in place of logs that grow; a real S3 server."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import penstock
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data.stores import kvstore
from penstock.data.stores.bucket import Bucket
from penstock.inference.run_folder import bucket as remote_folder
from penstock.inference.run_folder import bucket_log as remote_log
from penstock.inference.run_folder.bucket import RemoteFolder
from penstock.inference.run_folder.bucket_log import RemoteLog, RemoteNotes
from penstock.inference.run_folder.unit_log import Key, line_of
from penstock.inference.status import RunStatus, read_status

from ..preloaded import started
from .faulty_s3 import BODY, door_to
from .kit import SMALL, Array, arange, run

SHAPE = (14, 14, 14)
RUN_DIR = "s3://test-bucket/runs/one"
WORDS = ("--in-spec in.npy --model-type identity --patch 8 --overlap 2 --block 8 --chunks 8 "
         "--devices cpu --threads 1 --seam-mode blend --normalize").split()  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The working folder, with an input."""
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", np.random.default_rng(0).normal(900, 200, SHAPE).astype("float32"))


@pytest.fixture
def remote(s3_endpoint: str, place: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place for a run folder on a real server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    return RUN_DIR


@pytest.fixture(params=["files", pytest.param("s3", marks=pytest.mark.slow)])
def run_dir(
    request: pytest.FixtureRequest, place: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The same, whose objects are files by default: what is asked of a store is read, written,
    listed and deleted alike, and each request of a server takes milliseconds."""
    if request.param == "s3":
        return str(request.getfixturevalue("remote"))
    real = kvstore.kvstore_of

    def kvstore_of(path: str) -> Any:
        return real(path.replace("s3:/", str(tmp_path / "objects")))

    monkeypatch.setattr(kvstore, "kvstore_of", kvstore_of)
    return RUN_DIR


def infer(run_dir: str, *words: str, normalize: str = "none", out: str = "out.zarr") -> int:
    return main(["infer", *WORDS, normalize, "--out-spec", out, "--run-dir", run_dir, *words])


def values(path: str) -> Array:
    source = penstock.open_source(path)
    return source.read(source.domain)


def alone(normalize: Any = False) -> Array:
    """What a run of which nothing is kept writes."""
    return run(np.load("in.npy"), patch=8, overlap=2, block=8, threads=1, seam_mode="blend",
               normalize=normalize)  # fmt: skip


def document(run_dir: str, name: str) -> Any:
    return json.loads(Bucket(run_dir).read(name) or b"null")


KILLED = """
import os, signal, sys
from penstock.cli import main
from penstock.inference.run_folder.journal import Journal
note = Journal.note
def killed(self, *args):
    note(self, *args)
    if self.written == 3:
        self.flush()
    if self.written == 5:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.note = killed
main(["infer", *sys.argv[1:], "--writer-workers", "1"])
"""


def test_a_run_that_was_killed_goes_on_by_what_is_in_the_bucket(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = "s3://test-bucket/out.zarr"
    Path("tmp").mkdir()
    monkeypatch.setenv("TMPDIR", "tmp")  # where the killed one leaves its rows
    killed = started(
        tmp_path, [*WORDS, "none", "--out-spec", out, "--run-dir", remote], code=KILLED
    )
    killed.join()
    assert killed.exitcode == -9, Path("said").read_text()
    monkeypatch.setattr(remote_folder, "FRESH_S", 0)
    assert main(["status", remote]) == 3
    assert re.match(r"killed: [3-5] of 8 blocks", capsys.readouterr().out)
    assert infer(remote, "--resume", out=out) == 0
    assert 3 <= document(remote, "summary.json")["units_skipped"] <= 5
    assert main(["status", f"{remote}/", "--watch"]) == 0
    assert capsys.readouterr().out.endswith("done: 8 of 8 blocks are written (100.0%)\n")
    assert (values(out) == alone()).all()
    assert main(["verify", out, "--run-dir", remote]) == 0
    assert len(remote_log.by_log(Bucket(remote).names("done/"))) == 2  # one for each start
    assert document(remote, "run.json")["settings"]["run_dir"] == remote
    assert Bucket(remote).read("metrics.jsonl")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["tmp"]


def test_elements_share_a_run_folder_in_a_bucket(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert infer(run_dir, "--prepare", "--workers", "2", normalize="global") == 0
    for step in ("--statistics", "--statistics", "--part"):
        for element in (2, 1):
            assert infer(run_dir, step, f"{element}/2", normalize="global") == 0
        assert infer(run_dir, "--finish", normalize="global") == (0 if step == "--part" else 3)
    assert (values("out.zarr") == alone("global")).all()
    summary = document(run_dir, "summary.json")
    assert [worker["name"] for worker in summary["workers"]] == ["part-1-of-2", "part-2-of-2"]
    assert len(Bucket(run_dir).names("done/")) == 2
    capsys.readouterr()
    assert main(["verify", "out.zarr", "--run-dir", run_dir]) == 0
    assert f"checksums in {run_dir}\n" in capsys.readouterr().out


def test_what_verify_forgets_is_made_again_and_another_run_begins_anew(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert infer(run_dir) == 0
    next(path for path in Path("out.zarr/0/c").rglob("*") if path.is_file()).unlink()
    folder = RemoteFolder(run_dir)
    log = folder.log(document(run_dir, "run.json")["run"], "other", ())
    log.begin(anew=False)
    assert main(["verify", "out.zarr", "--run-dir", run_dir, "--forget"]) == 2
    assert "another process is writing the run in s3://" in capsys.readouterr().err
    log.close()
    assert main(["verify", "out.zarr", "--run-dir", run_dir, "--forget"]) == 3
    assert infer(run_dir, "--resume") == 0
    assert document(run_dir, "summary.json")["units_written"] == 1
    assert main(["verify", "out.zarr", "--run-dir", run_dir]) == 0
    assert infer(run_dir, "--overwrite") == 0
    assert document(run_dir, "summary.json")["units_skipped"] == 0
    log.append(line_of((0, 9, 9, 9)))  # a process of the run before wakes up late
    log.flush()
    assert (0, 9, 9, 9) not in folder.notes(document(run_dir, "run.json")["run"]).fresh()


class Held(nn.Module):
    """The identity, which waits in the middle of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.go = 0, threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.patches += len(x)
        assert self.patches < 40 or self.go.wait(60)
        return x


def test_a_run_at_work_is_asked_and_another_run_keeps_off_its_folder(
    run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "BEAT_S", 0.05)
    monkeypatch.setattr(remote_log, "FLUSH_S", 0.05)
    net, states, asked = Held(), list[RunStatus](), list[Future[None]]()
    other: Any = {"run_dir": run_dir, **SMALL}

    def ask() -> None:
        until = time.monotonic() + 30
        while not read_status(run_dir).per_second and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(UsageError, match=r"another process is writing this output$"):
            penstock.run_inference(arange((20, 20, 20)), "second.zarr", **other)
        net.go.set()

    knobs = {**SMALL, "model": net, "block": 8, "batch": 1, "metrics_interval": 0.05}
    with ThreadPoolExecutor(1) as asker:

        def look(progress: penstock.Progress) -> None:
            if not asked:
                states.append(read_status(run_dir))
                asked.append(asker.submit(ask))

        penstock.run_inference(
            arange((20, 20, 20)), "out.zarr", progress=look, run_dir=run_dir, **knobs
        )
        asked[0].result()
    assert states[0].state == "running"
    assert states[0].units_done < read_status(run_dir).units_done
    assert read_status(run_dir).state == "done" and not Path("second.zarr").exists()


def test_a_store_that_is_busy_now_and_then_loses_no_note(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote_log, "FLUSH_S", 0.01)
    few = {"s3_request_retries": {"max_retries": 0}}
    monkeypatch.setattr("penstock.data.stores.kvstore.IMPATIENT", few)
    monkeypatch.setattr("penstock.data.stores.bucket.LONGEST_WAIT_S", 0.01)
    with door_to(s3_endpoint) as door:
        monkeypatch.setenv("AWS_ENDPOINT_URL", door.url)
        run_dir = "s3://test-bucket/c/run"  # the door knows chunks by their path
        slow_down = (503, BODY.format("SlowDown", "Please reduce your request rate."))
        door.answers, door.every = {"PUT": slow_down}, 3
        knobs = {**SMALL, "overlap": 0, "run_dir": run_dir, "block": 8, "chunks": 8}
        summary = penstock.run_inference(arange(SHAPE), "out.zarr", **knobs)
        assert 0 < summary.retries <= door.refused and summary.retry_seconds > 0
        run = document(run_dir, "run.json")["run"]
        assert len(RemoteFolder(run_dir).notes(run).fresh()) == 8
    assert (values("out.zarr") == arange(SHAPE)).all()


def test_a_store_that_is_gone_is_waited_for_and_then_the_run_can_go_on(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.data.stores.bucket.PATIENCE_S", 0.05)
    few = {"s3_request_retries": {"max_retries": 0}}
    monkeypatch.setattr("penstock.data.stores.kvstore.IMPATIENT", few)
    with door_to(s3_endpoint) as door:
        monkeypatch.setenv("AWS_ENDPOINT_URL", door.url)
        bucket, wrong = Bucket("s3://test-bucket/run"), Bucket("s3://test-bucket/run")
        bucket.write("run.json", b"{}")
        door.close()
        with pytest.raises(penstock.Incomplete, match=r"run again with --resume$"):
            bucket.read("run.json")
        with pytest.raises(UsageError):  # it never answered: the name may be wrong
            wrong.read("run.json")
        door.open()
        assert bucket.read("run.json") == b"{}"


def test_a_copy_of_a_run_folder_is_read_like_one(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert infer(run_dir) == 0
    bucket = Bucket(run_dir)
    for name in bucket.names(""):
        Path("copy", name).parent.mkdir(parents=True, exist_ok=True)
        Path("copy", name).write_bytes(bucket.read(name) or b"")
    assert main(["verify", "out.zarr", "--run-dir", "copy"]) == 0
    capsys.readouterr()
    assert main(["status", "copy"]) == 0
    assert capsys.readouterr().out == "done: 8 of 8 blocks are written (100.0%)\n"
    next(path for path in Path("out.zarr/0/c").rglob("*") if path.is_file()).unlink()
    assert main(["verify", "out.zarr", "--run-dir", "copy", "--forget"]) == 2
    assert "copy is a copy of a run folder in a bucket; name the bucket" in capsys.readouterr().err
    assert main(["report", run_dir, "--output", "r.html"]) == 2
    assert "a URL was given; give a place on this machine" in capsys.readouterr().err


# --- logs ----------------------------------------------------------------------------------------


def units(*numbers: int) -> set[Key]:
    return {(0, 0, 0, number) for number in numbers}


@pytest.fixture
def log(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteLog]:
    monkeypatch.setattr(remote_log, "FLUSH_S", 60)
    monkeypatch.setattr(remote_log, "FAN", 3)
    log = RemoteLog(Bucket(run_dir), "run", "a", lambda name, ended: None)
    log.begin(anew=True)
    yield log
    log.close()


def note(log: RemoteLog, *numbers: int) -> None:
    for number in numbers:
        log.append(line_of((0, 0, 0, number)))
        log.flush()


def notes_of(log: RemoteLog) -> RemoteNotes:
    return RemoteNotes(log.bucket, "run", [{}])


def test_objects_of_a_log_are_merged_and_each_line_is_read_once(log: RemoteLog) -> None:
    early = notes_of(log)
    for number in range(11):
        note(log, number)
        assert early.fresh().keys() >= units(number)
    assert len(log.bucket.names("done/")) == 3  # 9, and two that are not merged
    assert notes_of(log).fresh().keys() == units(*range(11))
    assert early.fresh() == {}
    log.append(line_of((0, 0, 0, 11)))
    assert log.pending == 1 and notes_of(log).fresh().keys() == units(*range(11))
    log.close()
    assert len(log.bucket.names("done/")) == 1
    assert notes_of(log).fresh().keys() == units(*range(12))


def test_objects_that_are_merged_between_listing_and_reading_are_looked_for_again(
    log: RemoteLog, run_dir: str
) -> None:
    note(log, 1, 2)

    class Listing(Bucket):
        """Objects are merged each time they were listed, for a while."""

        left = 2

        def names(self, prefix: str) -> list[str]:
            listed = super().names(prefix)
            if self.left:
                self.left -= 1
                note(log, *range(10 * self.left, 10 * self.left + 3))
            return listed

    assert RemoteNotes(Listing(run_dir), "run", [{}]).fresh().keys() >= units(1, 2, 10, 11, 12)


def test_a_unit_that_is_lost_and_made_again_is_there(log: RemoteLog) -> None:
    note(log, 1, 2, 3, 4)
    log.close()
    remote_log.forget_units(log.bucket, "run", units(2, 3))
    assert notes_of(log).fresh().keys() == units(1, 4)
    again = RemoteLog(log.bucket, "run", "a", lambda name, ended: None)
    again.begin(anew=False)
    note(again, 3)
    again.close()
    assert notes_of(log).fresh().keys() == units(1, 3, 4)


# --- refusals ------------------------------------------------------------------------------------


def test_what_can_be_no_run_folder_is_refused(
    remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Bucket("s3://test-bucket/theirs").write("run.json", b"[]")
    out = "s3://test-bucket/out.zarr"
    for place, said in {
        "s3://test-bucket/theirs": "holds another program's run.json",
        f"{out}/0": "lies inside the output",
        "s3://no-such-bucket/run": "no-such-bucket",
        "https://host/run": "or a prefix such as s3://BUCKET/PREFIX",
        "memory://run": "or a prefix such as s3://BUCKET/PREFIX",
    }.items():
        capsys.readouterr()
        assert infer(place, out=out if place.startswith(out) else "out.zarr") == 2
        error = capsys.readouterr().err
        assert said in error and len(error.strip().splitlines()) == 1
    assert main(["status", "s3://test-bucket/nowhere"]) == 2
    assert "is neither the run folder nor" in capsys.readouterr().err


def test_a_run_folder_in_a_bucket_is_guarded_by_the_lock_of_an_output(run_dir: str) -> None:
    source, out = arange((8, 8, 8)), np.zeros((8, 8, 8), "uint16")
    with pytest.raises(UsageError, match=r"^require_lock=True: run_dir.*no output has a lock"):
        penstock.run_inference(source, out, run_dir=run_dir, require_lock=True, **SMALL)
    penstock.run_inference(source, "o.zarr", run_dir=run_dir, require_lock=True, **SMALL)
