"""`penstock verify --recompute`: blocks computed anew from the input, and what they prove."""

import contextlib
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import torch
from safetensors.torch import save_file

from penstock.base.config.infer import InferConfig
from penstock.cli import main
from penstock.inference import Job
from penstock.inference import repair as reopening

from .kit import Array

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
    np.save("in.npy", noise())
    Path("net.py").write_text(NET)


@pytest.fixture
def place(tmp_path, here) -> Path:
    begin()
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path]:
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
def done(whole: tuple[Path, Path], monkeypatch) -> Path:
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


def verify(*words: str, model: str = "net.py:Squeeze") -> int:
    named = ["--model", model] if model and "--recompute" in words else []
    return main(["verify", "out.zarr", *words, *named])


def forge(index: tuple[int, ...]) -> None:
    """Change a voxel of a block as one that was computed wrongly: its checksum is of that."""
    from penstock.inference.run_folder.block_log import digest_of, line_of

    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": "out.zarr/0"}})
    array = array.result()
    start = [16 * i for i in index]
    array[tuple(start)].write(np.asarray(array[tuple(start)]) + 1).result()
    values = np.asarray(array.read().result())[tuple(slice(i, i + 16) for i in start)]
    log = Path("out.zarr.penstock/done.log")
    lines = [line for line in log.read_text().splitlines(keepends=True)
             if not line.startswith(line_of((0, *index))[:-1] + " ")]  # fmt: skip
    log.write_text("".join([*lines, line_of((0, *index), [digest_of([values])])]))


class Smaller(Job):
    """As where the machine has less memory than the run had."""

    def __init__(self, config: InferConfig) -> None:
        super().__init__(config)
        whole = config.normalize == "percentile"  # each part has its own
        assert whole or len(self.geometry.parts) == 1
        self.geometry = replace(self.geometry, part=self.geometry.block)
        self.plan = replace(self.plan, geometry=self.geometry)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seam", "normalize", "dtype"),
    [
        ("blend", "global", "float32"),
        pytest.param("trim", "percentile", "uint16", marks=pytest.mark.slow),
    ],
)
def test_blocks_that_are_computed_anew_have_the_same_bits_in_other_parts_too(
    seam: str, normalize: str, dtype: str, place: Path, monkeypatch,
    capsys,
) -> None:  # fmt: skip
    assert infer("--seam-mode", seam, "--normalize", normalize, "--out-dtype", dtype) == 0
    capsys.readouterr()
    assert verify("--recompute", "50%", "--seed", "1") == 0
    said = capsys.readouterr().out
    assert "Computed anew: 4 of 8 blocks (--seed 1): 4 have the same bits" in said
    monkeypatch.setattr(reopening, "Job", Smaller)
    assert verify("--recompute", "100%") == 0
    assert "8 of 8 blocks (--seed 0): 8 have the same bits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_block_that_was_computed_wrongly_is_found_if_it_is_drawn(done: Path, capsys) -> None:
    """Its checksum says nothing: it is of the wrong values."""
    forge((1, 1, 1))
    assert verify() == 0
    capsys.readouterr()
    assert verify("--recompute", "100%", "--json", "found.json") == 1
    said = capsys.readouterr().out
    assert "7 have the same bits; 1 differ" in said
    assert "Different: block (1, 1, 1)" in said and "has other values when computed anew" in said
    listed = json.loads(Path("found.json").read_text())
    assert [each["block"] for each in listed["different"]] == [[1, 1, 1]]
    assert listed["recomputed"]["equal"] == 7
    command = shlex.split(said.splitlines()[-1].partition(": ")[2])
    assert command[3:] == ["--recompute", "1.0", "--seed", "0", "--model", "net.py:Squeeze"]
    assert main(command[1:]) == 0
    assert "Repaired: 1 block computed again" in capsys.readouterr().out
    assert verify("--recompute", "100%") == 0


@pytest.mark.slow
def test_nothing_is_computed_anew_where_the_bits_may_differ(done: Path, capsys) -> None:
    """The run was made by another processor, or by a GPU."""
    noted = Path("out.zarr.penstock/run.json")
    content = json.loads(noted.read_text())
    other = content | {"maker": content["maker"] | {"instructions": "another"}}
    noted.write_text(json.dumps(other))
    assert verify("--recompute", "100%") == 2
    assert "had instructions 'another', and here it is" in capsys.readouterr().err
    content["fingerprint"] |= {"devices": ["cuda"], "arithmetic": ["torch.float16", False, False]}
    content["settings"]["devices"] = ["cuda:0"]
    noted.write_text(json.dumps(content))
    if not torch.cuda.is_available():
        assert verify("--recompute", "100%") == 2
    capsys.readouterr()
    assert verify("--recompute", "100%", "--devices", "cpu") == 2
    assert "had devices ['cuda'], and here it is ['cpu']" in capsys.readouterr().err


@pytest.mark.slow
def test_another_input_model_or_weights_are_refused_in_words(place: Path, capsys) -> None:
    save_file({"gain": torch.ones(1)}, "w.safetensors")
    Path("gain.py").write_text(
        "import torch\nclass Gain(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.gain = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, x):\n        return x * self.gain\n"
    )
    assert infer("--model-type", "gain.py:Gain", "--weights", "w.safetensors") == 0
    assert verify("--recompute", "10%", model="gain.py:Gain") == 0
    kept = {name: Path(name).read_bytes() for name in ("in.npy", "gain.py", "w.safetensors")}

    def refused(said: str) -> None:
        capsys.readouterr()
        assert verify("--recompute", "10%", model="gain.py:Gain") == 2
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


def test_nothing_of_the_run_is_changed(done: Path, capsys) -> None:
    before = {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}
    assert len(before) > 2 * 2 * 2 + 5, "chunks, and a run folder"
    assert verify("--recompute", "50%") == 0
    assert "4 of 8 blocks (--seed 0): 4 have the same bits" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in done.rglob("*") if path.is_file()} == before


def test_a_model_that_only_the_run_folder_names_is_not_loaded(done: Path, capsys) -> None:
    """It may be a stranger's folder: the model is named again, or trusted."""
    Path("out.zarr.penstock/evil.py").write_text(f"open('ran', 'w').close()\n{NET}")
    noted = Path("out.zarr.penstock/run.json")
    content = json.loads(noted.read_text())
    content["settings"] |= {"model_type": "out.zarr.penstock/evil.py:Squeeze", "trust_model": True}
    noted.write_text(json.dumps(content))
    next(path for path in Path("out.zarr/0/c").rglob("*") if path.is_file()).write_bytes(b"")
    for verb in (["verify", "out.zarr", "--recompute", "100%"], ["repair", "out.zarr"]):
        capsys.readouterr()
        assert main(verb) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "names the model out.zarr.penstock/evil.py:Squeeze, which may run code" in error
        assert not Path("ran").exists()
    assert main(["verify", "out.zarr", "--recompute", "1%", "--trust-model"]) == 2
    assert "the run had model " in capsys.readouterr().err
    Path("ran").unlink()
    assert main(["repair", "out.zarr", "--model", "net.py:Squeeze"]) == 0
    assert not Path("ran").exists()
