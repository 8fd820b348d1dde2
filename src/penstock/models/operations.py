"""The floating-point operations of a forward, counted."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from .footprint import LightMode


class Operations(LightMode):
    """Counts floating-point operations by torch's own formulas. Its `FlopCounterMode` does so, too,
    and imports the compiler for it, which takes a second of each start."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:  # it is one of the operators that all others are made of
            out = func(*args, **kwargs)
            count = flop_registry.get(func._overloadpacket)
            self.total += count(*args, **kwargs, out_val=out) if count else 0
        return out
