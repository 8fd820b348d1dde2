"""The networks that every contender runs: seeded, so that all of them compute the same thing.

Penstock takes them as ``--model-type benchmarks/models.py:NAME``, peers by `make`. Weights are
random: they change what comes out, not how long it takes. Each takes and returns one channel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SEED = 0


class Identity(nn.Module):
    """Returns its input. The parameter is for peers that ask a net where its parameters are."""

    in_channels = out_channels = 1

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x


def identity() -> nn.Module:
    """No work at all: what is left is the pipeline."""
    return Identity()


def three_conv() -> nn.Module:
    """Three 3 x 3 x 3 convolutions, width 8: a voxel sees 3 voxels to each side."""
    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(8, 1, 3, padding=1),
    )
    # An untrained net returns almost nothing but its biases; a mean over the neighbourhood, plus
    # what the seed says, keeps the output in the range of the input, where counts can be compared.
    with torch.no_grad():
        for layer in net:
            if isinstance(layer, nn.Conv3d) and layer.bias is not None:
                layer.weight.mul_(0.2).add_(1 / (27 * layer.in_channels))
                nn.init.zeros_(layer.bias)
    return net


def unet() -> nn.Module:
    """`denoise_tiny`: 3 levels, 19 thousand operations for each voxel, seamless at overlap 16."""
    from penstock.models.unet3d import denoise_tiny

    torch.manual_seed(SEED)
    return denoise_tiny()


def denoise_net() -> nn.Module:
    """`denoise_net`: 5 levels, 418 thousand operations for each voxel."""
    from penstock.models.unet3d import denoise_net as build

    torch.manual_seed(SEED)
    return build()


def make(name: str) -> nn.Module:
    """A network by its name, ready to run."""
    return {f.__name__: f for f in (identity, three_conv, unet, denoise_net)}[name]().eval()
