"""The user's own models: what they may be, where they are found, what is said of their errors."""

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.models import load as model
from penstock.models import user_code as reference

from ..anew import imported_anew

NETS = """
import torch
from torch import nn
import beside

LAYER = nn.Conv3d(1, 1, 1)

def factory(): return nn.Conv3d(1, 1, 1)
def wide(in_channels): return nn.Conv3d(in_channels, 1, 1)
def optional(width=4): return nn.Sequential(nn.Conv3d(1, width, 1), nn.Conv3d(width, 1, 1))
def itself(x): return x * 2
def itself_too(x, factor=2): return x * factor
def of_functions(): return itself
def late():
    import beside_too
    return beside_too.net

class Net(nn.Module):
    def forward(self, x): return x + beside.ONE

class Broken(nn.Module):
    def forward(self, x):
        return x[[99]]

def fails(): return [][1]
def leaves(): raise SystemExit(0)
def lazy(): return nn.LazyConv3d(1, 3, padding=1)
def hollow(): return nn.Conv3d(1, 1, 3, padding=1, device="meta")

class Left(nn.Module):
    def forward(self, x): raise SystemExit(0)

class Leaves(nn.Module):
    calls = 0
    def forward(self, x):
        Leaves.calls += 1
        if x.device.type == "cpu" and Leaves.calls > 6:
            raise SystemExit(0)
        return x

class Breaks(nn.Module):
    calls = 0
    def forward(self, x):
        Breaks.calls += 1
        if x.device.type == "cpu" and Breaks.calls > 6:
            raise IndexError("out of\\nits range")
        return x

class Untrainable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv3d(1, 1, 1)
    def forward(self, x):
        if torch.is_grad_enabled():
            raise ValueError("not with gradients")
        return self.layer(x)
"""


@pytest.fixture
def nets(tmp_path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "nets.py").write_text(NETS)
    (folder / "beside.py").write_text("ONE = 1.0\n")
    (folder / "beside_too.py").write_text("import beside\ndef net(x): return x\n")
    yield folder / "nets.py"  # type: ignore[misc]
    for name in ("beside", "beside_too", "penstock_user_nets"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("itself", 2), ("itself_too", 2), ("of_functions", 2), ("late", 1), ("Net", None)],
)
def test_a_function_with_arguments_is_a_model(name: str, factor: int | None, nets: Path) -> None:
    x, module = torch.ones(1, 1, 2, 2, 2), model.load_model(f"{nets}:{name}").module
    assert torch.equal(module(x), x * factor if factor else x + 1)


@pytest.mark.parametrize("name", ["LAYER", "factory", "optional", "wide"])
def test_what_makes_a_model_is_called(name: str, nets: Path) -> None:
    loaded = model.load_model(f"{nets}:{name}", in_channels=1)
    assert loaded.spatial_axes == 3
    assert loaded.in_channels == 1


def test_a_function_of_a_library_in_c_is_a_model() -> None:
    x = torch.linspace(-1, 1, 8)
    assert torch.equal(model.load_model("torch:sigmoid").module(x), torch.sigmoid(x))
    assert torch.equal(model.load_model("torch.nn.functional:relu").module(x), x.relu())


def test_the_folder_is_searched_for_the_users_code_alone(nets: Path, monkeypatch) -> None:
    (nets.parent / "opt_einsum.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(nets.parent)
    path = list(sys.path)
    with reference.find_reference("nets:Net"):
        assert sys.path == path
        with pytest.raises(ModuleNotFoundError):
            exec("import beside_too", {"__name__": "torch.backends.opt_einsum"})
        exec("import beside_too", {"__name__": "nets"})
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("beside_three")
    assert not any(isinstance(finder, reference._Beside) for finder in sys.meta_path)
    sys.modules.pop("nets", None)


def test_what_is_installed_comes_first(nets: Path) -> None:
    (nets.parent / "yaml.py").write_text("raise SystemExit('it ran')")
    before = sys.modules.pop("yaml")
    nets.write_text("import yaml\nNET = yaml.safe_load\n")
    try:
        with reference.find_reference(f"{nets}:NET") as function:
            assert function("1") == 1
    finally:
        sys.modules["yaml"] = before


def line_of(nets: Path, text: str) -> int:
    return nets.read_text().splitlines().index(text) + 1


def test_errors_of_a_model_name_its_file_and_line(nets: Path) -> None:
    volume, knobs = np.zeros((8, 8, 8), "float32"), {"patch": 8, "overlap": 0}
    for name, line in (
        ("fails", "def fails(): return [][1]"),
        ("leaves", "def leaves(): raise SystemExit(0)"),
        ("Broken", "        return x[[99]]"),
    ):
        said = f"(IndexError: .*|SystemExit: 0) .{nets}, line {line_of(nets, line)}"
        with pytest.raises(UsageError, match=said):
            penstock.plan_inference(volume, volume.copy(), model=f"{nets}:{name}", **knobs)  # type: ignore[arg-type]


def test_an_error_on_the_way_leaves_its_traceback(nets: Path, tmp_path, capsys) -> None:
    np.save(tmp_path / "in.npy", np.zeros((64, 32, 32), "float32"))
    flags = f"--in-spec {tmp_path}/in.npy --out-spec {tmp_path}/out.zarr --normalize none"
    words = (
        f"infer {flags} --model-type {nets}:Breaks --patch 8 --overlap 0 --run-dir {tmp_path}/run"
    )
    words += " --head-kind intensity"
    line = line_of(nets, '            raise IndexError("out of\\nits range")')
    assert main(words.split()) == 1
    said = capsys.readouterr().err
    assert f"IndexError: out of ({nets}, line {line})" in said
    assert "Traceback" not in said
    assert f'nets.py", line {line}, in forward' in (tmp_path / "run" / "error.txt").read_text()
    assert main([*words.split(), "--overwrite", "--debug"]) == 1
    assert f'nets.py", line {line}, in forward' in capsys.readouterr().err
    assert "PENSTOCK_TRACEBACK" not in os.environ


@pytest.mark.parametrize("name", ["Left", "Leaves"])
def test_a_model_that_exits_has_not_done_the_job(name: str, nets: Path, capsys) -> None:
    np.save(nets.parent / "in.npy", np.zeros((64, 32, 32), "float32"))
    words = f"infer {nets.parent}/in.npy {nets.parent}/out.zarr --model {nets}:{name} --patch 8"
    assert main([*words.split(), *"--overlap 0 --normalize none".split()]) == 1
    assert f"SystemExit: 0 ({nets}, line " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lazy", "hollow"])
def test_a_model_without_values_is_refused(name: str, nets: Path) -> None:
    with pytest.raises(UsageError, match="has no values in weight"):
        model.load_model(f"{nets}:{name}")


@pytest.mark.slow
def test_a_training_that_a_model_ends_leaves_a_traceback(nets: Path, tmp_path, capsys) -> None:
    pytest.importorskip("lightning_fabric")
    for name in ("in", "target"):
        np.save(tmp_path / f"{name}.npy", np.ones((16, 16, 16), "float32"))
    words = f"train pairs --model {nets}:Untrainable --tile-size 8 --epochs 1 --device cpu"
    words += f" --in-spec {tmp_path}/in.npy --target-spec {tmp_path}/target.npy"
    assert main([*words.split(), "--output-dir", str(tmp_path / "run")]) == 1
    line = line_of(nets, '            raise ValueError("not with gradients")')
    *_, said = capsys.readouterr().err.splitlines()
    assert f"ValueError: not with gradients ({nets}, line {line})" in said
    assert f'nets.py", line {line}, in forward' in (tmp_path / "run" / "error.txt").read_text()


def test_debug_is_a_flag_of_every_verb(monkeypatch, capsys) -> None:
    assert main(["score", "xview3", "--debug", "--inference-file", "a", "--label-file", "b"]) == 2
    assert "Traceback" in capsys.readouterr().err


REFUSED = [
    ("plan --in-spec a --out-spec b --model-type denoise-tinny", "did you mean denoise-tiny"),
    ("infer --in-spec a --out-spec b --model-type nets.py:net", "there is no file nets.py"),
    ("infer --in-spec a --out-spec b --model-type net.pt2", "there is no file net.pt2"),
    ("plan --in-spec a --out-spec b --model-type nowhere:net", "there is no module nowhere"),
    ("plan --in-spec a --out-spec b --model-type nets.py", "names no function"),
    ("bench model --model prithvi-refiner-tini", "did you mean prithvi-refiner-tiny"),
    ("train spirall", "there is no workload 'spirall'"),
    ("train pairs --in-spec a --target-spec b --output-dir c --model no", "is unknown"),
    ("train detector --backbone resnet51", "--backbone"),
    ("predict w.pth --data-root a --output b --backbone resnet51", "--backbone"),
]
"""Words, and what is said of them."""


@pytest.mark.slow
def test_names_are_refused_before_torch_is_imported(here, monkeypatch, capsys) -> None:
    """Neither by us nor by a library that stands on it."""
    heads = {"torch", "torchvision", "torchmetrics", "lightning_fabric", "pytorch_lightning"}
    heavy = heads | {name for name in sys.modules if name.partition(".")[0] in heads}
    with imported_anew(), monkeypatch.context() as patched:
        for name in heavy:
            patched.setitem(sys.modules, name, None)
        for words, said in REFUSED:
            anew = importlib.import_module("penstock.cli")
            try:
                code = anew.main(words.split())
            except SystemExit as error:
                code = error.code
            assert code == 2 and said in capsys.readouterr().err, words
