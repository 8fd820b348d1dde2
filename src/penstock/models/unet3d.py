"""Two residual 3-D U-Nets that take noise off a volume: ``denoise_net`` and ``denoise_tiny``.

    x ─ inc ──────────────────────────────── up4 ─ outc ─ + ─ y
         └─ down1 ──────────────────── up3 ──┘            x
             └─ down2 ────────── up2 ──┘
                 └─ down3 ─ ⋯ ── ┘          each level halves the sides

Names and shapes of the parameters are those of the public exaSPIM network, so its state dicts load
into ``denoise_net`` strictly:
https://github.com/AllenNeuralDynamics/aind-exaspim-image-compression (``UNet`` in
``machine_learning/unet3d.py``). Scaling of intensities, tiles and weights files lie elsewhere.

Tensors are named by shape: B batch, C channels, Z Y X space. C is the count at that place of the
network, so two ``_BCZYX`` tensors need not have one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Upsampling = Literal["trilinear", "nearest"]
Kernels = tuple[int, int]


class DoubleConv(nn.Module):
    """(convolution, normalisation, leaky ReLU) twice; the sides stay as they are."""

    def __init__(
        self, channels: tuple[int, int, int], kernels: Kernels = (3, 3), normalise: bool = True
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for taken, given, kernel in zip(channels, channels[1:], kernels, strict=False):
            layers.append(nn.Conv3d(taken, given, kernel, padding=kernel // 2))
            if normalise:
                layers.append(nn.GroupNorm(gcd(8, given), given))
            layers.append(nn.LeakyReLU(0.01, inplace=True))
        self.double_conv = nn.Sequential(*layers)

    def forward(self, x_BCZYX: Tensor) -> Tensor:
        return self.double_conv(x_BCZYX)


class Down(nn.Module):
    """Halve the sides by the maximum of each 2 x 2 x 2, then convolve."""

    def __init__(
        self, taken: int, given: int, kernels: Kernels = (3, 3), normalise: bool = True
    ) -> None:
        super().__init__()
        convolve = DoubleConv((taken, given, given), kernels, normalise)
        self.maxpool_conv = nn.Sequential(nn.MaxPool3d(2), convolve)

    def forward(self, x_BCZYX: Tensor) -> Tensor:
        return self.maxpool_conv(x_BCZYX)


class Up(nn.Module):
    """Double the sides, put the skip's channels in front, then convolve."""

    def __init__(
        self,
        taken: int,
        given: int,
        kernels: Kernels = (3, 3),
        normalise: bool = True,
        upsampling: Upsampling = "trilinear",
    ) -> None:
        super().__init__()
        # The public weights were trained with corners aligned. It makes the phase of the
        # interpolation depend on the size of the tile.
        align_corners = True if upsampling == "trilinear" else None
        self.up = nn.Upsample(scale_factor=2, mode=upsampling, align_corners=align_corners)
        self.conv = DoubleConv((taken, taken // 2, given), kernels, normalise)

    def forward(self, x_BCZYX: Tensor, skip_BCZYX: Tensor) -> Tensor:
        x_BCZYX = self.up(x_BCZYX)
        short = [s - x for s, x in zip(skip_BCZYX.shape[2:], x_BCZYX.shape[2:], strict=True)]
        if any(short):
            # An odd side lost its last voxel when it was halved; zero stands in for it, as it did
            # when the public weights were trained.
            x_BCZYX = F.pad(x_BCZYX, (0, short[2], 0, short[1], 0, short[0]))
        return self.conv(torch.cat([skip_BCZYX, x_BCZYX], dim=1))


class OutConv(nn.Module):
    """One value of each output channel from the features of one voxel."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(taken, given, 1)

    def forward(self, x_BCZYX: Tensor) -> Tensor:
        return self.conv(x_BCZYX)


class UNet3d(nn.Module):
    """A U-Net whose output is a correction added to its input.

    ``widths`` are the channels of each level, each twice those of the level above. Upsampling keeps
    the number of channels, so the lowest ``down`` and every ``up`` but the last give half of their
    level's width. ``kernels`` holds a pair for ``inc``, each ``down`` and each ``up``, in that
    order.

    Sides must be at least ``2 ** (len(widths) - 1)``, one voxel at the lowest level; less is a
    `ValueError`. Sides that are not multiples of it are accepted, and their last voxels see less
    context than the others.
    """

    def __init__(
        self,
        widths: Sequence[int],
        in_channels: int = 1,
        out_channels: int = 1,
        *,
        kernels: Sequence[Kernels] | None = None,
        normalise: bool = True,
        upsampling: Upsampling = "trilinear",
    ) -> None:
        super().__init__()
        if in_channels not in (1, out_channels):
            raise ValueError(
                f"a residual network adds its input to its output: {in_channels} input channels "
                f"cannot be added to {out_channels} output channels (take 1, or as many)"
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.depth = len(widths) - 1
        """Times that the sides are halved."""
        each = list(kernels) if kernels is not None else [(3, 3)] * (1 + 2 * self.depth)
        inc, downs, ups = each[0], each[1 : 1 + self.depth], each[1 + self.depth :]

        self.inc = DoubleConv((in_channels, widths[0], widths[0]), inc, normalise)
        # Levels are numbered attributes, not a list, because the public state dicts name them so.
        for level in range(1, self.depth + 1):
            given = widths[level] // (2 if level == self.depth else 1)
            down = Down(widths[level - 1], given, downs[level - 1], normalise)
            self.add_module(f"down{level}", down)
        for step in range(1, self.depth + 1):
            level = self.depth - step
            given = widths[level] // (1 if level == 0 else 2)
            up = Up(widths[level + 1], given, ups[step - 1], normalise, upsampling)
            self.add_module(f"up{step}", up)
        self.outc = OutConv(widths[0], out_channels)

    def forward(self, x_BCZYX: Tensor) -> Tensor:
        """Shape (B, in_channels, Z, Y, X) to (B, out_channels, Z, Y, X), same dtype and device."""
        self._check_sides(x_BCZYX.shape[2:])
        features = [self.inc(x_BCZYX)]
        for level in range(1, self.depth + 1):
            features.append(self.get_submodule(f"down{level}")(features[-1]))
        y_BCZYX: Tensor = features.pop()
        for step in range(1, self.depth + 1):
            y_BCZYX = self.get_submodule(f"up{step}")(y_BCZYX, features.pop())
        correction_BCZYX: Tensor = self.outc(y_BCZYX)
        return x_BCZYX + correction_BCZYX

    def _check_sides(self, sides: Sequence[int]) -> None:
        least = 2**self.depth
        if min(sides) < least:
            raise ValueError(
                f"sides {tuple(sides)} must be at least {least}: they are halved {self.depth} times"
            )


def denoise_net(
    width_multiplier: float = 1.0, in_channels: int = 1, out_channels: int = 1
) -> nn.Module:
    """The exaSPIM denoiser: 5 levels of 32, 64, 128, 256, 512 channels times the multiplier.

    Takes (B, in_channels, Z, Y, X) with sides of 16 or more. Untrained. At a multiplier of 1 it
    holds 12.9 million parameters and does 418 thousand floating-point operations for each voxel.
    Group normalisation makes every voxel depend on the whole tile, so seams between tiles can be
    softened but never vanish. Public weights from before commit 163db61 (July 2026) hold batch
    normalisation and do not load.

    Raises `ValueError` for a multiplier that does not give whole channels, and for more than one
    input channel unless there are as many output channels.
    """
    widths = [width * width_multiplier for width in (32, 64, 128, 256, 512)]
    if not (widths[0] >= 1 and widths[0] == int(widths[0])):
        raise ValueError(
            f"width_multiplier {width_multiplier} gives {widths[0]:g} channels at the first level; "
            "it must be a multiple of 1/32"
        )
    return UNet3d([int(width) for width in widths], in_channels, out_channels)


def denoise_tiny() -> nn.Module:
    """A denoiser quick enough for a CPU: 3 levels, one channel in and out, seamless when tiled.

    Takes (B, 1, Z, Y, X) with sides of 4 or more. Untrained; the weights beside this module are
    made by ``training/denoise_tiny.py``. It holds 25 thousand parameters and does 19 thousand
    floating-point operations for each voxel.

    Receptive field: a voxel sees at most 11 voxels to each side, and a core whose corners lie
    on multiples of 4 sees exactly 8 voxels past its faces. So tiles with ``overlap`` 16 and a
    patch that is a multiple of 4, their seams trimmed, equal the untiled result up to rounding.
    That is why this network has no normalisation over space, upsamples by repetition (interpolation
    would see one coarse voxel more, or depend on the tile's size), and convolves with 1 x 1 x 1
    where a wider kernel would cost 8 voxels of halo.
    """
    return UNet3d(
        (8, 16, 32),
        kernels=((3, 3), (3, 1), (1, 1), (3, 1), (3, 3)),
        normalise=False,
        upsampling="nearest",
    )
