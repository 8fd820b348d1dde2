"""What `info` and `inspect` say of a model: its facts in words; whether it passes the test that its
package brings; and whether the last bits of an output change with what should not matter to them,
such as the other samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base import UsageError, plural
from ..data import in_words, normalised
from .changed_heads import Reduction, as_trained
from .load import Model
from .recipe import AS_IT_IS, HeadRecipe, Recipe

BITS_SIDE = 32
"""Side of the patches whose bits are compared. Kernels are picked by shape, so those of others may
differ."""


def model_lines(model: Model) -> Iterator[tuple[str, str]]:
    """What a model holds, as pairs of a word and a text.

    Args:
        model: The model.

    Returns:
        The pairs, in the order in which they are read.

    Raises:
        UsageError: Its values are normalised in a way that is not done.
    """
    axes = f"{model.spatial_axes}-D" if model.spatial_axes else "2-D or 3-D"
    channels = plural(model.in_channels, "channel")
    size = f", {plural(model.parameters, 'parameter')}" if model.parameters else ""  # ONNX: none
    yield "network", f"{axes}{size}, takes {channels}"
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
    if recipe.refused:
        raise UsageError(recipe.refused)


def _values(recipe: Recipe) -> str:
    if recipe.refused:
        return "as is not done here"
    if not recipe.normalisation:
        return "not said; infer takes percentiles of the whole volume"
    lines = [how.line() for how in recipe.normalisation]
    return lines[0] if len(set(lines)) == 1 else "; ".join(lines)


def _head(head: HeadRecipe, reduce: str | None) -> str:
    steps: list[str] = [head.activation] if head.activation else []
    if head.scaling not in (None, AS_IT_IS):
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


def bits_that_vary(model: Model, axes: int, compiled: bool = False) -> dict[str, bool | None]:
    """Whether the last bits of an output depend on what does not concern it.

    Args:
        model: The model, which is run as it is.
        axes: The number of axes that it is given, 2 or 3.
        compiled: Compare with what `torch.compile` makes of it, too, which takes up to minutes.

    Returns:
        For ``batch``, the other samples of a batch, for ``threads``, the number of torch's threads,
        and for ``compile``: whether bits depend on it. None if the network cannot be run to see it.
    """
    threads = torch.get_num_threads()
    shape = (2, model.in_channels, *[BITS_SIDE] * axes)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)

    def forward(batch: Tensor, module: Callable[[Tensor], Any] = model.module) -> Tensor:
        return torch.cat([head[0] for head in model.heads(module(batch.clone())).values()])

    varies: dict[str, bool | None] = {"batch": None, "threads": None}
    if compiled:
        varies["compile"] = None
    try:
        with torch.no_grad():
            torch.set_num_threads(1)
            alone = forward(x[:1])
            varies["batch"] = not torch.equal(alone, forward(x))
            torch.set_num_threads(2)
            varies["threads"] = not torch.equal(alone, forward(x[:1]))
            if compiled:
                torch.set_num_threads(1)
                faster = torch.compile(model.module, dynamic=False)
                varies["compile"] = not torch.equal(alone, forward(x[:1], faster))
    except Exception:  # of a user's network, which takes no such batch
        return varies
    finally:
        torch.set_num_threads(threads)
    return varies
