"""Small networks whose reach is known by arithmetic."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.models.prithvi import tiny


class Sight(NamedTuple):
    """What arithmetic says of a network, alike along all axes."""

    period: int
    before: int
    after: int


class Made(nn.Module):
    """A network whose forward is a function of its layers and its input."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


def conv(taken: int, given: int, kernel: int = 3, dilation: int = 1) -> nn.Conv3d:
    padding = dilation * (kernel // 2)
    return nn.Conv3d(taken, given, kernel, padding=padding, dilation=dilation)


def _shuffled(x: Tensor) -> Tensor:
    batch, channels, *sides = x.shape
    cells = x.reshape(batch, channels // 8, 2, 2, 2, *sides).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return cells.reshape(batch, channels // 8, *(2 * side for side in sides))


def _by_channel(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x.movedim(1, -1)).movedim(-1, 1)


def _excited(x: Tensor, layer: nn.Module) -> Tensor:
    return x * torch.sigmoid(layer(x.mean((2, 3, 4))))[:, :, None, None, None]


def _attended(x: Tensor, layer: nn.Module) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    seen: Tensor = layer(tokens, tokens, tokens)[0]
    return x + seen.transpose(1, 2).reshape(x.shape)


def _tri(aligned: bool) -> nn.Module:
    up = nn.Upsample(scale_factor=2, mode="trilinear", align_corners=aligned)
    return nn.Sequential(nn.MaxPool3d(2), conv(1, 4), up, conv(4, 1))


LOCAL: dict[str, tuple[Callable[[], nn.Module], Sight]] = {
    "plain": (lambda: nn.Sequential(conv(1, 4), nn.ReLU(), conv(4, 1, 5)), Sight(1, 3, 3)),
    "dilated": (lambda: nn.Sequential(conv(1, 4, 3, 4), nn.GELU(), conv(4, 1)), Sight(1, 5, 5)),
    "strided": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 4, 3, 2, 1), nn.ReLU(), nn.Upsample(scale_factor=2), conv(4, 1, 1)
        ),
        Sight(2, 2, 0),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 4, 2, 1), nn.ConvTranspose3d(4, 1, 4, 2, 1)),
        Sight(2, 3, 3),
    ),
    "trilinear": (lambda: _tri(False), Sight(2, 4, 4)),
    "pixel shuffle": (
        lambda: nn.Sequential(nn.Conv3d(1, 8, 2, 2), conv(8, 8), Made(_shuffled), conv(1, 1)),
        Sight(2, 3, 3),
    ),
    "batch norm": (
        lambda: nn.Sequential(conv(1, 4), nn.BatchNorm3d(4), conv(4, 1)), Sight(1, 2, 2),
    ),
    "layer norm": (
        lambda: nn.Sequential(conv(1, 4), Made(_by_channel, nn.LayerNorm(4)), conv(4, 1)),
        Sight(1, 2, 2),
    ),
    "2-D": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1),
            nn.Upsample(scale_factor=2), nn.Conv2d(4, 1, 3, padding=1),
        ),
        Sight(2, 5, 5),
    ),
    "asymmetric": (
        lambda: Made(lambda x, layer: layer(F.pad(x, (2, 0) * 3)), nn.Conv3d(1, 1, 3)),
        Sight(1, 2, 0),
    ),
    "even kernel": (
        lambda: Made(lambda x, layer: layer(F.pad(x, (1, 2) * 3)), nn.Conv3d(1, 1, 4)),
        Sight(1, 1, 2),
    ),
    "swallows NaN": (
        lambda: Made(lambda x, layer: layer(torch.nan_to_num(x)), conv(1, 1, 7)),
        Sight(1, 3, 3),
    ),
    "compares": (
        lambda: Made(lambda x, layer: layer((x > 0.5).to(x.dtype)), conv(1, 1, 5)),
        Sight(1, 2, 2),
    ),
    "fifths": (  # it takes multiples of five only
        lambda: nn.Sequential(
            Made(lambda x: x.unflatten(-1, (-1, 5)).flatten(-2)), nn.MaxPool3d(5),
            nn.Upsample(scale_factor=5),
        ),
        Sight(5, 0, 0),
    ),
    "thirds": (
        lambda: nn.Sequential(nn.MaxPool3d(3), nn.Upsample(scale_factor=3)),
        Sight(3, 0, 0),
    ),
}  # fmt: skip
"""Networks that an overlap makes exact."""


def _monai(name: str, **knobs: Any) -> nn.Module:
    nets = importlib.import_module("monai.networks.nets")
    return getattr(nets, name)(spatial_dims=3, in_channels=1, out_channels=1, **knobs)


def _flow(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x)
    return y if x.mean() > 0.5 else 2 * y


def _masked(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x)
    return torch.where(torch.arange(y.shape[-1]) > 160, 0, y)


def _centred(x: Tensor) -> Tensor:
    """Its sides become multiples of 27 by zeros on both sides, and are pooled by 9."""
    pads = [(-n % 27 // 2, -n % 27 - -n % 27 // 2) for n in x.shape[2:]]
    y = F.pad(x, [n for each in reversed(pads) for n in each])
    y = F.interpolate(F.max_pool3d(y, 9), scale_factor=9)
    for axis, (n, (before, _)) in enumerate(zip(x.shape[2:], pads, strict=True), 2):
        y = y.narrow(axis, before, n)
    return y


class _Begun(nn.Module):
    """It keeps the mean of its first input, as layers do whose scale is begun by data."""

    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean()
        return x / self.mean


FAR: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "group norm": (lambda: nn.Sequential(conv(1, 4), nn.GroupNorm(2, 4), conv(4, 1)), "GroupNorm"),
    "instance norm": (
        lambda: nn.Sequential(conv(1, 4), nn.InstanceNorm3d(4), conv(4, 1)),
        "InstanceNorm3d",
    ),
    "squeeze and excite": (
        lambda: nn.Sequential(conv(1, 4), Made(_excited, nn.Linear(4, 4)), conv(4, 1)),
        "Linear",
    ),
    "attention": (
        lambda: nn.Sequential(
            conv(1, 4), Made(_attended, nn.MultiheadAttention(4, 1, batch_first=True)), conv(4, 1)
        ),
        "MultiheadAttention",
    ),
    "flow by values": (lambda: Made(_flow, conv(1, 1)), "farther than 128"),
    "farther where bright": (
        lambda: Made(lambda x, layer: torch.where(x > 2, layer(x), x), conv(1, 1, 9)),
        "differs from a larger input",
    ),
    "farther at a few values": (
        lambda: Made(lambda x, wide: torch.where((x - 150).abs() < 50, wide(x), x), conv(1, 1, 9)),
        "differs from a larger input",
    ),
    "empty patches left out": (
        lambda: Made(lambda x, layer: 0 * x if x.std() < 1e-3 else layer(x), conv(1, 1)),
        "differs from a larger input",
    ),
    "mask at a far index": (lambda: Made(_masked, conv(1, 1)), "differs from a larger input"),
    "tiles of its own": (
        lambda: Made(lambda x, layer: torch.cat([*map(layer, x.split(128, 2))], 2), conv(1, 1)),
        "differs from a larger input along z",
    ),
    "centred in a multiple": (lambda: Made(_centred), "differs from a larger input"),
    "edges left out": (
        lambda: Made(lambda x: F.pad(x[..., 16:-16], (16, 16)) if x.shape[-1] > 32 else 0 * x),
        "differs from a larger input along x",
    ),
    "size in voxels": (
        lambda: Made(lambda x: x * (1 + (x.numel() > 50_000))),
        "differs from a larger input along z and y and x",
    ),
    "normalised in float32": (
        lambda: Made(lambda x, layer: layer(x) / (1 if x.dtype == torch.float64 else x.std()),
                     conv(1, 1)),
        "in torch.float32",
    ),
    "begun by data": (_Begun, "in torch.float32"),
    "others of the batch": (lambda: Made(lambda x: x - x.mean(0, keepdim=True)), "in its batch"),
    "place in the batch": (
        lambda: Made(lambda x: x + torch.arange(len(x), dtype=x.dtype)[:, None, None, None, None]),
        "in its batch",
    ),
    "three in a batch": (lambda: Made(lambda x: x * (1 + (len(x) > 2))), "in its batch"),
    "corners aligned": (lambda: _tri(True), "where a patch lies"),
    "position": (lambda: Made(lambda x: x + torch.arange(x.shape[-1]).to(x)), "where a patch lies"),
    "size": (lambda: Made(lambda x: x / x.shape[-1]), "differs from a larger input"),
    "random": (lambda: Made(lambda x: x + torch.rand_like(x)), "each time"),
    "transformer": (tiny, "attn"),
    "MONAI UNet": (
        lambda: _monai("UNet", channels=(4, 8, 16), strides=(2, 2)), "InstanceNorm3d"
    ),
    "MONAI SegResNet": (lambda: _monai("SegResNet", init_filters=8), "GroupNorm"),
    "MONAI SwinUNETR": (lambda: _monai("SwinUNETR", feature_size=12), "InstanceNorm3d"),
}  # fmt: skip
"""Networks that no overlap makes exact, and a part of the reason."""


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A network with the same weights each time."""
    torch.manual_seed(0)
    return make().eval()
