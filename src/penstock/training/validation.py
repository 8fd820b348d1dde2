"""The validation of an epoch: each sample is answered once, on any rank, and all are scored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .ranks import gather
from .step import Stepper
from .workloads import Answer, Feed, Workload


@torch.no_grad()
def validate(
    fabric: Any,
    workload: Workload,
    stepper: Stepper,
    feed: Feed,
    at_batch: Callable[[], None],
) -> dict[str, float]:
    """Score all validation samples, each counted once.

    Args:
        fabric: The ranks and their devices.
        workload: The workload that answers and scores.
        stepper: The model on its device.
        feed: The batches of validation samples of this rank.
        at_batch: Called after each batch; it may end the run.

    Returns:
        The scores by name, the same on every rank.
    """
    stepper.module.eval()
    mine: dict[int, Answer] = {}
    for items, batch in feed.epoch(0, 0):
        with fabric.autocast():
            answers = workload.answers(stepper.module, stepper.to_device(batch))
        mine |= dict(zip(items.tolist(), answers, strict=True))
        at_batch()
    every = gather(mine, fabric.world_size)
    scores = None
    if fabric.is_global_zero:
        # The last batches are filled up with samples that other ranks have answered, too.
        answered = {index: answer for part in every for index, answer in part.items()}
        missing = len(workload.val) - len(answered)
        assert not missing, f"{missing} validation samples were not answered"
        scores = workload.scores(dict(sorted(answered.items())))
    agreed: dict[str, float] = fabric.broadcast(scores)
    return agreed
