"""What a batch reads and where it goes, against numpy's own indexing of a simulated store."""

import doctest
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import penstock.loading.fields
from penstock.base.errors import UsageError
from penstock.loading.fields import ChunkRead, Field, PatchGrid, chunk_reads
from penstock.loading.loader import valid_samples
from penstock.loading.order import Order

Array = NDArray[Any]
F4 = np.dtype("f4")
INPUTS = Field("inputs", (75_968, 192, 384, 187), (1, 192, 384, 13), F4)
TARGETS = Field("targets", (75_968, 192, 384, 83), (1, 192, 384, 13), F4)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(penstock.loading.fields).failed == 0


def array_of(field: Field) -> Array:
    """Every element different."""
    return np.arange(math.prod(field.shape), dtype=np.int64).reshape(field.shape)


def chunk_of(array: Array, chunks: tuple[int, ...], index: tuple[int, ...]) -> Array:
    """A decoded chunk as a store gives it: full size, with padding past the array's end."""
    chunk = np.full(chunks, -1, array.dtype)
    part = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))]
    chunk[tuple(slice(0, n) for n in part.shape)] = part
    return chunk


def read(field: Field, reads: list[ChunkRead], rows: int) -> Array:
    array = array_of(field)
    out = np.full(field.out_shape(rows), -7, np.int64)
    written = np.zeros(out.shape, np.int64)
    for chunk in reads:
        values = chunk_of(array, field.chunks, chunk.index)
        for to, of in chunk.copies:
            out[to] = values[of]
            written[to] += 1
    assert (written == 1).all()  # nothing left out, nothing written twice
    return out


def expected(field: Field, samples: Array, patches: Array) -> Array:
    array, rows = array_of(field), []
    for sample, patch in zip(samples, patches, strict=True):
        row = array[[sample + offset for offset in field.offsets]]
        if field.channels is not None:
            row = np.take(row, field.channels, axis=field.channel_axis % array.ndim)
        if field.patch is not None:
            lengths = [field.shape[axis] for axis in field.patch_axes]
            starts = [  # by another way than the module's
                sorted({*range(0, n - size, step), n - size})
                for n, size, step in zip(
                    lengths, field.patch.shape, field.patch.stride or field.patch.shape, strict=True
                )
            ]
            grid = np.stack(np.meshgrid(*starts, indexing="ij"), axis=-1)
            corner = grid.reshape(-1, len(starts))[patch]
            for axis, start, size in zip(field.patch_axes, corner, field.patch.shape, strict=True):
                row = np.take(row, range(start, start + size), axis=axis)
        rows.append(row if len(field.offsets) > 1 else row[0])
    return np.stack(rows)


def check(field: Field, samples: Array, patches: Array | None = None) -> list[ChunkRead]:
    reads = chunk_reads(field, samples, patches)
    rows = read(field, reads, len(samples))
    every = np.zeros(len(samples), np.int64) if patches is None else patches
    assert np.array_equal(rows, expected(field, samples, every))
    indices = [chunk.index for chunk in reads]
    assert indices == sorted(set(indices))  # each once, in the order of the files
    return reads


CHANNEL_FIRST = ((9, 7, 5, 6), (1, 3, 5, 6))
CHANNEL_LAST = ((9, 5, 6, 7), (1, 5, 6, 3))
DEEP = ((23, 4, 5), (4, 2, 3))


@pytest.mark.parametrize(
    ("layout", "wanted", "shape"),
    [
        (CHANNEL_LAST, {}, (3, 5, 6, 7)),
        (CHANNEL_FIRST, {}, (3, 7, 5, 6)),
        (CHANNEL_LAST, {"offsets": (1,)}, (3, 5, 6, 7)),  # a target in the future: no time axis
        (CHANNEL_LAST, {"offsets": (-1, 0)}, (3, 2, 5, 6, 7)),  # inputs at t-1 and t
        (DEEP, {"offsets": (0, -2, 1)}, (3, 3, 4, 5)),  # in the order asked for
        (CHANNEL_LAST, {"channels": (0, 2, 4, 6)}, (3, 5, 6, 4)),  # strided
        (CHANNEL_LAST, {"channels": (2, 2, 1)}, (3, 5, 6, 3)),  # one twice, and not in order
        (CHANNEL_FIRST, {"channels": (1, 5), "channel_axis": 1}, (3, 2, 5, 6)),
        (CHANNEL_FIRST, {"patch": PatchGrid((2, 4))}, (3, 7, 2, 4)),  # the last axes
        (CHANNEL_LAST, {"patch": PatchGrid((2, 4), axes=(1, 2))}, (3, 2, 4, 7)),
        (
            CHANNEL_LAST,
            {"patch": PatchGrid((2, 3), (1, 2), (1, 2)), "channels": (5, 2), "offsets": (-1, 0, 1)},
            (3, 3, 2, 3, 2),
        ),
    ],
)
def test_a_batch_holds_what_numpy_would_take(layout, wanted, shape) -> None:
    field = Field("inputs", *layout, F4, **wanted)
    assert field.out_shape(3) == shape
    assert field.item_nbytes == math.prod(shape) // 3 * 4
    patches = np.array([0, field.patches_per_sample - 1, field.patches_per_sample // 2])
    check(field, np.array([5, 2, 6]), patches)
    check(field, np.array([4, 4, 5]), patches)  # a sample twice
    if field.patch is None:
        check(field, np.array([5, 2, 6]))


def test_the_padding_of_last_chunks_is_counted() -> None:
    samples = Order(75_968, 16, shuffle="global").items(0, 0)
    reads = chunk_reads(INPUTS, samples), chunk_reads(TARGETS, samples)
    assert (len(reads[0]), len(reads[1])) == (16 * 15, 16 * 7)
    assert len(reads[0]) * INPUTS.chunk_nbytes == 16 * INPUTS.item_nbytes * 195 / 187
    assert len(reads[0]) == INPUTS.most_chunks(16)
    assert len(reads[1]) * TARGETS.chunk_nbytes == 16 * TARGETS.item_nbytes * 91 / 83
    assert INPUTS.item_nbytes + TARGETS.item_nbytes == 79_626_240  # the seed's 79.63 MB a sample
    assert INPUTS.chunk_nbytes == 3_833_856


def test_valid_samples_have_every_offset_in_every_field() -> None:
    inputs = Field("inputs", (10, 3), (1, 3), F4, offsets=(-1, 0))
    targets = Field("targets", (10, 3), (1, 3), F4, offsets=(1,))
    assert inputs.valid == range(1, 10)
    assert targets.valid == range(9)
    assert valid_samples([inputs, targets]) == range(1, 9)
    ahead = Field("ahead", (10, 3), (1, 3), F4, offsets=(2, 3))
    assert ahead.valid == range(7)
    behind = Field("behind", (10, 3), (1, 3), F4, offsets=(-9,))
    assert behind.valid == range(9, 10)
    with pytest.raises(UsageError, match="no sample is valid in every field"):
        valid_samples([ahead, behind])
    short = Field("short", (9, 3), (1, 3), F4)
    with pytest.raises(UsageError, match="numbers of samples of the arrays differ: ahead 10, shor"):
        valid_samples([ahead, short])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunks": (1, 4)}, r"x: shape \(10, 8, 9\) and chunks \(1, 4\) differ"),
        ({"offsets": (-5, 5)}, r"x: no sample of its 10 has all offsets \(-5, 5\)"),
        ({"offsets": ()}, r"offsets \(\) empty"),
        ({"channels": (3, 9)}, r"x: channels \[9\] are not among its 9 \(0 to 8\)"),
        ({"channels": (-1,)}, r"channels \[-1\] are not among"),
        ({"channels": (1,), "channel_axis": 0}, "axis 0, cannot be its channels"),
        (
            {"patch": PatchGrid((9, 4))},
            r"x: patch \(9, 4\) does not fit \(10, 8, 9\), of which axis",
        ),
        ({"patch": PatchGrid((2, 2), axes=(1, -2))}, "does not fit"),  # one axis twice
        ({"patch": PatchGrid((2, 2, 2))}, "axis 0 counts the samples"),
        ({"patch": PatchGrid((2, 2), axes=(5, 4))}, "does not fit"),  # not 5 - 3 and 4 - 3
        ({"patch": PatchGrid((2, 2), axes=(-4, -1))}, "does not fit"),
        ({"channels": (1,), "channel_axis": 7}, r"channel_axis 7 is not an axis of \(10, 8, 9\)"),
        ({"channel_axis": -4}, r"channel_axis -4 is not an axis"),
        ({"shape": (), "chunks": ()}, r"an array of shape \(\) holds no samples"),
        ({"shape": (0, 8, 9)}, r"shape \(0, 8, 9\) holds no samples"),
        ({"shape": (10, 0, 9)}, r"shape \(10, 0, 9\) holds no samples"),
        ({"patch": PatchGrid((4,)), "channels": (1,)}, "axis 2 is cut by patch and by channels"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Field(**{"name": "x", "shape": (10, 8, 9), "chunks": (1, 4, 9), "dtype": F4, **changes})


@pytest.mark.parametrize("wrong", [{"stride": (1,)}, {"axes": (1, 2, 3)}, {"stride": (0, 1)}])
def test_a_crooked_patch_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="patch"):
        PatchGrid((2, 2), **wrong)


@st.composite
def fields(draw: st.DrawFn) -> Field:
    ndim = draw(st.integers(2, 4))
    shape = (draw(st.integers(5, 9)), *(draw(st.integers(1, 7)) for _ in range(ndim - 1)))
    chunks = tuple(draw(st.integers(1, n + 1)) for n in shape)
    offsets = tuple(draw(st.lists(st.integers(-2, 2), min_size=1, max_size=3)))
    axes = list(range(1, ndim))
    channels, channel_axis = None, -1
    if draw(st.booleans()):
        channel_axis = axes.pop(draw(st.integers(0, len(axes) - 1)))
        one = st.integers(0, shape[channel_axis] - 1)
        channels = tuple(draw(st.lists(one, min_size=1, max_size=6)))
    patch, cut, spaced = None, draw(st.booleans()), draw(st.booleans())
    if axes and cut:
        size = tuple(draw(st.integers(1, shape[axis])) for axis in axes)
        stride = tuple(draw(st.integers(1, 4)) for _ in axes)
        patch = PatchGrid(size, stride if spaced else (), tuple(axes))
    return Field("x", shape, chunks, np.dtype("i8"), offsets, channels, channel_axis, patch)


@given(field=fields(), data=st.data())
def test_any_batch_holds_what_numpy_would_take(field: Field, data: st.DataObject) -> None:
    sample = st.integers(field.valid.start, field.valid.stop - 1)
    samples = np.array(data.draw(st.lists(sample, min_size=1, max_size=8)))
    patch = st.integers(0, field.patches_per_sample - 1)
    reads = check(field, samples, np.array([data.draw(patch) for _ in samples]))
    assert len(reads) <= field.most_chunks(len(samples))
    indices = [read.index for read in reads]
    assert indices == sorted(set(indices))


@given(length=st.integers(1, 40), size=st.integers(1, 40), stride=st.integers(1, 45))
def test_patches_begin_inside_and_cover_an_axis(length: int, size: int, stride: int) -> None:
    size = min(size, length)
    grid = PatchGrid((size,), (stride,))
    starts = [grid.start((i,), (length,))[0] for i in range(*grid.counts((length,)))]
    assert starts == sorted(set(starts)) and starts[0] == 0 and starts[-1] == length - size
    if stride <= size:
        assert {v for s in starts for v in range(s, s + size)} == set(range(length))
