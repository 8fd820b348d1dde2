"""Workloads: what can be trained, behind one protocol.

A workload has data, a model, a loss and scores. The training loop handles devices, ranks, clocks
and files of results, the same for all workloads. A user's workload is a class, given as
``package.module:Class`` or ``file.py:Class``.

    train[index] ──▶ collate ──▶ loss(model, batch)        one step
      val[index] ──▶ collate ──▶ answers(model, batch) ──▶ scores(all answers by index)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Protocol, cast

from ...base import TrainConfig, UsageError, blaming, extension_names, find_extension
from ...loading import Items
from ...models import find_reference

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

WORKLOADS = {
    "detector": "penstock.training.workloads.detector_workload:DetectorWorkload",
    "emulator": "penstock.training.workloads.emulator_workload:EmulatorWorkload",
    "pairs": "penstock.training.workloads.pairs:Pairs",
    "spiral": "penstock.training.workloads.spiral:Spiral",
}
_GROUP = "penstock.workloads"

_MOMENTUM = 0.9

Batch = Any
"""A batch: tensors on the CPU in any nesting of tuples, lists and dicts."""
Answer = Mapping[str, Any]
"""A model's answer to one sample, as numbers and numpy arrays that scores need."""


class IndexedSamples(Protocol):
    """Samples by index. An index is the same sample on every rank and at every call."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Workload(Protocol):
    """A training's data, model, loss and scores. Every rank makes the same by ``Class(config)``.

    Random numbers are drawn in `loss`, from the global generators of torch, numpy or Python. Those
    are saved with a checkpoint, so a resumed run draws the same numbers.

    These members are optional:

        optimizer(model)       the optimiser; without it, the one that --optimizer names
        collate(samples)       a batch of samples; without it, torch's default
        feed(split, order)     the batches of ``train`` or ``val``, a `Feed`
        feeds_by_threads       True if forked processes cannot read the samples
        pictures(answers)      arrays with the model's outputs for some samples of ``val``, which
                               a report draws; for their names see the detector
        notes, facts           sentences for the user, and facts for the results; in them ``heads``
                               says what each head is, as `TrainingRecord.heads` has it
        name_of(index)         where a sample of ``train`` comes from, for an error that names it
        leaves_out_not_finite  True if the loss leaves out values that are not finite
    """

    name: str
    judge: str
    """The name of the score by which the best model is chosen."""
    higher_is_better: bool
    """True if a greater score is better."""
    train: IndexedSamples
    val: IndexedSamples

    def model(self) -> nn.Module:
        """A new model with weights from torch's global random numbers."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of a batch.

        Args:
            model: The model in training mode, perhaps wrapped for ranks.
            batch: A batch on the model's device.

        Returns:
            The mean loss, a scalar, and further scalars to report, by name.
        """

    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Answer]:
        """The model's answers to a batch of `val`.

        Args:
            model: The model in evaluation mode.
            batch: A batch on the model's device.

        Returns:
            One answer for each sample.
        """

    def scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        """The scores by name, from the answers to all samples of `val` by index."""


class Feed(Protocol):
    """The batches of one rank, in the order of an `Order`."""

    def epoch(self, epoch: int, first: int) -> Iterator[tuple[Items, Batch]]:
        """The batches of an epoch from number ``first`` on, each with the indices of its
        samples."""

    def close(self) -> None:
        """End its workers."""


def check_workload(name: str) -> None:
    """Refuse the name of a workload that does not exist, without importing any.

    Raises:
        UsageError: There is no such workload.
    """
    if ":" not in WORKLOADS.get(name, name) and find_extension(_GROUP, name) is None:
        names = ", ".join(dict.fromkeys([*WORKLOADS, *extension_names(_GROUP)]))
        raise UsageError(
            f"there is no workload {name!r}; there are {names}, "
            "and package.module:Class or file.py:Class"
        )


def make_workload(name: str, config: TrainConfig) -> Workload:
    """Make a workload.

    Args:
        name: Its name, ``package.module:Class`` or ``file.py:Class``.
        config: The settings of the training.

    Returns:
        The workload, with its data open.

    Raises:
        UsageError: There is no such workload, or its data cannot be used.
    """
    check_workload(name)
    text = WORKLOADS.get(name, name)
    if ":" not in text:
        return _whole(name, _added(name)(config))
    with contextlib.ExitStack() as stack:
        try:
            workload = stack.enter_context(find_reference(text))
        except (AttributeError, ModuleNotFoundError) as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else text
            if missing is None or not text.startswith(missing):
                raise  # the module of the workload imports something that is missing
            raise UsageError(f"there is no workload {name!r}: {error}") from error
        return _whole(name, workload(config))


def _whole(name: str, workload: Any) -> Workload:
    """The workload, if it has all members that are not optional."""
    members = ("judge", "higher_is_better", "train", "val", "model", "loss", "answers", "scores")
    # `hasattr` alone would compute a property, and take a fault in its code for its absence.
    lacking = [
        each
        for each in members
        if getattr_static(workload, each, None) is None and not hasattr(workload, each)
    ]
    if lacking:
        raise UsageError(f"workload {name} has no {', '.join(lacking)}")
    return cast(Workload, workload)


def _added(name: str) -> Callable[[TrainConfig], Any]:
    """The class of a workload that another package adds."""
    entry = find_extension(_GROUP, name)
    assert entry is not None
    with blaming(entry, f"workload {name}"):
        workload: Callable[[TrainConfig], Any] = entry.load()
        if not callable(workload):
            raise UsageError(f"workload {name}: {workload!r:.80} is not a class")
        return workload


def epsilon_of(dtype: torch.dtype) -> float:
    """The epsilon of Adam for weights of this dtype: 1e-8, or the smallest normal number if that is
    greater, as in float16, where 1e-8 is zero."""
    from torch import finfo

    return max(1e-8, finfo(dtype).tiny)


def optimizer_of(model: nn.Module, config: TrainConfig) -> Optimizer:
    """The optimiser that the settings name: SGD with momentum, or AdamW."""
    import torch
    from torch.optim import SGD, AdamW

    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        return SGD(model.parameters(), rate, momentum=_MOMENTUM, weight_decay=decay)
    epsilon = epsilon_of(getattr(torch, config.dtype))
    return AdamW(model.parameters(), rate, eps=epsilon, weight_decay=decay)
