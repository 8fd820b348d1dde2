"""The settings of a job with what its network's makers say, where the user says nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...base import InferConfig
from ...data import SAME
from ...models import Recipe, Sliding
from .heads import HeadPlan


def with_defaults(config: InferConfig, recipe: Recipe | None) -> tuple[InferConfig, list[str]]:
    """The settings with the patch, overlap, window and reduction of a recipe.

    Args:
        config: The settings of the user, which win.
        recipe: The recipe of the network; None if it has none.

    Returns:
        The settings, and a sentence on those that the recipe gave.
    """
    if recipe is None:
        return config, []
    said, update = config.model_fields_set, dict[str, Any]()
    plane = recipe.patch is not None and recipe.patch[0] == 1
    for name in ("patch", "overlap"):
        value = getattr(recipe, name)
        if value is not None and name not in said and "patch" not in said:
            update[name] = value[1:] if plane else value
    if recipe.sliding is not None and not {"seam_mode", "window", "trim_voxels"} & said:
        update |= {"seam_mode": "blend", "window": recipe.sliding.window}
    if recipe.reduce is not None and not {"reduce", "head_kind"} & said:
        update["reduce"] = recipe.reduce
    given = [f"--{name.replace('_', '-')} {_shown(value)}" for name, value in update.items()]
    notes = [f"{' '.join(given)}, as {recipe.place} says"] if given else []
    if recipe.mirrors and config.tta is None:
        notes.append(
            f"its makers take the mean over mirrored inputs, as --tta flips does ({recipe.place})"
        )
    return config.model_copy(update=update), [*notes, *recipe.notes]


def sliding_of(config: InferConfig, recipe: Recipe | None, heads: Iterable[HeadPlan]) -> Sliding:
    """Where patches lie and how they are joined.

    Args:
        config: The settings, with those of the recipe.
        recipe: The recipe of the network; None if it has none.
        heads: The heads. A voxel that comes from one patch lies in the middle of its context, and
            one of a coarser grid begins at a whole stride.

    Returns:
        What the recipe says of the window that the settings have, else what that window says.
    """
    if config.seam_mode == "trim" or config.window in (None, "cosine"):
        return Sliding()
    its, heads = recipe and recipe.sliding, list(heads)
    sliding = its if its and its.window == config.window else Sliding(config.window, "inset")
    if not all(head.summed for head in heads):
        return replace(sliding, steps="context", fill=None)
    if any(head.grid.factors != SAME for head in heads):
        return replace(sliding, steps="inset", fill=None)
    return sliding


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
