"""`penstock verify --recompute`: blocks computed anew from the input, and what they prove."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
from safetensors.torch import save_file

import penstock
from penstock.base.config.infer import InferConfig
from penstock.cli import main
from penstock.inference import recompute
from penstock.inference.lanes.out_of_memory import Halvings
from penstock.inference.opening.job import Job
from penstock.inference.recompute import Recomputed, blocks_for, difference_of
from penstock.inference.run_folder.unit_log import read_lines
from penstock.inference.tiling.geometry import Geometry, narrowed

from ..parameters import all_of, crossed
from .kit import Array, opened

NET = """
import torch
from torch import nn

class Squeeze(nn.Module):
    '''Sums over a patch, whose last bits depend on what stands beside what.'''
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv3d(1, 4, 3, padding=1)
        self.gate = nn.Linear(4, 4)
        self.out = nn.Conv3d(4, 1, 3, padding=1)

    def forward(self, x):
        y = torch.relu(self.conv(x))
        return self.out(y * torch.sigmoid(self.gate(y.mean((2, 3, 4))))[:, :, None, None, None])
"""


def noise(shape: tuple[int, ...] = (18, 18, 20)) -> Array:
    return np.random.default_rng(0).integers(1, 60000, shape).astype("uint16")


def begin() -> None:
    """Put an input and a net into the working folder."""
    np.save("in.npy", noise())
    Path("net.py").write_text(NET)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an input and a net."""
    monkeypatch.chdir(tmp_path)
    begin()
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a run that is done, its input and its net, and what it holds."""
    folder = tmp_path_factory.mktemp("whole")
    used, kept = folder / "used", folder / "kept"
    used.mkdir()
    with contextlib.chdir(used):
        begin()
        assert infer() == 0
    shutil.copytree(used, kept)
    return used, kept


@pytest.fixture
def done(whole: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a run that is done. A run goes on only where it began, so it is the
    same folder each time."""
    used, kept = whole
    shutil.rmtree(used)
    shutil.copytree(kept, used)
    monkeypatch.chdir(used)
    return used


def infer(*more: str) -> int:
    words = ["--in-spec", "in.npy", "--out-spec", "out.zarr", "--model-type", "net.py:Squeeze",
             "--patch", "12", "--overlap", "4", "--block", "16", "--chunks", "16", "--devices",
             "cpu", "--threads", "1", *more]  # fmt: skip
    return main(["infer", *words])


def verify(*words: str) -> int:
    return main(["verify", "out.zarr", *words])


def log_of(folder: str = "out.zarr.penstock") -> Any:
    return read_lines((Path(folder) / "done.log").read_bytes().splitlines(keepends=True))


def forge(index: tuple[int, ...], by: int = 1) -> None:
    """Change a voxel of a block as one that was computed wrongly: its checksum is of that."""
    from penstock.inference.run_folder.checks import check_of
    from penstock.inference.run_folder.unit_log import line_of

    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": "out.zarr/0"}})
    array = array.result()
    start = [16 * i for i in index]
    array[tuple(start)].write(np.asarray(array[tuple(start)]) + by).result()
    box = tuple(slice(i, i + 16) for i in start)
    values = np.asarray(array.read().result())[box]
    log = Path("out.zarr.penstock/done.log")
    lines = [line for line in log.read_text().splitlines(keepends=True)
             if not line.startswith(line_of((0, *index))[:-1] + " ")]  # fmt: skip
    log.write_text("".join([*lines, line_of((0, *index), [check_of(values)])]))


# --- the same bits -------------------------------------------------------------------------------


class Smaller(Job):
    """As where the machine has less memory than the run had."""

    def __init__(self, config: InferConfig) -> None:
        super().__init__(config)
        whole = config.normalize == "percentile"  # each region has its own
        assert whole or len(self.geometry.regions) == 1
        self.geometry = replace(self.geometry, region=self.geometry.unit)
        self.plan = replace(self.plan, geometry=self.geometry)


@pytest.mark.parametrize(
    ("seam", "normalize", "dtype"),
    all_of(
        ["trim", "blend"], ["percentile", "global", "false"], ["uint16", "float32"],
        default=[("blend", "global", "float32"), ("trim", "false", "uint16")],
    ),
)  # fmt: skip
def test_blocks_that_are_computed_anew_have_the_same_bits_in_other_regions_too(
    seam: str, normalize: str, dtype: str, place: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert infer("--seam-mode", seam, "--normalize", normalize, "--out-dtype", dtype) == 0
    capsys.readouterr()
    assert verify("--recompute", "50%", "--seed", "1") == 0
    said = capsys.readouterr().out
    assert "Computed anew: 4 of 8 blocks (--seed 1): 4 have the same bits" in said
    monkeypatch.setattr(recompute, "Job", Smaller)
    assert verify("--recompute", "100%") == 0
    assert "8 of 8 blocks (--seed 0): 8 have the same bits" in capsys.readouterr().out


@pytest.mark.parametrize("when", ["in the run", "now"])
def test_blocks_of_smaller_batches_claim_no_bits_and_others_still_do(
    when: str, done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forge((0, 1, 1))
    if when == "in the run":
        Path("out.zarr.penstock/halved.jsonl").write_text('{"unit": [0, 0, 1, 1]}\n')
    else:
        halved = property(lambda self: {(0, 0, 1, 1)}, lambda self, units: None)
        monkeypatch.setattr(Halvings, "units", halved, raising=False)
    capsys.readouterr()
    assert verify("--recompute", "100%", "--json", "found.json") == 0
    said = capsys.readouterr().out
    assert "1 of other code, versions or machines, or with smaller batches, differ by at" in said
    assert "Halved: 1 block of them had patches in smaller batches" in said
    assert json.loads(Path("found.json").read_text())["recomputed"]["halved"] == 1
    forge((0, 1, 0))
    forge((0, 1, 1))  # by now two, more than the tolerance
    assert verify("--recompute", "100%") == 1
    said = capsys.readouterr().out
    assert "Different: block (0, 1, 0)" in said and "Different: block (0, 1, 1)" in said


def test_the_heads_of_a_job_are_computed_anew_together(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("heads.py").write_text(
        "def net():\n"
        "    return lambda x: {'a': x + x.mean((2, 3, 4), keepdim=True), 'b': (x > 0).int()}\n"
    )
    words = ["--in-spec", "in.npy", "--out-spec", "a.zarr", "b.zarr", "--model-type",
             "heads.py:net", "--patch", "12", "--overlap", "4", "--block", "16", "--devices",
             "cpu", "--seam-mode", "blend", "--normalize", "global", "--head-kind",
             "a=intensity"]  # fmt: skip
    assert main(["infer", *words]) == 0
    capsys.readouterr()
    assert main(["verify", "a.zarr", "--recompute", "50%"]) == 0
    said = capsys.readouterr().out
    assert "4 of 8 blocks (--seed 0): 4 have the same bits" in said
    assert "1 (uint16), 0 (int32); none if they are the same" in said


@functools.cache
def geometry_of(seam: str) -> Geometry:
    shape = (40, 40, 40)
    job = opened(np.zeros(shape, "uint8"), shape, block=16, seam_mode=seam, normalize="none")
    return job.geometry


@pytest.mark.parametrize(("seam", "region"), crossed(["trim", "blend"], [1, 2, 4]))
def test_only_the_blocks_that_reach_a_unit_are_computed(seam: str, region: int) -> None:
    geometry = replace(geometry_of(seam), region=(16 * region,) * 3, patches_per_block=(2, 1, 3))
    keys = [(0, 1, 0, 2), (0, 2, 2, 2)]
    wanted = []
    for block in geometry.blocks():
        reach = block.support & geometry.regions[block.region]
        if any((reach & geometry.units.cell(key[1:])).size for key in keys):
            touched = [key[1:] for key in keys if (reach & geometry.units.cell(key[1:])).size]
            wanted.append(replace(narrowed(geometry, block, touched), number=len(wanted)))
    assert list(blocks_for(geometry, keys)) == wanted


# --- other bits ----------------------------------------------------------------------------------


def test_a_block_that_was_computed_wrongly_is_found_if_it_is_drawn(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checksum says nothing: it is of the wrong values."""
    forge((1, 1, 1))
    assert verify() == 0
    capsys.readouterr()
    assert verify("--recompute", "100%", "--json", "found.json", "--forget") == 1
    said = capsys.readouterr().out
    assert "7 have the same bits; 1 differ" in said
    assert "Different: block (1, 1, 1)" in said and "differs by up to 1 when computed anew" in said
    listed = json.loads(Path("found.json").read_text())
    assert [each["block"] for each in listed["different"]] == [[1, 1, 1]]
    assert listed["recomputed"]["equal"] == 7
    assert infer("--resume") == 0
    assert verify("--recompute", "100%") == 0


def another_maker() -> None:
    noted = Path("out.zarr.penstock/run.json")
    content = json.loads(noted.read_text())
    content["makers"][0]["instructions"] = "another"
    noted.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("by", "tolerance", "code"),
    [pytest.param(1, None, 0, marks=pytest.mark.slow), (2, None, 1), (2, "2", 0)],
)
def test_blocks_of_another_machine_may_differ_within_the_tolerance(
    by: int, tolerance: str | None, code: int, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge((1, 1, 1), by)
    another_maker()
    capsys.readouterr()
    given = ["--tolerance", tolerance] if tolerance else []
    assert verify("--recompute", "100%", *given) == code
    said = capsys.readouterr().out
    assert f"Tolerance if code, versions or machine differ: {tolerance or 1} (uint16)" in said
    if code:
        assert "differs by up to 2, more than 1, when computed anew" in said
    else:
        assert f"1 of other code, versions or machines differ by at most {by}" in said


def test_another_kind_of_device_is_another_maker(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of a GPU, computed anew without one."""
    forge((1, 1, 1))
    noted = Path("out.zarr.penstock/run.json")
    content = json.loads(noted.read_text())
    content["fingerprint"] |= {"devices": ["cuda"], "arithmetic": ["torch.float16", False, False]}
    content["settings"]["devices"] = ["cuda:0"]
    noted.write_text(json.dumps(content))
    if not torch.cuda.is_available():
        assert verify("--recompute", "100%") == 2
    capsys.readouterr()
    assert verify("--recompute", "100%", "--devices", "cpu") == 0
    assert "1 of other code, versions or machines differ by at most 1" in capsys.readouterr().out


def test_differences_are_those_of_a_wider_type() -> None:
    one = np.array([[250, 3]], "uint8")
    assert difference_of(one, one.copy()) is None
    assert difference_of(one, np.array([[3, 3]], "uint8")) == 247
    ends = np.iinfo("int64")
    assert difference_of(np.array([ends.max]), np.array([ends.min])) == float(2**64 - 1)
    nan, inf = math.nan, math.inf
    for a, b, wanted in (
        ([1.0, 4.0], [1.0, 3.0], 0.25),
        ([nan, 4.0], [nan, 3.0], 0.25),
        ([inf, 4.0], [inf, 5.0], 0.25),
        ([nan, 4.0], [1.0, 4.0], inf),
        ([inf, 4.0], [-inf, 4.0], inf),
        ([0.0, 0.0], [0.0, 1.0], inf),
        ([0.0, 4.0], [-0.0, 4.0], 0.0),
    ):
        assert difference_of(np.array(a, "float32"), np.array(b, "float32")) == wanted


# --- what it proves ------------------------------------------------------------------------------


def test_the_chance_to_see_a_damage_is_that_of_drawing_without_putting_back() -> None:
    done = Recomputed(sampled=20, population=200, tolerances=[])
    assert done.chance(1) == pytest.approx(0.1)
    seen = 1 - math.prod((180 - i) / (200 - i) for i in range(10))
    assert done.chance(10) == pytest.approx(seen)
    assert done.chance(181) == pytest.approx(1)
    rng = np.random.default_rng(0)
    drawn = [(rng.permutation(200)[:20] < 10).any() for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(seen, abs=0.03)


# --- what cannot be computed anew ----------------------------------------------------------------


def test_another_input_model_or_weights_are_refused_in_words(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"gain": torch.ones(1)}, "w.safetensors")
    Path("gain.py").write_text(
        "import torch\nclass Gain(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.gain = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, x):\n        return x * self.gain\n"
    )
    assert infer("--model-type", "gain.py:Gain", "--weights", "w.safetensors") == 0
    assert verify("--recompute", "10%") == 0
    kept = {name: Path(name).read_bytes() for name in ("in.npy", "gain.py", "w.safetensors")}

    def refused(said: str) -> None:
        capsys.readouterr()
        assert verify("--recompute", "10%") == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("penstock verify: --recompute: ") and said in error
        for name, content in kept.items():
            if name != "in.npy":  # whose time of writing counts
                Path(name).write_bytes(content)

    save_file({"gain": torch.ones(1) * 2}, "w.safetensors")
    refused("the run had weights ")
    Path("gain.py").write_text(kept["gain.py"].decode().replace("x * self", "2 * x * self"))
    refused("the run had model ")
    Path("gain.py").unlink()
    refused("there is no file gain.py")
    Path("in.npy").unlink()
    refused("no such file")
    np.save("in.npy", noise() + 1)
    refused("the run had input ")


def test_a_run_of_objects_in_python_is_not_computed_anew(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penstock.run_inference(noise(), "out.zarr", model="identity", patch=12, overlap=4,
                           devices="cpu")  # fmt: skip
    assert verify("--recompute", "1%") == 2
    assert "the input of the run was an array in memory" in capsys.readouterr().err
    penstock.run_inference("in.npy", "out.zarr", model=torch.nn.Identity(), patch=12, overlap=4,
                           devices="cpu", overwrite=True)  # fmt: skip
    assert verify("--recompute", "1%") == 2
    assert "--recompute: --model-type 'Identity()'" in capsys.readouterr().err


def test_nothing_of_the_run_is_changed(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}
    assert len(before) > 2 * 2 * 2 + 5, "chunks, and a run folder"
    assert verify("--recompute", "50%") == 0
    assert "4 of 8 blocks (--seed 0): 4 have the same bits" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in done.rglob("*") if path.is_file()} == before
