"""The validation of an epoch: every sample answered once, on whichever rank, and all scored."""

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
    """The scores of all validation samples, each counted once; the same on every rank.

    ``at_batch`` is called after each batch, and may end the run.
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
        # The last batches are filled up with samples that other ranks have answered too.
        answered = {index: answer for part in every for index, answer in part.items()}
        missing = len(workload.val) - len(answered)
        assert not missing, f"{missing} validation samples were not answered"
        scores = workload.scores(dict(sorted(answered.items())))
    agreed: dict[str, float] = fabric.broadcast(scores)
    return agreed
