"""A real training whose ranks are unequal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli import main

from ..training.kit import forked_ranks


@pytest.mark.slow
def test_a_rank_slowed_by_50_ms_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    words = ["tests.scaling.slowed:Slowed", "--num-samples", "200", "--batch-size", "4"]
    done = forked_ranks(tmp_path / "run", *words, "--epochs", "2", "--optimizer", "adam")
    assert done.codes == [0, 0], done.said
    assert main(["explain", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Rank 1 is the last in (?:[89]\d|100)% of \d+ steps", said), said
