"""A mask of the sample in a volume or scene, from a coarse view of it.

    image ──▶ coarse view (a level, or means of blocks) ──▶ threshold ──▶ largest parts ──▶ grown

Intensities of tissue differ by factors, not by amounts. So Otsu's threshold is that of a histogram
of the logarithm of the distance from the background's end of the intensities: a plain histogram
would be cut between dim and bright tissue. The background is the most frequent intensity, dark or
bright.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import UsageError, require
from .box import Box, Grid
from .levels import SMALLEST, levels_below
from .stores.in_memory import open_array_source
from .stores.open import coarsest_level, open_sink, open_source
from .stores.protocols import Sink, Source, in_words, refuse_overlap
from .volumes import create_anew

_MOST = 2**28
"""The most voxels of a coarse view: each takes about ten bytes."""
_READ = 2**22
"""About the voxels that are read at a time."""
_CACHE = 2**26
_BINS = 256
_SPECKS = 0.01
"""The part of the largest piece of sample below which others are specks."""


@dataclass(frozen=True)
class CoarseView:
    """A volume in large voxels, without times and channels. Members by axis are z y x."""

    source: Source
    """The level that it was made of."""
    array: NDArray[np.float32]
    """Means, with NaN where nothing is finite."""
    scale: tuple[float, ...]
    translation: tuple[float, ...]


@dataclass(frozen=True)
class SampleMask:
    """Where the sample is, and how that was decided."""

    inside: NDArray[np.bool_]
    threshold: float
    brighter: bool
    """True if the sample is what is brighter than the threshold."""
    kept: int
    parts: int


def coarse_view(
    path: str, *, level: int | None = None, t: int | None = None, c: int | None = None,
    axes: str | None = None, series: int | None = None, name: str = "PATH",
) -> CoarseView:  # fmt: skip
    """A coarse view of an image, in memory that does not grow with it.

    Args:
        path: The image.
        level: The level to take as it is; by default the coarsest that has 256 voxels along y or x,
            averaged by blocks down to about as many.
        t: The time point; by default the mean of all.
        c: The channel; by default the mean of all.
        axes: The letters of its axes, as the user says.
        series: The number of the image, of several.
        name: The flag that messages name.

    Returns:
        The view.

    Raises:
        UsageError: It cannot be read, or the level is too large for this.
    """
    chosen: dict[str, Any] = {"axes": axes, "series": series, "name": name}
    first = open_source(path, **chosen)
    where = f"{name} {first.name}"
    source = first if level is None else open_source(path, level=level, **chosen)
    factors: tuple[int, ...] = (1,) * 5
    if level is None:
        source, _ = coarsest_level(path, first, (3, 4), SMALLEST, **chosen)
        for below in levels_below(source.domain.shape, source.scale):
            if max(below.shape[3:]) >= SMALLEST:
                factors = below.factors
    shape = [-(-n // by) for n, by in zip(source.domain.shape[2:], factors[2:], strict=True)]
    if math.prod(shape) > _MOST:
        raise UsageError(f"{where}: has {in_words(shape)} voxels; --level N takes a coarser level")
    times = _picked(t, source.domain, 0, "--t", where)
    channels = _picked(c, source.domain, 1, "--c", where)
    array = _averaged(source.with_cache(_CACHE), times, channels, factors[2:], shape)
    ratio = [a / b for a, b in zip(first.domain.shape[2:], source.domain.shape[2:], strict=True)]
    size, zero = source.scale or (1.0, 1.0, *ratio), source.translation
    if source.scale is None:  # a level of an image whose voxels have no size
        zero = (0.0, 0.0, *((by - 1) / 2 for by in ratio))
    return CoarseView(
        source=source,
        array=array,
        scale=tuple(size[axis] * factors[axis] for axis in (2, 3, 4)),
        translation=tuple(
            zero[axis] + (source.domain.start[axis] + (factors[axis] - 1) / 2) * size[axis]
            for axis in (2, 3, 4)
        ),
    )


def _picked(said: int | None, domain: Box, axis: int, flag: str, where: str) -> range:
    low, high = domain.start[axis], domain.stop[axis]
    if said is None:
        return range(low, high)
    if not low <= said < high:
        raise UsageError(f"{where}: {flag} {said} does not exist; {low} to {high - 1} do")
    return range(said, said + 1)


def _averaged(
    source: Source, times: range, channels: range, factors: tuple[int, ...], shape: list[int]
) -> NDArray[np.float32]:
    """Means over times, channels and blocks of voxels, of the values that are finite."""
    out = np.empty(shape, np.float32)
    space = source.domain[2:]
    step = [-(-n // by) * by for n, by in zip(source.chunks[2:], factors, strict=True)]
    for axis in (2, 1, 0):  # rows first, as most files have them
        fit = max(1, _READ // (math.prod(step) * len(channels)))
        step[axis] *= min(fit, -(-space.shape[axis] // step[axis]))
    for piece in Grid(space, tuple(step), space.start):
        starts = [range(0, n, by) for n, by in zip(piece.shape, factors, strict=True)]
        total = np.zeros([len(each) for each in starts])
        number = np.zeros_like(total)
        for t in times:
            box = Box((t, channels.start), (t + 1, channels.stop)) + piece
            values = source.read(box)[0].astype(np.float64)
            finite = np.isfinite(values)
            values[~finite] = 0
            total += _summed(values.sum(axis=0), starts)
            number += _summed(finite.sum(axis=0), starts)
        lows = [(a - b) // by for a, b, by in zip(piece.start, space.start, factors, strict=True)]
        with np.errstate(invalid="ignore"):  # 0 of 0 is NaN
            out[Box.of(lows, total.shape).slices] = total / number
    return out


def _summed(array: NDArray[Any], starts: list[range]) -> NDArray[Any]:
    for axis, places in enumerate(starts):
        array = np.add.reduceat(array, places, axis=axis)
    return array


def sample_mask(
    view: CoarseView, *, below: float | None = None, above: float | None = None,
    keep: int | None = None, grow: int = 1,
) -> SampleMask:  # fmt: skip
    """Where the sample is. Holes in it stay.

    Args:
        view: The coarse view.
        below: What is darker is sample; by default Otsu's method decides.
        above: What is brighter is sample.
        keep: The number of largest parts to keep; by default all of at least 1 % of the largest.
        grow: Voxels of the view by which they grow.

    Returns:
        The mask.

    Raises:
        UsageError: All is sample, or nothing.
    """
    where, finite = f"PATH {view.source.name}", view.array[np.isfinite(view.array)]
    if finite.size == 0:
        raise UsageError(f"{where}: holds no finite value")
    if below is not None or above is not None:
        brighter = below is None
        threshold = float(above if below is None else below)  # type: ignore[arg-type]
    elif finite.min() == finite.max():
        raise UsageError(f"{where}: all its values are {finite[0]:g}, and there is no threshold")
    else:
        threshold, brighter = otsu_threshold(finite)
    side = "above" if brighter else "below"
    inside = view.array > threshold if brighter else view.array < threshold
    if inside.all() or not inside.any():
        what = "everything" if inside.all() else "nothing"
        raise UsageError(
            f"{where}: {what} is {side} {threshold:g}; its values are {finite.min():g} to "
            f"{finite.max():g}"
        )
    images = require("scipy.ndimage", "scenes")
    labels, parts = images.label(inside)
    voxels = np.bincount(labels.ravel())
    voxels[0] = 0  # what is outside
    kept = voxels >= max(1.0, _SPECKS * voxels.max())
    if keep is not None:
        kept = np.zeros(len(voxels), bool)
        kept[np.argsort(-voxels, kind="stable")[: min(keep, parts)]] = True
    inside = kept[labels]
    if grow:
        inside = images.binary_dilation(inside, iterations=grow)
    return SampleMask(inside, threshold, brighter, int(kept.sum()), parts)


def otsu_threshold(values: NDArray[Any]) -> tuple[float, bool]:
    """Otsu's threshold of the logarithm of the distance from the background's end.

    Args:
        values: Intensities, finite and of at least two values.

    Returns:
        The threshold, and True where the sample is brighter than it.
    """
    low, high = np.percentile(values, (0.1, 99.9))
    if low == high:
        low, high = values.min(), values.max()
    clipped = np.clip(values.astype(np.float64), low, high)
    counts, edges = np.histogram(clipped, _BINS // 4)
    brighter = bool(edges[np.argmax(counts)] < (low + high) / 2)
    unit = (high - low) / _BINS  # so that the noise of the background is not all there is
    distance = clipped - low if brighter else high - clipped
    counts, edges = np.histogram(np.log(distance + unit), _BINS)
    sums = np.cumsum(counts * (edges[1:] + edges[:-1]) / 2)
    less = np.cumsum(counts)
    more = less[-1] - less
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = less * more * np.square(sums / less - (sums[-1] - sums) / more)
    cut = math.exp(edges[1:][np.nanargmax(apart)]) - unit
    return float(low + cut if brighter else high - cut), brighter


def mask_sink(path: str, view: CoarseView, *, overwrite: bool, name: str = "OUT") -> Sink:
    """The OME-Zarr that a mask of the view is written to. Nothing is created.

    Args:
        path: Its place.
        view: The coarse view, over which it lies.
        overwrite: Replace a store that is there.
        name: The flag that messages name.

    Returns:
        The sink, whose domain is that of the view.

    Raises:
        UsageError: It cannot be written, is there already, or is the input.
    """
    axes = "".join(axis for axis in view.source.axes if axis in "zyx")
    like = open_array_source(np.empty(view.array.shape[3 - len(axes) :], "uint8"), name=name)
    like.scale, like.translation = (1.0, 1.0, *view.scale), (0.0, 0.0, *view.translation)
    like.units = (None, None, *view.source.units[2:])
    sink = open_sink(
        path, domain=like.domain, dtype=np.dtype("uint8"), like=like, overwrite=overwrite, name=name
    )
    refuse_overlap(name, sink, {"the input": view.source})
    return sink


def write_mask(mask: SampleMask, sink: Sink) -> None:
    """Write a mask: 1 where the sample is.

    Args:
        mask: The mask.
        sink: Where to, as `mask_sink` gives it.
    """
    create_anew(sink)
    sink.write(sink.domain, mask.inside.astype(np.uint8)[None, None])
    sink.close()
