"""Decoders: functions from the network's output around a block to labels of what is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import LabelConfig, UsageError, require
from ...models import error_in_user_code, find_reference
from .affinity_decoder import affinity_decoder
from .components import REACH, checked_connectivity, labelled
from .flow_decoder import flow_decoder
from .star_decoder import star_decoder

Decoder = Callable[[NDArray[Any]], NDArray[Any]]
"""A function from c z y x to labels z y x; from c y x to y x in a plane."""


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


def _watershed_decoder(config: LabelConfig) -> Decoder:
    """See `affinity_decoder`."""
    return partial(watershed, require("skimage.segmentation", "label"), config)


_BUILT_IN: Mapping[str, Callable[[LabelConfig], Decoder]] = {
    "watershed": _watershed_decoder,
    "stardist": star_decoder,
    "cellpose": flow_decoder,
    "affinities": affinity_decoder,
}


def watershed(segmentation: Any, config: LabelConfig, scores: NDArray[Any]) -> NDArray[Any]:
    """Seeded watershed on maps of scores.

    The height is channel 0, such as a probability or a distance, less channel 1, such as a
    boundary, if there is one. Seeds are the components of what is above ``--seed-threshold``, and
    grow downhill within what is above ``--threshold``.

    Args:
        segmentation: The functions of scikit-image.
        config: The settings.
        scores: Along c z y x, or c y x.

    Returns:
        Labels, of the shape of a channel.
    """
    height = scores[0] if len(scores) == 1 else scores[0] - scores[1]
    connectivity = checked_connectivity(config.connectivity, "zyx"[1 - scores.ndim :])
    seeds, _ = labelled(height > config.seed_threshold, connectivity)
    inside = scores[0] > config.threshold
    labels: NDArray[Any] = segmentation.watershed(
        -height, seeds, connectivity=REACH[connectivity], mask=inside
    )
    return labels


def _checked(function: Decoder, name: str, scores: NDArray[Any]) -> NDArray[Any]:
    """Call the user's function, and check what it gives."""
    wanted = scores.shape[1:]
    try:
        labels = np.asarray(function(scores))
    except Exception as error:
        raise UsageError(f"--decoder {name}: {error_in_user_code(error)}") from error
    if labels.shape != wanted or labels.dtype.kind not in "biu":
        raise UsageError(
            f"--decoder {name}: gives {labels.dtype} of shape {labels.shape}, and labels are "
            f"integers of shape {wanted}, that of a channel"
        )
    if labels.min(initial=0) < 0:
        raise UsageError(f"--decoder {name}: gives {labels.min()}; labels are 0 or more")
    return labels.view(np.uint8) if labels.dtype.kind == "b" else labels
