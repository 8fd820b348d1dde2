"""The facts of our own models that a plan needs where torch is not installed. Tests compare each
number with the module itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..base import HeadKind, UsageError
from .registry import REGISTRY


class KnownHead(NamedTuple):
    """One output of such a model."""

    name: str
    channels: int
    dtype: str


class KnownFootprint(NamedTuple):
    """The heads of one forward and its memory, as `Footprint` has them."""

    heads: tuple[KnownHead, ...]
    peak_bytes: int
    channels_last: bool = True


@dataclass(frozen=True)
class KnownModel:
    """The facts that a plan needs of a model of Penstock's with one head."""

    name: str
    in_channels: int
    """The channels of its input, and of its output."""
    spatial_axes: int | None
    weight_bytes: int
    values: Callable[[int, Sequence[int]], int]
    """A function from the batch and the sides of a patch to the most values alive at once in a
    forward."""
    least: int = 1
    """The shortest side that it takes."""
    step: int = 1
    """A number that each side must be a multiple of."""
    dtype: str = "float32"

    @property
    def kind(self) -> HeadKind:
        """The kind of its head."""
        return REGISTRY[self.name].kind

    def footprint(self, shape: Sequence[int]) -> KnownFootprint:
        """The heads and the memory of one forward.

        Raises:
            UsageError: The model does not take sides of that length.
        """
        batch, channels, *sides = shape
        if any(side < self.least or side % self.step for side in sides):
            wanted = f"at least {self.least}" if self.least > 1 else f"multiples of {self.step}"
            raise UsageError(
                f"model {self.name} does not take a batch of shape {tuple(shape)} "
                f"(batch, channels, spatial; see --batch, --patch and --in-channels): its sides "
                f"must be {wanted}"
            )
        itemsize = 8 if self.dtype == "float64" else 4
        head = KnownHead("out", channels, self.dtype)
        return KnownFootprint((head,), itemsize * self.values(batch, sides))


def known_model(name: object, in_channels: int | None) -> KnownModel | None:
    """The facts of a model that is run as it ships, without other weights.

    Args:
        name: A name of the registry, or anything else.
        in_channels: Channels that the model is to take. The default is its own number.

    Returns:
        The facts, or None if the module itself must be loaded for them.
    """
    if name == "identity":
        channels = in_channels or 1
        return KnownModel(
            "identity", channels, None, 0, lambda batch, sides: batch * channels * math.prod(sides)
        )
    model = next((model for model in _OURS if model.name == name), None)
    return model if model is None or in_channels in (None, model.in_channels) else None


def _denoise_tiny(batch: int, sides: Sequence[int]) -> int:
    """The values of the last level's first convolution: its input and output, each a second time in
    another layout, beside those that the skips and the level below hold."""
    return batch * (65 * math.prod(sides) + 8 * math.prod(side // 2 for side in sides))


def _prithvi(
    size: str, weight_bytes: int, width: int, heads: int, patch: int, head_width: int
) -> KnownModel:
    def values(batch: int, sides: Sequence[int]) -> int:
        cells = math.prod(side // patch for side in sides)
        tokens = cells + 1
        decoding = math.prod(sides) * 2 * (head_width // 8 + head_width // 16) + cells * head_width
        # Adapters and the MLP hold eleven times the tokens, attention its scores twice.
        block = max(11 * tokens * width, 6 * tokens * width + 2 * heads * tokens**2)
        encoding = batch * (cells * width + block) + width
        return batch * 6 * math.prod(sides) + max(batch * decoding, encoding)

    return KnownModel(f"prithvi-refiner-{size}", 6, 2, weight_bytes, values, step=patch)


_OURS = (
    KnownModel("denoise-tiny", 1, 3, 101_732, _denoise_tiny, least=4),
    _prithvi("tiny", 25_284_536, 192, 3, 16, 128),
    _prithvi("100m", 356_151_640, 768, 12, 16, 256),
    _prithvi("300m", 1_230_161_240, 1024, 16, 16, 256),
    _prithvi("600m", 2_548_080_424, 1280, 16, 14, 320),
)
