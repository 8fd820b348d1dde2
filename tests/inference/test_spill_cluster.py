"""What really lies spilled at once on a cluster, and what is joined without a part."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main
from penstock.inference.planning import spill_room

from ..preloaded import forked_workers
from .cluster_kit import (
    NET,
    infer,
    make_blocks_small,
    place,
    values,
    write_input,
    written,
    written_alone,
)

__all__ = ["place"]  # fixtures

pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
SPILL = ("--cluster", "local:2", "--spill", "always", "--parts", "60")
FOLDER = Path("out.zarr.penstock")


def files_spilled() -> dict[str, int]:
    """The bytes of each file that lies spilled, by its path."""
    sizes = {}
    for unit, _, names in os.walk(FOLDER / "spill"):
        for name in names:
            with suppress(FileNotFoundError):
                sizes[f"{unit}/{name}"] = Path(unit, name).stat().st_size
    return sizes


@contextmanager
def watched() -> Iterator[list[int]]:
    """The bytes that lie spilled, looked at all the time.

    What is there in two looks lies there between them, all of it at once: on a busy machine one
    look takes so long that it meets files of which the first is gone before the last is made.
    """
    seen, ended = [0], threading.Event()

    def look() -> None:
        before = files_spilled()
        while not ended.wait(0.005):
            now = files_spilled()
            seen.append(sum(size for path, size in before.items() if path in now))
            before = now

    thread = threading.Thread(target=look)
    thread.start()
    yield seen
    ended.set()
    thread.join()


def test_no_more_lies_spilled_at_once_than_the_plan_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input((192, 32, 32))  # twelve layers of parts
    make_blocks_small(monkeypatch)
    code = "\nfrom penstock.inference.planning import spill_room\nspill_room.AHEAD = 1\n"
    Path("net.py").write_text(Path("net.py").read_text() + code)
    monkeypatch.setattr(spill_room, "AHEAD", 1)  # few parts ahead of those that are done
    alone = written_alone()
    with forked_workers(), watched() as seen:
        assert infer(*SPILL) == 0, capsys.readouterr().err
    assert np.array_equal(values("out.zarr"), alone)
    stated = json.loads((FOLDER / "run.json").read_text())["plan"]["spill"]
    assert 0 < max(seen) <= stated["peak"] < 0.8 * stated["bytes"]
    said = capsys.readouterr().out
    assert re.search(r"spill .* spilled in all, at most ", said)


POISON = """
from pathlib import Path

class Poison(nn.Module):
    def forward(self, x):
        if (x > 5).any() and Path("poison").exists():
            raise RuntimeError("poison")
        return x

def poison():
    return Poison()
"""


def test_borders_of_a_part_that_fails_are_joined_where_they_can_and_resume_does_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_blocks_small(monkeypatch, NET + POISON)
    array = np.zeros((48, 64, 80), "float32")
    array[30, 30, 30] = 9
    np.save("in.npy", array)
    Path("poison").touch()
    words = ("--model-type", "net.py:poison", "--normalize", "none", *SPILL)
    with forked_workers():
        assert infer(*words, "--max-failed-parts", "1", "--part-retries", "0") == 3
    said = capsys.readouterr().err
    lacking = int(re.search(r"(\d+) of 60 blocks, in \d+ parts?, are not written", said)[1])  # type: ignore[index]
    done = {line.split(" v")[0].split(" f")[0] for line in written(FOLDER)}
    assert len(done) == 60 - lacking
    assert lacking == 2 * 3 * 3, "what one block reaches"
    lying = {path.parent.name.replace(".", " ") for path in FOLDER.glob("spill/*/*/*")}
    assert not lying & done
    Path("poison").unlink()
    with forked_workers():
        assert infer(*words, "--resume") == 0
    assert infer(*words[:4], out="alone.zarr") == 0
    assert np.array_equal(values("out.zarr"), values("alone.zarr"))
    assert main(["verify", "out.zarr"]) == 0
    assert not (FOLDER / "spill").exists()
