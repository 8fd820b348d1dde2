"""Checks the arguments of a `Loader` about its arrays, and makes a selection and stacks of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base import UsageError
from .batch import ChannelStack
from .engines.engine import Location, Selection
from .fields import Field, PatchGrid


def selection_of(
    names: Sequence[str], *, offsets: Any, channels: Any, patch: Any, channel_axis: Any
) -> Selection:
    """The part of each array that an item takes, from the arguments of `penstock.Loader`."""
    return Selection(
        offsets=_for_each(names, "offsets", offsets, _numbers),
        channels=_for_each(names, "channels", channels, _numbers),
        patch=_for_each(names, "patch", patch, _grid),
        channel_axis=_for_each(names, "channel_axis", channel_axis, operator.index),
    )


def _for_each(
    names: Sequence[str], what: str, value: Any, parse: Callable[[Any], Any]
) -> dict[str, Any]:
    """A value for each array: those of a mapping, one value for all arrays, or none."""
    if value is None:
        return {}
    try:
        if isinstance(value, Mapping):
            return {name: parse(one) for name, one in value.items()}
        return dict.fromkeys(names, parse(value))
    except TypeError:
        number = "a whole number" if parse is operator.index else "a list of whole numbers"
        raise UsageError(f"{what} {value!r} is not {number}, nor one for each array") from None


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, values))


def _grid(patch: Any) -> PatchGrid:
    """The patches of an array, from a `PatchGrid` or the shape of a patch."""
    return patch if isinstance(patch, PatchGrid) else PatchGrid(_numbers(patch))


def stacks_of(
    value: Any,
    fields: Mapping[str, Field],
    places: Mapping[str, Location],
    selection: Selection,
) -> dict[str, ChannelStack]:
    """The stacks by name, from names of their arrays.

    An array has channels where its channel axis or its channels are given, or where the data set
    names such an axis.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(isinstance(names, str) for names in value.values()):
        raise UsageError(f"stack {value!r} is not a mapping of a name to a list of arrays")
    parts = [name for names in value.values() for name in names]
    unknown = sorted({str(name) for name in parts if name not in fields})
    if unknown:
        raise UsageError(f"stack names {', '.join(unknown)}; the arrays are {', '.join(fields)}")
    if len(set(parts)) < len(parts):
        raise UsageError(
            f"stack {value!r} has an array twice; DATA may be a mapping that gives it two names"
        )
    if taken := sorted(set(value) & (set(fields) - set(parts))):
        raise UsageError(f"stack {', '.join(taken)}: an array that is not stacked has that name")
    deep = {*selection.channel_axis, *selection.channels}
    deep |= {name for name, place in places.items() if "channels" in place.axes}
    return {
        str(name): ChannelStack(
            str(name), tuple(fields[part] for part in names), frozenset(names) - deep
        )
        for name, names in value.items()
    }
