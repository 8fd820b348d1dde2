"""Whether the last bits of a network's output depend on what does not concern it."""

from __future__ import annotations

import torch
from torch import Tensor

from .load import Model

_SIDE = 32
"""Side of the patches whose bits are compared."""


def bits_that_vary(model: Model, axes: int) -> dict[str, bool | None]:
    """Whether the last bits of an output depend on what does not concern it.

    Args:
        model: The model, which is run as it is.
        axes: The number of axes that it is given, 2 or 3.

    Returns:
        For ``batch``, the other samples of a batch, and for ``threads``, the number of torch's
        threads: whether bits depend on it. None if the network cannot be run to see it.
    """
    threads = torch.get_num_threads()
    shape = (2, model.in_channels, *[_SIDE] * axes)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)

    def forward(batch: Tensor) -> Tensor:
        return torch.cat([head[0] for head in model.heads(model.module(batch.clone())).values()])

    varies: dict[str, bool | None] = {"batch": None, "threads": None}
    try:
        with torch.no_grad():
            torch.set_num_threads(1)
            alone = forward(x[:1])
            varies["batch"] = not torch.equal(alone, forward(x))
            torch.set_num_threads(2)
            varies["threads"] = not torch.equal(alone, forward(x[:1]))
    except Exception:  # of a user's network, which takes no such batch
        return varies
    finally:
        torch.set_num_threads(threads)
    return varies
