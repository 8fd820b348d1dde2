"""Label an array on the workers of a cluster: each does one block at a time of the round that is
next, and the client notes it and ends the rounds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

from ...base import LabelConfig
from ...cluster import connect, share_pieces, wait_for_worker
from ..objects.block_work import BlockOrder, do_order
from ..objects.label_run import LabelSummary, Round
from ..objects.labelling import Labelling, Show
from .client import settled


def label_on_cluster(
    config: LabelConfig,
    begins: Callable[[Labelling], Show],
    say: Callable[[str], None] = lambda sentence: None,
) -> LabelSummary:
    """Label an array on the workers of a cluster.

    Args:
        config: The settings; ``cluster`` names the workers.
        begins: Called with the labelling once it is opened; gives what is called with the voxels
            that are done.
        say: Called with a sentence now and then, while no worker is there.

    Returns:
        What was done.

    Raises:
        UsageError: The labelling cannot be done as it is asked for.
        Incomplete: Blocks failed, or no worker came; ``--resume`` goes on.
    """
    labelling = Labelling(settled(config))
    with connect(config, say, preload="penstock.inference.objects.block_work") as workers:
        wait_for_worker(workers)

        def over(each: Round, lacking: list[int]) -> Iterator[tuple[int, str]]:
            topic = uuid.uuid4().hex
            yield from share_pieces(
                workers, do_order, lacking, "block", "run again with --resume",
                work_of=lambda n: BlockOrder(each.work, each.step, n, each.run, topic),
            )  # fmt: skip

        return labelling.run(begins(labelling), over)
