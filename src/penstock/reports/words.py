"""Texts of tables and sentences: lists, numbers, intervals, machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..base import format_bytes, format_seconds, plural, significant
from ..instruments import Interval, Record, commit_of

Form = Callable[[float], str]


def listed(words: Sequence[str]) -> str:
    """Words with commas and an "and" between them.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def labels_line(document: Mapping[str, Any]) -> list[str]:
    """A line on the name and the tags of a run; none if its document has neither.

    >>> labels_line({"name": "mine", "tags": {"study": "a"}}), labels_line({})
    (['mine, tagged study=a'], [])
    """
    tags = document.get("tags")
    words = [f"{key}={text}" for key, text in tags.items()] if isinstance(tags, Mapping) else []
    tagged = f"tagged {listed(words)}" if words else ""
    line = ", ".join(filter(None, [str(document.get("name") or ""), tagged]))
    return [line] if line else []


def or_dash(value: float | None, form: Form = significant) -> str:
    """A field of a table.

    Args:
        value: The number; None if it is not known.
        form: A function that writes it.

    Returns:
        The text; ``-`` if the value is not known.
    """
    return "-" if value is None else form(value)


def spread(interval: Interval | None, form: Form = significant) -> str:
    """Both ends of an interval, ``1.2 - 1.4``; ``-`` if one of them is not known."""
    if interval is None or interval.low is None or interval.high is None:
        return "-"
    return f"{form(interval.low)} - {form(interval.high)}"


def bracket(interval: Interval, count: str, form: Form = format_seconds) -> str:
    """An interval and the count behind it, ``[1.2 s - 1.4 s, 5 launches]``.

    Args:
        interval: The interval.
        count: Words for the number of measurements behind it.
        form: A function that writes an end.

    Returns:
        The text: the count alone if an end is not known, or if a single value is behind both.
    """
    ends = spread(interval, form) if interval.n > 1 else "-"
    return f"[{count}]" if ends == "-" else f"[{ends}, {count}]"


def of_launches(values: Sequence[float], form: Form) -> str:
    """The least and the most over launches, ``1.2 - 1.4, 5 launches``."""
    launches = plural(len(values), "launch")
    return (
        launches if len(values) == 1 else f"{form(min(values))} - {form(max(values))}, {launches}"
    )


def times_bracket(ratio: Interval, launches: str) -> str:
    """The interval of a factor and the launches behind it, ``[1.42-1.47, 5 launches each]``."""
    low, high = ("?" if end is None else f"{end:.2f}" for end in (ratio.low, ratio.high))
    return f"[{low}-{high}, {launches}]"


def hosts_of(records: Iterable[Record]) -> Counter[str]:
    """Number of launches by host. Only the records of a cluster's workers name a host."""
    workers = (record.environment.get("worker") or {} for record in records)
    return Counter(str(worker["host"]) for worker in workers if worker.get("host"))


def machine_words(environment: Mapping[str, Any], *devices: str | None) -> str:
    """A machine in a line: processor, cores, memory, ``devices``, libraries and commit."""
    machine, libraries = environment.get("machine") or {}, environment.get("libraries") or {}
    cores, memory = machine.get("cores"), machine.get("memory_bytes")
    commit = commit_of(environment.get("git"))
    words = [
        machine.get("processor"),
        cores and f"{cores} cores",
        memory and format_bytes(memory),
        *devices,
        *(f"{name} {libraries[name]}" for name in ("python", "torch") if libraries.get(name)),
        commit and f"commit {commit}",
    ]
    return ", ".join(word for word in words if word)


def nothing_measured(records: Iterable[Record]) -> str:
    """Say that no launch was ok."""
    status = [record.status for record in records]
    counts = ", ".join(f"{status.count(each)} {each}" for each in dict.fromkeys(status))
    return (
        f"Nothing was measured: of {plural(len(status), 'launch')} none was ok ({counts}), so "
        "the speed is not known."
    )
