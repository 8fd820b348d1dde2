"""A job on many workers, by formula: what it moves, and how long it takes at most.

Workers take parts in turns, and the last turn ends with its largest part. So the time is

    statistics + turns * patches of the largest part / patches per second of a worker

or what the store needs to serve all bytes, whichever is longer. Nothing is guessed: without a rate
of workers there is no time, and without a bandwidth the store counts as fast enough.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from ...base import (
    SUMMARY_FILE,
    ScaleConfig,
    UsageError,
    format_bytes,
    format_seconds,
    plural,
    significant,
    well_formed,
)
from ...data import in_words
from ..run_folder.folder import folder_at, read_document, read_run
from .plan import Plan


def scale_lines(scale: ScaleConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """What is expected of a plan on its workers, line by line: (what, how much).

    Args:
        scale: The rate of a worker and the bandwidth of the store.
        plan: The plan of the job.

    Returns:
        Lines for a reader.

    Raises:
        UsageError: The run folder that is given as the rate has none.
    """
    moved = plan.read_bytes + plan.output_bytes
    before = serving = 0.0
    if scale.bandwidth is not None:
        serving, before = moved / scale.bandwidth, plan.statistics_bytes / scale.bandwidth
        yield (
            "store",
            (
                f"{format_bytes(moved + plan.statistics_bytes)} to read and write before "
                f"compression, {format_seconds(serving + before)} or more at "
                f"{format_bytes(scale.bandwidth)}/s"
            ),
        )
    rate, note = scale.rate, None
    if rate is None:
        yield "time", "not known; --rate gives the voxels per second of a worker, or a run folder"
        return
    if isinstance(rate, Path | str):
        rate, note = measured_rate(rate, plan)
    turns = -(-len(plan.parts) // plan.workers)
    computing = turns * _seconds_of_largest_part(plan, rate)
    alone = plan.voxels / rate / plan.workers  # if they never waited, and parts had no borders
    seconds = before + max(computing, serving)
    bound = "the workers" if computing >= serving else "the store"
    yield (
        "time",
        (
            f"{format_seconds(seconds)} at most on {plural(plan.workers, 'worker')} of "
            f"{significant(rate / 1e6)} Mvox/s, in {plural(turns, 'turn')}, bound by {bound}; "
            f"{alone / seconds:.0%} of the speed of workers that never wait and compute no borders"
        ),
    )
    if before:
        yield "  statistics", f"{format_seconds(before)} of these before the first part"
    elif plan.statistics_bytes:
        counted = f"the {format_bytes(plan.statistics_bytes)} that are read to count values"
        yield "note", f"{counted} take time that is not counted; --bandwidth counts it"
    if note is not None:
        yield "note", note


def _seconds_of_largest_part(plan: Plan, rate: float) -> float:
    spans = (plan.geometry.patches_along(axis) for axis in range(3))
    largest = math.prod(int((stop - first).max()) for first, stop in spans)
    # The rate is taken for that of a run which computed no patch twice.
    of_patch = plan.voxels / rate / (plan.num_patches / plan.border_amplification)
    return largest * of_patch


def measured_rate(place: Path | str, plan: Plan) -> tuple[float, str | None]:
    """The voxels per second of one worker, measured by a run of infer.

    Args:
        place: The run folder: a path, or a URL.
        plan: The plan that the rate is for.

    Returns:
        The rate (the median over several workers), and a sentence on how that run differs.

    Raises:
        UsageError: There is no summary of a run that computed anything.
    """
    folder = folder_at(place)
    if (summary := read_document(folder, SUMMARY_FILE)) is None:
        raise UsageError(
            f"--rate {place}: neither a number of voxels per second nor the folder of a run that "
            "has ended"
        )
    with well_formed(f"--rate {place}: its {SUMMARY_FILE} has no voxels and seconds of infer"):
        shares = summary.get("workers") or [summary]
        rates = [share["voxels"] / share["seconds"] for share in shares if share["voxels"]]
    if not rates:
        raise UsageError(f"--rate {place}: that run computed nothing; give another run")
    fingerprint = read_run(folder).get("fingerprint", {})
    patch, overlap = (tuple(fingerprint.get(name, ())) for name in ("patch", "overlap"))
    if (patch, overlap) == (plan.geometry.patch, plan.geometry.overlap):
        return statistics.median(rates), None
    return statistics.median(rates), (
        f"the rate was measured with patches of {in_words(patch)} and an overlap of "
        f"{in_words(overlap)}, unlike this plan"
    )
