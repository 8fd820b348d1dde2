"""Nets that several test files of this folder share."""

from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Parameters, buffers of both kinds, a constant, a part without gradients, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.last = nn.Conv3d(4, 2, 1)
        self.register_buffer("ramp", torch.arange(8.0), persistent=False)
        self.scale = torch.tensor([1.0, 2.0])

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.conv(x)).relu()
        with torch.no_grad():
            y = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
        y = self.last(nn.functional.max_pool3d(y, 2) + torch.tensor([3.0]))
        y = y * self.scale.view(1, 2, 1, 1, 1) + self.ramp
        one, two = y.split(1, dim=1)
        folded = one.reshape(x.shape[0] * 2, -1).reshape(x.shape[0], 1, *x.shape[2:])
        return {"one": folded, "two": (torch.sigmoid(two), two.clamp(min=-torch.inf))}


class Layer(nn.Module):
    """A convolution under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


X = torch.linspace(-1, 1, 2 * 512).reshape(2, 1, 8, 8, 8)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.ReLU())

    def forward(self, x: Tensor) -> list[Tensor]:
        heads: list[Tensor] = []
        for i in range(2):
            y = x + i if x.size(0) > 1 else torch.sigmoid(x)
            heads.append(self.net(y))
        return heads
