"""Whether the last bits of a network's output depend on what does not concern it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .load import Model

BITS_SIDE = 32
"""Side of the patches whose bits are compared. Kernels are picked by shape, so those of others may
differ."""


def bits_that_vary(model: Model, axes: int, compiled: bool = False) -> dict[str, bool | None]:
    """Whether the last bits of an output depend on what does not concern it.

    Args:
        model: The model, which is run as it is.
        axes: The number of axes that it is given, 2 or 3.
        compiled: Compare with what `torch.compile` makes of it, too, which takes up to minutes.

    Returns:
        For ``batch``, the other samples of a batch, for ``threads``, the number of torch's threads,
        and for ``compile``: whether bits depend on it. None if the network cannot be run to see it.
    """
    threads = torch.get_num_threads()
    shape = (2, model.in_channels, *[BITS_SIDE] * axes)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)

    def forward(batch: Tensor, module: Callable[[Tensor], Any] = model.module) -> Tensor:
        return torch.cat([head[0] for head in model.heads(module(batch.clone())).values()])

    varies: dict[str, bool | None] = {"batch": None, "threads": None}
    if compiled:
        varies["compile"] = None
    try:
        with torch.no_grad():
            torch.set_num_threads(1)
            alone = forward(x[:1])
            varies["batch"] = not torch.equal(alone, forward(x))
            torch.set_num_threads(2)
            varies["threads"] = not torch.equal(alone, forward(x[:1]))
            if compiled:
                torch.set_num_threads(1)
                faster = torch.compile(model.module, dynamic=False)
                varies["compile"] = not torch.equal(alone, forward(x[:1], faster))
    except Exception:  # of a user's network, which takes no such batch
        return varies
    finally:
        torch.set_num_threads(threads)
    return varies
