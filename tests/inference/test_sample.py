"""Only where there is sample: what is left out, against brute force over the patch grid."""

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base import as_settings
from penstock.base.threads import Pool
from penstock.cli import main
from penstock.data import open_source
from penstock.inference.opening.sample import cropped
from penstock.inference.opening.selection import Volume
from penstock.inference.planning import cuts
from penstock.models import Recipe

from ..later import imported_later
from ..parameters import mainly
from .kit import Array, config, conv, values

zarr = imported_later("zarr")
SHAPE = (21, 34, 40)
PATCH, OVERLAP = 10, 3
RNG = np.random.default_rng(0)
ZYX = np.indices(SHAPE)
BALL = ((ZYX - np.array([8, 12, 15])[:, None, None, None]) ** 2).sum(0) < 60
VOLUME = np.where(BALL, RNG.normal(900, 100, SHAPE), RNG.normal(100, 10, SHAPE)).astype("float32")
KNOBS: dict[str, Any] = {
    "patch": PATCH, "overlap": OVERLAP, "devices": "cpu", "threads": 1, "head_kind": "intensity",
    "normalize": "fixed", "norm_lower": 0, "norm_upper": 1000,
}  # fmt: skip


def run(source: Any, **knobs: Any) -> tuple[Array, Any]:
    out = np.full(SHAPE, 77, "float32")
    return out, penstock.run_inference(source, out, **{"model": conv()} | KNOBS | knobs)


@functools.cache
def whole_of(seam: str = "trim") -> Array:
    """The output where nothing is left out."""
    return run(VOLUME, seam_mode=seam)[0]


def cut_out(
    full: Array, inside: Array, reaches: Array, seam: str = "trim", cuts: bool = True
) -> tuple[Array, int]:
    """What is left of a whole output, and how many patches that takes."""
    absent, computed = ~inside if cuts else np.zeros(SHAPE, bool), 0
    stride = PATCH - OVERLAP
    for corner in itertools.product(*(range(0, n, stride) for n in SHAPE)):
        place = tuple(slice(a, a + stride) for a in corner)
        if seam == "blend":
            place = tuple(slice(max(0, a - 1), a - 1 + PATCH) for a in corner)
        if (inside & reaches)[place].any():
            computed += 1
        else:
            absent[place] = True
    return np.where(absent, np.float32(0), full), computed


@pytest.mark.parametrize(
    ("seam", "knobs", "inside", "reaches"),
    [
        ("trim", {"mask": BALL.astype("uint8")}, BALL, True),
        ("blend", {"mask": np.where(BALL, 2.5, np.nan), "mask_output": "no", "batch": 5},
         BALL, True),
        ("trim", {"skip_below": 500}, True, VOLUME >= 500),
        ("trim", {"box": ("3:9", ":", "10:11")},
         (ZYX[0] >= 3) & (ZYX[0] < 9) & (ZYX[2] == 10), True),
        ("blend", {"mask": BALL, "skip_below": 1100, "box": "0:21,0:13,:", "block": 10},
         BALL & (ZYX[1] < 13), VOLUME >= 1100),
    ],
)  # fmt: skip
def test_what_is_no_sample_has_the_fill_value(seam, knobs, inside, reaches) -> None:
    full = whole_of(seam)
    inside, reaches = (np.broadcast_to(each, SHAPE) for each in (inside, reaches))
    cuts = knobs.get("mask_output") != "no"
    right, computed = cut_out(full, inside, reaches, seam, cuts)
    made, summary = run(VOLUME, seam_mode=seam, **knobs)
    np.testing.assert_array_equal(made, right)
    assert 0 < (made != 0).mean() < 0.4
    assert summary.left_out.computed == computed
    assert summary.left_out.voxels == np.count_nonzero(made == 0)
    line = next(line for line in summary.lines() if line.startswith("Sample: "))
    assert f"Sample: {computed} of 90 patches computed, " in line and "saved" in line


def test_what_is_left_out_adds_nothing_where_outputs_are_resampled(monkeypatch) -> None:
    take = Pool.take

    def spoilt(pool: Pool, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        array = take(pool, shape, dtype)
        array.view("uint8").fill(255)  # NaN, in an array of floats
        return array

    monkeypatch.setattr(Pool, "take", spoilt)
    knobs = {"voxel_size": (1, 1, 1), "in_voxel_size": (1, 0.7, 1.3), "box": ("4:9", ":", "10:20")}
    out = np.zeros(SHAPE, "uint8")
    score = KNOBS | {"head_kind": None, "reduce": "threshold:-9"}
    summary = penstock.run_inference(VOLUME, out, model=conv(), **score | knobs)
    assert out.any() and summary.left_out.voxels > out.size / 2


@pytest.mark.parametrize("seam", mainly(["trim", "blend"], 1))
def test_a_batch_of_rare_patches_is_not_waited_for(seam: str, monkeypatch) -> None:
    """Bricks of eight patches of which one is computed: a batch of 64 has room for few of them."""
    monkeypatch.setattr(cuts, "BRICK_VOXELS", 18**3)
    rare = np.zeros(SHAPE, bool)
    rare[3::14, 3::14, 3::14] = True
    how = {"seam_mode": seam, "max_inflight_batches": 1, "batch": 64}
    full = whole_of(seam)
    made, _ = run(VOLUME, mask=rare, **how)
    np.testing.assert_array_equal(made, cut_out(full, rare, np.True_, seam)[0])


@pytest.mark.slow
def test_nan_is_no_sample_and_percentiles_are_those_inside_the_mask() -> None:
    spoilt = VOLUME.copy()
    spoilt[~BALL] = np.nan
    asked = {"normalize": "global", "norm_lower": 1.0, "norm_upper": 99.0}
    made, summary = run(spoilt, mask=BALL, **asked)
    low, high = np.percentile(VOLUME[BALL], (1, 99))
    full, _ = run(np.where(BALL, VOLUME, np.float32(low)), norm_lower=low, norm_upper=high)
    np.testing.assert_allclose(made, np.where(BALL, full, 0), rtol=1e-4)
    assert "percentiles 1 and 99 of what lies inside --mask" in summary.values
    assert run(spoilt, skip_below=-1e9)[1].left_out.computed < 90


def image(path: Path, data: Array, scale: float, at: float = 0.0, unit: str = "micrometer") -> str:
    """An OME-Zarr image of cubic voxels."""
    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.create_array("0", data=data, chunks=(8, 16, 16))
    group.attrs["multiscales"] = [{
        "version": "0.4",
        "axes": [{"name": name, "type": "space", "unit": unit} for name in "zyx"],
        "datasets": [{"path": "0", "coordinateTransformations": [
            {"type": "scale", "scale": [scale] * 3},
            {"type": "translation", "translation": [at] * 3}]}],
    }]  # fmt: skip
    return str(path)


@pytest.mark.parametrize(
    ("factor", "of_mask"),
    mainly(
        [
            (4, (2.0, 0.75, "micrometer")),
            (1, (500.0, 0.0, "nanometer")),
            (2, (1.0, 2.25, "micrometer")),
            (1, (-0.5, 10.0, "micrometer")),
        ],
        2,
    ),
)
def test_a_mask_lies_in_the_world(factor: int, of_mask: tuple[float, float, str], tmp_path) -> None:
    """Of voxels four times as large whose centres are right, in another unit, two voxels on, and
    with axes that run backwards."""
    source = image(tmp_path / "in.zarr", VOLUME, 0.5)
    coarse = RNG.random(tuple(-(-n // factor) for n in SHAPE)) < 0.05
    scale, at, unit = of_mask
    mask = image(tmp_path / "mask.zarr", coarse, scale, at, unit)
    to_micrometers = 1e-3 if unit == "nanometer" else 1.0
    inside = np.zeros(SHAPE, bool)
    place = (0.5 * ZYX - at * to_micrometers) / (scale * to_micrometers)
    nearest = np.floor(place + 0.5).astype(int)
    over = [(along >= 0) & (along < n) for along, n in zip(nearest, coarse.shape, strict=True)]
    over = np.logical_and.reduce(over)
    inside[over] = coarse[tuple(nearest[:, over])]
    full = whole_of()
    np.testing.assert_array_equal(run(source, mask=mask)[0], cut_out(full, inside, np.True_)[0])


def test_a_coarse_level_decides_without_the_input(tmp_path) -> None:
    source = image(tmp_path / "in.zarr", VOLUME, 0.5)
    assert main(["pyramid", source, "--levels", "2"]) == 0
    level = values({"driver": "zarr", "kvstore": f"file://{source}/1"})[0, 0]
    inside = np.kron(level >= 500, np.ones((2, 2, 2), bool))[tuple(map(slice, SHAPE))]
    full = whole_of()
    made, _ = run(source, skip_below=500, skip_level=1)
    np.testing.assert_array_equal(made, cut_out(full, np.ones(SHAPE, bool), inside)[0])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with an input, and masks: the first leaves most of its blocks empty, others do not
    fit."""
    folder = tmp_path_factory.mktemp("inputs")
    image(folder / "in.zarr", (VOLUME * 10).astype("uint16"), 0.5)
    image(folder / "mask.zarr", BALL.astype("uint8"), 0.5)
    image(folder / "far.zarr", BALL.astype("uint8"), 0.5, 100.0)
    np.save(folder / "other.npy", BALL[1:])
    np.save(folder / "two.npy", np.stack([BALL, BALL]))
    return folder


@pytest.fixture
def here(inputs: Path, tmp_path, monkeypatch) -> None:
    """A folder in which the inputs lie."""
    monkeypatch.chdir(tmp_path)
    for path in inputs.iterdir():
        Path(path.name).symlink_to(path)


def infer(out: str, *more: str) -> int:
    words = ["infer", "in.zarr", out, "--model", "identity", "--patch", "8", "--overlap", "1"]
    return main([*words, "--block", "8", "--chunks", "8", "--devices", "cpu", *more])


BLOCKS = np.pad(BALL, [(0, 3), (0, 6), (0, 0)]).reshape(3, 8, 5, 8, 5, 8).any((1, 3, 5))


@pytest.mark.slow
def test_what_is_absent_is_told_from_what_is_lost(here: None, capsys) -> None:
    assert infer("out.zarr", "--mask", "mask.zarr") == 0
    files = [path for path in Path("out.zarr/0").rglob("*") if path.is_file()]
    chunks = [path for path in files if path.name.isdigit()]
    assert len(chunks) == BLOCKS.sum() < BLOCKS.size / 2
    assert main(["verify", "out.zarr", "--recompute", "1"]) == 0
    assert main(["status", "out.zarr"]) == 0
    assert "75 of 75 blocks are written" in capsys.readouterr().out
    before = chunks[0].read_bytes()
    chunks[0].unlink()
    assert main(["verify", "out.zarr"]) == 3
    capsys.readouterr()
    assert main(["repair", "out.zarr"]) == 0
    assert chunks[0].read_bytes() == before
    right = np.where(BALL, (VOLUME * 10).astype("uint16"), 0)
    np.testing.assert_array_equal(values("out.zarr")[0, 0], right)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mask", "far.zarr"], "--mask far.zarr does not overlap the input: along z apart"),
        (["--mask", "other.npy"], "other.npy says no size of a voxel: it is not known where"),
        (["--mask", "two.npy"], "1 time point and 2 channels; it must have one channel"),
        (["--mask", "no.zarr"], "--mask no.zarr"),
        (["--box", "0:5", "0:5"], "--box 0:5 0:5 has 2 ranges; give one for each of z y x"),
        (["--box", "0:5", "0:99", ":"], "--box 0:5 0:99 :: y of the input goes from 0 to 34, and"),
        (["--box", "0:5", "a:9", ":"], "'a:9' is no range of it, such as 0:64"),
        (["--skip-level", "1"], "--skip-level decides on --skip-below"),
        (["--mask-output", "no"], "--mask-output no keeps what lies outside --mask or --box"),
        (["--skip-below", "5", "--skip-level", "7"], "level"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], sentence: str, here: None, capsys) -> None:
    assert infer("out.zarr", *words) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1, error
    assert not Path("out.zarr").exists()


def test_a_run_goes_on_without_a_box_where_its_network_cropped_nothing() -> None:
    source = open_source(np.ones((4, 6, 8), "uint8"))
    recipe, volumes = Recipe("here", crops=True), [Volume(0, (0,))]
    settings, said = cropped(config(), recipe, source, volumes, {})
    assert settings.box is None and not said
    begun = {"settings": as_settings(settings)}
    assert cropped(config(), recipe, source, volumes, begun)[0].box is None
    begun["settings"]["box"] = ["0:2", "0:6", "0:8"]
    assert cropped(config(), recipe, source, volumes, begun)[0].box == ("0:2", "0:6", "0:8")


def test_a_mask_is_not_overwritten(here) -> None:
    np.save("in.npy", BALL)
    assert main(["convert", "in.npy", "region.zarr"]) == 0
    words = "infer in.npy region.zarr --model identity --mask region.zarr --overwrite".split()
    assert main(words) == 2
    assert (values("region.zarr") == BALL).all()


@pytest.mark.parametrize("name", ["in.tif", "in.vrt"])
def test_a_mask_that_is_a_raster_lies_by_its_georeference(name: str, tmp_path, capsys) -> None:
    rasterio, copied = pytest.importorskip("rasterio"), imported_later("rasterio.shutil")
    scene = (np.arange(40 * 50).reshape(1, 40, 50) % 99 + 1).astype("uint8")

    def raster(name: str, array: Array, place: tuple[float, ...], crs: str = "EPSG:32633") -> str:
        profile = {"width": array.shape[2], "height": array.shape[1], "count": 1, "crs": crs}
        profile |= {"dtype": "uint8", "transform": rasterio.Affine(*place)}
        with rasterio.open(tmp_path / name, "w", driver="GTiff", **profile) as file:
            file.write(array)
        return str(tmp_path / name)

    def masked(mask: str) -> Any:
        out = np.zeros(scene.shape, "uint8")
        plain = {"normalize": "none", "devices": "cpu", "patch": 16, "overlap": 0}
        penstock.run_inference(
            in_spec=str(tmp_path / name), out_spec=out, model="identity", mask=mask, **plain
        )
        return out[0]

    copied.copy(
        raster("in.tif", scene, (10, 0, 5e5, 0, -10, 6e6)), tmp_path / "in.vrt", driver="VRT"
    )
    inside = RNG.random((20, 25)) < 0.5
    whole = np.kron(inside, np.ones((2, 2), bool))
    coarse = inside[None].astype("uint8")
    right = scene[0] * whole
    assert (masked(raster("a.tif", coarse, (20, 0, 5e5, 0, -20, 6e6))) == right).all()
    south_up = raster("b.tif", coarse[:, ::-1], (20, 0, 5e5, 0, 20, 6e6 - 400))
    assert (masked(south_up) == right).all()
    moved = np.zeros((40, 50), bool)
    moved[10:, 20:] = whole[:30, :30]
    assert (
        masked(raster("c.tif", coarse, (20, 0, 5e5 + 200, 0, -20, 6e6 - 100))) == scene[0] * moved
    ).all()
    for place, crs, said in (
        ((20, 0, 9e5, 0, -20, 6e6), "EPSG:32633", "does not overlap the input: along x apart"),
        ((20, 0, 5e5, 0, -20, 6e6), "EPSG:32634", "has another CRS than .*; gdalwarp -t_srs"),
        ((20, 9, 5e5, 9, -20, 6e6), "EPSG:32633", "is turned against .*; resample it"),
    ):
        with pytest.raises(penstock.UsageError, match=said):
            masked(raster("d.tif", coarse, place, crs))


def test_a_mask_that_is_turned_as_nifti_says_lies_by_its_affine(tmp_path) -> None:
    """Both ways round, from another origin, and in another unit."""
    nibabel = pytest.importorskip("nibabel")
    scene = (np.arange(30 * 20 * 8).reshape(30, 20, 8) % 99 + 1).astype("uint8")
    inside = (RNG.random(scene.shape) < 0.5).astype("uint8")
    plain = np.diag([0.5, 0.5, 2, 1.0])
    plain[:3, 3] = -7, -5, 3
    flipped = plain.copy()
    flipped[0, [0, 3]] = -0.5, -7 + 29 * 0.5

    def file(name: str, array: Array, affine: Array, unit: str = "mm") -> str:
        image = nibabel.Nifti1Image(array, affine)
        image.header.set_xyzt_units(unit)
        image.to_filename(tmp_path / name)
        return str(tmp_path / name)

    def masked(volume: str, mask: str) -> Any:
        out = np.zeros(scene.T.shape, "uint8")
        how = {"normalize": "none", "devices": "cpu", "patch": 16, "overlap": 0}
        penstock.run_inference(volume, out, model="identity", mask=mask, **how)
        return out.T

    volume, turned = file("v.nii", scene, plain), file("f.nii", scene[::-1], flipped)
    mask, other = file("m.nii", inside, plain), file("o.nii", inside[::-1], flipped)
    right = scene * inside
    for each in (
        mask,
        other,
        file("u.nii", inside[::-1], np.diag([1e3] * 3 + [1]) @ flipped, "micron"),
    ):
        assert (masked(volume, each) == right).all()
        assert (masked(turned, each)[::-1] == right).all()
    flipped[0, 3] -= 2.0
    moved = masked(turned, file("s.nii", inside[::-1], flipped))[::-1]
    assert (moved[:-4] == scene[:-4] * inside[4:]).all() and not moved[-4:].any()
    swapped = file("p.nii", inside.transpose(2, 1, 0), plain[:, [2, 1, 0, 3]])
    with pytest.raises(penstock.UsageError, match=r"is turned against .*; resample it"):
        masked(volume, swapped)
