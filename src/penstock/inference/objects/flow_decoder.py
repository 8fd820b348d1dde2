"""Cellpose: voxels that flow to the same place are one object.

channels 0, 1, ...  the flow along each axis, z y x, as the network gives it: 5 voxels a step
the last channel    how likely a voxel is in an object, as a logit
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import FlowKnobs, LabelConfig, UsageError, require


@dataclass(frozen=True)
class FlowDecoder:
    """Makes objects of an array c z y x, or c y x, by the dynamics of cellpose."""

    dynamics: Any
    threshold: float
    knobs: FlowKnobs

    def __call__(self, scores: NDArray[Any]) -> NDArray[Any]:
        axes = scores.ndim - 1
        if len(scores) != axes + 1:
            raise UsageError(
                f"--decoder cellpose: the input has {len(scores)} channels, and takes {axes + 1}: "
                f"flows along {' '.join('zyx'[-axes:])} and the cell probability"
            )
        scores = scores.astype(np.float32)
        # The largest share of the input that an object may take would depend on the block.
        with require("torch.sparse", "infer").check_sparse_tensor_invariants(False):
            return np.asarray(
                self.dynamics.compute_masks(
                    scores[:-1], scores[-1], niter=self.knobs.niter,
                    cellprob_threshold=self.threshold, do_3D=axes == 3, min_size=-1,
                    flow_threshold=self.knobs.flow_threshold, max_size_fraction=np.inf,
                )
            )  # fmt: skip


def flow_decoder(config: LabelConfig) -> FlowDecoder:
    """The decoder that a labelling asks for.

    Args:
        config: The settings.

    Returns:
        The decoder.

    Raises:
        UsageError: cellpose is not installed.
    """
    from ...models import import_torchvision

    import_torchvision()  # cellpose imports it
    dynamics = require("cellpose.dynamics", "")
    return FlowDecoder(dynamics, config.threshold or 0.0, config.decoder_knobs)
