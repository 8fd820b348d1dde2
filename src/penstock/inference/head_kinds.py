"""What a model's heads are, judged by what it makes of a patch of the input.

Integers and booleans are labels. Floats are taken for intensities, and that is said. But floats
that lie within [0, 1], or that sum to 1 over their channels, where the input does neither, look
like probabilities, and nothing tells those of a denoiser from those of a classifier: the user has
to say. A patch of zeros would tell nothing, so a place is looked for where the input varies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base import HeadKind, InferConfig, UsageError
from ..data import Box, Scaling, Source, block_scaling, reflect
from ..models import CHANNELS_LAST, Footprint, Head, Model, error_in_user_code
from .heads import Origin, Part, said_kinds

_PLACES = (1 / 2, 1 / 4, 3 / 4)
"""Of the volume along each axis, where patches are looked at until one of them varies."""
_SUM_TOLERANCE = 1e-2
"""Of a sum of 1: probabilities in half precision are off by less."""


@dataclass(frozen=True)
class Seen:
    """A patch of the input, shape (channels, z, y, x)."""

    stored: NDArray[Any]
    shown: NDArray[np.float64]
    """Normalised and clipped, as the net is shown it."""


def split(heads: Sequence[Head], num_outputs: int, model: str) -> list[Part]:
    """What each output takes: a head, or a channel of the only one.

    Raises `UsageError` where outputs are more or fewer.
    """
    names = [str(head.dtype).removeprefix("torch.") for head in heads]
    if len(heads) == 1 < num_outputs == heads[0].channels:
        only = heads[0].name
        return [Part(f"{only}.{i}", 1, names[0], i) for i in range(num_outputs)]
    if len(heads) != num_outputs:
        shown = ", ".join(f"{head.name} ({head.channels} channels)" for head in heads)
        raise UsageError(
            f"model {model} returns {len(heads)} head(s), {shown}, but --out-spec "
            f"names {num_outputs}"
        )
    return [Part(head.name, head.channels, name) for head, name in zip(heads, names, strict=True)]


def head_kinds(
    said: Sequence[str] | None,
    parts: Sequence[Part],
    model: Model,
    footprint: Footprint,
    candidates: Iterator[Seen],
    batch: Sequence[int],
) -> list[tuple[HeadKind, Origin]]:
    """The kind of each part, and who says so.

    ``candidates`` are looked at only where nobody says it; ``batch`` is the net's input shape.
    Raises `UsageError` for a head that looks like probabilities.
    """
    kinds: list[tuple[HeadKind, Origin] | None]
    kinds = [(kind, "said") if kind else None for kind in said_kinds(said, parts)]
    if model.kind is not None:
        kinds = [found or (model.kind, "known") for found in kinds]
    kinds = [
        found or (None if "float" in part.dtype else ("labels", "assumed"))
        for found, part in zip(kinds, parts, strict=True)
    ]
    if None in kinds:
        seen = _varied(candidates)
        outputs = _returned(model, footprint, seen, batch)
        for part, found in zip(parts, kinds, strict=True):
            if found is None:
                _refuse_probabilities(part, outputs, seen, model.name)
    return [found or ("intensity", "assumed") for found in kinds]


def patches(
    source: Source, t: int, channels: Sequence[int], shape: Sequence[int]
) -> Iterator[NDArray[Any]]:
    """Patches of a volume of a source at its middle and around it, (channels, z, y, x), reflected
    where the volume is thinner."""
    domain = source.domain[2:]
    for places in itertools.product(_PLACES, repeat=3):
        axes = []
        for low, high, side, place in zip(domain.start, domain.stop, shape, places, strict=True):
            start = max(low, min(int(low + (high - low) * place) - side // 2, high - side))
            axes.append(reflect(np.arange(start, start + side), low, high))
        box = Box(tuple(int(a.min()) for a in axes), tuple(int(a.max()) + 1 for a in axes))
        found = [
            source.read(Box.of((t, channel), (1, 1)) + box)[0, 0][
                np.ix_(*(a - start for a, start in zip(axes, box.start, strict=True)))
            ]
            for channel in channels
        ]
        yield np.stack(found)


def sample_scaling(patch: NDArray[Any], config: InferConfig) -> Scaling:
    """The scaling of a patch by itself, which stands for that of its block or volume."""
    low, high = config.norm_lower, config.norm_upper
    if config.normalize == "none":
        return Scaling()
    if config.normalize == "fixed":
        return Scaling.of_range(low, high, low, high, config.eps)
    return block_scaling(patch, low, high, config.eps)


def shown(array: NDArray[Any], scaling: Scaling, clip: tuple[float, float] | None) -> Seen:
    """A patch as it is stored, and as the net is shown it."""
    values = array.astype(np.float64)
    values[~np.isfinite(values)] = scaling.lower
    values = (values - scaling.lower) / scaling.scale
    return Seen(array, values if clip is None else values.clip(*clip))


def _varied(candidates: Iterator[Seen]) -> Seen:
    """The first patch that is not all one value, or the first of all."""
    first: Seen | None = None
    for seen in candidates:
        if np.ptp(seen.shown) > 0:
            return seen
        first = first or seen
    assert first is not None
    return first


def _returned(
    model: Model, footprint: Footprint, seen: Seen, batch: Sequence[int]
) -> dict[str, Tensor]:
    """The heads of one patch in float64, shape (channels, spatial...); run on the CPU."""
    patch = torch.from_numpy(seen.shown).to(model.dtype).reshape(tuple(batch[1:]))
    layout = CHANNELS_LAST[len(batch)] if footprint.channels_last else torch.contiguous_format
    # Programs that were exported for one size of batch take no other.
    fixed = isinstance(model.module, torch.fx.GraphModule)
    failed: Exception | None = None
    for rows in (batch[0],) if fixed else (min(2, batch[0]), batch[0]):
        rows_of_it = patch.expand(rows, *patch.shape).contiguous(memory_format=layout)
        try:
            with torch.no_grad():  # what the net keeps of a forward stays of use for a training
                heads = model.heads(model.module(rows_of_it))
            return {name: head[0].double() for name, head in heads.items()}
        except Exception as error:
            failed = error
    assert failed is not None
    raise UsageError(
        f"model {model.name} fails on a patch of the input: {error_in_user_code(failed)}"
    ) from failed


def _refuse_probabilities(part: Part, outputs: dict[str, Tensor], seen: Seen, model: str) -> None:
    name = part.name if part.channel is None else part.name.rpartition(".")[0]
    head = outputs[name].numpy()
    own = head if part.channel is None else head[part.channel]
    inputs = (seen.stored, seen.shown)
    if _within_one(own) and not any(_within_one(values) for values in inputs):
        what = f"lies between {own.min():.3g} and {own.max():.3g}"
    elif _sums_to_one(head) and not any(_sums_to_one(values) for values in inputs):
        what = f"sums to 1 over its {len(head)} channels"
    else:
        return
    low, high = seen.shown.min(), seen.shown.max()
    raise UsageError(
        f"model {model}: head {part.name} {what} on a patch of the input that the net sees as "
        f"{low:.3g} to {high:.3g}; say what it is: --head-kind scores for probabilities, labels "
        "for classes, intensity for an image (see penstock infer --help)"
    )


def _within_one(values: NDArray[Any]) -> bool:
    return bool(values.min() >= 0 and values.max() <= 1)


def _sums_to_one(values: NDArray[Any]) -> bool:
    """Over the channels, of which there are several."""
    return len(values) > 1 and bool(
        np.all(np.abs(values.astype(np.float64).sum(axis=0) - 1) < _SUM_TOLERANCE)
    )
