"""Model files that run code as soon as torch opens them: none is opened unless it is trusted."""

import contextlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.models import load as model
from penstock.models import read_state
from penstock.models.registry import PROGRAMS

from .kit import Scripted, X

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of files and of its compiler


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def of_pickle(little: Path, path: Path, marker: Path) -> None:
    """A program whose sample inputs are a pickle."""
    held = io.BytesIO()
    torch.save(Evil(marker), held)
    rewritten(little, path, {"net/data/sample_inputs/model.pt": held.getvalue()})


def of_script(little: Path, path: Path, marker: Path) -> None:
    """A TorchScript archive that writes a file in a forward."""
    honest = path.with_suffix(".honest")
    torch.jit.script(Scripted().eval()).save(str(honest))
    with zipfile.ZipFile(honest) as file:
        (name,) = (entry for entry in file.namelist() if b"heads = " in file.read(entry))
        code = file.read(name)
    evil = code.replace(b"    heads = ", f'    torch.save(x, "{marker}")\n    heads = '.encode(), 1)
    rewritten(honest, path, {name: evil})


def rewritten(old: Path, path: Path, changed: Mapping[str, bytes]) -> None:
    """A copy of an archive with other entries in it."""
    with zipfile.ZipFile(old) as file:
        entries = {name: file.read(name) for name in file.namelist()} | changed
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content)


# Torch before 2.8 writes and reads another layout of .pt2.
of_today = pytest.mark.skipif(torch.__version__ < "2.8", reason="another layout of .pt2")
ATTACKS = [
    pytest.param("evil.pt2", of_pickle, marks=of_today),
    *(pytest.param(f"evil{suffix}", of_script) for suffix in PROGRAMS if suffix != ".pt2"),
]


@pytest.mark.parametrize(("name", "attack"), ATTACKS)
def test_no_attack_runs_untrusted(name: str, attack: Any, little: Path, tmp_path, capsys) -> None:
    path, marker = tmp_path / name, tmp_path / "ran"
    attack(little, path, marker)
    with pytest.raises(UsageError, match="only read with --trust-model"):
        model.load_model(str(path))
    volume = np.zeros((8, 8, 8), "float32")
    with pytest.raises(UsageError, match="only read with `trust_model=True`"):
        penstock.plan_inference(volume, volume.copy(), model=path)
    np.save(tmp_path / "in.npy", volume)
    words = ["plan", "--in-spec", f"{tmp_path}/in.npy", "--out-spec", f"{tmp_path}/o.zarr",
             "--model-type", str(path), "--patch", "8", "--overlap", "0"]  # fmt: skip
    assert main(words) == 2
    assert "only read with --trust-model" in capsys.readouterr().err
    assert not marker.exists()
    with contextlib.suppress(SystemExit):
        main([*words, "--trust-model"])
    assert marker.exists(), "the attack is none"


def test_a_pickle_is_no_file_of_weights(tmp_path) -> None:
    path, marker = tmp_path / "evil.pth", tmp_path / "ran"
    torch.save({"weight": Evil(marker)}, path)
    with pytest.raises(UsageError, match="making such an object can run any code"):
        read_state(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the attack is none"


def test_a_program_can_be_trained_and_keeps_its_mode(little: Path) -> None:
    program = model.load_model(str(little), trust=True).module
    assert program.train() is program
    program(X).sum().backward()
    assert all(weight.grad is not None for weight in program.parameters())
    assert program.eval() is program


@pytest.mark.slow
def test_a_program_runs_over_a_volume_with_its_own_and_with_other_weights(tmp_path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv3d(1, 1, 3, padding=1), nn.BatchNorm3d(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    exported, other = One().eval(), One().eval()
    volume = np.random.default_rng(0).random((10, 12, 14), np.float32)
    path, weights = tmp_path / "one.pt2", tmp_path / "one.pth"
    torch.export.save(torch.export.export(exported, (torch.zeros(2, 1, 8, 8, 8),)), path)
    torch.save(other.state_dict(), weights)
    knobs: dict[str, Any] = {"patch": 8, "overlap": 4, "normalize": "none"}
    for net, file in ((exported, None), (other, weights)):
        out, want = np.zeros_like(volume), np.zeros_like(volume)
        penstock.run_inference(volume, out, model=path, weights=file, trust_model=True, **knobs)
        penstock.run_inference(volume, want, model=net, **knobs)
        np.testing.assert_array_equal(out, want)


def test_the_switch_is_wherever_a_model_file_is_read() -> None:
    from penstock.base.config.bench import BenchModelConfig
    from penstock.base.config.infer import InferConfig
    from penstock.base.config.train import TrainConfig

    for knobs in (InferConfig, BenchModelConfig, TrainConfig):
        assert knobs.model_fields["trust_model"].default is False
