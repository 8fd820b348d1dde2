"""ND2 files of Nikon by nd2: frames of all channels, mapped where they are not compressed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, plural, require
from .frames import Sizes, said_of, shown_channel, sizes_of
from .protocols import chosen_of
from .sliced import Asked, FrameStack, OpenedArray

_LOOPS = {"TimeLoop": "t", "NETimeLoop": "t", "ZStackLoop": "z", "XYPosLoop": "p"}
"""The axis of each kind of loop of an experiment; p are positions of the stage."""


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open one position of an ND2 file."""
    with ExitStack() as opening:
        reader = require("nd2", "nd2").ND2File(asked.file)
        opening.callback(reader.close)
        opened = _opened(reader, asked, cache_bytes)
        weakref.finalize(opened.array, opening.pop_all().close)
    return opened


def _opened(reader: Any, asked: Asked, cache_bytes: int) -> OpenedArray:
    if reader.is_legacy:
        raise UsageError(
            f"{asked.where}: is of the kind before 2010, of JPEG 2000, which is not read"
        )
    attributes, loops = reader.attributes, reader.experiment
    letters = [_LOOPS.get(loop.type, loop.type) for loop in loops]
    counts = [loop.count for loop in loops]
    places = _positions(loops)
    position = chosen_of(places or {0: ""}, asked.series, "positions", asked.where)
    frame = (attributes.componentCount, attributes.heightPx, attributes.widthPx)
    samples = reader.components_per_channel
    packed = attributes.compressionType == "lossless"

    def read(place: tuple[int, ...]) -> NDArray[Any]:
        others = iter(place)
        index = [position if letter == "p" else next(others) for letter in letters]
        number = int(np.ravel_multi_index(index, counts)) if index else 0
        # The library drops axes of length 1, and keeps the samples of a colour last.
        whole = reader.read_frame(number).reshape(-1, *frame[1:], samples)
        return np.moveaxis(whole, -1, 1).reshape(frame)

    lead = [(letter, n) for letter, n in zip(letters, counts, strict=True) if letter != "p"]
    array = FrameStack(
        [n for _, n in lead], frame, reader.dtype, read, cache_bytes if packed else 0
    )  # fmt: skip
    labels = [*(letter for letter, _ in lead), "c", "y", "x"]
    planned, there = math.prod(counts), attributes.sequenceCount
    array.is_absent = False if there < planned else None
    held = f"the input holds {plural(there, 'frame')} of {planned}"
    lost = {
        f"{held}; the others read as 0": there < planned,
        "the input's positions of the stage go no further": places,
    }
    return OpenedArray(
        array=array,
        labels=labels,
        chunks=(*(1,) * len(lead), *frame),
        sizes=_sizes(reader, loops),
        codec="deflate" if packed else "",
        omero=[
            shown_channel(each.name, bytes(each.color[:3]).hex())
            for each in (listed.channel for listed in reader.metadata.channels or ())
        ],
        bands=samples > 1,
        cache_bytes=cache_bytes if packed else 0,
        again=partial(open_array, asked) if packed else None,
        notes=said_of(lost),
    )


def _positions(loops: Sequence[Any]) -> dict[int, str]:
    """The name of each position of the stage, by number."""
    points = [loop.parameters.points for loop in loops if loop.type == "XYPosLoop"]
    return {number: each.name or "" for number, each in enumerate(points[0] if points else ())}


def _sizes(reader: Any, loops: Sequence[Any]) -> Sizes:
    volumes = [channel.volume for channel in (reader.metadata.channels or ())[:1]]
    periods = [loop.parameters.periodMs for loop in loops if loop.type == "TimeLoop"]
    return sizes_of([
        *(
            (axis, size, "micrometer", 0.0)
            for volume in volumes
            for axis, size, says in zip(
                "xyz", volume.axesCalibration, volume.axesCalibrated, strict=True
            )
            if says
        ),
        *(("t", period / 1000, "second", 0.0) for period in periods),
    ])  # fmt: skip
