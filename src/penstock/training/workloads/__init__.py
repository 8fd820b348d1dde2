"""Workloads: what can be trained, behind one protocol.

A workload knows its data, its model, its loss and its scores. It knows no device, no rank, no
clock and no file of results: those are `train`'s, and are the same for all of them. A further one
is a class anywhere that Python finds, named as ``package.module:Class``.

    train[index] ──▶ collate ──▶ loss(model, batch)        one step
      val[index] ──▶ collate ──▶ answers(model, batch) ──▶ scores(all answers by index)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from ...base import TrainConfig, UsageError, blaming, extension_names, find_extension
from ...loading import Items
from ...models import find_reference

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

WORKLOADS = {
    "detector": "penstock.training.workloads.detector:DetectorWorkload",
    "emulator": "penstock.training.workloads.emulator:EmulatorWorkload",
    "pairs": "penstock.training.workloads.pairs:Pairs",
    "spiral": "penstock.training.workloads.spiral:Spiral",
}
_GROUP = "penstock.workloads"

_MOMENTUM = 0.9

Batch = Any
"""Tensors on the CPU, in whatever tuples, lists and dicts hold them."""
Answer = Mapping[str, Any]
"""What a model made of one sample, as far as scores need it: numbers and numpy arrays."""


class IndexedSamples(Protocol):
    """Samples by index. The same index is the same sample, whoever asks and however often."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Workload(Protocol):
    """What is trained: made by ``Class(config)`` in every rank, and alike there.

    Random numbers are torch's, numpy's or Python's global ones and are drawn in `loss`: those are
    saved with a checkpoint, so that a run which goes on draws what it would have drawn.

    A workload may also have, where what is done without them does not suit it:

        optimizer(model)       its optimiser; else the one that --optimizer names
        collate(samples)       a batch of samples; else as torch puts them together
        feed(split, order)     the batches of ``train`` or ``val``, a `Feed`
        feeds_by_threads       True where samples are not to be read by forked processes
        notes, facts           sentences for the user, and what goes into the results
    """

    name: str
    judge: str
    """Which of the `scores` tells the best model."""
    higher_is_better: bool
    """Whether a greater score is a better one."""
    train: IndexedSamples
    val: IndexedSamples

    def model(self) -> nn.Module:
        """A new model, its weights from torch's global random numbers."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The mean loss of a batch, and what else of it is to be told, as scalars."""
        ...

    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Answer]:
        """One answer for each sample of a batch of `val`; the model is in eval mode."""
        ...

    def scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        """Scores of all of `val`, each index once, whichever rank it was answered on."""
        ...


class Feed(Protocol):
    """Batches of one rank in the order of an `Order`."""

    def epoch(self, epoch: int, first: int) -> Iterator[tuple[Items, Batch]]:
        """Each batch of an epoch from number ``first`` on, with its items."""
        ...

    def close(self) -> None: ...


def check_workload(name: str) -> None:
    """Refuse the name of a workload that there is not, before anything of it is imported."""
    if ":" not in WORKLOADS.get(name, name) and find_extension(_GROUP, name) is None:
        names = ", ".join(dict.fromkeys([*WORKLOADS, *extension_names(_GROUP)]))
        raise UsageError(
            f"there is no workload {name!r}; there are {names}, "
            "and package.module:Class or file.py:Class"
        )


def make_workload(name: str, config: TrainConfig) -> Workload:
    """A workload by name, with its settings."""
    check_workload(name)
    text = WORKLOADS.get(name, name)
    if ":" not in text:
        return cast(Workload, _added(name)(config))
    with contextlib.ExitStack() as stack:
        try:
            workload = stack.enter_context(find_reference(text))
        except (AttributeError, ModuleNotFoundError) as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else text
            if missing is None or not text.startswith(missing):
                raise  # of what the module of the workload imports
            raise UsageError(f"there is no workload {name!r}: {error}") from error
        return cast(Workload, workload(config))


def _added(name: str) -> Callable[[TrainConfig], Any]:
    """The class of a workload that another package adds."""
    entry = find_extension(_GROUP, name)
    assert entry is not None
    with blaming(entry, f"workload {name}"):
        workload: Callable[[TrainConfig], Any] = entry.load()
        if not callable(workload):
            raise UsageError(f"workload {name}: {workload!r:.80} is no class")
        return workload


def epsilon_of(dtype: torch.dtype) -> float:
    """What Adam adds to a root that may be zero, for weights of this dtype: the usual 1e-8, or the
    least normal number where that is more, as in float16, in which 1e-8 is zero."""
    from torch import finfo

    return max(1e-8, finfo(dtype).tiny)


def optimizer_of(model: nn.Module, config: TrainConfig) -> Optimizer:
    """The optimiser that the settings name; its weights decay apart from the gradients."""
    import torch
    from torch.optim import SGD, AdamW

    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        return SGD(model.parameters(), rate, momentum=_MOMENTUM, weight_decay=decay)
    epsilon = epsilon_of(getattr(torch, config.dtype))
    return AdamW(model.parameters(), rate, eps=epsilon, weight_decay=decay)
