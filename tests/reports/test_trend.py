"""A case over commits: its order, its steps in words, its figure, its gate."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Record
from penstock.reports.trend.report import watch

from .pages import HOSTILE
from .test_compare import record


def history(
    n: int = 12,
    step: float = 1.2,
    at: int = 6,
    commits: list[str] | None = None,
    seed: int = 0,
    **fields: Any,
) -> list[Record]:
    """Three launches of each of ``n`` commits, slower from ``at`` on."""
    rng = np.random.default_rng(seed)
    names = commits or [f"{number:02d}" * 20 for number in range(n)]
    machine = {"machine_key": "here", **fields.pop("environment", {})}
    records = []
    for number, name in enumerate(names):
        for launch in range(3):
            level = (step if number >= at else 1.0) * rng.lognormal(0, 0.01)
            environment = machine | {"git": {"commit": name, "dirty": False}}
            libraries = {"python": "3.11", "torch": "2.6" if number < at else "2.7"}
            records.append(
                record(
                    [level, level],
                    launch,
                    time=f"2026-01-{number + 1:02d}T00:00:0{launch}+00:00",
                    environment=environment | {"libraries": libraries},
                    **fields,
                )
            )
    return records


def said(records: list[Record], *words: str, folder: Path) -> str:
    ledger = folder / "l"
    for each in records:
        Ledger(ledger).append(each)
    assert main(["trend", str(ledger), *words]) == 0
    return ""


def test_a_step_is_named_with_its_commits_size_and_what_else_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(history(), "--json", str(tmp_path / "t.json"), folder=tmp_path)
    out = capsys.readouterr().out
    assert "- Slower from 0505050505 to 0606060606: 1.2" in out
    assert "[12 commits, p 0.0" in out and "libraries changed there, too: torch 2.6 to 2.7." in out
    assert "git does not know their commits here" in out
    assert "1 series: 1 step of 2.0 % or more, 1 slower, 0 faster; 5.0 % false alarms" in out
    document = json.loads((tmp_path / "t.json").read_text())
    (step,) = document["series"][0]["steps"]
    assert (step["from"], step["to"]) == ("05" * 20, "06" * 20)
    assert step["low"] < 1.2 < step["high"] and document["summary"] in out


def test_the_words_turn_with_the_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(history(step=1 / 1.2), folder=tmp_path / "a")
    assert "Faster from 0505050505" in capsys.readouterr().out
    said(history(step=1.0), folder=tmp_path / "b")
    assert "- No step in 12 commits, 36 launches (5.0 % false alarms)." in capsys.readouterr().out
    said(history(step=1.2), "--least", "50%", folder=tmp_path / "c")
    assert "0 steps of 50 % or more" in capsys.readouterr().out
    said(history(n=5), folder=tmp_path / "d")
    out = capsys.readouterr().out
    assert "Too short for steps: 5 commits, 15 launches, and a step needs at least 8 commits" in out
    assert "1 too short to show one" in out


def test_machines_and_settings_are_series_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = history(10, step=1.0, environment={"machine_key": "there"})
    hostile = history(10, step=1.0, knobs={"model": HOSTILE})
    figure = tmp_path / "t.svg"
    said([*history(), *other, *hostile], "--output", str(figure), folder=tmp_path)
    out = capsys.readouterr().out
    assert "model model=denoise-net, machine here" in out
    assert "model model=denoise-net, machine there" in out
    assert "3 series: 1 step" in out and "1.7 % false alarms)" in out, "of all series together"
    assert "\x1b" not in out and "\\x1b[2J" in out
    assert "<script>" not in figure.read_text()


def test_launches_of_one_commit_on_two_days_show_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(history(commits=["ab" * 20] * 12), folder=tmp_path)
    assert "one commit on two days: the machine changed and not the code" in capsys.readouterr().out


def test_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def gate(records: list[Record], name: str, *words: str) -> int:
        for each in records:
            Ledger(tmp_path / name).append(each)
        return main(["trend", str(tmp_path / name), "--fail-if-slower", "5%", *words])

    assert gate(history(), "slower") == 1
    assert "The gate fails: at 1 of the steps a case became slower" in capsys.readouterr().out
    assert gate([], "slower", "--since", "0202") == 1
    assert gate([], "slower", "--since", "0707") == 0, "the step lies before it"
    assert gate(history(step=0.8), "faster") == 0
    assert gate(history(n=4), "short") == 3
    assert gate([], "slower", "--since", "beef") == 2
    assert "--since beef: no launch was made at it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--false-alarms", "60%"], 2, "--false-alarms 60% must be below 50%"),
        (["--least", "much"], 2, "--least much is no share"),
        (["--since", "ab"], 2, "add --fail-if-slower"),
        (["--metric", "device"], 2, "--metric device was not measured; there is step"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(tmp_path).append(record())
    assert main(["trend", str(tmp_path), *words]) == code
    assert message in capsys.readouterr().err


def test_nothing_that_ran_is_nothing_to_show(tmp_path: Path) -> None:
    Ledger(tmp_path).append(record(None, status="crash"))
    assert main(["trend", str(tmp_path)]) == 4


def git(folder: Path, *words: str, said: str = "") -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True, input=said
    )
    return done.stdout.strip()


def test_commits_are_in_the_order_of_ancestry_where_git_knows_them(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    who = "committer a <a@b> 0 +0000\n"
    sixteen = "".join(f"commit refs/heads/all\n{who}data 0\n" for _ in range(16))
    git(tmp_path, "fast-import", "--quiet", said=sixteen)
    commits = git(tmp_path, "rev-list", "--reverse", "all").split()[1::2]
    records = history(n=8, at=4, commits=commits)
    turned = [r.model_copy(update={"time": f"2026-02-{28 - i:02d}"}) for i, r in enumerate(records)]
    options = {"metric": "step", "rate": 0.05, "least": 0.02, "seed": 0}
    (trend,) = watch(turned, folder=tmp_path, **options).trends  # type: ignore[arg-type]
    series = trend.series
    assert series.by_ancestry and list(dict.fromkeys(p.commit for p in series.points)) == commits
    assert series.between(series.points[0], series.points[-1]) == 14


def test_runs_lie_at_the_commit_that_they_were_started_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    np.save("in.npy", np.zeros((8, 8, 8), np.float32))
    infer = "--in-spec in.npy --model-type identity --normalize none --patch 8 --overlap 0".split()
    train = "spiral --epochs 1 --num-samples 64 --batch-size 16".split()
    commits = []
    for number in range(2):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", str(number))
        commits.append(git(tmp_path, "rev-parse", "HEAD"))
        assert main(["infer", *infer, "--out-spec", f"runs/infer-{number}.zarr"]) == 0
        assert main(["train", *train, "--output-dir", f"runs/train-{number}"]) == 0
    assert main(["trend", "runs", "--json", "trend.json"]) == 0
    trends = json.loads(Path("trend.json").read_text())["series"]
    assert [[point["commit"] for point in trend["points"]] for trend in trends] == [commits] * 2
    assert main(["compare", "runs/infer-0.zarr", "runs/infer-1.zarr"]) in (0, 1, 3, 4)
    assert commits[1][:7] in capsys.readouterr().out
