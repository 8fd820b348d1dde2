"""A run at MLflow, by a real server and in a database of its own."""

import json
import os
import signal
import socket
from typing import Any

import pytest

from penstock.cli import main
from penstock.training import tracking
from penstock.training.tracking import TrackerState

from ..ports import held_port
from ..preloaded import PENSTOCK, started
from .track_kit import (
    KEY,
    TRACKED_RUNS,
    WORDS,
    Series,
    assert_logged,
    assert_one_run,
    best_weights,
    needs,
    no_file_holds,
    stop_after_21,
    tracked,
    until,
)

pytestmark = [
    *TRACKED_RUNS,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    needs["mlflow"],
]


def read_mlflow(uri: str, run: str) -> tuple[Any, Series]:
    """A run, and of each metric its steps and values, as MLflow's API tells them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    whole_run = client.get_run(run)
    histories = {name: client.get_metric_history(run, name) for name in whole_run.data.metrics}
    return whole_run, {
        name: sorted((each.step, each.value) for each in history)
        for name, history in histories.items()
    }


def test_a_run_is_read_back_from_a_server(server: str, tmp_path, monkeypatch) -> None:
    """One that was stopped goes on in its run."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(tracking, "STOP_WITHIN_S", 300.0)
    stop_after_21(tmp_path, "mlflow")
    (first,) = json.loads((tmp_path / "training_results.json").read_text())["trackers"]
    assert (first["status"], first["where"]) == ("ok", server)
    assert read_mlflow(server, first["run"])[0].info.status == "KILLED"
    results = tracked(tmp_path, "mlflow", resume=True, name="mine", tag={"a": "b"})
    assert results["trackers"] == [first]
    run, values = read_mlflow(server, first["run"])
    assert_logged(values, tmp_path)
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    params = run.data.params
    assert (params["batch_size"], params["hidden_dims"]) == ("8", "8 4")
    assert params["launch.job_id"] == "4711"
    assert (run.data.tags["a"], run.data.tags["tags"]) == ("b", "spiral 1cpu")
    assert run.data.metrics["val_acc"] == results["history"][-1]["val_acc"]


def test_a_run_that_was_killed_is_told_to_its_end(server: str, tmp_path, monkeypatch) -> None:
    """SIGKILL of its whole group, as a time limit kills: the process of a tracker sees it end."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    words = ["train", "spiral", *WORDS, "--epochs", "5000", "--output-dir", "out"]
    process = started(
        tmp_path, [*words, "--track", "mlflow"], f"import os; os.setsid(); {PENSTOCK}"
    )
    until(lambda: TrackerState.load(tmp_path / "out", "mlflow").run)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    run = TrackerState.load(tmp_path / "out", "mlflow").run
    client = MlflowClient(server)
    until(lambda: client.get_run(run).info.status == "FAILED")
    assert read_mlflow(server, run)[1]["train_loss_step"]


@needs["tensorboard"]
def test_a_run_without_a_server_is_in_its_own_database_and_no_file_holds_a_key(
    tmp_path, monkeypatch, capfd
) -> None:
    """Of TensorBoard beside it, too. Runs at Comet and W&B hold none in the tests of these."""
    from mlflow.tracking import MlflowClient

    for name in "MLFLOW_TRACKING_TOKEN MLFLOW_TRACKING_PASSWORD AWS_SECRET_ACCESS_KEY".split():
        monkeypatch.setenv(name, KEY)
    words = ["train", "spiral", *WORDS, "--track", "mlflow,tensorboard", "--profile"]
    words += ["--output-dir", str(tmp_path), "--tag", "parity=even", "--tag", f"a={KEY}"]
    assert main([*words, "--name", f"mine-{KEY}"]) == 0  # as who holds the key might call it
    assert KEY not in "".join(capfd.readouterr())
    results = json.loads((tmp_path / "training_results.json").read_text())
    assert [each["status"] for each in results["trackers"]] == ["ok", "ok"]
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"metrics.jsonl", "mlflow.db", "rank0.json", "args.json"} <= written
    assert no_file_holds(KEY, tmp_path)
    uri = f"sqlite:///{tmp_path}/track/mlflow.db"
    client = MlflowClient(uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == "penstock"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.data.tags["parity"]) == (results["name"], "even")
    assert run.info.status == "FINISHED"
    assert run.info.artifact_uri.startswith((tmp_path / "track").as_uri())
    assert_logged(read_mlflow(uri, run.info.run_id)[1], tmp_path)
    assert_one_run(tmp_path, tmp_path / "track" / "mlflow.db")


def test_a_server_that_hangs_stops_nothing(tmp_path, monkeypatch) -> None:
    """It takes the connection, and never answers."""
    import torch

    monkeypatch.setattr(tracking, "COMPLETE_WITHIN_S", 3.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        results = tracked(tmp_path / "with", "mlflow")
    (tracker,) = results["trackers"]
    assert (tracker["status"], tracker["error"]) == ("failed", "it was not done in time")
    assert results["status"] == "complete"
    tracked(tmp_path / "without")
    one, other = best_weights(tmp_path / "with"), best_weights(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_server_that_refuses_is_told_of_once(tmp_path, monkeypatch, capfd) -> None:
    words = ["train", "spiral", *WORDS, "--track", "mlflow", "--output-dir", str(tmp_path)]
    with held_port() as held:
        nobody = f"http://user:{KEY}@127.0.0.1:{held.getsockname()[1]}/mlflow"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", nobody)
        assert main(words) == 0
    done = capfd.readouterr()
    lines = (line for line in done.err.splitlines() if "mlflow" in line)
    said = [line for line in lines if "waiting for" not in line]
    assert len(said) == 1 and said[0].startswith("penstock train: mlflow at http://127.0.0.1:")
    assert "the run goes on" in said[0]
    (tracker,) = json.loads((tmp_path / "training_results.json").read_text())["trackers"]
    assert tracker["status"] == "failed"
    assert "mlflow: metrics are missing in http://127.0.0.1:" in done.out
    assert KEY not in done.err + done.out
    assert no_file_holds(KEY, tmp_path)
