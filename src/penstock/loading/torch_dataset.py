"""A loader as an iterable data set of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base import UsageError
from .batch import Batch


class LoaderDataset(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The batches of a loader as dicts of tensors. Epochs and state are the loader's."""

    def __init__(self, loader: Any, mask: str | None) -> None:
        self._loader = loader  # a `Loader`, whose module imports this one
        self._mask = mask
        if mask in loader.arrays:
            raise UsageError(f"as_torch(mask={mask!r}): the batches have an array of this name")
        self.set_epoch = loader.set_epoch
        self.state_dict = loader.state_dict
        self.load_state_dict = loader.load_state_dict

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Lightning sets the epoch on the ``sampler`` of this object.

        Lightning loads no state if a run is resumed at an epoch's end, so it must set the epoch. If
        the data set itself had a ``sampler``, Lightning would treat it as a DataLoader elsewhere.
        """
        return SimpleNamespace(sampler=self, batch_size=self._loader.config.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if torch.utils.data.get_worker_info() is not None:
            raise UsageError(
                "the loader has threads of its own and does not work inside the workers of a "
                "DataLoader: use num_workers=0 and set the loader's workers"
            )
        return self._batches()

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        # A generator, which begins with the first batch: Lightning asks for an iterator before it
        # sets the epoch, and hides earlier errors behind one of its own.
        if _trained_from_a_dataloader():
            raise UsageError(
                "give Lightning loader.as_torch() itself as what it trains on, without a "
                "DataLoader around it: a DataLoader has no state to save, so a run that is "
                "resumed would get other data than the one that was stopped"
            )
        # Without a loop, which would hold the batch meanwhile.
        yield from map(self._tensors, self._loader.iterate(as_tensors=True))

    def _tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        tensors = {name: _tensor(array) for name, array in batch.items()}
        return tensors | ({self._mask: torch.from_numpy(batch.mask)} if self._mask else {})

    def __len__(self) -> int:
        return len(self._loader)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    if array.dtype.name == "bfloat16":  # torch does not know the bfloat16 of ml_dtypes
        return _tensor(array.view(np.int16)).view(torch.bfloat16)
    tensor = torch.from_numpy(array)
    memory = getattr(array.base, "base", None)
    if not isinstance(memory, torch.Tensor):
        return tensor
    # Pinned memory of torch's: torch tracks copies from its own storage.
    first, rest = divmod(tensor.data_ptr() - memory.data_ptr(), tensor.itemsize)
    if rest:
        return tensor.clone()
    whole = memory[: len(memory) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), first)


def _trained_from_a_dataloader() -> bool:
    """Whether the caller is a torch `DataLoader` that Lightning trains from.

    A data set cannot know who iterates it, so this looks at the stack. If Lightning renames its
    modules, nothing is refused.
    """
    frame, wrapped = sys._getframe(1), False
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        wrapped = wrapped or module == "torch.utils.data.dataloader"
        if module.endswith(".loops.evaluation_loop"):  # validation saves no place
            return False
        if module.endswith(".loops.fit_loop"):
            return wrapped
        frame = frame.f_back  # type: ignore[assignment]
    return False
