"""Detects objects in scenes on the workers of a cluster: one task for each scene.

A worker loads the weights once and writes nothing; it sends the objects to the client.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import nn

from ..base import PredictConfig, absolute, torch_threads, usable_cores
from ..cluster import UnfitWorker, Workers, share_pieces, wait_for_worker
from ..data import Objects, Scene
from .detecting import Settings, detect, load_detector
from .ranks import device_of

DETECTOR_LIBRARIES = ("penstock-dl", "numpy", "torch", "torchvision", "rasterio")
"""The distributions that decide which objects a detector finds."""


@dataclass(frozen=True, slots=True)
class SceneToSearch:
    """A scene and its detector."""

    folder: Path
    weights: Path
    digest: str
    """SHA-256 of the weights as the client sees them."""
    settings: Settings
    config: PredictConfig


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

    def work_of(name: str) -> SceneToSearch:
        return SceneToSearch(absolute(folders[name]), absolute(weights), digest, settings, config)

    try:
        results = share_pieces(
            workers, detect_task, sorted(folders), "scene", "--resume does the rest",
            work_of=work_of,
        )  # fmt: skip
        for name, answer in results:
            advance(answer[1])
            yield name, answer
    finally:
        workers.client.run(_detector.cache_clear, on_error="return")


def detect_task(work: SceneToSearch) -> tuple[Objects, int, int]:
    """Find the objects of a scene, on a worker.

    Args:
        work: The scene and the detector.

    Returns:
        The objects, the number of windows, and the number of windows with valid pixels.

    Raises:
        UnfitWorker: The worker does not see the scene or the weights that the client sees.
    """
    here, settings, config = platform.node(), work.settings, work.config
    if not work.folder.is_dir():
        raise UnfitWorker(f"the worker on {here} does not see {work.folder}")
    net = _detector(work.weights, work.digest, settings, config.device)
    with Scene(work.folder, settings.record.channels) as scene, torch_threads(config.threads):
        return detect(net, scene, settings, config)


@lru_cache(maxsize=1)
def _detector(weights: Path, digest: str, settings: Settings, name: str) -> nn.Module:
    """The detector on its device, loaded once."""
    content = weights.read_bytes() if weights.is_file() else b""
    if hashlib.sha256(content).hexdigest() != digest:
        raise UnfitWorker(f"the worker on {platform.node()} does not see the weights {weights}")
    device = device_of(name)
    return load_detector(weights, settings).to(device)
