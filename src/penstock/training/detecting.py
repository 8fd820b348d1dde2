"""A detector over one scene: rows of windows, batches, and the objects in each window's core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..base import PredictConfig, in_order
from ..data import (
    ChipRecord,
    Cut,
    Objects,
    Scene,
    cuts_of,
    empty_band,
    model_view,
    planes_of,
    read_row,
)
from ..models import LEAST_SCORE, load_weights, make_detector
from .workloads.detector_workload import joined, owned, picture


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a detector and of its windows."""

    record: ChipRecord
    """The cut of scenes into windows, as the chips were that the detector was trained on."""
    backbone: str
    threshold: float
    """The lowest score of a detection that is kept."""
    because: str
    """The source of the threshold, in words."""
    max_dets: int
    """Most detections in a window."""


def load_detector(weights: Path, settings: Settings) -> nn.Module:
    channels = settings.record.channels
    net: nn.Module = make_detector(
        planes_of(channels),
        settings.backbone,  # type: ignore[arg-type]
        score_threshold=min(LEAST_SCORE, settings.threshold),
        most_detections=settings.max_dets,
    )
    description = f"the detector on {settings.backbone} that sees {', '.join(channels)}"
    load_weights(net, description, weights, "WEIGHTS")
    return net.eval()


def windows_of(scene: Scene, record: ChipRecord) -> tuple[Cut, Cut]:
    return cuts_of(scene.size, record.chip_size, record.overlap)


@torch.no_grad()
def detect(
    net: nn.Module,
    scene: Scene,
    settings: Settings,
    config: PredictConfig,
    advance: Callable[[int], None] = lambda windows: None,
) -> tuple[Objects, int, int]:
    """The objects of a scene, the number of its windows, and the number of them that the detector
    ran on. ``advance`` is called after each row of windows, with their number."""
    record = settings.record
    rows, columns = windows_of(scene, record)
    device = next(net.parameters()).device
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    parts: list[dict[str, NDArray[Any]]] = []
    seen = 0
    for row, (band, counts) in enumerate(_rows_ahead(scene, rows, columns, record)):
        valid, here = np.flatnonzero(counts).tolist(), rows.read(row)
        for first in range(0, len(valid), config.batch_size):
            some = valid[first : first + config.batch_size]
            images = [
                picture(*model_view(record, band[of], scene.coarse, here, columns.read(of)))
                for of in some
            ]
            with torch.autocast(device.type, dtype=half, enabled=config.amp):
                answers = net([image.to(device) for image in images])
            for column, detections in zip(some, answers, strict=True):
                core = (*rows.own(row), *columns.own(column))
                parts.append(owned(detections, core, (rows.start(row), columns.start(column))))
        seen += len(valid)
        advance(columns.num)
    objects = joined(scene.name, parts)
    return objects[objects.score >= settings.threshold], rows.num * columns.num, seen


def _rows_ahead(
    scene: Scene, rows: Cut, columns: Cut, record: ChipRecord
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """The radar of each row of windows (column, channel, y, x), and the number of valid pixels of
    each window.

    The next row is prefetched into a second buffer. An array is valid until the next one is taken.
    """
    bands = [empty_band(columns, record) for _ in range(min(2, rows.num))]

    def read(row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        band = bands[row % 2]
        return band, read_row(scene, rows, row, columns, band)[0]

    return in_order(read, range(rows.num), workers=1, ahead=1)
