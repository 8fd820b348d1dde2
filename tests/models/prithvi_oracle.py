"""The encoder of the public checkpoints written anew, as an oracle for ours."""

import functools
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


@functools.cache
def sines_and_cosines(width: int, frames: int, grid: int) -> np.ndarray:
    """The positions of the public code from their definition, patch by patch."""
    table = [np.zeros(width)]
    for frame, y, x in np.ndindex(frames, grid, grid):
        line = []
        for place, part in ((x, 6), (y, 6), (frame, 4)):
            half = width // 16 * part // 2
            angles = place / 10000 ** (np.arange(half) / half)
            line += [np.sin(angles), np.cos(angles)]
        table.append(np.concatenate(line))
    return np.stack(table)


def encode(state: Mapping[str, Tensor], x: Tensor, heads: int, patch: int) -> Tensor:
    """The encoder written anew: patches cut by hand, attention by matrices and softmax."""
    p = {name.removeprefix("encoder."): value for name, value in state.items()}
    width = p["cls_token"].shape[-1]

    def linear(tokens: Tensor, name: str) -> Tensor:
        return tokens @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(tokens: Tensor, name: str) -> Tensor:
        centred = tokens - tokens.mean(-1, keepdim=True)
        unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return unit * p[f"{name}.weight"] + p[f"{name}.bias"]

    b, c, height, breadth = x.shape
    cut = x.reshape(b, c, height // patch, patch, breadth // patch, patch)
    cut = cut.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * patch * patch)
    tokens = cut @ p["patch_embed.proj.weight"].reshape(width, -1).T + p["patch_embed.proj.bias"]
    tokens = torch.cat([p["cls_token"].expand(b, 1, width), tokens], 1) + p["pos_embed"]
    for block in range(1 + max(int(name.split(".")[1]) for name in p if "blocks" in name)):
        name = f"blocks.{block}"
        qkv = linear(norm(tokens, f"{name}.norm1"), f"{name}.attn.qkv")
        q, k, v = qkv.reshape(b, -1, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(width // heads)).exp()
        mixed = (scores / scores.sum(-1, keepdim=True)) @ v
        tokens = tokens + linear(mixed.transpose(1, 2).reshape(b, -1, width), f"{name}.attn.proj")
        hidden = linear(norm(tokens, f"{name}.norm2"), f"{name}.mlp.fc1")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        tokens = tokens + linear(hidden, f"{name}.mlp.fc2")
    features = norm(tokens, "norm")[:, 1:].transpose(1, 2)
    return features.reshape(b, width, height // patch, breadth // patch)
