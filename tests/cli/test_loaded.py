"""What a verb imports of ours: no more than its work needs."""

import json

import numpy as np
import pytest

from ..anew import run_fresh
from ..scaling.kit import log

MAIN = """
import contextlib, io, json, sys
from penstock.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(sys.argv[1:]) == 0
print(json.dumps([name for name in sys.modules if name.startswith("penstock.")]))
"""


def loaded_by(*words: object) -> list[str]:
    return json.loads(run_fresh(MAIN, [str(word) for word in words]))


def wings_of(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names}


@pytest.mark.slow
def test_a_study_of_two_logs_loads_few_rooms(tmp_path) -> None:
    for name, devices, seconds in (("a.log", 1, 362.45), ("b.log", 4, 95.23)):
        (tmp_path / name).write_text(log(name[0], devices, seconds))
    names = loaded_by("scaling", tmp_path / "a.log", tmp_path / "b.log")
    assert len(names) <= 70
    assert wings_of(names).isdisjoint({"bench", "cluster", "data", "inference"})


@pytest.mark.slow
def test_infer_on_one_machine_loads_nothing_of_other_work(tmp_path) -> None:
    np.save(tmp_path / "in.npy", np.zeros((16, 16, 16), "uint16"))
    names = loaded_by(
        "infer", "--in-spec", tmp_path / "in.npy", "--out-spec", tmp_path / "out.zarr",
        "--model-type", "identity", "--patch", 8, "--overlap", 2, "--devices", "cpu",
    )  # fmt: skip
    wings = wings_of(names)
    assert wings.isdisjoint({"bench", "cluster", "loading", "reports", "scaling", "training"})
