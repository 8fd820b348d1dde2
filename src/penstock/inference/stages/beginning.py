"""Begin a run: open its folder, lock its outputs, and name the run in the locks. Or join one."""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ...base import (
    Labels,
    PenstockError,
    UsageError,
    as_settings,
    default_name,
    keep_traceback_in,
    run_labels,
    system_errors,
)
from ...data import OutputLock, Sink, no_block_again
from ..planning.plan import Plan
from ..run_folder.journal import Journal, Prepared, noting_end
from .output_levels import take_levels_away
from .remote_job import Runnable
from .retries import Result, patiently, saying_full


@contextlib.contextmanager
def begun(job: Runnable, prepared: Prepared | None = None) -> Iterator[tuple[Journal, OutputLock]]:
    """Begin a run. Its outputs stay locked until the context ends, or longer if the lock is handed
    over.

    ``prepared`` says how several processes share it. Raises `UsageError` if another process writes
    an output, or the run folder cannot be used, and `StoreAway` if a store does not answer.
    """
    resume = job.config.resumes and all(sink.exists for sink in job.sinks)
    with system_errors(f"--run-dir {job.run_dir}"):
        journal = _journal(job, resume=resume) if job.run_dir else Journal(None, {})
    for sink in job.sinks:  # before the log of the blocks in the old output is lost
        sink.check()
        if getattr(sink, "made", False) and journal.skipped < job.plan.num_blocks:
            raise UsageError(f"--resume: {no_block_again(sink.name)}")
    facts, limit = _facts(job, journal), job.config.retry_for
    with entered(journal, job.sinks, take_over=job.config.take_over, retry_for=limit) as lock:
        begin(journal, lock, facts, prepared, retry_for=limit)
        if journal.before and journal.skipped < job.plan.num_blocks:
            take_levels_away(job)
        with noting_end(journal.save):
            yield journal, lock


@contextlib.contextmanager
def joined(
    job: Runnable, writer: str | None, *, run: str = "", ends: bool = False
) -> Iterator[tuple[Journal, OutputLock]]:
    """Join a run that another process has begun.

    ``writer`` names this process's own files, None if it has none. ``run`` is the run that the
    folder must hold, if another machine gave its name. If the process ``ends`` the run,
    the lock is released with the context, else it is left to the others. Raises as `begun`, and
    `UsageError` if this machine may compute other bits.
    """
    journal = _journal(job, resume=True)
    if run and journal.run != run:  # before the lock, which would name the other run a thief
        raise UsageError(
            f"--run-dir {job.run_dir}: the worker on {platform.node()} does not see the run there; "
            "give --run-dir s3://BUCKET/PREFIX, or a folder that all workers share"
        )
    journal.writer = writer
    config = job.config
    with entered(
        journal, job.sinks, take_over=config.take_over, retry_for=config.retry_for, member=not ends
    ) as lock:
        for sink in job.sinks:
            if not sink.exists:  # to open it would create it, without blocks that logs name
                raise removed(sink.name)
        yield journal, lock


@contextlib.contextmanager
def entered(
    journal: Journal, sinks: Sequence[Sink], *, take_over: bool, retry_for: float | None,
    member: bool = False,
) -> Iterator[OutputLock]:  # fmt: skip
    """A context with the journal of a run and the lock of its outputs, which is taken, or which a
    ``member`` of the run only reads. A store that does not answer is tried again for ``retry_for``
    seconds, once for None."""
    with contextlib.closing(journal), keep_traceback_in(journal.here):
        take = partial(
            OutputLock.take,
            sinks,
            journal.run,
            folder=None if journal.folder is None else journal.folder.place,
            check=partial(journal.check_maker, take_over=take_over),
            take_over=take_over,
            member=member,
        )
        with contextlib.closing(_tried(retry_for, take)) as lock:
            yield lock


def _tried(limit: float | None, work: Callable[[], Result]) -> Result:
    return work() if limit is None else patiently(limit, "the lock", work)


def removed(output: str) -> PenstockError:
    """The error for an output that is gone, although its run goes on."""
    return PenstockError(
        f"{output} was removed after this run had begun, and what was written is lost; begin anew "
        "with --overwrite"
    )


def _journal(job: Runnable, *, resume: bool) -> Journal:
    assert job.run_dir is not None
    return Journal.open(job.run_dir, job.fingerprint, job.maker, resume=resume)


def begin(
    journal: Journal,
    lock: OutputLock,
    facts: Mapping[str, Any],
    prepared: Prepared | None,
    *,
    retry_for: float | None,
) -> None:
    """Begin the run folder, and name the run in the lock as the maker of the outputs. ``facts`` are
    what run.json says of the run, ``retry_for`` is as for `entered`."""
    _say_unlocked(lock.lacking)
    with system_errors(f"--run-dir {journal.folder}"), saying_full():
        journal.lock()
        if journal.folder is not None and isinstance(journal.folder.place, str) and not lock.holds:
            why = "no output has a lock, which would guard it too"
            journal.lacking.append(f"--run-dir {journal.folder} has no lock: {why}")
        _say_unlocked(journal.lacking)
        # Before the output is replaced: a kill in between would leave a list of blocks that were
        # written to the old one. And before a trace is begun: another run may be writing both.
        journal.begin({"locked": not lock.lacking, **facts}, prepared=prepared)
    _tried(retry_for, lock.name)


def _facts(job: Runnable, journal: Journal) -> dict[str, Any]:
    """What run.json says of a job: its settings, its plan in numbers, its name and tags. A resumed
    run keeps its own name and tags."""
    kinds = Counter("gpu" if kind == "cuda" else kind for kind in job.plan.facts.devices)
    devices = "-".join(f"{count}{kind}" for kind, count in kinds.items())
    model = str(next(iter(journal.fingerprint.get("model", ())), "infer"))
    cells = job.plan.geometry.blocks.cells
    return {
        "blocks": job.plan.num_blocks,
        "cells": [(0, job.plan.parts.num_volumes), *zip(cells.start, cells.stop, strict=True)],
        "settings": {
            name: value
            for name, value in as_settings(job.config).items()
            if name not in Labels.model_fields
        },
        "plan": plan_numbers(job.plan),
        **run_labels(job.config, default_name(f"infer-{model}", devices), journal.before),
    }


def plan_numbers(plan: Plan) -> dict[str, Any]:
    """A plan in numbers, which reports compare with what was measured.

    Args:
        plan: The plan.

    Returns:
        Counts, bytes, amplifications, the shape of a block, and the parts of the memory ceiling.
    """
    names = (
        *("num_blocks", "num_bricks", "num_patches", "voxels", "input_bytes"),
        *("output_bytes", "read_bytes", "statistics_bytes", "patch_amplification"),
        *("read_amplification", "memory_limit", "device_peak"),
    )
    return {
        **{name: getattr(plan, name) for name in names},
        "batch": plan.facts.batch,
        "block": list(plan.geometry.block),
        "parts": len(plan.parts),
        "devices": list(plan.facts.devices),
        "cores": plan.facts.cores,
        "arithmetic": plan.facts.arithmetic,
        "seams": plan.facts.seams,
        "seam_error": plan.facts.seam_error,
        "memory": {part: getattr(plan.memory, part) for part in plan.memory.__slots__},
    }


def _say_unlocked(reasons: Sequence[str]) -> None:
    """Warn of what has no lock."""
    for why in reasons:
        warnings.warn(f"{why}; make sure that nobody else writes it", RuntimeWarning, stacklevel=4)
