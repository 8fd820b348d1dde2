"""A run at Comet: its archive without a key or a network, and live by a stand-in for its cloud."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penstock.base.config.knobs import build
from penstock.base.config.train import TrainConfig
from penstock.training.tracking import events, tell

from .comet_cloud import HOST, Cloud
from .track_kit import (
    KEY,
    NO_NETWORK,
    TRACKED_RUNS,
    WORDS,
    begun,
    facts_of,
    needs,
    no_file_holds,
    series,
    stop_after_21,
    told,
    tracked,
)

pytestmark = TRACKED_RUNS


def read_comet(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of the one archive of a run what stands over the experiment, and its messages."""
    (archive,) = (out / "track" / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        messages = file.read("messages.json").decode().splitlines()
        return json.loads(file.read("experiment.json")), [json.loads(line) for line in messages]


@pytest.mark.slow
@needs["comet"]
def test_without_a_key_comet_is_an_archive(tmp_path: Path) -> None:
    import torch

    results = tracked(tmp_path, "comet", project="seas", name="mine")
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
    monkeypatch.setattr(tell, "STOP_WITHIN_S", 300.0)
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
    facts = facts_of(config, 4, "cuda")
    log.begin(event="begin", step=0, run="a" * 32, trackers=["comet"], environment={}, **facts)
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


def at_home(folder: Path, *settings: dict[str, str]) -> dict[str, str]:
    """The variables of a user whose home is empty: no setting of Comet's, and no proxy."""
    folder.mkdir(exist_ok=True)
    theirs = ("COMET_", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
    variables = {k: v for k, v in os.environ.items() if not k.upper().startswith(theirs)}
    for each in ({"HOME": str(folder)}, *settings):
        variables |= each
    return variables


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
    address = "https://comet.example.org/clientlib/"
    (tmp_path / "home" / ".comet.config").write_text(f"[comet]\nurl_override = {address}\n")
    assert account(COMET_API_KEY=KEY) == f"{KEY} {address}"


@pytest.mark.slow
@needs["comet"]
def test_comet_is_live_with_no_setting_but_a_key(cloud: Cloud, tmp_path: Path) -> None:
    import torch

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
    assert "at comet.com, and there is no key to go on with it" in done.stderr
    cloud.away = False
    done = penstock(environment, *sync)
    assert done.returncode == 0, done.stderr
    assert cloud.metrics()["train_loss_step"] == [(1, 0.5), (2, 0.25)]
    assert len(cloud.posted("add/run")) == 1 and cloud.posted("get/run")
    assert not list(out.rglob("*.zip"))


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
