"""Floating-point operations of a step, counted by running a network on shapes alone (torch's meta
device)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ...models import Model

Heads = Mapping[str, Tensor]
Loss = Callable[[Heads, Heads], Tensor]
"""The loss of a model's heads against their targets."""


def count_flops(
    model: Model, shape: tuple[int, ...], dtype: torch.dtype, loss: Loss | None
) -> tuple[int, dict[str, int]]:
    """Count the operations of a step by running it on shapes, which takes no memory and hardly any
    time.

    Args:
        model: the network.
        shape: the shape of its input: batch, channels, sides.
        dtype: the dtype of its input.
        loss: the loss of a training step, which is run without its optimizer; None for
            inference.

    Returns:
        The operations of operators with a formula, and the number of calls of each operator without
        one. Errors of the network on such tensors are raised.
    """
    named = [*model.module.named_parameters(), *model.module.named_buffers()]
    meta = {
        f"net.{name}": torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)
        for name, t in named
    }
    x = torch.empty(shape, dtype=dtype, device="meta")
    # In this order the outer mode sees what the counter has decomposed.
    with _Uncounted() as uncounted, FlopCounterMode(display=False) as counter:
        torch.func.functional_call(_PlayedStep(model, loss), meta, (x,))
    return counter.get_total_flops(), dict(sorted(uncounted.calls.items()))


class _PlayedStep(nn.Module):
    """A network whose forward is a step, so that recomputing sees the same stand-in weights."""

    def __init__(self, model: Model, loss: Loss | None) -> None:
        super().__init__()
        self.net, self.heads, self.loss = model.module, model.heads, loss

    def forward(self, x: Tensor) -> None:
        with torch.set_grad_enabled(self.loss is not None):
            heads = self.heads(self.net(x))
            if self.loss is not None:
                targets = {name: torch.empty_like(h.float()) for name, h in heads.items()}
                self.loss(heads, targets).backward()


_MOVES = frozenset(
    "clone copy_ _to_copy detach _unsafe_view _reshape_alias lift_fresh fill_ zero_ empty_like "
    "zeros_like ones_like full_like new_empty new_empty_strided new_zeros new_ones new_full".split()
)
"""Operators that allocate, fill or copy; no arithmetic."""


class _Uncounted(TorchDispatchMode):
    """Counts the calls of each operator that `FlopCounterMode` has no formula for. The optimizer
    does not run, so its operators are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        takes_tensors = any("Tensor" in str(taken.type) for taken in func._schema.arguments)
        counted = func.overloadpacket in flop_registry
        if takes_tensors and not counted and not func.is_view and name not in _MOVES:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))
