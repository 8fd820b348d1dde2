"""Matrices of parameters, of which a few combinations are default tests and the others slow."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Parameters: every value of each axis stands in one of the default tests; the other
    combinations are slow."""
    return all_of(*axes, default=paired(*axes))


def paired(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Parameters: the default tests of `crossed` alone. Each value takes a path of its own, and no
    pair of them another."""
    longest = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)]


def all_of(*axes: Sequence[Any], default: Collection[Any]) -> list[Any]:
    """Parameters: every combination of the axes, of which all but those that are given are slow."""
    combinations = [*itertools.product(*axes)]
    assert all(case in combinations for case in default)
    return [
        pytest.param(*values, marks=() if values in default else pytest.mark.slow)
        for values in combinations
    ]


def mainly(cases: Sequence[Any], *places: int) -> list[Any]:
    """Parameters: the default tests are those at these places. The others hold the same law with
    other values, and are slow."""
    quick = {place % len(cases) for place in places}
    return [case if number in quick else slowly(case) for number, case in enumerate(cases)]


def slowly(case: Any) -> Any:
    """The parameter, or the parameters, of a slow test."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
