"""The heap of a job that comes near to its plan is trimmed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.inference.stages import ceiling
from penstock.inference.stages.ceiling import MemoryCeiling

from ..preloaded import started

MIB = 2**20
GAPS = """
from penstock.base import one_heap
one_heap()
import numpy as np
from penstock.inference.planning.memory import resident_bytes
from penstock.inference.stages.ceiling import MemoryCeiling

pairs = [(np.ones(2**20, np.uint8), np.ones(2**12, np.uint8)) for _ in range(60)]
between = [small for _, small in pairs]  # the heap cannot shrink past them
most = resident_bytes()
del pairs
held = resident_bytes()
ceiling = MemoryCeiling(held, iter(range(100)).__next__)
ceiling.keep()
print(most >> 20, held >> 20, resident_bytes() >> 20, sum(map(len, between)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_gaps_between_what_is_held_are_given_back(tmp_path: Path) -> None:
    process = started(tmp_path, code=GAPS)
    process.join()
    most, held, after, _ = map(int, (tmp_path / "said").read_text().split())
    assert held > most - 6, "without it the heap keeps what is freed"
    assert after < held - 45


def test_memory_that_is_in_use_is_not_trimmed_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holds, seconds, trims = [100], [0.0], []
    monkeypatch.setattr(ceiling, "resident_bytes", lambda: holds[0] * MIB)
    monkeypatch.setattr(ceiling, "trim_heap", lambda: trims.append(holds[0]))
    kept = MemoryCeiling(200 * MIB, lambda: seconds[0])
    for now, held, expected in [
        (0.0, 180, []),
        (1.0, 190, [190]),  # nothing came of it
        (2.0, 300, [190]),  # too soon
        (11.0, 200, [190]),  # little more than after the last trim
        (12.0, 207, [190, 207]),
        (30.0, 220, [190, 207]),
    ]:
        seconds[0], holds[0] = now, held
        kept.keep()
        assert trims == expected, (now, held)
