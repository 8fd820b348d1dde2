"""A model in words, and whether it makes of its test tensors what its package says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..base import UsageError, plural
from ..data import in_words, normalised
from .changed_heads import Reduction, as_trained
from .load import Model
from .recipe import HeadRecipe, Recipe


def model_lines(model: Model) -> Iterator[tuple[str, str]]:
    """What a model holds, as pairs of a word and a text.

    Args:
        model: The model.

    Returns:
        The pairs, in the order in which they are read.
    """
    axes = f"{model.spatial_axes}-D" if model.spatial_axes else "2-D or 3-D"
    channels = plural(model.in_channels, "channel")
    yield "network", f"{axes}, {model.parameters:,} parameters, takes {channels}"
    recipe = model.recipe or Recipe("")
    if recipe.channels:
        yield "channels", ", ".join(recipe.channels)
    yield "values", _values(recipe)
    if recipe.orientation:
        yield "directions", f"x, y and z run along {', '.join(recipe.orientation)}"
    if recipe.spacing is not None:
        sizes = zip("zyx", recipe.spacing, strict=True)
        shown = ", ".join(f"{axis} {size:g}" for axis, size in sizes if size == size)
        yield "voxel", f"{shown} {recipe.unit}"
    if recipe.patch is not None:
        overlap = f", overlap {in_words(recipe.overlap)}" if recipe.overlap else ""
        window = f", joined by a {recipe.sliding.window} window" if recipe.sliding else ""
        yield "patch", f"{in_words(recipe.patch)}{overlap}{window}"
    for name, head in recipe.heads.items():
        yield f"head {name}", _head(head, recipe.reduce)
    if recipe.mirrors is not None:
        spatial = "zyx"[-(model.spatial_axes or 3) :]
        yield "mirrors", " ".join(spatial[axis] for axis in recipe.mirrors) or "none"
    for note in recipe.notes:
        yield "note", note


def _values(recipe: Recipe) -> str:
    if recipe.refused:
        return recipe.refused
    if not recipe.normalisation:
        return "not said; infer takes percentiles of the whole volume"
    lines = [how.line() for how in recipe.normalisation]
    return lines[0] if len(set(lines)) == 1 else "; ".join(lines)


def _head(head: HeadRecipe, reduce: str | None) -> str:
    steps: list[str] = [head.activation] if head.activation else []
    if head.scaling is not None:
        steps.append(f"times {head.scaling[1]:g} plus {head.scaling[0]:g}")
    if reduce is not None:
        steps.append(reduce)
    return f"{head.kind}{''.join(f', then {step}' for step in steps)}"


def run_test(model: Model) -> tuple[bool, str]:
    """Run a model on the test tensors of its package.

    Args:
        model: The model.

    Returns:
        Whether it makes of them what the package says, and a sentence.

    Raises:
        UsageError: It has no test tensors.
    """
    if model.tests is None or model.recipe is None:
        raise UsageError(f"model {model.name} has no test tensors")
    tensors, recipe = model.tests(), model.recipe
    given = tensors.given.astype(np.float64)
    if recipe.normalisation:
        given = normalised(given[0], recipe.normalisation)[None]
    ready, _ = as_trained(model)
    with torch.no_grad():
        heads = ready.heads(ready.module(torch.from_numpy(given).to(model.dtype)))
    worst, equal = 0.0, len(heads) == len(tensors.expected)
    for (name, made), expected in zip(heads.items(), tensors.expected, strict=False):
        if recipe.reduce is not None:
            made = Reduction.parse(recipe.reduce).of(name, made, 1)
        array = made.double().numpy()
        if array.shape != expected.shape:
            return False, f"head {name} is of shape {array.shape}, not {expected.shape}"
        away = np.abs(array - expected)
        worst = max(worst, float(away.max()))
        equal &= bool((away <= tensors.absolute + tensors.relative * np.abs(expected)).all())
    verdict = "equal" if equal else "not equal"
    return equal, (
        f"{verdict}: the largest difference from the test tensors is {worst:.3g}, and up to "
        f"{tensors.absolute:g} plus {tensors.relative:g} of a value is allowed"
    )
