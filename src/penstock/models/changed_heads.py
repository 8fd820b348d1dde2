"""What is made of a network's outputs before they leave the device.

as_trained   what its recipe says: probabilities in place of logits, the numbers of its target in
             place of those on the scale that it was trained on
of_views     means over turned and mirrored inputs
reduced      few values for each voxel in place of many scores
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..base import PenstockError, UsageError, plural
from .load import Model, named_heads
from .recipe import AS_IT_IS

Views = Literal["flips", "rotations"]
_FEW = 255
"""Most channels whose numbers are given as uint8."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """Few values for each voxel, made of the scores of its channels.

    >>> Reduction.parse("top:3")
    Reduction(kind='top', limit=0.0, count=3, labels=())
    """

    kind: Literal["argmax", "threshold", "top", "regions"]
    limit: float = 0.0
    """The threshold."""
    count: int = 1
    """Number of channels that `top` keeps."""
    labels: tuple[int, ...] = ()
    """The label of each channel of `regions`; of several above 0 the last one counts."""

    def __str__(self) -> str:
        value = {"argmax": "", "threshold": f":{self.limit:g}", "top": f":{self.count}",
                 "regions": f":{','.join(map(str, self.labels))}"}  # fmt: skip
        return self.kind + value[self.kind]

    @classmethod
    def parse(cls, text: str) -> Reduction:
        """Read ``argmax``, ``threshold:X`` or ``top:K``. Raises `UsageError` for anything else."""
        kind, _, value = text.partition(":")
        with contextlib.suppress(ValueError):
            if kind == "argmax" and not value:
                return cls("argmax")
            if kind == "threshold" and math.isfinite(float(value)):
                return cls("threshold", limit=float(value))
            if kind == "top" and int(value) >= 1:
                return cls("top", count=int(value))
            if kind == "regions":
                return cls("regions", labels=tuple(map(int, value.split(","))))
        raise UsageError(f"--reduce {text} is not argmax, threshold:X or top:K, such as top:3, nor "
            "regions:LABEL,LABEL")  # fmt: skip

    def heads(self, name: str, channels: int) -> dict[str, int]:
        """The outputs that a head of scores becomes, each with its number of channels."""
        if self.kind == "top":
            return dict.fromkeys((f"{name}.labels", f"{name}.scores"), self.count)
        return {name: channels if self.kind == "threshold" else 1}

    def of(self, name: str, scores: Tensor, dim: int) -> Tensor:
        """One output that is made of scores: numbers of channels, 0 and 1, or the scores that are
        kept.

        Args:
            name: Its name, as `heads` has it.
            scores: The scores.
            dim: Their axis of channels.

        Returns:
            The values, with the same axes. Of equal scores the first channel counts.

        Raises:
            PenstockError: A score is not finite.
        """
        channels = scores.shape[dim]
        # Integers would hide it. A NaN makes both ends NaN; `isfinite` would take twice the memory.
        if not scores.is_meta and not all(end.isfinite() for end in scores.aminmax()):
            raise PenstockError(f"head {name} has scores that are NaN or infinite")
        if self.kind == "threshold":
            return (scores > self.limit).to(torch.uint8)
        if self.kind == "regions":
            made = torch.zeros_like(scores.narrow(dim, 0, 1), dtype=self.dtype(channels))
            for channel, label in enumerate(self.labels):
                made[scores.narrow(dim, channel, 1) > 0] = label
            return made
        best, numbers, rest = [], [], scores
        for _ in range(self.count):
            values, places = rest.max(dim, keepdim=True)
            best.append(values)
            numbers.append(places)
            if len(best) < self.count:
                rest = rest.scatter(dim, places, -math.inf)
        if name.endswith(".scores"):
            return torch.cat(best, dim)
        return torch.cat(numbers, dim).to(self.dtype(channels))

    def check(self, name: str, scores: Tensor) -> None:
        """Refuse a head that has no scores, or too few channels.

        Args:
            name: Its name.
            scores: What it returned, of shape (batch, channels, sides).

        Raises:
            UsageError: It cannot be reduced.
        """
        if not scores.is_floating_point():
            raise UsageError(f"--reduce takes scores, and head {name} has {scores.dtype}")
        channels = scores.shape[1]
        if self.kind == "regions" and channels != len(self.labels):
            raise UsageError(
                f"--reduce {self} names {plural(len(self.labels), 'label')} and head {name} has "
                f"{plural(channels, 'channel')}"
            )
        if channels < (2 if self.kind == "argmax" else self.count):
            raise UsageError(f"--reduce {self}: head {name} has {plural(channels, 'channel')}")

    def dtype(self, channels: int) -> torch.dtype:
        """The dtype that holds the numbers of so many channels."""
        most = max(channels, *self.labels, 0) if self.kind != "threshold" else 0
        return torch.uint8 if most <= _FEW else torch.int32


class _Changed(nn.Module):
    """A network each of whose heads becomes one or several others."""

    def __init__(self, model: Model, change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        # The network is a module of this one, not a variable of ``change``: a copy on a device has
        # a copy of it.
        self.name, self.module, self.change = model.name, model.module, change

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, head in named_heads(self.name, self.module(x)).items():
            made.update(self.change(name, head))
        return made


def probabilities_of(logits: Tensor, *, exclusive: bool) -> Tensor:
    """The probabilities that logits stand for.

    Args:
        logits: Of shape (batch, channels, sides).
        exclusive: Whether those of a voxel sum to 1.

    Returns:
        The probabilities, in the same shape.
    """
    return logits.softmax(1) if exclusive else logits.sigmoid()


def to_probabilities_(logits: NDArray[Any], *, exclusive: bool) -> None:
    """Turn an array of logits into probabilities, in place.

    The bits of a voxel depend on its own logits alone. With torch's functions they would depend on
    the shape of the array as well.

    Args:
        logits: Of shape (channels, sides).
        exclusive: Whether those of a voxel sum to 1.
    """
    if exclusive:
        logits -= logits.max(axis=0)
        np.exp(logits, out=logits)
        total = logits[0].copy()
        for channel in logits[1:]:  # as numpy adds in an order that depends on the shape
            total += channel
        logits /= total
        return
    np.negative(logits, out=logits)
    with np.errstate(over="ignore"):
        np.exp(logits, out=logits)
    logits += 1
    np.reciprocal(logits, out=logits)


def as_trained(
    model: Model, *, rescaled: bool = True, later: bool = False
) -> tuple[Model, list[str]]:
    """A model with the outputs that its training aimed at: probabilities in place of logits, and
    intensities on the scale of their target.

    Args:
        model: The model, with its recipe.
        rescaled: Whether intensities go back to the scale of their target.
        later: Whether probabilities are made once patches are blended. The model then gives logits.

    Returns:
        The model, itself where no recipe says otherwise, and a sentence for each head that changes.
    """
    recipes = {} if model.recipe is None else model.recipe.heads
    notes = []
    for name, head in recipes.items():
        if head.activation is not None:
            notes.append(
                f"{name} becomes probabilities, the {head.activation} of what the model returns"
            )
        elif head.scaling not in (None, AS_IT_IS) and rescaled:
            lower, scale = head.scaling
            values = f"0 becomes {lower:g} and 1 {lower + scale:g}"
            notes.append(f"{name} goes back to the scale of its target: {values}")
    if not notes or model.recipe is None:
        return model, []
    why = f", as {model.recipe.place} says; --head-kind turns that off"

    def meant(name: str, output: Tensor) -> dict[str, Tensor]:
        head = recipes.get(name)
        if head is not None and head.activation is not None:
            exclusive = head.activation == "softmax"
            made = output if later else probabilities_of(output.float(), exclusive=exclusive)
            return {name: made}
        if head is not None and head.scaling is not None and rescaled:
            lower, scale = head.scaling
            return {name: output.float() * scale + lower}
        return {name: output}

    return replace(model, module=_Changed(model, meant)), [note + why for note in notes]


class _OfViews(nn.Module):
    """A network that gives the mean of what it makes of several views of its input."""

    def __init__(self, model: Model, views: Views) -> None:
        super().__init__()
        self.name, self.module, self.views = model.name, model.module, views
        self.axes = None if model.recipe is None else model.recipe.mirrors

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        count = 0
        for turn, back in _views(self.views, x.ndim, self.axes):
            for name, output in named_heads(self.name, self.module(turn(x))).items():
                if not output.is_floating_point():
                    raise UsageError(f"--tta: head {name} of model {self.name} has no mean")
                view = back(output).float()
                total[name] = total[name] + view if name in total else view
            count += 1
        return {name: each / count for name, each in total.items()}


Turn = Callable[[Tensor], Tensor]


def _views(views: Views, ndim: int, axes: tuple[int, ...] | None) -> Iterator[tuple[Turn, Turn]]:
    """Functions that turn a batch, and their inverses. The first changes nothing. ``axes`` are
    those that may be flipped, None for all."""
    if views == "rotations":
        for quarter in range(4):
            yield (
                partial(torch.rot90, k=quarter, dims=(-2, -1)),
                partial(torch.rot90, k=-quarter, dims=(-2, -1)),
            )
        return
    spatial = range(2, ndim) if axes is None else [2 + axis for axis in axes]
    for count in range(len(spatial) + 1):
        for chosen in itertools.combinations(spatial, count):
            flip = partial(torch.flip, dims=chosen)
            yield flip, flip


def of_views(model: Model, views: Views) -> Model:
    """A model that gives the mean over mirrored or turned inputs.

    Args:
        model: The model.
        views: ``flips``: along each spatial axis that its recipe allows, in all combinations;
            ``rotations``: by quarters in the plane of y and x.

    Returns:
        The model. Its forward takes as many times as long as there are views.
    """
    return replace(model, module=_OfViews(model, views))


def reduced(model: Model, reduction: Reduction, *, later: bool) -> Model:
    """A model whose scores are reduced.

    Args:
        model: The model.
        reduction: How.
        later: Whether that is done once they are blended. If not, they are reduced before they
            leave the device.

    Returns:
        The model, with the heads that `Reduction.heads` names. Those to reduce later have all
        channels.
    """

    def change(name: str, scores: Tensor) -> dict[str, Tensor]:
        reduction.check(name, scores)
        parts = reduction.heads(name, scores.shape[1])
        return {part: scores if later else reduction.of(part, scores, 1) for part in parts}

    return replace(model, module=_Changed(model, change), kind=None)
