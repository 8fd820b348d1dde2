"""Models: found by name, by ``package.module:function``, by ``file.py:function`` or in a file.

A `Model` is a module that is ready to run, with the facts that a plan needs: channels, spatial axes
and the size of its weights. Weights are read with safetensors or with ``weights_only=True``. A
``.py`` that the user names is code, and is run. Programs (.pt2, TorchScript) are code as well, and
are opened only if the user trusts them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base import HeadKind, MissingDependency, UsageError, as_usage_error, blaming
from . import user_code
from .packages.package import TensorsToMatch, open_package
from .recipe import Recipe, network_of_training, record_of_weights, weights_file
from .registry import (
    PROGRAMS,
    REGISTRY,
    TRAINING,
    added_model,
    check_model_name,
    package_kind,
)
from .weights import load_weights


class _Wrapped(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@dataclass(frozen=True)
class Head:
    """One output of a model."""

    name: str
    channels: int
    dtype: torch.dtype = torch.float32
    factors: tuple[Fraction, ...] = ()
    """Voxels that it has for one of the input, along each spatial axis; empty for one on each."""


@dataclass(frozen=True)
class Model:
    """A module in eval mode and the facts that a plan needs."""

    name: str
    module: nn.Module
    in_channels: int
    spatial_axes: int | None
    """2 or 3 for a net of such convolutions. None for a net that takes either."""
    parameters: int
    weight_bytes: int
    reference: str
    """The name, reference or file that was asked for; empty for a module. For a name that another
    package adds, the ``package.module:function`` behind it."""
    code: str
    """A hash of the file that the user named; empty for a model of the registry or a module."""
    kind: HeadKind | None = None
    """The kind of its heads, if its training or the registry says so."""
    recipe: Recipe | None = None
    """Its input and output as its makers want them; None if they say nothing."""
    tests: Callable[[], TensorsToMatch] | None = None
    """Reads the test tensors of its package; None if there are none."""
    weightless_dtype: torch.dtype = torch.float32
    """The dtype of its input if it has no weights."""
    says_channels: bool = True
    """False if ``in_channels`` is a mere guess, as the user says nothing and the module has neither
    such an attribute nor a convolution."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its input: that of its first weights."""
        weights = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(weights, self.weightless_dtype)

    def heads(self, outputs: Any) -> dict[str, Tensor]:
        """The result of a forward as named tensors (batch, channels, spatial...).

        Args:
            outputs: A tensor, a list or tuple of tensors, or a mapping of names to tensors.

        Returns:
            The heads by name: ``out``, or ``out0``, ``out1`` and so on, or those of the mapping.

        Raises:
            UsageError: A head is no tensor.
        """
        return named_heads(self.name, outputs)


def named_heads(model: str, outputs: Any) -> dict[str, Tensor]:
    """See `Model.heads`; ``model`` is its name in errors."""
    if isinstance(outputs, Mapping):
        heads = {str(name): head for name, head in outputs.items()}
    elif isinstance(outputs, list | tuple):
        heads = {f"out{i}": head for i, head in enumerate(outputs)}
    else:
        heads = {"out": outputs}
    for name, head in heads.items():
        if not isinstance(head, Tensor):
            raise UsageError(
                f"model {model} returns a {type(head).__name__} as {name}, not a tensor"
            )
    return heads


def load_model(
    model: str | nn.Module | Callable[[Tensor], Any],
    weights: str | Path | None = None,
    in_channels: int | None = None,
    *,
    untrained: bool = False,
    trust: bool = False,
) -> Model:
    """Find a model and load its weights.

    A module may say in attributes how many ``in_channels`` and ``spatial_axes`` it has. It may also
    turn a public checkpoint into its own state dict (``from_public``).

    Args:
        model: A name of the registry, ``package.module:function``, ``file.py:function``, a file
            (.pt2, TorchScript, ONNX), the folder or zip file of a package, a module, or a function
            of a batch.
        weights: A file of weights, or the folder of a training; by default the model's own.
        in_channels: Channels that the model takes; by default the module's attribute, else the
            input channels of its first convolution. A factory with a parameter of this name gets
            the number.
        untrained: Allow a model that needs weights to have none.
        trust: Open a program (.pt2 or TorchScript), which may run any code.

    Returns:
        The module in eval mode, and the facts about it.

    Raises:
        UsageError: The name is unknown, a factory fails, the weights are of another model, or a
            program is not trusted.
    """
    kind_of_package = package_kind(model)
    if kind_of_package is not None:
        assert isinstance(model, str)
        place = Path(model)
        if kind_of_package != TRAINING:
            return _packaged(place, kind_of_package, weights, trust)
        model, in_channels = network_of_training(place, in_channels, trust=trust)
        weights = weights or place
    name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    reference, added = model if isinstance(model, str) else "", added_model(model)
    if added is None:
        module, weights = _find(model, weights, in_channels, trust)
    else:
        reference = f"{added.module}:{added.attr}"
        with blaming(added, f"--model-type {model}"):
            module = _call(reference, in_channels)
    _check_values(name, module)
    entry = REGISTRY.get(model) if isinstance(model, str) else None
    if entry is not None and entry.needs_weights and weights is None and not untrained:
        raise UsageError(f"--model-type {model} has no weights of its own; give --weights")
    recipe = None
    if weights is not None:
        load_weights(module, name, weights_file(Path(weights)))
        record = record_of_weights(Path(weights))
        recipe = None if record is None else record.recipe
    module.eval()
    described = _described(name, module, in_channels, reference)
    kind = entry.kind if entry is not None else None
    return replace(described, kind=(recipe and recipe.kind) or kind, recipe=recipe)


def _check_values(name: str, module: nn.Module) -> None:
    """Refuse a module whose weights have no values."""
    for parameter, value in module.named_parameters():
        if value.is_meta or nn.parameter.is_lazy(value):
            raise UsageError(
                f"model {name} has no values in {parameter} (it is lazy, or on torch's device "
                "meta): make them before you return the model"
            )


def _packaged(path: Path, kind: str, weights: str | Path | None, trust: bool) -> Model:
    """The model of a package."""
    if weights is not None:
        raise UsageError(f"--model-type {path} has weights of its own; leave out --weights")
    with float32_default():
        package = open_package(path, kind, trusted=trust)
    model = _described(str(path), package.module, package.in_channels, "")
    return replace(
        model,
        spatial_axes=package.spatial_axes,
        kind=package.recipe.kind,
        recipe=package.recipe,
        tests=package.tests,
    )


def _described(
    name: str,
    module: nn.Module,
    in_channels: int | None,
    reference: str,
) -> Model:
    """A module with the facts that a plan needs, from its attributes or its first convolution."""
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    channels = in_channels or getattr(module, "in_channels", None)
    says_channels = channels is not None or first is not None
    if channels is None:
        channels = first.in_channels if first is not None else 1
    axes = getattr(module, "spatial_axes", None)
    if axes is None and first is not None:
        axes = 2 if isinstance(first, nn.Conv2d) else 3
    tensors = [*module.parameters(), *module.buffers()]
    return Model(
        name=name,
        module=module,
        in_channels=int(channels),
        spatial_axes=axes,
        parameters=sum(p.numel() for p in module.parameters()),
        weight_bytes=sum(t.numel() * t.element_size() for t in tensors),
        reference=reference,
        code=_code_hash(reference) if reference else "",
        says_channels=says_channels,
    )


@contextlib.contextmanager
def float32_default() -> Iterator[None]:
    """Make weights and buffers in float32 inside the context, whatever the caller's default is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _code_hash(text: str) -> str:
    """A hash of the file behind a model that is no part of Penstock."""
    if text in REGISTRY:
        return ""
    place = text.rpartition(":")[0] or text
    path = Path(place)
    if not path.is_file():
        path = Path(getattr(importlib.import_module(place), "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _find(
    model: str | nn.Module | Callable[[Tensor], Any],
    weights: str | Path | None,
    in_channels: int | None,
    trust: bool,
) -> tuple[nn.Module, str | Path | None]:
    if isinstance(model, nn.Module):
        return model, weights
    if callable(model):
        return _Wrapped(model), weights
    if model in REGISTRY:
        entry = REGISTRY[model]
        with float32_default():
            return _call(entry.factory, in_channels), weights or entry.weights
    check_model_name(model, "--model-type")  # so it is a program or a reference
    if model.endswith(PROGRAMS):
        return _load_program(Path(model), trust), weights
    return _call(model, in_channels), weights


def _call(text: str, in_channels: int | None) -> nn.Module:
    """Import ``module:function`` or ``file.py:function``. It is a module, a factory of one, or a
    function that is the model itself.

    A factory with a parameter ``in_channels`` gets that number.
    """
    try:
        with user_code.find_reference(text) as named:
            made = named if isinstance(named, nn.Module) else _made(named, in_channels)
    except MissingDependency:
        raise
    except UsageError as error:
        raise UsageError(f"--model-type {error}") from error.__cause__
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--model-type {text} could not be made: {user_code.error_in_user_code(error)}"
        ) from error
    if isinstance(made, nn.Module):
        return made
    if callable(made):
        return _Wrapped(made)
    raise UsageError(f"--model-type {text} returned a {type(made).__name__}, not a module")


def _made(named: Any, in_channels: int | None) -> Any:
    """The model that a factory makes. A function that needs any other argument than ``in_channels``
    is the model itself."""
    try:
        parameters = inspect.signature(named).parameters
    except ValueError:  # a function in C, such as torch.sigmoid
        return named
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind in kinds]
    if not inspect.isclass(named) and needed not in ([], ["in_channels"]):
        return named
    if in_channels and "in_channels" in parameters:
        return named(in_channels=in_channels)
    return named()


def _load_program(path: Path, trust: bool) -> nn.Module:
    """Open a torch.export program (.pt2) or a TorchScript archive with torch's own readers, which
    run code of the file. So nothing of it is read before the user has said that it is trusted."""
    if not trust:
        raise UsageError(
            f"--model-type {path}: a {path.suffix} file may run any code as soon as it is opened, "
            "and is only read with --trust-model, if you trust who made it"
        )
    with as_usage_error(f"--model-type {path} is neither a torch.export program nor TorchScript"):
        if path.suffix == ".pt2":
            return _of_one_mode(torch.export.load(path).module())
        return torch.jit.load(str(path), map_location="cpu")


def _of_one_mode(program: nn.Module) -> nn.Module:
    """The program, which stays in the mode that it was exported in. Torch's own raises an error
    where it is asked for a mode, and a training asks."""
    program.train = lambda mode=True: program  # type: ignore[method-assign]
    program.eval = lambda: program  # type: ignore[method-assign]
    return program


def computed_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Tensors in plain attributes that were computed from weights, as by
    `torch.nn.utils.weight_norm`. Torch does not copy them."""
    held: list[Any] = [vars(part) for part in module.modules()]
    while held:
        value = held.pop()
        if isinstance(value, Tensor):
            if not value.is_leaf:
                yield value
        elif isinstance(value, Mapping):
            held += value.values()
        elif isinstance(value, list | tuple):
            held += value
