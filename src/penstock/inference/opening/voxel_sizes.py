"""The grid that the network sees: that of the input, or one with the voxel size of its training."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from ...base import InferConfig, UsageError, sizes_of
from ...data import LONGEST, METERS, Box, Resampling, Source, in_words, on_grid, unit_name
from ...models import Recipe


def sized_as_said(config: InferConfig, source: Source) -> Source:
    """The input with the voxel size of ``--in-voxel-size``, if that is given."""
    if config.in_voxel_size is None or config.in_voxel_size == ("none",):
        return source
    sizes, unit = sizes_of(config.in_voxel_size)
    shown = copy.copy(source)
    shown.scale = (*(source.scale or (1.0, 1.0))[:2], *sizes)
    if unit:
        shown.units = (*source.units[:2], *[unit_name(unit)] * 3)
    return shown


def network_grid(
    config: InferConfig, source: Source, recipe: Recipe | None
) -> tuple[Resampling | None, list[str]]:
    """How the input is resampled for the network, None if it is not, and notes for the plan.

    Raises `UsageError` for an input whose voxel size is not known, or a grid that is too large.
    """
    check_orientation(source, recipe)
    said, trained = config.voxel_size, recipe.spacing if recipe else None
    if said == ("none",) or (said is None and trained is None):
        return None, []
    notes = []
    wanted: Sequence[float]
    if said is None:
        assert recipe is not None and trained is not None
        wanted, unit, of = trained, recipe.unit, f"the network's voxel size ({recipe.place})"
    else:
        wanted, unit = sizes_of(said)
        of = f"--voxel-size {' '.join(said)}"
        if recipe and trained and (*wanted, unit_name(unit)) != (*trained, unit_name(recipe.unit)):
            notes += [f"{of} wins over {_words(trained)} {recipe.unit} of {recipe.place}"]
    have = _sizes_in(source, unit, of)
    shape = source.domain.shape[2:]
    sides = []
    for name, length, size, other in zip("zyx", shape, have, wanted, strict=True):
        side = length * size / other if length > 1 else 1
        if not side < LONGEST:
            raise UsageError(f"{of} makes {side:.3g} voxels of the {length} along {name}")
        sides.append(max(1, round(side)))
    if tuple(sides) == shape:
        return None, [*notes, f"{of} is that of the input: nothing is resampled"]
    if config.output_voxel_size == "network" and getattr(source, "georeferenced", False):
        raise UsageError(
            f"--output-voxel-size network: {source.name} has a CRS, which stays on its own grid"
        )
    resampling = Resampling(source.domain[2:], Box.of((0, 0, 0), sides), config.resample_order)
    made = in_words(sides)
    notes += [f"voxels of {_words(have)} become {_words(wanted)}, {made} of them, by {of}"]
    return resampling, notes


def check_orientation(source: Source, recipe: Recipe | None) -> None:
    """Refuse an input that lies in another way than its network wants.

    Args:
        source: The input. Without an affine of its own it runs along R, A and S.
        recipe: The recipe of the network; None if it has none.

    Raises:
        UsageError: Its voxels run along other directions.
    """
    if recipe is None or not recipe.orientation:
        return
    affine = getattr(source, "affine", None)
    matrix = np.eye(3) if affine is None else np.array(affine)[:3, :3]
    nearest = np.abs(matrix).argmax(axis=0)
    pairs = zip(nearest, matrix[nearest, range(3)], strict=True)
    lies = "".join(("RAS" if size > 0 else "LPI")[axis] for axis, size in pairs)
    if lies != recipe.orientation:
        raise UsageError(
            f"x, y and z of --in-spec {source.name} run along {lies}, and {recipe.place} turns its "
            f"input to {recipe.orientation}, which is not done: turn the volume first, or, if it "
            "lies so already, take Orientation out of configs/inference.json"
        )


def _sizes_in(source: Source, unit: str, of: str) -> Sequence[float]:
    """The voxel size of an input along z y x, in a unit; in its own where that is empty."""
    how = "give --in-voxel-size, such as 2 0.5 0.5 um, or --voxel-size none to run it as it is"
    if source.scale is None:
        raise UsageError(f"--in-spec {source.name} says no voxel size, which {of} needs; {how}")
    sizes = []
    wanted = unit_name(unit)
    for size, given, length in zip(
        source.scale[2:], source.units[2:], source.domain.shape[2:], strict=True
    ):
        times = 1.0
        if wanted and given != wanted and length > 1:
            if given not in METERS or wanted not in METERS:
                raise UsageError(
                    f"--in-spec {source.name} has voxels of {_words(source.scale[2:])} "
                    f"{given or 'of an unknown unit'}, and {of} is in {wanted}; {how}"
                )
            times = METERS[given] / METERS[wanted]
        sizes.append(abs(size) * times)
    return sizes


def _words(sizes: Sequence[float]) -> str:
    return " x ".join(f"{size:.4g}" for size in sizes)


def frame_of_outputs(config: InferConfig, source: Source, way: Resampling | None) -> Source:
    """The input, or the input as it would be on the network's grid, where outputs lie on that."""
    if way is None or config.output_voxel_size == "input":
        return source
    return on_grid(source, way.to, way.steps)
