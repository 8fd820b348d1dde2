"""Samples by index, put into batches in the order of an `Order`, by processes or by threads.

    Order.items(epoch, batch) ──▶ samples[index] in workers ──▶ collate ──▶ (items, batch)

The order is computed, so a feed can begin at any batch of any epoch without reading earlier ones.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from ..base import (
    BATCH_SIGNALS,
    PenstockError,
    TrainConfig,
    UsageError,
    death_signal,
    in_order,
    plural,
    usable_cores,
)
from ..loading import Items, Order, Position, batches_from
from .workloads import Batch, Feed, IndexedSamples, Workload

SIGNALS = (*BATCH_SIGNALS, signal.SIGINT)
"""The signals of a batch system and of Ctrl-C that end a training."""
SHARED, LEAST_SHARED = Path("/dev/shm"), 2**18
"""The memory that processes share, and the bytes that the locks of workers take there."""


@dataclass
class _SampleFeed:
    """Samples by index, put into batches."""

    samples: IndexedSamples
    order: Order
    workload: Workload
    config: TrainConfig
    pin: bool


class TorchFeed(_SampleFeed):
    """A feed by torch's DataLoader and its worker processes."""

    _iterator: Any = None

    @property
    def note(self) -> str:
        """A sentence for the user if there are more workers than cores, else nothing."""
        workers, cores = self.config.num_workers, usable_cores()
        if workers <= cores:
            return ""
        return (
            f"--num-workers {workers} on {plural(cores, 'core')}: they take turns with each other "
            f"and with the training; {cores} or fewer may be as fast"
        )

    def epoch(self, epoch: int, first: int) -> Iterator[tuple[Items, Batch]]:
        self.close()  # an epoch that was left early, to read its samples again
        workers, order = self.config.num_workers, self.order
        with _torch_says_nothing(), _signals_wait(), _room_to_share(workers):
            loader: DataLoader[Any] = DataLoader(
                _Indexed(self.samples),  # type: ignore[arg-type]
                batch_sampler=(
                    items.tolist() for _, items in batches_from(order, Position(epoch, first))
                ),
                collate_fn=partial(_collated, self.workload),
                num_workers=workers,
                prefetch_factor=self.config.prefetch_factor if workers > 0 else None,
                pin_memory=self.pin,
                worker_init_fn=_leave_signals_to_the_parent,
                # Its own generator: else each iterator would draw its seed from the random numbers
                # of the run, and a run that resumes inside an epoch makes one iterator more.
                generator=torch.Generator().manual_seed(order.seed + epoch),
            )
            self._iterator = iter(loader)
        return _or_raised(self._iterator)

    def close(self) -> None:
        """End the workers. Torch ends them with its iterator, which the traceback of an error may
        keep alive, and multiprocessing waits for them before the interpreter ends."""
        end_workers = getattr(self._iterator, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()
        self._iterator = None


@contextlib.contextmanager
def _room_to_share(workers: int = 0) -> Iterator[None]:
    """A context that turns a full /dev/shm, as in a container, into one sentence."""
    try:
        # Torch prints a traceback of its own where it meets this while it starts workers.
        if workers and SHARED.is_dir() and shutil.disk_usage(SHARED).free < LEAST_SHARED:
            raise OSError("No space left on device")
        yield
    except (OSError, RuntimeError) as error:
        if "No space left on device" in str(error) or "shared memory" in str(error):
            raise UsageError(
                "--num-workers: /dev/shm has no room for what worker processes share; give "
                "--num-workers 0, or a larger /dev/shm"
            ) from error
        raise


class ThreadFeed(_SampleFeed):
    """A feed by threads, for stores that do not work in a forked process."""

    def epoch(self, epoch: int, first: int) -> Iterator[tuple[Items, Batch]]:
        def read(number: int) -> tuple[Items, Batch]:
            items = self.order.items(epoch, number)
            batch = _batch(self.workload, [self.samples[i] for i in items.tolist()])
            return items, _pinned(batch) if self.pin else batch

        numbers = range(first, self.order.num_batches)
        return in_order(
            read, numbers, max(1, self.config.num_workers), self.config.prefetch_factor or 2
        )

    def close(self) -> None:
        """The threads of an epoch end with it."""


def feed_of(split: str, workload: Workload, order: Order, config: TrainConfig, pin: bool) -> Feed:
    """The feed of ``train`` or ``val``: that of the workload if it has one, else one that reads by
    threads or by processes."""
    own_feed = getattr(workload, "feed", None)
    if own_feed is not None:
        return own_feed(split, order)
    by_threads = getattr(workload, "feeds_by_threads", False)
    samples = getattr(workload, split)
    return (ThreadFeed if by_threads else TorchFeed)(samples, order, workload, config, pin)


def _or_raised(batches: Iterator[tuple[Items, Batch]]) -> Iterator[tuple[Items, Batch]]:
    """The batches. The error of a worker is its sentence, which torch hides in a traceback."""
    try:
        with _room_to_share():
            yield from batches
    except PenstockError as error:
        if "Original Traceback" not in str(error):  # it is of this process
            raise
        *_, last = str(error).strip().splitlines()
        name = f"{type(error).__module__}.{type(error).__name__}: "
        raise type(error)(last.removeprefix(name)) from None


@contextlib.contextmanager
def _torch_says_nothing() -> Iterator[None]:
    """Silence torch's repeated warning of too many workers; `TorchFeed.note` warns once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold back signals while workers begin. A worker inherits that, and lets go of them as it
    ignores them: before, it would die of one that comes to every process of a job."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pinned(batch: Batch) -> Batch:
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(batch, torch.Tensor, torch.Tensor.pin_memory)


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ignore signals in a worker. A batch system signals every process of a job, and a worker that
    ended would end the run before its checkpoint. Workers end when their parent does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # ignored, one that waited is gone
    if ask := death_signal():  # torch looks for its parent every few seconds only
        ask()


@dataclass
class _Indexed:
    """Samples with their indices."""

    samples: IndexedSamples

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.samples[index]


def _collated(workload: Workload, pairs: Sequence[tuple[int, Any]]) -> tuple[Items, Batch]:
    indices, samples = zip(*pairs, strict=True)
    return np.array(indices, np.int64), _batch(workload, samples)


def _batch(workload: Workload, samples: Sequence[Any]) -> Batch:
    return getattr(workload, "collate", default_collate)(list(samples))
