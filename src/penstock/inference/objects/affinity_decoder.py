"""Affinities: the mutex watershed joins the likeliest neighbours first, and keeps others apart.

channel 0      with --threshold alone: how likely a voxel is in an object
each of more   how likely a voxel and its neighbour at an offset are in one object
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import AffinityKnobs, LabelConfig, UsageError, require


@dataclass(frozen=True)
class AffinityDecoder:
    """Makes objects of an array c z y x, or c y x, by the mutex watershed of bioimage-cpp."""

    segmentation: Any
    threshold: float | None
    knobs: AffinityKnobs

    def __call__(self, scores: NDArray[Any]) -> NDArray[Any]:
        offsets, masked = self.knobs.offsets, self.threshold is not None
        axes = scores.ndim - 1
        if len(scores) != len(offsets) + masked or {axes} != set(map(len, offsets)):
            after = ", after one for objects" if masked else ""
            raise UsageError(
                f"--decoder affinities: the input has {len(scores)} channels along {axes} axes, "
                f"and takes one for each of {len(offsets)} offsets{after}"
            )
        inside = scores[0] > self.threshold if masked else None
        near = len([*takewhile(lambda offset: sum(map(abs, offset)) == 1, offsets)])
        weights = scores[masked:].astype(np.float32)
        np.subtract(1, weights[near:], out=weights[near:])  # these keep apart
        return np.asarray(
            self.segmentation.mutex_watershed(
                weights, offsets, near, strides=self.knobs.strides, mask=inside
            )
        )


def affinity_decoder(config: LabelConfig) -> AffinityDecoder:
    """The decoder that a labelling asks for.

    Args:
        config: The settings.

    Returns:
        The decoder.

    Raises:
        UsageError: bioimage-cpp is not installed.
    """
    segmentation = require("bioimage_cpp.segmentation", "label")
    return AffinityDecoder(segmentation, config.threshold, config.decoder_knobs)
