"""The output of a run, looked at when its report is made: a plane of it, and its seams.

The rest of a report is computed from records. These two need the arrays. If the arrays are not on
this machine or cannot be read, a sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ...base import PenstockError, describe, plural
from ...data import Box, open_source
from ..charts.before_after import before_after_figure
from ..content import Picture
from .job_files import InferenceRun
from .seams import measure_seams, seam_sentences

MOST_OUTPUTS = 4
"""The most outputs of a run that are looked at."""
_SIDE = 384
"""Voxels of the side of a plane that is shown, at most."""


class Look(NamedTuple):
    """The result of looking at the outputs of a run."""

    sentences: list[str]
    """A sentence on the seams of each axis, or on why they were not measured."""
    pictures: list[Picture]


def look_at_output(run: InferenceRun) -> Look:
    """Read windows along the seams of each output, and a plane of the first.

    Args:
        run: The run. Its outputs are read where they lie on this machine.

    Returns:
        Sentences and pictures; of an output that cannot be read, a sentence that says so.
    """
    fingerprint, look = run.fingerprint, Look([], [])
    heads = fingerprint.get("heads") or []
    if run.summary is None or not heads:
        look.sentences.append("Whether seams show is measured once the run is done.")
        return look
    outputs = list(zip(_places(run, "outputs"), heads, strict=False))
    for number, (place, (name, kind, _)) in enumerate(outputs[:MOST_OUTPUTS]):
        try:
            source = _opened(place)
            readings = measure_seams(source, fingerprint, kind)
            look.sentences.extend(seam_sentences(readings, name if len(outputs) > 1 else ""))
            if number == 0:
                look.pictures.extend(_plane(run, source, kind))
        except (PenstockError, OSError, ValueError) as error:
            look.sentences.append(f"Whether seams show was not measured: {describe(error)}.")
    if more := len(outputs) - MOST_OUTPUTS:
        look.sentences.extend([f"{plural(more, 'more output')} were not looked at."] * (more > 0))
    return look


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
