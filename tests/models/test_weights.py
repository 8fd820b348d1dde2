"""Weights in files: by which names they are found, and what becomes of files that are damaged."""

import copy
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.base.errors import UsageError
from penstock.models import devices, footprint
from penstock.models import load as model
from penstock.models.weights import load_weights, named_as, read_state
from penstock.training.checkpoint import read

from ..parameters import mainly
from .kit import Scripted


class Inner(nn.Module):
    """Has a submodule by the name of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Conv3d(2, 1, 1))
        self.head = nn.Conv3d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.module(x))


PREFIXES = ("", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.", "net.core.")


def fill(net: nn.Module) -> nn.Module:
    for number, parameter in enumerate(net.parameters()):
        nn.init.constant_(parameter, number + 1)
    return net


@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_wrappers_are_left_out(prefix: str, tmp_path) -> None:
    for make in (Inner, lambda: nn.Sequential(nn.Conv3d(1, 1, 1))):
        net = fill(make())
        state = {prefix + name: tensor for name, tensor in net.state_dict().items()}
        torch.save({"epoch": 3, "state_dict": state}, tmp_path / "weights.pth")
        save_file(state, tmp_path / "weights.safetensors")
        for suffix in (".pth", ".safetensors"):
            other = make()
            load_weights(other, "net", tmp_path / f"weights{suffix}")
            for name, tensor in net.state_dict().items():
                assert torch.equal(tensor, other.state_dict()[name])


def test_a_wrapper_within_a_net_and_around_the_net_itself(tmp_path) -> None:
    net = fill(Inner())
    state = {f"_orig_mod.{n.replace('0.', '0._orig_mod.')}": t for n, t in net.state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    for other in (Inner(), nn.DataParallel(Inner())):
        load_weights(other, "net", tmp_path / "w.pth")
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)


def test_a_name_that_could_mean_two_stays() -> None:
    names = ["module.a", "a", "module.module.b"]
    assert named_as({"module.a": 1, "a": 2, "b": 3}, names) == {
        "module.a": 1,
        "a": 2,
        "module.module.b": 3,
    }


@pytest.mark.parametrize("made", [lambda net: net, lambda net: {"hyper": Namespace(lr=net)}])
def test_a_file_with_more_than_tensors_is_refused_by_the_name_of_it(made: Any, tmp_path) -> None:
    torch.save(made(fill(nn.Conv3d(1, 1, 1))), tmp_path / "w.pth")
    with pytest.raises(UsageError, match=r"holds \S+ beside tensors, .*keep the tensors alone by"):
        read_state(tmp_path / "w.pth")


class Counts(nn.Module):
    """Keeps more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = nn.Conv3d(1, 1, 1), 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_what_a_module_keeps_beside_tensors_is_loaded(tmp_path) -> None:
    net, other, path = Counts(), nn.Sequential(Counts()), tmp_path / "w.pth"
    net.seen = 7
    torch.save(nn.Sequential(net).state_dict(), path)
    load_weights(other, "net", path)
    assert other[0].seen == 7  # type: ignore[union-attr]
    save_file({"0.net.weight": net.net.weight.data}, tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=r"2 tensors missing.*lacks 0\._extra_state"):
        load_weights(other, "net", tmp_path / "w.safetensors")
    volume = np.ones((8, 8, 8), "float32")
    knobs: dict[str, Any] = {"patch": 8, "overlap": 0, "head_kind": "intensity"}
    penstock.run_inference(volume, volume.copy(), model=other, weights=path, **knobs)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_planning_leaves_the_weights_alone() -> None:
    weighted = nn.utils.weight_norm(nn.Conv3d(1, 1, 3, padding=1))
    shared = Inner()
    shared.head.weight = nn.Parameter(shared.head.weight.detach())
    shared.far = shared.head.weight * 2  # type: ignore[assignment]
    for net in (nn.Sequential(weighted), shared):
        net.eval()
        held = dict(net.named_parameters(remove_duplicate=False))
        before = {name: tensor.detach().clone() for name, tensor in held.items()}
        for _ in range(2):
            footprint.measure_footprint(model.load_model(net), (2, 1, 8, 8, 8))
        after = dict(net.named_parameters(remove_duplicate=False))
        assert all(after[name] is held[name] for name in held)
        assert all(torch.equal(after[name], before[name]) for name in held)
        x = torch.rand(2, 1, 8, 8, 8)
        torch.testing.assert_close(devices.placed(net, torch.device("cpu"), True)(x), net(x))


def damaged(content: bytes, luck: random.Random) -> bytes:
    """Cut, with bits turned, with bytes of elsewhere, or with its last part (a zip's list) hurt."""
    held, way = bytearray(content), luck.randrange(4)
    if way == 0:
        return bytes(held[: luck.randrange(len(held))])
    for _ in range(luck.choice((1, 1, 4, 32))):
        start = max(0, len(held) - 2000) if way == 3 else 0
        place = luck.randrange(start, len(held))
        if way == 2:
            source = luck.randrange(len(held))
            held[place : place + 8] = held[source : source + 8]
        else:
            held[place] ^= 1 << luck.randrange(8)
    return bytes(held)


@pytest.fixture(scope="module")
def whole(plain: Path, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    net = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2))
    torch.save(net.state_dict(), folder / "net.pth")
    torch.save(net.state_dict(), folder / "old.pth", _use_new_zipfile_serialization=False)
    save_file(net.state_dict(), folder / "net.safetensors")
    state = {"format": "penstock-training", "version": 2, "workload": "spiral"}
    torch.save({**state, "model": net.state_dict(), "history": [{"a": 1.0}]}, folder / "last.pt")
    torch.jit.script(Scripted().eval()).save(str(folder / "net.ts"))
    return {path.name: path.read_bytes() for path in (*folder.iterdir(), plain)}


@pytest.mark.filterwarnings("ignore")
def test_weights_in_place_of_a_model_are_named(whole: dict[str, bytes], tmp_path) -> None:
    for name in ("net.pth", "old.pth", "net.safetensors", "last.pt"):
        (tmp_path / name).write_bytes(whole[name])
        with pytest.raises(UsageError, match="holds weights, and no program: name"):
            model.load_model(str(tmp_path / name), trust=True)


def load_damaged(path: Path) -> None:
    """A file is read, or refused in a sentence; nothing else leaves."""
    try:
        if path.name == "last.pt":
            read(path, "spiral")
        elif path.suffix in (".pth", ".safetensors"):
            read_state(path)
        else:
            model.load_model(str(path), trust=True)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", mainly(["net.pth", "old.pth", "net.safetensors", "last.pt", "net.ts", "net.pt2"], 3)
)
def test_damaged_files_are_refused(name: str, whole: dict[str, bytes], tmp_path) -> None:
    path = tmp_path / name
    for seed in range(5):
        path.write_bytes(damaged(whole[name], random.Random(f"{name} {seed}")))
        load_damaged(path)


def test_files_of_something_else_hold_no_weights(tmp_path) -> None:
    contents: dict[str, Any] = {
        "list": [1, 2],
        "empty": {},
        "numbers": {"a": 3},
        "tensor": torch.ones(2),
        "names": {3: torch.ones(2)},
    }
    for name, content in contents.items():
        torch.save(copy.deepcopy(content), tmp_path / name)
        with pytest.raises(UsageError, match="holds no weights"):
            read_state(tmp_path / name)
