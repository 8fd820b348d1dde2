"""What is read of several paths and folders: each run once, and nothing bad stops the rest."""

import json
import os
import shutil
import sqlite3
import zipfile
from pathlib import Path

import pytest

from penstock.base.errors import UsageError
from penstock.scaling.sources.read import read_runs

from .kit import log, our_log, results, run_folder, write


def heard(*paths: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Jobs and devices of what counts, and what was said."""
    said: list[str] = []
    return [(run.job, run.devices) for run in read_runs(paths, said.append)], said


def test_a_log_given_twice_or_copied_counts_once(tmp_path) -> None:
    one, four = write(tmp_path, {"a.out": log("1", 1, 362.45), "b.out": log("2", 4, 95.23)})
    copy = tmp_path / "copy.out"
    shutil.copy(one, copy)
    assert heard(one, one, four) == ([("1", 1), ("2", 4)], [])
    runs, said = heard(tmp_path, one)
    assert runs == [("1", 1), ("2", 4)]
    assert said == [
        f"4 runs are read, and 2 count: {copy} has the run of {one}, {one} has job 1 twice"
    ]


def test_runs_of_one_time_but_several_jobs_are_several(tmp_path) -> None:
    write(tmp_path, {f"slurm-{job}.out": log(job, 4, 95.23) for job in "12"})
    assert heard(tmp_path) == ([("1", 4), ("2", 4)], [])
    # An attempt that broke off is none of another, nor of the whole.
    end = "*** JOB 3 ON n1 CANCELLED AT 2026-01-01 DUE TO PREEMPTION ***\n"
    text = log("3", 4, None, done=20, end=end) + log("3", 4, None, done=30, end=end)
    write(tmp_path, {"slurm-3.out": text + log("3", 4, 95.23)})
    assert [job for job, _ in heard(tmp_path)[0]] == ["1", "2", "3", "3", "3"]


def test_a_run_without_a_job_and_its_log_are_one(tmp_path) -> None:
    """As torchrun leaves them: the log knows its folder, and no number of a job."""
    for name, seconds in (("r2-1", 6.90312), ("r2-2", 6.91312)):
        facts = results(2, seconds)
        folder = run_folder(tmp_path / name, facts)
        text = our_log(facts, {}).replace("Output directory: outputs", f"Output directory: {name}")
        write(tmp_path, {f"{folder.name}.log": text})
    runs, said = heard(*sorted(tmp_path.iterdir()))
    assert runs == [("r2-1", 2), ("r2-2", 2)]
    assert said[0].startswith("4 runs are read, and 2 count: ")


def test_a_job_that_came_back_with_nothing_left_to_do_is_one_run(tmp_path) -> None:
    """It tells its times again, as SLURM preempted it when it was done."""
    document = results(2, 17.1312, job="3")
    document["launch"]["restarts"] = 1
    end = "*** JOB 3 ON n1 CANCELLED AT 2026-01-01T01:00:00 DUE TO PREEMPTION ***\n"
    text = our_log(document, {"SLURM_JOB_ID": "3"}).replace("Total train", f"{end}Total train")
    again = our_log(document, {"SLURM_JOB_ID": "3", "SLURM_RESTART_COUNT": "1"})
    (path,) = write(tmp_path, {"slurm-3.out": text + again})
    assert heard(path)[0] == [("3", 2)]
    folder = run_folder(tmp_path / "3", document)
    assert heard(tmp_path)[0] == heard(folder, path)[0] == [("3", 2)]


def test_a_total_unlike_its_epochs_is_told(tmp_path) -> None:
    text = log("7", 4, 95.23)
    (path,) = write(tmp_path, {"a.out": text})
    assert heard(path)[1] == []
    path.write_text(text.replace("Total training time: 95.23", "Total training time: 57.14"))
    (said,) = heard(path)[1]
    assert said.startswith(f"{path}: 57.14 s in all are not 50 epochs of 1.90 s; ")


def test_of_several_paths_a_bad_one_stops_none(tmp_path) -> None:
    """An empty log is that of a job which has just begun."""
    good, empty, zero, torn, archive = write(
        tmp_path,
        {
            "good.out": log("7", 4, 95.23), "empty.out": "", "zero.out": log("8", 4, 0.0),
            "torn.json": "{", "torn.zip": "PK\x03\x04",
        },
    )  # fmt: skip
    dead, pipe = tmp_path / "dead.out", tmp_path / "pipe.out"
    dead.symlink_to(tmp_path / "gone")
    os.mkfifo(pipe)
    bad = [empty, zero, torn, archive, dead, pipe]
    runs, said = heard(good, *bad)
    assert runs == [("7", 4)]
    assert [sentence.split()[0].rstrip(":") for sentence in said] == [str(path) for path in bad]
    assert all(sentence.endswith("; it is passed over") for sentence in said)
    for path in bad:
        with pytest.raises(UsageError, match=path.name):
            read_runs([path])
    with pytest.raises(UsageError, match=r"empty.out holds no run"):
        read_runs(bad)
    with pytest.raises(UsageError, match="gone cannot be read: No such file"):
        read_runs([good, tmp_path / "gone"])


def test_in_a_folder_nothing_bad_stops_the_rest(tmp_path) -> None:
    write(tmp_path, {"good.out": log("7", 4, 95.23), "zero.out": log("8", 4, 0.0)})
    write(tmp_path, {"empty.out": ""})
    run_folder(tmp_path / "run", results(1, 300.123))
    for name, text in (("torn", "{"), ("negative", json.dumps(results(2, -9.0)))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training_results.json").write_text(text)
    (tmp_path / "records.jsonl.d" / "records.jsonl").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe.out")
    (tmp_path / "dead.out").symlink_to(tmp_path / "gone")
    for name in ("folder.out", "folder.zip", "folder.db"):
        (tmp_path / name).mkdir()
    with sqlite3.connect(tmp_path / "songs.db") as db:
        db.execute("create table songs (name text)")
    db.close()
    (tmp_path / "thumbs.db").write_bytes(b"\x00\x01 nothing of SQLite")  # nothing of ours
    (tmp_path / "torn.zip").write_bytes(b"PK\x03\x04" + b"x" * 100)
    with zipfile.ZipFile(tmp_path / "sources.zip", "w") as other:
        other.writestr("readme", "nothing of Comet")
    runs, said = heard(tmp_path)
    assert runs == [("run", 1), ("7", 4)]
    for words in ("negative", "torn/", "dead.out", "zero.out", "songs.db is not a database",
                  "torn.zip is not an archive"):  # fmt: skip
        (sentence,) = (each for each in said if words in each)
        assert sentence.endswith("; it is passed over")
    assert f"1 log without a run passed over: {tmp_path / 'empty.out'}" in said
    assert len(said) == 7


def test_a_folder_stands_for_its_logs_by_any_usual_name(tmp_path) -> None:
    write(tmp_path, {"one.log": log("1", 1, 362.45), "two.out": log("2", 4, 95.23)})
    # Anybody's log, in which something broke that was no training.
    write(tmp_path, {"server.log": "Traceback (most recent call last):\nOSError: no\n"})
    bare = f"1 log without a run passed over: {tmp_path / 'server.log'}"
    assert heard(tmp_path) == ([("1", 1), ("2", 4)], [bare])
