"""What the training of a network wanted done to its input and output.

A training writes it into its results, in the folder of its weights:

    RUN/training_results.json     facts: scaling {lower, scale}, head_kind
    RUN/best_model.pth
    RUN/checkpoints/epoch=…pt
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..base import BEST, CHECKPOINTS, RESULTS, HeadKind, read_json
from ..data import Scaling


@dataclass(frozen=True)
class Recipe:
    """The wishes of a network, as its training recorded them."""

    file: Path
    """The results of the training."""
    scaling: Scaling | None
    """The scaling of its input; None if the results do not tell."""
    kind: HeadKind | None
    """The kind of its head; None if the results do not tell."""


def weights_file(weights: Path) -> Path:
    """The file of weights that a path means: the best ones, if it is the folder of a training."""
    return weights / BEST if (weights / RESULTS).is_file() else weights


def recipe_of(weights: Path) -> Recipe | None:
    """The recipe beside a file of weights.

    Args:
        weights: The file, or the folder of a training.

    Returns:
        The recipe; None if the file lies in no folder of a training.

    Raises:
        UsageError: The results of the training cannot be read.
    """
    file = weights_file(weights)
    of_best, of_checkpoint = file.name == BEST, file.parent.name == CHECKPOINTS
    results = file.parents[0 if of_best else 1] / RESULTS if of_best or of_checkpoint else None
    document = read_json(results) if results is not None and results.is_file() else None
    facts = document.get("facts") if isinstance(document, Mapping) else None
    if results is None or not isinstance(facts, Mapping):
        return None
    kind = facts.get("head_kind")
    scaling = _scaling(facts.get("scaling"))
    return Recipe(results, scaling, kind if kind in get_args(HeadKind) else None)


def _scaling(recorded: Any) -> Scaling | None:
    try:
        scaling = Scaling(float(recorded["lower"]), float(recorded["scale"]))
    except (KeyError, TypeError, ValueError):
        return None
    return scaling if math.isfinite(scaling.lower) and 0 < scaling.scale < math.inf else None
