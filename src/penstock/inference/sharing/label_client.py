"""Label an array on the workers of a cluster: each does one block at a time of the round that is
next, and the client notes it and ends the rounds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ...base import LabelConfig, UsageError
from ...cluster import connect, share_pieces, wait_for_worker
from ..objects.block_work import BlockOrder, do_order
from ..objects.label_run import LabelSummary, Round
from ..objects.labelling import Labelling, Show
from .client import absolute_place, absolute_reference


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
    labelling = Labelling(_settled(config))
    with connect(config, say, preload="penstock.inference.objects.block_work") as workers:
        wait_for_worker(workers)

        def over(each: Round, lacking: list[int]) -> Iterator[tuple[int, str]]:
            topic = uuid.uuid4().hex
            pairs = share_pieces(
                workers, do_order, [*map(str, lacking)],
                lambda name: BlockOrder(each.work, each.step, int(name), each.run, topic),
                "block", "run again with --resume",
            )  # fmt: skip
            yield from ((int(name), check) for name, check in pairs)

        return labelling.run(begins(labelling), over)


def _settled(config: LabelConfig) -> LabelConfig:
    """The settings with all paths made absolute. Raises `UsageError` for arrays in memory."""
    specs = {name: getattr(config, name) for name in ("in_spec", "out_spec", "intensity")}
    if any(not isinstance(spec, str | Path | dict | None) for spec in specs.values()):
        raise UsageError("--cluster needs an input and an output that workers open, not arrays")
    settled = {name: absolute_place(spec) for name, spec in specs.items() if spec is not None}
    for name in ("run_dir", "table"):
        if (path := getattr(config, name)) is not None:
            settled[name] = path.absolute()
    if config.decoder is not None:
        settled["decoder"] = absolute_reference(config.decoder)
    return config.model_copy(update=settled)
