"""Models on their way to a device: what is shared, what is laid out anew, what can be sized."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.base import UsageError, torch_threads
from penstock.inference.opening.job import Job
from penstock.inference.opening.net import fit_batch
from penstock.models import devices, footprint
from penstock.models import load as model

from ..inference.kit import conv, opened, run
from ..parameters import mainly

CPU, META = torch.device("cpu"), torch.device("meta")
SHAPE = (2, 1, 8, 8, 8)


class Positions(nn.Module):
    """Has a buffer that is not part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv3d(1, 1, 3, padding=1)
        self.register_buffer("where", torch.ones(8, 8, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.where


class Ramp(nn.Module):
    """Makes a tensor of its own; once exported, on the device that it was exported on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + torch.arange(x.shape[-1], device=x.device).to(x.device)


def exported(net: nn.Module, batch: int, folder: Path) -> str:
    path = folder / "net.pt2"
    torch.export.save(torch.export.export(net.eval(), (torch.zeros(batch, 1, 8, 8, 8),)), path)
    return str(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> str:
    """A program for batches of one patch."""
    return exported(conv(), 1, tmp_path_factory.mktemp("programs"))


VOLUME = np.random.default_rng(0).normal(size=(10, 12, 14)).astype("float32")
KNOBS: dict[str, Any] = {"patch": 8, "overlap": 4, "normalize": "none"}


@pytest.fixture(scope="module")
def full() -> np.ndarray:
    """What the net gives as it is."""
    return run(VOLUME, conv(), **KNOBS)


def test_what_need_not_be_laid_out_anew_is_shared() -> None:
    net = nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.Conv3d(4, 2, 1), nn.Linear(2, 2))
    laid_out = devices.placed(net, CPU, True)
    assert laid_out is not net
    for name, tensor in net.state_dict(keep_vars=True).items():
        there = laid_out.state_dict(keep_vars=True)[name]
        assert torch.equal(tensor, there) and tensor.requires_grad == there.requires_grad
        assert tensor.is_contiguous(), "the one given stays as it is"
        assert (there is tensor) == (tensor.ndim < 5)
        assert tensor.ndim < 5 or there.is_contiguous(memory_format=torch.channels_last_3d)
    assert devices.placed(laid_out, CPU, True) is laid_out
    assert devices.placed(net, CPU, False) is net


@pytest.mark.parametrize("conv_type", mainly([nn.Conv2d, nn.Conv3d], 1))
def test_one_thread_keeps_channels_last_as_two_do(conv_type: type[nn.Conv2d | nn.Conv3d]) -> None:
    """Torch's own kernel for a kernel of 1 returns channels first, and takes its time for it."""
    sides = (32, 32) if conv_type is nn.Conv2d else (16, 16, 16)
    net = nn.Sequential(conv_type(4, 4, 3, padding=1), conv_type(4, 3, 1))
    laid_out = devices.placed(net, CPU, True)
    x = devices.channels_last(torch.randn(2, 4, *sides))
    outputs = []
    for threads in (1, 2):
        with torch_threads(threads), torch.no_grad():
            outputs.append(laid_out(x))
            assert torch.allclose(net(x.contiguous()), outputs[-1], atol=1e-5)
    form = devices.CHANNELS_LAST[x.ndim]
    assert all(output.is_contiguous(memory_format=form) for output in outputs)
    assert torch.equal(*outputs)
    assert set(net[1].dilation) == {1}, "the one given stays as it is"  # type: ignore[arg-type]


def test_a_convolution_of_somebodys_own_is_left_alone() -> None:
    class Own(nn.Conv3d):
        """Computes something from its dilation."""

    net = nn.Sequential(Own(2, 2, 1), nn.Conv3d(2, 2, 3))
    assert devices.placed(net, CPU, True)[0].dilation == (1, 1, 1)  # type: ignore[index, union-attr]


def test_a_convolution_in_double_precision_is_left_to_torch() -> None:
    assert devices.placed(nn.Conv3d(2, 2, 1).double(), CPU, True).dilation == (1, 1, 1)
    assert devices.placed(nn.Conv3d(2, 2, 1), CPU, True).dilation == (2, 2, 2)


def test_a_module_on_another_device_is_never_a_copy_on_this_one(monkeypatch) -> None:
    """Neither of its weights nor of its buffers, tied ones being tied there too."""
    net = nn.Sequential(nn.Conv3d(1, 4, 3), nn.Conv3d(1, 4, 3), Positions())
    net[1].weight = net[0].weight
    monkeypatch.setattr(Tensor, "__deepcopy__", lambda self, memo: pytest.fail("a copy"))
    there = devices.placed(net, META, True)
    assert {tensor.device for tensor in [*there.parameters(), *there.buffers()]} == {META}
    assert there[0].weight is there[1].weight  # type: ignore[index]
    assert isinstance(there[0].weight, nn.Parameter)  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # torch's own, of a copy
def test_what_an_exported_program_makes_moves_with_it(tmp_path) -> None:
    program = model.load_model(exported(Ramp(), 1, tmp_path), trust=True).module
    there = devices.placed(program, META, True)
    assert there(torch.zeros(1, 1, 8, 8, 8, device=META)).device == META
    assert program(torch.zeros(1, 1, 8, 8, 8)).device == CPU


@pytest.mark.parametrize("net", [Positions(), Positions().bfloat16()], ids=["float", "half"])
def test_a_net_is_played_with_all_that_it_holds_and_in_its_own_dtype(net: nn.Module) -> None:
    measured = footprint.measure_footprint(model.load_model(net), SHAPE)
    itemsize = next(net.parameters()).itemsize
    assert measured.peak_bytes % (2 * 8**3 * itemsize) == 0
    assert measured.peak_bytes >= 3 * 2 * 8**3 * itemsize


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("form", mainly(["module", "script"], 0))
def test_a_net_in_half_precision_is_given_that(form: str, full: np.ndarray) -> None:
    net: Any = conv().eval().bfloat16()
    if form == "script":
        net = torch.jit.trace(net, torch.zeros(1, 1, 8, 8, 8, dtype=torch.bfloat16))
    assert 0 < np.abs(run(VOLUME, net, **KNOBS) - full).max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [1, 4])
def test_a_program_for_one_batch_runs(fixed: int, alone: str, full: np.ndarray, tmp_path) -> None:
    path = alone if fixed == 1 else exported(conv(), fixed, tmp_path)
    np.testing.assert_allclose(
        run(VOLUME, path, batch=fixed, trust_model=True, **KNOBS), full, atol=1e-6
    )
    with pytest.raises(UsageError, match="see --batch, --patch"):
        footprint.measure_footprint(model.load_model(path, trust=True), (16, 1, 8, 8, 8))


@pytest.mark.slow
def test_without_a_batch_a_gpu_gives_a_program_for_one_that(alone: str) -> None:
    job: Job = opened(np.zeros((20, 20, 20), "uint8"), model_type=alone, trust_model=True)
    assert fit_batch(job.net.model, job.net.shape, None, on_cpu=False)[0] == 1
    other: Job = opened(np.zeros((20, 20, 20), "uint8"), model_type=conv())
    assert fit_batch(other.net.model, other.net.shape, None, on_cpu=False)[0] == 16
