"""Samples by index into batches, in the order of an `Order`, by torch's DataLoader.

    Order.items(epoch, batch) ──▶ samples[index] in worker processes ──▶ collate ──▶ (items, batch)

The order is arithmetic, so a feed begins at any batch of any epoch without going through those
before it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from .config import TrainConfig
from .order import Items, Order, Position
from .workloads import Batch, Samples, Workload

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What a batch system ends a job with."""


class TorchFeed:
    """Samples by index, put into batches by torch's DataLoader and its worker processes."""

    def __init__(
        self, samples: Samples, order: Order, workload: Workload, config: TrainConfig, pin: bool
    ) -> None:
        self._batches = _Batches(order)
        workers = config.num_workers
        self._loader: DataLoader[Any] = DataLoader(
            _Indexed(samples),  # type: ignore[arg-type]
            batch_sampler=self._batches,
            collate_fn=_Collate(workload),
            num_workers=workers,
            persistent_workers=config.persistent_workers and workers > 0,
            prefetch_factor=config.prefetch_factor if workers > 0 else None,
            pin_memory=pin,
            worker_init_fn=_leave_signals_to_the_parent,
            # Of its own, or each iterator would draw its seed from the numbers of the run, and
            # a run that goes on inside an epoch makes one iterator more.
            generator=torch.Generator().manual_seed(order.seed),
        )

    def epoch(self, epoch: int, first: int) -> Iterator[tuple[Items, Batch]]:
        self._batches.at = Position(epoch, first)
        return iter(self._loader)

    def close(self) -> None:
        del self._loader


def _leave_signals_to_the_parent(worker: int) -> None:
    """A batch system signals every process of a job; workers that died of it would take the run
    with them before its checkpoint. They end when their parent does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _Batches:
    """The indices of each batch, from a position to the end of its epoch."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.at = Position(0, 0)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = self.at
        for batch in range(first, self._order.num_batches):
            yield self._order.items(epoch, batch).tolist()

    def __len__(self) -> int:
        return self._order.num_batches - self.at.batch


class _Indexed:
    """Samples together with their indices."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._samples[index]


class _Collate:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __call__(self, pairs: Sequence[tuple[int, Any]]) -> tuple[Items, Batch]:
        indices = np.array([index for index, _ in pairs], np.int64)
        return indices, self._workload.collate([sample for _, sample in pairs])
