"""MONAI bundles: a network definition, its weights, and the transforms of input and output.

    configs/metadata.json, configs/inference.json, models/model.pt

The definition is made by MONAI, from classes of `monai.networks` alone. An expression (``$``) is
code: those of the transforms are not run, and those of the network only if the user trusts them.
Axes are x y z, as MONAI reads medical images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ...base import as_usage_error, read_json, read_yaml, require
from ...data import Normalisation
from ..recipe import HeadRecipe, Recipe, Sliding
from ..weights import load_weights
from .package import Package, Parcel, in_order

_NETWORKS = "monai.networks.nets"
_NAMES = ("inference.json", "inference.yaml", "inference.yml")
_NOTHING = (
    "LoadImage EnsureChannelFirst AddChannel EnsureType CastToType ToTensor ToDevice Invert "
    "SaveImage Identity CopyItems DeleteItems SelectItems"
).split()
"""Transforms that change no value of the network's input and output, or that undo others."""
_DONE = (
    "ScaleIntensityRange, ScaleIntensityRangePercentiles, ScaleIntensity, NormalizeIntensity, "
    "Spacing"
)


def read(parcel: Parcel) -> Package:
    """Open a MONAI bundle.

    Args:
        parcel: Its folder.

    Returns:
        The network and its recipe.

    Raises:
        UsageError: A file is missing, a transform is not done, or it is code that is not trusted.
        MissingDependency: MONAI is not installed.
    """
    metadata = read_json(parcel.file("configs/metadata.json"))
    config = _config(parcel)
    image: Mapping[str, Any] = next(
        iter((_of(metadata, "network_data_format", "inputs") or {}).values()), {}
    )
    channels = int(image.get("num_channels", 1))
    module = _network(parcel, config)
    load_weights(module, parcel.path.name, parcel.file("models/model.pt"), "--model")
    spatial = _dimensions(parcel, module, image)
    axes = "xyz"[:spatial]
    names = [str(name) for name in (image.get("channel_def") or {}).values()]
    recipe = Recipe(str(parcel.path), channels=tuple(names) if len(names) == channels else ())
    for transform in _transforms(parcel, config, "preprocessing"):
        recipe = _before(parcel, recipe, *transform, channels)
    recipe = _after(parcel, recipe, config)
    recipe = _tiled(parcel, recipe, _resolved(config, config.get("inferer")), spatial)
    takes = "bc" + axes
    module = in_order(module, takes, [takes])
    return Package(module, recipe, channels, spatial)


def _config(parcel: Parcel) -> Mapping[str, Any]:
    """The settings of inference."""
    for name in _NAMES:
        file = parcel.folder / "configs" / name
        if file.is_file():
            file = parcel.file(f"configs/{name}")
            return read_json(file) if file.suffix == ".json" else read_yaml(file, "--model")
    raise parcel.refuse(f"lacks configs/{_NAMES[0]}")


def _of(document: Any, *keys: str) -> Any:
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document


def _resolved(config: Mapping[str, Any], value: Any, depth: int = 0) -> Any:
    """A value of the settings, with each ``@name`` replaced by what it names."""
    if depth > 20:
        return value
    if isinstance(value, str) and value.startswith("@"):
        parts = value[1:].replace("#", "::").split("::")
        named = _of(config, *parts)
        return value if named is None else _resolved(config, named, depth + 1)
    if isinstance(value, Mapping):
        return {key: _resolved(config, each, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(config, each, depth + 1) for each in value]
    return value


def _network(parcel: Parcel, config: Mapping[str, Any]) -> nn.Module:
    """The network that the settings define, without weights."""
    said = config.get("network_def", config.get("network"))
    definition = _resolved(config, said)
    if not isinstance(definition, Mapping) or "_target_" not in definition:
        raise parcel.refuse("its settings define no network_def")
    require("monai", "monai")
    # An import of the networks, which is not MONAI's own and may fail, is what comes first.
    parser = require("monai.bundle", "monai").ConfigParser
    for target in _targets(definition):
        if target.startswith("$") or ("." in target and not target.startswith(f"{_NETWORKS}.")):
            parcel.needs_trust(f"{target}, which its network_def names,")
        elif "." not in target and not hasattr(require("monai.networks.nets", "monai"), target):
            raise parcel.refuse(f"its network_def names {target}, which is not in {_NETWORKS}")
    # The network's code may raise anything.
    with as_usage_error(parcel.sentence("its network could not be made")):
        if parcel.trusted:
            made = parser({**config, "network_def": said}).get_parsed_content("network_def")
        else:
            made = parser({"network_def": definition}).get_parsed_content("network_def")
    return made.cpu()


def _targets(value: Any) -> Iterator[str]:
    """The classes and expressions that a definition names."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key == "_target_":
                yield str(each)
            elif key in ("_mode_", "_requires_", "_disabled_", "pretrained") and each:
                yield f"$ {key}"
            else:
                yield from _targets(each)
    elif isinstance(value, list):
        for each in value:
            yield from _targets(each)
    elif isinstance(value, str) and value.startswith(("$", "@", "%")):
        yield f"$ {value}"


def _dimensions(parcel: Parcel, module: nn.Module, image: Mapping[str, Any]) -> int:
    """The number of spatial axes of the network."""
    shape = image.get("spatial_shape")
    if isinstance(shape, list) and len(shape) in (2, 3):
        return len(shape)
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Conv3d):
            return 2 if isinstance(part, nn.Conv2d) else 3
    raise parcel.refuse("its metadata.json names no spatial_shape")


def _transforms(
    parcel: Parcel, config: Mapping[str, Any], key: str
) -> list[tuple[str, Mapping[str, Any]]]:
    """The transforms of a step by their names without the d of dictionaries, and their values."""
    composed = _resolved(config, config.get(key))
    if composed is None:
        return []
    steps = composed.get("transforms") if isinstance(composed, Mapping) else None
    if not isinstance(steps, list):
        raise parcel.refuse(f"its {key} is no list of transforms")
    named = []
    for step in steps:
        if not isinstance(step, Mapping):
            raise parcel.refuse(f"its {key} holds {step}, which is no transform by name")
        if step.get("_disabled_") in (True, "true"):
            continue
        name = str(step.get("_target_", "")).rpartition(".")[2]
        for ending in ("Dict", "D", "d"):
            name = name.removesuffix(ending)
        named.append((name, step))
    return named


def _number(parcel: Parcel, name: str, step: Mapping[str, Any], key: str, default: Any) -> float:
    value = step.get(key, default)
    if not isinstance(value, int | float):
        raise parcel.refuse(f"{key} of its {name} is {value!r}, and not a number")
    return float(value)


def _before(
    parcel: Parcel, recipe: Recipe, name: str, step: Mapping[str, Any], channels: int
) -> Recipe:
    """The recipe with one more transform of the input."""
    if name in _NOTHING:
        return recipe
    if name == "Orientation":
        codes = "".join(map(str, step.get("axcodes") or ()))
        if len(codes) != 3 or not set(codes) <= set("RASLPI"):
            raise parcel.refuse(f"axcodes of its Orientation is {step.get('axcodes')!r}, and not "
                                "such as RAS")  # fmt: skip
        return replace(recipe, orientation=codes)
    if name == "Spacing":
        sizes = step.get("pixdim")
        if not isinstance(sizes, list) or not all(isinstance(each, int | float) for each in sizes):
            raise parcel.refuse(f"pixdim of its Spacing is {sizes!r}, and no list of numbers")
        spacing: Any = tuple(float(each) for each in (*sizes, math.nan)[2::-1])
        return replace(recipe, spacing=spacing, unit="millimeter")
    scaled = _scaled(parcel, name, step, channels)
    if recipe.normalisation:
        raise parcel.refuse(f"{name} comes after another scaling of its input, which is not done")
    return replace(recipe, normalisation=scaled)


def _scaled(
    parcel: Parcel, name: str, step: Mapping[str, Any], channels: int
) -> tuple[Normalisation, ...]:
    """The normalisation of one transform."""

    def number(key: str, default: Any = None) -> float:
        return _number(parcel, name, step, key, default)

    if name == "ScaleIntensityRange":
        low, high = number("a_min"), number("a_max")
        first, last = number("b_min", 0.0), number("b_max", 1.0)
        unit = (high - low) / (last - first)
        lower = low - first * unit
        clip = (first, last) if step.get("clip") else None
        return (Normalisation(lower=lower, upper=lower + unit, clip=clip),)
    each = channels if step.get("channel_wise") else 1
    to_one = (number("b_min", 0), number("b_max", 1)) == (0, 1) and (
        number("minv", 0), number("maxv", 1)) == (0, 1)  # fmt: skip
    if name == "ScaleIntensityRangePercentiles" and to_one and not step.get("relative"):
        clip = (0.0, 1.0) if step.get("clip") else None
        return (Normalisation("percentiles", number("lower"), number("upper"), clip=clip),) * each
    if name == "ScaleIntensity" and to_one and step.get("factor") is None:
        return (Normalisation("percentiles", 0, 100),) * each
    if name == "NormalizeIntensity":
        nonzero = bool(step.get("nonzero"))
        if step.get("subtrahend") is None and step.get("divisor") is None:
            return (Normalisation("moments", nonzero=nonzero),) * each
        lower, scale = number("subtrahend", 0), number("divisor", 1)
        return (Normalisation(lower=lower, upper=lower + scale, nonzero=nonzero),) * each
    raise parcel.refuse(
        f"{name} of its input is not done as it is said, only {_DONE} are; do it to the volume "
        "first, and take it out of configs/inference.json"
    )


def _after(parcel: Parcel, recipe: Recipe, config: Mapping[str, Any]) -> Recipe:
    """The recipe with the transforms of the output.

    MONAI does them to what is joined of patches. So no function is needed where the highest score,
    or those above a threshold, are wanted.
    """
    activation: Any = None
    reduce: str | None = None
    for name, step in _transforms(parcel, config, "postprocessing"):
        if name == "Activations":
            activation = next((each for each in ("softmax", "sigmoid") if step.get(each)), None)
        elif name == "AsDiscrete" and step.get("argmax"):
            reduce = "argmax"
        elif name == "AsDiscrete" and step.get("threshold") is not None:
            limit = _number(parcel, name, step, "threshold", None)
            if activation == "sigmoid" and 0 < limit < 1:
                activation, limit = None, math.log(limit / (1 - limit))
            reduce = f"threshold:{limit:.17g}"
        elif name not in _NOTHING:
            raise parcel.refuse(
                f"{name} of its output is not done, only Activations and AsDiscrete are; take it "
                "out of configs/inference.json"
            )
    head = HeadRecipe("scores", None if reduce == "argmax" else activation)
    return replace(recipe, heads={"out": head}, reduce=reduce)


def _tiled(parcel: Parcel, recipe: Recipe, inferer: Any, spatial: int) -> Recipe:
    """The recipe with the patch, step and window of its inferer."""
    name = str(_of(inferer, "_target_")).rpartition(".")[2]
    if name != "SlidingWindowInferer":
        return recipe
    zyx = _each(parcel, inferer, "roi_size", None, spatial)
    shares = _each(parcel, inferer, "overlap", 0.25, spatial)
    if not all(isinstance(side, int) and side for side in zyx) or not max(shares) < 1:
        raise parcel.refuse(
            f"its inferer has roi_size {inferer.get('roi_size')!r} and overlap "
            f"{inferer.get('overlap')!r}; sides are whole numbers, and shares are less than 1"
        )
    overlap = [
        side - max(1, int(side * (1 - share))) for side, share in zip(zyx, shares, strict=True)
    ]
    patch: Any = (1, *zyx)[-3:]
    shared: Any = (0, *overlap)[-3:]
    return replace(recipe, patch=patch, overlap=shared, sliding=_sliding(parcel, inferer, spatial))


def _sliding(parcel: Parcel, inferer: Mapping[str, Any], spatial: int) -> Sliding:
    """Where the patches of its inferer lie, and how they are joined."""
    mode, padding = (
        str(inferer.get(key, "constant")).rpartition(".")[2].lower()
        for key in ("mode", "padding_mode")
    )
    if mode not in ("constant", "gaussian") or padding not in ("constant", "reflect"):
        raise parcel.refuse(
            f"its inferer has mode {mode} and padding_mode {padding}; constant and gaussian are "
            "made, and constant and reflect"
        )
    fill = None
    if padding == "constant":
        fill = _number(parcel, "inferer", inferer, "cval", 0.0)
    if mode == "constant":
        return Sliding("constant", "moved", fill=fill)
    sigmas = _each(parcel, inferer, "sigma_scale", 0.125, spatial)
    sigma: Any = (sigmas[0], *sigmas)[-3:]
    return Sliding("gaussian", "moved", sigma, centred=True, floor=1e-3, fill=fill)


def _each(
    parcel: Parcel, inferer: Mapping[str, Any], key: str, default: Any, spatial: int
) -> list[Any]:
    """A setting of its inferer that is one positive number, or one for each axis, as z y x."""
    said = inferer.get(key, default)
    values = said if isinstance(said, list) else [said] * spatial
    if len(values) != spatial or not all(isinstance(v, int | float) and v >= 0 for v in values):
        raise parcel.refuse(f"{key} of its inferer is {said!r}, and not {spatial} numbers")
    return values[::-1]
