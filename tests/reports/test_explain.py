"""``penstock explain``: the first sentences of the report of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import main

from .pages import HOSTILE, run_folder

READ = {"read": (9.0, 0.1, 1), "forward": (2.0, 8.0, 1), "write": (1.0, 9.0, 2)}


def test_names_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "a", READ, run={"name": HOSTILE}, cpu_seconds=12.0)
    code = main(["explain", str(folder)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "\x1b" not in out and "\x00" not in out
    title, _, verdict, *_ = out.splitlines()
    assert title == "a" and verdict.startswith("- Bound by read: its thread was busy 90% of the")
    assert main(["explain", str(tmp_path / "nothing")]) == 2
