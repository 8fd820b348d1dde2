"""The input of a job, and the time points and channels of it that are chosen."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import InferConfig, UsageError, plural
from ...data import Box, Source, open_source
from .network_voxels import sized_as_said

if TYPE_CHECKING:
    from ...models import Model, Recipe


class Volume(NamedTuple):
    """One pass of the model over space: one time point, one group of channels."""

    t: int
    channels: tuple[int, ...]

    def read(self, source: Source, box: Box, out: NDArray[Any]) -> None:
        """Read its channels over a spatial box into ``out``, shape (channels, z, y, x)."""
        # Channels that follow each other at once, as a chunk may hold several.
        for ahead, run in itertools.groupby(enumerate(self.channels), lambda at: at[1] - at[0]):
            at = [place for place, _ in run]
            lead = Box.of((self.t, at[0] + ahead), (1, len(at)))
            source.read(lead + box, out[None, at[0] : at[-1] + 1])

    def array(self, source: Source, box: Box) -> NDArray[Any]:
        """The same in a new array."""
        out = np.empty((len(self.channels), *box.shape), source.dtype)
        self.read(source, box, out)
        return out


def open_input(config: InferConfig, level: int | None = None) -> Source:
    """The input, at the level of the settings or at another."""
    source = open_source(
        config.in_spec, level=config.level if level is None else level, raw=config.raw,
        axes=config.axes, series=config.series,
    )  # fmt: skip
    return source if level is not None else sized_as_said(config, source)


def with_bands(
    config: InferConfig, model: Model, source: Source, count: int
) -> tuple[Model, list[str]]:
    """The model as it takes ``count`` channels of the input, and notes on that.

    The bands of a raster are channels of one picture: a model that says nothing of channels gets
    all of them. Raises `UsageError` for one that takes another number.
    """
    if config.in_channels is not None or count in (1, model.in_channels):
        return model, []
    if not getattr(source, "bands", False):
        note = (
            f"the model does not say how many channels it takes, and gets each of the {count} as a "
            f"volume of its own; --in-channels {count} gives it all at once"
        )
        return model, [] if model.says_channels or model.name == "identity" else [note]
    if not model.says_channels:
        return replace(model, in_channels=count), [f"the model gets all {count} bands at once"]
    raise UsageError(
        f"--in-spec {source.name} has {plural(count, 'band')} and model {model.name} takes "
        f"{plural(model.in_channels, 'channel')}: choose bands by --c, or give --in-channels "
        f"{model.in_channels} if bands are to go through the model by themselves"
    )


def as_selected(
    source: Source,
    times: Sequence[int],
    channels: Sequence[int],
    *,
    named: bool,
    windows: bool,
    packing: Mapping[str, float],
) -> Source:
    """The source with the frame of the times and channels that a job runs over, for its output.

    Args:
        source: The input.
        times: The time points of the output, in its order.
        channels: The channels that the output's channels are made of.
        named: Whether each channel of the output is made of one of them, in this order.
        windows: Whether its values are intensities of the input.
        packing: Attributes that say what its numbers stand for.

    Returns:
        A copy that is not to be read from.
    """
    shown = copy.copy(source)
    scale, position = list(source.scale or (1.0,) * 5), list(source.translation)
    for axis, selected in ((0, times), (1, channels if named else (0,))):
        position[axis] += selected[0] * scale[axis]
        scale[axis] *= _step(selected) or 1
    if source.scale or any(size != 1 for size in scale):
        shown.scale = tuple(scale)
    shown.translation = tuple(position)
    omero = getattr(source, "omero", ())
    first = source.domain.start[1]
    kept = [dict(omero[i - first]) for i in channels] if named and omero else []
    for each in kept if not windows else ():
        each.pop("window", None)
    shown.omero = tuple(kept)  # type: ignore[attr-defined]
    shown.stands_for = packing  # type: ignore[attr-defined]
    return shown


def uneven(selected: tuple[Sequence[int], Sequence[int]]) -> Iterator[str]:
    """A note for times or channels whose places the output's metadata cannot say."""
    for flag, indices in zip(("--t", "--c"), selected, strict=True):
        if _step(indices) is None:
            yield (
                f"{flag} {','.join(map(str, indices))} is not evenly spaced: the output's metadata "
                f"has the place of {indices[0]}, and steps of 1 from there"
            )


def _step(indices: Sequence[int]) -> int | None:
    """The distance of evenly spaced indices, 1 for a single one; None for others."""
    steps = {after - before for before, after in itertools.pairwise(indices)} or {1}
    return steps.pop() if len(steps) == 1 else None


def volumes_of(
    times: Sequence[int], channels: Sequence[int], model: Model, scalings: int
) -> list[Volume]:
    """The volumes of some times and channels.

    Args:
        times: The time points.
        channels: The channels of the input that are chosen.
        model: The model.
        scalings: Channels that are normalised in ways of their own; 1 if all are alike.

    Returns:
        A volume for each time point and each group of as many channels as the model takes.

    Raises:
        UsageError: Channels would be left over, or go through the model without their own scaling.
    """
    at_once, recipe = model.in_channels, model.recipe
    if scalings not in (1, at_once):
        raise UsageError(
            f"model {model.name} normalises {plural(scalings, 'channel')} in different ways and "
            f"takes {at_once}; leave out --in-channels, or give --normalize"
        )
    if len(channels) % at_once:
        named = f" ({', '.join(recipe.channels)})" if recipe and recipe.channels else ""
        turned = "; if its time points are channels, --axes has c for t, such as xyzc for NIfTI"
        raise UsageError(
            f"the input gives {plural(len(channels), 'channel')} and model {model.name} takes "
            f"{at_once}{named} at once; name a multiple of it by --c, give an --in-spec that has "
            f"them, or set --in-channels{turned if len(times) == at_once else ''}"
        )
    groups = [
        tuple(channels[first : first + at_once]) for first in range(0, len(channels), at_once)
    ]
    return [Volume(t, group) for t in times for group in groups]


def channels_of(
    config: InferConfig, source: Source, recipe: Recipe | None
) -> tuple[tuple[int, ...], list[str]]:
    """The channels of a job: those that the user names, else those that the recipe names.

    Args:
        config: The settings.
        source: The input.
        recipe: The recipe of the network; None if it has none.

    Returns:
        Their coordinates, and a sentence if the recipe chose them.

    Raises:
        UsageError: There are no such channels.
    """
    start, names = source.domain.start[1], channel_names(source)
    chosen = select(config.c, start, source.domain.stop[1], "--c", names)
    wanted = recipe.channels if recipe else ()
    if "c" in config.model_fields_set or not any(names) or not wanted:
        return chosen, []
    places = {name.lower(): start + number for number, name in enumerate(names)}
    lacking = [name for name in wanted if name.lower() not in places]
    if not lacking:
        by_name = tuple(places[name.lower()] for name in wanted)
        note = f"--c {','.join(wanted)}, as {recipe.place if recipe else ''} says"
        return by_name, [] if by_name == chosen else [note]
    if len(wanted) == 1:
        return chosen, []
    raise UsageError(
        f"--in-spec {source.name} has no channel {' and '.join(lacking)}, and the network takes "
        f"{', '.join(wanted)}; it has {', '.join(names)}: name those to take by --c, in that order"
    )


def channel_names(source: Source) -> list[str]:
    """The names of a source's channels; empty if it says none."""
    return [str(each.get("label", "")) for each in getattr(source, "omero", ())]


def select(
    selection: Sequence[str | int], start: int, stop: int, flag: str, names: Sequence[str] = ()
) -> tuple[int, ...]:
    """The coordinates that ``all``, ``3``, ``0:5`` or several of these name within a domain, or one
    of its ``names``.

    >>> select(["0:2", 5], 0, 6, "--t")
    (0, 1, 5)
    >>> select(["488,dapi"], 0, 2, "--c", ["dapi", "488"])
    (1, 0)
    """
    chosen: list[int] = []
    for item in (part for value in selection for part in str(value).split(",")):
        try:
            # A number that is no index may be a name, as wavelengths are.
            in_domain = item.isdigit() and start <= int(item) < stop
            named = item in names and not in_domain
            chosen += [start + names.index(item)] if named else named_range(item, start, stop)
        except (ValueError, TypeError):
            there = f", nor one of {', '.join(names)}" if any(names) else ""
            if flag == "--c" and not there:
                there = f"; the input has no names for its {plural(stop - start, 'channel')}"
            raise UsageError(
                f"{flag} {item!r} is not all, an index or a range like 0:5{there}"
            ) from None
    if not chosen:
        raise UsageError(f"{flag} {' '.join(map(str, selection))} names nothing")
    for value in chosen:
        if not start <= value < stop:
            raise UsageError(f"{flag} {value} is out of range: the input has {start} to {stop - 1}")
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"{flag} {' '.join(map(str, selection))} names one index twice")
    return tuple(chosen)


def named_range(item: str, start: int, stop: int) -> range:
    """The coordinates that ``all``, ``3`` or ``0:5`` names within a domain, and one beyond it if
    there are such. Raises `ValueError` or `TypeError` for another text."""
    if ":" not in item:
        return range(start, stop) if item == "all" else range(int(item), int(item) + 1)
    low, high, *step = (int(number) if number.strip() else None for number in item.split(":"))
    low, high = start if low is None else low, stop if high is None else high
    named = range(low, high, *[number for number in step if number is not None])
    # One index more than the input has is enough to raise the error.
    return named[: stop - start + 1]
