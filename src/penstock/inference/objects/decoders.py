"""Decoders: functions from the network's output around a block to labels of what is there.

watershed    seeded, on channel 0, such as a probability or a distance, less channel 1, such as a
             boundary, if there is one
affinities   the mutex watershed joins the likeliest neighbours first, and keeps others apart
             channel 0      with --threshold alone: how likely a voxel is in an object
             each of more   how likely a voxel and its neighbour at an offset are in one object
cellpose     voxels that flow to the same place are one object
             channels 0, 1, ...  the flow along each axis, z y x, as the network gives it: 5 voxels
                                 a step
             the last channel    how likely a voxel is in an object, as a logit
stardist     polygons or polyhedra around likely centres; of those that overlap one stays
             channel 0        how likely a voxel is the centre of an object
             channels 1, ...  how far the object reaches along each ray, in voxels of the image
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import (
    AffinityKnobs,
    FlowKnobs,
    LabelConfig,
    StarKnobs,
    UsageError,
    plural,
    read_json,
    require,
    well_formed,
)
from ...models import error_in_user_code, find_reference
from .components import REACH, checked_connectivity, labelled

Decoder = Callable[[NDArray[Any]], NDArray[Any]]
"""A function from c z y x to labels z y x; from c y x to y x in a plane."""
_LEAST = 1e-3
"""The least distance that StarDist draws. A network may give one below 0."""


@contextlib.contextmanager
def opened_decoder(config: LabelConfig) -> Iterator[Decoder]:
    """Yield the decoder that a labelling asks for.

    Args:
        config: The settings, with the decoder.

    Yields:
        A function of an array of scores. What it gives is checked.

    Raises:
        UsageError: There is no such decoder, or it cannot be imported.
    """
    name = str(config.decoder)
    if name in _BUILT_IN:
        yield _BUILT_IN[name](config)
        return
    with contextlib.ExitStack() as stack:
        try:
            function = stack.enter_context(find_reference(name))
        except UsageError as error:
            raise UsageError(f"--decoder {error}") from error
        except Exception as error:
            raise UsageError(f"--decoder {name}: {error_in_user_code(error)}") from error
        yield partial(_checked, function, name)


def check_decoder(config: LabelConfig) -> None:
    """Refuse a decoder that cannot be imported.

    Args:
        config: The settings. Those without a decoder pass.

    Raises:
        UsageError: See `opened_decoder`.
    """
    if config.decodes:
        with opened_decoder(config):
            pass


def _checked(function: Decoder, name: str, scores: NDArray[Any]) -> NDArray[Any]:
    """Call the user's function, and check what it gives."""
    wanted = scores.shape[1:]
    try:
        labels = np.asarray(function(scores))
    except (Exception, SystemExit) as error:
        raise UsageError(f"--decoder {name}: {error_in_user_code(error)}") from error
    if labels.shape != wanted or labels.dtype.kind not in "biu":
        raise UsageError(
            f"--decoder {name}: gives {labels.dtype} of shape {labels.shape}, and labels are "
            f"integers of shape {wanted}, that of a channel"
        )
    if labels.min(initial=0) < 0:
        raise UsageError(f"--decoder {name}: gives {labels.min()}; labels are 0 or more")
    return labels.view(np.uint8) if labels.dtype.kind == "b" else labels


def _watershed(config: LabelConfig) -> Decoder:
    """Seeds are the components of what is above ``--seed-threshold``, and grow downhill within
    what is above ``--threshold``."""
    segmentation = require("skimage.segmentation", "label")

    def decode(scores: NDArray[Any]) -> NDArray[Any]:
        height = scores[0] if len(scores) == 1 else scores[0] - scores[1]
        connectivity = checked_connectivity(config.connectivity, "zyx"[1 - scores.ndim :])
        seeds, _ = labelled(height > config.seed_threshold, connectivity)
        labels: NDArray[Any] = segmentation.watershed(
            -height, seeds, connectivity=REACH[connectivity], mask=scores[0] > config.threshold
        )
        return labels

    return decode


def _affinities(config: LabelConfig) -> Decoder:
    segmentation = require("bioimage_cpp.segmentation", "label")
    knobs: AffinityKnobs = config.decoder_knobs
    offsets, masked = knobs.offsets, config.threshold is not None

    def decode(scores: NDArray[Any]) -> NDArray[Any]:
        axes = scores.ndim - 1
        if len(scores) != len(offsets) + masked or {axes} != set(map(len, offsets)):
            after = ", after one for objects" if masked else ""
            raise UsageError(
                f"--decoder affinities: the input has {plural(len(scores), 'channel')} along "
                f"{plural(axes, 'axis')}, and takes one for each of "
                f"{plural(len(offsets), 'offset')}{after}"
            )
        if knobs.strides is not None and len(knobs.strides) != axes:
            raise UsageError(
                f"--decoder-option strides: are strides for {plural(len(knobs.strides), 'axis')}, "
                f"and the input has {axes}"
            )
        inside = scores[0] > config.threshold if masked else None
        # The library takes the first offsets for those that join, and all others for those that
        # keep apart.
        near = len([*takewhile(lambda offset: sum(map(abs, offset)) == 1, offsets)])
        weights = scores[masked:].astype(np.float32)
        np.subtract(1, weights[near:], out=weights[near:])  # these keep apart
        return np.asarray(
            segmentation.mutex_watershed(weights, offsets, near, strides=knobs.strides, mask=inside)
        )

    return decode


def _flows(config: LabelConfig) -> Decoder:
    from ...models import import_torchvision

    import_torchvision()  # cellpose imports it
    dynamics = require("cellpose.dynamics", "")
    knobs: FlowKnobs = config.decoder_knobs

    def decode(scores: NDArray[Any]) -> NDArray[Any]:
        axes = scores.ndim - 1
        if len(scores) != axes + 1:
            raise UsageError(
                f"--decoder cellpose: the input has {plural(len(scores), 'channel')}, and takes "
                f"{axes + 1}: flows along {' '.join('zyx'[-axes:])} and the cell probability"
            )
        scores = scores.astype(np.float32)
        # The largest share of the input that an object may take would depend on the block. So would
        # the least size: --min-size counts the voxels of whole objects.
        # Cellpose makes sparse tensors, of which torch warns unless somebody has decided on checks.
        with require("torch.sparse", "infer").check_sparse_tensor_invariants(False):
            return np.asarray(
                dynamics.compute_masks(
                    scores[:-1], scores[-1], niter=knobs.niter,
                    cellprob_threshold=config.threshold or 0.0, do_3D=axes == 3, min_size=-1,
                    flow_threshold=knobs.flow_threshold, max_size_fraction=np.inf,
                )
            )  # fmt: skip

    return decode


def _stars(config: LabelConfig) -> Decoder:
    shown = warnings.formatwarning
    library = require("stardist", "")
    warnings.formatwarning = shown  # stardist sets one of its own
    knobs: StarKnobs = config.decoder_knobs
    said_rays, said_grid, likely, overlap = _of_model(library, knobs, config.threshold)

    def decode(scores: NDArray[Any]) -> NDArray[Any]:
        shape, axes = scores.shape[1:], scores.ndim - 1
        if (count := len(scores) - 1) <= axes:
            raise UsageError(
                f"--decoder stardist: the input has {plural(count + 1, 'channel')}, and takes a "
                f"probability and distances along {axes + 1} rays or more"
            )
        grid = (1, *said_grid)[-axes:]
        # Centres and distances are in voxels of the image, and labels in those of the grid.
        scale = 1 / np.array(grid)
        reach = np.maximum(np.moveaxis(scores[1:], 0, -1), _LEAST)
        limits = {"prob_thresh": likely, "nms_thresh": overlap, "grid": grid}
        if axes == 2:
            points, best, reach = library.non_maximum_suppression(reach, scores[0], **limits)
            return np.asarray(
                library.polygons_to_label(reach, points * scale, shape, best, scale_dist=scale)
            )
        rays = said_rays or library.Rays_GoldenSpiral(count, knobs.anisotropy)
        if len(rays) != count:
            raise UsageError(
                f"--decoder stardist: the model has {plural(len(rays), 'ray')}, and the input "
                f"distances along {count}"
            )
        points, best, reach = library.non_maximum_suppression_3d(reach, scores[0], rays, **limits)
        return np.asarray(
            library.polyhedron_to_label(
                reach, points * scale, rays.copy(scale), shape, best, verbose=False
            )
        )

    return decode


def _of_model(
    library: Any, knobs: StarKnobs, threshold: float | None
) -> tuple[Any, tuple[int, ...], float, float]:
    """The rays in a volume (None for the golden spiral of their number), the grid along z y x, the
    least probability and the most overlap: as asked for, else as the folder of a model says.

    Raises `UsageError` if the folder has no StarDist model.
    """
    said: dict[str, Any] = {}
    if knobs.model is not None:
        for name in ("config.json", "thresholds.json"):
            if (file := knobs.model / name).is_file() or name == "config.json":
                said |= read_json(file)
    with well_formed(f"--decoder-option model={knobs.model}: it is no StarDist model"):
        rays = _rays(library, said["rays_json"]) if "rays_json" in said else None
        grid = tuple(map(int, said.get("grid", knobs.grid)))
        likely, overlap = (
            float(said.get(name, usual) if asked is None else asked)
            for name, usual, asked in (("prob", 0.5, threshold), ("nms", 0.4, knobs.nms))
        )
    return rays, grid, likely, overlap


def _rays(library: Any, said: Any) -> Any:
    """The rays that a file names. stardist would evaluate the name as Python."""
    if not str(said["name"]).startswith("Rays_"):
        raise ValueError(f"there are no rays {said['name']}")
    return getattr(library, said["name"])(**said["kwargs"])


_BUILT_IN: Mapping[str, Callable[[LabelConfig], Decoder]] = {
    "watershed": _watershed,
    "stardist": _stars,
    "cellpose": _flows,
    "affinities": _affinities,
}
