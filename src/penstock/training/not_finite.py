"""Looks in the samples of a step for values that are not finite, which made its loss so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import TrainConfig, describe, plural
from ..loading import Items
from .workloads import Batch, Workload

_NAMED = 3
"""The samples that are named."""


def why_not_finite(
    batches: Iterable[tuple[Items, Batch]], workload: Workload, config: TrainConfig, ranks: int
) -> str:
    """Why the loss of a step is not finite, as far as its samples tell.

    Args:
        batches: The indices of the samples of each of its batches, and the batch.
        workload: The workload, whose ``name_of`` names a sample.
        config: The settings of the training.
        ranks: The number of ranks.

    Returns:
        A sentence: which values of which samples are not finite; or that none is, how great they
        are, and which settings may help.
    """
    left_out = getattr(workload, "leaves_out_not_finite", False)
    name_of: Callable[[int], str] = getattr(workload, "name_of", lambda index: "")
    counts: Counter[str] = Counter()
    largest = 0.0
    try:
        for items, batch in batches:
            for row, part, tensor in _leaves(batch, len(items)):
                finite = torch.isfinite(tensor)
                wrong = 0 if left_out else int((~finite).sum())
                largest = max(largest, float(torch.where(finite, tensor.abs(), 0).max()))
                if wrong:
                    name = "a batch" if row is None else f"sample {items[row]}"
                    place = "" if row is None else name_of(int(items[row]))
                    counts[f"of the {part} of {name}" + (f" ({place})" if place else "")] += wrong
        why = f"the values of its samples are finite, the greatest {largest:.3g} in size"
    except Exception as error:  # the loss is what the user must hear of
        why = f"its samples could not be read again ({describe(error)})"
    if counts:
        said = [f"{plural(count, 'value')} {of}" for of, count in list(counts.items())[:_NAMED]]
        more = len(counts) - len(said)
        also = f", and others of {plural(more, 'sample')} more," if more else ""
        return f"{' and '.join(said)}{also} {'is' if counts.total() == 1 else 'are'} not finite"
    others = ", unless another rank names a sample" if ranks > 1 else ""
    return f"{why}; lower --learning-rate {config.learning_rate} or set --clip-norm{others}"


def _leaves(batch: Any, rows: int, part: str = "") -> Iterator[tuple[int | None, str, Tensor]]:
    """The float tensors of a batch, each with its row and the name of its part. The row is None
    where a tensor has none for each sample."""
    if isinstance(batch, Tensor):
        if batch.is_floating_point() and batch.numel():
            whole = batch.ndim == 0 or len(batch) != rows
            for row, tensor in [(None, batch)] if whole else enumerate(batch):
                yield row, part or "inputs", tensor
    elif isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from _leaves(value, rows, str(name))
    elif isinstance(batch, list | tuple) and batch:
        if len(batch) == rows and all(isinstance(each, Mapping) for each in batch):
            for row, each in enumerate(batch):  # one for each sample
                yield from ((row, of, tensor) for _, of, tensor in _leaves(each, -1, part))
            return
        for number, each in enumerate(batch):
            name = ("inputs", "targets")[number] if number < 2 else f"part {number}"
            yield from _leaves(each, rows, part or name)
