"""Looks in the samples of a step for values that are not finite, which made its loss so."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..base import TrainConfig
from ..loading import Items
from .workloads import Batch, Workload


def why_not_finite(
    batches: Iterable[tuple[Items, Batch]], workload: Workload, config: TrainConfig
) -> str:
    """Why the loss of a step is not finite, as far as its samples tell.

    Args:
        batches: The indices of the samples of each of its batches, and the batch.
        workload: The workload, whose ``name_of`` names a sample.
        config: The settings of the training.

    Returns:
        A sentence: which sample has values that are not finite, or which settings may help.
    """
    for items, batch in batches if not getattr(workload, "leaves_out_not_finite", False) else ():
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        # A list with a tensor for each sample has rows of another kind.
        alike = [tensor for tensor in tensors if tensor.ndim and len(tensor) == len(items)]
        for row, item in enumerate(items.tolist()):
            if not all(torch.isfinite(tensor[row]).all() for tensor in alike):
                place = f" ({workload.name_of(item)})" if hasattr(workload, "name_of") else ""
                return f"sample {item}{place} has values that are not finite"
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            return f"a sample among {', '.join(map(str, items))} has values that are not finite"
    return f"lower --learning-rate {config.learning_rate} or set --clip-norm"
