"""Advice on a scaling study: good or poor, why, and whether quality stayed.

The seed calls scaling good above 85 % within a node and above 75 % across nodes, and poor below
70 %. The advice is sure only if the whole interval is on one side of a bound, which takes more than
one run of a size. A cause is named only if the phases of steps show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ..base import plural, significant
from ..instruments import CONFIDENCE, Interval
from .estimates import difference, why_none
from .runs import WAIT, TrainingRun, phases_of, share
from .study import Configuration, ScalingPoint, Study
from .tables import label

GOOD_IN_NODE, GOOD_ACROSS, POOR = 0.85, 0.75, 0.70
IMPLAUSIBLE = 1.1
"""An efficiency above this, on more devices than the baseline's, is called doubtful, not good."""
NOTABLE = 0.10
"""The fraction of a step that a phase must take to explain poor scaling."""


def exposed(configuration: Configuration) -> float | None:
    """The fraction of all steps that is waiting for the sum over ranks; None if not measured."""
    return share(configuration.runs, WAIT)


def interval_text(interval: Interval, factor: float, digits: int) -> str:
    """The ends of an interval as ``low-high``, or ``-`` if it has none.

    Args:
        interval: The interval.
        factor: A factor for both ends, such as 100 for percents.
        digits: The digits behind the point.

    Returns:
        The text.
    """
    if interval.low is None or interval.high is None:
        return "-"
    return f"{factor * interval.low:.{digits}f}-{factor * interval.high:.{digits}f}"


def advice(study: Study) -> Iterator[str]:
    """One sentence for each configuration beside the baseline."""
    for point in study.points[1:]:
        name, value = label(point.at.first), 100 * point.efficiency.value
        across = (point.at.nodes or 1) > 1
        bound = GOOD_ACROSS if across else GOOD_IN_NODE
        where = "across nodes" if across else "in a node"
        line = f"{name}: {value:.1f} % of linear {_basis(study, point)}"
        if point.at.devices > study.base.devices and point.efficiency.value > IMPLAUSIBLE:
            yield (
                f"{line}, more than the devices can add unless caches help: check that the runs "
                "did the same work."
            )
        elif point.efficiency.value > bound:
            sure = _surely(point.efficiency, bound, math.inf)
            yield f"{line}, above the {100 * bound:.0f} % that is good {where}{sure}."
        elif point.efficiency.value < POOR:
            sure = _surely(point.efficiency, -math.inf, POOR)
            yield f"{line}, below {100 * POOR:.0f} %, which is poor{sure}: {_causes(study, point)}."
        else:
            sure = _surely(point.efficiency, POOR, bound)
            yield f"{line}, neither good (above {100 * bound:.0f} % {where}) nor poor{sure}."


def _surely(interval: Interval, least: float, most: float) -> str:
    """The words ", though not surely" if a part of the interval lies outside the bounds."""
    low, high = interval.low, interval.high
    sure = low is not None and high is not None and least <= low and high <= most
    return "" if sure else ", though not surely"


def _basis(study: Study, point: ScalingPoint) -> str:
    text = interval_text(point.efficiency, 100, 1)
    if text == "-":
        return f"[{why_none(point.efficiency)}]"
    ours, base = len(point.at.runs), len(study.base.runs)
    runs = f"{plural(ours, 'run')} each" if ours == base else f"{ours} and {plural(base, 'run')}"
    return f"[{text} %, {runs}]"


def _causes(study: Study, point: ScalingPoint) -> str:
    """The causes that the phases show, the largest first."""
    here, base = phases_of(point.at.runs), phases_of(study.base.runs)
    if not here:
        return "the cause is unknown, because no phases of steps were measured"
    causes: list[tuple[float, str]] = []
    communication = exposed(point.at) or 0.0
    computing = share(point.at.runs, "forward", "backward") or 0.0
    if communication >= NOTABLE:
        cause = f"the sum over ranks holds up {communication:.0%} of a step (network, stragglers)"
        if communication > computing:
            cause += f", more than the {computing:.0%} of computing: the model or batch is small"
        causes.append((communication, cause))
    waiting = share(point.at.runs, "data_wait") or 0.0
    if waiting >= NOTABLE:
        cause = (
            f"steps wait for data for {waiting:.0%} of their time; train with more --num-workers"
        )
        causes.append((waiting, cause))
    if (slower := _slower(study, point, here, base)) is not None and slower >= 1 + NOTABLE:
        why = "the devices share something, such as cores, memory or power"
        if study.kind == "strong":
            why = f"a batch of {point.at.first.batch} on a device is small"
        cause = f"computing takes {significant(slower)} times as long a sample; {why}"
        causes.append((1 - 1 / slower, cause))
    in_order = (cause for _, cause in sorted(causes, reverse=True))
    return "; ".join(in_order) or "none of the measured phases explains it"


def _slower(
    study: Study, point: ScalingPoint, here: dict[str, float], base: dict[str, float]
) -> float | None:
    """Device seconds of computing for a sample, as a multiple of the baseline's."""
    samples, base_samples = point.at.first.work, study.base.first.work
    names = ("forward", "backward")
    now, before = (sum(phases.get(name, 0.0) for name in names) for phases in (here, base))
    if not (samples and base_samples and now and before):
        return None
    per_sample = now * point.at.devices / samples
    return per_sample / (before * study.base.devices / base_samples)


_SCORES: tuple[tuple[str, Callable[[TrainingRun], float | None]], ...] = (
    ("validation loss", lambda run: run.scored(run.val_loss)),
    ("validation accuracy", lambda run: run.scored(run.val_acc)),
)


def quality(study: Study) -> Iterator[str]:
    """Sentences on whether more devices reached the same quality, by each score of all sizes."""
    for name, value in _SCORES:
        by_point = [point.at.known(value) for point in study.points]
        if len(by_point) > 1 and all(by_point):
            yield _same(name, by_point, [label(point.at.first) for point in study.points])


def _same(name: str, scores: Sequence[Sequence[float]], labels: Sequence[str]) -> str:
    flat = [score for of_size in scores for score in of_size]
    range_ = (
        f"{name.capitalize()} is {min(flat):.4f} to {max(flat):.4f} over {plural(len(flat), 'run')}"
    )
    # With many sizes one differs by chance, so the intervals hold jointly with 95 % (Bonferroni).
    each = 1 - (1 - CONFIDENCE) / (len(scores) - 1)
    alike, differing, unknown = list[str](), list[str](), dict[str, list[str]]()
    for of_size, where in zip(scores[1:], labels[1:], strict=True):
        apart = difference(scores[0], of_size, each)
        if apart.low is None or apart.high is None:
            unknown.setdefault(why_none(apart), []).append(where)
        else:
            (differing if apart.excludes(0) else alike).append(
                f"{where} by {apart.value:+.4f} [{apart.low:+.4f} to {apart.high:+.4f}, "
                f"{len(of_size)} and {plural(len(scores[0]), 'run')}]"
            )
    parts = [range_]
    if differing:
        parts.append(f"it differs from that of {labels[0]}: {', '.join(differing)}")
    elif alike:
        parts.append(f"no difference from {labels[0]} is shown: {', '.join(alike)}")
    for why, of in unknown.items():
        which = f" of {', '.join(of)}" if len(of) < len(scores) - 1 else ""
        parts.append(f"what chance does to it is not known{which} [{why}]")
    return f"{'; '.join(parts)}."


def rank_lines(study: Study) -> Iterator[str]:
    """Sentences on runs whose ranks took different times."""
    for point in study.points:
        for run in point.at.runs:
            if len(run.rank_seconds) > 1 and len(set(run.rank_seconds)) > 1:
                low, high = min(run.rank_seconds), max(run.rank_seconds)
                yield (
                    f"Job {run.job}: {plural(len(run.rank_seconds), 'rank')} took {low:.2f} to "
                    f"{high:.2f} s; the slowest counts."
                )
