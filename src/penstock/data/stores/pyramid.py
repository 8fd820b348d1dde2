"""What an OME-Zarr image gets once it is whole: levels, each made of the one above it, and windows.

    image/0  ──▶  image/1  ──▶  image/2 ...  ──▶  the group's metadata names them

The metadata names a level once all levels are whole. What a killed run has written stays: a chunk
that is stored is whole, and is not made again. So the levels have the same bytes whenever they
were made, by how many threads and in how many goes.

Viewers show channels by the member ``omero`` of the group. Its schema wants a colour and a window
of every channel. While blocks are written a window that is not known is the range of the dtype.
`add_windows` counts it over boxes of the coarsest level, so that it depends on nothing but the
values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, in_order
from ..box import Box, Grid
from ..levels import SPACE, LevelBelow, Rule, box_above, levels_below, reduced
from ..normalize import Histogram
from .frames import shown_channels
from .kvstore import open_to_write, ts
from .ome_levels import holds_labels, transform_of, transformations
from .omezarr import open_omezarr_source
from .open import parse_spec
from .protocols import AXES
from .tensorstore import TensorStoreSink, TensorStoreSource, plainly
from .tensorstore_open import label_spec, open_tensorstore_source, prepare_sink
from .written import is_damage
from .zarr_groups import Group

_MOST_LEVELS = 31  # below the first: an axis has fewer than 2**31 voxels
_CELLS_BYTES = 2**27
"""About the bytes of all chunks or shards that are made at a time."""


_PERCENTILES = (0.5, 99.8)
_COUNTED = (1, 1, 128, 256, 256)
"""The longest sides of a box that is counted: a chunk, as a part of one takes as long to read."""
_PLACES, _VOXELS = 64, 2**26
"""The most boxes, and about the most voxels, that are counted of all channels; at least one box of
each."""


def add_levels(
    path: str, *, rule: Rule | None, count: int | None = None, again: bool | None = None,
    threads: int = 1, progress: Callable[[int], None] = lambda _: None, name: str = "",
    axes: Sequence[int] = SPACE,
) -> list[LevelBelow]:  # fmt: skip
    """Add levels to an image.

    Args:
        path: The OME-Zarr group, 0.4 or 0.5, of which level 0 is there.
        rule: How voxels become one: ``mean``, or ``mode`` for labels; by default as its levels
            are made that are there, else ``mode`` for an image that is a label, and ``mean``.
        count: The number of levels in all; by default as many as bring y and x down to 256.
        again: What to do with levels that the metadata names already: True makes them anew, False
            leaves them, None refuses.
        threads: Chunks that are made at a time.
        progress: Told the number of voxels of a chunk that is done.
        name: The flag that messages name.
        axes: The places of the axes, of t c z y x, that may be halved.

    Returns:
        The levels that were added.

    Raises:
        UsageError: It is no such group, or has levels already.
    """
    group = Group.at(path, name)
    where, image = group.where, group.image()
    open_to_write(path, where)
    first = level_of(path, 0, name)
    if not image["datasets"][0].get("coordinateTransformations"):
        raise UsageError(
            f"{where}: is OME-Zarr before 0.4; penstock convert IN OUT makes a new one"
        )
    named = len(image["datasets"])
    if named > 1 and again is None:
        raise UsageError(f"{where}: has {named} levels; --overwrite makes them anew")
    if named > 1 and not again:
        return []
    usual: Rule = "mode" if "image-label" in group.ome else "mean"
    rule = rule or (image["type"] if image.get("type") in get_args(Rule) else usual)
    if named > 1:
        _remove(group)
    levels = levels_below(first.domain.shape, first.scale, count, axes)
    above, paths = first, _paths(str(image["datasets"][0]["path"]), len(levels))
    for level, place in zip(levels, paths, strict=True):
        made, sink = _opened(above, level, first.spec["kvstore"], place, where)
        cells = Grid(sink.domain, sink.write_grid, (0,) * 5)
        make = partial(_make, above, level.halved, sink, rule)
        fit = _CELLS_BYTES // (math.prod(sink.write_grid) * sink.dtype.itemsize)
        for size in in_order(make, _lacking(made, cells), max(1, min(threads, fit)), ahead=1):
            progress(size)
        sink.close()
        above = made
    below = [
        {"path": place, "coordinateTransformations": _moves(image, level.factors, first, where)}
        for level, place in zip(levels, paths, strict=True)
    ]
    _name_levels(group, below, rule)
    return levels


def begin_first_level(
    path: str, count: int | None, name: str
) -> tuple[LevelBelow, TensorStoreSink] | None:
    """Create the first level below an image, before the image names it.

    Args:
        path: The OME-Zarr group, of which level 0 is there.
        count: The number of levels in all, as for `add_levels`.
        name: The flag that messages name.

    Returns:
        How it is made, and where; None for an image that gets no level, or has some.

    Raises:
        UsageError: It cannot be opened.
    """
    group = Group.at(path, name)
    image, first = group.image(), level_of(path, 0, name)
    levels = levels_below(first.domain.shape, first.scale, count)
    if not levels or len(image["datasets"]) > 1:
        return None
    place = _paths(str(image["datasets"][0]["path"]), len(levels))[0]
    return levels[0], _opened(first, levels[0], first.spec["kvstore"], place, group.where)[1]


def level_of(path: str, number: int, name: str) -> TensorStoreSource:
    """A level of an image as it is stored, of any dtype that an output may have."""
    return open_omezarr_source(path, level=number, cache_bytes=0, name=name, raw=True)


def count_differing(spec: Any, threads: int = 1) -> dict[int, tuple[int, int]]:
    """Compare the levels of an OME-Zarr image with those above them.

    Args:
        spec: The place of the group; or another spec of an array, which has no levels.
        threads: Chunks that are compared at a time.

    Returns:
        For each level below the first the number of chunks, and of those that differ; one of none
        where its array is gone, or one above. Empty where the metadata does not say how levels were
        made.
    """
    if not isinstance(path := parse_spec(spec), str):
        return {}
    group = Group.at(path)
    image = group.image() if "multiscales" in group.ome else {}
    if image.get("type") not in get_args(Rule):
        return {}
    numbers = range(1, len(image["datasets"]))
    counts, above = dict[int, tuple[int, int]](), level_of(path, 0, "")
    for number in numbers:
        try:
            made = level_of(path, number, "")
        except UsageError:
            return dict.fromkeys(numbers, (0, 1)) | counts
        cells = Grid(made.domain, made.chunks, (0,) * 5)
        same = in_order(partial(_is_of, above, made, image["type"]), cells, threads, ahead=1)
        counts[number] = len(cells), sum(not each for each in same)
        above = made
    return counts


def _is_of(above: TensorStoreSource, made: TensorStoreSource, rule: Rule, cell: Box) -> bool:
    """Whether a part of a level is that of the level above. One that is damaged is not."""
    sides = zip(above.domain.shape, made.domain.shape, strict=True)
    halved = tuple(2 if side > less else 1 for side, less in sides)
    try:
        right = _reduced(above, halved, rule, cell)
        return np.array_equal(made.read(cell), right, equal_nan=True)
    except Exception as error:
        if is_damage(error):
            return False
        raise


def remove_levels(path: str) -> None:
    """Take away the levels of an OME-Zarr image but for the first, which is about to change."""
    group = Group.at(path)
    if "multiscales" in group.ome:
        _remove(group)


def _remove(group: Group) -> None:
    """Take away the levels of an image, also those that a killed run began and did not name.

    Arrays go first: a kill between the two must leave no stored chunk that a later run would take
    for its own.
    """
    first, *named = (str(each["path"]) for each in group.image()["datasets"])
    ranges = (ts.KvStore.KeyRange(f"{p}/", f"{p}0") for p in {*named, *_paths(first, _MOST_LEVELS)})
    begun = [group.root.delete_range(each) for each in ranges]  # all at once: a store may be far
    for each in begun:
        each.result()
    _name_levels(group, [])


def _paths(first: str, count: int) -> list[str]:
    """The paths of the levels below one, named as it is: 0, 1, 2 or s0, s1, s2."""
    match = re.fullmatch(r"(.*?)0", first)
    stem = match.group(1) if match else f"{first}-level"
    return [f"{stem}{number}" for number in range(1, count + 1)]


def _opened(
    above: TensorStoreSource, level: LevelBelow, kvstore: Any, path: str, where: str
) -> tuple[TensorStoreSource, TensorStoreSink]:
    """The array of a level, as it is read and as it is written: like the one above but for its
    shape. It is created if it is not there."""
    like = above.array.spec(minimal_spec=False).to_json()
    place = {"driver": like["driver"], "kvstore": kvstore, "path": path}
    shape = [level.shape[AXES.index(axis)] for axis in above.stored_axes]
    spec = {**place, "metadata": {**like["metadata"], "shape": shape}}
    # Zarr 2 names no dimensions: of four it would be guessed that the first is c.
    asked = label_spec(spec, axes=above.stored_axes, origin=(0,) * 5, where=where)
    asked.update(open_mode=ts.OpenMode(create=True, open=True))
    sink = prepare_sink(asked, Box((0,) * 5, level.shape), above.dtype, where)
    sink.create()
    if like["driver"] == "zarr":  # Zarr 2 keeps in a file of its own what the numbers stand for
        said = ts.KvStore.open(like["kvstore"]).result().read(".zattrs").result()
        if said.state == "value":
            below = ts.KvStore.open(ts.Spec(place).kvstore).result()
            below.write(".zattrs", said.value).result()
    made = open_tensorstore_source(
        place, cache_bytes=0, name=where, raw=True, axes=above.stored_axes
    )
    return made, sink


def _make(
    above: TensorStoreSource, halved: Sequence[int], sink: TensorStoreSink, rule: Rule, cell: Box
) -> int:
    """Make one chunk or shard of a level."""
    sink.write(cell, _reduced(above, halved, rule, cell))
    return cell.size


def _reduced(
    above: TensorStoreSource, halved: Sequence[int], rule: Rule, cell: Box
) -> NDArray[Any]:
    """A part of a level, made of the level above, a chunk of it at a time."""
    out = np.empty(cell.shape, above.dtype)
    # A window must not lie in two pieces.
    steps = zip(above.chunks, halved, strict=True)
    step = tuple(n if n % by == 0 else n * by for n, by in steps)
    for piece in Grid(box_above(cell, halved, above.domain.shape), step, (0,) * 5):
        ends = zip(piece.start, piece.stop, halved, strict=True)
        start, stop = zip(*((a // by, -(-b // by)) for a, b, by in ends), strict=True)
        out[Box(start, stop).within(cell)] = reduced(above.read(piece), halved, rule)
    return out


def _lacking(made: TensorStoreSource, cells: Grid) -> Iterator[Box]:
    for cell in cells:
        with plainly():
            if made.absent([cell]):
                yield cell


def _moves(
    image: Mapping[str, Any], factors: Sequence[int], first: TensorStoreSource, where: str
) -> list[dict[str, Any]]:
    """The transformations of a level: a voxel's centre is that of those it is made of."""
    rank = len(first.stored_axes)
    place = transform_of(image["datasets"][0], rank, {}, where)
    size = place["scale"] or (1.0,) * rank
    times = [factors[AXES.index(axis)] for axis in first.stored_axes]
    sides = [*zip(place["translation"], times, size, strict=True)]
    centre = [origin + (by - 1) / 2 * one for origin, by, one in sides]
    return transformations([one * by for _, by, one in sides], centre)


def _name_levels(
    group: Group, below: Sequence[Mapping[str, Any]], rule: Rule | None = None
) -> None:
    """Write the metadata of a group, in which its image has the first level and those below.

    The most frequent value as rule is the mark of labels, and stands there without levels, too.
    """
    group = Group.of(group.root, group.where)  # as it is by now
    image = group.ome["multiscales"][0]
    datasets = [image["datasets"][0], *below]
    marked = rule == "mode" and image.get("type") != rule
    if marked or image["datasets"] != datasets:
        image.update(datasets=datasets, **({"type": rule} if rule else {}))
        group.write()


def add_windows(path: str, channels: Sequence[Mapping[str, Any]] = (), name: str = "") -> bool:
    """Give the channels of an image windows by percentiles of its values.

    Args:
        path: The OME-Zarr group, which is whole.
        channels: What is known of each, with which the group was begun. Its windows stay.
        name: The flag that messages name.

    Returns:
        False if nothing was changed: the image is of labels, or its group says more than it was
        begun with.

    Raises:
        UsageError: It cannot be read.
    """
    group = Group.at(path, name)
    ome, last = group.ome, len(group.image()["datasets"]) - 1
    if holds_labels(ome):
        return False
    level = level_of(path, last, name)
    begun = shown_channels(channels, level.dtype) if any(channels) else None
    if ome.get("omero") != begun:
        return False
    first, count = level.domain.start[1], level.domain.shape[1]
    shown = [dict(each) for each in channels] or [{} for _ in range(count)]
    for number, each in enumerate(shown):
        if "window" not in each:
            each["window"] = _window(level, first + number, count)
    ome["omero"] = shown_channels(shown, level.dtype)
    group.write()
    return True


def _window(level: TensorStoreSource, channel: int, channels: int) -> dict[str, float]:
    """The window of one of several channels, by boxes that are spread evenly over it."""
    start, stop = list(level.domain.start), list(level.domain.stop)
    start[1], stop[1] = channel, channel + 1
    sides = tuple(map(min, level.chunks, _COUNTED))
    cells = Grid(Box(tuple(start), tuple(stop)), sides, tuple(start))
    most = min(_PLACES, _VOXELS // math.prod(sides)) // channels
    number = min(len(cells), max(1, most))
    places = [(2 * place + 1) * len(cells) // (2 * number) for place in range(number)]
    histogram = Histogram(level.dtype, _PERCENTILES)
    while not histogram.done:
        for place in places:
            with plainly():
                histogram.add(level.read(cells[place]))
        histogram.advance()
    if not histogram.count:  # nothing is finite
        return {"start": 0, "end": 1}
    least, low, high, greatest = map(histogram.percentile, (0, *_PERCENTILES, 100))
    if low == high:  # nearly all is background
        low, high = least, greatest
    whole = level.dtype.kind in "iub"
    if whole:
        low, high = math.floor(low), math.ceil(high)
    if low == high:
        high = low + max(1, abs(low))
    window = {"start": low, "end": high}
    return window if whole else {"min": least, "max": greatest, **window}
