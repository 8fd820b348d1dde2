"""A scene cut into windows that overlap, each pixel owned by one of them.

    scene   0 ├──────────────────────────────────────────────────┤ rows (and columns likewise)
    chips     ├──────── chip 0 ────────┤                           chip_size pixels
                                ├──────── chip 1 ────────┤         overlap of neighbours
                                         ├──────── chip 2 ───────┤ the last is moved in, not padded
    cores     ├────────── 0 ────────┼──── 1 ────┼──────── 2 ─────┤ each pixel belongs to one chip

An object on the border of one chip lies well inside its neighbour. It belongs to the chip whose
core it is in, so nothing is cut in two and nothing is counted twice. `preprocess` writes a record
of how chips were cut, a training keeps it and `predict` obeys it: so training and prediction cut
scenes alike, and `model_view` shows both to the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, well_formed
from .coarse import Coarse
from .rasters import is_missing
from .scene import CHANNELS, Scene, radar_of

Span = tuple[int, int]
"""First pixel of a half-open range, and the pixel past its last."""


@dataclass(frozen=True, slots=True)
class ChipRecord:
    """How scenes are cut into chips, and what a model sees of them."""

    channels: tuple[str, ...]
    chip_size: int
    """Pixels along a side."""
    overlap: int
    """Pixels that neighbours share."""
    dtype: str
    """The dtype of the radar's values, ``float16`` or ``float32``."""
    scaling: tuple[tuple[float, float], ...]
    """The offset and the scale of each channel: a model sees ``(value - offset) / scale``."""

    @classmethod
    def of(cls, channels: Sequence[str], chip_size: int, overlap: int, dtype: str) -> ChipRecord:
        """The record of chips that are cut now, scaled as `CHANNELS` says."""
        scaling = tuple((CHANNELS[name].offset, CHANNELS[name].scale) for name in channels)
        return cls(tuple(channels), chip_size, overlap, dtype, scaling)

    @classmethod
    def read(cls, document: Mapping[str, Any], where: str) -> ChipRecord:
        """The record in a document.

        Raises:
            UsageError: it has none that can be obeyed; ``where`` names it.
        """
        with well_formed(f"{where} does not say how its chips were cut"):
            values = {field.name: document[field.name] for field in fields(cls)}
            record = cls.of(*(values[name] for name in list(values)[:-1]))
            return replace(record, scaling=tuple((a, b) for a, b in values["scaling"]))

    def cuts(self, size: tuple[int, int]) -> tuple[Cut, Cut]:
        """The cuts of the rows and of the columns of a scene of this size.

        Raises:
            UsageError: the overlap is as large as a window.
        """
        if not 0 <= self.overlap < self.chip_size:
            raise UsageError(
                f"--overlap {self.overlap} must be less than --chip-size {self.chip_size}"
            )
        rows, columns = (Cut(length, self.chip_size, self.overlap) for length in size)
        return rows, columns

    def empty_band(self, columns: Cut) -> NDArray[Any]:
        """An array for a row of windows: NaN of shape (windows, radar channels, y, x)."""
        shape = columns.num, len(radar_of(self.channels)), self.chip_size, self.chip_size
        return np.full(shape, np.nan, self.dtype)

    def as_document(self) -> dict[str, Any]:
        """The record as JSON takes it."""
        return {**asdict(self), "channels": [*self.channels], "scaling": [*map(list, self.scaling)]}

    def told(self, name: str) -> str:
        """One of its values in words, such as ``channels vh,vv``."""
        value = getattr(self, name)
        return f"{name.replace('_', ' ')} {','.join(value) if name == 'channels' else value}"

    def differing(self, other: ChipRecord) -> str:
        """The first thing that a model would see otherwise, as ``channels``; empty if none. How far
        chips overlap changes nothing that it sees."""
        names = [field.name for field in fields(self) if field.name != "overlap"]
        return next((n for n in names if getattr(self, n) != getattr(other, n)), "")


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one axis into chips.

    >>> cut = Cut(length=100, chip=40, overlap=10)
    >>> [cut.read(i) for i in range(cut.num)]
    [(0, 40), (30, 70), (60, 100)]
    >>> [cut.core(i) for i in range(cut.num)]
    [(0, 35), (35, 65), (65, 100)]
    """

    length: int
    chip: int
    overlap: int

    @property
    def num(self) -> int:
        """The number of chips."""
        return max(1, -(-(self.length - self.overlap) // (self.chip - self.overlap)))

    def start(self, index: int) -> int:
        """The first pixel of a chip. A scene shorter than a chip begins where its chip does."""
        return max(0, min(index * (self.chip - self.overlap), self.length - self.chip))

    def read(self, index: int) -> Span:
        """The pixels that a chip sees."""
        return self.start(index), min(self.start(index) + self.chip, self.length)

    def core(self, index: int) -> Span:
        """The pixels that a chip owns: up to the middle of its overlap with each neighbour."""
        first = 0 if index == 0 else (self.start(index) + self.read(index - 1)[1]) // 2
        last = index == self.num - 1
        return first, self.length if last else (self.start(index + 1) + self.read(index)[1]) // 2

    def own(self, index: int) -> Span:
        """The core, counted from the first pixel of the chip."""
        first, stop = self.core(index)
        return first - self.start(index), stop - self.start(index)


def read_row(
    scene: Scene, rows: Cut, index: int, columns: Cut, band: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Fill a row of windows with the radar of a scene, and count their valid pixels.

    Pixels of a window below the scene become NaN; those to the right of it stay as they are.

    Args:
        scene: the open scene.
        rows: the cut of the rows.
        index: the number of the row of windows.
        columns: the cut of the columns.
        band: the array to fill, shape (windows, radar channels, y, x).

    Returns:
        Pixels of each window where every radar channel has a value, shape (windows,), and pixels of
        each radar channel that have a value in the cores, shape (radar channels,).

    Raises:
        UsageError: a raster cannot be read, or the dtype of ``band`` does not hold its values.
    """
    begin, end = rows.read(index)
    band[:, :, end - begin :] = np.nan
    spans = [columns.read(number) for number in range(columns.num)]
    windows = [band[i, :, : end - begin, : stop - first] for i, (first, stop) in enumerate(spans)]
    radar = radar_of(scene.channels)
    for place, name in enumerate(radar):  # stored by lines, so each line is read whole and once
        tall = scene.radar[name].rows_at_once
        edges = [begin, *range((begin // tall + 1) * tall, end, tall), end]
        for first, stop in pairwise(edges):
            lines = scene.read(name, (first, stop), (0, scene.size[1]))
            if band.dtype == np.float16 != lines.dtype and (above := np.abs(lines) >= 65520).any():
                raise UsageError(
                    f"{scene.folder / CHANNELS[name].file} has values such as {lines[above][0]:g}, "
                    "which chips of float16 do not hold; cut them with --dtype float32"
                )
            for window, span in zip(windows, spans, strict=True):
                window[place, first - begin : stop - begin] = lines[:, slice(*span)]
    valid, of_channels = np.zeros(columns.num, np.int64), np.zeros(len(radar), np.int64)
    for number, window in enumerate(windows):
        present = [~is_missing(channel) for channel in window]
        valid[number] = np.logical_and.reduce(present).sum()
        core = slice(*rows.own(index)), slice(*columns.own(number))
        of_channels += [channel[core].sum() for channel in present]
    return valid, of_channels


def planes_of(channels: Sequence[str]) -> int:
    """The number of planes of a model's input: the channels and the masks of `model_view`."""
    return len(channels) + (1 if len(radar_of(channels)) == len(channels) else 2)


def model_view(
    record: ChipRecord,
    radar: NDArray[Any],
    coarse: Mapping[str, Coarse],
    rows: Span,
    columns: Span,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """A model's input for a window. A scaled value depends on nothing else in the window.

    A missing value becomes 0, which may also be a real value; masks tell them apart. The first mask
    is true where every radar channel has a value. Rasters of 500 m lack values elsewhere than the
    radar, and winds in most of a scene. So if there are such rasters, a second mask is true where
    each of them has a value.

    Args:
        record: the channels in the order of the image, and their scaling.
        radar: the radar channels in their own unit, NaN missing, shape (channels, y, x).
        coarse: the other channels.
        rows: half-open rows of the window, inside the scene.
        columns: half-open columns of the window, inside the scene.

    Returns:
        The image (channels, y, x), scaled, and its masks (masks, y, x).
    """
    channels = record.channels
    image = np.full((len(channels), *radar.shape[1:]), np.nan, np.float32)
    inside = slice(rows[1] - rows[0]), slice(columns[1] - columns[0])
    of_radar = radar_of(channels)
    for place, (name, (offset, scale)) in enumerate(zip(channels, record.scaling, strict=True)):
        if name in of_radar:
            image[place] = radar[of_radar.index(name)]
        else:
            image[place][inside] = coarse[name].read(rows, columns)
        image[place] -= np.float32(offset)
        image[place] /= np.float32(scale)
    missing = np.isnan(image)
    image[missing] = 0
    fine = np.array([name in of_radar for name in channels])
    kinds = [missing[fine]] if fine.all() else [missing[fine], missing[~fine]]
    return image, np.stack([~of_kind.any(axis=0) for of_kind in kinds])
