"""Batches of a chunked array, read ahead by threads, into reused memory.

    order ──▶ plan ──tickets──▶ decode + scatter ──▶ done ──▶ [transform] ──▶ next()
                │                                                                          │
                └──────◀── Ring: a buffer comes back when the user holds no view of it ◀───┘

One thread plans. It takes the next batch of the order, waits until one more may be read ahead and a
buffer is free, and hands out the batch's tasks (chunks) as tickets. Workers take tickets in that
order: all work on the oldest unfinished batch, and on the next one when it has no ticket left. A
batch is handed on by number when its last task has ended. So the order and the bytes of batches
depend on the seed alone, and not on the number or the speed of workers.

`next` raises the first error of any thread. Threads live for one iteration. They are gone after its
end, a ``break``, an error, or `Loader.close`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..base import (
    LoaderConfig,
    Refused,
    UsageError,
    build,
    check_equal,
    format_bytes,
    names_parameters,
    plural,
    require,
    usable_cores,
)
from ..data import check_not_packed
from .batch import Batch, BatchLayout, Transform, selection_of, stacks_of
from .engines.choose import open_engine
from .engines.engine import EngineKnobs, locate
from .fields import Field
from .iteration import EpochRun
from .order import Order, Position
from .ring import Ring

if TYPE_CHECKING:
    from .torch_dataset import LoaderDataset


class Loader:
    """An iterable of `Batch`. Each iteration is an epoch.

        with Loader("data/", batch_size=16, shuffle="block", workers=8) as loader:
            for epoch in range(2):
                for batch in loader:
                    step(batch["inputs"], batch["targets"])

    An iteration begins where `load_state_dict` or `set_epoch` said, else with the next epoch. An
    epoch that is left by ``break`` or by an error counts as done, unless the `state_dict` of that
    moment is loaded. A new iteration ends the one before. While iterating, `StageError` names the
    chunk that failed.

    ``offsets``, ``channels``, ``patch`` and ``channel_axis`` take one value for all arrays, or a
    mapping from the arrays' names.

    Args:
        data: A packed data set, one Zarr array, or a mapping of names to paths or URLs.
        offsets: The samples of an item relative to its own: (-1, 0) is the one before and itself.
            They count steps, whatever a coordinate of time beside the array says.
        channels: The channels of an item, in this order.
        patch: The shape of the boxes that a sample is cut into, or a `PatchGrid`. A patch of as
            many axes as the array makes the whole array one sample, a volume. Shuffle its patches
            by ``global``.
        channel_axis: The axis of the channels. By default the one called ``channels`` in a packed
            data set, else the last.
        stack: Arrays that become one, ``{"inputs": ["u", "v", "ps"]}``, along their channels; see
            `ChannelStack`. ``loader.stacks["inputs"].channels`` lists what each channel is.
        transform: Called with each batch, in order. Changes the batch, or returns a mapping of
            arrays that takes its place.
        knobs: The fields of `LoaderConfig`.

    Raises:
        UsageError: A setting is wrong, or the data cannot be read with these settings.
        Refused: ``max_memory`` is too little.
    """

    @names_parameters(LoaderConfig)
    def __init__(
        self,
        data: Any,
        *,
        offsets: Any = None,
        channels: Any = None,
        patch: Any = None,
        channel_axis: Any = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        transform: Transform | None = None,
        **knobs: Any,
    ) -> None:
        self.config = config = build(LoaderConfig, knobs)
        if transform is not None and not callable(transform):
            raise UsageError(f"transform {transform!r} cannot be called")
        places = locate(data)
        for place in places.values() if not config.raw else ():
            check_not_packed(place.url)
        selection = selection_of(
            list(places), offsets=offsets, channels=channels, patch=patch,
            channel_axis=channel_axis,
        )  # fmt: skip
        how = EngineKnobs(
            config.workers or usable_cores(), config.fetch, config.cache, config.missing
        )
        self.engine = open_engine(config.engine, places, selection, how)
        """The engine that reads. Its text has its name and why it was chosen."""
        self.fields = self.engine.fields
        self.stacks = stacks_of(stack, self.fields, places, selection)
        """The arrays of a batch that hold several of ``fields``."""
        self.transform = transform
        samples = valid_samples(self.fields.values())
        self.first_sample = samples.start
        """The sample, along axis 0 of the arrays, that the order counts as 0."""
        self.order = _order_of(config, self.fields, len(samples))
        self._layout = BatchLayout(self.fields, self.stacks)
        self.arrays = self._layout.arrays
        """The arrays of a batch, by name."""
        nbytes = self._layout.nbytes(config.batch_size)
        # Torch rounds pinned memory up to powers of two.
        self.batch_bytes = 1 << (nbytes - 1).bit_length() if config.pin else nbytes
        """Bytes of one buffer of the ring."""
        buffers = max(1, config.queue) + 1  # those ahead, and the one in use
        self._ring = Ring(self.batch_bytes, buffers, _most_buffers(self, buffers), config.pin)
        self._position, self._begun = Position(0, 0), False
        self._run: EpochRun | None = None
        self._process = os.getpid()

    @property
    def scratch_bytes(self) -> int:
        """The most memory that is taken besides the batches, in bytes."""
        ahead, rows = max(1, self.config.queue), self.config.batch_size
        return self.engine.scratch_bytes + self.engine.bytes_in_flight(rows, ahead)

    # --- iteration -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.order.num_batches

    @property
    def summary(self) -> str:
        """An epoch in a sentence: its items, its batches, and how many items repeat."""
        return _summary_of(self.order)

    def __iter__(self) -> Batches:
        return self.iterate()

    def iterate(self, *, as_tensors: bool = False) -> Batches:
        """Begin an iteration, as ``iter`` does.

        Args:
            as_tensors: Devices copy only from tensors that share the batches' storage (`as_torch`).
        """
        _check_process(self._process)
        _stop_in(self._process, self._run)
        if self._begun:
            self._begin_epoch(self.epoch + 1)
        self._run = None  # an error in the old run may hold a batch
        self._ring.begin(as_tensors=as_tensors)
        self._run = EpochRun(
            self.engine, self._ring, self.order, self._position, first_sample=self.first_sample,
            layout=self._layout, transform=self.transform, queue=self.config.queue,
        )  # fmt: skip
        return Batches(self, self._run)

    @property
    def ready(self) -> int:
        """The number of batches that are read and not yet taken."""
        return self._run.ready if self._run else 0

    def close(self) -> None:
        """End the iteration and its threads, and free memory. The loader can be iterated again."""
        _stop_in(self._process, self._run)
        self._ring.clear()
        self.engine.clear()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        why = "a loader cannot be sent to another process; it has threads of its own"
        raise UsageError(f"{why}: use it with num_workers=0 and set its workers instead")

    # --- state -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with this epoch. A loaded state inside this epoch stays."""
        if not isinstance(epoch, Integral) or epoch < 0:
            raise UsageError(f"epoch {epoch!r} is not a whole number from 0")
        if self._begun or epoch != self.epoch:
            _stop_in(self._process, self._run)
            self._begin_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches that were taken, a few values for JSON."""
        return self.order.state_dict(*self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, at the first item that no earlier batch had.

        The state may come from a loader with other workers, ranks or batch sizes. `UsageError` for
        a state of other data, another seed or another shuffle.
        """
        order, position = self.order.resume(state)
        _stop_in(self._process, self._run)
        self._begin_at(order, position)

    def _begin_at(self, order: Order, position: Position) -> None:
        self.order, self._position, self._begun = order, position, False

    def _begin_epoch(self, epoch: int) -> None:
        self._begin_at(replace(self.order, skip=0), Position(epoch, 0))

    def _took(self, number: int) -> None:
        self._position, self._begun = Position(self._position.epoch, number + 1), True

    # --- torch -----------------------------------------------------------------------------------

    def as_torch(self, mask: str | None = None) -> LoaderDataset:
        """This loader as a data set of torch: dicts of tensors that share the batch's memory.

        Give it to Lightning's ``fit`` as it is. Then a checkpoint holds its state, and a resumed
        run goes on with the next batch. Without Lightning it also works in
        ``torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=0)``; save its place
        with `state_dict`. ``mask`` names `Batch.mask` in the dicts. Tensors are pinned if ``pin``
        is. Their memory is reused once their own copies have ended; with plain batches the loader
        waits for all work of the devices instead, which fails while a CUDA graph is captured.
        """
        require("torch", "loaders")
        from .torch_dataset import LoaderDataset

        return LoaderDataset(self, mask)


class Batches(Iterator[Batch]):
    """One iteration of a loader. Its threads end with this object."""

    def __init__(self, loader: Loader, run: EpochRun) -> None:
        self._loader, self._run, self._ended = loader, run, False
        # Not __del__: a finalizer is also called before the interpreter ends, while threads run.
        self._end = weakref.finalize(self, _stop_in, loader._process, run)

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        _check_process(self._loader._process)
        batch = self._run.take()
        if batch is None:
            self._ended = True
            self.close()
            if self._run is self._loader._run:
                self._loader._begin_epoch(self._loader.epoch + 1)
            raise StopIteration
        self._loader._took(batch.number)
        return batch

    def close(self) -> None:
        """End this iteration and its threads."""
        self._end()


def _most_buffers(loader: Loader, needed: int) -> int | None:
    """The most batches in memory, None without a limit. Where the engine takes too much, it is made
    to save memory. `Refused` where ``max_memory`` is too little."""
    limit, nbytes = loader.config.max_memory, loader.batch_bytes
    if limit is None:
        return None
    if limit < loader.scratch_bytes + needed * nbytes:
        loader.engine.save_memory()
    room = (limit - loader.scratch_bytes) // nbytes
    if room < needed:
        remedy = f"queue {room - 1} would fit" if room >= 2 else "lower batch_size"
        if loader.engine.name != "native":
            remedy += ", or take engine native where it reads the arrays: it needs less scratch"
        raise Refused(
            f"max_memory {format_bytes(limit)} is too little for {plural(needed, 'batch')} of "
            f"{format_bytes(nbytes)} (queue {loader.config.queue} and one in use) and "
            f"{format_bytes(loader.scratch_bytes)} of scratch and cache; {remedy}"
        )
    return room


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise UsageError(
            f"this loader was made in process {process} and its threads do not live on in the fork "
            f"{os.getpid()}: make it in the process that uses it, with no worker processes "
            "(num_workers=0)"
        )


def _stop_in(process: int, run: EpochRun | None) -> None:
    if run is not None and os.getpid() == process:  # a fork has none of the threads
        run.stop()


def _summary_of(order: Order) -> str:
    text = (
        f"{plural(order.num_items, 'item')} in an epoch, {plural(order.num_batches, 'batch')} "
        f"of up to {order.batch_size} on rank {order.rank} of {order.world_size}"
    )
    if not order.num_repeated:
        return text
    return (
        f"{text}; {plural(order.num_repeated, 'item')} repeated, where batch.mask is False, so "
        "that all ranks have equally many (uneven='short' gives each item once)"
    )


def valid_samples(fields: Iterable[Field]) -> range:
    """The samples that are valid in every field. `UsageError` where there are none, or where the
    arrays are not equally long."""
    fields = tuple(fields)
    check_equal(
        "the numbers of samples of the arrays", {field.name: field.shape[0] for field in fields}
    )
    ranges = [field.valid for field in fields]
    common = range(max(r.start for r in ranges), min(r.stop for r in ranges))
    if not common:
        raise UsageError(f"no sample is valid in every field: {ranges}")
    return common


def _order_of(config: LoaderConfig, fields: Mapping[str, Field], samples: int) -> Order:
    """The order of the items of so many samples."""
    patches = {name: field.patches_per_sample for name, field in fields.items()}
    check_equal("the numbers of patches of the arrays", patches)
    return Order(
        num_samples=samples,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        window=config.window,
        chunk=max(field.chunks[0] for field in fields.values()),
        patches_per_sample=next(iter(patches.values())),
        rank=config.rank,
        world_size=config.world_size,
        drop_last=config.drop_last,
        uneven=config.uneven,
    )
