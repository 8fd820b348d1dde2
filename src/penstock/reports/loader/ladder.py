"""The ladder of ceilings below a loader, rung by rung."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise

from ...instruments import FAILED, Interval, Record
from ..cell import cell_ratio
from ..table import Section, scaled
from .cell import (
    MB,
    LoaderCell,
    cache_label,
    cell_words,
    cells_apart,
    is_remote_case,
    loader_cells,
    percents_of,
    threads_in_words,
    time_words,
)

RUNGS = {
    "L0": "device",
    "L1": "files",
    "L2": "decode",
    "L3": "scatter",
    "L4": "loader",
    "L5": "transfer",
}


class Ladder:
    """The rungs of one data set, batch size and number of threads."""

    def __init__(self, rungs: Mapping[str, LoaderCell]) -> None:
        self.rungs = rungs
        self.measured = {name: cell for name, cell in rungs.items() if cell.launches}

    def kept(self, name: str, of: str) -> Interval:
        """The speed of a rung as a share of that of another."""
        return cell_ratio(self.measured[name], self.measured[of])

    @cached_property
    def refuted(self) -> dict[str, str]:
        """Rungs that were measured too slow, each with one above it that says so, by doing the same
        and more in less time: distinguishably less, or less than the step alone is said to cost."""
        seconds = {name: cell.seconds or 0.0 for name, cell in self.measured.items()}
        found: dict[str, str] = {}
        names = list(seconds)
        below = names[0] if names else ""
        for place, name in enumerate(names[1:], 1):
            for above in names[place + 1 :]:
                kept = self.kept(above, name)
                beats = kept.value > 1 and (kept.low is None or kept.low > 1)
                if beats or seconds[above] < seconds[name] - seconds[below]:
                    found[name] = above
                    break
            else:
                below = name
        return found

    @cached_property
    def costs(self) -> dict[str, float]:
        """Seconds that each rung adds to those under it that are not refuted."""
        told = {
            n: cell.seconds or 0.0 for n, cell in self.measured.items() if n not in self.refuted
        }
        names = list(told)
        costs = {name: told[name] for name in names[:1]}
        return costs | {b: told[b] - told[a] for a, b in pairwise(names)}

    @property
    def limiting(self) -> str | None:
        """The step with the greatest cost in seconds; None with fewer than two rungs."""
        if len(self.costs) < 2:
            return None
        return max(self.costs, key=lambda name: self.costs[name])

    def below(self, name: str) -> str | None:
        """The measured rung under this one."""
        names = list(self.measured)
        place = names.index(name)
        return names[place - 1] if place else None

    def sentence(self) -> str:
        """What limits, by how much, and how sure that is."""
        limit = self.limiting
        if limit is None:
            return "What limits cannot be said: fewer than two steps of the ladder were measured."
        top = list(self.measured)[-1]
        end, cost = self.measured[top], self.costs[limit]
        assert end.seconds is not None
        known = list(self.costs)
        below = known[known.index(limit) - 1] if limit != known[0] else None
        if below is None:
            kept = self.kept(top, limit)
            lowest = f"Step {_rung(limit)}, the lowest that was measured, costs most"
            if limit != "L0":  # it holds all that would be under it
                far = ", the network with it" * is_remote_case(end.case)
                lowest = (
                    f"All up to step {_rung(limit)}, the lowest that was measured, costs most{far}"
                )
            return (
                f"{lowest}: {time_words(cost)} a "
                f"batch; {_rung(top)} takes {time_words(end.seconds)} and keeps "
                f"{percents_of(kept)} of its speed ({_launches(kept)})."
            )
        between = [n for n in self.refuted if below < n < limit]
        with_them = f" with {' and '.join(map(_rung, between))}" if between else ""
        told = (
            f"Step {_rung(limit)}{with_them} costs most: {time_words(cost)} of the "
            f"{time_words(end.seconds)} that a batch takes at {_rung(top)}"
        )
        kept = self.kept(limit, below)
        if kept.low is not None and not kept.excludes(1):
            told += "; it is not distinguishable from the step below it"
        speed = f"{percents_of(kept)} of the speed of {_rung(below)} ({_launches(kept)})"
        return f"{told}; it keeps {speed}."

    def section(self) -> Section:
        """Heading, table, and the sentence."""
        first = next(iter(self.rungs.values()))
        table: list[tuple[str, ...]] = [
            ("step", "", "s/batch", "MB/s decoded", "of the step below", "of L0", "launches")
        ]
        for name, cell in self.rungs.items():
            if not cell.launches:
                table.append((name, RUNGS[name], *["-"] * 4, cell.status))
                continue
            below = self.below(name)
            table.append(
                (
                    name,
                    RUNGS[name],
                    cell_words(cell.seconds),
                    cell_words(scaled(cell.speed("bytes"), 1 / MB)),
                    percents_of(self.kept(name, below)) if below else "-",
                    percents_of(self.kept(name, "L0")) if below and "L0" in self.measured else "-",
                    str(cell.launches),
                )
            )
        reasons = [
            f"{_rung(name)} took {time_words(self.measured[name].seconds)} and {_rung(above)}, "
            f"which does the same and more, {time_words(self.measured[above].seconds)}: what "
            f"{name} costs is not known."
            for name, above in self.refuted.items()
        ]
        reasons += [
            f"{_rung(name)} is not applicable: {cell.error}"
            if cell.status == "unsupported"
            else f"{_rung(name)} {FAILED[cell.status]}: {cell.error}"
            for name, cell in self.rungs.items()
            if not cell.launches
        ]
        where = f"batch {first.batch}, {threads_in_words(first.threads)}"
        title = f"The ladder at {where}, {cache_label(list(self.rungs.values()))}"
        return Section(title, table, [self.sentence(), *reasons])


def ladders_of(records: Iterable[Record]) -> list[Ladder]:
    """One for each data set, batch size, number of threads and machine."""
    found: dict[tuple[str, ...], dict[str, LoaderCell]] = {}
    for cell in loader_cells(records, "ladder"):
        key = (*cells_apart(cell), str(cell.batch), str(cell.threads))
        found.setdefault(key, {})[str(cell.case["rung"])] = cell
    return [Ladder(dict(sorted(rungs.items()))) for rungs in found.values()]


def same_case_but_rung(found: Iterable[Ladder]) -> list[list[Ladder]]:
    """Ladders that differ in batch size and threads alone, together."""
    groups: dict[tuple[str, ...], list[Ladder]] = {}
    for ladder in found:
        groups.setdefault(cells_apart(next(iter(ladder.rungs.values()))), []).append(ladder)
    return list(groups.values())


def _launches(interval: Interval) -> str:
    return "one launch each, no interval" if interval.n == 1 else f"{interval.n} launches each"


def _rung(name: str) -> str:
    return f"{name} ({RUNGS[name]})"
