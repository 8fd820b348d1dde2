"""The kinds of a model's heads, and how the values of each kind are treated.

    intensity   scaled back to the range of the input, and blended; dtype of the input. One that a
                training of ours made: range and dtype of its target
    scores      blended, never scaled back; float32. In uint8 and uint16 they are written as whole
                numbers that stand for 0 to 1, and the output says so
    labels      never scaled back, never blended: each voxel comes from one patch; the
                integers of the net, never converted to floats

An existing output, or ``--out-dtype``, sets another dtype. The kind of a head comes from the user,
from the registry of models, or from a test on a patch of the input (`with_kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ...base import HeadKind, InferConfig, UsageError, plural
from ...data import SAME, Rule, ScaledGrid, Sink

if TYPE_CHECKING:
    from ...models import Activation, Head, HeadRecipe, Reduction

Origin = Literal["said", "known", "assumed"]

_WIDE = ("int32", "uint32", "int64", "uint64", "float64")


def is_wide(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds values that float32 cannot hold.

    >>> is_wide(np.dtype("uint32")), is_wide(np.dtype("uint16"))
    (True, False)
    """
    return dtype.name in _WIDE


def is_long(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds integers that float64 cannot hold.

    >>> is_long(np.dtype("uint64")), is_long(np.dtype("uint32"))
    (True, False)
    """
    return dtype.name in ("int64", "uint64")


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """A head of the network, and its kind, as far as they are known before its output is opened."""

    name: str
    channels: int
    returned: str
    """Dtype in which the network returns it, by torch's name."""
    reduction: Reduction | None = None
    """The way in which blended scores are reduced before they are written; None if they are not."""
    activation: Activation | None = None
    """The function that makes probabilities of blended logits; None if they are none, or if the
    network does."""
    factors: tuple[Fraction, ...] = SAME
    """Voxels that it has for one of the input, along z y x."""
    recipe: HeadRecipe | None = None
    """The wishes of its makers; None if they say nothing, or if the user says another kind."""
    kind: HeadKind = "intensity"
    origin: Origin = "assumed"

    @property
    def rule(self) -> Rule:
        """How voxels of its output are joined into one of a level. A label is never averaged."""
        return "mode" if self.kind == "labels" else "mean"

    @property
    def finished(self) -> bool:
        """Whether something is made of its values once blocks of them are whole."""
        return self.reduction is not None or self.activation is not None

    @property
    def written(self) -> int:
        """Number of channels that its output gets."""
        if self.reduction is None:
            return self.channels
        return next(iter(self.reduction.heads(self.name, self.channels).values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan(HeadFacts):
    """How the values of a head are treated between the net and the output. What is reduced once it
    is blended is blended as scores."""

    dtype: np.dtype[Any]
    """Dtype of the output."""
    work: np.dtype[Any]
    """Dtype in which values are scaled back and blended patches are summed, float32, or float64 if
    the dtypes need it."""
    blended: bool
    denormalized: bool
    gain: float
    """The number that stands for 1 in the output."""
    grid: ScaledGrid
    """The grid of its values."""
    copied: bool
    """True if its values are integers that are written as the network returns them."""
    summed: bool
    """True if bricks are added up to blocks, as patches are blended or values are interpolated on
    their way to the output's grid."""

    @property
    def kept(self) -> np.dtype[Any]:
        """The dtype in which bricks and incomplete blocks hold the values."""
        return self.work if self.summed else self.dtype

    def line(self) -> str:
        """The head in words."""
        assumed = ", assumed (--head-kind sets another)" if self.origin == "assumed" else ""
        back = "denormalised" if self.denormalized else "not denormalised"
        seam = "blended" if self.blended else "trimmed"
        how = "".join(f", then {step}" for step in (self.activation, self.reduction) if step)
        scale = "" if self.gain == 1 else f" of which {self.gain:g} stands for 1"
        grid = ""
        if self.grid.factors != SAME:
            grid = f", {' x '.join(map(str, self.grid.factors))} voxels for one of the input"
        return f"{self.name}: {self.kind}{assumed}; {back}, {seam}{how}, {self.dtype}{scale}{grid}"


def facts_of_heads(
    heads: Sequence[Head],
    num_outputs: int,
    model: str,
    recipes: Mapping[str, HeadRecipe],
    reduction: Reduction | None = None,
    *,
    later: bool = False,
) -> list[HeadFacts]:
    """The heads of a model, one for each output.

    ``recipes`` is what is to be obeyed of what is said of each head, ``reduction`` what becomes of
    scores. With ``later``, that and probabilities are made once they are blended.

    Raises `UsageError` if there are more or fewer outputs.
    """
    if len(heads) != num_outputs:
        shown = ", ".join(f"{head.name} ({plural(head.channels, 'channel')})" for head in heads)
        raise UsageError(
            f"model {model} returns {plural(len(heads), 'head')}, {shown}, but --out-spec "
            f"names {num_outputs}"
        )
    # Of top, which makes two heads of one, both have its recipe.
    stems = [head.name.rpartition(".")[0] for head in heads]
    said = [recipes.get(head.name, recipes.get(s)) for head, s in zip(heads, stems, strict=True)]
    return [
        HeadFacts(
            name=head.name,
            channels=head.channels,
            returned=str(head.dtype).removeprefix("torch."),
            reduction=reduction if later else None,
            activation=recipe.activation if recipe is not None and later else None,
            factors=(*SAME[len(head.factors) :], *head.factors),
            recipe=recipe,
        )
        for head, recipe in zip(heads, said, strict=True)
    ]


def said_kinds(said: Sequence[str] | None, heads: Sequence[HeadFacts]) -> list[HeadKind | None]:
    """The kind that ``--head-kind`` gives each head, None if it gives none.

    Raises `UsageError` for a name that no head has, and for too few or too many kinds.
    """
    if said is None:
        return [None] * len(heads)
    named = dict(word.rsplit("=", 1) for word in said if "=" in word)
    if named:
        names = [head.name for head in heads]
        for name in named.keys() - names:
            raise UsageError(
                f"--head-kind {name!r}: the model has no such head, but {', '.join(names)}"
            )
        return cast("list[HeadKind | None]", [named.get(name) for name in names])
    if len(said) not in (1, len(heads)):
        raise UsageError(
            f"--head-kind names {plural(len(said), 'kind')} but the model has "
            f"{plural(len(heads), 'head')}"
        )
    return cast("list[HeadKind | None]", [*said] * len(heads) if len(said) == 1 else [*said])


def default_dtype(head: HeadFacts, source: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a new output. Labels that a net returns as floats become int32."""
    if head.reduction is not None and head.kind == "labels":
        return np.dtype(str(head.reduction.dtype(head.channels)).removeprefix("torch."))
    if head.recipe is not None and head.recipe.dtype is not None:
        return np.dtype(head.recipe.dtype)
    if head.kind == "intensity":
        return source
    if head.kind == "scores":
        return np.dtype(np.float32)
    if head.returned == "bool":
        return np.dtype(np.uint8)
    return np.dtype(head.returned if "int" in head.returned else np.int32)


def plan_heads(
    config: InferConfig,
    facts: Sequence[HeadFacts],
    sinks: Sequence[Sink],
    *,
    carrier: str,
    scalings: int,
    corner: tuple[int, ...],
    resampled: bool,
) -> tuple[HeadPlan, ...]:
    """How each head is treated, for its output.

    ``carrier`` is the dtype in which patches are normalised, ``scalings`` the number of scalings of
    a volume. ``corner`` is where the grids of heads begin. ``resampled`` says that outputs lie on
    another grid than patches.
    """
    heads = []
    for head, sink in zip(facts, sinks, strict=True):
        if head.reduction is not None:
            head = replace(head, kind="scores")
        wide = (carrier != "float32" or head.returned == "float64") and is_wide(sink.dtype)
        rescaled = head.recipe is not None and head.recipe.scaling is not None
        summed = (config.seam_mode == "blend" or resampled) and head.kind != "labels"
        heads.append(
            HeadPlan(
                **{field.name: getattr(head, field.name) for field in fields(head)},
                dtype=sink.dtype,
                work=np.dtype(np.float64 if wide else np.float32),
                blended=config.seam_mode == "blend" and head.kind != "labels",
                # Integers of 64 bits pass as such where the net does nothing with them; no float
                # has all.
                copied=head.kind == "labels"
                or (not summed and "int" in carrier and carrier == sink.dtype),
                summed=summed,
                grid=ScaledGrid(head.factors, corner),
                denormalized=config.denormalize
                and head.kind == "intensity"
                and not rescaled
                and scalings in (1, head.channels),
                gain=1 / getattr(sink, "packing", {}).get("scale_factor", 1.0),
            )
        )
    return tuple(heads)


def packing_of_scores(kind: HeadKind, dtype: np.dtype[Any]) -> dict[str, float]:
    """The attributes of a new Zarr output that say what its numbers stand for; empty for values
    that are written as they are. Whole numbers hold scores from 0 to 1.

    >>> packing_of_scores("scores", np.dtype("uint8"))["add_offset"]
    0.0
    """
    if kind != "scores" or dtype.name not in ("uint8", "uint16"):
        return {}
    return {"scale_factor": 1 / int(np.iinfo(dtype).max), "add_offset": 0.0}


def rounded(head: HeadFacts, sink: Sink) -> str:
    """A sentence on scores of which an output keeps only whole numbers; empty for others."""
    if head.kind != "scores" or sink.dtype.kind not in "iu" or getattr(sink, "packing", {}):
        return ""
    return (
        f"{sink.name} holds the scores of head {head.name} as whole numbers, so one from 0 to 1 "
        "becomes 0 or 1; --out-dtype float32 keeps them, or a new OME-Zarr (*.zarr) of uint8, in "
        "which 255 stands for 1"
    )


def whole_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The range of integers that a dtype holds without gaps.

    >>> whole_range(np.dtype("float32"))
    (-16777216, 16777216)
    """
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind == "f":
        most = 2 ** (np.finfo(dtype).nmant + 1)
        return -most, most
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


@lru_cache
def float_range(dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """The range of floats that a dtype takes without clipping. It includes the first number but not
    the second. None if nothing is clipped.

    >>> float_range(np.dtype("uint8"))
    (-0.5, 255.5)
    """
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return (-most, float(np.nextafter(most, np.inf))) if dtype.itemsize == 2 else None
    low, high = whole_range(dtype)
    return low - 0.5, high + 0.5


@dataclass(frozen=True, slots=True)
class Clipped:
    """How much of an output was clipped to the range of its dtype."""

    head: str
    output: str
    dtype: str
    clipped: int
    values: int
    """Number of values: voxels times channels."""

    @property
    def share(self) -> float:
        return self.clipped / self.values if self.values else 0.0

    def line(self) -> str:
        return (
            f"Clipped: {100 * self.share:.1f} % of {self.output} (head {self.head}, "
            f"{self.clipped:,} of {self.values:,} values) were outside the range of {self.dtype}; "
            "give a wider --out-dtype, or name the kind of the head with --head-kind"
        )
