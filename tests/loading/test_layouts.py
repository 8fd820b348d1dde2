"""Every layout and every selection against numpy."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.loading import Loader, PatchGrid
from penstock.loading.engines import zarr_chunks

from .kit import ENGINES, FIRST, LAST, arrays, distinct, expected, seen, write, write_plainly

numcodecs = pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "v2-channels-last": (LAST, (1, 6, 5, 4), {}),
    "v2-slash": (LAST, (1, 6, 5, 4), {"chunk_key_encoding": {"name": "v2", "separator": "/"}}),
    "v2-channels-first": (FIRST, (1, 4, 6, 5), {}),
    "v2-chunks-of-3-samples": (LAST, (3, 4, 5, 3), {}),
    "v2-uncompressed": (LAST, (2, 6, 5, 4), {"compressors": None}),
    "v2-zlib": (LAST, (1, 6, 5, 4), {"compressors": numcodecs.Zlib()}),
    "v2-delta-filter": (
        LAST,
        (1, 6, 5, 4),
        {"filters": [numcodecs.Delta("<f4")], "compressors": numcodecs.Zstd()},
    ),
    "v3-blosc": (LAST, (1, 6, 5, 4), {"zarr_format": 3, "compressors": "blosc"}),
    "v3-zstd": (FIRST, (2, 4, 6, 5), {"zarr_format": 3}),
    "v3-gzip": (LAST, (3, 6, 2, 4), {"zarr_format": 3, "compressors": "gzip"}),
    "v3-uncompressed": (LAST, (1, 6, 5, 4), {"zarr_format": 3, "compressors": None}),
    "v3-sharded": (LAST, (1, 3, 5, 5), {"zarr_format": 3, "shards": (2, 6, 5, 10)}),
    "one-value-per-sample": ((12,), (4,), {}),
}
SELECTIONS: dict[str, dict[str, Any]] = {
    "patches": {"patch": PatchGrid((4, 3), (2, 2), (-3, -2))},
    "all-of-it": {"offsets": (-2, 1), "channels": (0, 8, 4), "patch": PatchGrid((5,), (), (1,))},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_as_numpy_reads_it(layout: str, tmp_path) -> None:
    shape, chunks, how = LAYOUTS[layout]
    path = write_plainly(tmp_path / "a.zarr", values := distinct(shape), chunks, **how)
    for engine in ENGINES:
        read = engine
        if engine == "native" and layout == "v3-sharded":
            with pytest.raises(UsageError, match=r"sharded; engine native cannot .* tensorstore m"):
                Loader(path, batch_size=2, engine=engine)
            read = "auto"
        if engine == "tensorstore" and "delta" in layout:
            with pytest.raises(UsageError, match="filters"):
                Loader(path, batch_size=2, engine=engine)
            read = "auto"
        with Loader(path, batch_size=5, shuffle="global", seed=3, engine=read, workers=3) as loader:
            order = []
            for batch in loader:
                assert np.array_equal(batch["data"], expected(values, batch, loader))
                order += batch.samples.tolist()
            assert sorted(order) == list(range(12)) != order


@pytest.mark.parametrize(
    ("channel_axis", "selection"), [(-1, "patches"), (-1, "all-of-it"), (1, "all-of-it")]
)
def test_every_selection_is_what_numpy_selects(channel_axis: int, selection: str, tmp_path) -> None:
    shape = LAST if channel_axis == -1 else FIRST
    knobs = dict(SELECTIONS[selection])
    if channel_axis == 1 and "patch" in knobs:
        knobs["patch"] = PatchGrid((4, 3), (2, 2))
    path = write(tmp_path / "a.zarr", values := distinct(shape), (2, 4, 3, 4))
    for engine in ENGINES:
        with Loader(
            path, batch_size=4, shuffle="block", window=2, channel_axis=channel_axis, engine=engine,
            workers=2, **knobs,
        ) as loader:  # fmt: skip
            items: list[int] = []
            for batch in loader:
                assert np.array_equal(batch["data"], expected(values, batch, loader))
                items += batch.indices.tolist()
            assert sorted(items) == list(range(loader.order.num_items))


VOLUMES: list[tuple[Any, int | None]] = [
    ((3, 2, 5, 4), None),
    (PatchGrid((2, 4), (1, 3), (0, 2)), None),
    (PatchGrid((3, 5), (), (-3, -4)), None),
    (PatchGrid((2, 4), (2, 2), (0, 2)), 1),
]
"""Patches, and the axis of which they take some channels."""


@pytest.mark.parametrize(("case", "engine"), [*product(range(4), ENGINES)])
def test_patches_on_all_axes_make_a_volume_one_sample(case: int, engine: str, tmp_path) -> None:
    grid, channel_axis = VOLUMES[case]
    values = distinct(shape := (7, 6, 9, 4))
    path = write(tmp_path / "a.zarr", values, (2, 6, 4, 3), zarr_format=2 + case % 2)
    knobs = {} if channel_axis is None else {"channels": (4, 0, 3), "channel_axis": channel_axis}
    whole = values if channel_axis is None else values.take((4, 0, 3), channel_axis)
    boxes = grid if isinstance(grid, PatchGrid) else PatchGrid(grid, axes=(0, 1, 2, 3))
    axes = [axis % 4 for axis in boxes.axes]
    lengths = [shape[axis] for axis in axes]
    covered = np.zeros(whole.shape, bool)
    with Loader(
        path, batch_size=4, shuffle="global", patch=grid, workers=3, engine=engine, **knobs
    ) as loader:
        items: list[int] = []
        for batch in loader:
            assert batch.samples.tolist() == [0] * len(batch.indices)
            for row, item in zip(batch["data"], batch.indices.tolist(), strict=True):
                place = np.unravel_index(item, boxes.counts(lengths))
                box = [slice(None)] * 4
                for axis, start, size in zip(
                    axes, boxes.start(place, lengths), boxes.shape, strict=True
                ):
                    box[axis] = slice(start, start + size)
                assert np.array_equal(row, whole[tuple(box)])
                covered[tuple(box)] = True
            items += batch.indices.tolist()
        assert sorted(items) == list(range(loader.order.num_items))
        assert covered.all()


def test_patches_may_be_given_by_name(data: dict[str, Path]) -> None:
    def items(patch: Any) -> list[Any]:
        with Loader(data["inputs"], batch_size=6, channel_axis=1, patch=patch) as loader:
            return seen(loader)

    assert items({"data": (5, 5)}) == items((5, 5)) == items(PatchGrid((5, 5)))


def test_foreign_byte_order_is_made_native(tmp_path) -> None:
    path = write(tmp_path / "a.zarr", values := distinct((4, 6), ">f8"), (1, 4))
    with Loader(path, batch_size=4) as loader:
        (batch,) = loader
    assert batch["data"].dtype == np.dtype("=f8")
    assert np.array_equal(batch["data"], values)


def test_a_packed_data_set_names_its_arrays_and_axes(data: dict[str, Path], tmp_path) -> None:
    for path in data.values():
        shutil.copytree(path, tmp_path / path.name)
    axes = {"inputs": ["sample", "lat", "lon", "channels"], "targets": ["sample", "channels", "x"]}
    entries = {n: {"path": f"{n}.zarr", "axes": axes[n]} for n in data}
    manifest = {"format": "penstock-packed", "version": 1, "arrays": entries}
    (tmp_path / "dataset.json").write_text(json.dumps(manifest))
    with Loader(tmp_path, batch_size=12, channels={"targets": (2, 0)}) as loader:
        (batch,) = loader
    assert np.array_equal(batch["targets"], arrays(data)["targets"][:, [2, 0]])
    assert np.array_equal(batch["inputs"], arrays(data)["inputs"])


@pytest.mark.parametrize(
    ("zarr_format", "changes"),
    [
        (2, {"dtype": [["a", "<i4"]]}),
        (3, {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s"}}}),
    ],
)
def test_a_type_that_is_not_a_name_is_left_to_tensorstore(zarr_format, changes, tmp_path) -> None:
    path = write(tmp_path / "a.zarr", distinct((4, 6)), (1, 3), zarr_format)
    metadata = path / (".zarray" if zarr_format == 2 else "zarr.json")
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | changes))
    with pytest.raises(UsageError, match=r"its d(ata )?type is .*; engine native cannot read that"):
        Loader(path, batch_size=2, engine="native")


def test_a_fill_value_that_is_none_of_its_dtype_is_left_to_tensorstore(tmp_path) -> None:
    path = write(tmp_path / "a.zarr", distinct((4, 6), np.uint8), (1, 3))
    metadata = json.loads((path / ".zarray").read_text()) | {"fill_value": -1}
    (path / ".zarray").write_text(json.dumps(metadata))
    with pytest.raises(zarr_chunks.Unsupported, match="engine native cannot read that"):
        zarr_chunks.read_layout(str(path))
    with pytest.raises(UsageError, match=r"a\.zarr"):  # nor does TensorStore take it
        Loader(path, batch_size=4)
