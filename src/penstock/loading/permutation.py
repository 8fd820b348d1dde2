"""A permutation of any length by arithmetic, forwards and backwards, without a list."""

from __future__ import annotations

import functools
import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

Items = NDArray[np.int64]
Words = NDArray[np.uint64]


_ROUNDS = 12  # with fewer, orders of five or six items are visibly uneven
# As arrays without an axis: numpy takes longer over numbers, and over arrays of one element.
_GOLDEN, _ONE = (np.array(word, np.uint64) for word in (0x9E3779B97F4A7C15, 1))
_SHIFTS = [np.array(by, np.uint64) for by in (30, 27, 31)]
_FACTORS = [np.array(by, np.uint64) for by in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
_WORD = (1 << 64) - 1


def mix_words(words: Words) -> Words:
    """The finaliser of splitmix64: every bit of a word affects every bit of the result."""
    words = words ^ (words >> _SHIFTS[0])
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


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
    visited = _turn_of_last(last, int(key[0]))
    missing = np.where(index >= visited * size + short, size - short, 0)
    turn, inside = np.divmod(index + missing, size)  # as if every window were full
    window = permute(turn, last + 1, key)
    inner = mix_words(key ^ (mix_words(window.astype(np.uint64) + _GOLDEN)))
    return window * size + permute(inside, np.where(window == last, short, size), inner)


@functools.lru_cache(maxsize=64)  # each batch of an epoch asks for the same one
def _turn_of_last(last: int, key: int) -> int:
    """The turn at which the last window is visited."""
    return int(invert([last], last + 1, np.array([key], np.uint64))[0])


def _walk(start: ArrayLike, n: ArrayLike, key: Words, forward: bool) -> Items:
    at = np.array(start, np.uint64, ndmin=1)
    # One n and one key for all stay one: what follows from them alone is computed once.
    n, key = (_for_each(np.asarray(of, np.uint64), at) for of in (n, key))
    at = _rounds(at, n, key, forward)
    while (outside := at >= n).any():
        lengths, keys = (of[outside] if of.ndim else of for of in (n, key))
        at[outside] = _rounds(at[outside], lengths, keys, forward)
    return at.astype(np.int64)


def _for_each(of: Words, at: Words) -> Words:
    return of.reshape(()) if of.size == 1 else np.broadcast_to(of, at.shape)


def _rounds(at: Words, n: Words, key: Words, forward: bool) -> Words:
    # Any radices whose product reaches n would do. A square wastes least and mixes best.
    radix_high = np.asarray(np.ceil(np.sqrt(n.astype(np.float64))).astype(np.uint64))
    radix_low = np.asarray((n + radix_high - _ONE) // radix_high)
    numbers = np.arange(1, _ROUNDS + 1, dtype=np.uint64).reshape(-1, *(1,) * key.ndim)
    keys = mix_words(key + numbers * _GOLDEN)
    high, low = at // radix_low, at % radix_low
    for i in range(_ROUNDS) if forward else reversed(range(_ROUNDS)):
        if i % 2 == 0:
            step = mix_words(low ^ keys[i, ...]) % radix_high
            high = (high + (step if forward else radix_high - step)) % radix_high
        else:
            step = mix_words(high ^ keys[i, ...]) % radix_low
            low = (low + (step if forward else radix_low - step)) % radix_low
    return high * radix_low + low
