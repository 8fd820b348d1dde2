"""What a trained network returns, as its record says: probabilities in place of logits, and the
numbers of its target in place of those on the scale that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..base import RESULTS
from .load import Model, named_heads
from .training_record import TrainedHead


class _AsTrained(nn.Module):
    """A network that gives each head what its training was for."""

    def __init__(
        self, name: str, module: nn.Module, trained: Mapping[str, TrainedHead], rescaled: bool
    ) -> None:
        super().__init__()
        self.name, self.module, self.trained, self.rescaled = name, module, trained, rescaled

    def forward(self, x: Tensor) -> Any:
        heads = named_heads(self.name, self.module(x))
        return {name: self._meant(head, self.trained.get(name)) for name, head in heads.items()}

    def _meant(self, output: Tensor, head: TrainedHead | None) -> Tensor:
        if head is not None and head.returns == "logits":
            return probabilities_of(output.float(), exclusive=head.exclusive)
        if head is not None and head.scaling is not None and self.rescaled:
            lower, scale = head.scaling
            return output.float() * scale + lower
        return output


def probabilities_of(logits: Tensor, *, exclusive: bool) -> Tensor:
    """The probabilities that logits stand for.

    Args:
        logits: Of shape (batch, channels, sides).
        exclusive: Whether those of a voxel sum to 1.

    Returns:
        The probabilities, in the same shape.
    """
    return logits.softmax(1) if exclusive else logits.sigmoid()


def as_trained(model: Model, *, rescaled: bool = True) -> tuple[Model, list[str]]:
    """A model whose outputs are what its training was for.

    Args:
        model: The model, with the record of its training.
        rescaled: Whether intensities go back to the scale of their target.

    Returns:
        The model, itself where no record says otherwise, and a sentence for each head that changes.

    Raises:
        UsageError: The record is damaged.
    """
    trained = {} if model.trained is None else model.trained.heads
    notes = []
    for name, head in trained.items():
        if head.returns == "logits":
            function = "softmax" if head.exclusive else "sigmoid"
            notes.append(f"{name} becomes probabilities, the {function} of what the model returns")
        elif head.scaling is not None and rescaled:
            lower, scale = head.scaling
            values = f"0 becomes {lower:g} and 1 {lower + scale:g}"
            notes.append(f"{name} goes back to the scale of its target: {values}")
    if not notes or model.trained is None:
        return model, []
    why = f", as {model.trained.place / RESULTS} says; --head-kind turns that off"
    module = _AsTrained(model.name, model.module, trained, rescaled)
    return replace(model, module=module), [note + why for note in notes]
