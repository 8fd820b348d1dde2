"""Successive halving: many settings are tried a little, and the better ones more.

    round 0   all cases        round 1   the first, and half of the others        round 2   ...

The first case, the job as it is, stays to the end, so that each is compared with launches of the
same minutes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ...instruments import Record

ROUNDS = 4
"""Most launches of a case."""


def halved(
    cases: Sequence[Any],
    measure: Callable[[Any, int], Record],
    cost: Callable[[Record], float],
    is_over: Callable[[], bool],
    seed: int,
) -> list[list[Record]]:
    """Launch cases in rounds, and leave out the slower half of them after each round.

    Args:
        cases: The cases; the first is never left out for its time.
        measure: Runs a launch of a case, of the given number.
        cost: What a launch says of its case; less is better.
        is_over: Whether no further launch may begin.
        seed: The seed of the order in a round.

    Returns:
        The records of each case.
    """
    records: list[list[Record]] = [[] for _ in cases]
    running, rng = list(range(len(cases))), random.Random(seed)
    for number in range(ROUNDS):
        order = rng.sample(running, len(running))
        order.sort(key=bool)  # the first case, to which all others are compared
        for index in order:
            if records[0] and is_over():
                return records
            records[index].append(measure(cases[index], number))
        others = [each for each in running[1:] if records[each][-1].ok]
        if not others or not records[0][-1].ok:
            break
        others.sort(key=lambda each: statistics.median(map(cost, records[each])))
        running = [running[0], *others[: -(-len(others) // 2)]]
    return records
