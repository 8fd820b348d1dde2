"""Dates and times of day in the names of files, which count them along time: ``s_20240108.tif``,
``2024-01-08T12-30-00.tif``, ``frame_123005.tif``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import pairwise

UNEVEN = (
    "the times in the names of the input's files are not evenly spaced, and only their order goes "
    "further"
)
_YEAR = r"(?<!\d)(?P<year>(?:19|20)\d\d)(?P<mark>[-_.]?)"
_DATE = rf"{_YEAR}(?P<month>\d\d)(?P=mark)(?P<day>\d\d)"
_CLOCK = r"(?P<hour>\d\d)(?P<colon>[-_.:h]?)(?P<minute>\d\d)(?P=colon)(?P<second>\d\d)(?!\d)"
_PATTERNS = [
    re.compile(text)
    for text in (
        *(rf"{_DATE}(?P<between>[-_.T ]?){_CLOCK}", rf"{_DATE}(?!\d)", rf"(?<!\d){_CLOCK}"),
        *(rf"{_YEAR}(?P<month>\d\d)(?!\d)", rf"{_YEAR}(?P<of_year>\d\d\d)(?!\d)"),
    )
]
_DAY = 86_400
_APART = 10
"""The least step of numbers that may be times: others count."""


def counted_times(names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Names of files in which times are numbers that count them.

    Args:
        names: The names.

    Returns:
        The names, with the place of its time among all times in each, after a ``t``, and a sentence
        if the times are not evenly spaced. Names without times stay as they are.

    >>> counted_times(["a_20240101.tif", "a_20240108.tif"])[0]
    ['a_ t0 .tif', 'a_ t1 .tif']
    """
    for pattern in _PATTERNS:
        for matches in zip(*map(pattern.finditer, names), strict=False):
            with suppress(ValueError):  # there is no such day, or no such time of day
                times = [_seconds(match) for match in matches]
                if _are_times(matches, times):
                    places = {time: place for place, time in enumerate(sorted({*times}))}
                    each = zip(names, matches, times, strict=True)
                    return [
                        f"{name[: at.start()]} t{places[time]} {name[at.end() :]}"
                        for name, at, time in each
                    ], UNEVEN * (not _are_even(times))
    return names, ""


def are_apart(numbers: Sequence[int]) -> bool:
    """Whether numbers along time, in order, are times, such as milliseconds, and not a count of
    which some are missing: they are far apart, and not by one step or several.

    >>> are_apart([0, 100, 199, 301]), are_apart([0, 100, 300]), are_apart([1, 4, 6])
    (True, False, False)
    """
    steps = [b - a for a, b in pairwise(numbers)]
    return min(steps) >= _APART and any(step % min(steps) for step in steps)


def _seconds(match: re.Match[str]) -> int:
    parts = {"year": 1, "month": 1, "day": 1, "of_year": 1, **match.groupdict()}
    names = ("year", "month", "day", "hour", "minute", "second", "of_year")
    year, month, day, hour, minute, second, of_year = (int(parts.get(name, 0)) for name in names)
    time = datetime(year, month, day, hour, minute, second) + timedelta(of_year - 1)
    return int((time - datetime.min).total_seconds())


def _are_times(matches: Sequence[re.Match[str]], times: Sequence[int]) -> bool:
    """Whether numbers that could be times are. A time of day alone, or behind one day, may be a
    count of six digits: it is none if the times are evenly spaced, and the numbers are not. Numbers
    behind a year are months or days of it if there are several years."""
    if "between" in matches[0].groupdict() and all(at["between"] in ("", "T") for at in matches):
        return len({*times}) > 1
    if "day" in matches[0].groupdict():
        return len({time // _DAY for time in times}) > 1
    if "year" in matches[0].groupdict():
        return len({at["year"] for at in matches}) > 1
    numbers = [int("".join(at.group("hour", "minute", "second"))) for at in matches]
    return _are_even(times) and not _are_even(numbers)


def _are_even(numbers: Sequence[int]) -> bool:
    return len({b - a for a, b in pairwise(sorted({*numbers}))}) <= 1
