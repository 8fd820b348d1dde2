"""bioimage.io packages: a network with the processing of its input and output, and test tensors.

    rdf.yaml or bioimageio.yaml, of format 0.4 or 0.5, read by `bioimageio.spec` without a network

Of several weights those are taken that run least code: a state dict of a network of a library,
ONNX, then TorchScript or a network in a file of the package, which the user must trust.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...base import as_usage_error, require
from ...data import Normalisation
from ..recipe import AS_IT_IS, HeadRecipe, Recipe
from ..user_code import find_reference
from ..weights import load_weights
from .chain import Chain
from .onnx import OnnxNet
from .package import Package, Parcel, TensorsToMatch, in_order, in_our_order

_NAMES = ("bioimageio.yaml", "rdf.yaml")
_LIBRARIES = ("monai.networks.", "dynamic_network_architectures.")
"""Libraries of networks whose functions make nothing but networks."""
_DONE = (
    "scale_range and zero_mean_unit_variance over all spatial axes and before others, "
    "fixed_zero_mean_unit_variance and scale_linear by channel, clip to numbers, and ensure_dtype "
    "of floats"
)
_LEAST_PATCH = {2: 256, 3: 64}
"""The least side of a patch, by spatial axes, where the network takes many."""


def read(parcel: Parcel) -> Package:
    """Open a bioimage.io package.

    Args:
        parcel: Its folder.

    Returns:
        The network and its recipe.

    Raises:
        UsageError: It is damaged, wants what is not done, or is code that is not trusted.
        MissingDependency: `bioimageio.spec`, or the runtime of its weights, is not installed.
    """
    described = _described(parcel)
    if len(described.inputs) != 1:
        raise parcel.refuse(f"its network takes {len(described.inputs)} inputs, not one")
    given, outputs = described.inputs[0], described.outputs
    takes, *gives = (_letters(parcel, each.axes) for each in (given, *outputs))
    if len({frozenset(order) - {"c"} for order in (takes, *gives)}) > 1:
        raise parcel.refuse(f"its axes are {takes} and become {', '.join(gives)}; outputs of other "
                            "axes than the input's are not made")  # fmt: skip
    spatial = [letter for letter in "zyx" if letter in takes]
    axes = {_letter(axis): axis for axis in given.axes}
    channels = [str(name) for name in axes["c"].channel_names] if "c" in axes else [""]
    named = channels != [f"channel{number}" for number in range(len(channels))]  # by the library
    module = in_order(_module(parcel, described.weights), takes, gives)
    heads = _heads(parcel, outputs)
    sides = [_side(axes, letter, len(spatial)) for letter in spatial]
    patch: Any = (1, *sides)[-3:]
    made = [(_letter(axis), axis) for output in outputs for axis in output.axes]
    halo = [max(_halo(each, axes[letter]) for its, each in made if its == letter)
            for letter in spatial]  # fmt: skip
    overlap: Any = (0, *(2 * each for each in halo))[-3:]
    spacing, unit = _spacing(axes, spatial)
    recipe = Recipe(
        str(parcel.path),
        channels=tuple(channels) if len(channels) > 1 and named else (),
        normalisation=_normalisation(parcel, given, len(channels)),
        spacing=spacing,
        unit=unit,
        patch=patch,
        overlap=overlap if any(halo) else None,
        heads=heads[0],
        reduce=heads[1],
    )

    def tests() -> TensorsToMatch:
        return _tests(parcel, described, takes, gives)

    return Package(module, recipe, len(channels), len(spatial), tests)


def _described(parcel: Parcel) -> Any:
    """The description of the model in its newest format."""
    spec = require("bioimageio.spec", "bioimageio")
    (file, *_) = (parcel.folder / name for name in _NAMES if (parcel.folder / name).is_file())
    # It raises errors of many types.
    with as_usage_error(parcel.sentence("bioimageio.spec cannot read it")):
        described = spec.load_description(file, format_version="latest", perform_io_checks=False)
    if isinstance(described, spec.InvalidDescr) or not hasattr(described, "weights"):
        # The format that it is written in comes first, then the newest.
        checks = getattr(described, "validation_summary", None)
        errors = [each.msg for check in (checks.details if checks else ()) for each in check.errors]
        first = next(iter(errors), "it describes no model")
        raise parcel.refuse(f"it is no valid description of a model: {first}")
    return described


def _checked(parcel: Parcel, described: Any) -> Path:
    """A file of the package. Its hash must be the one in the description."""
    file = parcel.file(_name(described.source))
    said = described.sha256
    if said is not None and hashlib.sha256(file.read_bytes()).hexdigest() != str(said):
        raise parcel.refuse(f"{file.name} is not the file that it describes: its SHA-256 differs")
    return file


def _name(source: Any) -> str:
    """The path of a file in the package, which the library may have made absolute, or a URL."""
    return str(source if isinstance(source, PurePath) else getattr(source, "root", source))


def _letter(axis: Any) -> str:
    """The letter of an axis: b, c, z, y or x; others as they are."""
    return {"batch": "b", "channel": "c"}.get(str(axis.type), str(axis.id))


def _letters(parcel: Parcel, axes: Sequence[Any]) -> str:
    letters = [_letter(axis) for axis in axes]
    if not {"b", "y", "x"} <= set(letters) <= set("bczyx"):
        raise parcel.refuse(f"its axes are {', '.join(letters)}, and not some of b c z y x")
    return "".join(letters)


def _side(axes: Mapping[str, Any], letter: str, spatial: int) -> int:
    """A side of a patch: the only one, or the least of many that is not small."""
    axis, size = axes[letter], axes[letter].size
    if isinstance(size, int):
        return size
    if (other := getattr(size, "axis_id", None)) is not None:  # that of another axis decides
        side = _side(axes, str(other), spatial)
        return int(size.get_size(axis, axes[str(other)], ref_size=side))
    steps = max(0, math.ceil((_LEAST_PATCH[spatial] - size.min) / size.step))
    return int(size.min + steps * size.step)


def _halo(made: Any, given: Any) -> int:
    """The voxels of an axis of the input that lie below the halo of one of an output."""
    return math.ceil((getattr(made, "halo", 0) or 0) * made.scale / given.scale)


def _spacing(axes: Mapping[str, Any], spatial: Sequence[str]) -> tuple[Any, str]:
    """The voxel size, and its unit; None if none is said."""
    units = {getattr(axes[letter], "unit", None) for letter in spatial}
    if len(units) > 1 or units == {None}:
        return None, ""
    sizes = [float(axes[letter].scale) for letter in spatial]
    return (float("nan"), *sizes)[-3:], str(units.pop())


def _normalisation(parcel: Parcel, given: Any, channels: int) -> Any:
    chain = Chain(parcel.refuse, channels)
    for step in given.preprocessing:
        _add(parcel, chain, step, given)
    return tuple(chain.each)


def _add(parcel: Parcel, chain: Chain, step: Any, given: Any) -> None:
    """Add a step to those of an input."""
    letters = {str(axis.id): _letter(axis) for axis in given.axes}
    name, values = str(step.id), step.kwargs
    over = {letters[str(axis)] for axis in getattr(values, "axes", None) or letters}
    whole = over >= set(letters.values()) - {"b", "c"}
    by_channel = letters.get(str(getattr(values, "axis", "")), "c") == "c"
    # After other steps their library counts numbers of the input as it came.
    counts = whole and chain.each == [Normalisation()]
    if name == "ensure_dtype" and ("float" in values.dtype or chain.each == [Normalisation()]):
        return
    if name == "scale_range" and counts and values.reference_tensor in (None, given.id):
        ends = values.min_percentile, values.max_percentile
        how = Normalisation("percentiles", *ends, added=float(values.eps))
        chain.count(name, how, by_channel="c" not in over)
    elif name == "zero_mean_unit_variance" and counts:
        how = Normalisation("moments", added=float(values.eps))
        chain.count(name, how, by_channel="c" not in over)
    elif name == "fixed_zero_mean_unit_variance" and by_channel:
        chain.affine(name, values.mean, values.std)
    elif name == "scale_linear" and by_channel and np.all(values.gain):
        gains = np.asarray(values.gain, np.float64)
        chain.affine(name, -np.asarray(values.offset) / gains, 1 / gains)
    elif name == "clip" and values.min_percentile is values.max_percentile is None:
        chain.clip(*(-math.inf if values.min is None else values.min,
                     math.inf if values.max is None else values.max))  # fmt: skip
    else:
        raise parcel.refuse(
            f"{name} of its input is not done as it is said; {_DONE} are: do it to the volume "
            "first, and leave the step out of the description"
        )


def _heads(parcel: Parcel, outputs: Sequence[Any]) -> tuple[dict[str, HeadRecipe], str | None]:
    """What is done to each head, and how scores are reduced."""
    heads: dict[str, HeadRecipe] = {}
    reduce: str | None = None
    for number, each in enumerate(outputs):
        activation: Any = None
        scaling: Any = None
        dtype = "float32"
        for step in each.postprocessing:
            name, values = str(step.id), step.kwargs
            first = activation is scaling is reduce is None and "float" in dtype
            if first and (name == "sigmoid" or (name == "softmax" and values.axis == "channel")):
                activation = name
            elif first and name == "scale_linear" and isinstance(values.gain, float | int):
                scaling = (float(values.offset), float(values.gain))
            elif name == "binarize" and isinstance(values.threshold, float) and len(outputs) == 1:
                reduce = f"threshold:{values.threshold:.17g}"
            elif name == "ensure_dtype" and (first or reduce or "float" in values.dtype):
                dtype = values.dtype
            else:
                raise parcel.refuse(
                    f"{name} of its output is not done; one of sigmoid, softmax by channel and "
                    "scale_linear is, and then binarize by one number: leave the step out of the "
                    "description, and do it to what infer writes"
                )
        kind: Any = "scores" if activation or reduce else "intensity"
        name = "out" if len(outputs) == 1 else f"out{number}"
        if kind == "scores":
            heads[name] = HeadRecipe(kind, activation, scaling)
        elif "float" in dtype:
            heads[name] = HeadRecipe(kind, None, scaling or AS_IT_IS, each.dtype)
        else:  # a network that returns other numbers than whole ones is refused as it runs
            heads[name] = HeadRecipe("labels", dtype=dtype.replace("bool", "uint8"))
    return heads, reduce


def _module(parcel: Parcel, weights: Any) -> nn.Module:
    """The network, from that kind of its weights which runs the least code."""
    state, onnx, script = weights.pytorch_state_dict, weights.onnx, weights.torchscript
    if state is not None and hasattr(state.architecture, "import_from"):
        return _of_library(parcel, state)
    if onnx is not None:
        return OnnxNet(parcel, _checked(parcel, onnx))
    if state is not None:
        parcel.needs_trust("the network in its file")
        return _of_file(parcel, state)
    if script is not None:
        parcel.needs_trust("its TorchScript")
        with as_usage_error(parcel.sentence("its TorchScript is damaged"), RuntimeError):
            return torch.jit.load(str(_checked(parcel, script)), map_location="cpu")
    there = [name for name, value in weights if value is not None]
    if not there:
        raise parcel.refuse("it has no weights")
    raise parcel.refuse(
        f"its weights are of {', '.join(there)}, which is not run; convert them to "
        "pytorch_state_dict or onnx, as bioimageio.core does"
    )


def _of_library(parcel: Parcel, state: Any) -> nn.Module:
    architecture = state.architecture
    name = f"{architecture.import_from}.{architecture.callable}"
    if not name.startswith(_LIBRARIES):
        parcel.needs_trust(f"{name}, which makes its network,")
    return _with_weights(parcel, parcel.named(name, "its network is"), state)


def _of_file(parcel: Parcel, state: Any) -> nn.Module:
    file = _checked(parcel, state.architecture)
    with find_reference(f"{file}:{state.architecture.callable}") as make:
        return _with_weights(parcel, make, state)


def _with_weights(parcel: Parcel, make: Callable[..., nn.Module], state: Any) -> nn.Module:
    # The package's code may raise anything.
    with as_usage_error(parcel.sentence("its network could not be made")):
        module = make(**state.architecture.kwargs)
    load_weights(module, str(state.architecture.callable), _checked(parcel, state), "--model")
    return module


def _tests(parcel: Parcel, described: Any, takes: str, gives: Sequence[str]) -> TensorsToMatch:
    """The test tensors, with our order of axes."""
    tolerance = next(
        iter(getattr(described.config.bioimageio, "reproducibility_tolerance", ())), None
    )
    files = [described.inputs[0], *described.outputs]
    arrays = [
        _tensor(parcel, each.test_tensor, order)
        for each, order in zip(files, (takes, *gives), strict=True)
    ]
    return TensorsToMatch(
        arrays[0],
        tuple(arrays[1:]),
        relative=1e-3 if tolerance is None else tolerance.relative_tolerance,
        absolute=1e-3 if tolerance is None else tolerance.absolute_tolerance,
    )


def _tensor(parcel: Parcel, described: Any, order: str) -> NDArray[Any]:
    if described is None:
        raise parcel.refuse("it has no test tensors")
    file = _checked(parcel, described)
    with as_usage_error(parcel.sentence("a test tensor is damaged"), ValueError, OSError):
        array = np.load(file, allow_pickle=False)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return in_our_order(torch.from_numpy(native), order).numpy()
