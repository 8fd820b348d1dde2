"""What a run tells, and to whom: TensorBoard's files, and trackers that the run does not feel."""

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.base import MissingDependency, TrainConfig, build
from penstock.base import safe_text as keys
from penstock.cli import main
from penstock.training import trackers, tracking
from penstock.training.trackers import LoggedRun, MLflow
from penstock.training.tracking import TrackerState, Tracking

from .kit import forked_ranks
from .track_kit import (
    KEY,
    TRACKED_RUNS,
    WORDS,
    Series,
    expected,
    facts_of,
    needs,
    stop_after_21,
    tracked,
)

pytestmark = TRACKED_RUNS


def calls_of(work: Any) -> list[str]:
    """The functions of C that this thread calls meanwhile: all that can write, send or wait."""
    names: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            names.append(f"{argument.__module__ or ''}.{argument.__qualname__}")

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return [name for name in names if name != "sys.setprofile"]


def stand_in(tmp_path, monkeypatch, shell: str) -> Tracking:
    """A tracked run whose tracker's process is a shell script."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{shell}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(tracking, "SYSTEM_EVERY_S", 1e6)
    config = build(TrainConfig, {"output_dir": tmp_path / "run", "track": ("mlflow",)})
    return Tracking(config, facts_of(config))


def test_a_step_writes_nothing_and_waits_for_nobody(tmp_path, monkeypatch) -> None:
    watched = stand_in(tmp_path, monkeypatch, "exec cat")
    times = {"step": 0.01, "forward": 0.004}
    assert calls_of(lambda: watched.step(3, 0, 0.5, 0.001, times)) == []  # one remainder only
    said = calls_of(lambda: watched.step(10, 0, 0.5, 0.001, times))
    harmless = ("SimpleQueue.", "dict.", "isinstance", "isfinite", "len", "print")
    strange = [name for name in said if not any(word in name for word in harmless)]
    assert strange == [] and len(said) < 60, said
    watched.finish("complete", {})


def test_a_tracker_that_hangs_costs_metrics_and_no_time(tmp_path, monkeypatch) -> None:
    """Its process reads nothing. The queue fills; at the end it is killed."""
    monkeypatch.setattr(tracking, "COMPLETE_WITHIN_S", 0.2)
    watched = stand_in(tmp_path, monkeypatch, "exec sleep 600")
    for step in range(1, tracking.ROOM + 3000):  # returns each time
        watched.step(10 * step, 0, 0.5, 0.1, {"step": 0.1})
    began = time.monotonic()
    (outcome,) = watched.finish("complete", {})
    assert time.monotonic() - began < 60.0
    assert (outcome["status"], outcome["error"]) == ("failed", "it was not done in time")
    sentence = tracking.outcome_of_tracker(outcome, tmp_path)
    assert "metrics are missing in" in sentence and "not done in time" in sentence
    assert watched.finish("failed", {}) == [outcome]


def test_the_end_is_told_while_the_machine_is_still_sampled(tmp_path, monkeypatch) -> None:
    """The sampler may outlive its stop, as on a mount that hangs, and tell metrics meanwhile."""
    monkeypatch.setattr(tracking, "ROOM", 4)
    monkeypatch.setattr(tracking, "COMPLETE_WITHIN_S", 0.1)
    watched = stand_in(tmp_path, monkeypatch, "exec sleep 600")
    (process,) = watched._processes
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            process.tell(1, {"cpu_percent": 1.0})

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    samplers = [threading.Thread(target=sample) for _ in range(4)]
    for sampler in samplers:
        sampler.start()
    try:
        for _ in range(1500):
            process.end("complete")
    finally:
        stop.set()
        for sampler in samplers:
            sampler.join()
        sys.setswitchinterval(usual)
    assert watched.finish("complete", {})[0]["error"] == "it was not done in time"


@pytest.mark.slow
def test_nobody_waits_for_a_tracker_whose_user_does_not_want_to(tmp_path, monkeypatch) -> None:
    watched = stand_in(tmp_path, monkeypatch, "exec sleep 600")
    asked = iter([False] * 30)
    said: list[str] = []
    (outcome,) = watched.finish("complete", {}, lambda: next(asked, True), said.append)
    assert said == ["waiting for mlflow; Ctrl-C ends the wait"]
    assert outcome["status"] == "failed"


def test_a_tracker_whose_process_fails_is_told(tmp_path, monkeypatch) -> None:
    (outcome,) = stand_in(tmp_path, monkeypatch, "exit 3").finish("complete", {})
    assert (outcome["status"], outcome["error"]) == ("failed", "its process ended early")


def read_tensorboard(out: Path) -> tuple[Series, dict[str, Any]]:
    """The metrics and the hyperparameters, by TensorBoard's own loader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    accumulator = EventAccumulator(str(out / "track" / "tensorboard"), {"scalars": 0}).Reload()
    tags = accumulator.Tags()["scalars"]
    series = {tag: sorted((e.step, e.value) for e in accumulator.Scalars(tag)) for tag in tags}
    about = accumulator.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = HParamsPluginData.FromString(about).session_start_info.hparams
    kinds = {name: value.WhichOneof("kind") for name, value in settings.items()}
    return series, {name: getattr(settings[name], kind) for name, kind in kinds.items()}


def assert_in_tensorboard(out: Path) -> dict[str, Any]:
    """Whether TensorBoard has what was told, in 32 bits. Returns the hyperparameters."""
    series, hyperparameters = read_tensorboard(out)
    with_approx = {
        name: [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
        for name, points in series.items()
    }
    assert "hp_metric" not in series  # which Lightning makes up

    for name, points in expected(out).items():
        values = [(step, getattr(value, "expected", value)) for step, value in points]
        assert values == with_approx[name], name
    assert all(value > 0 for _, value in series["system/rss_bytes"])
    return hyperparameters


@pytest.mark.slow
@needs["tensorboard"]
def test_tensorboard_reads_what_was_told_of_a_run_that_went_on(tmp_path, monkeypatch) -> None:
    import torch

    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NAME", "spirals")
    monkeypatch.setattr(tracking, "STOP_WITHIN_S", 300.0)
    labels: dict[str, Any] = {"project": "seas", "tag": {"study": "a"}}
    stop_after_21(tmp_path, "tensorboard", **labels)
    stopped = json.loads((tmp_path / "training_results.json").read_text())
    assert (stopped["status"], stopped["trackers"][0]["status"]) == ("stopped", "ok")
    results = tracked(tmp_path, "tensorboard", resume=True, **labels)
    assert re.fullmatch(r"spiral-1cpu-\d{8}-\d{6}-[0-9a-f]{4}", results["name"])
    settings = assert_in_tensorboard(tmp_path)
    assert settings["batch_size"] == 8.0
    shown = [settings[name] for name in ("hidden_dims", "tag.study", "device")]
    assert shown == ["8 4", "a", "cpu"]
    assert settings["libraries.torch"] == torch.__version__
    assert settings["launch.job_id"] == "4711" and results["launch"]["job_name"] == "spirals"
    assert not {"backbone", "output_dir", "track"} & settings.keys()
    assert json.loads((tmp_path / "args.json").read_text())["launch"] == results["launch"]
    assert results["ranks"][0]["host"] in results["launch"]["hosts"]
    (tracker,) = results["trackers"]
    assert tracker == {
        "name": "tensorboard", "where": "track/tensorboard", "run": results["name"],
        "status": "ok", "error": None,
    }  # fmt: skip
    steps, _, metrics = zip(*tracking.read_machine_metrics(tmp_path), strict=True)
    assert steps[-1] == 36 and all(each["system/rss_bytes"] > 0 for each in metrics)
    assert len(list((tmp_path / "track").glob("metrics*.jsonl"))) == 2
    # And another run in its place begins anew.
    tracked(tmp_path, overwrite=True)
    assert not (tmp_path / "track").exists()
    assert json.loads((tmp_path / "training_results.json").read_text())["trackers"] == []


@pytest.mark.slow
@needs["tensorboard"]
def test_only_the_first_of_two_ranks_tells(tmp_path) -> None:
    words = ["spiral", *WORDS, "--track", "tensorboard", "--profile", "--profile-steps", "2"]
    done = forked_ranks(tmp_path / "run", *words)
    assert done.codes == [0, 0], done.said
    tmp_path /= "run"
    assert assert_in_tensorboard(tmp_path)["world_size"] == 2.0
    results = json.loads((tmp_path / "training_results.json").read_text())
    assert results["name"].startswith("spiral-2cpu-")
    assert results["launch"]["nodes"] == 1
    assert len({rank["host"] for rank in results["ranks"]}) == 1
    assert [each["status"] for each in results["trackers"]] == ["ok"]
    for rank in (0, 1):
        trace = json.loads((tmp_path / "profile" / f"rank{rank}.json").read_text())
        assert "aten::linear" in {event.get("name") for event in trace["traceEvents"]}


def test_mlflow_s_place_is_the_server_s_or_the_run_s(monkeypatch) -> None:
    assert MLflow(Path("run"), {}, TrackerState()).where == "track/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:word@server:5000/?token=abc")
    assert MLflow(Path("run"), {}, TrackerState()).where == "http://server:5000/"


class Refusing(trackers.Tracker):
    """A tracker that is gone for a while: it begins a run, and takes what it takes."""

    folder = "away"
    opened: list[str | None]
    answers = True
    version = "the run"

    def open(self, run: str | None) -> Any:
        Refusing.opened.append(run)
        return self

    def log_hyperparams(self, settings: Any) -> None:
        self.log_metrics(settings, 0)

    def log_metrics(self, metrics: Any, step: int) -> None:
        if not Refusing.answers:
            raise ConnectionError(f"it is away with {KEY}")

    def finalize(self, status: str) -> None: ...


def test_a_tracker_that_was_gone_goes_on_in_its_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", KEY)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Refusing)
    monkeypatch.setattr(Refusing, "opened", [], raising=False)
    monkeypatch.setattr(Refusing, "answers", False)
    now, said = 0.0, list[str]()
    facts = {"name": "a", "hyperparameters": {}}
    run = LoggedRun(tmp_path, "mlflow", facts, said.append, lambda: now)
    for step in range(3):  # the first fails, and the others are not tried
        run.take(step, {"loss": 1.0})
    now += trackers.AGAIN_AFTER_S
    run.take(3, {})  # fails in the run that it has begun
    Refusing.answers = True
    now += trackers.AGAIN_AFTER_S
    run.take(4, {})
    run.end("complete")
    assert Refusing.opened == [None, "the run", "the run"]
    state = TrackerState.load(tmp_path, "mlflow")
    assert state.run == "the run"
    assert state.error == "ConnectionError: it is away with ***"
    assert said == ["mlflow at track/away: ConnectionError: it is away with *** (the run goes on)"]


def test_what_a_tracker_left_is_never_the_run_s(tmp_path) -> None:
    """A state that no tracker wrote is that of a run that has not begun there."""
    (tmp_path / "track").mkdir()
    for text in ("torn{", "[3]", '{"where": "x", "sent": null}'):
        (tmp_path / "track" / "comet.json").write_text(text)
        assert TrackerState.load(tmp_path, "comet") == TrackerState()


def test_a_run_without_room_for_its_metrics_goes_on(tmp_path, monkeypatch) -> None:
    """The rows of its machine can be neither put away nor written."""
    (tmp_path / "run" / "track" / "metrics.jsonl").mkdir(parents=True)

    def full(path: Path) -> None:
        raise OSError(28, f"no space left for {path}")

    monkeypatch.setattr(tracking, "set_aside", full)
    made = stand_in(tmp_path, monkeypatch, "exec cat")
    made.step(10, 0, 0.5, 0.1, {})
    assert [each["name"] for each in made.finish("complete", {})] == ["mlflow"]
    assert tracking.read_machine_metrics(tmp_path / "run") == []


def test_the_trackers_that_can_be_asked_for_are_those_that_there_are() -> None:
    (listed, _) = get_args(TrainConfig.model_fields["track"].annotation)
    assert get_args(listed) == tuple(trackers.TRACKERS) == tuple(tracking.PACKAGES)


def test_an_unknown_tracker_is_refused(capsys) -> None:
    assert main(["train", "spiral", "--track", "comet,neptune"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "penstock train: --track 'neptune': input should be 'comet', 'mlflow', 'tensorboard' or "
        "'wandb'\n"
    )
    assert main(["train", "spiral", "--track", ""]) == 2
    assert capsys.readouterr().err == "penstock train: --track: it is empty\n"


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_missing_library_is_named_before_all_else(name: str, tmp_path, monkeypatch) -> None:
    package = tracking.PACKAGES[name][0]
    monkeypatch.setitem(sys.modules, package, None)
    extra = "train" if name == "tensorboard" else "track"
    reason = f"--track {name}: {package} is not installed; run: pip install 'penstock-dl[{extra}]'"
    with pytest.raises(MissingDependency, match=re.escape(reason)):
        tracked(tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


def test_texts_without_secrets(monkeypatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)
    monkeypatch.setenv("SOME_SECRET", "short")
    nested = {"a": [f"x{KEY}y", 3], "b": ("https://me:pass@host:8/p?q", None)}
    assert keys.scrubbed(nested) == {"a": ["x***y", 3], "b": ["https://host:8/p?q", None]}
    assert keys.scrub("short") == "short"
    # Of two, one of which holds the other, nothing is left.
    monkeypatch.setenv("ANOTHER_TOKEN", f"{KEY}-and-more")
    assert keys.scrub(f"{KEY}-and-more {KEY}") == "*** ***"
