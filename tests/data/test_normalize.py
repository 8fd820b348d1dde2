"""Percentiles against numpy, for every dtype; scalings that never divide by nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.data.normalize import Histogram, Normalisation, Scaling

from ..parameters import mainly
from ..traced import traced

DTYPES = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64".split()


def percentile(array: np.ndarray, q: float, pieces: int = 1) -> float:
    histogram = Histogram(array.dtype, (q,))
    while not histogram.done:
        for piece in np.array_split(array, pieces):
            histogram.add(piece)
        histogram.advance()
    return histogram.percentile(q)


@given(dtype=st.sampled_from(DTYPES), data=st.data())
def test_percentiles_are_exactly_those_of_numpy(dtype: str, data: st.DataObject) -> None:
    kind = np.dtype(dtype)
    elements = (
        st.floats(-1e4, 1e4, width=16 if dtype == "float16" else 32) if kind.kind == "f" else None
    )
    array = data.draw(hnp.arrays(kind, st.integers(1, 60), elements=elements))
    q = data.draw(st.floats(0, 100))
    seen = array.astype(np.float32) if kind.itemsize == 8 else array  # as a model sees them
    expected = np.percentile(seen.astype(np.float64), q)
    ours = percentile(array, q, pieces=data.draw(st.integers(1, 4)))
    assert ours == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mainly(["uint16", "float32"], 1))
def test_a_part_of_an_array_is_never_copied_whole(dtype: str) -> None:
    whole = np.random.default_rng(0).integers(0, 999, (1, 100, 200, 200)).astype(dtype)
    part = whole[:, 1:-1, 3:-3, 5:-5]
    assert not part.flags.c_contiguous
    with traced() as most:
        scaling = Normalisation("percentiles", 10, 90).of_array(part)
        peak = most()
    low, high = np.percentile(part, (10, 90))
    assert scaling == Scaling(float(low), float(high - low))
    assert peak < part.nbytes


def test_extreme_integers_keep_their_order() -> None:
    array = np.array([np.iinfo(np.int32).min, -1, 0, np.iinfo(np.int32).max], np.int32)
    assert percentile(array, 0) == np.iinfo(np.int32).min
    assert percentile(array, 100) == np.iinfo(np.int32).max


def test_what_is_not_finite_does_not_count() -> None:
    array = np.array([np.nan, 1, 2, 3, np.inf, -np.inf], np.float32)
    assert percentile(array, 50) == 2
    assert np.isnan(percentile(array[:1], 50))


@pytest.mark.parametrize(
    ("lower", "upper", "low", "high", "scaling"),
    [
        (10, 30, 0, 100, Scaling(10, 20)),  # the usual
        (10, 10, 0, 1000, Scaling(10, 1000)),  # nearly all background: the extremes
        (0, 1e-40, 0, 1, Scaling(0, 1)),  # the extremes would be infinite
        (0, 1e-30, 0, 1, Scaling(0, 1e-30)),
        (10, 10, 10, 10, Scaling(10, 1)),  # all equal
        (np.nan, np.nan, np.nan, np.nan, Scaling(0, 1)),  # nothing finite
    ],
)
def test_the_scale_is_never_zero(lower, upper, low, high, scaling) -> None:
    assert Scaling.of_range(lower, upper, low, high) == scaling


def test_a_sparse_block_stays_finite() -> None:
    """99.95 % background: both percentiles agree and one bright voxel must not become 1e9."""
    block = np.full(10_000, 100, np.uint16)
    block[:5] = 1100
    assert Normalisation("percentiles", 0.5, 99.9).of_array(block) == Scaling(100, 1000)
