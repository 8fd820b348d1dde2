"""Folders of runs, ledgers, and what holds no run."""

import json
from typing import Any

import pytest

from penstock.base.errors import UsageError
from penstock.instruments import Ledger, Record
from penstock.scaling import read_runs, studies

from ..bench.records import made_record
from .kit import log, results, run_folder, write


def test_run_folders_below_a_folder(tmp_path) -> None:
    phases = {"forward": 0.004, "backward": 0.006, "communication": 0.002}
    run_folder(tmp_path / "a" / "one", results(1, 9.123))
    two = run_folder(tmp_path / "a" / "two", results(2, 5.456, nodes=2, phases=phases))
    steps = two / "steps"
    steps.mkdir()
    header = "step,epoch,samples,loss,step_s,forward_s,backward_s,communication_s\n"
    for rank in range(2):
        (steps / f"rank{rank}.csv").write_text(header + "1,0,32,0.7,0.012,0.004,0.006,0.002\n2,0,3")
    first, second = read_runs([tmp_path])
    assert (first.job, first.devices, first.seconds) == ("one", 1, pytest.approx(9.623))
    assert (first.samples, first.batch, first.steps) == (7008, 32, 219)
    assert first.val_loss == pytest.approx(0.68)
    assert (second.devices, second.nodes, second.global_batch) == (2, 2, 64)
    assert second.ranks[1].local == (pytest.approx(0.01),)
    assert second.ranks[1].host == "n1"
    assert second.settings["learning rate"] == "0.001"
    (study,) = studies([first, second], False)
    assert study.kind == "hybrid"
    assert read_runs([two, tmp_path / "a" / "one" / "training_results.json"])[0].devices == 1


def test_a_run_that_was_stopped_is_partial(tmp_path) -> None:
    (run,) = read_runs([run_folder(tmp_path / "x", results(2, 5.0, status="stopped"), epochs=9)])
    assert (run.status, run.epochs, run.planned_epochs) == ("stopped", 3, 9)
    assert not run.complete


def test_a_run_and_its_log_are_one(tmp_path) -> None:
    run_folder(tmp_path / "run", results(2, 6.9031, job="31"))
    write(tmp_path, {"slurm-31.out": log("31", 2, 7.40, epochs=3, samples=7008)})
    (run,) = read_runs([tmp_path])
    assert run.seconds == pytest.approx(7.4031)
    # Two trainings of one job are two.
    run_folder(tmp_path / "again", results(2, 6.8031, job="31"))
    assert len(read_runs([tmp_path])) == 2


def test_a_run_that_was_tracked_tells_how_busy_its_gpus_were(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", results(2, 5.0123))

    def gpu(index: int, percent: float | None) -> dict[str, Any]:
        return {"index": index, "util_percent": percent, "memory_bytes": 7}

    lines = [
        {"schema": 1},
        {"time": 1, "cpu_percent": 100, "gpus": [gpu(0, 90), gpu(1, 80.5)], "gauges": {"step": 5}},
        {"time": 3, "gpus": None, "gauges": {"step": 6}},
        {"time": 4, "gpus": [gpu(0, 70), gpu(1, None)], "gauges": {"step": 9}},
    ]
    metrics = folder / "track" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"time": 5, "gp')
    (run,) = read_runs([folder])
    assert run.utilisation == (90.0, 80.5, 70.0)
    # Of GPUs that others may have used, nothing.
    (folder / "training_results.json").write_text(json.dumps(results(1, 5.0123)))
    assert read_runs([folder])[0].utilisation == ()


def test_how_busy_gpus_were_is_kept_whoever_knew_it(tmp_path) -> None:
    document = results(2, 5.0123, job="31")
    run_folder(tmp_path / "run", document)
    document.pop("history")
    launch = record(document, 0).model_copy(
        update={"facts": {"training": document, "utilisation": {"gpu_percent": 71.5}}}
    )
    Ledger(tmp_path / "study.ledger").append(launch)
    (run,) = read_runs([tmp_path])
    assert (run.source, run.utilisation) == (str(tmp_path / "run"), (71.5,))
    seen = log("31", 2, 5.51) + "\n0, 64 %, 41 %, 55\n"
    (path,) = write(tmp_path, {"slurm-31.out": seen})
    (run,) = read_runs([tmp_path / "run", path])
    assert (run.seconds, run.utilisation) == (5.5123, (64.0,))


def record(document: dict[str, Any], launch: int, status: str = "ok") -> Record:
    case = {"workload": "spiral", "preset": None, "epochs": 3, "world_size": document["world_size"]}
    facts = {"training": document} if status == "ok" else {}
    return made_record("train", case, launch, status, facts=facts)


def test_a_ledger_of_trainings(tmp_path) -> None:
    ledger = Ledger(tmp_path / "study.ledger")
    for launch, (devices, seconds) in enumerate([(1, 9.1), (1, 9.2), (2, 5.3)]):
        document = results(devices, seconds + 0.0123)
        del document["history"]
        ledger.append(record(document, launch))
    ledger.append(record(results(2, 5.3), 3, "crash"))
    ledger.append(record(results(1, 1.0), 4).model_copy(update={"scenario": "model"}))
    runs = read_runs([tmp_path / "study.ledger"])
    assert [(r.devices, r.status) for r in runs] == [
        (1, "complete"), (1, "complete"), (2, "crashed"), (2, "complete"),
    ]  # fmt: skip
    again = read_runs([tmp_path / "study.ledger" / "records.jsonl"])
    assert [(r.job, r.seconds) for r in again] == [(r.job, r.seconds) for r in runs]
    (study,) = studies(runs, False)
    assert [len(p.at.runs) for p in study.points] == [2, 1]


@pytest.mark.parametrize("name", ["a.out", "a.err", "a.log", "a.txt", "job.o123"])
@pytest.mark.parametrize("first", ["[rank: 0] Seed set to 42", "{'world_size': 4}"])
def test_a_log_that_begins_as_json_does_is_a_log(tmp_path, name: str, first: str) -> None:
    (path,) = write(tmp_path, {name: f"{first}\n{log('7', 4, 95.23)}"})
    (run,) = read_runs([path])
    assert (run.job, run.seconds) == ("7", 95.23)
    (empty,) = write(tmp_path, {name: f"{first}\n"})
    with pytest.raises(UsageError, match="holds no run"):
        read_runs([empty])
    (document,) = write(tmp_path, {"results.txt": json.dumps(results(2, 5.0123))})
    assert read_runs([document])[0].devices == 2


@pytest.mark.parametrize(
    "name, content",
    [
        ("empty.out", b""),
        ("poem.txt", b"Shall I compare thee\nto a summer's day?\n"),
        ("empty.csv", b"devices,seconds\n"),
        ("list.json", b"[1, 2]"),
        ("picture.png", b"\x89PNG\r\n\x1a\n\x00\x00"),
    ],
)
def test_what_holds_no_run_is_said_in_a_sentence(tmp_path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"{name} holds no run.* give a CSV with"):
        read_runs([path])


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("torn.json", b'{"world_size": 1,', "torn.json is not JSON"),
        ("odd.json", b'{"world_size": "many"}', "odd.json is not what a training left"),
        ("odd.json", b'{"world_size": 1, "ranks": [3]}', "odd.json is not what a training left"),
        (
            "odd.json",
            b'{"world_size": 1, "global_batch_size": "8"}',
            "global_batch is '8', no whole",
        ),
        ("records.jsonl", b"{}\n", "records.jsonl, line 1"),
        ("bad.db", b"SQLite format 3\0" + b"x" * 100, "bad.db is not a database of MLflow"),
    ],
)
def test_what_is_broken_is_said(tmp_path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_runs([path])
