"""Studies of scaling: the speed-up of training on more devices, among otherwise equal runs.

    TrainingRun ──▶ Configuration (devices, nodes) ──▶ Study (weak | strong | hybrid)
                                                        └──▶ ScalingPoint, Amdahl, USL

The samples of an epoch and the batches decide the kind of scaling:

    strong   the same samples and global batch: a smaller batch on each device
    weak     the same batch on each device, and samples in proportion to the devices
    hybrid   the same samples and batch on each device: the global batch grows, so an epoch has
             fewer steps, and time and quality must be judged together

A study is of one kind, and each law is fitted to one study. Runs that differ in anything else are
refused, and the error names the difference. The baseline N0 is the smallest number of devices.
All is relative to it: p = N / N0, the speed-up S is the ratio of work per second, the efficiency is
S / p.

Intervals (95 %) are over repeated runs, by Student's t (`estimates`); one run has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np

from ..base import NotComparable, group_by, plural
from ..instruments import Interval
from .estimates import (
    AMDAHL_SIZES,
    USL_SIZES,
    Amdahl,
    Floats,
    Usl,
    amdahl,
    drawn_interval,
    drawn_means,
    karp_flatt,
    peak,
    ratio,
    usl,
)
from .runs import TrainingRun

Kind = Literal["strong", "weak", "hybrid", "undetermined"]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Configuration:
    """The complete runs on one number of devices and nodes."""

    runs: tuple[TrainingRun, ...]

    @property
    def devices(self) -> int:
        return self.runs[0].devices

    @property
    def nodes(self) -> int | None:
        return self.runs[0].nodes

    @property
    def first(self) -> TrainingRun:
        return self.runs[0]

    @cached_property
    def seconds(self) -> float:
        """Mean training time, as in the seed's tables, in seconds."""
        return float(np.mean(self.times))

    @property
    def times(self) -> list[float]:
        return [run.seconds for run in self.runs if run.seconds is not None]

    def known(self, value: Callable[[TrainingRun], _Value | None]) -> list[_Value]:
        """A quantity of all runs that have it, in the order of the runs."""
        return [given for run in self.runs if (given := value(run)) is not None]

    def mean(self, value: Callable[[TrainingRun], float | None]) -> float | None:
        values = self.known(value)
        return float(np.mean(values)) if values else None


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """A configuration relative to the baseline of its study."""

    at: Configuration
    speedup: Interval
    efficiency: Interval
    karp_flatt: Interval | None
    """The serial fraction that by itself would explain the speed-up. If it rises with the devices,
    it is overhead. None at the baseline and in weak scaling, where the work differs."""

    @property
    def throughput(self) -> float | None:
        """Samples per second: those of an epoch x epochs / seconds; None if not known."""
        run = self.at.first
        if run.work is None or run.epochs is None:
            return None
        return run.work * run.epochs / self.at.seconds


@dataclass(frozen=True)
class Study:
    """The configurations of one kind of scaling, and the laws fitted to them."""

    kind: Kind
    points: tuple[ScalingPoint, ...]
    amdahl: Amdahl | str
    """The fit, or a sentence on why there is none."""
    usl: Usl | str

    @property
    def base(self) -> Configuration:
        """The baseline, the first of its points."""
        return self.points[0].at


def studies(runs: Iterable[TrainingRun], anyway: bool) -> list[Study]:
    """The studies among runs; runs that are not complete are left out.

    Args:
        runs: The runs, of one experiment.
        anyway: Compare runs even if their settings or their work differ.

    Returns:
        A study for each kind of scaling; none if no run is complete.

    Raises:
        NotComparable: Runs differ in a setting or in their work.
    """
    whole = [run for run in runs if run.complete]
    if not whole:
        return []
    base_devices = min(run.devices for run in whole)
    if not anyway:
        same_settings(whole)
    of_base = (run for run in whole if run.devices == base_devices)
    base = min(of_base, key=lambda run: run.nodes or 0)
    kinds: dict[Kind, dict[tuple[int, int], list[TrainingRun]]] = {}
    for run in whole:
        for kind in _kinds(base, run) or _refused(base, run, anyway):
            kinds.setdefault(kind, {}).setdefault(_size(run), []).append(run)
    # Runs of the baseline's size fit every kind. They are a study only if there are no others.
    grown = {k: v for k, v in kinds.items() if any(size[0] != base_devices for size in v)}
    if not grown:
        grown = {"undetermined": kinds.get("undetermined") or next(iter(kinds.values()))}
    taken = {id(run) for v in grown.values() for same in v.values() for run in same}
    if anyway and any(id(run) not in taken for run in whole):
        grown["undetermined"] = group_by(whole, _size)
    return [
        study(kind, [Configuration(tuple(v[size])) for size in sorted(v)], base_devices)
        for kind, v in grown.items()
    ]


def _size(run: TrainingRun) -> tuple[int, int]:
    return run.devices, run.nodes or 0


def in_no_study(runs: Iterable[TrainingRun], studies: Iterable[Study]) -> list[TrainingRun]:
    """The complete runs that no study takes.

    Runs of the baseline's size are a study only with others, and without batch or samples they fit
    none of known kind.
    """
    taken = {id(run) for study in studies for point in study.points for run in point.at.runs}
    return [run for run in runs if run.complete and id(run) not in taken] if taken else []


def same_settings(runs: Sequence[TrainingRun]) -> None:
    """Refuse ``runs`` that are not of one experiment.

    Raises:
        NotComparable: They differ in a setting; the message names it and two of its values.
    """
    for difference in differences(runs):
        raise NotComparable(f"mixed experiments: {difference}; give the runs of one experiment")


def differences(runs: Sequence[TrainingRun]) -> Iterator[str]:
    """A phrase for each setting in which runs differ, with two of its values."""
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values: dict[str, TrainingRun] = {}
        for run in runs:
            if name in run.settings:
                values.setdefault(run.settings[name], run)
        if len(values) > 1:
            two = " and ".join(f"{v} in {run.source}" for v, run in list(values.items())[:2])
            yield f"the {name} is {two}"


def _kinds(base: TrainingRun, run: TrainingRun) -> list[Kind]:
    """The kinds of scaling from ``base`` to ``run``; empty if it is none."""
    same_batch, same_global = run.batch == base.batch, run.global_batch == base.global_batch
    if not (base.shape_known and run.shape_known):
        batches = (base.batch, run.batch, base.global_batch, run.global_batch)
        return [] if all(batches) and not (same_batch or same_global) else ["undetermined"]
    assert base.work is not None and run.work is not None
    assert base.batch is not None and run.batch is not None
    assert base.global_batch is not None and run.global_batch is not None
    grown = base.work * run.devices / base.devices
    grows = abs(run.work - grown) < abs(run.work - base.work)
    # The last batch of an epoch may be padded or left out.
    near = abs(run.work - (grown if grows else base.work)) <= max(
        run.global_batch, base.global_batch
    )
    if not near:
        return []
    if run.devices == base.devices:
        alike = same_batch and same_global
        return ["strong", "weak", "hybrid", "undetermined"] if alike else []
    if grows:
        return ["weak"] if same_batch and not same_global else []
    return ["strong"] if same_global else ["hybrid"] if same_batch else []


def _refused(base: TrainingRun, run: TrainingRun, anyway: bool) -> list[Kind]:
    if anyway:
        return ["undetermined"]
    both = " and ".join(
        (f"{plural(one.work, 'sample')} an epoch, " if one.work else "")
        + f"{one.batch} a batch and device ({one.global_batch} in all) on {one.devices} "
        f"({one.source})"
        for one in (base, run)
    )
    raise NotComparable(
        f"mixed experiments: {both} are neither weak, strong nor hybrid scaling; give the runs of "
        "one experiment"
    )


def study(kind: Kind, configurations: Sequence[Configuration], base_devices: int) -> Study:
    """Make a study of one kind, with its points in order and its laws fitted.

    Args:
        kind: The kind of scaling.
        configurations: The configurations, the baseline among them.
        base_devices: The number of devices of the baseline.

    Returns:
        The study: the baseline first, the others by devices.
    """
    ordered = sorted(configurations, key=lambda c: (c.devices != base_devices, c.devices))
    rng = np.random.default_rng(0)  # the same report from the same runs, to the digit
    p = np.array([c.devices / base_devices for c in ordered])
    work = p if kind == "weak" else np.ones(len(p))
    means = np.array([c.seconds for c in ordered])
    draws = np.stack([drawn_means(c.times, rng) for c in ordered], axis=1)
    speedups, drawn = work * means[0] / means, work * draws[:, :1] / draws
    n = min(len(c.runs) for c in ordered)
    return Study(
        kind,
        tuple(_point(kind, ordered[0], at) for at in ordered),
        *_fits(kind, base_devices, p, speedups, drawn, n),
    )


def _point(kind: Kind, base: Configuration, at: Configuration) -> ScalingPoint:
    p = at.devices / base.devices
    gain = Interval(1.0, None, None, 1)  # the baseline's, by definition
    if at is not base:
        work = p if kind == "weak" else 1.0
        gain = _each_end(ratio(base.times, at.times), lambda r: work * r)
    shares = p > 1 and kind != "weak"
    return ScalingPoint(
        at,
        gain,
        _each_end(gain, lambda s: s / p),
        _each_end(gain, lambda s: float(karp_flatt(s, p))) if shares else None,
    )


def _each_end(interval: Interval, of: Callable[[float], float]) -> Interval:
    """The interval of a monotonic function of a quantity, from the quantity's interval."""
    if interval.low is None or interval.high is None:
        return Interval(of(interval.value), None, None, interval.n)
    low, high = sorted((of(interval.low), of(interval.high)))
    return Interval(of(interval.value), low, high, interval.n)


def _fits(
    kind: Kind, base_devices: int, p: Floats, speedups: Floats, drawn: Floats, n: int
) -> tuple[Amdahl | str, Usl | str]:
    """The laws fitted to the baseline and larger sizes; for each that cannot be fitted, a sentence
    with the reason."""
    above = p >= 1
    p, speedups, drawn = p[above], speedups[above], drawn[:, above]
    sizes = len(set(p))
    given = plural(sizes, "size")
    serial: Amdahl | str = f"Amdahl's law is refused with {given}; it takes {AMDAHL_SIZES}"
    if kind == "weak":
        serial = "Amdahl's law is of work that stays the same, and weak scaling adds work"
    elif sizes >= AMDAHL_SIZES:
        serial = Amdahl(drawn_interval(float(amdahl(p, speedups)), amdahl(p, drawn), n))
    laws: Usl | str = f"the USL is refused with {given}; it takes {USL_SIZES}"
    if sizes >= USL_SIZES:
        (sigma, kappa), draws = usl(p, speedups), usl(p, drawn)
        turn, turns = (
            base_devices * peak(each[..., 0], each[..., 1])
            for each in (np.array([sigma, kappa]), draws)
        )
        laws = Usl(
            drawn_interval(float(sigma), draws[:, 0], n),
            drawn_interval(float(kappa), draws[:, 1], n),
            drawn_interval(float(turn), turns, n) if kappa > 0 else None,
        )
    return serial, laws
