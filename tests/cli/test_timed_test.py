"""The fixture of pytest: what it times, keeps and compares, and what it costs unused."""

from __future__ import annotations

import contextlib
import gc
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main, timed_test
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Record, case_key

from ..anew import WAYS

pytest_plugins = ["pytester"]
PAGE = Path(__file__).parents[2] / "docs" / "compare.md"
TEST = """
def test_{}(penstock_bench):
    penstock_bench(sum, range(300), work={{'numbers': 300}})
"""
SUM = "test_it.py::test_sum"


def git(*words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def launch_at(commit: str, seconds: float, number: int, test: str = SUM, **facts: Any) -> Record:
    case = {"test": test}
    return Record.model_validate(
        {
            "id": f"{commit}{number}", "time": "2026-01-01", "scenario": "pytest", "case": case,
            "key": case_key("pytest", case), "launch": number, "status": "ok",
            "samples_s": {"step": (seconds * (1 + number / 1000),) * 3}, "work": {"numbers": 300},
            "facts": {"changes": None, **facts},
            "environment": {"machine_key": "m", "git": {"commit": commit, "dirty": False}},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with three tests, on a branch of one commit."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "test_it.py").write_text("".join(map(TEST.format, ("sum", "quick", "new"))))
    with contextlib.chdir(folder):
        git("init", "-q", "-b", "main")
        git("add", "-A")
        git("commit", "-qm", "one")
        git("switch", "-qc", "feature")
        git("commit", "-q", "--allow-empty", "-m", "two")
    return folder


@pytest.fixture
def project(
    pytester: pytest.Pytester, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """A copy of the repository; its machine is known at once."""
    shutil.copytree(repository, pytester.path, dirs_exist_ok=True)
    here = {"machine_key": "m", "git": {"commit": git("rev-parse", "HEAD"), "dirty": False}}
    monkeypatch.setattr(timed_test, "collect_environment", lambda folder: here)
    return pytester


def run(project: pytest.Pytester, *words: str) -> pytest.RunResult:
    """What is left out collects garbage, or is imported anew each time: it takes longer."""
    left_out = "cacheprovider unraisableexception xdist xdist.looponfail zarr anyio platformdirs"
    plain = [word for name in left_out.split() for word in ("-p", f"no:{name}")]
    gc.freeze()  # as whoever measures does collect, too
    return project.runpytest_inprocess(*plain, "--penstock-seconds=0.01", *words)


@pytest.mark.parametrize(
    ("words", "failed", "said"),
    [
        (["--penstock-fail-slower=5%"], 1, ["*slower against main (*beyond 5.0 %*",
         "*faster against main (*beyond 5.0 %*", "*; no launch of main in the ledger"]),
        pytest.param([], 0, ["*slower against main (*", "*faster against main (*",
                             "*; no launch of main in the ledger"], marks=pytest.mark.slow),
        (["--penstock-baseline=nowhere"], 0, ["*; no launch of nowhere in the ledger"] * 3),
    ],
)  # fmt: skip
def test_a_time_is_kept_and_compared_with_the_last_of_main(
    project: pytest.Pytester, words: list[str], failed: int, said: list[str]
) -> None:
    """There the first test took no time, the second took long, and the third was not."""
    base, ours = git("rev-parse", "main"), git("rev-parse", "HEAD")
    ledger, now = Ledger(project.path / "l"), 2e-6
    tests = [f"test_it.py::test_{name}" for name in ("sum", "quick", "new")]
    for test, before in zip(tests, (1e-9, 1.0, None), strict=True):
        for number in range(4):
            if before is not None:
                ledger.append(launch_at(base, before, number, test))
            if number:
                ledger.append(launch_at(ours, now, number - 1, test))
    result = run(project, f"--penstock-ledger={project.path / 'l'}", *words)
    result.assert_outcomes(passed=3 - failed, failed=failed)
    assert not failed or "FAILED test_it.py::test_sum" in result.stdout.str()
    lines = [f"{test}: {line}" for test, line in zip(tests, said, strict=True)]
    result.stdout.fnmatch_lines(["*penstock: times*", *lines])
    for test, record in zip(tests, ledger.records()[-3:], strict=True):
        assert (record.case, record.launch) == ({"test": test}, 3)
        assert record.name == test.partition("::")[2]
        assert record.work == {"numbers": 300} and record.samples_s["step"] and record.ok


def test_without_a_ledger_nothing_is_kept_and_a_mistake_is_one_sentence(
    project: pytest.Pytester,
) -> None:
    result = run(project, SUM)
    result.stdout.fnmatch_lines(["test_it.py::test_sum: *; not kept: no --penstock-ledger"])
    assert not list(project.path.glob("**/records.jsonl"))
    result = run(project, SUM, "--penstock-fail-slower=fast", "--penstock-ledger=l")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*--penstock-fail-slower fast is no share such as 5% or 0.05*"])


def test_other_machines_and_other_changes_are_no_side(project: pytest.Pytester) -> None:
    base, ours = git("rev-parse", "main"), git("rev-parse", "HEAD")
    ledger = Ledger(project.path / "l")
    there = {"machine_key": "there", "git": {"commit": base, "dirty": False}}
    ledger.append(launch_at(base, 1.0, 0).model_copy(update={"environment": there}))
    ledger.append(launch_at(ours, 1.0, 0, changes="abc"))
    result = run(project, SUM, "--penstock-ledger=l")
    result.stdout.fnmatch_lines(["*; not compared: *the launches ran on 2 machines*"])
    assert ledger.records()[-1].launch == 0


@pytest.mark.parametrize("run", WAYS)
def test_a_plugin_that_nobody_uses_imports_nothing(run: Callable[..., str]) -> None:
    code = "import penstock.cli.pytest_plugin as plugin; print(plugin.__name__)"
    printed = run(code, without={"numpy", "pydantic", "torch", "rich", "psutil"})
    assert printed == "penstock.cli.pytest_plugin\n"


@pytest.mark.slow
def test_the_example_of_the_docs_with_xdist(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    pytester.makepyfile(test_a=example, test_b=example)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    words = ("-p", "penstock.cli.pytest_plugin", "-p", "xdist.plugin", "-n", "2")
    result = pytester.runpytest_subprocess(
        *words, "--penstock-ledger=l", "--penstock-seconds=0.1", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["test_a.py::test_standardise: *; beside 1 other worker of xdist"])
    assert len(Ledger(pytester.path / "l").records()) == 2
    assert main(["report", "l", "--output", "r.md"]) == 0
    assert "test_b.py::test_standardise" in (pytester.path / "r.md").read_text()
