"""A run at MLflow, by a real server and in a database of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.base.files import lock_file
from penstock.cli import main
from penstock.training.tracking import events, follow, tell

from ..ports import held_port
from ..preloaded import started
from .track_kit import (
    KEY,
    TRACKED_RUNS,
    WORDS,
    begun,
    best_weights,
    needs,
    no_file_holds,
    series,
    served,
    stop_after_21,
    told,
    tracked,
    until,
)

pytestmark = TRACKED_RUNS


def store_of(folder: Path) -> str:
    """The store of the user's, in these tests."""
    return f"sqlite:///{folder}/data/penstock/mlflow.db"


def read_mlflow(uri: str, run: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """A run, and of each metric its steps and values, as MLflow's API tells them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    whole_run = client.get_run(run)
    histories = {name: client.get_metric_history(run, name) for name in whole_run.data.metrics}
    return whole_run, {
        name: sorted((each.step, each.value) for each in history)
        for name, history in histories.items()
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_a_run_is_read_back_from_a_server(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    results = tracked(tmp_path / "live", "mlflow", project="live", name="mine")
    (tracker,) = results["trackers"]
    assert (tracker["status"], tracker["where"], tracker["dropped"]) == ("ok", server, 0)
    run, values = read_mlflow(server, tracker["run"])
    assert values == series(tmp_path / "live")
    assert run.info.run_name == "mine"
    assert run.info.status == "FINISHED"
    assert run.data.params["batch_size"] == "8"
    assert run.data.params["hidden_dims"] == "8 4"
    assert run.data.tags["launch.job_id"] == "4711"
    assert run.data.metrics["val_acc"] == results["history"][-1]["val_acc"]
    (begin,) = told(tmp_path / "live", "begin")
    assert run.info.start_time == round(begin["time"] * 1000)

    # Later, from the file alone, on another server's books: the same values.
    later = tmp_path / "later"
    later.mkdir()
    shutil.copy(tmp_path / "live" / "events.jsonl", later)
    assert main(["track", "sync", str(later), "--to", "mlflow"]) == 0
    synced = json.loads((later / "track" / "mlflow.json").read_text())[0]["run"]
    assert synced != tracker["run"]
    again, values_again = read_mlflow(server, synced)
    assert values_again == values
    assert again.data.params == run.data.params
    assert again.info.status == "FINISHED"
    # And nothing is sent twice.
    assert main(["track", "sync", str(later)]) == 0
    again, values_again = read_mlflow(server, synced)
    assert (again.info.status, values_again) == ("FINISHED", values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_a_run_that_goes_on_is_one_run_of_the_server(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setattr(tell, "STOP_WITHIN_S", 300.0)
    stop_after_21(tmp_path, "mlflow")
    (first,) = json.loads((tmp_path / "training_results.json").read_text())["trackers"]
    assert first["status"] == "ok"
    assert read_mlflow(server, first["run"])[0].info.status == "KILLED"
    (second,) = tracked(tmp_path, "mlflow", resume=True)["trackers"]
    assert second == first
    run, values = read_mlflow(server, first["run"])
    assert run.info.status == "FINISHED"
    assert values == series(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_a_run_that_was_killed_is_told_to_its_end(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL: nobody can say goodbye. Who follows the file sees it end."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    words = ["train", "spiral", *WORDS, "--epochs", "5000", "--output-dir", "out"]
    process = started(tmp_path, [*words, "--track", "mlflow"])
    state = tmp_path / "out" / "track" / "mlflow.json"
    until(lambda: state.exists() and json.loads(state.read_text())[0]["sent"] > 0)
    process.kill()
    process.join()
    run = json.loads(state.read_text())[0]["run"]
    until(lambda: read_mlflow(server, run)[0].info.status == "FAILED")
    assert read_mlflow(server, run)[1] == series(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_a_short_run_that_was_killed_is_in_its_database(tmp_path: Path) -> None:
    """With all of its group, before MLflow has so much as begun: as a time limit kills."""
    words = ["train", "spiral", *WORDS, "--epochs", "5000", "--output-dir", "out"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, "--track", "mlflow"],
        cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    out = tmp_path / "out"
    until(lambda: (out / "checkpoints" / "last.pt").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    state = out / "track" / "mlflow.json"
    size = (out / "events.jsonl").stat().st_size
    until(lambda: state.exists() and json.loads(state.read_text())[0]["sent"] == size)
    delivery = json.loads(state.read_text())[0]
    with (out / "track" / "mlflow.lock").open("a") as lock:
        until(lambda: lock_file(lock))  # its follower has ended
    run, values = read_mlflow(store_of(tmp_path), delivery["run"])
    assert values == series(out) and values["train_loss_step"]
    assert run.info.status == "FAILED"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_without_a_server_mlflow_is_a_database_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    results = tracked(tmp_path / "out", "mlflow")
    (tracker,) = results["trackers"]
    store = tmp_path / "data" / "penstock"
    assert (tracker["status"], tracker["where"]) == ("ok", str(store / "mlflow.db"))
    run, values = read_mlflow(store_of(tmp_path), tracker["run"])
    assert values == series(tmp_path / "out")
    assert run.info.artifact_uri.startswith(store.as_uri())
    assert list(elsewhere.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_runs_at_once_are_side_by_side_in_mlflow_s_own_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings begin in a store that is not there yet. A server that is started on it, as
    ``mlflow ui`` does, lists them by name and by tag."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # --track-dir wins
    store = tmp_path / "store"
    words = ["train", "spiral", *WORDS, "--track", "mlflow"]
    processes = [
        started(
            tmp_path,
            [*words, "--output-dir", f"{n}", "--track-dir", "store", "--name", f"run {n}",
             "--tag", f"parity={'even' if n % 2 == 0 else 'odd'}"],
        )
        for n in range(2)
    ]  # fmt: skip
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 2
    from mlflow.tracking import MlflowClient

    with served(f"sqlite:///{store}/mlflow.db", tmp_path) as url:
        client = MlflowClient(url)
        (experiment,) = [each for each in client.search_experiments() if each.name == "penstock"]
        runs = client.search_runs([experiment.experiment_id])
        assert sorted(run.info.run_name for run in runs) == ["run 0", "run 1"]
        even = client.search_runs([experiment.experiment_id], "tags.parity = 'even'")
        assert sorted(run.info.run_name for run in even) == ["run 0"]
        assert {run.info.status for run in runs} == {"FINISHED"}
        # A run that goes on under another name and a further tag is the same run.
        again = ["--output-dir", "0", "--epochs", "3", "--resume", "--name", "renamed"]
        monkeypatch.chdir(tmp_path)
        assert main([*words, *again, "--tag", "more=yes", "--track-dir", "store"]) == 0
        (renamed,) = client.search_runs([experiment.experiment_id], "tags.more = 'yes'")
        assert (renamed.info.run_name, renamed.data.tags["parity"]) == ("renamed", "even")
        assert len(client.search_runs([experiment.experiment_id])) == 2


@pytest.mark.slow
@needs["mlflow"]
def test_a_server_that_hangs_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and never answers."""

    import torch

    monkeypatch.setattr(follow, "IDLE_WITHIN_S", 3.0)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        results = tracked(tmp_path / "with", "mlflow")
    (tracker,) = results["trackers"]
    number = sum(1 for _ in events.read_events(tmp_path / "with" / "events.jsonl"))
    assert (tracker["status"], tracker["dropped"]) == ("behind", number)
    assert tracker["where"] == url
    assert results["status"] == "complete"
    tracked(tmp_path / "without")
    one, other = best_weights(tmp_path / "with"), best_weights(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_a_server_that_refuses_is_told_of_once_and_sent_to_later(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "spiral", *WORDS, "--track", "mlflow", "--output-dir", str(tmp_path)]
    with held_port() as held:
        nobody = f"http://user:{KEY}@127.0.0.1:{held.getsockname()[1]}/mlflow"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", nobody)
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *words], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    lines = (line for line in done.stderr.splitlines() if "mlflow" in line)
    said = [line for line in lines if "is behind" not in line]  # where it is waited for at the end
    assert len(said) == 1 and said[0].startswith("penstock train: mlflow at http://127.0.0.1:")
    assert "the run goes on" in said[0] and "penstock track sync" in said[0]
    (tracker,) = json.loads((tmp_path / "training_results.json").read_text())["trackers"]
    number = sum(1 for _ in events.read_events(tmp_path / "events.jsonl"))
    assert (tracker["status"], tracker["dropped"]) == ("failed", number)
    assert f"mlflow: {number} events are missing in http://127.0.0.1:" in done.stdout
    assert KEY not in done.stderr + done.stdout
    assert no_file_holds(KEY, tmp_path)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    assert main(["track", "sync", str(tmp_path)]) == 0
    run = json.loads((tmp_path / "track" / "mlflow.json").read_text())[-1]["run"]
    assert read_mlflow(server, run)[1] == series(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_a_server_that_fails_after_it_has_made_a_run_is_not_asked_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    begun(tmp_path)
    real, failures = MlflowClient.log_batch, iter([True, True])

    def log_batch(self: Any, *words: Any, **named: Any) -> Any:
        if next(failures, False):
            raise ConnectionError("it was there a moment ago")
        return real(self, *words, **named)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(follow, "LOOK_EVERY_S", 0.0)
    going = iter([True] * 3)
    delivery = follow.deliver_events(tmp_path, "mlflow", lambda seconds: next(going, False))
    assert delivery.error is None
    client = MlflowClient(store_of(tmp_path))
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    assert run.info.run_id == delivery.run
    assert (run.data.params["world_size"], run.data.metrics["train_loss_step"]) == ("1", 0.5)
