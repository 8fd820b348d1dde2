"""Decides patch and overlap: as asked, as recorded, as the model says, or so that no seam is left.

What a network sees is found once, and kept in the user's cache under a hash of its weights and its
code. The networks of the registry ship theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter

from ...base import InferConfig, UsageError, cache_folder, trim_heap, write_json
from ...models import REGISTRY, Model, Reach, find_reach
from ..run_folder.reader import run_of
from ..tiling.exact import chunk_and_halo, is_exact, least_overlap
from . import identity

FIXED_PATCH, FIXED_OVERLAP = (64,), (10,)
"""Patch and overlap of a job in which no overlap makes tiling exact."""
_EDITION = 2
"""Raised when `find_reach` finds other numbers."""
_READ = TypeAdapter(Reach).validate_json
_HERE: dict[str, Reach] = {}
"""Everything that this process knows, by key."""


@dataclass(frozen=True)
class Tiled:
    """How a volume is cut, and how much of the cuts is seen."""

    config: InferConfig
    """The settings, with patch and overlap."""
    line: str
    """The seams in words: exact or not; empty if nothing is known."""
    chosen: bool
    """True for a patch that nobody named."""
    exact: bool = False
    """True if no voxel of a core sees a cut."""
    measured: bool = False
    """True if the difference at seams is to be measured: nobody named an overlap that is not exact
    where another one is."""


def tiled(config: InferConfig, model: Model, extent: tuple[int, ...], has_z: bool) -> Tiled:
    """Decide patch and overlap.

    Args:
        config: The settings. What they say is kept.
        model: The model, without what is done to its input and output.
        extent: Shape of the volume, z y x.
        has_z: Whether the input has an axis z.

    Returns:
        The settings with both, and what is known of the seams.
    """
    chosen = config.sides is None
    if config.resumes and (run := run_of(config)):
        before = {"patch": FIXED_PATCH, "overlap": FIXED_OVERLAP, **run.get("settings", {})}
        config = _with(config, tuple(before["patch"]), tuple(before["overlap"]))
        return Tiled(config, (run.get("plan") or {}).get("seams", ""), chosen)
    axes = len(config.sides or ()) if len(config.sides or ()) > 1 else 0
    axes = axes or model.spatial_axes or (3 if has_z else 2)
    if config.seam_mode == "blend":
        return Tiled(_with(config, FIXED_PATCH, FIXED_OVERLAP), "blended, so not exact", chosen)
    named = config.sides is not None and config.overlap is not None
    reach = known_reach(model, axes) if named else reach_of(model, axes)
    if reach is None or not reach.exact:
        config = _with(config, FIXED_PATCH, FIXED_OVERLAP)
        return Tiled(
            config, "" if reach is None else reach.line(), chosen, measured=reach is not None
        )
    return _exactly(config, reach, extent[3 - axes :], chosen)


def _exactly(config: InferConfig, reach: Reach, extent: tuple[int, ...], chosen: bool) -> Tiled:
    """Patch and overlap for a network that has an exact tiling, as far as they are open."""
    axes = len(extent)
    least = least_overlap(reach, max(config.trim_voxels or 0, *(config.halo or (0,))))
    if config.tta == "rotations":  # patches turn in the plane of y and x
        least = (*least[:-2], max(least[-2:]), max(least[-2:]))
    wanted = " ".join(map(str, least))
    overlap = config.overlap or least
    if config.sides is None and config.overlap is None:
        patch = chunk_and_halo(extent, _each(overlap, axes), reach.step)
        if patch is None:
            line = f"not exact: it needs an --overlap of {wanted}, and far larger patches"
            return Tiled(_with(config, FIXED_PATCH, FIXED_OVERLAP), line, chosen, measured=True)
        if config.tta == "rotations":
            patch = (*patch[:-2], max(patch[-2:]), max(patch[-2:]))
        config = config.model_copy(update={"patch": patch})
    patch = _each(config.sides or FIXED_PATCH, axes)
    if config.overlap is None and not is_exact(reach, patch, least):
        step = " ".join(map(str, reach.step))
        line = f"not exact: --overlap {wanted} and a --patch of multiples of {step} is"
        return Tiled(_with(config, patch, FIXED_OVERLAP), line, chosen, measured=True)
    config = _with(config, patch, least)
    if is_exact(reach, patch, _each(overlap, axes)):
        return Tiled(config, f"exact ({reach.line()})", chosen, exact=True)
    return Tiled(config, f"not exact: --overlap {wanted} is", chosen)


def _with(config: InferConfig, patch: tuple[int, ...], overlap: tuple[int, ...]) -> InferConfig:
    """The settings with a patch and an overlap where they have none."""
    said = {"patch": config.sides or patch, "overlap": config.overlap or overlap}
    return config.model_copy(update=said)


def _each(values: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """One number for each axis of the network."""
    return values * axes if len(values) == 1 else tuple(values)


def known_reach(model: Model, axes: int) -> Reach | None:
    """How far a network sees, if that is known already.

    Args:
        model: The model.
        axes: The number of axes that it is given.

    Returns:
        What its entry in the registry, this process or the user's cache says, else None.
    """
    return _shipped(model, axes) or _kept(_key(model, axes))


def reach_of(model: Model, axes: int) -> Reach:
    """How far a network sees: known already, or found now and kept.

    Args:
        model: The model.
        axes: The number of axes that it is given.

    Returns:
        What was found.
    """
    if shipped := _shipped(model, axes):
        return shipped
    key = _key(model, axes)
    if (reach := _kept(key)) is not None:
        return reach
    reach = _HERE[key] = find_reach(model, axes)
    trim_heap()  # the plan does not count what windows took
    if (file := _file(key)) is not None:
        with contextlib.suppress(OSError, UsageError):  # a cache that cannot be written is no harm
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, asdict(reach))
    return reach


def _shipped(model: Model, axes: int) -> Reach | None:
    entry = REGISTRY.get(model.reference)
    if entry is None or entry.reach is None:
        return None
    reach = entry.reach
    if reach.exact and len(reach.period) != axes:  # it has no weights, and sees a voxel
        return None
    return reach


def _kept(key: str) -> Reach | None:
    """What this process or the user's cache has under a key."""
    if key not in _HERE and (file := _file(key)) is not None:
        with contextlib.suppress(OSError, ValueError):
            _HERE[key] = _READ(file.read_bytes())
    return _HERE.get(key)


def _key(model: Model, axes: int) -> str:
    """A hash of all that the outputs of a model depend on."""
    parts = (
        *(_EDITION, torch.__version__, axes, model.in_channels, model.code),
        identity.weights(model.module),
        identity.attributes(model.module),
        identity.sources(model.reference, model.module),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _file(key: str) -> Path | None:
    """The file in the user's cache; None where there is no such folder."""
    try:
        return cache_folder() / "reach" / f"{key}.json"
    except RuntimeError:  # the user has no home
        return None
