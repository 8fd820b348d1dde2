"""What bound a run of inference, and what to change, from the times of its stages and its plan.

A run takes as long as its busiest stage, its cores, and what is left over: filling, draining, and
waits of stages for each other. A change shortens one stage. By the best estimate what is left over
stays; at best it goes, too. What a store or a processor has left for more threads is not in the
record, so the least is no gain, but where the work itself gets less.
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
from .sentences import busy_shares, processor_had, processor_share

_THREADS = {"read": "prep_workers", "normalise": "prep_workers", "write": "writer_workers"}
"""The knob of each stage's threads."""
_NOTABLE = 0.3
"""A stage that is busy for a smaller share of the time binds nothing."""
_ONE = "one run"


def changes_of_run(run: InferenceRun) -> list[Change]:
    """The changes that the times of a run that is done speak for."""
    if not run.stages or not run.seconds:
        return []
    shares = busy_shares(run)
    changes = [
        *_of_threads(run, shares),
        *_of_overlap(run, shares),
        *_of_forward_threads(run, shares),
    ]
    return [_with_command(run, _beside_others(run, change)) for change in changes]


def _beside_others(run: InferenceRun, change: Change) -> Change:
    """The change, with a wider interval where others used the cores while the network ran."""
    had = processor_had(run, "forward") if "forward" in run.stages else None
    if had is None or change.gain.high is None:
        return change
    gain = replace(change.gain, high=change.gain.high / had)
    basis = f"{change.basis}; others used the cores for up to {1 - had:.0%} of the time"
    return replace(change, gain=gain, basis=basis)


def _of_threads(run: InferenceRun, shares: Mapping[str, float]) -> list[Change]:
    """Twice the threads of the stage that binds, where threads can be set."""
    fullest = next(iter(shares), "")
    knob = _THREADS.get(fullest)
    if knob is None or shares[fullest] < _NOTABLE:
        return []
    threads = max(run.stages[fullest].threads, 1)
    others = max((share for name, share in shares.items() if name != fullest), default=0.0)
    floor = max(shares[fullest] / 2, others, _cores_share(run))
    if floor >= shares[fullest]:
        return []
    expected = 1 / (1 - shares[fullest] + floor)
    why = f"{fullest} was busy for {shares[fullest]:.0%} of the time on {plural(threads, 'thread')}"
    basis = f"the store gives no more, to nothing else takes longer; {_ONE}"
    what = f"{plural(2 * threads, 'thread')} for {fullest} in place of {threads}"
    gain = Interval(expected, 1.0, 1 / floor, 1)
    return [Change(what, why, gain, basis, {knob: 2 * threads})]


def _cores_share(run: InferenceRun) -> float:
    """The share of the time in which the cores were full: what no threads can shorten."""
    return processor_share(run) if not run.on_gpu else 0.0


def _of_overlap(run: InferenceRun, shares: Mapping[str, float]) -> list[Change]:
    """Half the overlap, where computing binds: fewer patches are computed."""
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
    basis = f"a fifth of that is lost, to all of the run shrinks as its patches do; {_ONE}"
    what = f"an overlap of {' '.join(map(str, less))} in place of {' '.join(map(str, overlap))}"
    return [Change(what, why, gain, basis, {"overlap": less})]


def _spatial(run: InferenceRun, name: str) -> list[int]:
    """A triple of the run: a knob by its name, or the shape of the volume."""
    if name:
        return [int(n) for n in run.fingerprint.get(name) or ()]
    domain = run.fingerprint.get("domain")
    return [b - a for a, b in zip(*domain, strict=True)][-3:] if domain else []


def _patches(shape: Sequence[int], patch: Sequence[int], overlap: Sequence[int]) -> int:
    sides = zip(shape, patch, overlap, strict=True)
    return math.prod(math.ceil(n / max(p - o, 1)) for n, p, o in sides)


def _of_forward_threads(run: InferenceRun, shares: Mapping[str, float]) -> list[Change]:
    """More threads of the processor for the network, where it had fewer than there are cores."""
    threads, cores, share = run.maker.get("threads"), run.cores or 1, shares.get("forward", 0.0)
    if run.on_gpu or not isinstance(threads, int) or threads >= cores or share < 0.5:
        return []
    most = 1 / (1 - share + share * threads / cores)
    why = f"the network ran for {share:.0%} of the time, on {plural(threads, 'thread')}"
    basis = f"others use the cores, to each thread adds as much as the first; {_ONE}"
    what = f"{cores} threads of the processor for the network in place of {threads}"
    gain = Interval((1 + most) / 2, 1.0, cores / threads, 1)
    return [Change(what, why, gain, basis, {"threads": cores})]


def _with_command(run: InferenceRun, change: Change) -> Change:
    """The change with the command that would test it."""
    settings: dict[str, Any] = {**run.settings, **change.settings}
    outputs = settings.get("out_spec") or []
    settings["out_spec"] = [place_beside(str(out), change.settings) for out in outputs]
    for place in ("trace", "metrics_json", "run_dir", "resume", "overwrite"):
        settings.pop(place, None)
    command = command_of(["penstock", "infer"], InferConfig, settings)
    return replace(change, command=command)
