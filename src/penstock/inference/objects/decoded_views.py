"""What a decoder sees: each block of a grid of its own, with a halo, decoded once.

              ├──── core of view 1 ────┤
         ╟╌╌╌╌├────────────────────────┤╌╌╌╌╢     halo: the size of an object
                          ╟╌╌╌╌├───────────────────────┤╌╌╌╌╢  view 2

    folder/views/000012.npy    the labels of view 12, from 1
    folder/views/000012.npz    of each of them: the voxels, the view that has its centroid in its
                               core, whether the edge of the view cuts it, whether it is large

The grid follows from the settings alone. So the labels do, too, whoever decodes which view.

What views see is then joined into objects, each seen whole by the view that owns it. Two views of
one object are one if each is the other's best match in the region that both views saw. An object
is kept if the view whose core has the centroid of one of its views is among them; that view owns
it, the one with the lowest number of several. What the owner sees as two, each of them whole and at
home, stays two, whatever other views saw of them at their edges. Voxels come from the owner's view.
A voxel that two owners claim is that of the view with the lower number.

An object is ambiguous if one of its views is larger than --object-size, if a view sees two of it,
or if it was joined from more views than can see an object of that size: then views merged in a
chain.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import LabelConfig, UsageError, groups_of, in_order, require
from ...data import Box, Grid, Source, flatten
from ..tiling.geometry import per_axis
from .block_record import extents_of, faces_of, load_table, numbers_of_cells, save_array, save_table
from .components import LocalLabels, compact, has_nan, runs_of
from .decoders import Decoder, check_decoder, opened_decoder
from .label_output import RoundWork

_HEADERS = threading.Lock()
"""Held while a header is read: numpy parses it, which fails in two threads of Python 3.11 at once
(python/cpython 106905)."""
_CORE = 128
"""The least side of a core that is chosen, in voxels."""


class SeenObjects(NamedTuple):
    """The objects of a view, a row for each."""

    home: NDArray[np.int64]
    """The view whose core has the centroid."""
    voxels: NDArray[np.int64]
    cut: NDArray[np.bool_]
    """True if the edge of the view, within the volume, touches the object."""
    large: NDArray[np.bool_]
    """True if its box is larger than ``--object-size``."""


@dataclass(frozen=True)
class ViewWork(RoundWork):
    """The views of a labelling. The grid is that of their cores."""

    halo: tuple[int, ...]
    """Voxels along z y x."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Import the decoder, for the time in which views are decoded."""
        with opened_decoder(self.config) as decoder:
            self.__dict__["_decoder"] = decoder
            yield

    def view(self, number: int) -> Box:
        """A core and its halo."""
        halo = (0, 0, *self.halo)
        return self.grid[number].grow(halo, halo) & self.grid.domain

    def decode(self, number: int) -> str:
        """Decode a view. Returns no check."""
        box, source = self.view(number), self.source
        lead = Box((box.start[0], source.domain.start[1]), (box.stop[0], source.domain.stop[1]))
        scores = source.read(lead + box[2:])[0]
        absent = None
        if has_nan(scores):
            if not self.config.nan_background:
                place = " ".join(map(str, box.start[2:]))
                raise UsageError(
                    f"IN {source.name}: a score near z y x = {place} is NaN; --nan-background "
                    "takes it for background"
                )
            absent = np.isnan(scores)
            scores[absent] = 0
        plane = "z" not in source.axes
        decoder: Decoder = self.__dict__["_decoder"]
        labels = decoder(scores[:, 0] if plane else scores).reshape(box.shape[2:])
        if absent is not None:
            labels = np.where(absent.any(axis=0), 0, labels)
        labels, _ = require("fastremap", "label").renumber(np.ascontiguousarray(labels))
        seen = self._seen(labels, box)
        table, array = self.files(number)
        save_array(array, labels)
        save_table(table, seen)
        return ""

    def _seen(self, labels: NDArray[Any], box: Box) -> SeenObjects:
        """Measure the objects of a view, from its labels and its box."""
        count = int(labels.max(initial=0))
        runs = runs_of(labels)
        low, high, sums = extents_of(runs, labels.shape, count)
        voxels = runs.voxels(count)
        places = np.full((count, 5), box.start)
        places[:, 2:] += np.floor(sums / voxels[:, None] + 0.5).astype(np.int64)  # the centroids
        cut = np.zeros(count + 1, bool)
        for *_, face, is_outer in faces_of(labels, box, self.grid.domain):
            if not is_outer:
                cut[np.unique(face)] = True
        large: NDArray[np.bool_] = np.any(high - low > np.maximum(self.halo, 1), axis=1)
        return SeenObjects(numbers_of_cells(self.grid, places), voxels, cut[1:], large)

    def files(self, number: int) -> list[Path]:
        """The files of the objects of a view, and of their labels."""
        return [self.folder / f"{number:06}.{suffix}" for suffix in ("npz", "npy")]

    def seen(self, number: int) -> SeenObjects:
        """The objects of a view, as `decode` has saved them."""
        return load_table(self.files(number)[0], SeenObjects)

    def labels(self, number: int, box: Box) -> NDArray[Any]:
        """The labels of a view in a box within it (t c z y x), along z y x."""
        with _HEADERS:
            mapped = np.load(self.files(number)[1], mmap_mode="r", allow_pickle=False)
        return np.asarray(mapped[box.within(self.view(number))[2:]])

    @property
    def most(self) -> int:
        """The most views that can see an object of ``--object-size``."""
        sides = zip(self.halo, self.grid.step[2:], self.grid.cells.shape[2:], strict=True)
        # It and a halo on either side touch so many cores of an axis.
        return prod(min(count, 2 + (max(h, 1) + 2 * h - 2) // step) for h, step, count in sides)

    def around(self, box: Box) -> list[int]:
        """The views that see voxels of a box, in order."""
        halo = (0, 0, *self.halo)
        near = self.grid.touching(box.grow(halo, halo) & self.grid.domain)
        inside = near & self.grid.cells
        places = np.ndindex(*inside.shape)
        cells = (np.add(place, inside.start).tolist() for place in places)
        return [flatten(cell, self.grid.cells) for cell in cells]


def view_work(config: LabelConfig, source: Source, domain: Box, folder: Path) -> ViewWork:
    """The views of a labelling, by its settings alone.

    Args:
        config: The settings.
        source: The scores.
        domain: The voxels to label: the times and space of the scores, in one channel.
        folder: Where views are kept.

    Returns:
        The views.

    Raises:
        UsageError: The decoder cannot be imported.
    """
    assert config.object_size is not None
    check_decoder(config)  # here, and not in a process, whose end says less
    plane = "z" not in source.axes
    halo = per_axis(config.object_size, plane=plane, thin=0)
    core = tuple(max(_CORE, 4 * side) for side in halo)
    if config.instance_block is not None:
        core = per_axis(config.instance_block, plane=plane, thin=1)
    step = tuple(max(1, min(n, side)) for n, side in zip(core, domain.shape[2:], strict=True))
    return ViewWork(config, Grid(domain, (1, 1, *step), domain.start), folder, halo)


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
    """The numbers of those that are, as in ``keys``."""


def painted(work: ViewWork, owners: Owners, box: Box) -> LocalLabels:
    """The objects of a decoder in a block: painted from the views around it."""
    keys = np.zeros(box.shape[2:], np.int64)
    for view in work.around(box):
        part = work.view(view) & box
        of_view = owners.keys[owners.starts[view] : owners.starts[view + 1]]
        here = keys[part.within(box)[2:]]
        seen = np.concatenate([[0], of_view])[work.labels(view, part)]
        np.copyto(here, seen, where=here == 0)
    labels, _ = require("fastremap", "label").renumber(keys)
    return replace(compact(labels, int(labels.max(initial=0))), key_of=keys)


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
    groups = groups_of(len(home), pairs, "label")
    return _resolved(seen, groups, home, view, starts, work.most)


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
    view: NDArray[np.int64], starts: NDArray[np.int64], most: int,
) -> Owners:  # fmt: skip
    """Give each group an owner. ``most`` views can see an object that fits."""
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
    doubtful = np.bincount(several[0] // views, minlength=count) > most
    twice = np.zeros(count, bool)
    twice[several[0][several[1] > 1] // views] = True
    # Two that their owner sees whole are two, though pieces at the edges of other views join them.
    whole = painted & ~cut & (home == view) & twice[groups]
    # Numbers behind those of groups are free: one for each object of a view.
    keys = np.where(painted, np.where(whole, count + np.arange(len(view)), groups) + 1, 0)
    doubtful[groups[painted & large]] = True
    is_cut = np.zeros(count, bool)
    is_cut[groups[painted & cut]] = True
    kept = owner >= 0
    joined, is_cut = kept & (sizes > 1), kept & is_cut
    ambiguous = np.flatnonzero(kept & (doubtful | twice)) + 1
    return Owners(keys, starts, int(joined.sum()), int(is_cut.sum()), ambiguous)
