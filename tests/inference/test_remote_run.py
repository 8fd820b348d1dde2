"""A run folder in a bucket: objects written whole in place of logs that grow; a real S3 server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data.stores import bucket as bucket_room
from penstock.data.stores.bucket import Bucket
from penstock.inference.run_folder import bucket_folder as remote_log
from penstock.inference.run_folder.block_log import Key, line_of
from penstock.inference.run_folder.bucket_folder import RemoteFolder, RemoteLog
from penstock.inference.run_folder.folder import Notes
from penstock.inference.run_folder.journal import Journal
from penstock.inference.status import RunLook, RunStatus

from .faulty_s3 import door_to
from .kit import SMALL, Array, arange, run, values

SHAPE = (14, 14, 14)
RUN_DIR = "s3://test-bucket/runs/one"
WORDS = ("--in-spec in.npy --model-type identity --patch 8 --overlap 2 --block 8 --chunks 8 "
         "--devices cpu --threads 1 --seam-mode blend --normalize").split()  # fmt: skip


@pytest.fixture
def place(here, one_thread) -> None:
    np.save("in.npy", np.random.default_rng(0).normal(900, 200, SHAPE).astype("float32"))


@pytest.fixture
def remote(s3_endpoint: str, place: None, monkeypatch) -> str:
    """A place for a run folder on a real server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    return RUN_DIR


@pytest.fixture
def run_dir(place: None, tmp_path, monkeypatch) -> str:
    """The same, whose objects are files: what is asked of a store is read, written, listed and
    deleted alike, and each request of a server takes milliseconds."""
    real = bucket_room.kvstore_of

    def kvstore_of(path: str) -> Any:
        return real(path.replace("s3:/", str(tmp_path / "objects")))

    monkeypatch.setattr(bucket_room, "kvstore_of", kvstore_of)
    return RUN_DIR


def infer(run_dir: str, *words: str, normalize: str = "none", out: str = "out.zarr") -> int:
    return main(["infer", *WORDS, normalize, "--out-spec", out, "--run-dir", run_dir, *words])


def alone(normalize: Any = False) -> Array:
    """What a run of which nothing is kept writes."""
    return run(np.load("in.npy"), patch=8, overlap=2, block=8, threads=1, seam_mode="blend",
               normalize=normalize)  # fmt: skip


def document(run_dir: str, name: str) -> Any:
    return json.loads(Bucket(run_dir).read(name) or b"null")


@pytest.mark.slow
def test_an_interrupted_run_goes_on_by_what_is_in_the_bucket(run_dir: str, monkeypatch) -> None:
    note = Journal.note

    def interrupted(self: Journal, *args: Any) -> None:
        note(self, *args)
        if self.written == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", interrupted)
        assert infer(run_dir, "--writer-workers", "1") == 3
    assert infer(run_dir, "--resume") == 0
    assert document(run_dir, "summary.json")["blocks_skipped"] == 5
    assert (values("out.zarr") == alone()).all()


@pytest.mark.slow
def test_elements_share_a_run_folder_in_a_bucket(run_dir: str, capsys) -> None:
    assert infer(run_dir, "--prepare", "--workers", "2", normalize="global") == 0
    assert RunLook(run_dir).status().state == "prepared"
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


@pytest.mark.slow
def test_what_is_damaged_is_repaired_and_another_run_begins_anew(run_dir: str) -> None:
    assert infer(run_dir) == 0
    next(path for path in Path("out.zarr/0/c").rglob("*") if path.is_file()).unlink()
    folder = RemoteFolder(run_dir)
    before = document(run_dir, "run.json")
    log = folder.log(before["run"], "other", before["fingerprint"]["outputs"])
    assert main(["repair", "out.zarr", "--run-dir", run_dir]) == 0
    assert document(run_dir, "summary.json")["blocks_written"] == 1
    assert main(["verify", "out.zarr", "--run-dir", run_dir]) == 0
    assert infer(run_dir, "--overwrite") == 0
    assert document(run_dir, "summary.json")["blocks_skipped"] == 0
    assert len(Bucket(run_dir).names("done/")) == 1
    log.append(line_of((0, 9, 9, 9)))  # a process of the run before wakes up late
    log.flush()
    assert (0, 9, 9, 9) not in Notes(folder, document(run_dir, "run.json")).fresh()


def test_a_run_of_another_output_keeps_off_the_folder_of_one_at_work(run_dir: str) -> None:
    states, refused, knobs = list[RunStatus](), list[str](), {**SMALL, "run_dir": run_dir}

    def look(progress: penstock.Progress) -> None:
        if not states:
            states.append(RunLook(run_dir).status())
            with pytest.raises(UsageError) as caught:
                penstock.run_inference(arange((20, 20, 20)), "second.zarr", **knobs)
            refused.append(str(caught.value))

    penstock.run_inference(arange((20, 20, 20)), "out.zarr", progress=look, **knobs)
    assert states[0].state == "begun" and RunLook(run_dir).status().state == "done"
    assert refused[0].endswith("has the run of another output; name another one")
    assert not Path("second.zarr").exists()


def test_a_store_that_is_gone_is_waited_for_and_runs_go_on(s3_endpoint: str, monkeypatch) -> None:
    monkeypatch.setattr("penstock.data.stores.bucket.PATIENCE_S", 0.05)
    few = {"s3_request_retries": {"max_retries": 0}}
    monkeypatch.setattr("penstock.data.stores.kvstore.BRIEF", few)
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


@pytest.mark.slow
def test_a_copy_of_a_run_folder_is_read_like_one(run_dir: str, capsys) -> None:
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
    assert main(["verify", "out.zarr", "--run-dir", "copy", "--forget"]) == 3
    capsys.readouterr()
    assert main(["status", "copy"]) == 3
    assert "7 of 8 blocks are written" in capsys.readouterr().out
    assert main(["report", run_dir, "--output", "r.html"]) == 2
    assert "a URL was given; give a place on this machine" in capsys.readouterr().err


def blocks(*numbers: int) -> set[Key]:
    return {(0, 0, 0, number) for number in numbers}


@pytest.fixture
def log(run_dir: str, monkeypatch) -> Iterator[RemoteLog]:
    monkeypatch.setattr(remote_log, "FLUSH_S", 60)
    monkeypatch.setattr(remote_log, "LINES", 3)
    log = RemoteLog(Bucket(run_dir), "run", "a")
    log.begin(anew=True)
    yield log
    log.close()


def note(log: RemoteLog, *numbers: int) -> None:
    for number in numbers:
        log.append(line_of((0, 0, 0, number)))
        log.flush()


def notes_of(log: RemoteLog) -> Notes:
    return Notes(RemoteFolder(log.bucket.url), {"run": "run"})


def test_a_log_is_whole_objects_of_which_the_last_grows(log: RemoteLog) -> None:
    early = notes_of(log)
    for number in range(11):
        note(log, number)
        assert early.fresh().keys() >= blocks(number)
    assert len(log.bucket.names("done/")) == 4
    assert notes_of(log).fresh().keys() == blocks(*range(11))
    assert early.fresh().keys() == blocks(9, 10)  # those of the last object, again
    log.append(line_of((0, 0, 0, 11)))
    assert notes_of(log).fresh().keys() == blocks(*range(11))
    log.close()
    assert notes_of(log).fresh().keys() == blocks(*range(12))


def test_a_block_that_is_lost_and_made_again_is_there(log: RemoteLog) -> None:
    note(log, 1, 2, 3, 4)
    log.close()
    RemoteFolder(log.bucket.url).forget("run", [*blocks(2, 3)])
    assert notes_of(log).fresh().keys() == blocks(1, 4)
    again = RemoteLog(log.bucket, "run", "a")
    again.begin(anew=False)
    note(again, 3)
    again.close()
    assert notes_of(log).fresh().keys() == blocks(1, 3, 4)


@pytest.mark.slow
def test_what_can_be_no_run_folder_is_refused(remote: str, capsys) -> None:
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
    with pytest.warns(RuntimeWarning, match="no output has a lock, which would guard it too"):
        penstock.run_inference(source, out, run_dir=run_dir, **SMALL)
