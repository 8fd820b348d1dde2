"""StarDist: polygons or polyhedra around likely centres; of those that overlap one stays.

channel 0        how likely a voxel is the centre of an object
channels 1, ...  how far the object reaches along each ray, in voxels of the image
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import LabelConfig, StarKnobs, UsageError, describe, read_json, require

_LEAST = 1e-3
"""The least distance that StarDist draws. A network may give one below 0."""


@dataclass(frozen=True)
class StarDecoder:
    """Makes objects of an array c z y x, or c y x, by the functions of stardist."""

    stardist: Any
    rays: Any
    """The directions of distances in a volume; None for the golden spiral of their number."""
    anisotropy: tuple[float, ...] | None
    """The stretch of the golden spiral, along z y x."""
    grid: tuple[int, ...]
    """Voxels of the image for one of the scores, along z y x."""
    likely: float
    overlap: float

    def __call__(self, scores: NDArray[Any]) -> NDArray[Any]:
        shape, axes, library = scores.shape[1:], scores.ndim - 1, self.stardist
        if (count := len(scores) - 1) <= axes:
            raise UsageError(
                f"--decoder stardist: the input has {count + 1} channels, and takes a probability "
                f"and distances along {axes + 1} rays or more"
            )
        grid = (1, *self.grid)[-axes:]
        scale = 1 / np.array(grid)
        reach = np.maximum(np.moveaxis(scores[1:], 0, -1), _LEAST)
        limits = {"prob_thresh": self.likely, "nms_thresh": self.overlap, "grid": grid}
        if axes == 2:
            points, likely, reach = library.non_maximum_suppression(reach, scores[0], **limits)
            return np.asarray(
                library.polygons_to_label(reach, points * scale, shape, likely, scale_dist=scale)
            )
        rays = self.rays or library.Rays_GoldenSpiral(count, self.anisotropy)
        if len(rays) != count:
            raise UsageError(
                f"--decoder stardist: the model has {len(rays)} rays, and the input distances "
                f"along {count}"
            )
        points, likely, reach = library.non_maximum_suppression_3d(reach, scores[0], rays, **limits)
        return np.asarray(
            library.polyhedron_to_label(
                reach, points * scale, rays.copy(scale), shape, likely, verbose=False
            )
        )


def star_decoder(config: LabelConfig) -> StarDecoder:
    """The decoder that a labelling asks for.

    Args:
        config: The settings.

    Returns:
        The decoder.

    Raises:
        UsageError: stardist is not installed, or the folder has no StarDist model.
    """
    knobs: StarKnobs = config.decoder_knobs
    shown = warnings.formatwarning
    library = require("stardist", "")
    warnings.formatwarning = shown  # stardist sets one of its own
    said: dict[str, Any] = {}
    if knobs.model is not None:
        for name in ("config.json", "thresholds.json"):
            if (file := knobs.model / name).is_file() or name == "config.json":
                said |= read_json(file)
    try:
        rays = _rays(library, said["rays_json"]) if "rays_json" in said else None
        grid = tuple(map(int, said.get("grid", knobs.grid)))
        limits = [
            float(said.get(name, usual) if asked is None else asked)
            for name, usual, asked in (("prob", 0.5, config.threshold), ("nms", 0.4, knobs.nms))
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--decoder-option model={knobs.model}: it is no StarDist model: {describe(error)}"
        ) from error
    return StarDecoder(library, rays, knobs.anisotropy, grid, *limits)


def _rays(library: Any, said: Any) -> Any:
    """The rays that a file names. stardist would evaluate the name as Python."""
    if not str(said["name"]).startswith("Rays_"):
        raise ValueError(f"there are no rays {said['name']}")
    return getattr(library, said["name"])(**said["kwargs"])
