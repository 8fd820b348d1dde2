"""A run at Comet: its archive without a key or a network, and live by a stand-in for its cloud."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penstock.base.caller import environment_kept
from penstock.scaling.sources.read import read_runs
from penstock.training import tracking

from ..preloaded import started
from .comet_cloud import HOST, Cloud
from .track_kit import (
    KEY,
    NO_NETWORK,
    TRACKED_RUNS,
    WORDS,
    Series,
    assert_logged,
    assert_one_run,
    needs,
    no_file_holds,
    stop_after_21,
    tracked,
)

pytestmark = [*TRACKED_RUNS, pytest.mark.slow, needs["comet"]]


def read_archive(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of an archive what stands over the experiment, and its messages."""
    with zipfile.ZipFile(path) as file:
        messages = file.read("messages.json").decode().splitlines()
        return json.loads(file.read("experiment.json")), [json.loads(line) for line in messages]


def metrics_in(messages: list[dict[str, Any]]) -> Series:
    values: Series = {}
    for metric in (each["payload"]["metric"] for each in messages if each["type"] == "metric_msg"):
        point = metric["step"], metric["metricValue"]
        values.setdefault(metric["metricName"], []).append(point)
    return values


def test_without_a_key_comet_is_an_archive_and_a_run_that_goes_on_two_of_one_experiment(
    tmp_path, monkeypatch
) -> None:
    import torch

    monkeypatch.setattr(tracking, "STOP_WITHIN_S", 300.0)
    labels: dict[str, Any] = {"project": "seas", "name": "mine", "tag": {"study": "a"}}
    stop_after_21(tmp_path, "comet", **labels)
    (first,) = (tmp_path / "track" / "comet").glob("*.zip")
    experiment, messages = read_archive(first)
    assert (experiment["offline_id"], experiment["project_name"]) == (first.stem, "seas")
    assert set(experiment["tags"]) == {"spiral", "1cpu", "study=a"}
    payloads = [message["payload"] for message in messages]
    assert {each["key"]: each["value"] for each in payloads if "key" in each}["Name"] == "mine"
    parameters = {
        each["param"]["paramName"]: each["param"]["paramValue"]
        for each in payloads if "param" in each
    }  # fmt: skip
    assert (str(parameters["batch_size"]), parameters["hidden_dims"]) == ("8", "8 4")
    assert parameters["libraries.torch"] == torch.__version__
    (tracker,) = tracked(tmp_path, "comet", resume=True, **labels)["trackers"]
    assert (tracker["status"], tracker["run"]) == ("ok", first.stem)
    assert tracker["where"] == "track/comet"
    assert "comet upload" in tracking.outcome_of_tracker(tracker, tmp_path)
    values: Series = {}
    strategies = {}
    for path in (tmp_path / "track" / "comet").glob("*.zip"):
        experiment, messages = read_archive(path)
        assert experiment["offline_id"] == first.stem
        strategies[path == first] = experiment["resume_strategy"]
        for name, points in metrics_in(messages).items():
            values.setdefault(name, []).extend(points)
        # Nothing that Comet would collect by itself.
        kinds = {message["type"] for message in messages}
        assert kinds <= {"log_other", "parameter_msg", "metric_msg"}
    assert strategies == {True: "create", False: "get"}
    assert_logged(values, tmp_path)


def at_home(folder: Path, *settings: dict[str, str]) -> dict[str, str]:
    """The variables of a user whose home is empty: no setting of Comet's, and no proxy."""
    folder.mkdir(exist_ok=True)
    theirs = ("COMET_", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
    variables = {k: v for k, v in os.environ.items() if not k.upper().startswith(theirs)}
    for each in ({"HOME": str(folder)}, *settings):
        variables |= each
    return variables


def test_where_nothing_is_set_comet_s_own_address_is_asked(tmp_path) -> None:
    """By a process of its own with an empty home; another address may stand in a file of Comet's,
    in a variable, or in the key itself. A key from a file is no variable's, and still not told."""
    code = "from penstock.base import scrub\n"
    code += "from penstock.training.trackers import comet_account\n"
    code += "print(*comet_account()); "
    code += f"print(scrub('The API key {KEY} is not valid'))"

    def account(**more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
            env=at_home(tmp_path / "home", more),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert account(COMET_API_KEY=KEY)[0] == f"{KEY} https://www.comet.com/clientlib/"
    address = "https://comet.example.org/clientlib/"
    settings = f"[comet]\nurl_override = {address}\napi_key = {KEY}\n"
    (tmp_path / "home" / ".comet.config").write_text(settings)
    assert account() == [f"{KEY} {address}", "The API key *** is not valid"]


def trained(environment: dict[str, str], out: Path, *more: str) -> tuple[dict[str, Any], str]:
    """The outcome of Comet in a training that ends well, and what the training said."""
    words = ["train", "spiral", *WORDS, "--track", "comet", "--output-dir", str(out), *more]
    with environment_kept():
        os.environ.clear()
        os.environ.update(environment)
        process = started(out.parent, words)
    process.join()
    said = (out.parent / "said").read_text()
    assert process.exitcode == 0, said
    assert KEY not in said and no_file_holds(KEY, out)
    (tracker,) = json.loads((out / "training_results.json").read_text())["trackers"]
    return tracker, said


def test_a_key_without_a_network_is_an_archive_that_comet_uploads(cloud: Cloud, tmp_path) -> None:
    """And the same training as its folder, and as its log, which has few digits."""
    out, log = tmp_path / "out", tmp_path / "slurm-31.out"
    home = at_home(tmp_path / "home", {"COMET_API_KEY": KEY, "SLURM_JOB_ID": "31"})
    tracker, said = trained(home | NO_NETWORK, out)
    assert (tracker["status"], tracker["where"]) == ("ok", "track/comet")
    assert f"comet upload {out}/track/comet/*.zip uploads it" in said
    (archive,) = out.glob("track/comet/*.zip")
    run = assert_one_run(out, archive)
    log.write_text(said)
    (logged,) = read_runs([log])
    assert run.seconds is not None and logged.seconds == pytest.approx(run.seconds, abs=0.006)
    assert (logged.job, logged.devices, logged.epochs, logged.batch) == ("31", 1, 2, 8)
    assert (logged.samples, logged.steps) == (run.samples, run.steps)
    assert logged.val_acc == pytest.approx(run.val_acc, abs=1e-4)
    assert len(read_runs([out, log])) == 1
    command = [sys.executable, "-m", "comet_ml.scripts.comet_upload", str(archive)]
    subprocess.run(command, check=True, env=home | cloud.environment())
    assert_logged(cloud.metrics(), out)
    assert {each["offline"] for each in cloud.posted("add/run")} == {True}


def test_comet_is_live_with_no_setting_but_a_key(cloud: Cloud, tmp_path) -> None:
    import torch

    environment = at_home(tmp_path / "home", cloud.environment(), {"COMET_API_KEY": KEY})
    out = tmp_path / "out"
    tracker, _ = trained(environment, out, "--project", "seas", "--experiment-name", "mine")
    assert (tracker["status"], tracker["where"]) == ("ok", f"https://{HOST}")
    assert set(cloud.asked) == {f"{HOST}:443"}
    (made,) = cloud.posted("add/run")
    assert (made["experimentKey"], made["projectName"]) == (tracker["run"], "seas")
    assert_logged(cloud.metrics(), out)
    parameters = {
        each["parameterName"]: each["parameterValue"]
        for batch in cloud.posted("experiment/parameter") for each in batch["values"]
    }  # fmt: skip
    assert parameters["libraries.torch"] == torch.__version__
    others = {each["key"]: each["value"] for each in cloud.posted("experiment/log-other")}
    assert others["Name"] == "mine"
    assert cloud.posted("tags/add-tags-to-experiment")[0]["addedTags"] == ["spiral", "1cpu"]
    assert not list(out.rglob("*.zip"))

    # Without its network the run goes on and says so, and does not become an archive, which would
    # be another experiment of the same name.
    cloud.away = True
    lost, said = trained(environment, out, "--resume", "--epochs", "3")
    assert (lost["status"], lost["where"], lost["run"]) == (
        "failed", tracker["where"], tracker["run"]
    )  # fmt: skip
    assert f"penstock train: comet at https://{HOST}: " in said
    cloud.away = False
    again, _ = trained(environment, out, "--resume", "--epochs", "4")
    assert again == tracker
    assert len(cloud.posted("add/run")) == 1 and cloud.posted("get/run")
    assert max(step for step, _ in cloud.metrics()["val_loss"]) == 72
