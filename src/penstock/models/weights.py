"""Weights in files: read as tensors only, and put into a module by name and shape."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base import UsageError, as_usage_error, plural, require
from ..data import is_file

_WRAPPERS = ("module", "_orig_mod")
"""Words that DataParallel and torch.compile put into names, in front or between."""
_EXTRA = "_extra_state"
"""Name of the state that a module keeps beside tensors; see torch's `get_extra_state`."""

State = dict[str, Any]


def read_tensors(path: Path, flag: str) -> Any:
    """Read a torch file of tensors and plain values, or a safetensors file, onto the CPU.

    Args:
        path: The file.
        flag: The flag that errors name.

    Returns:
        The content of the file.

    Raises:
        UsageError: There is no such file, it is damaged, or it holds anything else.
    """
    if not is_file(path, f"{flag} {path}"):
        raise UsageError(f"{flag} {path}: there is no such file")
    tensorfile = require("safetensors.torch", "infer") if path.suffix == ".safetensors" else None
    try:
        if tensorfile is not None:
            return tensorfile.load_file(path)
        with warnings.catch_warnings():
            # It warns of TorchScript archives, which are refused.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    # Readers raise errors of many types for a damaged file.
    except Exception as error:
        raise UsageError(f"{flag} {path} {_why_unread(path)}") from error


def _why_unread(path: Path) -> str:
    """The reason why torch read no tensors, and what a user can do who trusts the file."""
    try:  # it lists the names and makes none of the objects
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # it is no archive of torch, or this torch has no such list
        names = []
    if not names:
        return (
            "is not a file of tensors only, or it is damaged (nothing else is read: unpickling a "
            "file runs its code)"
        )
    return (
        f"holds {min(names)} beside tensors, and is not read, as making such an object can run any "
        "code; if you trust its maker, open it by torch.load(FILE, weights_only=False), and keep "
        "the tensors alone by torch.save(STATE_DICT, 'weights.pth')"
    )


def read_state(path: Path, flag: str = "--weights") -> State:
    """Read a state dict: tensors by name, and the extra state of modules.

    Args:
        path: The file.
        flag: The flag that errors name.

    Returns:
        The state dict, taken out of the checkpoint around it if there is one.

    Raises:
        UsageError: The file cannot be read, or holds no weights.
    """
    state = read_tensors(path, flag)
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(map(_is_state, state.items())):
        raise UsageError(f"{flag} {path} holds no weights: no tensors by name")
    return dict(state)


def _is_state(item: tuple[Any, Any]) -> bool:
    name, value = item
    is_extra = isinstance(name, str) and name.rpartition(".")[2] == _EXTRA
    return is_extra or (isinstance(name, str) and isinstance(value, Tensor))


def load_weights(module: nn.Module, name: str, path: Path, flag: str = "--weights") -> None:
    """Load the tensors of a file into a module that has exactly those names and shapes.

    Args:
        module: The module, which is changed.
        name: Its name in errors.
        path: The file.
        flag: The flag that errors name.

    Raises:
        UsageError: The file cannot be read, or its tensors are of another model.
    """
    put_weights(module, name, read_state(path, flag), f"{flag} {path}")


def put_weights(module: nn.Module, name: str, state: State, place: str) -> None:
    """Put tensors into a module that has exactly those names and shapes.

    Args:
        module: The module, which is changed.
        name: Its name in errors.
        state: The tensors by name.
        place: Names where they come from, in errors.

    Raises:
        UsageError: The tensors are of another model.
    """
    from_public = getattr(module, "from_public", None)
    if from_public is not None:
        state = from_public({_plain(key): value for key, value in state.items()})
    wanted = module.state_dict()
    state = named_as(state, wanted)
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    wrong = [
        f"has {key} of {tuple(state[key].shape)}, not {tuple(wanted[key].shape)}"
        for key in sorted(wanted.keys() & state.keys())
        if isinstance(wanted[key], Tensor)
        and isinstance(state[key], Tensor)
        and wanted[key].shape != state[key].shape
    ]
    shown = [f"lacks {key}" for key in missing] + [f"has an unknown {key}" for key in extra] + wrong
    if shown:
        raise UsageError(
            f"{place} belongs to another model than {name}: {plural(len(missing), 'tensor')} "
            f"missing, {len(extra)} unknown, {len(wrong)} of another shape; it {shown[0]}"
        )
    # A module's own `set_extra_state` may raise anything.
    with as_usage_error(f"{place} does not fit {name}"):
        module.load_state_dict(state)


def named_as(state: Mapping[str, Any], names: Collection[str]) -> State:
    """A state with the names of a module: words of wrappers are left out or put in, and so is the
    attribute of a Lightning module below which all of them lie. A name that fits stays as it is,
    and so does one whose other name is taken."""
    first = next(iter(names), "")
    around = [key.removesuffix(first) for key in state if key.endswith(f".{first}")]
    for place in around:
        if state.keys() == {place + name for name in names}:
            return {key.removeprefix(place): value for key, value in state.items()}
    by_plain = {_plain(name): name for name in names}

    def named(key: str) -> str:
        other = by_plain.get(_plain(key), key)
        return key if key in names or other in state else other

    return {named(key): value for key, value in state.items()}


def _plain(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)
