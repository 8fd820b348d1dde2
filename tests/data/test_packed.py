"""Packed data sets: folders that prove what they hold."""

import json
import shutil
import threading
import weakref
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import StageError, UsageError
from penstock.data import Packed, open_dataset, write_data_set
from penstock.data.packed import format
from penstock.data.packed import write as dataset
from penstock.data.packed.format import Audit, Delivery
from penstock.data.packed.write import Moments

from .kit import PLAIN, SMALL, read, small_sample, write_small

LAYOUTS: dict[str, dict[str, Any]] = {
    "v2": {},
    "v3-shards": {"shards": 2},
    "one worker": {"workers": 1},
    "many workers": {"workers": 7},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Packed:
    """Written once. Nobody changes it."""
    return write_small(tmp_path_factory.mktemp("packed") / "data")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_packed_is_what_was_made(layout: str, tmp_path) -> None:
    packed = write_small(tmp_path / "data", **LAYOUTS[layout])
    truth = [small_sample(index) for index in range(5)]
    assert packed.ids.tolist() == [100, 101, 102, 103, 104]
    for name, array in packed.arrays.items():
        expected = np.stack([sample[name] for sample in truth])
        np.testing.assert_array_equal(read(packed, name), expected)
        checks = [zlib.crc32(sample[name].tobytes()) for sample in truth]
        assert packed.checks[name].tolist() == checks
        mean, std = packed.statistics()[name]
        wide = expected.astype(np.float64)
        np.testing.assert_allclose(mean, wide.mean(axis=(0, 1, 2)), rtol=1e-14)
        np.testing.assert_allclose(std, wide.std(axis=(0, 1, 2)), rtol=1e-14)
        assert array.axes == ("sample", "lat", "lon", "channels")
        assert array.shape == expected.shape
        assert array.chunks == (1, *SMALL[name].chunks)
        assert array.shards == ((2, 4, 6, -(-array.shape[3] // 2) * 2) if "shards" in layout
                                else None)  # fmt: skip
        assert (array.path / ".zarray").is_file() == ("shards" not in layout)
    assert packed.statistics()["targets"][1][2] == 0  # the channel that never changes


def test_the_ratio_is_of_the_files_and_counts_no_padding_as_data(tmp_path) -> None:
    packed = write_small(tmp_path / "data")
    chunks = [p for p in packed.root.rglob("*") if p.is_file() and p.name[0].isdigit()]
    stored = sum(path.stat().st_size for path in chunks)
    assert len(chunks) == 5 * (3 + 2)  # the constant ones too
    assert packed.document["stored_bytes"] == stored
    assert packed.document["compression_ratio"] == 5 * 4 * 6 * 8 * 4 / stored


def test_the_axes_are_named_where_xarray_looks_for_them(tmp_path) -> None:
    zarr = pytest.importorskip("zarr")
    for version, shards in ((2, None), (3, 2)):
        packed = write_small(tmp_path / f"v{version}", shards=shards)
        store = zarr.open_array(str(packed.arrays["inputs"].path), mode="r")
        names = store.metadata.dimension_names if version == 3 else store.attrs["_ARRAY_DIMENSIONS"]
        assert tuple(names) == packed.arrays["inputs"].axes


def test_no_more_samples_are_held_than_there_are_workers(tmp_path) -> None:
    lock, held, most = threading.Lock(), 0, 0

    def let_go() -> None:
        nonlocal held
        with lock:
            held -= 1

    def make(index: int) -> dict[str, np.ndarray]:
        nonlocal held, most
        sample = small_sample(index)
        weakref.finalize(sample["inputs"], let_go)
        with lock:
            held += 1
            most = max(most, held)
        return sample

    dataset.write_dataset(tmp_path / "data", SMALL, range(30), make, **(PLAIN | {"workers": 3}))
    assert most <= 6, "TensorStore lets go of what it wrote a moment after it says so"


def test_a_failure_names_the_sample_and_leaves_nothing_that_looks_whole(tmp_path) -> None:
    def fail(index: int) -> dict[str, np.ndarray]:
        if index == 3:
            raise OSError("the tape is torn")
        return small_sample(index)

    threads = set(threading.enumerate())
    with pytest.raises(StageError, match=r"generate failed at sample 3 of .*: the tape is torn"):
        dataset.write_dataset(tmp_path / "data", SMALL, range(9), fail, **PLAIN)
    assert set(threading.enumerate()) == threads
    with pytest.raises(UsageError, match="not finished"):
        open_dataset(tmp_path / "data")
    with pytest.raises(UsageError, match="use --overwrite"):
        write_small(tmp_path / "data")
    assert write_small(tmp_path / "data", overwrite=True).num_samples == 5


def test_overwrite_removes_a_packed_data_set_and_nothing_else(tmp_path) -> None:
    root = tmp_path / "data"
    write_small(root, 5)
    with pytest.raises(UsageError, match="exists; use --overwrite"):
        write_small(root)
    assert write_small(root, 3, overwrite=True).num_samples == 3
    assert read(open_dataset(root), "inputs").shape[0] == 3

    (root / "thesis.txt").write_text("ten years of work")
    with pytest.raises(
        UsageError, match=r"holds thesis.txt beside a packed .* nothing was removed"
    ):
        write_small(root, overwrite=True)
    assert open_dataset(root).num_samples == 3

    other = tmp_path / "other"
    (other / "inputs.zarr").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no packed data set; nothing was removed"):
        write_small(other, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        write_small(tmp_path / "file", overwrite=True)
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        write_small(tmp_path / "file" / "data")


def test_overwrite_follows_no_path_out_of_the_folder(tmp_path) -> None:
    (tmp_path / "victim").mkdir()
    root = tmp_path / "data"
    root.mkdir()
    arrays = {"inputs": {"path": "../victim"}, "targets": {"path": "link.zarr"}}
    document = {"format": format.FORMAT, "version": 1, "arrays": arrays}
    (root / "link.zarr").symlink_to(tmp_path / "victim")
    (root / "dataset.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"names '\.\./victim', which is not below it$"):
        write_small(root, overwrite=True)
    assert (root / "link.zarr").is_symlink()
    del arrays["inputs"]
    (root / "dataset.json").write_text(json.dumps(document))
    write_small(root, overwrite=True)
    assert (tmp_path / "victim").is_dir()
    assert not (root / "link.zarr").is_symlink()


def test_a_data_set_larger_than_the_disk_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"are .* PiB before compression and .* free; lower"):
        dataset.write_dataset(tmp_path / "data", SMALL, range(10**14), small_sample, **PLAIN)
    with pytest.raises(UsageError, match=r"scenes are .* PiB before compression and .* free"):
        sizes = {"scenes": 10**8, "validation": 1, "objects": 1, "seed": 0}
        write_data_set(tmp_path / "data", (10**4, 10**4), tiff="strips", **sizes)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        ("dataset.json", "there is no dataset.json"),
        ("ids.npy", "ids.npy: No such file"),
        ("inputs.zarr/.zarray", "inputs.zarr is not a Zarr array"),
        ({"format": "zip"}, "not that of a packed data set"),
        ({"version": 9}, "version 9 of the format; this Penstock reads 1"),
        ({"samples": 4}, "the numbers of samples differ: dataset.json 4, ids.npy 5"),
        ({"axes": ["sample", "lat"]}, r"has shape \(5, 4, 6, 5\) and axes \['sample', 'lat'\]"),
        ({"arrays": 3}, "malformed: 'int' object has"),
        ({"samples": [5]}, "malformed: unhashable type: 'list'"),
        ({"arrays": {"inputs": {}}}, "malformed: it lacks 'path'"),
    ],
)
def test_what_is_not_whole_is_not_opened(harm, sentence, small, tmp_path) -> None:
    """Without a file, or with something else in its document."""
    root = shutil.copytree(small.root, tmp_path / "data")
    if isinstance(harm, str):
        (root / harm).unlink()
    else:
        document = json.loads((root / "dataset.json").read_text())
        (document["arrays"]["inputs"] if "axes" in harm else document).update(harm)
        (root / "dataset.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=f"DATA {root}: .*{sentence}"):
        open_dataset(root)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    offset=st.sampled_from([0.0, -3.0, 1e5]),
    holes=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 99),
)
def test_moments_of_what_is_finite_add_up_to_numpys(lengths, offset, holes, seed) -> None:
    rng = np.random.default_rng(seed)
    arrays = [(rng.normal(size=(n, 4, 3)) + offset).astype(np.float32) for n in lengths]
    for array in arrays:
        array[rng.random(array.shape) < holes] = rng.choice([np.nan, np.inf, -np.inf])
    arrays[0][0, 0] = offset  # one value at least
    total = Moments.none(3)
    for array in arrays:
        total += Moments.of(array)
    whole = np.concatenate(arrays).astype(np.float64)
    whole[~np.isfinite(whole)] = np.nan
    assert total.count.tolist() == np.isfinite(whole).sum(axis=(0, 1)).tolist()
    np.testing.assert_allclose(total.mean, np.nanmean(whole, axis=(0, 1)), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(total.std, np.nanstd(whole, axis=(0, 1)), rtol=1e-9, atol=1e-14)


def audited(packed: Packed, planned: list[list[int]], came: list[list[int]]) -> Delivery:
    audit = Audit(packed)
    for plan, delivered in zip(planned, came, strict=True):
        rows = [small_sample(index) for index in delivered]
        batch = {name: np.stack([row[name] for row in rows]) for name in SMALL}
        audit.batch(np.array(plan), batch)
    return audit.result()


@pytest.mark.parametrize(
    ("came", "delivery"),
    [
        ([[4, 2], [0, 1]], Delivery(0, 0, 0)),  # as planned
        ([[4, 2], [0, 0]], Delivery(1, 1, 2)),  # 0 twice, 1 lost
        ([[2, 4], [0, 1]], Delivery(0, 0, 4)),  # all there, two in each other's place
        ([[4], [0, 1]], Delivery(0, 1, 0)),  # a short batch
        ([[4, 2, 3], [0, 1]], Delivery(1, 0, 2)),  # one too many
    ],
)
def test_the_audit_is_of_bytes(came: list[list[int]], delivery: Delivery, small: Packed) -> None:
    assert audited(small, [[4, 2], [0, 1]], came) == delivery
    assert delivery.right == (delivery == Delivery(0, 0, 0))


def test_samples_that_are_alike_stand_for_themselves(tmp_path) -> None:
    """As of a land mask, or of a world at rest: their checksums are one."""
    packed = dataset.write_dataset(
        tmp_path / "data", SMALL, range(4), lambda index: small_sample(index // 2), **PLAIN
    )

    def delivered(plan: list[int], came: list[int]) -> Delivery:
        audit = Audit(packed)
        rows = [small_sample(index // 2) for index in came]
        audit.batch(np.array(plan), {name: np.stack([row[name] for row in rows]) for name in SMALL})
        return audit.result()

    assert delivered([3, 0, 1, 2], [3, 0, 1, 2]) == Delivery(0, 0, 0)
    assert delivered([0, 2], [1, 3]) == Delivery(0, 0, 0), "their bytes are those planned"
    assert delivered([3, 0], [3, 3]) == Delivery(1, 1, 2)


def test_one_changed_bit_is_wrong_and_its_sample_missing(small: Packed) -> None:
    batch = {name: values[None].copy() for name, values in small_sample(2).items()}
    batch["targets"].view(np.uint32)[0, 1, 1, 1] ^= 1
    audit = Audit(small)
    audit.batch(np.array([2]), batch)
    assert audit.result() == Delivery(0, 1, 1)
