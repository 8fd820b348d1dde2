"""Tiles of two arrays of the same extent, and the parts that are trained on and held back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...base import TrainConfig, UsageError
from ...data import AXES, Box, Scaling, Source
from ...loading import PatchGrid
from .targets import CHANNEL

_VAL = 0.15
"""The smallest fraction of the array that is kept for validation."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of a part of two arrays, by index: pairs of scaled float32 (channels, *sides).

    Input values that are not finite are the lower bound, and those of the target stay as they are.
    """

    source: Source
    target: Source
    part: Box
    """The region of t c z y x that may be read, relative to the array's origin."""
    tile: PatchGrid
    scaling: Scaling
    target_scaling: Scaling

    def __len__(self) -> int:
        return math.prod(self._counts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        given = self._read(self.source, self.scaling, index)
        target = self._read(self.target, self.target_scaling, index)
        return torch.from_numpy(
            np.nan_to_num(given, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        ), torch.from_numpy(target)

    @property
    def _outer(self) -> tuple[int, ...]:
        """The axes along which a tile has length 1."""
        return tuple(i for i in range(len(AXES)) if i != CHANNEL and i not in self.tile.axes)

    @property
    def _counts(self) -> tuple[int, ...]:
        shape = self.part.shape
        inner = self.tile.counts([shape[axis] for axis in self.tile.axes])
        return (*(shape[axis] for axis in self._outer), *inner)

    def box(self, index: int, channels: int = 1) -> Box:
        """The region of a tile, relative to the array's origin."""
        place = [int(i) for i in np.unravel_index(index, self._counts)]
        outer, inner = place[: len(self._outer)], place[len(self._outer) :]
        lengths = [self.part.shape[axis] for axis in self.tile.axes]
        offsets = dict(zip(self._outer, outer, strict=True))
        offsets |= dict(zip(self.tile.axes, self.tile.start(inner, lengths), strict=True))
        sizes = {**dict(zip(self.tile.axes, self.tile.shape, strict=True)), CHANNEL: channels}
        start = [first + offsets.get(axis, 0) for axis, first in enumerate(self.part.start)]
        return Box.of(start, [sizes.get(axis, 1) for axis in range(len(AXES))])

    def _read(self, source: Source, scaling: Scaling, index: int) -> NDArray[np.float32]:
        box = self.box(index, source.domain.shape[CHANNEL]).shift(source.domain.start)
        with np.errstate(over="ignore"):
            array = source.read(box).squeeze(self._outer).astype(np.float32)
        array -= np.float32(scaling.lower)
        array /= np.float32(scaling.scale)
        return array


def split(shape: Sequence[int], tile: PatchGrid) -> tuple[Box, Box]:
    """Cut t c z y x into parts for training and validation, along the axis where validation needs
    the smallest fraction. Raises `UsageError` if a part has no room for a tile.

    >>> tile = PatchGrid((64, 64), axes=(3, 4))
    >>> [part.shape for part in split((1, 1, 20, 128, 512), tile)]
    [(1, 1, 17, 128, 512), (1, 1, 3, 128, 512)]
    """
    sizes = {axis: 1 for axis in range(len(shape)) if axis != CHANNEL}
    sizes |= dict(zip(tile.axes, tile.shape, strict=True))
    held = {axis: max(math.ceil(_VAL * shape[axis]), size) for axis, size in sizes.items()}
    fits = [axis for axis in sizes if shape[axis] - held[axis] >= sizes[axis]]
    inside = all(shape[axis] >= size for axis, size in sizes.items())
    if not fits or not inside:
        raise UsageError(
            f"--tile-size {'x'.join(map(str, tile.shape))}: --in-spec, {tuple(shape)} along "
            "t c z y x, has no room for a tile to train on and another to validate on"
        )
    axis = min(fits, key=lambda axis: held[axis] / shape[axis])
    origin, first, last = (0,) * len(shape), list(shape), list(shape)
    first[axis], last[axis] = shape[axis] - held[axis], held[axis]
    by = [first[axis] if i == axis else 0 for i in range(len(shape))]
    return Box.of(origin, first), Box.of(origin, last).shift(by)


def extent_of(source: Source) -> tuple[int, ...]:
    shape = source.domain.shape
    return tuple(shape[axis] for axis in range(len(shape)) if axis != CHANNEL)


def tile_of(config: TrainConfig, spatial_axes: int | None) -> PatchGrid:
    sides = tuple(int(side) for side in config.tile_size.split("x"))
    if len(sides) == 1:
        sides *= spatial_axes or 2
    if spatial_axes not in (None, len(sides)) or len(sides) not in (2, 3):
        raise UsageError(
            f"--tile-size {config.tile_size} has {len(sides)} axes; model {config.model} takes "
            f"{spatial_axes or '2 or 3'}"
        )
    return PatchGrid(sides, axes=tuple(range(len(AXES) - len(sides), len(AXES))))
