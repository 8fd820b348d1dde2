"""Outputs as shapes alone are those of torch, and nothing heavy is imported for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.models.footprint import output_on_meta

from ..parameters import mainly


class _Compared(TorchDispatchMode):
    """Asks torch for each operator, and compares its answer with ours where there is one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answered: set[str] = set()
        self.asked: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not for torch's compiler, whose import takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = output_on_meta(func, args, kwargs or {})
        theirs = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if ours is NotImplemented:
            self.asked.add(name)
        else:
            self.answered.add(name)
            assert _facts(ours, name) == _facts(theirs, name), name
        return theirs


def _facts(output: Any, name: str) -> list[Any]:
    # Torch forgets the layout of a convolution on this device; the footprint sets it.
    strided = name != "convolution"
    return [
        (tensor.shape, tensor.dtype, tensor.device.type, tensor.stride() if strided else None)
        for tensor in tree_leaves(output)
    ]


def compared(net: Callable[[Tensor], Any], *shape: int, **how: Any) -> _Compared:
    """Run a net on shapes alone, with each answer compared."""
    layout = how.pop("memory_format", torch.contiguous_format)
    with torch.no_grad(), _Compared() as comparison:
        net(torch.empty(shape, device="meta", **how).to(memory_format=layout))
    return comparison


def _volume(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), *layers).eval().to("meta")


def _image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 8, 3, stride=2, dilation=2), *layers).eval().to("meta")


@pytest.mark.parametrize("dtype", mainly([torch.float32, torch.bfloat16], 1))
@pytest.mark.parametrize("last", mainly([False, True], 1))
def test_nets_of_volumes_and_images_are_answered_as_torch(dtype: torch.dtype, last: bool) -> None:
    in_3d, in_2d = torch.contiguous_format, torch.contiguous_format
    if last:
        in_3d, in_2d = torch.channels_last_3d, torch.channels_last
    volume = _volume(
        nn.InstanceNorm3d(8), nn.LeakyReLU(), nn.MaxPool3d(2), nn.GroupNorm(2, 8), nn.SiLU(),
        nn.ConvTranspose3d(8, 4, 2, 2), nn.BatchNorm3d(4), nn.ReLU(inplace=True), nn.AvgPool3d(2),
        nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="trilinear"), nn.Sigmoid(),
        nn.Softmax(1),
    )  # fmt: skip
    image = _image(
        nn.BatchNorm2d(8), nn.ELU(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.PReLU(), nn.Hardswish(),
        nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.GELU(),
        nn.Upsample(scale_factor=2, mode="bicubic"), nn.Conv2d(8, 8, 3, groups=4),
        nn.ConvTranspose2d(8, 8, 3, 2, 1, 1, groups=2),
    )  # fmt: skip
    of_volume = compared(volume.to(dtype), 3, 2, 16, 16, 16, dtype=dtype, memory_format=in_3d)
    of_image = compared(image.to(dtype), 3, 2, 32, 32, dtype=dtype, memory_format=in_2d)
    assert of_volume.answered >= {
        "convolution", "native_batch_norm", "native_group_norm", "leaky_relu", "relu_", "silu",
        "max_pool3d_with_indices", "upsample_nearest3d", "upsample_trilinear3d", "sigmoid",
    }  # fmt: skip
    assert of_image.answered >= {"avg_pool2d", "upsample_bicubic2d", "upsample_bilinear2d", "elu"}
    # A CPU has no kernel for some halves.
    assert dtype == torch.bfloat16 or not of_volume.asked - {"empty", "view", "clone", "_to_copy"}


def test_a_transformer_is_answered_as_torch_answers() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().to("meta")
    answered = compared(layer, 2, 9, 16).answered
    assert answered >= {"mm", "addmm", "bmm", "native_layer_norm", "mul", "add", "relu"}


@pytest.mark.parametrize(
    ("name", "net"),
    [
        ("mul", lambda x: x + x[:, :1] * 2),
        ("mul", lambda x: x[:, :1] * x.amax((2, 3), keepdim=True)),
        ("mul", lambda x: x.transpose(1, 3) * 2),
        ("mul", lambda x: x[:, ::2, 1:] * 2),
        ("bitwise_and", lambda x: (x > 0) & (x.long() > 1)),
        ("div", lambda x: x.long() / 2),
        ("mul", lambda x: x.long() * torch.ones((), device="meta")),
        ("where", lambda x: torch.where(x > 0, x, 0.0).clamp(0, 1)),
        ("add", lambda x: torch.add(x, x, alpha=2).pow(2).sqrt()),
        ("cat", lambda x: torch.cat([x, x.long()], 1)),
        ("cat", lambda x: torch.cat([x.to(memory_format=torch.channels_last), x], -1)),
        ("native_layer_norm", lambda x: functional.layer_norm(x, x.shape[-2:]).softmax(0)),
        ("_softmax", lambda x: x[0, 0, 0].softmax(0)),
        ("mul", lambda x: x.new_empty((0, 3)) * 2),
    ],
)
def test_outputs_have_torchs_dtypes_and_axes(name: str, net: Callable[[Tensor], Any]) -> None:
    assert name in compared(net, 2, 4, 6, 8).answered


@pytest.mark.parametrize(
    ("name", "net"),
    [
        ("mul", lambda x: x[:, :1].expand_as(x) * 2),
        ("cat", lambda x: torch.cat([x, x], 0)),
        ("clone", lambda x: x.clone(memory_format=torch.channels_last).half()),
        ("_to_copy", lambda x: x.clone(memory_format=torch.channels_last).half()),
        ("addmm", lambda x: torch.addmm(x[0, 0], x[0, 0], x[0, 0].T @ x[0, 0])),
    ],
)
def test_what_one_sample_hides_is_asked_of_torch(name: str, net: Callable[[Tensor], Any]) -> None:
    assert name in compared(net, 2, 4, 6, 8).asked


def test_what_torch_refuses_is_left_to_torch() -> None:
    with torch.device("meta"):
        x, kernel = torch.empty(2, 3, 8, 8), torch.empty(4, 5, 3, 3)
        others = [torch.empty(2, 3, 8, 9), torch.empty(3, 3, 8, 8)]
    aten = torch.ops.aten
    assert output_on_meta(aten.add.Tensor, (x, others[0]), {}) is NotImplemented
    assert output_on_meta(aten.add_.Tensor, (x[:, :1], x), {}) is NotImplemented
    assert output_on_meta(aten.cat.default, ([x, others[1]], 1), {}) is NotImplemented
    conv = (x, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert output_on_meta(aten.convolution.default, conv, {}) is NotImplemented
    assert output_on_meta(aten.add.Tensor, (x, torch.ones(8)), {}) is NotImplemented


def test_random_numbers_are_not_drawn() -> None:
    before = torch.random.get_rng_state()
    compared(lambda x: functional.dropout(x, 0.5, training=True), 2, 4)
    assert torch.equal(torch.random.get_rng_state(), before)
