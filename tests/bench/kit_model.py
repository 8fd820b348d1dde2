"""Networks in a file, their cases, and a scenario ``model`` of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.bench.scenarios.model import ModelScenario

NETS = '''
import weakref
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

def convs():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 2, 3, padding=1))

def blocks():
    more = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 2, 3, padding=1))
    return nn.Sequential(convs(), more)

class Patches(nn.Module):
    """Nothing but shapes may go through it."""
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, 8, 4, stride=4)
    def forward(self, x):
        assert x.device.type == "meta", "it was run"
        if x.shape[-1] % 4:
            raise ValueError(f"a side of {x.shape[-1]} is not a multiple of the patch, 4")
        return {"map": self.proj(x), "mean": x.mean((2, 3))}

class Valued(nn.Module):
    """Looks at a value, so that it cannot be played on shapes."""
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
    def forward(self, x):
        if x.shape[-1] > 32:
            raise RuntimeError("too wide for me\\nand more")
        return self.conv(x) if x.sum() > 0 else x

class Shrinking(nn.Module):
    """Returns a pixel less each time."""
    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 3, 1), 0
    def forward(self, x):
        self.calls += x.device.type != "meta"
        return self.conv(x)[..., self.calls:]

class Infinite(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 3, 1)
    def forward(self, x):
        return super().forward(x) / 0

class Watched(nn.Module):
    """Knows whether what it returned is still alive at the next call."""
    def __init__(self):
        super().__init__()
        self.conv, self.last, self.alive = nn.Conv2d(3, 3, 1), None, []
    def forward(self, x):
        if self.last is not None:
            self.alive.append(self.last() is not None)
        y = self.conv(x)
        self.last = weakref.ref(y)
        return y

class Recomputing(nn.Module):
    """Knows how to forget what is between its parts."""
    def __init__(self):
        super().__init__()
        self.parts, self.forgets = blocks(), False
    def set_checkpointing(self, enabled):
        self.forgets = enabled
    def forward(self, x):
        return checkpoint(self.parts, x, use_reentrant=False) if self.forgets else self.parts(x)

def frozen():
    return convs().requires_grad_(False)

def normed():
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))

def overwriting():
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.LeakyReLU(inplace=True))

def classes():
    return nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
'''


CASE: dict[str, Any] = {
    "mode": "inference", "tile": "16", "batch": 2, "weights": None, "channels": None,
    "dtype": "float32", "amp": False, "compile": False, "channels_last": False, "tf32": False,
    "checkpointing": False, "halo": 0, "device": "cpu", "threads": None, "seed": 0, "budget": None,
}  # fmt: skip


class Phases:
    """Notes which phases a step goes through."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, name: str) -> None:
        self.seen.append(name)


def made(nets: str, net: str, **knobs: Any) -> ModelScenario:
    from penstock.bench.scenarios.model import ModelScenario

    return ModelScenario({**CASE, "model": f"{nets}:{net}"} | knobs)
