"""Pairs of arrays: a model learns to predict one array from another, tile by tile.

    in_spec      ├──────────── train ────────────┼── val ──┤      the same cut of both arrays
    target_spec  ├──────────── train ────────────┼── val ──┤

Any model and array of `infer` can be trained on here, and `infer` runs the ``best_model.pth`` of
the training: noisy to clean, one modality to another, coarse labels to fine. The part for
validation is the end of one axis, so no voxel is in both parts. Both arrays get the same scaling,
by percentiles of the input; the score is the PSNR on that scale, where the range is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...base import TrainConfig, UsageError
from ...data import AXES, Box, Histogram, Scaling, Source, open_source
from ...loading import PatchGrid
from ...models import load_model
from . import Answer

_VAL = 0.15
"""The smallest fraction of the array that is kept for validation."""
_CHANNEL = AXES.index("c")


class Pairs:
    """The workload that predicts one array from another."""

    name = "pairs"
    judge = "val_psnr"
    higher_is_better = True
    feeds_by_threads = True  # an open store does not work in a forked process

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        for flag in ("in_spec", "target_spec"):
            if getattr(config, flag) is None:
                raise UsageError(f"--{flag.replace('_', '-')} is required by pairs: an array")
        source, target = (
            open_source(spec, axes=config.axes, series=config.series, name=name)
            for spec, name in (
                (config.in_spec, "--in-spec"),
                (config.target_spec, "--target-spec"),
            )
        )
        torch.manual_seed(config.seed)
        self._model = load_model(
            config.model, None, config.channels, untrained=True, trust=config.trust_model
        )
        if not any(p.requires_grad for p in self._model.module.parameters()):
            raise UsageError(f"--model {config.model} has no parameters to train")
        channels = source.domain.shape[_CHANNEL]
        if self._model.says_channels and channels != self._model.in_channels:
            raise UsageError(
                f"--in-spec has {channels} channels; model {config.model} takes "
                f"{self._model.in_channels} (see --channels)"
            )
        if _extent(source) != _extent(target):
            raise UsageError(
                f"--target-spec is of extent {_extent(target)} along t z y x and --in-spec of "
                f"{_extent(source)}; they must be equal"
            )
        tile = _tile(config, self._model.spatial_axes)
        train, val = split(source.domain.shape, tile)
        scaling = _scaling(Tiles(source, target, train, tile, Scaling()), config)
        self.train = Tiles(source, target, train, tile, scaling)
        self.val = Tiles(source, target, val, tile, scaling)
        self.facts = {"model": config.model, "scaling": asdict(scaling)}
        self.notes = [note for each in (source, target) for note in getattr(each, "notes", ())]
        if source.fingerprint == target.fingerprint:
            self.notes.append(
                f"--target-spec {target.name} is --in-spec itself: all that there is to learn is "
                "to return what is given"
            )

    def model(self) -> nn.Module:
        return self._model.module

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        made, target = self._made(model, batch)
        return functional.mse_loss(made, target), {}

    def answers(self, model: nn.Module, batch: Any) -> Sequence[Answer]:
        made, target = self._made(model, batch)
        columns = {"error": _errors(made, target)}
        given = batch[0].float()
        if given.shape == target.shape:
            columns["given"] = _errors(given, target)
        return [
            dict(zip(columns, errors, strict=True))
            for errors in zip(*columns.values(), strict=True)
        ]

    def scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        scores = {"val_psnr": _psnr([answer["error"] for answer in answers.values()])}
        if all("given" in answer for answer in answers.values()):
            scores["val_psnr_input"] = _psnr([answer["given"] for answer in answers.values()])
        return scores

    def _made(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        given, target = batch
        dtype = next(self._model.module.parameters()).dtype
        heads = self._model.heads(model(given.to(dtype)))
        if len(heads) > 1:
            raise UsageError(
                f"--model {self.config.model} has {len(heads)} heads ({', '.join(heads)}); pairs "
                "trains one"
            )
        (made,) = heads.values()
        if made.shape != target.shape:
            raise UsageError(
                f"--model {self.config.model} makes {tuple(made.shape[1:])} of a tile and "
                f"--target-spec has {tuple(target.shape[1:])} (channels, sides)"
            )
        return made.float(), target.float()


@dataclass(frozen=True)
class Tiles:
    """The tiles of a part of two arrays, by index: pairs of scaled float32 (channels, *sides)."""

    source: Source
    target: Source
    part: Box
    """The region of t c z y x that may be read, relative to the array's origin."""
    tile: PatchGrid
    scaling: Scaling

    def __len__(self) -> int:
        return math.prod(self._counts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        given, target = (self._read(source, index) for source in (self.source, self.target))
        return given, target

    @property
    def _outer(self) -> tuple[int, ...]:
        """The axes along which a tile has length 1."""
        return tuple(i for i in range(len(AXES)) if i != _CHANNEL and i not in self.tile.axes)

    @property
    def _counts(self) -> tuple[int, ...]:
        shape = self.part.shape
        inner = self.tile.counts([shape[axis] for axis in self.tile.axes])
        return (*(shape[axis] for axis in self._outer), *inner)

    def _read(self, source: Source, index: int) -> Tensor:
        place = [int(i) for i in np.unravel_index(index, self._counts)]
        outer, inner = place[: len(self._outer)], place[len(self._outer) :]
        lengths = [self.part.shape[axis] for axis in self.tile.axes]
        offsets = dict(zip(self._outer, outer, strict=True))
        offsets |= dict(zip(self.tile.axes, self.tile.start(inner, lengths), strict=True))
        sizes = dict(zip(self.tile.axes, self.tile.shape, strict=True))
        sizes[_CHANNEL] = source.domain.shape[_CHANNEL]
        start = [first + offsets.get(axis, 0) for axis, first in enumerate(self.part.start)]
        shape = [sizes.get(axis, 1) for axis in range(len(AXES))]
        box = Box.of(start, shape).shift(source.domain.start)
        array = source.read(box).squeeze(self._outer).astype(np.float32)
        array -= np.float32(self.scaling.lower)
        array /= np.float32(self.scaling.scale)
        return torch.from_numpy(np.nan_to_num(array, copy=False, nan=0.0, posinf=0.0, neginf=0.0))


def split(shape: Sequence[int], tile: PatchGrid) -> tuple[Box, Box]:
    """Cut t c z y x into parts for training and validation, along the axis where validation needs
    the smallest fraction. Raises `UsageError` if a part has no room for a tile.

    >>> tile = PatchGrid((64, 64), axes=(3, 4))
    >>> [part.shape for part in split((1, 1, 20, 128, 512), tile)]
    [(1, 1, 17, 128, 512), (1, 1, 3, 128, 512)]
    """
    sizes = {axis: 1 for axis in range(len(shape)) if axis != _CHANNEL}
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


def _extent(source: Source) -> tuple[int, ...]:
    shape = source.domain.shape
    return tuple(shape[axis] for axis in range(len(shape)) if axis != _CHANNEL)


def _tile(config: TrainConfig, spatial_axes: int | None) -> PatchGrid:
    sides = tuple(int(side) for side in config.tile_size.split("x"))
    if len(sides) == 1:
        sides *= spatial_axes or 2
    if spatial_axes not in (None, len(sides)) or len(sides) not in (2, 3):
        raise UsageError(
            f"--tile-size {config.tile_size} has {len(sides)} axes; model {config.model} takes "
            f"{spatial_axes or '2 or 3'}"
        )
    return PatchGrid(sides, axes=tuple(range(len(AXES) - len(sides), len(AXES))))


def _scaling(tiles: Tiles, config: TrainConfig) -> Scaling:
    """The scaling of both arrays: exact percentiles of the input's training part, or a range."""
    lower, upper = config.norm_lower, config.norm_upper
    if config.normalize == "none":
        return Scaling()
    if config.normalize == "fixed":
        return Scaling.of_range(lower, upper, lower, upper)
    histogram = Histogram(np.dtype(np.float32))
    while not histogram.done:
        for index in range(len(tiles)):
            histogram.add(tiles._read(tiles.source, index).numpy())
        histogram.advance((lower, upper))
    return histogram.scaling(lower, upper)


def _errors(made: Tensor, target: Tensor) -> list[float]:
    """The mean square error of each sample."""
    return ((made - target) ** 2).flatten(1).mean(1).tolist()


def _psnr(errors: Sequence[float]) -> float:
    return -10 * math.log10(max(float(np.mean(errors)), 1e-30))
