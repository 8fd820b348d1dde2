"""The transforms of a MONAI bundle, as words of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...data import Normalisation
from ..recipe import Activation, HeadRecipe, Recipe
from .chain import Chain

if TYPE_CHECKING:
    from .package import Parcel

_NOTHING = (
    "LoadImage EnsureChannelFirst AddChannel EnsureType CastToType ToTensor ToDevice SaveImage "
    "Identity CopyItems DeleteItems SelectItems"
).split()
"""Transforms that change no value of the network's input and output."""
_ORDERS = {"bilinear": 1, "nearest": 0, 0: 0, 1: 1, 3: 3}
_DONE = (
    "ScaleIntensityRange, ScaleIntensityRangePercentiles, ScaleIntensity, NormalizeIntensity, "
    "Spacing"
)


def number_of(parcel: Parcel, name: str, step: Mapping[str, Any], key: str, default: Any) -> float:
    """A setting of a step that is a number."""
    value = step.get(key, default)
    if not isinstance(value, int | float):
        raise parcel.refuse(f"{key} of its {name} is {value!r}, and not a number")
    return float(value)


def before(
    parcel: Parcel, recipe: Recipe, chain: Chain, name: str, step: Mapping[str, Any]
) -> Recipe:
    """The recipe with one more transform of the input.

    Args:
        parcel: The bundle.
        recipe: The recipe so far.
        chain: The scalings so far, to which others are added.
        name: The name of the transform, without the d of dictionaries.
        step: Its settings.

    Returns:
        The recipe.

    Raises:
        UsageError: It is not done.
    """
    cut = name == "CastToType" and "int" in str(step.get("dtype"))
    if name in _NOTHING and not cut:
        return recipe
    if name == "Orientation":
        codes = "".join(map(str, step.get("axcodes") or ()))
        if len(codes) != 3 or not set(codes) <= set("RASLPI"):
            raise parcel.refuse(f"axcodes of its Orientation is {step.get('axcodes')!r}, and not "
                                "such as RAS")  # fmt: skip
        return replace(recipe, orientation=codes)
    begun = chain.each != [Normalisation()]
    if name == "Spacing":
        return _resampled(parcel, recipe, step, scaled_first=begun)
    if recipe.scaled_first:
        raise parcel.refuse(f"{name} comes after Spacing, and another scaling of its input before "
                            "it, which is not done")  # fmt: skip
    _scale(parcel, chain, name, step)
    return recipe


def _resampled(
    parcel: Parcel, recipe: Recipe, step: Mapping[str, Any], *, scaled_first: bool
) -> Recipe:
    """The recipe with the voxel size of Spacing."""
    sizes, mode = step.get("pixdim"), step.get("mode", "bilinear")
    if str(sizes).startswith("$"):
        parcel.needs_trust(f"{sizes}, the pixdim of its Spacing,")
    sizes = sizes if isinstance(sizes, list) else [sizes]
    if not sizes or not all(isinstance(each, int | float) for each in sizes):
        raise parcel.refuse(f"pixdim of its Spacing is {step.get('pixdim')!r}, and not numbers")
    mode = next(iter(mode), None) if isinstance(mode, list) else mode
    if mode not in _ORDERS:
        raise parcel.refuse(f"mode of its Spacing is {mode!r}, and not bilinear or nearest")
    other = [key for key in ("scale_extent", "min_pixdim", "max_pixdim") if step.get(key)]
    if other or step.get("padding_mode", "border") not in ("border", "nearest"):
        raise parcel.refuse(f"{', '.join(other or ['padding_mode'])} of its Spacing is not done; "
                            "leave it out")  # fmt: skip
    xyz = [*sizes, math.nan][:3] if len(sizes) > 1 else sizes * 3
    spacing: Any = tuple(float(each) if each > 0 else math.nan for each in xyz[::-1])
    return replace(recipe, spacing=spacing, unit="millimeter", order=_ORDERS[mode], centred=True,
                   scaled_first=scaled_first)  # fmt: skip


def _scale(parcel: Parcel, chain: Chain, name: str, step: Mapping[str, Any]) -> None:
    """Add one scaling of the input to the others."""

    def number(key: str, default: Any = None) -> float:
        return number_of(parcel, name, step, key, default)

    def fit(ends: tuple[str, str], low: float = 0.0, high: float = 1.0) -> None:
        """Bring values from low and high to the ends, and clip them there."""
        first, last = number(ends[0], 0), number(ends[1], 1)
        unit = (high - low) / (last - first) if first < last else 0.0
        if not unit > 0:
            raise parcel.refuse(f"{name} of its input scales {low:g} and {high:g} to {first:g} and "
                                f"{last:g}, which is no range")  # fmt: skip
        chain.affine(name, low - first * unit, unit)
        if step.get("clip"):
            chain.clip(first, last)

    by_channel = bool(step.get("channel_wise"))
    if name == "ScaleIntensityRange":
        fit(("b_min", "b_max"), number("a_min"), number("a_max"))
    elif name == "ScaleIntensityRangePercentiles" and not step.get("relative"):
        ends = number("lower"), number("upper")
        chain.count(name, Normalisation("percentiles", *ends), by_channel=by_channel)
        fit(("b_min", "b_max"))
    elif name == "ScaleIntensity" and step.get("factor") is None:
        chain.count(name, Normalisation("percentiles", 0, 100), by_channel=by_channel)
        fit(("minv", "maxv"))
    elif name == "NormalizeIntensity":
        _z_score(parcel, chain, step, by_channel=by_channel)
    else:
        raise parcel.refuse(
            f"{name} of its input is not done as it is said, only {_DONE} are; do it to the volume "
            "first, and take it out of configs/inference.json"
        )


def _z_score(parcel: Parcel, chain: Chain, step: Mapping[str, Any], *, by_channel: bool) -> None:
    """Add NormalizeIntensity, whose numbers are counted or given."""
    name, nonzero = "NormalizeIntensity", bool(step.get("nonzero"))
    lower, scale = step.get("subtrahend"), step.get("divisor")
    if lower is scale is None:
        chain.count(name, Normalisation("moments", nonzero=nonzero), by_channel=by_channel)
        return
    if by_channel and isinstance(lower, list) and isinstance(scale, list) and not nonzero:
        chain.affine(name, lower, scale)
        return
    low = number_of(parcel, name, step, "subtrahend", 0)
    unit = number_of(parcel, name, step, "divisor", 1)
    if nonzero:
        how = Normalisation(lower=low, upper=low + unit, nonzero=True)
        chain.count(name, how, by_channel=False)
    else:
        chain.affine(name, low, unit)


def after(parcel: Parcel, recipe: Recipe, steps: Iterable[tuple[str, Mapping[str, Any]]]) -> Recipe:
    """The recipe with the transforms of the output.

    MONAI does them to what is joined of patches, in their order. A label, and what a threshold
    cuts, goes back to the input's grid by the nearest voxel, as no mean of two is one.

    Args:
        parcel: The bundle.
        recipe: The recipe so far.
        steps: The names and settings of the transforms.

    Returns:
        The recipe.

    Raises:
        UsageError: One is not done.
    """
    activation: Activation | None = None
    reduce: str | None = None
    back = after_back = nearest = False
    for name, step in steps:
        discrete = name == "AsDiscrete" and not (step.get("to_onehot") or step.get("rounding"))
        if name == "Activations" and not step.get("other") and reduce is None:
            activation = "softmax" if step.get("softmax") else None
            activation, after_back = "sigmoid" if step.get("sigmoid") else activation, back
        elif discrete and step.get("argmax"):
            reduce = "argmax"
        elif discrete and step.get("threshold") is not None:
            reduce = f"threshold:{number_of(parcel, name, step, 'threshold', None):.17g}"
        elif name == "Invert":
            said = step.get("nearest_interp", True)
            back, nearest = True, reduce is not None or said not in (False, [False])
        elif name not in _NOTHING:
            raise parcel.refuse(
                f"{name} of its output is not done as it is said, only softmax, sigmoid, argmax "
                "and a threshold are; take it out of configs/inference.json"
            )
    head = HeadRecipe("scores", activation, after_back=after_back)
    return replace(recipe, heads={"out": head}, reduce=reduce, back_order=int(not nearest))
