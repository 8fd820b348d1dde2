"""The network's grid over an input, whose voxels have another size."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from ...base import InferConfig, UsageError, sizes_of
from ...data import LONGEST, METERS, Box, Resampling, Source, in_words, on_grid, unit_name

if TYPE_CHECKING:
    from ...models import Recipe

_FINEST = 10**7
"""The largest denominator of a ratio of voxel sizes: numbers made of it fit into 64 bits."""


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
    config: InferConfig, source: Source, recipe: Recipe | None, crop: Box | None = None
) -> tuple[Resampling | None, list[str]]:
    """How the input is resampled for the network, None if it is not, and notes for the plan.
    A grid that begins in ``crop`` goes on beyond it.

    Raises `UsageError` for an input whose voxel size is not known, or a grid that is too large.
    """
    check_orientation(source, recipe)
    said, trained = config.voxel_size, recipe.spacing if recipe else None
    notes = list[str]()
    if said is not None and said != ("none",):
        wanted, unit = sizes_of(said)
        of = f"--voxel-size {' '.join(said)}"
        if recipe and trained and (*wanted, unit_name(unit)) != (*trained, unit_name(recipe.unit)):
            notes += [f"{of} wins over {_words(trained)} {recipe.unit} of {recipe.place}"]
    elif said is None and recipe and trained:
        wanted, unit, of = trained, recipe.unit, f"the network's voxel size ({recipe.place})"
    else:
        return None, []
    have = _sizes_in(source, unit, of)
    shape = (crop or source.domain[2:]).shape
    wanted = tuple(b if math.isnan(a) else a for a, b in zip(wanted, have, strict=True))
    centred = recipe is not None and recipe.centred
    if centred:  # MONAI leaves an axis whose voxels differ by less than a thousandth
        wanted = tuple(b if abs(a - b) <= 1e-3 else a for a, b in zip(wanted, have, strict=True))
    sides = list(_sides_over(shape, have, wanted, of, centred=centred))
    if wanted == have if centred else tuple(sides) == shape:
        return None, [*notes, f"{of} is that of the input: nothing is resampled"]
    if config.output_voxel_size == "network" and getattr(source, "georeferenced", False):
        raise UsageError(
            f"--output-voxel-size network: {source.name} has a CRS, which stays on its own grid"
        )
    nearest, made = None, in_words(sides)
    notes += [f"voxels of {_words(have)} become {_words(wanted)}, {made} of them, by {of}"]
    if recipe and recipe.most_anisotropy and "resample_order" not in config.model_fields_set:
        nearest = _coarse_axis(recipe.most_anisotropy, have, wanted)
        if nearest is not None and shape[nearest] != sides[nearest]:
            notes += [f"the nearest voxel is taken along {'zyx'[nearest]}, as {recipe.place} says"]
        otherwise = _coarse_axis(recipe.most_anisotropy, wanted, have) != nearest
        notes += ["and so on the way back, where its makers take it along another axis"] * otherwise
    its = recipe.order if recipe and "resample_order" not in config.model_fields_set else None
    order = config.resample_order if its is None else its
    way = Resampling(source.domain[2:], Box.of((0, 0, 0), sides), order, nearest)
    if centred:
        steps = (Fraction(max(a / b, 1 / _FINEST)) for a, b in zip(wanted, have, strict=True))
        way = replace(way, centred=tuple(step.limit_denominator(_FINEST) for step in steps))
    return way if crop is None else _begun_in(crop, way), notes


def _sides_over(
    shape: Sequence[int], have: Sequence[float], wanted: Sequence[float], of: str, *, centred: bool
) -> Iterator[int]:
    """Voxels of the wanted size along each axis: from the first centre to the last if they are
    ``centred``, else from edge to edge."""
    for name, length, size, other in zip("zyx", shape, have, wanted, strict=True):
        if other <= 0:
            raise UsageError(f"{of} is {other:g} along {name}; give a --voxel-size above 0")
        side = (length - centred) * (size / other) + centred if length > 1 else 1
        if not side < LONGEST:
            raise UsageError(f"{of} makes {side:.3g} voxels of the {length} along {name}")
        yield max(1, round(side))


def _begun_in(crop: Box, way: Resampling) -> Resampling:
    """The way to a grid that begins in a crop, as ``way`` has it, and goes on beyond."""
    steps = [n / m for n, m in zip(crop.shape, way.to.shape, strict=True)]
    before, after = (
        [math.ceil((b - a) / step) for a, b, step in zip(low, high, steps, strict=True)]
        for low, high in ((way.of.start, crop.start), (crop.stop, way.of.stop))
    )
    inner = way.to.shift(before)
    to = Box((0, 0, 0), inner.grow((0, 0, 0), after).stop)
    return replace(way, to=to, inner=(crop, inner))


def _coarse_axis(most: float, *sizes: Sequence[float]) -> int | None:
    """The axis along which voxels are longest. It is read from the first of several sizes whose
    longest side is more than ``most`` times its shortest. None if there is no such size, or if two
    of its sides are the longest."""
    for each in sizes:
        longest = max(each)
        if longest > most * min(each):
            return each.index(longest) if each.count(longest) == 1 else None
    return None


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


def _sizes_in(source: Source, unit: str, of: str) -> tuple[float, ...]:
    """The voxel size of an input along z y x, in a unit; in its own where that is empty."""
    how = "give --in-voxel-size, such as 2 0.5 0.5 um, or --voxel-size none to run it as it is"
    if source.scale is None:
        raise UsageError(f"--in-spec {source.name} says no voxel size, which {of} needs; {how}")
    sizes, wanted = list[float](), unit_name(unit)
    each = zip(source.scale[2:], source.units[2:], source.domain.shape[2:], strict=True)
    for size, given, length in each:
        times = 1.0
        if wanted and given != wanted and length > 1:
            if given not in METERS or wanted not in METERS:
                raise UsageError(
                    f"--in-spec {source.name} has voxels of {_words(source.scale[2:])} "
                    f"{given or 'of an unknown unit'}, and {of} is in {wanted}; {how}"
                )
            times = METERS[given] / METERS[wanted]
        sizes.append(abs(size) * times)
    return tuple(sizes)


def _words(sizes: Sequence[float]) -> str:
    return " x ".join(f"{size:.4g}" for size in sizes)


def frame_of_outputs(config: InferConfig, source: Source, way: Resampling | None) -> Source:
    """The input, or the input as it would be on the network's grid, where outputs lie on that."""
    if way is None or config.output_voxel_size == "input":
        return source
    return on_grid(source, way.to, way.steps, way.begins)
