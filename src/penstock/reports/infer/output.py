"""A plane of the output of a run, read when its report is made.

The rest of a report is computed from records. The plane needs the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...base import PenstockError
from ...data import Box, open_source
from ..charts.before_after import before_after_figure
from ..content import Picture
from .job_files import InferenceRun

_SIDE = 384
"""Voxels of the side of a plane that is shown, at most."""


def output_pictures(run: InferenceRun) -> list[Picture]:
    """The plane in the middle of the first output, beside that of the input.

    Args:
        run: The run. Its arrays are read where they lie on this machine.

    Returns:
        One picture; none of a run that is not done, of labels, and of arrays that are elsewhere or
        cannot be read.
    """
    heads = run.fingerprint.get("heads") or []
    if run.summary is None or not heads:
        return []
    try:
        return list(_plane(run, _opened(_places(run, "outputs")[0]), heads[0][1]))
    except (PenstockError, OSError, ValueError):
        return []


def _places(run: InferenceRun, key: str) -> list[str]:
    """Addresses of arrays, without the hash that follows each."""
    named = run.fingerprint.get(key) or []
    return [text.rpartition("#")[0] for text in ([named] if isinstance(named, str) else named)]


def _opened(place: str) -> Any:
    if not Path(place).exists():
        raise FileNotFoundError(f"{place} is not on this machine")
    return open_source(place)


def _plane(run: InferenceRun, output: Any, kind: str) -> Iterator[Picture]:
    """The plane in the middle of the volume, before and after."""
    if kind == "labels":
        return  # their difference from the input means nothing
    (place,) = _places(run, "input")
    after, z = _middle(output)
    before, _ = _middle(_opened(place))
    if before.shape != after.shape:
        return
    images = {"input": before, "output": after}
    caption = f"Plane z = {z} in the middle of the volume: input, output, difference."
    yield Picture("plane", caption, partial(before_after_figure, images, f"plane z = {z}"))


def _middle(source: Any) -> tuple[NDArray[Any], int]:
    """A square in the middle plane of the first volume and channel, and its z."""
    domain = source.domain
    start, stop = list(domain.start), [low + 1 for low in domain.start]
    for axis in (2, 3, 4):
        size = 1 if axis == 2 else min(_SIDE, domain.shape[axis])
        start[axis] = domain.start[axis] + (domain.shape[axis] - size) // 2
        stop[axis] = start[axis] + size
    return source.read(Box(tuple(start), tuple(stop)))[0, 0, 0], start[2]
