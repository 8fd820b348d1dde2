"""What a network wants done to its input and its output, as those who trained it say.

    nnU-Net folder, bioimage.io package, MONAI bundle, training of ours  ──▶  Recipe  ──▶  infer

What a recipe says is the default. A flag of the user wins, and is told.

A training of ours leaves beside its weights the settings that it had, what it read, and what each
head of the network was trained to be:

    OUT/best_model.pth  ──▶  OUT/args.json, OUT/training_results.json  ──▶  TrainingRecord
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..base import (
    ARGS,
    BEST,
    CHECKPOINTS,
    HEAD_KINDS,
    RESULTS,
    HeadKind,
    UsageError,
    read_json,
    well_formed,
)
from ..data import Normalisation
from .registry import REGISTRY

AS_IT_IS = (0.0, 1.0)
"""Lower bound and scale of values that are not changed."""


Activation = Literal["sigmoid", "softmax"]
"""The function that makes probabilities of logits."""


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """What is done to one output of a network."""

    kind: HeadKind
    """The kind that `infer` takes it for."""
    activation: Activation | None = None
    """The function that makes probabilities of it; None if it is not one of logits."""
    scaling: tuple[float, float] | None = None
    """Lower bound and scale of its values, which are ``output * scale + lower``. None if it is not
    said; an intensity then goes back to the scale of the input."""
    dtype: str | None = None
    """The dtype of a new output; None if it is not said."""
    after_back: bool = False
    """True if probabilities are made on the input's grid, else on the network's."""


Steps = Literal["context", "inset", "narrowed", "moved"]
"""The way in which patches follow each other along an axis; see `inference/tiling/geometry.py`."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """Where the patches of a network lie, and how they are joined."""

    window: Literal["cosine", "gaussian", "constant"] = "cosine"
    """Weights of a patch: a cosine over the overlap, a Gaussian, or all equal."""
    steps: Steps = "context"
    sigma: tuple[float, float, float] = (1 / 8, 1 / 8, 1 / 8)
    """Standard deviation of a Gaussian, as a share of the patch along z y x."""
    centred: bool = False
    """True if a Gaussian is highest in the middle of a patch of even length, between two voxels.
    Else it is highest at the voxel behind it."""
    floor: float = 0.0
    """The least weight of a voxel in a Gaussian window."""
    fill: float | Literal["edge"] | None = None
    """The value that stands beyond the volume for the network, once values are normalised, or edge
    for that of the nearest voxel; None if the volume is mirrored there."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What belongs to a network besides its weights. Triples are z y x of the volume."""

    place: str
    """The file that says it, for messages."""
    channels: tuple[str, ...] = ()
    """Names of the channels that it takes, in its order; empty if they are not said."""
    normalisation: tuple[Normalisation, ...] = ()
    """One for all channels together, or one for each. Empty if it is not said."""
    refused: str = ""
    """Names a normalisation that is not done, unless the user says another; empty if there is
    none."""
    orientation: str = ""
    """Directions of x, y and z of the volume, as ``RAS``; empty if they are not said."""
    spacing: tuple[float, float, float] | None = None
    """Voxel size that the network was trained at, NaN along an axis that is left as it is. None if
    it is not said."""
    unit: str = "micrometer"
    """The unit of ``spacing``."""
    order: int | None = None
    """The order of the interpolation, as ``--resample-order`` has it; None if it is not said."""
    centred: bool = False
    """True if the network's voxels begin with one over the centre of the volume's first, as MONAI's
    do, and not at its edge."""
    scaled_first: bool = False
    """True if values are normalised before voxels are resampled."""
    back_order: int = 1
    """The highest order of the interpolation by which scores go back to the input's grid."""
    most_anisotropy: float | None = None
    """Ratio of the longest side of a voxel to the shortest up to which all axes are resampled
    alike; beyond it the nearest voxel is taken along the longest. None for no such limit."""
    patch: tuple[int, int, int] | None = None
    """Shape of a patch; None if it is not said."""
    overlap: tuple[int, int, int] | None = None
    """Voxels that neighbouring patches share; None if it is not said."""
    sliding: Sliding | None = None
    """The places of patches, and how they are joined; None if it is not said."""
    heads: Mapping[str, HeadRecipe] = field(default_factory=dict)
    """The recipe of each head, by its name as `Model.heads` has it."""
    reduce: str | None = None
    """The values that are written in place of scores, as ``--reduce`` has it; None for scores."""
    mirrors: tuple[int, ...] | None = None
    """Axes of the network, from 0, along which it may see its input mirrored; None for all."""
    crops: bool = False
    """True if only the box of voxels that are not 0 was seen in training."""

    @property
    def kind(self) -> HeadKind | None:
        """The kind of all its heads; None if it is not said, or if they differ."""
        kinds = {head.kind for head in self.heads.values()}
        return kinds.pop() if len(kinds) == 1 else None


def are_exclusive(target: str, loss: str) -> bool:
    """Whether the channels of a voxel are probabilities that sum to 1.

    Args:
        target: The kind of the target: intensity, mask, labels or probabilities.
        loss: The loss: mse, l1, bce, dice or ce.

    Returns:
        True where they sum to 1.
    """
    return target == "labels" or loss == "ce"


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What the files of a training say."""

    place: Path
    args: Mapping[str, Any]
    """The settings that it was started with; empty if the file is not there."""
    results: Mapping[str, Any]
    """Its results; empty if the file is not there."""

    @property
    def workload(self) -> str | None:
        """What was trained, such as ``pairs``."""
        return self.args.get("workload")

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the workload says of its data and its network."""
        facts = self.results.get("facts")
        return facts if isinstance(facts, Mapping) else {}

    @property
    def heads(self) -> dict[str, HeadRecipe]:
        """What `infer` does to the heads of the network, by their names as `Model.heads` has them.
        Empty if it is not said. In ``facts.heads`` a head has these words:

            kind      that `infer` takes it for: a network that was trained on a mask, on labels or
                      on probabilities returns scores
            target    kind of its target: intensity, mask, labels or probabilities
            loss      that it was trained with: mse, l1, bce, dice or ce
            returns   values, which the target holds, on the scale that it had; logits, of which a
                      sigmoid (bce, dice of a mask) or a softmax over the channels (ce) makes
                      probabilities; or probabilities
            scaling   lower and scale of an intensity, which is ``output * scale + lower``
            dtype     of an intensity, as its target stored it

        Raises `UsageError` if a head is described in another way.
        """
        with well_formed(f"{self.place / RESULTS}: its heads are damaged"):
            return {
                str(name): _head(said) for name, said in (self.facts.get("heads") or {}).items()
            }

    @property
    def scaling(self) -> tuple[float, float] | None:
        """Lower bound and scale of the input that it was trained on; None if it is not said."""
        try:
            lower, scale = _scaling(self.facts.get("scaling")) or (0.0, 0.0)
        except (KeyError, TypeError, ValueError):
            return None
        return (lower, scale) if math.isfinite(lower) and 0 < scale < math.inf else None

    @property
    def recipe(self) -> Recipe:
        """What it says of input and output.

        Raises `UsageError` if a head is described in another way.
        """
        normalisation: tuple[Normalisation, ...] = ()
        if self.scaling is not None:
            lower, scale = self.scaling
            normalisation = (Normalisation(lower=lower, upper=lower + scale),)
        voxel = self.facts.get("voxel") or {}
        size = voxel.get("size")
        return Recipe(
            str(self.place / RESULTS),
            normalisation=normalisation,
            spacing=size and (float(size[0]), float(size[1]), float(size[2])),
            unit=voxel.get("unit", "micrometer"),
            heads=self.heads,
        )


def weights_file(weights: Path) -> Path:
    """The file of weights that a path means: the best ones, if it is the folder of a training."""
    return weights / BEST if (weights / RESULTS).is_file() else weights


def record_of_weights(weights: Path) -> TrainingRecord | None:
    """What the training of a file of weights left beside it; None if no training wrote the file.

    Args:
        weights: The folder of a training, or a file. One of another name is not a training's.

    Raises:
        UsageError: A file is not of a training.
    """
    file = weights_file(weights)
    if file.name != BEST and file.parent.name != CHECKPOINTS:
        return None
    record = read_training_record(file)
    return record if record.facts else None


def read_training_record(weights: Path) -> TrainingRecord:
    """Read what a training left beside its weights.

    Args:
        weights: The folder of a training, or weights in it: ``best_model.pth``, or a checkpoint.

    Returns:
        What its files say; it is empty if there are none.

    Raises:
        UsageError: A file is not of a training.
    """
    place = weights if weights.is_dir() else weights.parent
    if place.name == CHECKPOINTS and place != weights:
        place = place.parent
    args, results = (_document(place / name) for name in (ARGS, RESULTS))
    return TrainingRecord(place, args, results)


def network_of_training(
    folder: Path, in_channels: int | None, *, trust: bool
) -> tuple[str, int | None]:
    """The name of the network that a training made, and the channels that it takes.

    Args:
        folder: The folder of the training.
        in_channels: Those that the user says; None for those of the training.
        trust: Whether code that it names may be run.

    Returns:
        What `load_model` takes.

    Raises:
        UsageError: It names none, or the network is code and is not trusted.
    """
    args = read_training_record(folder).args
    model = args.get("model")
    if args.get("workload") != "pairs" or not isinstance(model, str):
        raise UsageError(
            f"--model-type {folder}: its {ARGS} names no network; say --model-type NAME --weights "
            f"{folder}"
        )
    if model not in REGISTRY and not trust:
        raise UsageError(
            f"--model-type {folder}: its network {model} is code, and is only run with "
            f"--trust-model, or as --model-type {model} --weights {folder}"
        )
    return model, in_channels or args.get("channels")


def _document(path: Path) -> dict[str, Any]:
    document = read_json(path) if path.is_file() else {}
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not of a training")
    return document


def _head(said: Mapping[str, Any]) -> HeadRecipe:
    if said["kind"] not in HEAD_KINDS:
        raise ValueError(said["kind"])
    target, loss, returns = (str(said[name]) for name in ("target", "loss", "returns"))
    activation: Activation | None = None
    if returns == "logits":
        activation = "softmax" if are_exclusive(target, loss) else "sigmoid"
    dtype = None if said.get("dtype") is None else np.dtype(said["dtype"]).name
    return HeadRecipe(said["kind"], activation, _scaling(said.get("scaling")), dtype)


def _scaling(said: Mapping[str, Any] | None) -> tuple[float, float] | None:
    return None if said is None else (float(said["lower"]), float(said["scale"]))
