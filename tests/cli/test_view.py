"""``penstock view``: the planes of an array as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main, view
from penstock.data import open_source

from ..later import imported_later

imported_later("matplotlib")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("volume.npy", np.arange(6 * 40 * 30, dtype="float32").reshape(6, 40, 30))
    np.save("plane.npy", np.full((40, 30), np.nan))


def test_a_volume_has_three_planes() -> None:
    assert main(["view", "volume.npy"]) == 0
    before = Path("view.png").read_bytes()
    assert before.startswith(b"\x89PNG")
    assert main(["view", "volume.npy", "plane.npy"]) == 0, "which replaces what view has drawn"
    assert Path("view.png").read_bytes() != before


def test_pixels_are_left_out_by_pieces_as_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "_SIDE", 12)
    source, array = open_source("volume.npy"), np.load("volume.npy")
    for axis, right in ((2, array[3, ::4, ::3]), (3, array[:, 20, ::3]), (4, array[:, ::4, 15])):
        plane, steps = view._plane(source, [0, 0, 3, 20, 15], axis)
        assert (plane == right).all() and steps[1] in (3, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("volume.npy", "--c", "1"), "--c 1 is out of range"),
        (("none.zarr",), "none.zarr: no such file"),
        (("volume.npy", "volume.npy", "plane.npy"), "one array or two, not 3"),
        (("volume.npy", "--out", "plane.npy"), "is not known to be Penstock's"),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("view.png").exists()
