"""Penstock's loader as a contender, with either engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ...base import UsageError
from ..batch import Batch
from ..loader import Loader
from ..order import Order


class Ours:
    """Penstock's loader with its defaults, as a benchmark compares it."""

    def __init__(self, data: Any, order: Order, *, threads: int, **knobs: Any) -> None:
        self.loader = Loader(
            data,
            workers=threads,
            batch_size=order.batch_size,
            shuffle=order.shuffle,
            window=order.window,
            seed=order.seed,
            rank=order.rank,
            world_size=order.world_size,
            drop_last=order.drop_last,
            **knobs,
        )
        if self.loader.order.plan != order.plan:
            raise UsageError(f"the data give the plan {self.loader.order.plan}, not {order.plan}")

    def batches(self) -> Iterator[Batch]:
        self.loader.set_epoch(0)
        return iter(self.loader)

    def close(self) -> None:
        self.loader.close()


by_tensorstore = partial(Ours, engine="tensorstore")
native = partial(Ours, engine="native")
"""The loader with one engine, whatever ``auto`` would choose."""
