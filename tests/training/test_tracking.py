"""What a run tells, and to whom: TensorBoard's files, and trackers that the run does not feel."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, get_args

import pytest

from penstock.base import secrets as keys
from penstock.base.config.knobs import build
from penstock.base.config.train import TrainConfig
from penstock.base.errors import MissingDependency, PenstockError, UsageError
from penstock.base.files import lock_file
from penstock.cli import main
from penstock.training.tracking import events, follow, tell, trackers
from penstock.training.tracking.mlflow import MLflow, default_store

from ..places import ROOT
from .kit import forked_ranks
from .track_kit import (
    KEY,
    NO_NETWORK,
    PACKAGES,
    TRACKED_RUNS,
    WORDS,
    begun,
    best_weights,
    facts_of,
    needs,
    no_file_holds,
    series,
    stop_after_21,
    told,
    tracked,
    until,
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
    import torch

    tracked(tmp_path / "with", "tensorboard")
    tracked(tmp_path / "without")
    one, other = best_weights(tmp_path / "with"), best_weights(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "without" / "events.jsonl").exists()
    results = json.loads((tmp_path / "without" / "training_results.json").read_text())
    assert results["trackers"] == []


@pytest.mark.slow
@needs["tensorboard"]
def test_events_are_those_of_the_run_and_tensorboard_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NAME", "spirals")
    results = tracked(tmp_path, "tensorboard", project="seas", tag={"study": "a"})
    (begin,) = told(tmp_path, "begin")
    assert (begin["project"], begin["tags"]) == ("seas", ["spiral", "1cpu"])
    assert (begin["name"], begin["user_tags"]) == (results["name"], {"study": "a"})
    assert re.fullmatch(r"spiral-1cpu-\d{8}-\d{6}-[0-9a-f]{4}", results["name"])
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
        "name": "tensorboard", "where": "track/tensorboard", "run": results["name"],
        "status": "ok", "dropped": 0, "error": None,
    }  # fmt: skip
    assert read_tensorboard(tmp_path) == rounded(series(tmp_path))


def read_tensorboard(out: Path) -> dict[str, list[tuple[int, float]]]:
    """By TensorBoard's own loader. It keeps 32 bits of a number."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(out / "track" / "tensorboard"), {"scalars": 0}).Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: sorted((e.step, e.value) for e in accumulator.Scalars(tag)) for tag in tags}


def rounded(values: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    import torch

    short = torch.float32
    return {
        name: [(step, float(torch.tensor(value, dtype=short))) for step, value in points]
        for name, points in values.items()
    }


@pytest.mark.slow
@needs["tensorboard"]
def test_only_the_first_of_two_ranks_tells(tmp_path: Path) -> None:
    words = ["spiral", *WORDS, "--track", "tensorboard", "--profile", "--profile-steps", "2"]
    done = forked_ranks(tmp_path / "run", *words)
    assert done.codes == [0, 0], done.said
    tmp_path /= "run"
    (begin,) = told(tmp_path, "begin")
    assert begin["name"].startswith("spiral-2cpu-")
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


class Slow:
    """A tracker that takes its time for each few events, and much of it: it works on nothing, and
    it gets on."""

    package = "penstock"
    where = "a slow place"
    durable = True

    def __init__(self, out: Path, before: Any = (), store: Any = None) -> None: ...

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
        "test_tracking as t; events.MOST_BYTES = 200; trackers.TRACKERS['mlflow'] = t.Slow\n"
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
        made = tell.Tracking(config, 0, facts_of(config))
        for step in range(1, 6):
            made.step(step, 0, 0.5, 0.1, {})
        until(lambda: (out / "track" / "mlflow.json").exists())  # noqa: B023
        # It has begun. Below a second that it sleeps, it would be thought to be stuck.
        monkeypatch.setattr(follow, "IDLE_WITHIN_S", 4 * SLOW_S)
        said: list[str] = []
        (outcome,) = made.finish("complete", {}, lambda: stopped, said.append)  # noqa: B023
        assert said == ["mlflow is behind; Ctrl-C leaves what it lacks to penstock track sync"]
        assert outcome["status"] == ("behind" if stopped else "ok")
        assert (outcome["dropped"] > 0) == stopped
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


@needs["tensorboard"]
def test_a_tracker_may_fail_for_weeks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 1,024 failures twice as long each time is no number any more."""
    begun(tmp_path)
    (tmp_path / "track").mkdir()
    (tmp_path / "track" / "tensorboard").write_text("a file, where its folder should be")
    monkeypatch.setattr(follow.TrackerProgress, "save", lambda *_: None)  # 1,100 times on disk
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
    sentence = "the run was sent to http://server:5000 before, but not this time"
    assert err == f"penstock track: tensorboard: {sentence}\n"
    assert out.startswith("tensorboard: track/tensorboard")


class Listening:
    """A tracker that keeps what it is told first."""

    package, durable, where = "json", True, "track/told"
    heard: ClassVar[list[tuple[Any, Any]]] = []

    def __init__(self, out: Path, before: Any = (), store: Path | None = None) -> None:
        self._store = store

    def open(self, begin: events.Event, run: str | None, keep: Any) -> str:
        self.heard.append((self._store, begin))
        return "1"

    def send(self, happened: Any) -> None: ...

    def close(self) -> None: ...


def test_a_run_goes_on_at_its_trackers_under_its_newest_name_and_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun by a version that knew neither tags nor a store."""
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Listening)
    monkeypatch.setattr(Listening, "heard", [])
    old = {"run": "a", "name": "spiral_1cpu", "tags": ["spiral"], "parameters": {"lr": 1}}
    for more in ({}, {"name": "b", "user_tags": {"k": "v"}, "track_dir": "/s"}, {"name": "c"}):
        log = events.EventLog(tmp_path / "events.jsonl")
        log.begin(event="begin", step=0, environment={}, **(old | more))
        log.close()
        follow.deliver_events(tmp_path, "mlflow")
    follow.deliver_events(tmp_path, "mlflow", store=Path("/other"))
    stores, begins = zip(*Listening.heard, strict=True)
    assert stores == (None, Path("/s"), Path("/s"))  # nothing is left to send to another
    names = [(begin["name"], begin["user_tags"], begin["parameters"]) for begin in begins]
    assert names == [
        ("spiral_1cpu", {}, {"lr": 1}),
        ("b", {"k": "v"}, {"lr": 1}),
        ("c", {"k": "v"}, {"lr": 1}),
    ]


def test_mlflow_s_place_is_the_flag_s_or_the_server_s_or_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert MLflow(Path("run")).where == str(tmp_path / "penstock" / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:word@server:5000/?token=abc")
    assert MLflow(Path("run")).where == "http://server:5000/"
    assert MLflow(Path("run"), (), tmp_path / "s").where == str(tmp_path / "s" / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_store() == tmp_path / ".local" / "share" / "penstock"


def test_what_a_tracker_left_is_never_the_run_s(watched: tell.Tracking, tmp_path: Path) -> None:
    for text in ("torn{", "[3]", '[{"where": "x", "sent": null}]'):
        (tmp_path / "track").mkdir(exist_ok=True)
        (tmp_path / "track" / "comet.json").write_text(text)
        outcome = watched._outcome_of("comet")
        assert (outcome["status"], outcome["dropped"]) == ("failed", None)
        assert "comet.json was not written by Penstock" in outcome["error"]
        assert "comet: nobody knows what it has taken (" in follow.outcome_of_tracker(
            outcome, tmp_path
        )
    (tmp_path / "track" / "comet.json").unlink()
    (tmp_path / "events.jsonl").unlink()  # by somebody who tidied up
    assert "No such file" in watched._outcome_of("comet")["error"]


def test_a_run_without_room_for_its_metrics_goes_on(tmp_path: Path) -> None:
    """The rows of its machine can be neither put away nor written."""
    (tmp_path / "track" / "metrics-2.jsonl" / "full").mkdir(parents=True)
    (tmp_path / "track" / "metrics.jsonl").mkdir()
    config = build(TrainConfig, {"output_dir": tmp_path})
    made = tell.Tracking(config, 0, facts_of(config))
    made.step(10, 0, 0.5, 0.1, {})
    assert made.finish("complete", {}) == []
    assert [event["event"] for _, event in events.read_events(tmp_path / "events.jsonl")][
        -1
    ] == "end"


def test_the_trackers_that_can_be_asked_for_are_those_that_there_are() -> None:
    (listed, _) = get_args(TrainConfig.model_fields["track"].annotation)
    assert get_args(listed) == tuple(trackers.TRACKERS)


@pytest.mark.slow
@pytest.mark.skipif(
    not all(find_spec(package) for package in PACKAGES.values()),
    reason="not all trackers are installed",
)
def test_no_file_of_a_run_holds_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = (
        "COMET_API_KEY MLFLOW_TRACKING_TOKEN MLFLOW_TRACKING_PASSWORD AWS_SECRET_ACCESS_KEY "
        "WANDB_API_KEY"
    )
    for name in keys.split():
        monkeypatch.setenv(name, KEY)
    for variable, value in NO_NETWORK.items():
        monkeypatch.setenv(variable, value)
    name = f"run-{KEY}"  # as somebody might call it who holds the key
    words = ["train", "spiral", *WORDS, "--output-dir", str(tmp_path), "--profile"]
    words += ["--track", "comet,mlflow,tensorboard,wandb", "--name", name, "--tag", f"a={KEY}"]
    words += ["--track-dir", str(tmp_path / "store")]
    assert main(words) == 0
    assert KEY not in "".join(capfd.readouterr())
    told_of = json.loads((tmp_path / "training_results.json").read_text())["trackers"]
    assert [each["status"] for each in told_of] == ["ok"] * 4
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"events.jsonl", "mlflow.db", "rank0.json", "args.json"} <= written
    assert no_file_holds(KEY, tmp_path)


def test_an_unknown_tracker_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "spiral", "--track", "comet,neptune"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "penstock train: --track 'neptune': input should be 'comet', 'mlflow', 'tensorboard' or "
        "'wandb'\n"
    )
    assert main(["train", "spiral", "--track", ""]) == 2
    assert capsys.readouterr().err == "penstock train: --track: it is empty\n"
    assert main(["track", "sync", "outputs", "--to", "neptune"]) == 2
    assert capsys.readouterr().err == (
        "penstock track: --to neptune: the trackers are comet, mlflow, tensorboard, wandb\n"
    )
    assert main(["track", "sync", "outputs", "--follow"]) == 2
    assert "--follow goes with one tracker" in capsys.readouterr().err


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_library_that_is_missing_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = PACKAGES[name]
    monkeypatch.setitem(sys.modules, package, None)
    reason = rf"--track {name}: {package} is not installed; run: pip install 'penstock-dl\[track\]'"
    with pytest.raises(MissingDependency, match=reason):
        tracked(tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    reason = "holds no events.jsonl of a run; train with --track"
    for names in ([], ["--to", "tensorboard"]):
        assert main(["track", "sync", str(tmp_path), *names]) == 2
    with pytest.raises(UsageError, match=reason):
        follow.trackers_of(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": "step", "time": 1, "step": 3}\nnonsense')
    with pytest.raises(UsageError, match=reason):
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
@pytest.mark.skipif(
    not all(find_spec(package) for package in PACKAGES.values()),
    reason="not all trackers are installed",
)
def test_the_benchmark_keeps_all_steps_and_tells_ratios(tmp_path: Path) -> None:
    folder = ROOT / "benchmarks"
    block = (folder / "README.md").read_text().partition("<!-- trackers: begin -->")[2]
    command = [sys.executable, str(folder / "trackers.py"), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "README.md").read_text().endswith(block)
    (path,) = tmp_path.glob("*-trackers.jsonl.gz")
    with gzip.open(path, "rt") as file:
        samples = [json.loads(line) for line in file]
    assert [each["contender"] for each in samples] == ["none", "mlflow", "comet,mlflow,tensorboard"]
    alone, watched = samples[0]["step_s"], samples[1]["step_s"]
    assert len(alone) == len(watched) == 18
    row = next(line for line in done.stdout.splitlines() if line.startswith("| mlflow |"))
    assert f" {median(watched) / median(alone):.3f} [" in row
