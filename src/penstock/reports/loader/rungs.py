"""The ladder of ceilings below a loader, rung by rung."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ...base import format_seconds, group_by, plural
from ...instruments import DRAWS, FAILED, Interval, Record
from ..cell import cell_ratio, machine_namer
from ..table import Section, or_dash, scaled, times_bracket
from .cell import MB, LoaderCell, cache_label, loader_cells, percents_of

RUNGS = {
    "L1": "files",
    "L2": "decode",
    "L3": "scatter",
    "L4": "loader",
    "L5": "transfer",
}


_NAMED = 3
"""Most ladders that the verdict names. The chapter has all."""


class Ladder:
    """The rungs of one data set, batch size and number of threads.

    Each rung does the work of the one below it and something more.
    """

    def __init__(self, rungs: Mapping[str, LoaderCell]) -> None:
        self.rungs = rungs
        self.measured = {name: cell for name, cell in rungs.items() if cell.launches}
        self.seconds = {name: cell.seconds or 0.0 for name, cell in self.measured.items()}

    def kept(self, name: str, of: str) -> Interval:
        """The speed of a rung as a share of that of another."""
        return cell_ratio(self.measured[name], self.measured[of])

    @cached_property
    def refuted(self) -> dict[str, str]:
        """The rungs that were measured too slow, each with a higher rung that shows it.

        The higher rung does the same and more, in distinguishably less time, or in less than the
        lower rung alone would cost.
        """
        seconds, refuted = self.seconds, dict[str, str]()
        names = list(seconds)
        below = names[0] if names else ""
        for place, name in enumerate(names[1:], 1):
            for above in names[place + 1 :]:
                kept = self.kept(above, name)
                beats = kept.value > 1 and (kept.low is None or kept.low > 1)
                if beats or seconds[above] < seconds[name] - seconds[below]:
                    refuted[name] = above
                    break
            else:
                below = name
        return refuted

    @cached_property
    def costs(self) -> dict[str, float]:
        """The seconds that each rung adds to the one below it, without those that are refuted."""
        seconds = {name: s for name, s in self.seconds.items() if name not in self.refuted}
        lowest = dict(list(seconds.items())[:1])
        return lowest | {b: seconds[b] - seconds[a] for a, b in pairwise(seconds)}

    @property
    def limiting(self) -> str | None:
        """The rung that costs the most seconds; None with fewer than two rungs."""
        if len(self.costs) < 2:
            return None
        return max(self.costs, key=lambda name: self.costs[name])

    def sentence(self) -> str:
        """Say which rung limits, by how much, and how fast batches would come without it."""
        limit, steps = self.limiting, list(self.costs)
        if limit is None:
            return "What limits is not known: fewer than two steps of the ladder were measured."
        below = steps[steps.index(limit) - 1] if limit != steps[0] else ""
        top = list(self.measured)[-1]
        first, what = self.measured[top], RUNGS[limit]
        between = [RUNGS[name] for name in self.refuted if below < name < limit]
        if below and between:
            what += f" with {' and '.join(between)}"
        elif not below and limit != "L1":
            what = f"all up to {what}" + ", with the network" * ("://" in str(first.case["data"]))
        share = self.costs[limit] / self.seconds[top]
        line = (
            f"Bound by {what} (batch {first.batch}, {plural(first.threads, 'thread')}): "
            f"{format_seconds(self.costs[limit])} of {format_seconds(self.seconds[top])} a batch, "
            f"{share:.0%}"
        )
        gain = self.gain_without(limit, below, top)
        if gain is None:
            return f"{line}."
        ends = "[one launch of each step, no interval]"
        if gain.low is not None:
            ends = times_bracket(gain, f"{plural(gain.n, 'launch')} of each step")
        fast = f"batches would come at most {gain.value:.2f}x as fast"
        return f"{line}; if it cost nothing, {fast} {ends}."

    def gain_without(self, limit: str, below: str, top: str) -> Interval | None:
        """How many times as fast the top rung would be if the limiting step cost nothing."""
        names = [name for name in (top, limit, below) if name]
        times = {name: np.concatenate(self.measured[name].times) for name in names}

        def gain(seconds: dict[str, Any]) -> Any:
            return seconds[top] / (seconds[top] - seconds[limit] + seconds.get(below, 0.0))

        value = float(gain({name: np.median(each) for name, each in times.items()}))
        launches = min(map(len, times.values()))
        if not 1 < value < np.inf:
            return None
        if launches == 1:
            return Interval(value, None, None, 1)
        rng = np.random.default_rng(0)  # the same report from the same records, to the digit
        drawn = gain(
            {
                name: np.median(each[rng.integers(len(each), size=(DRAWS, len(each)))], axis=1)
                for name, each in times.items()
            }
        )
        return Interval.of_draws(value, drawn, launches)

    def section(self) -> Section:
        """Heading, table, and the sentence."""
        first = next(iter(self.rungs.values()))
        table: list[tuple[str, ...]] = [
            ("step", "", "s/batch", "MB/s decoded", "of the step below", "launches")
        ]
        below = ""  # the measured rung under this one
        for name, cell in self.rungs.items():
            if not cell.launches:
                table.append((name, RUNGS[name], *["-"] * 3, cell.status))
                continue
            table.append(
                (
                    name,
                    RUNGS[name],
                    or_dash(cell.seconds),
                    or_dash(scaled(cell.rate("bytes"), 1 / MB)),
                    percents_of(self.kept(name, below)) if below else "-",
                    str(cell.launches),
                )
            )
            below = name
        reasons = [
            f"{_rung(name)} took {format_seconds(self.seconds[name])} and {_rung(above)}, which "
            f"does the same and more, {format_seconds(self.seconds[above])}: what {name} costs is "
            "not known."
            for name, above in self.refuted.items()
        ]
        reasons += [
            f"{_rung(name)} is not applicable: {cell.error}"
            if cell.status == "unsupported"
            else f"{_rung(name)} {FAILED[cell.status]}: {cell.error}"
            for name, cell in self.rungs.items()
            if not cell.launches
        ]
        where = f"batch {first.batch}, {plural(first.threads, 'thread')}"
        title = f"The ladder at {where}, {cache_label(list(self.rungs.values()))}"
        return Section(title, table, [self.sentence(), *reasons])


def ladders_of(records: Iterable[Record]) -> list[Ladder]:
    """A ladder for each data set, batch size, number of threads and machine."""
    ladders = group_by(
        loader_cells(records, "ladder"), lambda cell: (cell.group, cell.batch, cell.threads)
    )
    by_rung = ({str(cell.case["rung"]): cell for cell in cells} for cells in ladders.values())
    return [Ladder(dict(sorted(rungs.items()))) for rungs in by_rung]


def ladder_sections(records: Iterable[Record]) -> list[Section]:
    """The section of each ladder, with its machine if there are several."""
    ladders = ladders_of(records)
    machine = machine_namer(cell for each in ladders for cell in each.rungs.values())
    sections = [(each.section(), next(iter(each.rungs.values()))) for each in ladders]
    return [part._replace(title=part.title + machine(cell)) for part, cell in sections]


def ladder_headlines(records: Iterable[Record]) -> list[str]:
    """The limit at each batch size and number of threads, and how fast batches come without it."""
    ladders = [ladder for ladder in ladders_of(records) if ladder.measured]
    ladders.sort(key=lambda ladder: -max(ladder.seconds.values()))
    lines = [ladder.sentence() for ladder in ladders if ladder.limiting]
    if len(lines) > _NAMED:
        more = f"{plural(len(lines) - _NAMED, 'more combination')} of batch and threads are below."
        return [*lines[:_NAMED], more]
    return lines


def _rung(name: str) -> str:
    return f"{name} ({RUNGS[name]})"
