"""Data to measure with: fields that any thread makes alone, folders that prove what they hold."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import tracemalloc
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import StageError, UsageError
from penstock.cli import main
from penstock.data.box import Box
from penstock.data.grid import Grid
from penstock.data.packed import format
from penstock.data.packed import volume as volume_room
from penstock.data.packed import write as dataset
from penstock.data.packed.audit import Audit, Delivery
from penstock.data.packed.checksums import PlaneChecks
from penstock.data.packed.format import ArrayLayout, Packed, open_dataset
from penstock.data.packed.moments import Moments
from penstock.data.specimen import PERIOD, Specimen
from penstock.data.weather import PRESETS, World
from penstock.loading.loader import Loader

from ..places import SHARED

ERA = SHARED / "era-interim-uvz.nc"
GRID = (8, 16)
PLAIN: dict[str, Any] = {
    "codec": "blosc-lz4",
    "zarr_format": 2,
    "shards": None,
    "workers": 2,
    "overwrite": False,
    "facts": {},
}
SMALL = {
    "inputs": ArrayLayout(("lat", "lon", "channels"), (4, 6, 5), (4, 6, 2), tuple("abcde")),
    "targets": ArrayLayout(("lat", "lon", "channels"), (4, 6, 3), (4, 6, 2), tuple("xyz")),
}


def small_sample(index: int) -> dict[str, np.ndarray]:
    """Distinct everywhere, but for a channel that never changes."""
    made = {}
    for offset, (name, layout) in enumerate(SMALL.items()):
        count = int(np.prod(layout.shape))
        values = np.arange(count, dtype=np.float32) + 1000 * index + 500 * offset
        made[name] = values.reshape(layout.shape)
    made["targets"][..., 2] = 7
    return made


def write_small(root: Path, samples: int = 5, **settings: Any) -> Packed:
    return dataset.write_dataset(
        root, SMALL, range(100, 100 + samples), small_sample, **(PLAIN | settings)
    )


def read(packed: Packed, name: str) -> np.ndarray:
    zarr = pytest.importorskip("zarr")
    return np.asarray(zarr.open_array(str(packed.arrays[name].path), mode="r")[...])


# --- fields ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "array", "channels", "chunk"),
    [
        ("ufs-p1", "inputs", 187, 13),
        ("ufs-p1", "targets", 83, 13),
        ("ufs-p2", "inputs", 187, 17),
        ("ufs-p2", "targets", 85, 17),
        ("ufs-p1-channel-first", "inputs", 187, 13),
        ("ufs-p1-channel-first", "targets", 83, 13),
    ],
)
def test_presets_have_the_channels_and_chunks_of_the_seed(
    preset: str, array: str, channels: int, chunk: int
) -> None:
    layout = PRESETS[preset].layouts((192, 384))[array]
    order = (channels, 192, 384) if layout.channel_axis == 0 else (192, 384, channels)
    assert (layout.axes[0] == "channels") == preset.endswith("first")
    assert layout.shape == order
    assert layout.chunks[layout.channel_axis] == chunk
    assert sorted(layout.chunks)[1:] == [192, 384]
    assert len(set(layout.channels)) == channels
    if preset == "ufs-p1" and array == "inputs":
        assert layout.num_bytes == 55_148_544  # the seed's "inputs 55 MB"


def test_a_sample_made_alone_by_a_new_world_is_the_same() -> None:
    preset = PRESETS["ufs-p1"]
    first, again = World(GRID, 3, 2.0), World(GRID, 3, 2.0)
    for time in (2, 0, 1):
        first.sample(preset, time)
    for name, array in first.sample(preset, 7).items():
        np.testing.assert_array_equal(array, again.sample(preset, 7)[name])
    other = World(GRID, 4, 2.0).sample(preset, 7)
    assert not np.array_equal(first.sample(preset, 7)["inputs"], other["inputs"])


def test_every_layout_holds_the_same_fields() -> None:
    world = World(GRID, 0, 2.0)
    last = world.sample(PRESETS["ufs-p1"], 4)
    first = world.sample(PRESETS["ufs-p1-channel-first"], 4)
    for name in last:
        np.testing.assert_array_equal(np.moveaxis(last[name], -1, 0), first[name])


@pytest.mark.slow
def test_samples_follow_from_one_another_in_time() -> None:
    """What is the step before in one sample was the step in the sample before."""
    world, preset = World(GRID, 0, 2.0), PRESETS["ufs-p1"]
    names = preset.layouts(GRID)["inputs"].channels
    now = {name: world.sample(preset, 5)["inputs"][..., i] for i, name in enumerate(names)}
    then = {name: world.sample(preset, 4)["inputs"][..., i] for i, name in enumerate(names)}
    targets = preset.layouts(GRID)["targets"].channels
    np.testing.assert_array_equal(now["tmp_500_t-1"], then["tmp_500_t+0"])
    target = world.sample(preset, 4)["targets"][..., targets.index("tmp_500_t+1")]
    np.testing.assert_array_equal(now["tmp_500_t+0"], target)
    np.testing.assert_array_equal(now["land_static_t+0"], then["land_static_t+1"])
    assert set(np.unique(now["land_static_t+0"])) <= {0.0, 1.0}
    assert not np.array_equal(now["tmp_500_t+0"], now["tmp_500_t-1"])
    for clock in ("year_progress_sin", "year_progress_cos"):
        assert np.ptp(now[f"{clock}_t+0"]) == 0
    assert now["dswrf_avetoa_t+0"].min() == 0
    assert now["dswrf_avetoa_t+0"].max() > 900


def test_neighbouring_levels_are_alike_and_distant_ones_less() -> None:
    levels = World((32, 64), 1, 2.0).values("tmp", 3).reshape(13, -1)
    correlation = np.corrcoef(levels)
    assert (np.diag(correlation, 1) > 0.9).all()
    assert correlation[0, 12] < 0.9
    assert (levels.std(axis=1) > 1).all()


@pytest.mark.parametrize("slope", [1.0, 2.0, 3.0])
def test_the_amplitude_falls_with_wave_number_as_asked(slope: float) -> None:
    world = World((64, 128), 0, slope)
    fields = np.stack([world.values("vgrd", time)[0] for time in range(0, 400, 40)])
    power = (np.abs(np.fft.fft(fields, axis=2)) ** 2).mean(axis=(0, 1))
    # Along one axis of two, power falls by one power less than twice the amplitude's slope.
    low, high = power[8:16].mean(), power[16:32].mean()
    fallen = np.log2(low / high)
    assert fallen == pytest.approx(2 * slope - 1, abs=0.45)


def test_an_odd_grid_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grid \(7, 16\): both sides must be even"):
        World((7, 16), 0, 2.0)


# --- the folder ------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "v2": {},
    "v2-blosc-zstd": {"codec": "blosc-zstd"},
    "v2-zstd": {"codec": "zstd"},
    "v2-none": {"codec": "none"},
    "v3": {"zarr_format": 3},
    "v3-zstd": {"zarr_format": 3, "codec": "zstd"},
    "v3-none": {"zarr_format": 3, "codec": "none"},
    "v3-shards": {"zarr_format": 3, "shards": 2},
    "one worker": {"workers": 1},
    "many workers": {"workers": 7},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_packed_is_what_was_made(layout: str, tmp_path: Path) -> None:
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
        assert array.zarr_format == LAYOUTS[layout].get("zarr_format", 2)
    assert packed.statistics()["targets"][1][2] == 0  # the channel that never changes


def test_the_ratio_is_of_the_files_and_counts_no_padding_as_data(tmp_path: Path) -> None:
    packed = write_small(tmp_path / "data", codec="none")
    chunks = [p for p in packed.root.rglob("*") if p.is_file() and p.name[0].isdigit()]
    stored = sum(path.stat().st_size for path in chunks)
    assert len(chunks) == 5 * (3 + 2)  # the constant ones too
    assert packed.stored_bytes == packed.document["stored_bytes"] == stored
    assert packed.document["compression_ratio"] == 5 * 4 * 6 * 8 * 4 / stored
    assert packed.document["compression_ratio"] == pytest.approx(8 / 10)


def test_the_axes_are_named_where_xarray_looks_for_them(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    for version in (2, 3):
        packed = write_small(tmp_path / f"v{version}", zarr_format=version)
        store = zarr.open_array(str(packed.arrays["inputs"].path), mode="r")
        names = store.metadata.dimension_names if version == 3 else store.attrs["_ARRAY_DIMENSIONS"]
        assert tuple(names) == packed.arrays["inputs"].axes


def test_no_more_samples_are_held_than_there_are_workers(tmp_path: Path) -> None:
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

    dataset.write_dataset(tmp_path / "data", SMALL, range(60), make, **(PLAIN | {"workers": 3}))
    assert most <= 6, "TensorStore lets go of what it wrote a moment after it says so"


def test_progress_counts_every_sample(tmp_path: Path) -> None:
    said: list[int] = []
    write_small(tmp_path / "a", progress=said.append)
    assert said == [1, 2, 3, 4, 5]
    said.clear()
    write_small(tmp_path / "b", zarr_format=3, shards=2, progress=said.append)
    assert said == [2, 4, 5]


def test_a_failure_names_the_sample_and_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
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


def test_overwrite_removes_a_packed_data_set_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_small(root, 5)
    with pytest.raises(UsageError, match="exists; use --overwrite"):
        write_small(root)
    assert write_small(root, 3, overwrite=True).num_samples == 3
    assert read(open_dataset(root), "inputs").shape[0] == 3

    (root / "thesis.txt").write_text("ten years of work")
    with pytest.raises(UsageError, match=r"holds thesis.txt, .* nothing was removed"):
        write_small(root, overwrite=True)
    assert open_dataset(root).num_samples == 3

    other = tmp_path / "other"
    (other / "inputs.zarr").mkdir(parents=True)
    with pytest.raises(UsageError, match="is no packed data set; nothing was removed"):
        write_small(other, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        write_small(tmp_path / "file", overwrite=True)
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        write_small(tmp_path / "file" / "data")


def test_overwrite_follows_no_path_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    root = tmp_path / "data"
    root.mkdir()
    arrays = {"inputs": {"path": "../victim"}, "targets": {"path": "link.zarr"}}
    document = {"format": format.FORMAT, "version": 1, "arrays": arrays}
    (root / "dataset.json").write_text(json.dumps(document))
    (root / "link.zarr").symlink_to(tmp_path / "victim")
    write_small(root, overwrite=True)
    assert (tmp_path / "victim").is_dir()
    assert not (root / "link.zarr").is_symlink()


def test_a_data_set_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"are .* PiB before compression and .* free; lower"):
        dataset.write_dataset(tmp_path / "data", SMALL, range(10**14), small_sample, **PLAIN)
    assert not (tmp_path / "data").exists()


def test_shards_need_zarr_3(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--shards 2 needs --zarr-format 3"):
        write_small(tmp_path / "data", shards=2)


def _broken(root: Path, what: str) -> None:
    document = json.loads((root / "dataset.json").read_text())
    match what:
        case "no document":
            (root / "dataset.json").unlink()
        case "another format":
            document["format"] = "zip"
        case "a later version":
            document["version"] = 9
        case "no ids":
            (root / "ids.npy").unlink()
        case "other samples":
            document["samples"] = 4
        case "no array":
            (root / "inputs.zarr" / ".zarray").unlink()
        case "axes":
            document["arrays"]["inputs"]["axes"] = ["sample", "lat"]
        case "malformed":
            document["arrays"] = 3
    if (root / "dataset.json").exists():
        (root / "dataset.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("no document", "there is no dataset.json"),
        ("another format", "not that of a packed data set"),
        ("a later version", "version 9 of the format; this Penstock reads 1"),
        ("no ids", "ids.npy: No such file"),
        ("other samples", "the numbers of samples differ: dataset.json 4, ids.npy 5"),
        ("no array", "inputs.zarr is no Zarr array"),
        ("axes", r"has shape \(5, 4, 6, 5\) and axes \['sample', 'lat'\]"),
        ("malformed", "malformed"),
    ],
)
def test_what_is_not_whole_is_not_opened(what: str, sentence: str, tmp_path: Path) -> None:
    root = write_small(tmp_path / "data").root
    _broken(root, what)
    with pytest.raises(UsageError, match=f"DATA {root}: .*{sentence}"):
        open_dataset(root)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    offset=st.sampled_from([0.0, -3.0, 1e5]),
    axis=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_moments_add_up_to_numpys(lengths: list[int], offset: float, axis: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [(rng.normal(size=(n, 4, 3)) + offset).astype(np.float32) for n in lengths]
    total = Moments.none(3)
    for array in arrays:
        total += Moments.of(np.moveaxis(array, -1, axis), axis)
    whole = np.concatenate(arrays).astype(np.float64)
    assert total.count == whole[..., 0].size
    np.testing.assert_allclose(total.mean, whole.mean(axis=(0, 1)), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(total.std, whole.std(axis=(0, 1)), rtol=1e-9)


# --- the audit -------------------------------------------------------------------------------


def audited(packed: Packed, planned: list[list[int]], came: list[list[int]]) -> Delivery:
    audit = Audit(packed)
    for plan, delivered in zip(planned, came, strict=True):
        rows = [small_sample(index) for index in delivered]
        batch = {name: np.stack([row[name] for row in rows]) for name in SMALL}
        audit.batch(np.array(plan), batch)
    return audit.result()


@pytest.mark.parametrize(
    ("came", "found"),
    [
        ([[4, 2], [0, 1]], Delivery(0, 0, 0)),  # as planned
        ([[4, 2], [0, 0]], Delivery(1, 1, 2)),  # 0 twice, 1 lost
        ([[2, 4], [0, 1]], Delivery(0, 0, 4)),  # all there, two in each other's place
        ([[4], [0, 1]], Delivery(0, 1, 0)),  # a short batch
        ([[4, 2, 3], [0, 1]], Delivery(1, 0, 2)),  # one too many
    ],
)
def test_the_audit_goes_by_the_bytes(
    came: list[list[int]], found: Delivery, tmp_path: Path
) -> None:
    assert audited(write_small(tmp_path / "data"), [[4, 2], [0, 1]], came) == found
    assert found.right == (found == Delivery(0, 0, 0))


def test_samples_that_are_alike_stand_for_themselves(tmp_path: Path) -> None:
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


def test_one_changed_bit_is_wrong_and_its_sample_missing(tmp_path: Path) -> None:
    packed = write_small(tmp_path / "data")
    batch = {name: values[None].copy() for name, values in small_sample(2).items()}
    batch["targets"].view(np.uint32)[0, 1, 1, 1] ^= 1
    audit = Audit(packed)
    audit.batch(np.array([2]), batch)
    assert audit.result() == Delivery(0, 1, 1)


# --- the verb --------------------------------------------------------------------------------


def test_generate_packs_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "data"
    words = ["generate", "ufs-p1", str(root), "--samples", "3", "--grid", "8", "16", "--seed", "5"]
    assert main(words) == 0
    packed = open_dataset(root)
    world = World(GRID, 5, 2.0)
    for index in range(3):
        sample = world.sample(PRESETS["ufs-p1"], index)
        for name, values in sample.items():
            np.testing.assert_array_equal(read(packed, name)[index], values)
    assert (packed.document["preset"], packed.document["seed"]) == ("ufs-p1", 5)
    assert len(packed.arrays["inputs"].channels) == 187
    out, err = capsys.readouterr()
    assert "inputs   3 x 8 x 16 x 187 (sample, lat, lon, channels), chunks 1 x 8 x 16 x 13" in out
    ratio = packed.document["compression_ratio"]
    assert f"Compression ratio {ratio:.3g}" in out
    assert err.splitlines()[-1] == "3 of 3 samples"
    assert main(words) == 2
    assert "use --overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


@pytest.fixture(scope="module")
def specimen() -> Specimen:
    return Specimen(3)


def test_generate_makes_a_volume(
    specimen: Specimen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.data.stores.open import open_source

    words = ["generate", "volume", str(tmp_path / "v.zarr"), "--shape", "16", "36", "40"]
    words += ["--chunks", "8", "16", "16", "--seed", "3"]
    assert main(words) == 0
    source = open_source(str(tmp_path / "v.zarr"))
    assert source.chunks[-3:] == (8, 16, 16)
    assert source.axes == "zyx"
    volume = source.read(source.domain)[0, 0]
    np.testing.assert_array_equal(volume, specimen.image(Box((0, 0, 0), (16, 36, 40))))
    packed = open_dataset(tmp_path / "v.zarr")
    assert packed.ids.tolist() == list(range(16))
    assert packed.checks["volume"].tolist() == [zlib.crc32(plane.tobytes()) for plane in volume]
    out, err = capsys.readouterr()
    assert "Compression ratio" in out and "16 x 36 x 40 (sample, y, x), chunks 8 x 16 x 16" in out
    assert err.splitlines()[-1] == f"{16 * 36 * 40} of {16 * 36 * 40} voxels"
    assert main(words) == 2
    assert "use --overwrite" in capsys.readouterr().err
    words[2] = str(tmp_path / "clean.zarr")
    assert main([*words, "--clean"]) == 0
    clean = open_source(str(tmp_path / "clean.zarr"))
    truth = np.rint(specimen.clean(Box((0, 0, 0), (16, 36, 40))))
    np.testing.assert_array_equal(clean.read(clean.domain)[0, 0], truth)


# --- volumes ---------------------------------------------------------------------------------


def test_a_specimen_is_the_same_however_it_is_cut(specimen: Specimen) -> None:
    """Across the faces of noise tiles and of the period, too."""
    around = Box((220, 460, 470), (250, 500, 513))
    clean, whole = specimen.clean(around), specimen.image(around)
    assert whole.dtype == np.uint16
    again = Specimen(3)
    for part in (
        Box((230, 470, 475), (250, 500, 500)),
        Box((240, 480, 480), (241, 490, 485)),
        Box((239, 470, 479), (245, 481, 481)),
    ):
        np.testing.assert_array_equal(again.clean(part), clean[part.within(around)])
        np.testing.assert_array_equal(again.image(part), whole[part.within(around)])


def test_the_structures_of_a_specimen_come_again_and_its_noise_does_not(
    specimen: Specimen,
) -> None:
    here = Box((0, 0, 0), (32, 32, 32))
    there = here.shift(np.multiply(PERIOD, 7).tolist())
    np.testing.assert_array_equal(specimen.clean(here), specimen.clean(there))
    assert np.mean(specimen.image(here) != specimen.image(there)) > 0.9


def test_a_specimen_has_no_seam_where_a_period_ends(specimen: Specimen) -> None:
    """Planes that meet at the face of a period differ as neighbours elsewhere do."""
    clean = specimen.clean(Box((234, 100, 0), (246, 300, 200)))
    steps = np.abs(np.diff(clean, axis=0)).mean(axis=(1, 2))  # the middle one is over the face
    assert steps[5] < 1.1 * np.delete(steps, 5).max()


@pytest.mark.slow
def test_a_box_of_a_specimen_takes_memory_for_itself_alone(specimen: Specimen) -> None:
    small, flat = (Box.of([10**6] * 3, shape) for shape in ((64, 64, 64), (1, 512, 512)))
    assert peak_of(lambda: specimen.image(small)) < 30 * 2**20
    assert peak_of(lambda: specimen.image(flat)) < 30 * 2**20


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that Python and numpy took at most beyond what they had."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def distinct(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Voxels that tell where they are, as far as 16 bits can."""
    index = np.ravel_multi_index(np.ogrid[box.slices], shape)
    return np.asarray(index * 40_503 >> 3, np.uint16)


def write_volume(root: Path, shape: tuple[int, int, int], **settings: Any) -> Packed:
    defaults = {"chunks": (8, 16, 16), "shards": None, "workers": 2, "overwrite": False}
    return volume_room.write_volume(
        root, shape, lambda box: distinct(box, shape), facts={"seed": 0}, **(defaults | settings)
    )


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((20, 33, 50), {}),
        ((20, 33, 50), {"workers": 1, "chunks": (32, 64, 64)}),
        ((16, 32, 32), {"shards": (16, 32, 32)}),
        ((1, 40, 24), {}),  # one plane is a sample, too
    ],
)
def test_every_plane_of_a_volume_has_the_checksum_of_its_bytes(
    shape: tuple[int, int, int],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(volume_room, "PIECE", 16)  # many pieces, along each axis
    packed = write_volume(tmp_path / "v.zarr", shape, **settings)
    expected = distinct(Box((0, 0, 0), shape), shape)
    np.testing.assert_array_equal(read(packed, "volume"), expected)
    assert packed.checks["volume"].tolist() == [zlib.crc32(plane.tobytes()) for plane in expected]


@given(st.data())
def test_checksums_of_planes_add_up_from_pieces_in_any_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 9)) for _ in range(3))
    step = tuple(data.draw(st.integers(1, 9)) for _ in range(3))
    dtype = data.draw(st.sampled_from([np.uint8, np.uint16, np.float32]))
    volume = np.random.default_rng(0).integers(0, 250, shape).astype(dtype)
    checks = PlaneChecks(shape, volume.itemsize)
    for piece in data.draw(st.permutations(list(Grid(Box((0, 0, 0), shape), step)))):
        checks.add(piece, checks.of_piece(piece, volume[piece.slices]))
    assert checks.result().tolist() == [zlib.crc32(plane.tobytes()) for plane in volume]


@pytest.mark.slow
def test_a_volume_is_written_in_memory_that_does_not_grow_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_room, "PIECE", 32)
    shape, chunks = (64, 256, 256), (32, 32, 32)
    write_volume(tmp_path / "first.zarr", (32, 32, 32), chunks=chunks)  # what is imported once
    bound = 2 * 2**20
    assert 2 * math.prod(shape) == 4 * bound
    taken = peak_of(lambda: write_volume(tmp_path / "v.zarr", shape, chunks=chunks))
    assert taken < bound


def deliver(root: Path) -> Delivery:
    """What our loader makes of all planes."""
    packed = open_dataset(root)
    audit = Audit(packed)
    with Loader(str(root), batch_size=3, workers=2, shuffle="sample") as loader:
        for batch in loader:
            audit.batch(batch.samples, batch)
    return audit.result()


def test_a_flipped_voxel_is_found(tmp_path: Path) -> None:
    ts = pytest.importorskip("tensorstore")
    packed = write_volume(tmp_path / "v.zarr", (12, 20, 24))
    assert deliver(packed.root) == Delivery(0, 0, 0)
    kvstore = {"driver": "file", "path": str(packed.arrays["volume"].path)}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    array[7, 11, 13] = int(array[7, 11, 13].read().result()) ^ 1
    assert deliver(packed.root) == Delivery(0, 1, 1)


def test_bench_loader_checks_a_volume(tmp_path: Path) -> None:
    """The scenario in this process: what it reads is verified by the checksums of the planes."""
    from penstock.bench.scenarios import WrongResult
    from penstock.bench.scenarios.loader import LoaderScenario

    packed = write_volume(tmp_path / "v.zarr", (12, 20, 24))
    case = {
        "data": str(packed.root), "loader": "penstock", "batch": 4, "threads": 1, "seed": 0,
        "shuffle": "sample", "window": None, "cache": "as-is", "batches": 2, "warmup": 0,
        "endpoint": None, "latency_ms": 0.0,
    }  # fmt: skip

    def verified() -> dict[str, Any]:
        with contextlib.closing(LoaderScenario(case)) as scenario:
            for _ in range(3):
                scenario.step(lambda name: contextlib.nullcontext())
            scenario.verify()
            return scenario.facts

    facts = verified()
    assert (facts["wrong"], facts["missing"], facts["verified_batches"]) == (0, 0, 3)
    checks = dict(np.load(packed.root / format.CHECKS))
    checks["volume"][3] ^= 1
    np.savez(packed.root / format.CHECKS, **checks)
    with pytest.raises(WrongResult, match="1 arrays were wrong"):
        verified()


def test_a_volume_that_was_not_finished_is_known_and_can_be_replaced(tmp_path: Path) -> None:
    root = tmp_path / "v.zarr"

    def fail(box: Box) -> np.ndarray:
        raise ValueError("no light")

    with pytest.raises(StageError, match=r"generate.*Box.*no light"):
        volume_room.write_volume(
            root, (8, 16, 16), fail, chunks=(8, 16, 16), shards=None, workers=1,
            overwrite=False, facts={},
        )  # fmt: skip
    with pytest.raises(UsageError, match="was not finished"):
        open_dataset(root)
    with pytest.raises(UsageError, match="use --overwrite"):
        write_volume(root, (8, 16, 16))
    assert write_volume(root, (8, 16, 16), overwrite=True).num_samples == 8


def test_what_cannot_be_written_leaves_the_old_volume_alone(tmp_path: Path) -> None:
    packed = write_volume(tmp_path / "v.zarr", (8, 16, 16))
    with pytest.raises(UsageError, match="are not multiples of chunks"):
        write_volume(packed.root, (8, 16, 16), shards=(9, 9, 9), overwrite=True)
    (packed.root / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt, which is no part .* nothing was removed"):
        write_volume(packed.root, (8, 16, 16), overwrite=True)
    assert deliver(packed.root) == Delivery(0, 0, 0)
    with pytest.raises(UsageError, match="N5 has no place for checksums"):
        write_volume(tmp_path / "v.n5", (8, 16, 16))
    with pytest.raises(UsageError, match="a volume has none"):
        packed.statistics()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("ufs-p3 OUT", "there is no preset 'ufs-p3'; there are ufs-p1, ufs-p2,"),
        ("", "give what to make .* got neither"),
        ("ufs-p1", "give what to make .* got ufs-p1"),
        ("ufs-p1 OUT --samples 0", "--samples '0': input should be greater than or equal to 1"),
        ("ufs-p1 OUT --grid 7 16", "--grid 7 16: give two even numbers"),
        ("ufs-p1 OUT --grid 8", "--grid 8: give two even numbers"),
        ("ufs-p1 OUT --codec gzip", "--codec 'gzip': input should be 'blosc-lz4'"),
        ("ufs-p1 OUT --zarr-format 4", "--zarr-format 4: input should be 2 or 3"),
        ("ufs-p1 OUT --shards 2", "--shards 2 needs --zarr-format 3"),
        ("ufs-p1 OUT --inputs u", "--inputs is of --from, and this is a preset"),
        ("volume OUT --samples 2", "--samples is of a preset and --from, and this is a volume"),
        ("volume OUT --shape 4 4", "give three numbers, z y x"),
        ("--from none.nc OUT", "--from none.nc is not a file"),
        ("--from none.nc", "takes OUT and nothing else, and got nothing"),
        ("--from none.nc ufs-p1 OUT", "takes OUT and nothing else, and got ufs-p1 OUT"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(sentence, err), err
    assert list(tmp_path.iterdir()) == []


# --- NetCDF ----------------------------------------------------------------------------------


@pytest.fixture
def weather(tmp_path: Path) -> Path:
    """Six steps of a variable with levels and one without, and one that never changes."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    grid = {"y": np.arange(4), "x": np.arange(6)}
    t = np.arange(6 * 2 * 4 * 6, dtype=np.float64).reshape(6, 2, 4, 6) / 7
    s = -np.arange(6 * 4 * 6, dtype=np.float32).reshape(6, 4, 6)
    land = np.arange(24).reshape(4, 6) % 2
    data = xarray.Dataset(
        {
            "t": (("time", "level", "y", "x"), t),
            "s": (("time", "y", "x"), s),
            "land": (("y", "x"), land),
            "profile": (("level",), [1.0, 2.0]),
        },
        coords={"time": np.arange(6), "level": [850.0, 500.0], **grid},
    )
    path = tmp_path / "weather.nc"
    packing = {"dtype": "int16", "scale_factor": 0.1, "add_offset": 10.0, "_FillValue": -1}
    data.to_netcdf(path, engine="netcdf4", encoding={"t": packing})
    return path


def test_a_netcdf_is_stacked_by_variable_step_and_level(weather: Path, tmp_path: Path) -> None:
    import xarray

    assert main(["generate", "--from", str(weather), str(tmp_path / "data")]) == 0
    packed = open_dataset(tmp_path / "data")
    assert packed.ids.tolist() == [1, 2, 3, 4]
    assert packed.arrays["inputs"].channels == (
        *("t_850_t-1", "t_500_t-1", "t_850_t+0", "t_500_t+0", "s_t-1", "s_t+0", "land"),
    )
    assert packed.arrays["targets"].channels == ("t_850_t+1", "t_500_t+1", "s_t+1")
    inputs, targets = read(packed, "inputs"), read(packed, "targets")
    with xarray.open_dataset(weather, engine="netcdf4") as data:
        t, s, land = (data[name].values.astype(np.float32) for name in ("t", "s", "land"))
    for row, now in enumerate((1, 2, 3, 4)):
        steps = [t[now - 1, 0], t[now - 1, 1], t[now, 0], t[now, 1], s[now - 1], s[now], land]
        np.testing.assert_array_equal(inputs[row], np.stack(steps, axis=-1))
        ahead = [t[now + 1, 0], t[now + 1, 1], s[now + 1]]
        np.testing.assert_array_equal(targets[row], np.stack(ahead, axis=-1))


def test_variables_steps_and_samples_can_be_chosen(weather: Path, tmp_path: Path) -> None:
    words = ["generate", "--from", str(weather), str(tmp_path / "data"), "--inputs", "s"]
    words += ["--targets", "t", "--offsets", "-2", "0", "--target-offset", "3", "--samples", "1"]
    assert main(words) == 0
    packed = open_dataset(tmp_path / "data")
    assert packed.ids.tolist() == [2]
    assert packed.arrays["inputs"].channels == ("s_t-2", "s_t+0")
    assert packed.arrays["targets"].channels == ("t_850_t+3", "t_500_t+3")
    assert read(packed, "inputs")[0, 0, 0].tolist() == [0, -48]
    assert packed.document["offsets"] == [-2, 0]
    assert packed.document["cast"] == "float32"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--inputs q",
            "--inputs q: .* no such variable of numbers; it has t, s, land, profile",
        ),
        ("--inputs t profile", "profile has axes level; it must end in y, x"),
        ("--inputs land", "no variable has an axis of samples"),
        ("--offsets -4 0 --target-offset 2", "time has 6 steps, too few for --offsets -4 0 and"),
        ("--samples 5", "--samples 5: .* gives 4"),
    ],
)
def test_what_a_file_does_not_have_is_refused(
    flags: str, sentence: str, weather: Path, tmp_path: Path
) -> None:
    from penstock.base.config.data import GenerateConfig
    from penstock.base.config.knobs import build
    from penstock.data.netcdf import open_netcdf

    settings: dict[str, Any] = {}
    for word in flags.split():
        if word.startswith("--"):
            settings[key := word[2:].replace("-", "_")] = []
        else:
            settings[key].append(word)
    for key in ("target_offset", "samples"):
        if key in settings:
            settings[key] = settings[key][0]
    config = build(GenerateConfig, settings)
    knobs = {name: getattr(config, name) for name in ("inputs", "targets", "offsets", "samples")}
    with pytest.raises(UsageError, match=sentence):
        open_netcdf(weather, **knobs, target_offset=config.target_offset)
    assert not (tmp_path / "data").exists()


def netcdf(path: Path, variables: dict[str, Any], coords: dict[str, Any], **how: Any) -> Path:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    xarray.Dataset(variables, coords).to_netcdf(path, engine="netcdf4", **how)
    return path


MONTHS = {"units": "months since 1850-01-01", "calendar": "standard", "bounds": "time_bnds"}
"""Which nobody can decode."""


def test_corners_of_cells_are_no_weather_and_months_no_hindrance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An ocean on a curvilinear grid, as CMIP6 has it."""
    tos = np.arange(5 * 4 * 6, dtype="f4").reshape(5, 4, 6)
    corners = {"bounds": "vertices_latitude"}
    path = netcdf(
        tmp_path / "tos.nc",
        {
            "vertices_latitude": (("j", "i", "vertices"), np.ones((4, 6, 4))),
            "time_bnds": (("time", "bnds"), np.ones((5, 2))),
            "period": (("time", "j", "i"), tos + 1000, {"units": "seconds"}),
            "transport": (("time", "basin", "j"), np.ones((5, 2, 4))),
            "tos": (("time", "j", "i"), tos),
        },
        {"time": ("time", np.arange(5.0), MONTHS),
         "latitude": (("j", "i"), np.ones((4, 6)), corners)},
    )  # fmt: skip
    assert main(["generate", "--from", str(path), str(tmp_path / "data")]) == 0
    assert f"{path}: left out, for want of latitude or longitude: transport" in (
        capsys.readouterr().out
    )
    packed = open_dataset(tmp_path / "data")
    assert packed.arrays["targets"].channels == ("period_t+1", "tos_t+1")
    assert packed.ids.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(read(packed, "targets")[..., 1], tos[2:])


@pytest.mark.parametrize(
    ("axes", "told", "about", "unlimited"),
    [
        ("time level lat lon", "time lat lon", {}, []),
        ("time level lon lat", "time lat lon", {}, []),
        ("level lon lat time", "time lat lon", {}, []),
        ("t level b a", "t b a", {"t": {"units": "days since 2000-01-01"}}, []),
        ("t level a b", "t b a", {"t": {"axis": "T"}, "a": {"units": "degrees_east"}}, []),
        ("level t x y", "t y x", {"t": {"standard_name": "time"}, "y": {"axis": "Y"}}, []),
        ("level step y x", "step y x", {}, ["step"]),
    ],
)
def test_the_axes_are_found_by_what_is_said_of_them(
    axes: str, told: str, about: dict[str, Any], unlimited: list[str], tmp_path: Path
) -> None:
    """Before the variable comes another, whose first axis is another and which never changes."""
    dim, latitude, longitude = told.split()
    length = {dim: 5, "level": 2, latitude: 4, longitude: 6}
    shape = [length[axis] for axis in axes.split()]
    wind = np.arange(math.prod(shape), dtype="f4").reshape(shape)
    soil = np.arange(3 * 4 * 6, dtype="f4").reshape(3, 4, 6)
    path = netcdf(
        tmp_path / "w.nc",
        {"soil": (("layer", latitude, longitude), soil), "wind": (axes.split(), wind)},
        {axis: (axis, np.arange(length[axis]), attributes) for axis, attributes in about.items()},
        unlimited_dims=unlimited,
    )
    words = ["generate", "--from", str(path), str(tmp_path / "data"), "--offsets", "0"]
    assert main([*words, "--target-offset", "0"]) == 0
    packed = open_dataset(tmp_path / "data")
    wanted = wind.transpose([axes.split().index(a) for a in (*told.split(), "level")])
    np.testing.assert_array_equal(read(packed, "targets"), wanted)
    inputs = read(packed, "inputs")
    np.testing.assert_array_equal(inputs[..., 3:], wanted)
    np.testing.assert_array_equal(inputs[4, ..., :3], soil.transpose(1, 2, 0))


def test_what_is_no_netcdf_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("netCDF4")
    (tmp_path / "text.nc").write_text("not a NetCDF at all")
    assert main(["generate", "--from", str(tmp_path / "text.nc"), str(tmp_path / "data")]) == 2
    assert "text.nc is no NetCDF file" in capsys.readouterr().err


@pytest.mark.skipif(not ERA.exists(), reason=f"{ERA} is absent")
@pytest.mark.filterwarnings("ignore:variable .* has non-conforming")
def test_real_reanalysis_is_packed_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    words = ["generate", "--from", str(ERA), str(tmp_path / "data")]
    assert main(words) == 0  # the file has two steps: one sample, from the first to the second
    packed = open_dataset(tmp_path / "data")
    assert "cast to float32" in capsys.readouterr().out
    assert packed.ids.tolist() == [0]
    assert packed.arrays["inputs"].channels[:4] == ("z_200_t+0", "z_500_t+0", "z_850_t+0",
                                                    "u_200_t+0")  # fmt: skip
    with xarray.open_dataset(ERA, engine="netcdf4") as data:
        for name, month in (("inputs", 0), ("targets", 1)):
            levels = [
                data[variable].values[month, level] for variable in "zuv" for level in range(3)
            ]
            expected = np.stack(levels, axis=-1).astype(np.float32)
            np.testing.assert_array_equal(read(packed, name)[0], expected)
    assert packed.arrays["inputs"].chunks == (1, 241, 480, 3)
    assert main([*words, "--overwrite", "--inputs", "u", "v", "z", "--target-offset", "0"]) == 0
    assert open_dataset(tmp_path / "data").ids.tolist() == [1]
