"""What limited a training, and what to change, from the seconds of its steps.

    step = wait for data + rest      with workers that load while it computes: max(load / n, rest)
    rest = transfer + forward + backward + communication + optimizer

Each model keeps the phases that it does not change as they were measured. An interval covers the
noise of the steps of this run (stretches of steps, resampled) and the possible error of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import TRAIN_DEFAULTS, TrainConfig, format_seconds, plural
from ...instruments import CONFIDENCE, Interval
from ..change import Change, command_of, place_beside
from ..phases import BLOCKS
from .record import TrainingFolder

_DRAWS = 1000
_NOTABLE = 0.05
"""A phase that takes a smaller share of the steps gets no advice."""
HANDING_S = 2e-3
"""Seconds of loading a batch below which no worker is advised: handing a batch from one process to
another takes about as long."""

Phases = Mapping[str, NDArray[np.float64]]
"""Seconds of ``step`` and of each phase, a mean for each stretch of steps."""


def changes_of_training(run: TrainingFolder) -> list[Change]:
    """The changes that the steps of a training support."""
    stretches = stretches_of(run)
    if stretches is None:
        return []
    changes = [
        *_of_loading(run, stretches),
        *_of_batch(run, stretches),
        *_of_transfer(run, stretches),
        *_of_computing(run, stretches),
    ]
    return [_with_command(run, change) for change in changes]


def stretches_of(run: TrainingFolder) -> Phases | None:
    """The steps in stretches, the mean over ranks, without the first stretch, which warms up."""
    if not run.steps:
        return None
    count = min(len(each.loss) for each in run.steps)
    if count < 4:
        return None
    means = {}
    for name in run.steps[0].seconds:
        values = np.array([each.seconds[name][-count:] for each in run.steps])
        per_step = np.where(np.isfinite(values), values, 0.0).mean(axis=0)
        parts = np.array_split(per_step, min(BLOCKS, count // 2))
        means[name] = np.array([part.mean() for part in parts[1:]])
    return means if means["step"].all() else None  # steps that were not timed are 0


def gain_of(stretches: Phases, then: Callable[[Phases], NDArray[np.float64]]) -> Interval:
    """How many times as fast steps would be.

    Args:
        stretches: The seconds of the phases.
        then: Gives the seconds of a step with a change, from those of its phases.

    Returns:
        The ratio of the means, its interval over resampled stretches, and their number.
    """
    n, rng = len(stretches["step"]), np.random.default_rng(0)
    picks = rng.integers(n, size=(_DRAWS, n))
    drawn = {name: values[picks].mean(axis=1) for name, values in stretches.items()}
    gains = drawn["step"] / then(drawn)
    low, high = np.quantile(gains, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    means = {name: values.mean(keepdims=True) for name, values in stretches.items()}
    value = float((means["step"] / then(means))[0])
    return Interval(value, float(low), float(high), n)


def _share(stretches: Phases, *phases: str) -> float:
    return float(sum(stretches[name].mean() for name in phases) / stretches["step"].mean())


def _of_loading(run: TrainingFolder, stretches: Phases) -> list[Change]:
    """More workers, if steps wait for data."""
    share, workers = _share(stretches, "data_wait"), int(run.args.get("num_workers") or 0)
    if share < _NOTABLE:
        return []
    more = 2 * workers if workers else 2

    def hidden(s: Phases) -> NDArray[np.float64]:
        # Without workers, the process of the step loads. If steps wait for workers, these bring one
        # batch for each step, all together.
        load = s["step"] * workers if workers else s["data_wait"]
        return np.maximum(load / more, s["step"] - s["data_wait"])

    best = gain_of(stretches, hidden)
    seconds = float(stretches["data_wait"].mean())
    why = f"steps wait for data for {share:.0%} of their time, {format_seconds(seconds)} each"
    what = f"{plural(more, 'worker')} that load batches in place of {workers}"
    settings = {"num_workers": more}
    if not workers and seconds < HANDING_S:
        basis = "handing a batch from another process takes about as long as loading it here"
        return [Change(what, why, Interval(1.0, None, None, best.n), basis, settings)]
    on_cpu = str(run.results.get("device")) == "cpu"
    low, least = 1.0, "they share cores with the step"
    if not on_cpu:  # half of the wait is left
        half = gain_of(stretches, lambda s: s["step"] - s["data_wait"] / 2)
        low, least = min(half.low or 1.0, best.value), "half of the wait is left"
    basis = f"least if {least}, most if computing hides the wait; {_steps(best)}"
    return [Change(what, why, Interval(best.value, low, best.high, best.n), basis, settings)]


def _of_batch(run: TrainingFolder, stretches: Phases) -> list[Change]:
    """Twice the batch: work that is done once per step is done half as often per sample."""
    once = ("communication", "optimizer")
    share, batch = _share(stretches, *once), run.args.get("batch_size")
    if share < _NOTABLE or not batch:
        return []
    half = gain_of(stretches, lambda s: s["step"] - sum(s[name] for name in once) / 2)
    parts = [name for name in once if _share(stretches, name) >= _NOTABLE / 2]
    why = f"{share:.0%} of a step is {' and '.join(parts)}, whatever its batch"
    basis = (
        "least if the other work per sample takes as long as now, most if a step takes no longer "
        f"with twice the samples; {_steps(half)}; scores may change"
    )
    what = f"batches of {2 * batch} in place of {batch}"
    gain = Interval(half.value, half.low, 2.0, half.n)
    return [Change(what, why, gain, basis, {"batch_size": 2 * batch})]


def _of_transfer(run: TrainingFolder, stretches: Phases) -> list[Change]:
    """Twice the batch, if copies to the device take long: half as many, of twice the bytes."""
    share, batch = _share(stretches, "transfer"), run.args.get("batch_size")
    if share < _NOTABLE or not batch or _of_batch(run, stretches):
        return []
    most = gain_of(stretches, lambda s: s["step"] - s["transfer"] / 2)
    seconds = float(stretches["transfer"].mean())
    why = f"copies to the device take {share:.0%} of a step, {format_seconds(seconds)} each"
    basis = (
        "least if bytes take as long as now, most if copies of twice the samples take no longer; "
        f"{_steps(most)}; scores may change"
    )
    what = f"batches of {2 * batch} in place of {batch}"
    gain = Interval((1 + most.value) / 2, 1.0, most.high, most.n)
    return [Change(what, why, gain, basis, {"batch_size": 2 * batch})]


_COMPUTING = ("forward", "backward")


def _of_computing(run: TrainingFolder, stretches: Phases) -> list[Change]:
    """Mixed precision, and more CPU threads. A run without them gives only an upper bound."""
    share, threads = _share(stretches, *_COMPUTING), run.args.get("threads")
    if share < 0.5:
        return []
    most = gain_of(stretches, lambda s: s["step"] - sum(s[name] for name in _COMPUTING) / 2)
    gain = Interval((1 + most.value) / 2, 1.0, most.high, most.n)
    why = f"forward and backward take {share:.0%} of a step"
    on_cpu, changes = str(run.results.get("device")) == "cpu", []
    if on_cpu and threads:
        basis = f"least if there are no more cores, most at twice the speed; {_steps(most)}"
        what = f"{plural(2 * threads, 'thread')} of the CPU in place of {threads}"
        changes.append(Change(what, why, gain, basis, {"threads": 2 * threads}))
    if not run.args.get("amp"):
        basis = f"least without any gain, most at twice the speed; {_steps(most)}"
        if on_cpu:
            gain = Interval(1.0, None, None, most.n)
            basis = "a processor that does not multiply in bfloat16 is slower with it"
        changes.append(Change("mixed precision", why, gain, basis, {"amp": True}))
    return changes


def unset_lines(run: TrainingFolder) -> list[str]:
    """A sentence, if steps compute most of their time and no setting is known to shorten it."""
    stretches = stretches_of(run)
    share = _share(stretches, *_COMPUTING) if stretches else 0.0
    if stretches is None or share < 0.5 or _of_computing(run, stretches):
        return []
    which = f"forward and backward, {share:.0%} of a step"
    why = "they run in mixed precision already; a faster device or a smaller model shortens them"
    return [f"No setting is advised for {which}: {why}."]


def _steps(gain: Interval) -> str:
    return f"{plural(gain.n, 'stretch')} of the steps of one run".replace("stretchs", "stretches")


def _with_command(run: TrainingFolder, change: Change) -> Change:
    """The change with the command that would test it: the run's own settings, and those of it."""
    output = place_beside(str(run.args.get("output_dir") or run.folder), change.settings)
    settings = {
        name: value
        for name, value in {**run.args, **change.settings, "output_dir": output}.items()
        if name in change.settings or _plain(value) != _plain(_default(run.workload, name))
    }
    passed = ("workload", "resume", "overwrite", "name", "profile", "distributed")
    ours = [name for name in settings if name not in passed]
    ranks, nodes = (
        int(where.get(name) or 1)
        for where, name in ((run.results, "world_size"), (run.results.get("launch") or {}, "nodes"))
    )
    start = ["launch", "torchrun", "--nproc-per-node", str(ranks // nodes), "--"]
    words = ["penstock", *(start if ranks > 1 else []), "train", run.workload]
    command = command_of(words, TrainConfig, {name: settings[name] for name in ours})
    return replace(change, command=command)


def _default(workload: str, name: str) -> Any:
    field = TrainConfig.model_fields.get(name)
    usual = field.default if field is not None else None
    return TRAIN_DEFAULTS.get(workload, {}).get(name, usual)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
