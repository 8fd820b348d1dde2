"""Values that are normalised as they are read, and their limits, against numpy on the whole."""

import numpy as np
import pytest

from penstock.data import Box, FilledMask, Grid, Scaling, ValueLimits, open_source
from penstock.data.stores.resampled import ChannelValues, NormalisedSource

SHAPE = (6, 9, 8)
RNG = np.random.default_rng(2)
VALUES = RNG.integers(-3, 9, (2, *SHAPE))
INSIDE = RNG.random((2, *SHAPE)) < 0.7
INSIDE[:, 3] = False  # a slice in which none counts
INSIDE[:, 4] = True


def pieces(limits: ValueLimits, values: np.ndarray, axis: int | None) -> None:
    """Add values in pieces, the last ones first."""
    for part in reversed([*Grid(Box.of((0, 0, 0), SHAPE), (4, 5, 8))]):
        at = part.within(Box.of((0, 0, 0), SHAPE))
        first = 0 if axis is None else part.start[axis]
        limits.add(values[:, *at], INSIDE[:, *at], axis, first)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize(("dtype", "keeps"), [("int16", True), ("float32", False)])
def test_limits_are_ends_of_what_counts_or_zero(axis: int | None, dtype: str, keeps: bool) -> None:
    values = VALUES.astype(dtype)
    if dtype == "float32":
        values[0, 5, 0, 0] = np.nan  # which says nothing
    slices = 1 if axis is None else SHAPE[axis]
    whole, halves = ValueLimits(2, slices), [ValueLimits(2, slices), ValueLimits(2, slices)]
    pieces(whole, values, axis)
    for number, half in enumerate(halves):
        counted = np.where(np.arange(2)[:, None, None, None] == number, values, 0).astype(dtype)
        half.add(counted, INSIDE & (counted == values), axis, 0)
    scaling = Scaling(1.0, 2.0, None if keeps else (-1.0, 2.5), 0.0 if keeps else None)
    for channel in range(2):
        least, most = whole.normalised(channel, scaling, np.dtype(np.float32))
        for place in range(slices):
            at = slice(None) if axis is None else (slice(None),) * axis + (place,)
            some, inside = values[channel][at], INSIDE[channel][at]
            counts = (some[inside].astype(float) - 1) / 2
            if scaling.clip is not None:
                counts = counts.clip(*scaling.clip)
            ends = [*counts[np.isfinite(counts)]]
            if not ends or (keeps and not inside.all()):
                ends.append(0.0)
            assert (least[place], most[place]) == (min(ends), max(ends))
    merged = ValueLimits(2, slices)
    for half in (*halves, whole):
        merged.merge(half.counts)
    alike = (
        merged.normalised(c, Scaling(0.0, 1.0), np.dtype(np.float64)).tolist()
        == whole.normalised(c, Scaling(0.0, 1.0), np.dtype(np.float64)).tolist()
        for c in range(2)
    )
    assert all(alike)
    whole.advance()
    assert whole.done


@pytest.mark.parametrize("masked", [False, True])
def test_a_source_is_normalised_as_it_is_read(masked: bool) -> None:
    stored = open_source(VALUES.astype("int16"), axes="czyx")
    source = NormalisedSource(stored)
    assert source.dtype == "float32" and source.axes == stored.axes
    assert (source.read(source.domain)[0] == VALUES).all(), "as stored, until it is known how"
    mask = FilledMask(Box.of((0, 0, 0), SHAPE))
    mask.put(mask.box, INSIDE[0])
    how = ChannelValues(
        Scaling(-1.0, 4.0, (0.0, 1.5), None if masked else 0.0), mask if masked else None
    )
    scaled = source.normalised_by({(0, 0): how, (0, 1): ChannelValues(Scaling(0.0, 1.0))})
    expected = ((VALUES[0] + 1) / 4).clip(0, 1.5) * (INSIDE[0] if masked else VALUES[0] != 0)
    got = scaled.with_cache(1 << 16).read(scaled.domain)[0]
    np.testing.assert_array_equal(got[0], expected)
    np.testing.assert_array_equal(got[1], VALUES[1])
    box = Box.of((0, 0, 2, 3, 1), (1, 2, 3, 4, 6))
    np.testing.assert_array_equal(scaled.read(box)[0], got[:, *box[2:].within(mask.box)])
