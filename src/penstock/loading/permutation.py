"""A permutation of any length by arithmetic, forwards and backwards, without a list."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

Items = NDArray[np.int64]
Words = NDArray[np.uint64]


_ROUNDS = 12  # with fewer, orders of five or six items are visibly uneven
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def mix_words(words: Words) -> Words:
    """The finaliser of splitmix64: every bit of a word affects every bit of the result."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def make_key(*numbers: int) -> Words:
    """A key of shape (1,) that depends on every number and on their order."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix_words((key + _GOLDEN) ^ np.uint64(operator.index(number) & _WORD))
    return key


def permute(index: ArrayLike, n: ArrayLike, key: Words) -> Items:
    """The image of each index under the permutation of ``[0, n)`` that a key names.

    A Feistel network over pairs ``(high, low)`` with ``index = high * low's radix + low``: each
    round adds to one half a hash of the other half, which can be undone for any hash. Both radices
    are near the root of n, so few pairs lie past n. Such a pair is permuted again until it falls
    inside (cycle walking), which keeps the map one to one. ``n`` and ``key`` broadcast.

    >>> sorted(permute(range(5), 5, make_key(7)).tolist())
    [0, 1, 2, 3, 4]
    """
    return _walk(index, n, key, forward=True)


def invert(value: ArrayLike, n: ArrayLike, key: Words) -> Items:
    """The index whose image under `permute` is each value.

    >>> invert(permute([3], 5, make_key(7)), 5, make_key(7)).tolist()
    [3]
    """
    return _walk(value, n, key, forward=False)


def permute_windows(index: Items, n: int, size: int, key: Words) -> Items:
    """Permute windows of ``size`` neighbours, and the indices within each window.

    The last window of ``[0, n)`` may be short. It may come at any turn, like the others.
    """
    last = (n - 1) // size
    short = n - last * size
    visited = int(invert([last], last + 1, key)[0])  # the turn of the last window
    missing = np.where(index >= visited * size + short, size - short, 0)
    turn, inside = np.divmod(index + missing, size)  # as if every window were full
    window = permute(turn, last + 1, key)
    inner = mix_words(key ^ (mix_words(window.astype(np.uint64) + _GOLDEN)))
    return window * size + permute(inside, np.where(window == last, short, size), inner)


def _walk(start: ArrayLike, n: ArrayLike, key: Words, forward: bool) -> Items:
    at = np.array(start, np.uint64, ndmin=1)
    n = np.broadcast_to(np.asarray(n, np.uint64), at.shape)
    key = np.broadcast_to(key, at.shape)
    at = _rounds(at, n, key, forward)
    while (outside := at >= n).any():
        at[outside] = _rounds(at[outside], n[outside], key[outside], forward)
    return at.astype(np.int64)


def _rounds(at: Words, n: Words, key: Words, forward: bool) -> Words:
    # Any radices whose product reaches n would do. A square wastes least and mixes best.
    radix_high = np.ceil(np.sqrt(n.astype(np.float64))).astype(np.uint64)
    radix_low = (n + radix_high - np.uint64(1)) // radix_high
    numbers = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
    keys = mix_words(key + numbers * _GOLDEN)
    high, low = at // radix_low, at % radix_low
    for i in range(_ROUNDS) if forward else reversed(range(_ROUNDS)):
        if i % 2 == 0:
            step = mix_words(low ^ keys[i]) % radix_high
            high = (high + (step if forward else radix_high - step)) % radix_high
        else:
            step = mix_words(high ^ keys[i]) % radix_low
            low = (low + (step if forward else radix_low - step)) % radix_low
    return high * radix_low + low
