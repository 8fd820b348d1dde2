"""Joins what views see into objects, each seen whole by the view that owns it.

Two views of one object are one if each is the other's best match in the region that both views
saw. An object is kept if the view whose core has the centroid of one of its views is among them;
that view owns it, the one with the lowest number of several. What the owner sees as two, each of
them whole and at home, stays two, whatever other views saw of them at their edges. Voxels come
from the owner's view. A voxel that two owners claim is that of the view with the lower number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import LabelConfig, in_order, require
from ...data import Box, Source
from .components import LocalLabels, in_order_of_first
from .decoded_views import SeenObjects, ViewWork
from .face_joins import groups_of


class Owners(NamedTuple):
    """Which objects of views are painted, and as which object."""

    keys: NDArray[np.int64]
    """A row for each object of each view: the number of what it is a view of, from 1; 0 for one
    that is not painted."""
    starts: NDArray[np.int64]
    """The row of the first object of each view, and the number of rows."""
    joined: int
    """Objects that more than one view sees."""
    cut: int
    """Objects that the halo of their owner does not hold."""
    ambiguous: NDArray[np.int64]
    """The numbers of objects that are larger than ``--object-size``, or of which a view sees two:
    those of ``keys``."""


@dataclass(frozen=True)
class DecodedRule:
    """The objects of a decoder in a block: painted from the views around it."""

    work: ViewWork
    owners: Owners
    connectivity: int

    def labels_of(self, source: Source, box: Box, number: int) -> LocalLabels:
        """See `ComponentRule.labels_of`."""
        painted = np.zeros(box.shape[2:], np.int64)
        for view in self.work.around(box):
            part = self.work.view(view) & box
            keys = self.owners.keys[self.owners.starts[view] : self.owners.starts[view + 1]]
            here = painted[part.within(box)[2:]]
            seen = np.concatenate([[0], keys])[self.work.labels(view, part)]
            np.copyto(here, seen, where=here == 0)
        labels, _ = require("fastremap", "label").renumber(painted)
        local = in_order_of_first(labels, int(labels.max(initial=0)), labels)
        return local._replace(keys=painted.reshape(-1)[local.first])


def owners_of(work: ViewWork, threads: int) -> Owners:
    """Join the views, all of which are decoded.

    Args:
        work: The views.
        threads: Views that are matched at a time.

    Returns:
        The owners.
    """
    seen = [work.seen(number) for number in range(len(work.grid))]
    starts = np.cumsum([0, *(len(each.home) for each in seen)], dtype=np.int64)
    home = np.concatenate([each.home for each in seen])
    view = np.repeat(np.arange(len(seen)), np.diff(starts))

    def of_view(number: int) -> NDArray[np.int64]:
        parts = [
            matches(work, number, other, seen) + starts[[number, other]]
            for other in work.around(work.view(number))
            if other > number and work.config.join_rule != "owner"
        ]
        return np.concatenate([np.zeros((0, 2), np.int64), *parts])

    pairs = np.concatenate(list(in_order(of_view, range(len(seen)), threads)))
    groups = groups_of(len(home), pairs)
    return _resolved(seen, groups, home, view, starts)


def matches(
    work: ViewWork, number: int, other: int, seen: Sequence[SeenObjects]
) -> NDArray[np.int64]:
    """The objects that two views both see.

    At the edge of a view, a piece of one object may be taken for a piece of its neighbour. So two
    are one only if they share much of the smaller one, or if each view is the home of its own:
    then the object is larger than the halo.

    Args:
        work: The views.
        number: A view.
        other: Another one.
        seen: The objects of all views.

    Returns:
        Pairs, each a row of either view.
    """
    common = work.view(number) & work.view(other)
    if not common.size:
        return np.zeros((0, 2), np.int64)
    ours, theirs = (work.labels(each, common).reshape(-1) for each in (number, other))
    both = (ours > 0) & (theirs > 0)
    width = int(theirs.max(initial=0)) + 1
    keys, shared = np.unique(ours[both].astype(np.int64) * width + theirs[both],
                             return_counts=True)  # fmt: skip
    a, b = np.divmod(keys, width)
    size_a, size_b = np.bincount(ours, minlength=1)[a], np.bincount(theirs, minlength=1)[b]
    config: LabelConfig = work.config
    if config.join_rule == "touch":
        same = shared > 0
    else:
        of = np.minimum(size_a, size_b) if config.join_rule == "overlap" else (
            size_a + size_b - shared
        )  # fmt: skip
        alike = shared / of
        same = (alike >= config.join) & _is_best(a, alike) & _is_best(b, alike)
        here, there = seen[number], seen[other]
        much = shared >= config.join * np.minimum(here.voxels[a - 1], there.voxels[b - 1])
        same &= much | ((here.home[a - 1] == number) & (there.home[b - 1] == other))
    return np.stack([a[same], b[same]], axis=1) - 1


def _is_best(objects: NDArray[np.int64], alike: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each pair is the best of its object."""
    best = np.zeros(int(objects.max(initial=-1)) + 1)
    np.maximum.at(best, objects, alike)
    return alike == best[objects]


def _resolved(
    seen: list[SeenObjects], groups: NDArray[np.int64], home: NDArray[np.int64],
    view: NDArray[np.int64], starts: NDArray[np.int64],
) -> Owners:  # fmt: skip
    """Give each group an owner."""
    count, views = int(groups.max(initial=-1)) + 1, len(starts)
    # An object belongs to a view that is the home of one of its group; one that is its own home
    # comes before.
    at_home = np.isin(groups * views + view, groups * views + home)
    rank = np.where(home == view, view, np.where(at_home, views + view, 2 * views))
    best = np.full(count, 2 * views)
    np.minimum.at(best, groups, rank)
    owner = np.where(best < 2 * views, best % views, -1)
    painted = view == owner[groups]
    cut, large = (np.concatenate([getattr(e, name) for e in seen]) for name in ("cut", "large"))
    sizes = np.bincount(groups, minlength=count)
    several = np.unique(groups * views + view, return_counts=True)
    twice = np.zeros(count, bool)
    twice[several[0][several[1] > 1] // views] = True
    # Two that their owner sees whole are two, though pieces at the edges of other views join them.
    whole = painted & ~cut & (home == view) & twice[groups]
    keys = np.where(painted, np.where(whole, count + np.arange(len(view)), groups) + 1, 0)
    twice[groups[painted & large]] = True
    is_cut = np.zeros(count, bool)
    is_cut[groups[painted & cut]] = True
    kept = owner >= 0
    joined, is_cut = kept & (sizes > 1), kept & is_cut
    ambiguous = np.flatnonzero(kept & twice) + 1
    return Owners(keys, starts, int(joined.sum()), int(is_cut.sum()), ambiguous)
