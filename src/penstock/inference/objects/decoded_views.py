"""What a decoder sees: each block of a grid of its own, with a halo, decoded once.

              ├──── core of view 1 ────┤
         ╟╌╌╌╌├────────────────────────┤╌╌╌╌╢     halo: the size of an object
                          ╟╌╌╌╌├───────────────────────┤╌╌╌╌╢  view 2

    folder/views/000012.npy    the labels of view 12, from 1
    folder/views/000012.npz    of each of them: the voxels, the view that has its centroid in its
                               core, whether the edge of the view cuts it, whether it is large

The grid follows from the settings alone. So the labels do, too, whoever decodes which view.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import LabelConfig, UsageError, require
from ...data import Box, Grid, Source, flatten
from .block_record import faces_of, load_table, save_array, save_table
from .decoders import Decoder, check_decoder, opened_decoder
from .label_output import OpensAnew, open_input
from .object_measures import extents_of
from .voxel_runs import runs_of

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
class ViewWork(OpensAnew):
    """The views of a labelling."""

    config: LabelConfig
    grid: Grid
    """The cores."""
    halo: tuple[int, ...]
    """Voxels along z y x."""
    folder: Path

    @cached_property
    def source(self) -> Source:
        """The scores."""
        return open_input(self.config)

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
        if scores.dtype.kind == "f" and np.isnan(scores.max()):
            raise UsageError(f"IN {source.name}: a score near z y x = {_words(box)} is NaN")
        plane = "z" not in source.axes
        decoder: Decoder = self.__dict__["_decoder"]
        labels = decoder(scores[:, 0] if plane else scores).reshape(box.shape[2:])
        labels, _ = require("fastremap", "label").renumber(np.ascontiguousarray(labels))
        seen = self._seen(labels, box)
        save_array(self._file(number, "npy"), labels)
        save_table(self._file(number, "npz"), seen)
        return ""

    def _seen(self, labels: NDArray[Any], box: Box) -> SeenObjects:
        """What is known of the objects of a view."""
        count = int(labels.max(initial=0))
        runs = runs_of(labels, labels)
        low, high, sums = extents_of(runs, labels.shape, count)
        voxels = runs.voxels(count)
        centroids = sums / voxels[:, None] + box.start[2:]
        steps, anchor = self.grid.step[2:], self.grid.anchor[2:]
        cells = np.floor((np.floor(centroids + 0.5) - anchor) / steps).astype(np.int64)
        first = self.grid.cells.start
        cells = cells - first[2:]
        lead = np.full((count, 2), (box.start[0] - first[0], 0), np.int64)
        home = np.ravel_multi_index((*lead.T, *cells.T), self.grid.cells.shape)
        cut = np.zeros(count + 1, bool)
        for *_, face, is_outer in faces_of(labels, box, self.grid.domain):
            if not is_outer:
                cut[np.unique(face)] = True
        large: NDArray[np.bool_] = np.any(high - low > np.maximum(self.halo, 1), axis=1)
        return SeenObjects(home.astype(np.int64), voxels, cut[1:], large)

    def lacking(self, numbers: Iterable[int]) -> list[int]:
        """Those of some views that are not decoded."""
        files = [(n, self._file(n, "npy"), self._file(n, "npz")) for n in numbers]
        return [n for n, *both in files if not all(map(Path.is_file, both))]

    def seen(self, number: int) -> SeenObjects:
        """What is known of the objects of a view."""
        return load_table(self._file(number, "npz"), SeenObjects)

    def labels(self, number: int, box: Box) -> NDArray[Any]:
        """The labels of a view in a box within it (t c z y x), along z y x."""
        with _HEADERS:
            mapped = np.load(self._file(number, "npy"), mmap_mode="r", allow_pickle=False)
        return np.asarray(mapped[box.within(self.view(number))[2:]])

    def around(self, box: Box) -> list[int]:
        """The views that see voxels of a box, in order."""
        halo = (0, 0, *self.halo)
        near = self.grid.touching(box.grow(halo, halo) & self.grid.domain)
        inside = near & self.grid.cells
        places = np.ndindex(*inside.shape)
        cells = (np.add(place, inside.start).tolist() for place in places)
        return [flatten(cell, self.grid.cells) for cell in cells]

    def _file(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:06}.{suffix}"


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
    halo = _along_axes(config.object_size, source, 0)
    core = tuple(max(_CORE, 4 * side) for side in halo)
    if config.instance_block is not None:
        core = _along_axes(config.instance_block, source, 1)
    step = tuple(max(1, min(n, side)) for n, side in zip(core, domain.shape[2:], strict=True))
    return ViewWork(config, Grid(domain, (1, 1, *step), domain.start), halo, folder)


def _along_axes(said: tuple[int, ...], source: Source, plane: int) -> tuple[int, ...]:
    """What is said for all axes or for each, along z y x; ``plane`` along z of a plane."""
    if "z" not in source.axes:
        return (plane, *(said * 2 if len(said) == 1 else said[-2:]))
    return said * 3 if len(said) == 1 else (*(plane,) * (3 - len(said)), *said)


def _words(box: Box) -> str:
    return " ".join(map(str, box.start[2:]))
