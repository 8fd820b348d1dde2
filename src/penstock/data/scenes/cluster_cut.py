"""Scenes cut on the workers of a cluster: one task a scene.

A worker cuts into a folder of its own inside the scene's, and moves the chips into place once they
are whole. So a worker that only seemed dead and goes on does no harm.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base import Incomplete, StageError, UsageError, absolute, is_draft, lock_file
from ...cluster import Workers, share_pieces
from .chips import MANIFEST, read_document
from .cutting import Result, SceneJob, earlier_manifest

CHIP_LIBRARIES = ("penstock-dl", "numpy", "rasterio", "numcodecs")
"""The distributions that decide the bytes of chips."""
LOCK = ".penstock-moving.lock"
SEEN_S = 30.0
"""Seconds within which a worker's files become visible here on a network file system."""


def cut_on_cluster(
    workers: Workers, jobs: Mapping[str, SceneJob], progress: Callable[[int], None]
) -> list[Result]:
    """Cut scenes on the workers of a cluster.

    Args:
        workers: The workers.
        jobs: The cuts to make, by the name of the scene.
        progress: Called with the number of scenes that are done.

    Returns:
        The manifest of each scene in the order of their names, and whether it existed before.

    Raises:
        UsageError: An input, or an existing folder of chips, does not fit.
        Incomplete: Scenes failed, or this machine does not see what the workers wrote.
    """
    jobs = {name: _for_workers(job) for name, job in sorted(jobs.items())}
    before = {name for name, job in jobs.items() if (job.out / MANIFEST).exists()}
    manifests: dict[str, dict[str, Any]] = {}
    go_on = "run again to cut the rest"
    try:
        pieces = share_pieces(workers, cut_task, [*jobs], "scene", go_on, work_of=jobs.__getitem__)
        for name, manifest in pieces:
            manifests[name] = manifest
            progress(len(manifests))
    finally:
        for job in jobs.values():
            _clean(job.out)
    _check_seen(jobs, manifests)
    return [(manifests[name], name in before) for name in jobs]


def _for_workers(job: SceneJob) -> SceneJob:
    """The job with absolute paths. The chips that it replaces are no longer there."""
    if job.overwrite:
        (job.out / MANIFEST).unlink(missing_ok=True)
    return replace(job, folder=absolute(job.folder), out=absolute(job.out), overwrite=False)


def _clean(out: Path) -> None:
    """Remove the drafts of workers that died."""
    for path in out.glob(".penstock-*.part") if out.is_dir() else ():
        if is_draft(path.name):
            shutil.rmtree(path, ignore_errors=True)
    (out.parent / LOCK).unlink(missing_ok=True)


def _check_seen(jobs: Mapping[str, SceneJob], manifests: Mapping[str, dict[str, Any]]) -> None:
    """Raise `Incomplete` unless this machine sees the chips that the workers wrote."""
    end = time.monotonic() + SEEN_S
    for name, job in jobs.items():
        path = job.out / MANIFEST
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.5)
        if not path.exists() or read_document(path) != manifests[name]:
            raise Incomplete(
                f"{job.out} does not hold the chips that a worker wrote there; --output-dir must "
                "be a folder that all workers share"
            )


def cut_task(job: SceneJob) -> dict[str, Any]:
    """Cut one scene, on a worker.

    Args:
        job: The scene, with absolute paths.

    Returns:
        Its manifest.

    Raises:
        UsageError: An input does not fit.
        StageError: The scene failed.
    """
    draft = job.out / f".penstock-{secrets.token_hex(8)}.part"
    try:
        draft.mkdir(parents=True)
        manifest, was_there = job.run(threading.Event(), draft)
        return manifest if was_there else _moved(draft, job.out, manifest)
    except UsageError:
        raise
    except Exception as error:
        raise StageError("preprocess", f"scene {job.out.name}", error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _moved(draft: Path, out: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Move a scene's chips into place, the manifest last, unless another worker was first."""
    with _alone(out.parent / LOCK):
        earlier = earlier_manifest(out / MANIFEST, manifest, False)
        if earlier is not None:
            return earlier
        for path in sorted(draft.iterdir(), key=lambda path: path.name == MANIFEST):
            place = out / path.name
            if place.is_dir():
                shutil.rmtree(place)
            path.replace(place)
    return manifest


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that all workers share."""
    with path.open("a") as file:
        lock_file(file, wait=True)
        yield
