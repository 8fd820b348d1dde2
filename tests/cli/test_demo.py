"""The demo, as far as it refuses to begin; test_packaging runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base import UsageError
from penstock.cli import demo, main


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("0 5 5", "--shape 0 5 5: give three numbers above 0, z y x"),
        ("9000 9000 9000", "the demo would hold 26.5 TiB, and 1.00 GiB are free; give a smaller"),
    ],
)
def test_a_volume_that_cannot_be_made_is_refused_before_anything_is(
    shape: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(demo, "available_memory", lambda: 2**30)
    assert main(["demo", "--out", str(tmp_path / "out"), "--shape", *shape.split()]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_run_has_the_name_and_tags_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, object] = {}

    def kept(_: object, values: dict[str, object]) -> None:
        given.update(values)
        raise UsageError("it is enough")

    monkeypatch.setattr(demo, "build", kept)
    words = ["demo", "--out", str(tmp_path / "out"), "--shape", "2", "4", "4"]
    assert main([*words, "--name", "mine", "--tag", "a=b"]) == 2
    assert (given["name"], given["tag"]) == ("mine", {"a": "b"})
    assert "it is enough" in capsys.readouterr().err


def test_what_the_demo_needs_is_looked_for_before_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "jinja2" else name)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    remedy = "jinja2 is not installed; run: pip install 'penstock-dl[demo]'"
    assert remedy in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
