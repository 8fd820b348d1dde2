"""The levels of outputs that are OME-Zarr images, and outputs that become files: both are made once
all blocks are written, but for the first level, which is made of blocks as they come.

The metadata names levels only while they are those of the blocks. So a run that will write blocks
into an image with levels takes these away first, and whoever ends the job makes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base import Incomplete, InferConfig, format_seconds, plural, usable_cores
from ...data import Rule, Sink
from ..opening.heads import HeadFacts
from ..planning.memory import LEVEL_VOXEL_BYTES
from ..run_folder.ending import EndRequest
from .first_level import FirstLevel
from .retries import patiently
from .summary import Summary

if TYPE_CHECKING:
    from ..opening.job import Job


def _images(config: InferConfig, sinks: Sequence[Sink]) -> Iterator[tuple[int, str, Sink]]:
    """The outputs that get levels: their numbers, places and sinks. An output that is given by a
    TensorStore spec is an array alone."""
    for number, (place, sink) in enumerate(zip(config.out_spec, sinks, strict=True)):
        if config.levels != "none" and getattr(sink, "documents", None):
            yield number, str(place), sink


def first_levels(job: Job) -> dict[int, FirstLevel]:
    """The first level below each output, by the output's number, for a process that will write
    blocks. Several processes make one level: each writes what lies in its own blocks, and what lies
    in those of two is made at the end."""
    from ...data import begin_first_level

    config, plan = job.config, job.plan
    most = plan.memory.levels - LEVEL_VOXEL_BYTES * math.prod(plan.geometry.block)
    if most <= 0:
        return {}
    count = None if config.levels == "none" else config.levels
    begun = {}
    for number, place, sink in _images(config, job.sinks):
        work = partial(begin_first_level, place, count, "--out-spec")
        level = patiently(config.retry_for, sink.name, work)
        if level is not None:
            rule: Rule = "mode" if job.head_facts[number].kind == "labels" else "mean"
            begun[number] = FirstLevel(sink, *level, rule, most // len(job.sinks))
    return begun


def take_levels_away(config: InferConfig, sinks: Sequence[Sink]) -> None:
    """Remove the levels of images into which a run that goes on will write blocks. An output that a
    run begins has none: to look for them would ask a store for a list, which it may refuse."""
    from ...data import remove_levels

    for _, place, sink in _images(config, sinks):
        patiently(config.retry_for, sink.name, partial(remove_levels, place))


def with_rest(
    summary: Summary,
    config: InferConfig,
    sinks: Sequence[Sink],
    heads: Sequence[HeadFacts],
    request: EndRequest,
) -> Summary:
    """Add the levels that outputs lack and windows of their channels, make the outputs that become
    files, and list those that are labels of an image. What an earlier start has made of them stays.

    Args:
        summary: What was done before; its time is that without levels.
        config: The settings of the job.
        sinks: Its outputs, in which all blocks are written.
        heads: Their heads. A label is never averaged.
        request: Asks the job to end early.

    Returns:
        The summary, with a sentence for each output that got levels, or was made.

    Raises:
        Incomplete: The job was asked to end.
    """
    from ...data import add_windows, register_label

    def going_on(what: str, _: int) -> None:
        if request.why:
            raise Incomplete(
                f"all blocks are written and {what}, when {request.why} ended the job; run "
                "again with --resume"
            )

    rules: list[Rule] = ["mode" if head.kind == "labels" else "mean" for head in heads]
    levels = _add_levels(config, sinks, rules, partial(going_on, "levels are not"))
    files = _make_files(config, sinks, rules, going_on)
    notes = (*summary.notes, *levels, *files)
    for place, sink, rule in zip(config.out_spec, sinks, rules, strict=True):
        image: Any = sink
        if not getattr(sink, "documents", None):
            continue
        work = partial(register_label, str(place), "--out-spec")
        patiently(config.retry_for, sink.name, work)
        if rule == "mean":
            work = partial(add_windows, str(place), image.channels, "--out-spec")
            patiently(config.retry_for, sink.name, work)
    return replace(summary, notes=notes)


def _add_levels(
    config: InferConfig,
    sinks: Sequence[Sink],
    rules: Sequence[Rule],
    going_on: Callable[[int], None],
) -> Iterator[str]:
    """Add the levels that images lack, with a sentence for each image. One of labels is marked as
    such, also if it gets none."""
    from ...data import add_levels, levels_below

    count = 1 if config.levels == "none" else config.levels
    for place, sink, rule in zip(config.out_spec, sinks, rules, strict=True):
        has_none = not levels_below(sink.domain.shape, count=count)
        if not getattr(sink, "documents", None) or (has_none and rule == "mean"):
            continue  # opening a small image costs more
        began = time.monotonic()
        work = partial(
            add_levels, str(place), rule=rule, count=count, again=False,
            threads=usable_cores(), progress=going_on, name="--out-spec",
        )  # fmt: skip
        if levels := patiently(config.retry_for, sink.name, work):
            took = format_seconds(time.monotonic() - began)
            yield f"Levels: {plural(len(levels), 'level')} below {sink.name}, in {took}"


def _make_files(
    config: InferConfig,
    sinks: Sequence[Sink],
    rules: Sequence[Rule],
    going_on: Callable[[str, int], None],
) -> Iterator[str]:
    """Make the outputs that become files, with a sentence for each."""
    from ...data import make_file

    count = 1 if config.levels == "none" else config.levels
    for sink, rule in zip(sinks, rules, strict=True):
        began = time.monotonic()
        if getattr(sink, "kind", None) is None:
            continue
        file: Any = sink
        if make_file(file, rule, count, partial(going_on, f"{sink.name} is not")):
            took = format_seconds(time.monotonic() - began)
            yield f"File: {sink.name}, made of its blocks in {took}"
