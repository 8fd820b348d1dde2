"""A model whose facts are known, as a job would run it on the CPU. A plan needs only the facts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...base import InferConfig
from ...models import KnownFootprint, KnownModel
from ..planning.memory import CPU_FORWARD
from ..tiling.geometry import PatchShape
from .heads import is_wide


class HostDevice(NamedTuple):
    """The CPU. Without torch, no other device can be found."""

    type: str = "cpu"


@dataclass(frozen=True)
class KnownNet:
    """The facts of a `Net` that a plan needs."""

    model: KnownModel
    amp: str | None
    carrier: np.dtype[Any]
    batch: int
    footprint: KnownFootprint
    patch_flops: float | None = None
    """Not counted without torch."""


def fit_known_net(
    config: InferConfig, model: KnownModel, shape: PatchShape, dtype: np.dtype[Any]
) -> KnownNet:
    """Fit a model to the patches of an input of ``dtype``, as `fit_net` does on the CPU.

    Raises `UsageError` if the model does not take such a patch.
    """
    fine = is_wide(dtype)
    if fine and not model.weight_bytes:
        model = replace(model, dtype="float64")
    return KnownNet(
        model=model,
        amp=None if config.amp in ("auto", "off") else config.amp,
        carrier=np.dtype(np.float64 if fine else np.float32),
        batch=-(-(config.batch or CPU_FORWARD) // CPU_FORWARD) * CPU_FORWARD,
        footprint=model.footprint((CPU_FORWARD, model.in_channels, *shape.seen)),
    )
