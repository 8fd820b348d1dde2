"""The choices of a user, and the link that restores them.

A link may come from anyone. Unknown words in it are left out, and every value is checked for its
type and length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlencode

Tab = Literal[
    "curves", "machine", "settings", "metric", "scaling", "groups", "pictures"
]  # fmt: skip
Axis = Literal["step", "epoch", "seconds"]
Order = Literal["began", "name", "kind", "status", "workload", "model", "machine", "seconds"]
MOST_SELECTED = 200
"""Most runs that are compared at once."""
_LONGEST = 300
"""Most characters of one value in a link."""


@dataclass(frozen=True)
class View:
    """The filters of the list, the runs that are selected, and how they are shown."""

    find: str = ""
    kind: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    workload: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    """Tags as ``key=value``. A run passes if, for each key, it has one of the given values."""
    since: str = ""
    """Date, in ISO 8601, on which the first run began."""
    until: str = ""
    order: Order = "began"
    up: bool = False
    """True for ascending order."""
    page: int = 1
    runs: tuple[str, ...] = ()
    """The keys of the selected runs."""
    tab: Tab = "curves"
    curves: tuple[str, ...] = ()
    """The metrics whose curves are drawn; if empty, the most important ones."""
    x: Axis = "step"
    log: bool = False
    metric: str = ""
    knob: str = ""
    group: str = ""
    """The tag or setting by which runs are coloured and grouped."""
    all: bool = False
    """True if equal settings are shown, too."""
    anyway: bool = False
    """True if runs with different settings count as one scaling study."""


_FIELDS = {field.name: field for field in dataclasses.fields(View)}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "order": get_args(Order), "tab": get_args(Tab), "x": get_args(Axis)
}  # fmt: skip


def view_of(query: str) -> View:
    """The view that the query of a link asks for.

    >>> view_of("?runs=a&runs=b&x=epoch&tab=nonsense&up=1")
    View(... up=True, ... runs=('a', 'b'), tab='curves', ... x='epoch', ...)
    """
    given: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query.removeprefix("?"), max_num_fields=1000)
    except ValueError:
        return View()
    for name, value in pairs:
        if name not in _FIELDS or len(value) > _LONGEST:
            continue
        default = _FIELDS[name].default
        if isinstance(default, tuple):
            values = given.setdefault(name, ())
            if value not in values and len(values) < MOST_SELECTED:
                given[name] = (*values, value)
        elif isinstance(default, bool):
            given[name] = value == "1"
        elif isinstance(default, int):
            given[name] = int(value) if value.isascii() and value.isdigit() else default
        elif value in _CHOICES.get(name, (value,)):
            given[name] = value
    return View(**given)


def query_of(view: View) -> str:
    """The query of the link that restores a view; empty for the default view.

    >>> query_of(View(runs=("a", "b"), x="epoch", up=True))
    '?up=1&runs=a&runs=b&x=epoch'
    """
    pairs: list[tuple[str, str]] = []
    for name, field in _FIELDS.items():
        value = getattr(view, name)
        if value == field.default:
            continue
        if isinstance(value, tuple):
            pairs += [(name, each) for each in value]
        else:
            pairs.append((name, str(int(value)) if isinstance(value, bool) else str(value)))
    return f"?{urlencode(pairs)}" if pairs else ""
