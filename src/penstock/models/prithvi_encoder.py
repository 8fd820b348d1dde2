"""The encoder of the public Prithvi-EO checkpoints, of one frame: a vision transformer, frozen.

Its parameters have the names and shapes of the checkpoints. Nothing in it learns but low-rank
adapters on the attention, added later. Names, positions and order of operations are those of
``prithvi_mae.py`` of https://github.com/terrastackai/terratorch.

Tensors are named by shape: B batch, C channels, Y X pixels or patches, N tokens (patches and one
more, for the class), H heads, D channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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

    def adapt(self, rank: int, alpha: float) -> None:
        """Add adapters that learn. B begins as zero, so the layer begins as it was."""
        given, taken = self.weight.shape
        self.lora_a = nn.Parameter(torch.empty(rank, taken))
        self.lora_b = nn.Parameter(torch.zeros(given, rank))
        self.lora_strength = alpha / rank
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + self.lora_strength * F.linear(F.linear(x, self.lora_a), self.lora_b)


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
