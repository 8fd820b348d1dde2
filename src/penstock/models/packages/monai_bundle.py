"""MONAI bundles: a network definition, its weights, and the transforms of input and output.

    configs/metadata.json, configs/inference.json, models/model.pt

The definition is made by MONAI, from classes of `monai.networks` alone. An expression (``$``) and
what lies in ``scripts/`` are code, and run only if the user trusts them.
Axes are x y z, as MONAI reads medical images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ...base import as_usage_error, plural, read_json, read_yaml, require
from ..recipe import Recipe, Sliding
from ..user_code import beside
from ..weights import load_weights
from .chain import Chain
from .monai_steps import after, before, number_of
from .package import Package, Parcel, in_order

_NETWORKS = "monai.networks.nets"
_NAMES = ("inference.json", "inference.yaml", "inference.yml")


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
    inputs = _of(metadata, "network_data_format", "inputs") or {}
    if len(inputs) > 1:
        raise parcel.refuse(f"its network takes {len(inputs)} inputs, not one")
    image: Mapping[str, Any] = next(iter(inputs.values()), {})
    channels = int(image.get("num_channels", 1))
    module = _network(parcel, config)
    load_weights(module, parcel.path.name, parcel.file("models/model.pt"), "--model")
    spatial = _dimensions(parcel, module, image)
    axes = "xyz"[:spatial]
    names = [str(name) for name in (image.get("channel_def") or {}).values()]
    recipe = Recipe(str(parcel.path), channels=tuple(names) if len(names) == channels else ())
    chain = Chain(parcel.refuse, channels)
    for transform in _transforms(parcel, config, "preprocessing"):
        recipe = before(parcel, recipe, chain, *transform)
    if "preprocessing" in config:
        recipe = replace(recipe, normalisation=tuple(chain.each))
    recipe = after(parcel, recipe, _transforms(parcel, config, "postprocessing"))
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
        named = _of(config, *value[1:].replace("#", "::").split("::"))
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
    beyond: dict[str, Any] = {"constant": 0.0, "reflect": None, "replicate": "edge"}
    if mode not in ("constant", "gaussian") or padding not in beyond:
        raise parcel.refuse(
            f"its inferer has mode {mode} and padding_mode {padding}; constant and gaussian are "
            "made, and constant, reflect and replicate"
        )
    fill = beyond[padding]
    if padding == "constant":
        fill = number_of(parcel, "inferer", inferer, "cval", 0.0)
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
        raise parcel.refuse(
            f"{key} of its inferer is {said!r}, and not {plural(spatial, 'number')} of 0 or more"
        )
    return values[::-1]
