"""A detector over one scene: rows of windows, batches, and the objects in each window's core.

On a cluster each scene is a task. A worker loads the weights once and writes nothing; it sends the
objects to the client.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..base import PredictConfig, absolute, in_order, torch_threads, usable_cores
from ..cluster import UnfitWorker, Workers, share_pieces, wait_for_worker
from ..data import (
    ChipRecord,
    Cut,
    Objects,
    Scene,
    model_view,
    planes_of,
    read_row,
)
from ..models import LEAST_SCORE, load_weights, make_detector
from .ranks import device_of
from .workloads.detector_workload import joined, owned, picture

DETECTOR_LIBRARIES = ("penstock-dl", "numpy", "torch", "torchvision", "rasterio")
"""The distributions that decide which objects a detector finds."""


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
    rows, columns = record.cuts(scene.size)
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
    bands = [record.empty_band(columns) for _ in range(min(2, rows.num))]

    def read(row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        band = bands[row % 2]
        return band, read_row(scene, rows, row, columns, band)[0]

    return in_order(read, range(rows.num), workers=1, ahead=1)


def detect_on_cluster(
    workers: Workers,
    folders: Mapping[str, Path],
    weights: Path,
    settings: Settings,
    config: PredictConfig,
    advance: Callable[[int], None],
) -> Iterator[tuple[str, tuple[Objects, int, int]]]:
    """Find the objects of scenes on the workers of a cluster.

    Args:
        workers: The workers.
        folders: The folder of each scene.
        weights: The weights of the detector.
        settings: Its settings.
        config: The settings of the run.
        advance: Called with the number of windows of a scene.

    Yields:
        The name of a scene, and what `detect` returned, as each is done.

    Raises:
        UsageError: The workers cannot run the detector with these settings.
        Incomplete: Scenes were given up.
    """
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    wait_for_worker(workers)
    threads = config.threads or max(1, usable_cores() // workers.peers())
    config = config.model_copy(update={"threads": threads})

    detector = absolute(weights), digest, settings
    try:
        results = share_pieces(
            workers, partial(detect_task, detector, config), sorted(folders),
            "scene", "--resume does the rest", work_of=lambda name: absolute(folders[name]),
        )  # fmt: skip
        for name, answer in results:
            advance(answer[1])
            yield name, answer
    finally:
        workers.client.run(_detector.cache_clear, on_error="return")


def detect_task(
    detector: tuple[Path, str, Settings], config: PredictConfig, folder: Path
) -> tuple[Objects, int, int]:
    """Find the objects of a scene, on a worker.

    Args:
        detector: Its weights, their SHA-256 as the client sees them, and its settings.
        config: The settings of the run.
        folder: The folder of the scene.

    Returns:
        The objects, the number of windows, and the number of windows with valid pixels.

    Raises:
        UnfitWorker: The worker does not see the scene or the weights that the client sees.
    """
    if not folder.is_dir():
        raise UnfitWorker(f"the worker on {platform.node()} does not see {folder}")
    *_, settings = detector
    net = _detector(*detector, config.device)
    with Scene(folder, settings.record.channels) as scene, torch_threads(config.threads):
        return detect(net, scene, settings, config)


@lru_cache(maxsize=1)
def _detector(weights: Path, digest: str, settings: Settings, name: str) -> nn.Module:
    """The detector on its device, loaded once."""
    content = weights.read_bytes() if weights.is_file() else b""
    if hashlib.sha256(content).hexdigest() != digest:
        raise UnfitWorker(f"the worker on {platform.node()} does not see the weights {weights}")
    return load_detector(weights, settings).to(device_of(name))
