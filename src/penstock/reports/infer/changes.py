"""What limited a run of inference, and what to change, from the times of its stages and its plan.

A run takes as long as its busiest stage, or its full cores, and a rest: filling, draining, and
waits of stages for each other. A change shortens one stage. The best estimate of the gain keeps the
rest; the upper end drops it. The record does not say what a store or a processor has left for more
threads, so the lower end is no gain, unless the work itself gets less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...base import InferConfig, plural
from ...instruments import Interval
from ..change import Change, command_of, place_beside
from .record import InferenceRun
from .sentences import busy_shares, processor_had, processor_share, worked_seconds

_THREADS = {
    "read": "prep_workers", "normalise": "prep_workers", "checksum": "writer_workers",
    "write": "writer_workers", "spill": "writer_workers",
}  # fmt: skip
"""The knob of each stage's threads."""
_COPIES = "copies use pinned memory and run while the accelerator computes"
_UNSET = {
    "upload": _COPIES,
    "download": _COPIES,
    "stitch": "one thread joins blocks in their order, so that sums keep their last bits; larger "
    "patches leave fewer pieces to join",
    "join": "it reads back what the parts of the volume share; fewer and larger parts share less",
    "note": "the list of blocks is synced to the disk of the run folder; --run-dir can name a "
    "faster one",
}
"""Reasons why no knob shortens a stage, as clauses."""
_NOTABLE = 0.3
"""A stage that is busy for a smaller share of the time does not limit the run."""
_ONE = "one run"


def changes_of_run(run: InferenceRun) -> list[Change]:
    """The changes that the times of a finished run support."""
    if not run.stages or not run.seconds:
        return []
    shares = busy_shares(run)
    changes = [
        *_of_threads(run, shares),
        *_of_overlap(run, shares),
        *_of_forward_threads(run, shares),
        *_of_precision(run, shares),
        *_of_statistics(run),
    ]
    return [_with_command(run, _beside_others(run, change)) for change in changes]


def unset_lines(run: InferenceRun) -> list[str]:
    """A sentence on the busiest stage, if no setting is known to shorten it."""
    if not run.stages or not run.seconds:
        return []
    fullest, share = next(iter(busy_shares(run).items()), ("", 0.0))
    if fullest not in _UNSET or share < _NOTABLE:
        return []
    which = f"{fullest}, which was busy for {share:.0%} of the time"
    return [f"No setting is advised for {which}: {_UNSET[fullest]}."]


def _beside_others(run: InferenceRun, change: Change) -> Change:
    """The change, with a wider interval if others used the cores while the network ran."""
    had = processor_had(run, "forward") if "forward" in run.stages else None
    if had is None or change.gain.high is None:
        return change
    gain = replace(change.gain, high=change.gain.high / had)
    basis = f"{change.basis}; others used the cores for up to {1 - had:.0%} of the time"
    return replace(change, gain=gain, basis=basis)


def _of_threads(run: InferenceRun, shares: Mapping[str, float]) -> list[Change]:
    """Twice the threads of the busiest stage, if a knob sets them."""
    fullest = next(iter(shares), "")
    knob = _THREADS.get(fullest)
    if knob is None or shares[fullest] < _NOTABLE:
        return []
    threads = max(run.stages[fullest].threads, 1)
    # All stages of a knob share its threads, so all of them shrink.
    then = [share / (1 + (_THREADS.get(name) == knob)) for name, share in shares.items()]
    floor = max(*then, _cores_share(run))
    if floor >= shares[fullest]:
        return []
    expected = 1 / (1 - shares[fullest] + floor)
    why = f"{fullest} was busy for {shares[fullest]:.0%} of the time on {plural(threads, 'thread')}"
    basis = f"least if the store gives no more, most if nothing else takes longer; {_ONE}"
    what = f"{plural(2 * threads, 'thread')} for {fullest} in place of {threads}"
    gain = Interval(expected, 1.0, 1 / floor, 1)
    return [Change(what, why, gain, basis, {knob: 2 * threads})]


def _cores_share(run: InferenceRun) -> float:
    """The share of the time in which the cores were full: what no threads can shorten."""
    return processor_share(run) if not run.on_gpu else 0.0


def _of_overlap(run: InferenceRun, shares: Mapping[str, float]) -> list[Change]:
    """Half the overlap, if computing limits the run: fewer patches are computed."""
    share = shares.get("forward", 0.0)
    patch, overlap, shape = (_spatial(run, name) for name in ("patch", "overlap", ""))
    if share < _NOTABLE or not (patch and overlap and shape):
        return []
    less = [each // 4 * 2 for each in overlap]
    before, after = (_patches(shape, patch, each) for each in (overlap, less))
    if after >= before:
        return []
    saved = share * (1 - after / before)
    gain = Interval(1 / (1 - saved), 1 / (1 - 0.8 * saved), before / after, 1)
    why = (
        f"the network ran for {share:.0%} of the time, on {before} patches; {after} would do. How "
        "much overlap the network needs is not in the record: look at the seams"
    )
    basis = f"least if a fifth of that is lost, most if all stages shrink with the patches; {_ONE}"
    what = f"an overlap of {' '.join(map(str, less))} in place of {' '.join(map(str, overlap))}"
    return [Change(what, why, gain, basis, {"overlap": less})]


def _spatial(run: InferenceRun, name: str) -> list[int]:
    """Three numbers (z, y, x) of the run: a knob by its name, or the shape of the volume."""
    if name:
        return [int(n) for n in run.fingerprint.get(name) or ()]
    domain = run.fingerprint.get("domain")
    return [b - a for a, b in zip(*domain, strict=True)][-3:] if domain else []


def _patches(shape: Sequence[int], patch: Sequence[int], overlap: Sequence[int]) -> int:
    sides = zip(shape, patch, overlap, strict=True)
    return math.prod(math.ceil(n / max(p - o, 1)) for n, p, o in sides)


def _of_forward_threads(run: InferenceRun, shares: Mapping[str, float]) -> list[Change]:
    """More CPU threads for the network, if it had fewer threads than there are cores."""
    threads, cores, share = run.maker.get("threads"), run.cores or 1, shares.get("forward", 0.0)
    if run.on_gpu or not isinstance(threads, int) or threads >= cores or share < 0.5:
        return []
    most = 1 / (1 - share + share * threads / cores)
    why = f"the network ran for {share:.0%} of the time, on {plural(threads, 'thread')}"
    basis = f"least if others use the cores, most if each thread adds as much as the first; {_ONE}"
    what = f"{cores} CPU threads for the network in place of {threads}"
    gain = Interval((1 + most) / 2, 1.0, cores / threads, 1)
    return [Change(what, why, gain, basis, {"threads": cores})]


def _of_precision(run: InferenceRun, shares: Mapping[str, float]) -> list[Change]:
    """Mixed precision on a GPU that computes in float32."""
    amp, tf32, *_ = run.fingerprint.get("arithmetic") or ("", False)
    share = shares.get("forward", 0.0)
    if not run.on_gpu or amp != "None" or share < 0.5:
        return []
    others = max((each for name, each in shares.items() if name != "forward"), default=0.0)
    most = 1 / (1 - share + max(share / 2, others)) if others < share else 1.0
    why = f"the network ran for {share:.0%} of the time in {'TF32' if tf32 else 'float32'}"
    basis = f"least without any gain, most at twice the speed; {_ONE}; last bits of values change"
    gain = Interval((1 + most) / 2, 1.0, most, 1)
    return [Change("mixed precision", why, gain, basis, {"amp": "bf16"})]


def _of_statistics(run: InferenceRun) -> list[Change]:
    """Percentiles of a smaller pyramid level, if those of the whole volume take long."""
    stage = run.stages.get("statistics")
    share = stage.busy / worked_seconds(run) if stage else 0.0  # one thread at a time counts
    if share < _NOTABLE or share >= 1:
        return []
    level = int(run.settings.get("norm_level") or run.settings.get("level") or 0)
    why = (
        f"counting values for percentiles took {share:.0%} of the time. Whether the input has such "
        "a level is not in the record"
    )
    basis = f"estimate for a quarter of the voxels, least for half, most for none; {_ONE}"
    gain = Interval(1 / (1 - 0.75 * share), 1 / (1 - share / 2), 1 / (1 - share), 1)
    what = f"percentiles of level {level + 1} of a pyramid in place of level {level}"
    return [Change(what, why, gain, basis, {"norm_level": level + 1})]


def _with_command(run: InferenceRun, change: Change) -> Change:
    """The change with the command that would test it."""
    settings: dict[str, Any] = {**run.settings, **change.settings}
    outputs = settings.get("out_spec") or []
    settings["out_spec"] = [place_beside(str(out), change.settings) for out in outputs]
    for place in ("trace", "metrics_json", "run_dir", "resume", "overwrite"):
        settings.pop(place, None)
    command = command_of(["penstock", "infer"], InferConfig, settings)
    return replace(change, command=command)
