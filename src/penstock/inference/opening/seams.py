"""Decides patch, overlap and batch: as asked, as recorded, as the model says, or so that no seam is
left.

What a network sees is found once, and kept in the user's cache under a hash of its weights and its
code. The networks of the registry ship theirs.

``--patch auto`` and ``--batch auto`` try numbers: a larger patch computes less context, and takes
more memory. The numbers stand in the run's record: its parts, workers and ``--resume`` obey them,
whatever the memory is by then.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ...base import InferConfig, Refused, UsageError, cache_folder, plural, trim_heap, write_json
from ...data import SAME, Resampling
from ...models import REGISTRY, Model, Reach, find_reach, placed
from ..tiling.exact import SIDE_STEP, chunk_and_halo, is_exact, least_overlap
from ..tiling.geometry import PatchShape, per_axis
from . import identity
from .heads import HeadFacts

FIXED_PATCH, FIXED_OVERLAP = (64,), (10,)
"""Patch and overlap of a job in which no overlap makes tiling exact."""
_EDITION = 7
"""Raised when `find_reach` finds other numbers."""
_READ = TypeAdapter(Reach).validate_json
_HERE: dict[str, Reach] = {}
"""Everything that this process knows, by key."""
_NO_CACHE = (OSError, ValueError, UsageError, RuntimeError)
"""A cache that is not there, or cannot be read or written, is no harm. The last is that of a user
who has no home."""

Opener = Callable[[InferConfig], Any]
"""Opens a `Job`, whose room imports this one."""

_MOST_CUTS = 12
"""Most patches along the longest axis of a volume that are tried."""
_WORTH = 0.95
"""Share of the voxels that a larger patch may compute at most, to be worth its memory."""
_BATCHES = (8, 32)
"""Patches of one forward to try on a GPU."""


@dataclass(frozen=True)
class Tiled:
    """How a volume is cut, and how much of the cuts is seen."""

    config: InferConfig
    """The settings, with patch and overlap."""
    line: str
    """The seams in words: exact or not; empty if nothing is known."""
    exact: bool = False
    """True if no voxel of a core sees a cut."""
    measured: bool = False
    """True if the difference at seams is to be measured, as tiling is not known to be exact."""
    step: tuple[int, ...] = ()
    """The number of which the network wants sides of patches to be multiples, for each axis; empty
    if that is not known."""


def tiled(
    config: InferConfig,
    model: Model,
    extent: tuple[int, ...],
    chunk: tuple[int, ...],
    has_z: bool,
    begun: Mapping[str, Any],
) -> Tiled:
    """Decide patch and overlap.

    Args:
        config: The settings. What they say is kept.
        model: The model, without what is done to its input and output.
        extent: Shape of the volume, z y x.
        chunk: Shape of a chunk of it, likewise.
        has_z: Whether the input has an axis z.
        begun: The run.json of the run that the job goes on with; empty if there is none.

    Returns:
        The settings with both, and what is known of the seams.
    """
    if begun:
        # What the run began with stands in the settings already; see `as_begun`.
        line = begun.get("plan", {}).get("seams", "")
        return Tiled(_with(config, FIXED_PATCH, FIXED_OVERLAP), line)
    axes = len(config.sides or ()) if len(config.sides or ()) > 1 else 0
    axes = axes or model.spatial_axes or (3 if has_z else 2)
    if config.seam_mode == "blend":
        config = _with(config, FIXED_PATCH, FIXED_OVERLAP)
        return Tiled(config, "blended, so not exact", measured=True)
    # If both are named, nothing is left to decide, and a network need not be searched for it.
    named = config.sides is not None and config.overlap is not None
    reach = _at_hand(model, axes) if named else reach_of(model, axes)
    if reach is None:
        return Tiled(config, "", measured=True)
    if reach.exact:
        cut = _exactly(config, reach, extent[3 - axes :], chunk[3 - axes :])
    else:
        cut = Tiled(_with(config, FIXED_PATCH, FIXED_OVERLAP), reach.line(), measured=True)
    return replace(cut, step=reach.step)


def _exactly(
    config: InferConfig, reach: Reach, extent: tuple[int, ...], chunk: tuple[int, ...]
) -> Tiled:
    """Patch and overlap for a network that has an exact tiling, as far as they are open."""
    axes = len(extent)
    least = least_overlap(reach, max(config.trim_voxels or 0, *(config.halo or (0,))))
    if config.tta == "rotations":  # patches turn in the plane of y and x
        least = (*least[:-2], max(least[-2:]), max(least[-2:]))
    wanted = " ".join(map(str, least))
    overlap = config.overlap or least
    if config.sides is None and config.overlap is None:
        patch = chunk_and_halo(extent, _each(overlap, axes), reach.step, chunk)
        if patch is None:
            line = f"not exact: it needs an --overlap of {wanted}, and far larger patches"
            return Tiled(_with(config, FIXED_PATCH, FIXED_OVERLAP), line, measured=True)
        if config.tta == "rotations":
            patch = (*patch[:-2], max(patch[-2:]), max(patch[-2:]))
        config = config.model_copy(update={"patch": patch})
    patch = _each(config.sides or FIXED_PATCH, axes)
    if config.overlap is None and not is_exact(reach, patch, least):
        step = " ".join(map(str, reach.step))
        line = f"not exact: --overlap {wanted} and a --patch of multiples of {step} is"
        return Tiled(_with(config, patch, FIXED_OVERLAP), line, measured=True)
    config = _with(config, patch, least)
    if is_exact(reach, patch, _each(overlap, axes)):
        return Tiled(config, f"exact ({reach.line()})", exact=True)
    return Tiled(config, f"not exact: --overlap {wanted} is", measured=True)


def _with(config: InferConfig, patch: tuple[int, ...], overlap: tuple[int, ...]) -> InferConfig:
    """The settings with a patch and an overlap where they have none."""
    said = {"patch": config.sides or patch, "overlap": config.overlap or overlap}
    return config.model_copy(update=said)


def _each(values: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """One number for each axis of the network."""
    return values * axes if len(values) == 1 else tuple(values)


def patch_shape(config: InferConfig, has_z: bool, model_axes: int | None) -> PatchShape:
    """The patch of a job. It is a plane if --patch has two axes or the net is two-dimensional.

    Raises `UsageError` if patch, overlap, trim and net contradict each other.
    """
    assert config.sides is not None and config.overlap is not None  # by now all are decided
    axes = len(config.sides) if len(config.sides) > 1 else (model_axes or (3 if has_z else 2))
    if model_axes is not None and axes != model_axes:
        raise UsageError(
            f"--patch {' '.join(map(str, config.sides))} has {plural(axes, 'axis')} but the model "
            f"is made of {model_axes}-D convolutions"
        )
    plane = axes == 2
    patch = per_axis(config.sides, plane=plane, thin=1)
    overlap = per_axis(config.overlap, plane=plane, thin=0)
    if len(config.overlap) == 1:
        # One number is meant for all axes, but an axis of one voxel cannot overlap.
        overlap = tuple(0 if p == 1 else o for p, o in zip(patch, overlap, strict=True))
    for name, p, o in zip("zyx", patch, overlap, strict=True):
        if o >= p:
            raise UsageError(f"--overlap {o} must be less than --patch {p} (axis {name})")
        trim = config.trim_voxels if config.seam_mode == "trim" and p > 1 else None
        if trim is not None and 2 * trim > o:
            raise UsageError(
                f"--trim-voxels {trim} needs an --overlap of at least "
                f"{2 * trim}, not {o} (axis {name})"
            )
    if config.tta == "rotations" and patch[1] != patch[2]:
        raise UsageError(
            f"--tta rotations turns patches in the plane of y and x, so --patch must be as long "
            f"along both, not {patch[1]} and {patch[2]}"
        )
    return PatchShape(patch, overlap, 2 if plane else 3)


def aligned(
    shape: PatchShape, heads: Sequence[HeadFacts], *, may_change: bool, back: Resampling | None
) -> PatchShape:
    """The patch with an overlap at which cores begin at whole voxels of every head's grid.

    An overlap that ``may_change`` becomes the next that fits. ``back`` is the way on which outputs
    are resampled, if they are. Raises `UsageError` for another overlap at which they do not, and
    for a head with more or fewer voxels that would have to be resampled, too.
    """
    factors = [head.factors for head in heads]
    if back is not None and any(each != SAME for each in factors):
        raise UsageError(
            "the network changes the number of voxels, so its outputs stay on its own grid: "
            "give --output-voxel-size network"
        )
    overlap = []
    axes = zip("zyx", shape.patch, shape.overlap, zip(*factors, strict=True), strict=True)
    for name, patch, shared, along in axes:
        coarsest = math.lcm(*(factor.denominator for factor in along))
        # Half of the overlap lies before a core, and it must be whole voxels of the coarsest head.
        least = 1 if coarsest == 1 else 2 * coarsest
        if shared % least:
            if not may_change:
                raise UsageError(
                    f"the network gives one voxel for {coarsest} along {name}, so --overlap must "
                    f"be a multiple of {least}, not {shared}"
                )
            shared = min(shared + least, patch - 1) // least * least
        overlap.append(shared)
    return replace(shape, overlap=tuple(overlap))


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
    if key not in _HERE:
        with suppress(*_NO_CACHE):
            _HERE[key] = _READ(_file(key).read_bytes())
    if key not in _HERE:
        _HERE[key] = find_reach(model, axes)
        trim_heap()  # the plan does not count what windows took
        with suppress(*_NO_CACHE):
            _file(key).parent.mkdir(parents=True, exist_ok=True)
            write_json(_file(key), asdict(_HERE[key]))
    return _HERE[key]


def _at_hand(model: Model, axes: int) -> Reach | None:
    """How far a network sees, if this process need not search it: ``--patch auto`` has done so."""
    shipped = _shipped(model, axes)
    if shipped is None and _HERE:  # else no key is made, as all weights are hashed for it
        return _HERE.get(_key(model, axes))
    return shipped


def _shipped(model: Model, axes: int) -> Reach | None:
    entry = REGISTRY.get(model.reference)
    reach = entry.reach if entry is not None else None
    if reach is not None and reach.exact and len(reach.period) != axes:
        return None  # it has no weights, and sees a voxel
    return reach


def _key(model: Model, axes: int) -> str:
    """A hash of all that the outputs of a model depend on."""
    parts = (
        *(_EDITION, torch.__version__, axes, model.in_channels, model.code),
        identity.weights(model.module),
        identity.attributes(model.module),
        identity.sources(model.reference, model.module),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _file(key: str) -> Path:
    return cache_folder() / "reach" / f"{key}.json"


def fitted(config: InferConfig, opened: Opener) -> InferConfig:
    """The settings with a patch and a batch in numbers.

    Args:
        config: The settings.
        opened: Opens a job of other settings.

    Returns:
        The settings.

    Raises:
        UsageError: What the settings ask for cannot be done.
    """
    asked = [name for name in ("patch", "batch") if getattr(config, name) == "auto"]
    if not asked:
        return config
    plain = config.model_copy(update=dict.fromkeys(asked))
    job = opened(plain)
    if "patch" in asked:
        job = _least_work(job, plain, opened)
    update = {"patch": job.config.patch, "overlap": job.config.overlap}
    plain = plain.model_copy(update=update)
    # On a CPU the number of patches in a forward is fixed; see `CPU_FORWARD`.
    if "batch" in asked and job.devices[0].type != "cpu":
        plain = plain.model_copy(update={"batch": _fastest(plain, opened)})
    return plain


def _least_work(job: Any, config: InferConfig, opened: Opener) -> Any:
    """The job with the patch that computes the fewest voxels, of those that fit. The job as it is
    if none does: its plan says what would help."""
    best, exact = None, job.tiled.exact
    for patch in _patches(job):
        with suppress(UsageError, Refused):  # the network takes no such patch, or it does not fit
            other = opened(config.model_copy(update={"patch": patch}))
            other.plan.refuse()
            work = other.plan.patch_amplification
            less = best is None or work < _WORTH * best.plan.patch_amplification
            # Less work does not pay for a seam that the user would not have had.
            if less and (other.tiled.exact or not exact):
                best = other
    return best or job


def _patches(job: Any) -> Iterator[tuple[int, ...]]:
    """Patches that cut a volume into so many along its longest axis, the smallest first."""
    geometry, axes = job.plan.geometry, job.net.shape.model_axes
    extent, overlap = geometry.domain.shape[-axes:], geometry.overlap[-axes:]
    grain = math.lcm(SIDE_STEP, *job.tiled.step)
    for count in range(_MOST_CUTS, 0, -1):
        core = -(-max(extent) // count)
        if core < SIDE_STEP:
            continue
        sides = (
            -(-(-(-n // -(-n // core)) + o) // grain) * grain if n > 1 else n
            for n, o in zip(extent, overlap, strict=True)
        )
        yield tuple(sides)


def _fastest(config: InferConfig, opened: Opener) -> int | None:
    """The batch with the shortest forward for each patch, of those that fit; None if none does."""
    times: dict[int, float] = {}
    for batch in _BATCHES:
        with suppress(UsageError, Refused, torch.OutOfMemoryError):
            job = opened(config.model_copy(update={"batch": batch}))
            job.plan.refuse()
            times[batch] = seconds_of_forward(job) / job.net.forward
    return min(times, key=lambda batch: times[batch], default=None)


def seconds_of_forward(job: Any) -> float:
    """The time of one forward of zeros on the first device, the second of two."""
    net, device = job.net, job.devices[0]
    module = placed(net.model.module, device, net.footprint.channels_last)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        net.forward_zeros(module, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return seconds
