"""What a network wants done to its input and its output, as those who trained it say.

    nnU-Net folder, bioimage.io package, MONAI bundle, training of ours  ──▶  Recipe  ──▶  infer

What a recipe says is the default. A flag of the user wins, and is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..base import HeadKind
from ..data import Normalisation


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """What is done to one output of a network."""

    kind: HeadKind
    """The kind that `infer` takes it for."""
    activation: Literal["sigmoid", "softmax"] | None = None
    """The function that makes probabilities of it; None if it is not one of logits."""
    scaling: tuple[float, float] | None = None
    """Lower bound and scale of its values, which are ``output * scale + lower``. None if they stay
    as they are."""
    dtype: str | None = None
    """The dtype of a new output; None if it is not said."""


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
    fill: float | None = None
    """The value that stands beyond the volume for the network, once values are normalised; None if
    the volume is mirrored there."""


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
