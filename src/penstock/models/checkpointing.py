"""Gradient checkpointing of any module: less memory for more time.

A model with a method ``set_checkpointing(on)``, or with that of Hugging Face's models, does it
itself. In any other each child of the module is computed once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..base import UsageError


def recompute_activations(module: nn.Module, name: str) -> None:
    """Keep only the activations at the borders of a module's parts for the backward pass.

    Args:
        module: The module, which is changed.
        name: Its name in errors.

    Raises:
        UsageError: It cannot be done, or would change what the model computes.
    """
    for switch, arguments in (
        ("set_checkpointing", (True,)),
        ("gradient_checkpointing_enable", ()),
    ):
        if callable(method := getattr(module, switch, None)):
            method(*arguments)
            return
    parts = list(_parts(module))
    if not parts:
        raise UsageError(f"--checkpointing: model {name} has no parts to recompute")
    for place, part in parts:
        leaf = next(m for m in part.modules() if not list(m.children()))
        inner = [m for m in part.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if inner or getattr(leaf, "inplace", False):
            why = "counts its batches" if inner else "overwrites its input"
            raise UsageError(
                f"--checkpointing: part {place} of model {name} {why}, so it cannot be "
                "computed twice; give the model a method set_checkpointing(on)"
            )
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # it has no forward of its own
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child
