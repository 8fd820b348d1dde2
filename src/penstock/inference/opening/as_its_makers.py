"""The settings of a job with what its network's makers say, where the user says nothing.

The scaling of values before the network sees them is as asked, as trained, or by default. A default
never depends on the block: percentiles of the whole volume are counted before the first patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ...base import InferConfig, UsageError
from ...data import SAME, Normalisation, Resampling, Source
from ...models import HeadRecipe, Recipe, Sliding
from ..tiling.geometry import per_axis
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
        # The overlap goes with the patch, so a patch of the user's leaves both open.
        if value is not None and name not in said and "patch" not in said:
            update[name] = value[1:] if plane else value
    if recipe.sliding is not None and not {"seam_mode", "window", "trim_voxels"} & said:
        update |= {"seam_mode": "blend", "window": recipe.sliding.window}
        if config.sides is not None and recipe.patch and recipe.overlap and "overlap" not in said:
            # Their step is a share of the patch.
            sides = per_axis(config.sides, plane=plane, thin=1)
            each = zip(recipe.overlap, sides, recipe.patch, strict=True)
            update["overlap"] = tuple(o * side // whole for o, side, whole in each)[plane:]
    if recipe.reduce is not None and not {"reduce", "head_kind"} & said:
        update["reduce"] = recipe.reduce
    given = [f"--{name.replace('_', '-')} {_shown(value)}" for name, value in update.items()]
    notes = [f"{' '.join(given)}, as {recipe.place} says"] if given else []
    if recipe.mirrors and config.tta is None:
        notes.append(
            f"its makers take the mean over mirrored inputs, as --tta flips does ({recipe.place})"
        )
    return config.model_copy(update=update), notes


def obeyed_heads(
    config: InferConfig, recipe: Recipe | None, source: Source
) -> Mapping[str, HeadRecipe]:
    """What the job does to heads because their recipe says so, by the name of the head.

    Args:
        config: The settings. If they give kinds, nothing that a recipe says is obeyed.
        recipe: The recipe of the network; None if it has none.
        source: The input. If its values are labels, those that the identity returns are the same.
    """
    if config.model_type == "identity":
        holds = "labels" if getattr(source, "holds_labels", False) else "intensity"
        labels = (config.head_kind or [holds])[0].endswith("labels")
        return {"out": HeadRecipe("labels", dtype=source.dtype.name)} if labels else {}
    return recipe.heads if recipe is not None and config.head_kind is None else {}


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


@dataclass(frozen=True, slots=True)
class ValuesPlan:
    """How the values of volumes are normalised."""

    each: tuple[Normalisation, ...]
    """One for all channels of a volume together, or one for each."""
    by_block: bool
    """True if it is done by percentiles of each block."""
    line: str
    """The normalisation in words."""
    trained: bool = False
    """True if it is done as its makers do it."""
    first: bool = False
    """True if it is done before voxels are resampled."""
    limited: bool = False
    """True if resampled voxels are then kept within the limits of the others."""

    @property
    def counted(self) -> bool:
        """True if numbers of whole volumes are counted before the first patch."""
        counts = any(how.counts is not None for how in self.each)
        return self.limited or (counts and not self.by_block)

    @property
    def masked(self) -> bool:
        """True if a mask of each volume is found before its values are counted."""
        return any(how.masked for how in self.each)

    def in_order(self, recipe: Recipe | None, way: Resampling | None, *, everywhere: bool) -> Self:
        """The plan, with values normalised before voxels are resampled if the makers did so.

        Args:
            recipe: The recipe of the network; None if it has none.
            way: How voxels are resampled; None if they are not.
            everywhere: False for a mask of the user, outside of which values have no limits.
        """
        if recipe is None or not recipe.scaled_first or not self.trained:
            return self
        limited = way is not None and way.order > 1 and everywhere
        return replace(self, first=way is not None or self.masked, limited=limited)

    def as_seen(self, way: Resampling | None) -> bool:
        """Whether numbers are counted on the network's grid, as its makers count them. Others are
        of the input's voxels."""
        return not self.first and (way is None or self.trained)

    def passes(self, dtype: np.dtype[Any]) -> int:
        """Times that an input is read to count its values: twice for percentiles of more than 16
        bits."""
        twice = dtype.itemsize > 2 and any(how.counts == "percentiles" for how in self.each)
        return self.counted * (1 + twice) + self.masked


def normalised_as(config: InferConfig, recipe: Recipe | None) -> tuple[InferConfig, ValuesPlan]:
    """The settings with the normalisation decided, and what it is."""
    said = config.asked_normalization
    ranged = config.model_fields_set & {"norm_lower", "norm_upper", "norm_level"}
    if recipe is not None and said is None and not ranged:
        if recipe.refused:
            raise UsageError(recipe.refused)
        if recipe.normalisation:
            return _as_trained(config, recipe)
    by_default = ", by default" if said is None else ""
    config = config.model_copy(update={"normalize": said or "global"})
    lower, upper, least = config.norm_lower, config.norm_upper, config.eps
    counted = "the whole volume"
    if config.mask is not None or config.box is not None:
        counted = "what lies inside " + " and ".join(
            flag
            for flag, value in (("--mask", config.mask), ("--box", config.box))
            if value is not None
        )
    percentiles = Normalisation("percentiles", lower, upper, least)
    fixed = Normalisation(lower=lower, upper=upper, least=least)
    change = ", so they change with --block"
    ways = {
        "none": (Normalisation(), "as they are"),
        "fixed": (fixed, fixed.line()),
        "zscore": (
            Normalisation("moments", least=least),
            f"z-score by mean and deviation of {counted}",
        ),
        "zscore-nonzero": (
            Normalisation("moments", least=least, nonzero=True),
            f"z-score by mean and deviation of what is not 0 in {counted}, and 0 elsewhere",
        ),
        "global": (percentiles, f"percentiles {lower:g} and {upper:g} of {counted}{by_default}"),
        "percentile": (
            percentiles,
            f"percentiles {lower:g} and {upper:g} of each block and its halo{change}",
        ),
    }
    how, line = ways[said or "global"]
    if recipe is not None and (recipe.normalisation or recipe.refused):
        line += f", in place of what {recipe.place} says"
    return config, ValuesPlan((how,), said == "percentile", line)


def _as_trained(config: InferConfig, recipe: Recipe) -> tuple[InferConfig, ValuesPlan]:
    """The settings and values by a recipe."""
    each = recipe.normalisation
    lines = list(dict.fromkeys(how.line() for how in each))
    if len(lines) > 1:
        lines = [f"{name}: {how.line()}" for name, how in zip(_names(recipe), each, strict=True)]
    counted = any(how.counts is not None for how in each)
    update: dict[str, object] = {"normalize": "zscore" if counted else "fixed"}
    if len(each) == 1 and not counted:
        update |= {"norm_lower": each[0].lower, "norm_upper": each[0].upper}
    line = f"{'; '.join(lines)}, as {recipe.place} says"
    return config.model_copy(update=update), ValuesPlan(each, False, line, trained=True)


def _names(recipe: Recipe) -> tuple[str, ...]:
    """Names of the channels of a recipe that has a normalisation for each."""
    numbers = range(len(recipe.normalisation))
    return recipe.channels or tuple(f"channel {number}" for number in numbers)
