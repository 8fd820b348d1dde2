"""Pairs of arrays: a model learns to predict one array from another, tile by tile.

    in_spec      ├──────────── train ────────────┼── val ──┤      the same cut of both arrays
    target_spec  ├──────────── train ────────────┼── val ──┤

Any model and array of `infer` can be trained on here, and `infer` runs the ``best_model.pth`` of
the training: noisy to clean, one modality to another, an image to its labels. The part for
validation is the end of one axis, so no voxel is in both parts. The kind of the target (see
`targets`) decides its scale, the loss and the scores (see `objectives`):

    intensity      by percentiles of its own, or as it is with ``--normalize none``; `infer` gives
                   it back on the target's scale
    the others     as they are; a mask is 0 and 1

Input values that are not finite enter as the lower bound, as in `infer`. Target values that are not
finite are in no loss and in no score. Both are counted and said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...base import HeadKind, TargetKind, TrainConfig, UsageError, plural
from ...data import AXES, Box, Scaling, Source, open_source
from ...loading import PatchGrid
from ...models import load_model
from . import Answer
from .objectives import LOSSES, Objective, Returns
from .targets import CHANNEL, Values, count_values, is_of_the_same_quantity, kind_of, percentiles_of

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
            f"--tile-size {config.tile_size} has {plural(len(sides), 'axis')}; model "
            f"{config.model} takes {spatial_axes or '2 or 3'}"
        )
    return PatchGrid(sides, axes=tuple(range(len(AXES) - len(sides), len(AXES))))


_WILD = 100.0
"""The standard deviation of an input at which only a network that ends in a sigmoid or the like
returns nothing but probabilities."""


class Pairs:
    """The workload that predicts one array from another."""

    name = "pairs"
    feeds_by_threads = True  # an open store does not work in a forked process
    leaves_out_not_finite = True

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        source, target = (_array(config, knob) for knob in ("in_spec", "target_spec"))
        torch.manual_seed(config.seed)
        self._model = load_model(
            config.model, None, config.channels, untrained=True, trust=config.trust_model
        )
        self._check_arrays(source, target)
        self._tile = tile_of(config, self._model.spatial_axes)
        parts = split(source.domain.shape, self._tile)
        floats = source.dtype.kind == "f"  # integers are finite
        inputs = count_values(source, parts, "--in-spec") if floats else Values()
        values = count_values(target, parts, "--target-spec")
        scaling = _scaling(source, parts[0], config)
        head, made = self._head(Tiles(source, target, parts[0], self._tile, scaling, scaling))
        channels = target.domain.shape[CHANNEL]
        kind = kind_of(values, inputs, channels, made.shape[1], config.target_kind)
        self._check_made(kind, values, channels, made)
        span, peak = _target_scaling(kind, values, target, parts[0], config)
        loss = config.loss or LOSSES[kind][0]
        returns: Returns = "values"
        if loss in ("bce", "ce", "dice"):
            returns = "probabilities" if self._makes_probabilities(made) else "logits"
        self.objective = objective = Objective(kind, loss, returns, made.shape[1], peak)
        self.judge, self.higher_is_better = objective.judge, objective.higher_is_better
        self.train, self.val = (
            Tiles(source, target, part, self._tile, scaling, span) for part in parts
        )
        self._scalings = scaling, span
        image = kind == "intensity" and (
            config.normalize == "none" or is_of_the_same_quantity(span, scaling)
        )
        self._comparable = image and channels == source.domain.shape[CHANNEL]
        head_kind: HeadKind = "intensity" if image else "scores"
        trained = {
            "kind": head_kind, "target": kind, "loss": loss, "returns": returns,
            "scaling": asdict(span) if kind == "intensity" and span != Scaling() else None,
            "dtype": target.dtype.name if kind == "intensity" else None,
        }  # fmt: skip
        self.facts = {
            "model": config.model,
            "scaling": asdict(scaling),
            "voxel": _voxel(source),
            "heads": {head: trained},
            "not_finite": {"in_spec": inputs.not_finite, "target_spec": values.not_finite},
        }
        read = [note for each in (source, target) for note in getattr(each, "notes", ())]
        self.notes = [*read, self._note(target, values), *_notes_of_values(inputs, values)]
        if trained["scaling"]:
            self.notes.append(
                f"--target-spec {target.name} is scaled by its own percentiles, "
                f"{span.lower:g} to 0 and {span.lower + span.scale:g} to 1; infer gives the output "
                f"back on that scale, in {target.dtype}"
            )
        if source.fingerprint == target.fingerprint:
            self.notes.append(
                f"--target-spec {target.name} is --in-spec itself: all that there is to learn is "
                "to return what is given"
            )

    def model(self) -> nn.Module:
        return self._model.module

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        given, target = batch
        return self.objective.of_batch(self._made(model, given), target.float()), {}

    def answers(self, model: nn.Module, batch: Any) -> Sequence[Answer]:
        given, target = batch
        shown = self._as_target(given.float()) if self._comparable else None
        return self.objective.of_samples(self._made(model, given), target.float(), shown)

    def _as_target(self, given: Tensor) -> Tensor:
        """The input on the scale of the target, to be compared with it."""
        source, target = self._scalings
        return (given * source.scale + (source.lower - target.lower)) / target.scale

    def scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        return self.objective.scores([*answers.values()])

    def name_of(self, index: int) -> str:
        """Where a training sample lies."""
        box = self.train.box(index)
        spans = zip(AXES, box.start, box.stop, strict=True)
        return "the tile " + ", ".join(f"{name} {i}:{j}" for name, i, j in spans if name != "c")

    def _made(self, model: nn.Module, given: Tensor) -> Tensor:
        dtype = next(self._model.module.parameters()).dtype
        (made,) = self._model.heads(model(given.to(dtype))).values()
        return made.float()

    def _check_arrays(self, source: Source, target: Source) -> None:
        config, channels = self.config, source.domain.shape[CHANNEL]
        if not any(p.requires_grad for p in self._model.module.parameters()):
            raise UsageError(f"--model {config.model} has no parameters to train")
        if self._model.says_channels and channels != self._model.in_channels:
            raise UsageError(
                f"--in-spec has {plural(channels, 'channel')}; model {config.model} takes "
                f"{self._model.in_channels} (see --channels)"
            )
        if extent_of(source) != extent_of(target):
            raise UsageError(
                f"--target-spec is of extent {extent_of(target)} along t z y x and --in-spec of "
                f"{extent_of(source)}; they must be equal"
            )

    def _head(self, tiles: Tiles) -> tuple[str, Tensor]:
        """The name of the network's only head, and what it makes of a tile as it is now."""
        heads = self._returned(tiles[0][0][None])
        if len(heads) > 1:
            raise UsageError(
                f"--model {self.config.model} has {plural(len(heads), 'head')} "
                f"({', '.join(heads)}); pairs trains one"
            )
        (named,) = heads.items()
        return named

    def _returned(self, batch: Tensor) -> dict[str, Tensor]:
        dtype = next(self._model.module.parameters()).dtype
        with torch.no_grad():
            return self._model.heads(self._model.module(batch.to(dtype)))

    def _makes_probabilities(self, made: Tensor) -> bool:
        """Whether the network ends in a sigmoid, a softmax or the like: it returns nothing outside
        0 to 1, whatever it is shown."""
        drawn, shape = torch.Generator().manual_seed(0), self._tile.shape
        wild = _WILD * torch.randn(1, self._model.in_channels, *shape, generator=drawn)
        shown = [made, *self._returned(wild).values()]
        return all(bool(((each >= 0) & (each <= 1)).all()) for each in shown)

    def _check_made(self, kind: TargetKind, values: Values, channels: int, made: Tensor) -> None:
        """Refuse a network whose head does not fit the target, and a loss that does not."""
        config, outputs = self.config, made.shape[1]
        if kind == "labels" and not values.are_classes(channels, outputs):
            said = "" if config.target_kind else "; if it is an image, say --target-kind intensity"
            raise UsageError(
                f"--target-spec has labels ({plural(channels, 'channel')}, {values.text}), and "
                "these need one channel, NaN where there is no class, and a model with a channel "
                f"for each class from 0 on: --model {config.model} makes "
                f"{plural(outputs, 'channel')}{said}"
            )
        wanted = (outputs if kind == "labels" else channels, *self._tile.shape)
        if made.shape[1:] != wanted:
            raise UsageError(
                f"--model {config.model} makes {tuple(made.shape[1:])} of a tile and "
                f"--target-spec has {wanted} (channels, sides)"
            )
        fitting = [each for each in LOSSES[kind] if each != "ce" or outputs > 1]
        if config.loss is not None and config.loss not in fitting:
            raise UsageError(
                f"--loss {config.loss} does not fit a target of {kind} in "
                f"{plural(outputs, 'channel')}; these do: {', '.join(fitting)}"
            )

    def _note(self, target: Source, values: Values) -> str:
        ours = self.objective
        said = "" if self.config.target_kind else ", as its values say (--target-kind sets another)"
        best = "highest" if ours.higher_is_better else "lowest"
        return (
            f"--target-spec {target.name}, {values.text}, is {ours.kind}{said}; the loss is "
            f"{ours.loss} of the model's {ours.returns}, the best epoch has the {best} {ours.judge}"
        )


def _voxel(source: Source) -> dict[str, Any] | None:
    """Size and unit of a voxel along z y x; None if they are not said, or units differ."""
    units = set(source.units[2:])
    if source.scale is None or len(units) > 1 or not all(units):
        return None
    return {"size": [*source.scale[2:]], "unit": units.pop()}


def _array(config: TrainConfig, knob: str) -> Source:
    """The array that a knob names. Raises `UsageError` if it is none that can be read."""
    flag = f"--{knob.replace('_', '-')}"
    if getattr(config, knob) is None:
        raise UsageError(f"{flag} is required by pairs: an array")
    return open_source(
        getattr(config, knob), axes=config.axes, series=config.series, raw=config.raw, name=flag
    )


def _notes_of_values(inputs: Values, values: Values) -> list[str]:
    """Sentences on values that are not finite."""
    return [
        f"{of.not_finite:,} of {plural(of.count, 'value')} of {flag} are not finite and are {what}"
        for flag, of, what in (
            ("--in-spec", inputs, "seen as the lower bound"),
            ("--target-spec", values, "left out of loss and scores"),
        )
        if of.not_finite
    ] + [f"--target-spec has no other value than {values.text}"] * (values.low == values.high)


def _scaling(source: Source, part: Box, config: TrainConfig) -> Scaling:
    """The scaling of the input: exact percentiles of its training part, or a range."""
    lower, upper = config.norm_lower, config.norm_upper
    if config.normalize == "none":
        return Scaling()
    if config.normalize == "fixed":
        return Scaling.of_range(lower, upper, lower, upper)
    return percentiles_of(source, part, lower, upper)


def _target_scaling(
    kind: str, values: Values, target: Source, part: Box, config: TrainConfig
) -> tuple[Scaling, float]:
    """The scaling of the target, and the range of an image on that scale."""
    if kind != "intensity":
        return Scaling(0.0, values.high or 1.0) if kind == "mask" else Scaling(), 1.0
    fields = TrainConfig.model_fields
    lower, upper = fields["norm_lower"].default, fields["norm_upper"].default
    if config.normalize == "global":
        lower, upper = config.norm_lower, config.norm_upper
    span = percentiles_of(target, part, lower, upper)
    return (Scaling(), span.scale) if config.normalize == "none" else (span, 1.0)
