"""What a run tells, and to whom: a real MLflow server, Comet's archive,
TensorBoard's files; and that none of them is ever felt by the run."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("lightning_fabric")

from penstock.base import secrets as keys
from penstock.base.config.knobs import build
from penstock.base.config.train import TRAIN_DEFAULTS, TrainConfig
from penstock.base.errors import Incomplete, MissingDependency, PenstockError, UsageError
from penstock.base.files import lock_file
from penstock.cli import main
from penstock.training.loop import train_workload
from penstock.training.tracking import events, follow, tell, trackers

from ..places import ROOT
from .comet_cloud import HOST, Cloud

SMALL = {"num_samples": 203, "batch_size": 8, "epochs": 2, "hidden_dims": (8, 4), "device": "cpu"}
WORDS = "--num-samples 203 --batch-size 8 --epochs 2 --hidden-dims 8 4 --device cpu".split()
"""Of the spirals: 18 steps to an epoch."""
KEY = "planted-4f1c9e77a0b24d6c"
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9"}
"""Of a machine whose proxy is not there."""

PACKAGES = {name: tracker.package for name, tracker in trackers.TRACKERS.items()}
needs = {
    name: pytest.mark.skipif(not find_spec(package), reason=f"{package} is not installed")
    for name, package in PACKAGES.items()
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("COMET_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(threads)


def tracked(out: Path, *names: str, **changes: Any) -> dict[str, Any]:
    settings = {"output_dir": out, "track": names, **changes}
    return train_workload("spiral", build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, settings))


def told(out: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for _, event in events.read_events(out / "events.jsonl") if event["event"] == kind
    ]


def series(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Of each metric its steps and values, as the file of events has them."""
    found: dict[str, list[tuple[int, float]]] = {}
    for _, event in events.read_events(out / "events.jsonl"):
        for name, value in event.get("metrics", {}).items():
            found.setdefault(name, []).append((event["step"], value))
    return {name: sorted(points) for name, points in found.items()}


def weights(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(out / "best_model.pth", weights_only=True)
    return found


# --- what a step pays --------------------------------------------------------------------------


def calls_of(work: Any) -> list[str]:
    """The functions of C that this thread calls meanwhile: all that can write, send or wait."""
    found: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            found.append(f"{argument.__module__ or ''}.{argument.__qualname__}")

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return [name for name in found if name != "sys.setprofile"]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tell.Tracking]:
    """A run that is tracked, by nobody who is really there."""
    monkeypatch.setattr(tell, "SYSTEM_EVERY_S", 1e6)
    config = build(TrainConfig, {"output_dir": tmp_path})
    made = tell.Tracking(config, 0, tell.run_facts("spiral", config, 1, "cpu"))
    yield made
    made.finish("complete", {})


def test_a_step_writes_nothing_and_waits_for_nobody(watched: tell.Tracking) -> None:
    times = {"step": 0.01, "forward": 0.004}
    silent = calls_of(lambda: watched.step(3, 0, 0.5, 0.001, times))
    assert silent == []  # one remainder, and that is all
    said = calls_of(lambda: watched.step(10, 0, 0.5, 0.001, times))
    harmless = ("lock.", "LockType.", "deque.", "dict.", "round", "time.time", "len")
    strange = [name for name in said if not any(word in name for word in harmless)]
    assert strange == [] and len(said) < 20, said


@pytest.mark.slow
@needs["tensorboard"]
def test_runs_that_are_tracked_take_the_same_steps(tmp_path: Path) -> None:
    tracked(tmp_path / "with", "tensorboard")
    tracked(tmp_path / "without")
    one, other = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "without" / "events.jsonl").exists()
    results = json.loads((tmp_path / "without" / "training_results.json").read_text())
    assert results["trackers"] == []


# --- what is told ------------------------------------------------------------------------------


@pytest.mark.slow
@needs["tensorboard"]
def test_events_are_those_of_the_run_and_tensorboard_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NAME", "spirals")
    results = tracked(tmp_path, "tensorboard", project="seas")
    (begin,) = told(tmp_path, "begin")
    assert (begin["project"], begin["name"], begin["tags"]) == ("seas", "spiral_1cpu",
                                                                ["spiral", "1cpu"])  # fmt: skip
    assert begin["parameters"]["batch_size"] == 8
    assert begin["parameters"]["global_batch_size"] == results["global_batch_size"] == 8
    assert begin["parameters"]["hidden_dims"] == [8, 4]
    assert not {"backbone", "output_dir", "track"} & begin["parameters"].keys()
    assert begin["environment"]["launch"]["job_id"] == "4711"
    assert begin["environment"]["libraries"]["torch"] == torch.__version__
    assert results["launch"] == begin["environment"]["launch"]
    assert results["launch"]["job_name"] == "spirals"
    assert json.loads((tmp_path / "args.json").read_text())["launch"] == results["launch"]
    assert results["ranks"][0]["host"] in results["launch"]["hosts"]

    import csv

    with (tmp_path / "steps" / "rank0.csv").open(newline="") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    steps = told(tmp_path, "step")
    assert [event["step"] for event in steps] == [1, 10, 20, 30]
    for event in steps:
        row = rows[event["step"]]
        assert event["metrics"]["train_loss_step"] == float(row["loss"])
        for phase in ("step_s", "data_wait_s", "forward_s", "optimizer_s"):
            assert event["metrics"][phase] == pytest.approx(float(row[phase]), abs=1e-9)
    for event, row in zip(told(tmp_path, "epoch"), results["history"], strict=True):
        assert (event["step"], event["epoch"]) == (row["step"], row["epoch"])
        assert event["metrics"]["val_loss"] == row["val_loss"]
        assert event["metrics"]["val_acc"] == row["val_acc"]
    assert all(event["metrics"]["system/rss_bytes"] > 0 for event in told(tmp_path, "system"))
    (end,) = told(tmp_path, "end")
    assert (end["status"], end["step"]) == ("complete", 36)
    assert end["metrics"]["best_val_acc"] == results["best"]["score"]

    (tracker,) = results["trackers"]
    assert tracker == {
        "name": "tensorboard", "where": "track/tensorboard", "run": "spiral_1cpu",
        "status": "ok", "dropped": 0, "error": None,
    }  # fmt: skip
    assert read_tensorboard(tmp_path) == rounded(series(tmp_path))


def read_tensorboard(out: Path) -> dict[str, list[tuple[int, float]]]:
    """By TensorBoard's own loader. It keeps 32 bits of a number."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(out / "track" / "tensorboard"), {"scalars": 0}).Reload()
    tags = found.Tags()["scalars"]
    return {tag: sorted((e.step, e.value) for e in found.Scalars(tag)) for tag in tags}


def rounded(values: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    short = torch.float32
    return {
        name: [(step, float(torch.tensor(value, dtype=short))) for step, value in points]
        for name, points in values.items()
    }


@pytest.mark.slow
@needs["tensorboard"]
def test_only_the_first_of_two_ranks_tells(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", "-m", "penstock", "train", "spiral", *WORDS]
    command += ["--distributed", "--track", "tensorboard", "--profile", "--profile-steps", "2"]
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (begin,) = told(tmp_path, "begin")
    assert begin["name"] == "spiral_2cpu"
    assert begin["parameters"]["world_size"] == 2
    results = json.loads((tmp_path / "training_results.json").read_text())
    assert [event["step"] for event in told(tmp_path, "epoch")] == [9, 18]
    assert results["launch"]["nodes"] == 1
    assert len({rank["host"] for rank in results["ranks"]}) == 1
    assert [each["status"] for each in results["trackers"]] == ["ok"]
    # Each rank has a trace, and in it the wait for the other.
    for rank in (0, 1):
        events_of = json.loads((tmp_path / "profile" / f"rank{rank}.json").read_text())
        names = {event.get("name") for event in events_of["traceEvents"]}
        assert {"forward", "backward", "communication", "optimizer"} <= names


def stop_after_21(out: Path, *names: str) -> None:
    def stop(now: Any) -> None:
        if now.step == 21:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {"output_dir": out, "track": names}
    config = build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, settings)
    with pytest.raises(Incomplete):
        train_workload("spiral", config, progress=stop)


@pytest.mark.slow
@needs["tensorboard"]
def test_a_run_that_goes_on_is_one_run(tmp_path: Path) -> None:
    stop_after_21(tmp_path, "tensorboard")
    stopped = json.loads((tmp_path / "training_results.json").read_text())
    assert stopped["status"] == "stopped"
    results = tracked(tmp_path, "tensorboard", resume=True)
    first, second = told(tmp_path, "begin")
    assert first["run"] == second["run"]
    assert (first["step"], second["step"]) == (0, 22)
    assert [end["status"] for end in told(tmp_path, "end")] == ["stopped", "complete"]
    assert results["trackers"][0]["status"] == "ok"
    assert read_tensorboard(tmp_path) == rounded(series(tmp_path))
    # And another run in its place begins anew.
    tracked(tmp_path, overwrite=True)
    assert not (tmp_path / "events.jsonl").exists()
    assert not (tmp_path / "track").exists()


# --- Comet, offline ----------------------------------------------------------------------------


def read_comet(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of the one archive of a run what stands over the experiment, and its messages."""
    (archive,) = (out / "track" / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        messages = file.read("messages.json").decode().splitlines()
        return json.loads(file.read("experiment.json")), [json.loads(line) for line in messages]


@pytest.mark.slow
@needs["comet"]
def test_without_a_key_comet_is_an_archive(tmp_path: Path) -> None:
    results = tracked(tmp_path, "comet", project="seas", experiment_name="mine")
    (tracker,) = results["trackers"]
    (begin,) = told(tmp_path, "begin")
    assert (tracker["status"], tracker["dropped"]) == ("ok", 0), tracker
    assert (tracker["where"], tracker["run"]) == ("track/comet", begin["run"])
    experiment, messages = read_comet(tmp_path)
    assert (experiment["offline_id"], experiment["project_name"]) == (begin["run"], "seas")
    assert set(experiment["tags"]) == {"spiral", "1cpu"}
    payloads = [message["payload"] for message in messages]
    others = {each["key"]: each["value"] for each in payloads if "key" in each}
    assert others["Name"] == "mine"
    assert others["libraries.torch"] == torch.__version__
    parameters = {
        each["param"]["paramName"]: each["param"]["paramValue"]
        for each in payloads if "param" in each
    }  # fmt: skip
    assert (parameters["batch_size"], parameters["hidden_dims"]) == ("8", "8 4")
    values: dict[str, list[tuple[int, float]]] = {}
    for each in payloads:
        if "metric" in each and each["metric"]["metricName"] != "process duration":
            metric = each["metric"]
            point = metric["step"], metric["metricValue"]
            values.setdefault(metric["metricName"], []).append(point)
    assert {name: sorted(points) for name, points in values.items()} == series(tmp_path)
    whole = [event for _, event in events.read_events(tmp_path / "events.jsonl")]
    lasted = (experiment["stop_time"] - experiment["start_time"]) / 1000
    assert whole[-1]["time"] - whole[0]["time"] <= lasted
    # Nothing that Comet would collect by itself.
    assert {message["type"] for message in messages} <= {"log_other", "parameter_msg", "metric_msg"}


@pytest.mark.slow
@needs["comet"]
def test_a_run_that_goes_on_is_two_archives_of_one_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tell, "STOP_WITHIN_S", 60.0)
    stop_after_21(tmp_path, "comet")
    (archive,) = (tmp_path / "track" / "comet").glob("*.zip")
    results = tracked(tmp_path, "comet", resume=True)
    assert [each["status"] for each in results["trackers"]] == ["ok"]
    values: dict[str, list[tuple[int, float]]] = {}
    strategies = {}
    for path in (tmp_path / "track" / "comet").glob("*.zip"):
        with zipfile.ZipFile(path) as file:
            experiment = json.loads(file.read("experiment.json"))
            messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
        assert experiment["offline_id"] == archive.stem
        strategies[path == archive] = experiment["resume_strategy"]
        for payload in (message["payload"] for message in messages):
            if "metric" in payload and payload["metric"]["metricName"] != "process duration":
                metric = payload["metric"]
                point = metric["step"], metric["metricValue"]
                values.setdefault(metric["metricName"], []).append(point)
    assert strategies == {True: "create", False: "get"}
    assert {name: sorted(points) for name, points in values.items()} == series(tmp_path)


@pytest.mark.slow
@needs["comet"]
def test_an_archive_is_made_later_and_uploaded_where_there_is_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = events.EventLog(tmp_path / "events.jsonl")
    config = build(TrainConfig, {"output_dir": tmp_path})
    known = tell.run_facts("spiral", config, 4, "cuda")
    log.begin(event="begin", step=0, run="a" * 32, trackers=["comet"], environment={}, **known)
    log.tell("step", 1, metrics={"train_loss_step": 0.5})
    log.close()
    command = [sys.executable, "-m", "penstock", "track", "sync", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"comet: track/comet, run {'a' * 32} has all events of {tmp_path}\n"
    experiment, messages = read_comet(tmp_path)
    assert set(experiment["tags"]) == {"spiral", "4gpu"}
    names = [m["payload"]["metric"]["metricName"] for m in messages if "metric" in m["payload"]]
    assert names.count("train_loss_step") == 1

    environment = {**os.environ, "COMET_API_KEY": KEY, **NO_NETWORK}  # a key, and nobody
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "penstock track: comet: www.comet.com does not answer; " in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert no_file_holds(KEY, tmp_path)


# --- Comet, live --------------------------------------------------------------------------------


@pytest.fixture
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    made = Cloud(tmp_path_factory.mktemp("cloud"))
    yield made
    made.close()


def at_home(folder: Path, *settings: dict[str, str]) -> dict[str, str]:
    """The variables of a user whose home is empty: no setting of Comet's, and no proxy."""
    folder.mkdir(exist_ok=True)
    theirs = ("COMET_", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
    found = {k: v for k, v in os.environ.items() if not k.upper().startswith(theirs)}
    for each in ({"HOME": str(folder)}, *settings):
        found |= each
    return found


def penstock(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
@needs["comet"]
def test_where_nothing_is_set_comet_s_own_address_is_asked(tmp_path: Path) -> None:
    """By a process of its own with an empty home; another address may stand in a file of Comet's,
    in a variable, or in the key itself."""
    code = "from penstock.training.tracking.comet import comet_account\n"
    code += "print(*comet_account())"

    def account(**more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
            env=at_home(tmp_path / "home", more),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert account() == "None https://www.comet.com/clientlib/"
    assert account(COMET_API_KEY=KEY) == f"{KEY} https://www.comet.com/clientlib/"
    own = "https://comet.example.org/clientlib/"
    (tmp_path / "home" / ".comet.config").write_text(f"[comet]\nurl_override = {own}\n")
    assert account(COMET_API_KEY=KEY) == f"{KEY} {own}"


@pytest.mark.slow
@needs["comet"]
def test_comet_is_live_with_no_setting_but_a_key(cloud: Cloud, tmp_path: Path) -> None:
    environment = at_home(tmp_path / "home", cloud.environment(), {"COMET_API_KEY": KEY})
    out = tmp_path / "out"
    words = ["train", "spiral", *WORDS, "--track", "comet", "--output-dir", str(out)]
    done = penstock(environment, *words, "--project", "seas", "--experiment-name", "mine")
    assert done.returncode == 0, done.stderr
    (tracker,) = json.loads((out / "training_results.json").read_text())["trackers"]
    (begin,) = told(out, "begin")
    if tracker["status"] == "behind":  # of a machine that is busy
        assert penstock(environment, "track", "sync", str(out)).returncode == 0
    assert (tracker["where"], tracker["run"]) == (f"https://{HOST}", begin["run"])
    assert set(cloud.asked) == {f"{HOST}:443"}
    (made,) = cloud.posted("add/run")
    assert (made["experimentKey"], made["projectName"]) == (begin["run"], "seas")
    metrics = cloud.metrics()
    del metrics["process duration"]  # Comet's own
    assert metrics == series(out)
    others = {each["key"]: each["value"] for each in cloud.posted("experiment/log-other")}
    assert (others["Name"], others["libraries.torch"]) == ("mine", torch.__version__)
    assert cloud.posted("tags/add-tags-to-experiment")[0]["addedTags"] == begin["tags"]
    assert not list(out.rglob("*.zip"))
    assert no_file_holds(KEY, out)


@pytest.mark.slow
@needs["comet"]
def test_a_run_that_found_no_network_is_uploaded_later(cloud: Cloud, tmp_path: Path) -> None:
    environment = at_home(tmp_path / "home", cloud.environment(), {"COMET_API_KEY": KEY})
    begun(tmp_path / "out")
    cloud.away = True
    done = penstock(environment, "track", "sync", str(tmp_path / "out"), "--to", "comet")
    assert done.returncode == 1
    assert f"penstock track: comet: {HOST} does not answer; " in done.stderr
    assert cloud.heard == []
    cloud.away = False
    done = penstock(environment, "track", "sync", str(tmp_path / "out"), "--to", "comet")
    assert done.returncode == 0, done.stderr
    assert f"comet: {'a' * 32}.zip is uploaded" in done.stdout
    assert cloud.metrics()["train_loss_step"] == [(1, 0.5)]
    assert {each["offline"] for each in cloud.posted("add/run")} == {True}


@pytest.mark.slow
@needs["comet"]
def test_a_live_run_whose_network_breaks_goes_on_live_and_not_as_an_archive(
    cloud: Cloud, tmp_path: Path
) -> None:
    """As an archive it would be another experiment of the same name."""
    environment = at_home(tmp_path / "home", cloud.environment(), {"COMET_API_KEY": KEY})
    out = tmp_path / "out"
    log = begun(out)
    sync = ["track", "sync", str(out), "--to", "comet"]
    assert penstock(environment, *sync).returncode == 0
    more = events.EventLog(log)
    more.begin(event="begin", step=1, run="a" * 32, trackers=[])
    more.tell("step", 2, metrics={"train_loss_step": 0.25})
    more.close()
    cloud.away = True
    done = penstock(environment, *sync)
    assert done.returncode == 1
    assert (
        f"comet at https://{HOST} did not take the events: PenstockError: it does not answer"
        in done.stderr
    )
    done = penstock({**environment, "COMET_API_KEY": ""}, *sync)
    assert "there is no key of Comet's to go on with it" in done.stderr
    cloud.away = False
    done = penstock(environment, *sync)
    assert done.returncode == 0, done.stderr
    assert cloud.metrics()["train_loss_step"] == [(1, 0.5), (2, 0.25)]
    assert len(cloud.posted("add/run")) == 1 and cloud.posted("get/run")
    assert not list(out.rglob("*.zip"))


# --- MLflow, by a real server ------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an MLflow server on loopback, its store an SQLite database."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/store.db", "--workers", "1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true",
                 "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_mlflow(uri: str, run: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """A run, and of each metric its steps and values, as MLflow's API tells them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_run(run)
    histories = {name: client.get_metric_history(run, name) for name in found.data.metrics}
    return found, {
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
    results = tracked(tmp_path / "live", "mlflow", project="live", experiment_name="mine")
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
    monkeypatch.setattr(tell, "STOP_WITHIN_S", 60.0)
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
    environment = {**os.environ, "MLFLOW_TRACKING_URI": server}
    words = ["train", "spiral", *WORDS, "--epochs", "5000", "--output-dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, "--track", "mlflow"],
        env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    state = tmp_path / "track" / "mlflow.json"
    until(lambda: state.exists() and json.loads(state.read_text())[0]["sent"] > 0)
    process.kill()
    process.wait()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    run = json.loads(state.read_text())[0]["run"]
    until(lambda: read_mlflow(server, run)[0].info.status == "FAILED")
    assert read_mlflow(server, run)[1] == series(tmp_path)


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
    run, values = read_mlflow(f"sqlite:///{out}/mlflow.db", delivery["run"])
    assert values == series(out) and values["train_loss_step"]
    assert run.info.status == "FAILED"


class Slow:
    """A tracker that takes its time for each few events, and much of it: it works on nothing, and
    it gets on."""

    package = "penstock"
    where = "a slow place"
    durable = True

    def __init__(self, out: Path, before: Any = ()) -> None: ...

    def open(self, begin: Any, run: str | None, keep: Any) -> str:
        return "one"

    def send(self, events: Any) -> None:
        time.sleep(SLOW_S if events else 0.0)

    def close(self) -> None: ...


SLOW_S = 2.0


@pytest.mark.slow
def test_a_slow_tracker_is_waited_for_while_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all it takes longer than a run waits for one that gets no further; and of a signal that
    comes meanwhile it is told."""
    code = (
        "import sys; from penstock.training.tracking import events, follow, trackers\n"
        "from tests.training import "
        "test_trackers as t; events.MOST_BYTES = 200; trackers.TRACKERS['mlflow'] = t.Slow\n"
        "from penstock.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    monkeypatch.setattr(tell, "SYSTEM_EVERY_S", 1e6)
    monkeypatch.setattr(tell, "STOP_WITHIN_S", 0.1)

    def follower(out: Path, name: str) -> subprocess.Popen[bytes]:
        words = ["track", "sync", str(out), "--to", name, "--follow"]
        return subprocess.Popen([sys.executable, "-c", code, *words], stdin=subprocess.PIPE)

    monkeypatch.setattr(tell, "_follower", follower)
    for out, stopped in ((tmp_path / "whole", False), (tmp_path / "stopped", True)):
        config = build(TrainConfig, {"output_dir": out, "track": ("mlflow",), "track_every": 1})
        made = tell.Tracking(config, 0, tell.run_facts("spiral", config, 1, "cpu"))
        for step in range(1, 6):
            made.step(step, 0, 0.5, 0.1, {})
        until(lambda: (out / "track" / "mlflow.json").exists())  # noqa: B023
        # It has begun. Below a second that it sleeps, it would be thought to be stuck.
        monkeypatch.setattr(follow, "IDLE_WITHIN_S", 4 * SLOW_S)
        said: list[str] = []
        (told,) = made.finish("complete", {}, lambda: stopped, said.append)  # noqa: B023
        assert said == ["mlflow is behind; Ctrl-C leaves what it lacks to penstock track sync"]
        assert told["status"] == ("behind" if stopped else "ok")
        assert (told["dropped"] > 0) == stopped
        monkeypatch.setattr(follow, "IDLE_WITHIN_S", 60.0)


def test_nobody_sends_the_events_of_a_run_twice(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "track").mkdir()
    with (tmp_path / "track" / "tensorboard.lock").open("a") as lock:
        assert lock_file(lock)
        with pytest.raises(UsageError, match=r"sends the events of .* to tensorboard now"):
            follow.deliver_events(tmp_path, "tensorboard")
        looks = iter([True, True, False])
        with pytest.raises(UsageError, match="another process sends"):
            follow.deliver_events(tmp_path, "tensorboard", lambda seconds: next(looks))
        assert list(looks) == []


@needs["tensorboard"]
def test_a_follower_of_a_run_that_was_replaced_says_nothing_of_the_new_one(tmp_path: Path) -> None:
    begun(tmp_path)

    def goes_on(seconds: float) -> bool:
        (tmp_path / "events.jsonl").unlink()
        begun(tmp_path)
        return False

    with pytest.raises(PenstockError, match=r"events\.jsonl is of another run now"):
        follow.deliver_events(tmp_path, "tensorboard", goes_on)
    assert follow.TrackerProgress.load(tmp_path, "tensorboard")[0].sent == 0


def until(true: Any) -> None:
    for _ in range(1200):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it never was")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_without_a_server_mlflow_is_a_database_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    results = tracked(tmp_path / "out", "mlflow")
    (tracker,) = results["trackers"]
    assert (tracker["status"], tracker["where"]) == ("ok", "mlflow.db")
    run, values = read_mlflow(f"sqlite:///{tmp_path}/out/mlflow.db", tracker["run"])
    assert values == series(tmp_path / "out")
    assert run.info.artifact_uri.startswith((tmp_path / "out").as_uri())
    assert list(elsewhere.iterdir()) == []


# --- trackers that fail ------------------------------------------------------------------------


@pytest.mark.slow
@needs["mlflow"]
def test_a_server_that_hangs_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and never answers."""
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
    one, other = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs["mlflow"]
def test_a_server_that_refuses_is_told_of_once_and_sent_to_later(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://user:{KEY}@127.0.0.1:{free.getsockname()[1]}/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", nobody)
    words = ["train", "spiral", *WORDS, "--track", "mlflow", "--output-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = (line for line in done.stderr.splitlines() if "mlflow" in line)
    said = [line for line in told if "is behind" not in line]  # where it is waited for at the end
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


def begun(out: Path) -> Path:
    """The file of events of a run that has just begun."""
    log = events.EventLog(out / "events.jsonl")
    known = tell.run_facts("spiral", build(TrainConfig, {"output_dir": out}), 1, "cpu")
    log.begin(event="begin", step=0, run="a" * 32, trackers=[], environment={}, **known)
    log.tell("step", 1, metrics={"train_loss_step": 0.5})
    log.close()
    return log.path


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
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    assert run.info.run_id == delivery.run
    assert (run.data.params["world_size"], run.data.metrics["train_loss_step"]) == ("1", 0.5)


@needs["tensorboard"]
def test_a_tracker_may_fail_for_weeks(tmp_path: Path) -> None:
    """After 1,024 failures twice as long each time is no number any more."""
    begun(tmp_path)
    (tmp_path / "track").mkdir()
    (tmp_path / "track" / "tensorboard").write_text("a file, where its folder should be")
    waits: list[float] = []

    def goes_on(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) < 1100

    delivery = follow.deliver_events(tmp_path, "tensorboard", goes_on)
    assert delivery.error is not None and "track/tensorboard" in delivery.error
    assert waits[1:4] == [2.0, 4.0, 8.0] and set(waits[8:]) == {60.0}


@needs["tensorboard"]
def test_a_run_that_was_sent_elsewhere_before_is_said_to_be_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path)
    sync = ["track", "sync", str(tmp_path), "--to", "tensorboard"]
    assert main(sync) == 0
    assert capsys.readouterr().err == ""
    follow.TrackerProgress("http://server:5000", "7", 3).save(tmp_path, "tensorboard")
    assert main(sync) == 0
    out, err = capsys.readouterr()
    told = "the run was sent to http://server:5000 before, and now it was not"
    assert err == f"penstock track: tensorboard: {told}\n"
    assert out.startswith("tensorboard: track/tensorboard")


def test_what_a_tracker_left_is_never_the_run_s(watched: tell.Tracking, tmp_path: Path) -> None:
    for text in ("torn{", "[3]", '[{"where": "x", "sent": null}]'):
        (tmp_path / "track").mkdir(exist_ok=True)
        (tmp_path / "track" / "comet.json").write_text(text)
        told = watched._outcome_of("comet")
        assert (told["status"], told["dropped"]) == ("failed", None)
        assert "comet.json is none of ours" in told["error"]
        assert "comet: nobody knows what it has taken (" in follow.outcome_of_tracker(
            told, tmp_path
        )
    (tmp_path / "track" / "comet.json").unlink()
    (tmp_path / "events.jsonl").unlink()  # by somebody who tidied up
    assert "No such file" in watched._outcome_of("comet")["error"]


def test_a_run_without_room_for_its_metrics_goes_on(tmp_path: Path) -> None:
    """The rows of its machine can be neither put away nor written."""
    (tmp_path / "track" / "metrics-2.jsonl" / "full").mkdir(parents=True)
    (tmp_path / "track" / "metrics.jsonl").mkdir()
    config = build(TrainConfig, {"output_dir": tmp_path})
    made = tell.Tracking(config, 0, tell.run_facts("spiral", config, 1, "cpu"))
    made.step(10, 0, 0.5, 0.1, {})
    assert made.finish("complete", {}) == []
    assert [event["event"] for _, event in events.read_events(tmp_path / "events.jsonl")][
        -1
    ] == "end"


def test_the_trackers_that_can_be_asked_for_are_those_that_there_are() -> None:
    (listed, _) = get_args(TrainConfig.model_fields["track"].annotation)
    assert get_args(listed) == tuple(trackers.TRACKERS)


# --- keys --------------------------------------------------------------------------------------


def no_file_holds(key: str, out: Path) -> bool:
    """Not even inside an archive; of a file in a database, its bytes."""
    for path in out.rglob("*"):
        if not path.is_file():
            continue
        assert key.encode() not in path.read_bytes(), path
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    assert key.encode() not in archive.read(name), (path, name)
    return True


@pytest.mark.slow
@pytest.mark.skipif(
    not all(find_spec(package) for package in PACKAGES.values()),
    reason="not all trackers are installed",
)
def test_no_file_of_a_run_holds_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = "COMET_API_KEY MLFLOW_TRACKING_TOKEN MLFLOW_TRACKING_PASSWORD AWS_SECRET_ACCESS_KEY"
    for name in keys.split():
        monkeypatch.setenv(name, KEY)
    for variable, value in NO_NETWORK.items():
        monkeypatch.setenv(variable, value)
    name = f"run-{KEY}"  # as somebody might call it who holds the key
    words = ["train", "spiral", *WORDS, "--output-dir", str(tmp_path), "--profile"]
    words += ["--track", "comet,mlflow,tensorboard", "--experiment-name", name]
    assert main(words) == 0
    assert KEY not in "".join(capfd.readouterr())
    told_of = json.loads((tmp_path / "training_results.json").read_text())["trackers"]
    assert [each["status"] for each in told_of] == ["ok", "ok", "ok"]
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"events.jsonl", "mlflow.db", "rank0.json", "args.json"} <= written
    assert no_file_holds(KEY, tmp_path)


# --- bad input ---------------------------------------------------------------------------------


def test_an_unknown_tracker_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "spiral", "--track", "comet,wandb"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "penstock train: --track 'wandb': input should be 'comet', 'mlflow' or 'tensorboard'\n"
    )
    assert main(["train", "spiral", "--track", ""]) == 2
    assert capsys.readouterr().err == "penstock train: --track: it is empty\n"
    assert main(["track", "sync", "outputs", "--to", "wandb"]) == 2
    assert capsys.readouterr().err == (
        "penstock track: --to wandb: the trackers are comet, mlflow, tensorboard\n"
    )
    assert main(["track", "sync", "outputs", "--follow"]) == 2
    assert "--follow goes with one tracker" in capsys.readouterr().err


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_library_that_is_missing_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = PACKAGES[name]
    monkeypatch.setitem(sys.modules, package, None)
    told = rf"--track {name}: {package} is not installed; run: pip install 'penstock-dl\[track\]'"
    with pytest.raises(MissingDependency, match=told):
        tracked(tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    told = "holds no events.jsonl of a run; train with --track"
    for names in ([], ["--to", "tensorboard"]):
        assert main(["track", "sync", str(tmp_path), *names]) == 2
    with pytest.raises(UsageError, match=told):
        follow.trackers_of(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": "step", "time": 1, "step": 3}\nnonsense')
    with pytest.raises(UsageError, match=told):
        follow.deliver_events(tmp_path, "tensorboard")


def test_texts_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)
    monkeypatch.setenv("SOME_SECRET", "short")
    nested = {"a": [f"x{KEY}y", 3], "b": ("https://me:pass@host:8/p?q", None)}
    assert keys.scrubbed(nested) == {"a": ["x***y", 3], "b": ["https://host:8/p?q", None]}
    assert keys.scrub("short") == "short"
    # Of two, one of which holds the other, nothing is left.
    monkeypatch.setenv("ANOTHER_TOKEN", f"{KEY}-and-more")
    assert keys.scrub(f"{KEY}-and-more {KEY}") == "*** ***"


@pytest.mark.slow
@needs["comet"]
def test_a_key_from_a_file_of_comet_s_is_not_told(tmp_path: Path) -> None:
    """No variable holds it. Comet says it in a complaint, as it does of one that is not valid."""
    (tmp_path / ".comet.config").write_text(f"[comet]\napi_key = {KEY}\n")
    code = (
        "from pathlib import Path; from penstock.base import secrets as keys\n"
        "from penstock.training.tracking import trackers\n"
        "trackers.Comet(Path('out'))\n"
        f"print(keys.scrub('The API key {KEY} is not valid'))"
    )
    environment = {**os.environ, "HOME": str(tmp_path), **NO_NETWORK}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "The API key *** is not valid\n"), done.stderr


# --- what they cost ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    not all(find_spec(package) for package in PACKAGES.values()),
    reason="not all trackers are installed",
)
def test_the_benchmark_keeps_all_steps_and_tells_ratios(tmp_path: Path) -> None:
    folder = ROOT / "benchmarks"
    told = (folder / "README.md").read_text().partition("<!-- trackers: begin -->")[2]
    command = [sys.executable, str(folder / "trackers.py"), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "README.md").read_text().endswith(told)
    (path,) = tmp_path.glob("*-trackers.jsonl.gz")
    with gzip.open(path, "rt") as file:
        samples = [json.loads(line) for line in file]
    assert [each["contender"] for each in samples] == ["none", "mlflow", "comet,mlflow,tensorboard"]
    alone, watched = samples[0]["step_s"], samples[1]["step_s"]
    assert len(alone) == len(watched) == 18
    row = next(line for line in done.stdout.splitlines() if line.startswith("| mlflow |"))
    assert f" {median(watched) / median(alone):.3f} [" in row
