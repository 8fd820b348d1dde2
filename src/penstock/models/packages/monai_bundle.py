"""MONAI bundles: a network definition, its weights, and the transforms of input and output.

    configs/metadata.json, configs/inference.json, models/model.pt

The definition is made by MONAI, from classes of `monai.networks` alone. An expression (``$``) and
what lies in ``scripts/`` are code, and run only if the user trusts them.
Axes are x y z, as MONAI reads medical images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ...base import as_usage_error, read_json, read_yaml, require
from ...data import Normalisation
from ..recipe import HeadRecipe, Recipe, Sliding
from ..user_code import beside
from ..weights import load_weights
from .chain import Chain
from .package import Package, Parcel, in_order

_NETWORKS = "monai.networks.nets"
_NAMES = ("inference.json", "inference.yaml", "inference.yml")
_NOTHING = (
    "LoadImage EnsureChannelFirst AddChannel EnsureType CastToType ToTensor ToDevice Invert "
    "SaveImage Identity CopyItems DeleteItems SelectItems"
).split()
"""Transforms that change no value of the network's input and output, or that undo others."""
_ORDERS = {"bilinear": 1, "nearest": 0, 0: 0, 1: 1, 3: 3}
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
    chain = Chain(parcel.refuse, channels)
    for transform in _transforms(parcel, config, "preprocessing"):
        recipe = _before(parcel, recipe, chain, *transform)
    if "preprocessing" in config:
        recipe = replace(recipe, normalisation=tuple(chain.each))
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
            read: Any = read_json(file) if file.suffix == ".json" else read_yaml(file, "--model")
            return _evaluated(parcel, read) if parcel.trusted else read
    raise parcel.refuse(f"lacks configs/{_NAMES[0]}")


def _parser(parcel: Parcel, config: Mapping[str, Any]) -> Any:
    """MONAI's reader of settings."""
    require("monai", "monai")
    # An import of the networks, which is not MONAI's own and may fail, is what comes first.
    reader = require("monai.bundle", "monai").ConfigParser
    return reader({**config, "bundle_root": str(parcel.folder)})


def _evaluated(parcel: Parcel, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with the values of the expressions in their transforms and inferer."""
    parser = _parser(parcel, config)
    with _code_of(parcel, "an expression in its settings failed"):
        parts = [key for key in ("preprocessing", "inferer", "postprocessing") if key in config]
        made = [parser.get_parsed_content(key, instantiate=False) for key in parts]
    return {**config, **dict(zip(parts, map(_plain, made), strict=True))}


@contextmanager
def _code_of(parcel: Parcel, what: str) -> Iterator[None]:
    """A context in which MONAI runs code, finds modules in the bundle, and may raise anything. The
    error begins with ``what``."""
    with as_usage_error(parcel.sentence(what)):
        try:
            with beside([parcel.folder], "monai", "pydoc", forget=True):
                yield
        except RuntimeError as error:  # of MONAI, which says what failed, and not why
            raise (error.__cause__ or error) from error


def _plain(value: Any) -> Any:
    """A value without the objects that MONAI puts around its parts."""
    value = value.get_config() if hasattr(value, "get_config") else value
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, list) else value


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
    key = "network_def" if "network_def" in config else "network"
    definition = _resolved(config, config.get(key))
    code = isinstance(definition, str) and definition.startswith("$")
    if not code and (not isinstance(definition, Mapping) or "_target_" not in definition):
        raise parcel.refuse("its settings define no network_def")
    whole = _parser(parcel, config if parcel.trusted else {key: definition})
    for target in [f"$ {definition}"] if code else _targets(definition):
        if target.startswith("$") or ("." in target and not target.startswith(f"{_NETWORKS}.")):
            parcel.needs_trust(f"{target}, which its network_def names,")
        elif "." not in target and not hasattr(require("monai.networks.nets", "monai"), target):
            raise parcel.refuse(f"its network_def names {target}, which is not in {_NETWORKS}")
    with _code_of(parcel, "its network could not be made"):
        return whole.get_parsed_content(key).cpu()


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
    for said in (composed, steps):
        if isinstance(said, str) and said.startswith("$"):
            parcel.needs_trust(f"{said}, its {key},")
    if not isinstance(steps, list):
        raise parcel.refuse(f"its {key} is no list of transforms")
    named = []
    for step in steps:
        if not isinstance(step, Mapping):
            raise parcel.refuse(f"its {key} holds {step}, which is no transform by name")
        disabled, keys = step.get("_disabled_"), step.get("keys")
        if str(disabled).startswith("$"):
            parcel.needs_trust(f"{disabled}, which may turn off a step of its {key},")
        if disabled in (True, "true") or keys in ("label", ["label"]):
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
    parcel: Parcel, recipe: Recipe, chain: Chain, name: str, step: Mapping[str, Any]
) -> Recipe:
    """The recipe with one more transform of the input. Scalings go into the chain."""
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
        sizes, mode = step.get("pixdim"), step.get("mode", "bilinear")
        if str(sizes).startswith("$"):
            parcel.needs_trust(f"{sizes}, the pixdim of its Spacing,")
        if not isinstance(sizes, list) or not all(isinstance(each, int | float) for each in sizes):
            raise parcel.refuse(f"pixdim of its Spacing is {sizes!r}, and no list of numbers")
        mode = mode[0] if isinstance(mode, list) else mode
        if mode not in _ORDERS:
            raise parcel.refuse(f"mode of its Spacing is {mode!r}, and not bilinear or nearest")
        spacing: Any = tuple(float(each) for each in (*sizes, math.nan)[2::-1])
        return replace(recipe, spacing=spacing, unit="millimeter", order=_ORDERS[mode],
                       scaled_first=begun)  # fmt: skip
    if recipe.scaled_first:
        raise parcel.refuse(f"{name} comes after Spacing, and another scaling of its input before "
                            "it, which is not done")  # fmt: skip
    _scale(parcel, chain, name, step)
    return recipe


def _scale(parcel: Parcel, chain: Chain, name: str, step: Mapping[str, Any]) -> None:
    """Add one scaling of the input to the others."""

    def number(key: str, default: Any = None) -> float:
        return _number(parcel, name, step, key, default)

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
    low = _number(parcel, name, step, "subtrahend", 0)
    unit = _number(parcel, name, step, "divisor", 1)
    if nonzero:
        how = Normalisation(lower=low, upper=low + unit, nonzero=True)
        chain.count(name, how, by_channel=False)
    else:
        chain.affine(name, low, unit)


def _after(parcel: Parcel, recipe: Recipe, config: Mapping[str, Any]) -> Recipe:
    """The recipe with the transforms of the output.

    MONAI does them to what is joined of patches. So no function is needed where the highest score,
    or those above a threshold, are wanted.
    """
    activation: Any = None
    reduce: str | None = None
    for name, step in _transforms(parcel, config, "postprocessing"):
        if name == "Activations" and not step.get("other"):
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
                f"{name} of its output is not done as it is said, only softmax, sigmoid, argmax "
                "and a threshold are; take it out of configs/inference.json"
            )
    head = HeadRecipe("scores", None if reduce == "argmax" else activation)
    return replace(recipe, heads={"out": head}, reduce=reduce)


def _tiled(parcel: Parcel, recipe: Recipe, inferer: Any, spatial: int) -> Recipe:
    """The recipe with the patch, step and window of its inferer."""
    name = str(_of(inferer, "_target_")).rpartition(".")[2]
    if inferer is None or name == "SimpleInferer":
        return recipe
    slices = name == "SliceInferer" and spatial == 2 and inferer.get("spatial_dim", 0) == 2
    if name not in ("SlidingWindowInferer", "SlidingWindowInfererAdapt") and not slices:
        raise parcel.refuse(
            f"its inferer {name} is not run as it is said, only SimpleInferer, SliceInferer along "
            "z and SlidingWindowInferer are; take the inferer out of configs/inference.json to run "
            "the network over patches"
        )
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
