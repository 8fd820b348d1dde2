"""What a trained network returns, as its recipe says: probabilities in place of logits, and the
numbers of its target in place of those on the scale that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .load import Model, named_heads
from .recipe import HeadRecipe


class _AsTrained(nn.Module):
    """A network that gives each head what its training was for."""

    def __init__(
        self, name: str, module: nn.Module, heads: Mapping[str, HeadRecipe], rescaled: bool
    ) -> None:
        super().__init__()
        self.name, self.module, self.recipes, self.rescaled = name, module, heads, rescaled

    def forward(self, x: Tensor) -> Any:
        heads = named_heads(self.name, self.module(x))
        return {name: self._meant(head, self.recipes.get(name)) for name, head in heads.items()}

    def _meant(self, output: Tensor, head: HeadRecipe | None) -> Tensor:
        if head is not None and head.activation is not None:
            return probabilities_of(output.float(), exclusive=head.activation == "softmax")
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
        model: The model, with its recipe.
        rescaled: Whether intensities go back to the scale of their target.

    Returns:
        The model, itself where no recipe says otherwise, and a sentence for each head that changes.
    """
    heads = {} if model.recipe is None else model.recipe.heads
    notes = []
    for name, head in heads.items():
        if head.activation is not None:
            notes.append(
                f"{name} becomes probabilities, the {head.activation} of what the model returns"
            )
        elif head.scaling is not None and rescaled:
            lower, scale = head.scaling
            values = f"0 becomes {lower:g} and 1 {lower + scale:g}"
            notes.append(f"{name} goes back to the scale of its target: {values}")
    if not notes or model.recipe is None:
        return model, []
    why = f", as {model.recipe.place} says; --head-kind turns that off"
    module = _AsTrained(model.name, model.module, heads, rescaled)
    return replace(model, module=module), [note + why for note in notes]
