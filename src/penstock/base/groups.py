"""Items in groups, in ranges and in order; nested mappings as flat ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by their key. Keys and items keep their order.

    Args:
        items: The items.
        key: A function that gives an item's key.

    Returns:
        The items of each key.

    >>> group_by([3, 1, 4, 1], lambda number: number % 2 == 0)
    {False: [3, 1, 1], True: [4]}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def number_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in words, as SLURM writes the elements of an array.

    >>> number_ranges([1, 2, 3, 7, 9, 10])
    '1-3,7,9-10'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def nth_share(number: int, shares: int, size: int) -> range:
    """What one of several shares has of ``size`` things in a row: consecutive ones, and maybe none.

    Args:
        number: The number of the share, from 0.
        shares: How many shares there are. All of them together have each thing once.
        size: How many things there are.

    Returns:
        The numbers of the things.

    >>> [list(nth_share(number, 3, 5)) for number in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(number * size // shares, (number + 1) * size // shares)


def groups_of(count: int, pairs: NDArray[np.int64], extra: str) -> NDArray[np.int64]:
    """The group of each number: those that pairs join, directly or by others.

    Args:
        count: The number of numbers, from 0.
        pairs: Two of them in each row.
        extra: The extra that brings scipy to whoever asks.

    Returns:
        Numbers of groups from 0.
    """
    import numpy as np

    sparse, graphs = require("scipy.sparse", extra), require("scipy.sparse.csgraph", extra)
    ones = np.ones(len(pairs), bool)
    graph = sparse.coo_matrix((ones, (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    groups: NDArray[np.int32] = graphs.connected_components(graph, directed=False)[1]
    return groups.astype(np.int64)


def natural(text: str) -> list[str | int]:
    """A key of sorting by which number 2 comes before number 10.

    >>> sorted(["z10", "z2"], key=natural)
    ['z2', 'z10']
    """
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def with_each(document: Any, change: Callable[[Any], Any]) -> Any:
    """A document of mappings and sequences in which each other value is changed.

    Args:
        document: The document.
        change: Gives what stands in the place of a value.

    >>> with_each({"sides": (2, 3), "name": "x"}, str)
    {'sides': ['2', '3'], 'name': 'x'}
    """
    if isinstance(document, Mapping):
        return {str(name): with_each(value, change) for name, value in document.items()}
    if isinstance(document, Sequence) and not isinstance(document, str | bytes):
        return [with_each(value, change) for value in document]
    return change(document)


def flattened(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, by dotted names.

    Args:
        document: The mapping.
        before: A prefix of each name.

    Yields:
        A name and its value.

    >>> dict(flattened({"launch": {"job_id": "7", "hosts": ["a", "b"]}, "git": None}))
    {'launch.job_id': '7', 'launch.hosts': ['a', 'b'], 'git': None}
    """
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
