"""A refiner of satellite images on a frozen Prithvi-EO encoder: ``prithvi-refiner`` in four sizes.

    x ─ patches ─ blocks ⋯ blocks ─ norm ─ ConvNeXt head ─ decoder ─ + ─ y
        └───── frozen, LoRA in attention ─────┘ └──── trained ────┘  x

The encoder is that of the public Prithvi-EO checkpoints, so they load (`Refiner.from_public`). All
of it is frozen.
The trained part is small: low-rank adapters on the attention, a head of ConvNeXt blocks on the grid
of patches, and a decoder that doubles its sides until they are the tile's again.

    size   width  depth  heads  patch   encoder    trained       in all
    tiny     192     12      3     16     5.6 M     0.65 M       6.28 M
    100m     768     12     12     16    86.2 M     2.65 M       88.9 M
    300m    1024     24     16     16   303.9 M     3.45 M      307.3 M
    600m    1280     32     16     14   631.2 M     5.50 M      636.7 M

The decoder of the pretraining, some 25 million more in a public checkpoint, is left out. A patch of
14 fits tiles of 224, 252, 378 or 392 pixels, not 256 or 384.

Attention looks at the whole tile, so a pixel depends on all of it and tiles show seams whatever
their halo; they can be softened, never removed.

References: https://github.com/NASA-IMPACT/Prithvi-EO-2.0, and ``prithvi_mae.py`` of
https://github.com/terrastackai/terratorch for names, positions and order of operations.

Tensors are named by shape: B batch, C channels, Y X pixels or patches, N tokens (patches and one
more, for the class), H heads, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..base import UsageError

SizeName = Literal["tiny", "100m", "300m", "600m"]

BANDS = ("B02", "B03", "B04", "B05", "B06", "B07")
"""The bands of the public checkpoints, in order: blue, green, red, narrow infrared and two
short-wave infrared, as Harmonized Landsat and Sentinel-2 names them."""

LORA_RANK, LORA_ALPHA = 8, 16.0
TRAINED_SIDE = 224
"""Pixels on a side of the images of the pretraining: checkpoints hold positions of its patches."""


@dataclass(frozen=True)
class Size:
    """The numbers in which the four sizes differ."""

    width: int
    depth: int
    heads: int
    patch: int
    head_width: int


SIZES: Mapping[SizeName, Size] = {
    "tiny": Size(width=192, depth=12, heads=3, patch=16, head_width=128),
    "100m": Size(width=768, depth=12, heads=12, patch=16, head_width=256),
    "300m": Size(width=1024, depth=24, heads=16, patch=16, head_width=256),
    "600m": Size(width=1280, depth=32, heads=16, patch=14, head_width=320),
}


class FrozenLinear(nn.Module):
    """A linear layer that is not trained, ``y = W x + b``; with LoRA, ``+ alpha / rank * B A x``.

    https://arxiv.org/abs/2106.09685
    """

    lora_a: Tensor | None
    lora_b: Tensor | None

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(given, taken), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(given), requires_grad=False)
        nn.init.xavier_uniform_(self.weight)
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)

    def adapt(self) -> None:
        """Add adapters that learn. B begins as zero, so the layer begins as it was."""
        given, taken = self.weight.shape
        self.lora_a = nn.Parameter(torch.empty(LORA_RANK, taken))
        self.lora_b = nn.Parameter(torch.zeros(given, LORA_RANK))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + LORA_ALPHA / LORA_RANK * F.linear(F.linear(x, self.lora_a), self.lora_b)


class PatchEmbed(nn.Module):
    """Each patch of one frame as a token."""

    def __init__(self, bands: int, width: int, patch: int) -> None:
        super().__init__()
        sides = (1, patch, patch)
        self.proj = nn.Conv3d(bands, width, sides, stride=sides)
        nn.init.xavier_uniform_(self.proj.weight.view(width, -1))
        nn.init.zeros_(self.proj.bias)  # type: ignore[arg-type]

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return self.proj(x_BCYX.unsqueeze(2)).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention: each token attends to all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = FrozenLinear(width, 3 * width)
        self.proj = FrozenLinear(width, width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        qkv_BNC: Tensor = self.qkv(x_BNC)
        q_BHND, k_BHND, v_BHND = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in qkv_BNC.chunk(3, dim=2)
        )
        y_BHND = F.scaled_dot_product_attention(q_BHND, k_BHND, v_BHND)
        return self.proj(y_BHND.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers on each token by itself, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = FrozenLinear(width, 4 * width)
        self.fc2 = FrozenLinear(4 * width, width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BNC)))


class EncoderBlock(nn.Module):
    """Attention, then the MLP, each on normalised tokens and added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = x_BNC + self.attn(self.norm1(x_BNC))
        return x_BNC + self.mlp(self.norm2(x_BNC))


class Encoder(nn.Module):
    """Turns an image into features of its patches. Only adapters that are added later learn."""

    pos_embed: Tensor

    def __init__(self, size: Size, bands: int) -> None:
        super().__init__()
        self.patch = size.patch
        self.grid = TRAINED_SIDE // size.patch
        self.checkpointing = False
        self.cls_token = nn.Parameter(torch.empty(1, 1, size.width))
        nn.init.normal_(self.cls_token, std=0.02)
        self.register_buffer("pos_embed", positions(size.width, self.grid)[None])
        self.patch_embed = PatchEmbed(bands, size.width, size.patch)
        self.blocks = nn.ModuleList(EncoderBlock(size.width, size.heads) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.requires_grad_(False)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """Shape (B, bands, Y, X) to (B, width, Y / patch, X / patch)."""
        rows, columns = (side // self.patch for side in x_BCYX.shape[2:])
        patches_BNC = self.patch_embed(x_BCYX) + self._patch_positions(rows, columns)
        first_BNC = (self.cls_token + self.pos_embed[:, :1]).expand(len(x_BCYX), -1, -1)
        tokens_BNC = torch.cat([first_BNC, patches_BNC], dim=1)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                # Nothing in a block is random, so there is no state of a generator to keep.
                tokens_BNC = checkpoint(
                    block, tokens_BNC, use_reentrant=False, preserve_rng_state=False
                )
            else:
                tokens_BNC = block(tokens_BNC)
        patches_BNC = self.norm(tokens_BNC)[:, 1:]
        return patches_BNC.transpose(1, 2).unflatten(2, (rows, columns))

    def _patch_positions(self, rows: int, columns: int) -> Tensor:
        """Positions of the patches; for another grid than the pretraining's they are interpolated,
        as in public code."""
        table_BNC = self.pos_embed[:, 1:]
        if (rows, columns) == (self.grid, self.grid):
            return table_BNC
        table_BCYX = table_BNC.transpose(1, 2).unflatten(2, (self.grid, self.grid))
        table_BCYX = F.interpolate(table_BCYX, (rows, columns), mode="bicubic", align_corners=True)
        return table_BCYX.flatten(2).transpose(1, 2)


def positions(width: int, grid: int) -> Tensor:
    """Sines and cosines of column, row and frame: 6, 6 and 4 sixteenths of the width.

    A row for each patch of the grid, line by line, after a row of zeros for the class token.
    """

    def waves(places: Tensor, channels: int) -> Tensor:
        half = channels // 2
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = places[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    places = torch.arange(grid, dtype=torch.float64)
    columns, rows = places.repeat(grid), places.repeat_interleave(grid)
    parts = [(columns, 6), (rows, 6), (torch.zeros_like(rows), 4)]
    table = torch.cat([waves(place, width // 16 * part) for place, part in parts], dim=1)
    return torch.cat([torch.zeros_like(table[:1]), table]).float()


class ConvNeXtBlock(nn.Module):
    """A 7 x 7 neighbourhood channel by channel, then an MLP pixel by pixel, added to the input.

    https://arxiv.org/abs/2201.03545
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        # The paper begins at 1e-6, for deep nets. These few blocks learn faster from 0.1.
        self.layer_scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x_BCYX: Tensor) -> Tensor:
        y_BYXC: Tensor = self.norm(self.depthwise(x_BCYX).permute(0, 2, 3, 1))
        y_BYXC = self.layer_scale * self.narrow(F.gelu(self.widen(y_BYXC)))
        return x_BCYX + y_BYXC.permute(0, 3, 1, 2)


class Decoder(nn.Module):
    """From the grid of patches to pixels: sides are doubled and channels halved, step by step.

    The last step of a patch of 14 goes from 8 to 14.
    """

    def __init__(self, width: int, out_channels: int, patch: int) -> None:
        super().__init__()
        steps = math.ceil(math.log2(patch))
        self.factors = [min(2**step, patch) for step in range(1, steps + 1)]
        self.steps = nn.ModuleList(
            nn.Conv2d(width >> step, width >> (step + 1), 3, padding=1) for step in range(steps)
        )
        self.out = nn.Conv2d(width >> steps, out_channels, 3, padding=1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        rows, columns = x_BCYX.shape[2:]
        for factor, convolve in zip(self.factors, self.steps, strict=True):
            sides = (rows * factor, columns * factor)
            x_BCYX = F.interpolate(x_BCYX, sides, mode="bilinear", align_corners=False)
            x_BCYX = F.gelu(convolve(x_BCYX))
        return self.out(x_BCYX)


class Refiner(nn.Module):
    """Frozen encoder, trained head and decoder; the output is a correction added to the input.

    Make one with `prithvi_refiner`.
    """

    spatial_axes = 2  # although its patch embedding is a 3-D convolution

    def __init__(self, size: Size, in_channels: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        """The input's channels are the first of `BANDS`."""
        self.patch = size.patch
        self.encoder = Encoder(size, self.in_channels)
        self.head = nn.Sequential(
            nn.Conv2d(size.width, size.head_width, 1),
            *(ConvNeXtBlock(size.head_width) for _ in range(3)),
        )
        self.decoder = Decoder(size.head_width, in_channels, size.patch)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """Shape (B, in_channels, Y, X) to the same, sides multiples of the patch.

        Raises `UsageError` for other channels or sides.
        """
        self._check(x_BCYX.shape)
        correction_BCYX: Tensor = self.decoder(self.head(self.encoder(x_BCYX)))
        return x_BCYX + correction_BCYX

    def _check(self, shape: Sequence[int]) -> None:
        if len(shape) != 4 or shape[1] != self.in_channels:
            raise UsageError(
                f"an input of shape {tuple(shape)} is not (batch, {self.in_channels} bands, y, x)"
            )
        for side in shape[2:]:
            if side % self.patch:
                below = side // self.patch * self.patch
                fit = f"{below} and {below + self.patch} are" if below else f"{self.patch} is"
                raise UsageError(
                    f"a tile of {shape[2]} x {shape[3]} pixels is not made of whole patches of "
                    f"{self.patch} x {self.patch}: {side} is not a multiple of {self.patch}; {fit}"
                )

    def set_checkpointing(self, enabled: bool) -> None:
        """Keep only what goes into each encoder block, and run it again in the backward pass."""
        self.encoder.checkpointing = enabled

    def from_public(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A state dict for this net: the encoder of a public Prithvi-EO checkpoint, the rest ours.

        Names begin with ``encoder.`` since version 2, and without it before. The decoder of the
        pretraining and embeddings of time and place are dropped. Of several frames the positions of
        the first are kept, and of six bands those that this net takes.

        A state dict that is not public comes back as it is.
        """
        patches = "encoder.patch_embed.proj.weight"
        named = {k if k.startswith("encoder.") else f"encoder.{k}": v for k, v in state.items()}
        if patches not in named or any(k.startswith("head.") for k in state):
            return state
        unused = ("encoder.decoder", "encoder.mask_token", "encoder.temporal", "encoder.location")
        public = {k: v for k, v in named.items() if not k.startswith(unused)}
        if public[patches].shape[1] == len(BANDS):
            public[patches] = public[patches][:, : self.in_channels]
        if "encoder.pos_embed" in public:
            public["encoder.pos_embed"] = public["encoder.pos_embed"][
                :, : self.encoder.pos_embed.shape[1]
            ]
        ours = {
            k: v
            for k, v in self.state_dict().items()
            if not k.startswith("encoder.") or k.endswith(("lora_a", "lora_b"))
        }
        return ours | public


def prithvi_refiner(size: SizeName, in_channels: int = len(BANDS)) -> Refiner:
    """A refiner with the same weights in every process.

    The input's channels are the first 4 to 6 of `BANDS`.

    Raises `UsageError` for an unknown size, or too few or too many bands.
    """
    if size not in SIZES:
        raise UsageError(f"prithvi-refiner has no size {size!r}; it is one of {', '.join(SIZES)}")
    if not 4 <= in_channels <= len(BANDS):
        raise UsageError(f"prithvi-refiner takes the first 4 to {len(BANDS)} of {', '.join(BANDS)}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = Refiner(SIZES[size], in_channels)
        # Last, so that the other weights are those of a net without adapters.
        for layer in net.encoder.modules():
            if isinstance(layer, Attention):
                layer.qkv.adapt()
                layer.proj.adapt()
    return net


tiny, m100, m300, m600 = (partial(prithvi_refiner, size) for size in SIZES)
