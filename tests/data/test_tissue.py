"""The mask of a sample: where it lies, what it leaves out, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data import Box, coarse_view, open_sink, open_source, sample_mask, tissue
from penstock.data.tissue import otsu_threshold

from ..places import SHARED
from .kit import peak_of

pytestmark = pytest.mark.usefixtures("here")

pytest.importorskip("scipy")
pytest.importorskip("tensorstore")
MOUSE = SHARED / "mouse-brain-two-photon.ome.tif"


def ball(shape: tuple[int, ...], radius: float) -> NDArray[np.bool_]:
    axes = np.meshgrid(*(np.arange(n) - n / 2 for n in shape), indexing="ij")
    return np.sqrt(sum(np.square(axis) for axis in axes)) < radius


def fluorescent(inside: NDArray[np.bool_]) -> NDArray[Any]:
    """Tissue that is brighter by factors in some places than in others, over a dark background."""
    rng = np.random.default_rng(1)
    light = np.exp(np.linspace(5, 7, inside.shape[-1]))
    return rng.poisson(np.where(inside, light, 20)).astype("uint16")


def on_bright(inside: NDArray[np.bool_]) -> NDArray[Any]:
    rng = np.random.default_rng(2)
    stain = np.linspace(60, 190, inside.shape[-1])
    return (np.where(inside, stain, 242) + rng.normal(0, 2, inside.shape)).astype("uint8")


def write(path: str, array: NDArray[Any], **like: Any) -> None:
    source = open_source(array)
    for name, value in like.items():
        setattr(source, name, value)
    sink = open_sink(path, domain=source.domain, dtype=array.dtype, like=source)
    sink.create()
    sink.write(sink.domain, source.read(source.domain))
    sink.close()


def agreement(mask: NDArray[Any], right: NDArray[Any]) -> float:
    return float((mask & right).sum() / (mask | right).sum())


@pytest.mark.parametrize("radius", [9, 20, 33], ids=["small", "half", "nearly all"])
@pytest.mark.parametrize("make", [fluorescent, on_bright])
def test_otsu_parts_the_sample_from_its_background(make: Any, radius: float) -> None:
    inside = ball((40, 60, 64), radius)
    image = make(inside)
    threshold, brighter = otsu_threshold(image)
    assert brighter == (make is fluorescent)
    assert agreement(image > threshold if brighter else image < threshold, inside) > 0.97


def test_a_mask_lies_over_its_image(capsys) -> None:
    """A voxel of it is the place of those that it is made of, along axes of other sizes too."""
    inside = ball((2, 260, 600), 180)
    inside[:, :100] = False
    frame = {"scale": (1.0, 1.0, 3.0, 0.5, 0.5), "translation": (0.0, 0.0, 7.0, 8.0, 9.0),
             "units": (None, None, *("micrometer",) * 3)}  # fmt: skip
    write("a.zarr", fluorescent(inside), **frame)
    assert main(["mask", "a.zarr", "m.zarr", "--grow", "0"]) == 0
    printed = capsys.readouterr().out
    assert "penstock infer --in-spec a.zarr" in printed and "--mask m.zarr" in printed
    source = open_source("m.zarr")
    assert source.dtype == np.uint8 and source.domain.shape == (1, 1, 2, 130, 300)
    assert source.scale == (1, 1, 3, 1, 1) and source.translation == (0, 0, 7, 8.25, 9.25)
    assert source.units[4] == "micrometer"
    mask = source.read(source.domain)[0, 0]
    assert agreement(mask.repeat(2, 1).repeat(2, 2) == 1, inside) > 0.97
    assert f"share     {mask.mean():.1%}" in printed and Path("m.zarr.png").stat().st_size > 2000


def test_a_level_of_the_pyramid_is_taken(capsys) -> None:
    write("a.zarr", fluorescent(ball((4, 60, 1100), 250)))
    without = coarse_view("a.zarr")
    assert without.array.shape == (1, 15, 275) and without.scale == (4, 4, 4)
    assert without.translation == (1.5, 1.5, 1.5)
    assert main(["pyramid", "a.zarr"]) == 0
    capsys.readouterr()
    view = coarse_view("a.zarr")
    assert (view.source.domain.shape, view.scale) == ((1, 1, 1, 15, 275), without.scale)
    np.testing.assert_allclose(view.array, without.array, atol=1)
    fine = coarse_view("a.zarr", level=0)
    assert fine.array.shape == (4, 60, 1100) and fine.scale == (1, 1, 1)


def test_what_is_not_finite_is_left_out_and_odd_ends_are_means_of_less() -> None:
    image = np.arange(3 * 515 * 530, dtype="float32").reshape(3, 515, 530)
    image[:, :2, :2], image[0, 2, 0], image[1, 514, 529] = np.nan, np.inf, np.nan
    view = coarse_view(image)  # type: ignore[arg-type]
    assert view.array.shape == (2, 258, 265) and np.isnan(view.array[0, 0, 0])
    assert view.array[0, 1, 0] == np.mean(image[:2, 2:4, :2][np.isfinite(image[:2, 2:4, :2])])
    assert view.array[1, 257, 264] == np.mean(image[2:, 514:, 528:])
    assert not sample_mask(view, above=-1, keep=1, grow=0).inside[0, 0, 0]


def test_channels_and_times_are_averaged_or_chosen() -> None:
    image = np.random.default_rng(3).integers(0, 999, (2, 3, 4, 20, 30)).astype("uint16")
    for chosen, part in (
        ({}, image), ({"c": 1}, image[:, 1:2]), ({"t": 1, "c": 0}, image[1:, :1])
    ):  # fmt: skip
        view = coarse_view(image, **chosen)  # type: ignore[arg-type]
        np.testing.assert_allclose(view.array, part.mean(axis=(0, 1)), rtol=1e-6)
    with pytest.raises(UsageError, match="--c 3 does not exist; 0 to 2 do"):
        coarse_view(image, c=3)  # type: ignore[arg-type]


def test_parts_are_kept_by_size_and_grown() -> None:
    image = np.zeros((60, 60), "uint8")
    image[5:35, 5:35], image[45:55, 45:55], image[2, 50] = 200, 210, 220
    image[15:18, 15:18] = 0
    view = coarse_view(image)  # type: ignore[arg-type]
    each = {keep: sample_mask(view, keep=keep, grow=0) for keep in (None, 1, 9)}
    assert [mask.kept for mask in each.values()] == [2, 1, 3] and each[1].parts == 3
    assert each[None].inside.sum() == 30 * 30 - 9 + 100 and not each[None].inside[0, 2, 50]
    assert not each[1].inside[0, 50, 50] and not each[1].inside[0, 16, 16]
    grown = sample_mask(view, keep=1, grow=2).inside[0]
    assert grown[16, 16] and grown[3, 20] and not grown[2, 20]
    assert sample_mask(view, below=100).brighter is False


@pytest.mark.parametrize(
    ("image", "chosen", "words"),
    [
        (np.full((9, 9), np.nan), {}, "holds no finite value"),
        (np.full((9, 9), 7.0), {}, "all its values are 7"),
        (np.eye(9), {"above": 2}, "nothing is above 2; its values are 0 to 1"),
        (np.eye(9), {"below": 2}, "everything is below 2"),
    ],
)
def test_all_or_nothing_is_refused(image: Any, chosen: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sample_mask(coarse_view(image.astype("float32")), **chosen)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["none.zarr", "m.zarr"], "no such file"),
        (["a.zarr", "m.zarr", "--above", "70000"], "nothing is above 70000"),
        (["a.zarr", "m.zarr", "--keep", "0"], "--keep 0: at least 1"),
        (["a.zarr", "m.zarr", "--level", "3"], "level 3 does not exist"),
        (["a.zarr", "m.zarr", "--t", "1"], "--t 1 does not exist"),
        (["a.zarr", "a.zarr", "--overwrite"], "is the input"),
        (["a.zarr", "there.zarr"], "exists; use --overwrite"),
        (["a.zarr", "pictured.zarr"], "pictured.zarr.png is not known to be Penstock's"),
    ],
)
def test_bad_input_begins_nothing(words: list[str], why: str, capsys) -> None:
    write("a.zarr", fluorescent(ball((8, 40, 40), 9)))
    write("there.zarr", np.ones((3, 4), "uint8"))
    Path("pictured.zarr.png").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    assert main(["mask", *words]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


@pytest.mark.slow
def test_a_mask_is_made_anew_over_the_one_before(capsys) -> None:
    write("a.zarr", fluorescent(ball((8, 40, 40), 9)))
    assert main(["mask", "a.zarr", "m.zarr"]) == 0
    assert main(["mask", "a.zarr", "m.zarr", "--overwrite", "--above", "500"]) == 0
    assert "above 500, as given" in capsys.readouterr().out
    assert Path("m.zarr.png").exists()
    write("line.zarr", fluorescent(ball((8, 40, 1), 9)))  # a plane one voxel wide has an outline
    assert main(["mask", "line.zarr", "n.zarr"]) == 0


@pytest.mark.slow
def test_a_view_takes_memory_for_itself_alone(monkeypatch) -> None:
    box = Box((0,) * 5, (1, 1, 16, 512, 512))
    sink = open_sink("a.zarr", domain=box, dtype=np.dtype("uint16"))
    sink.create()
    sink.write(box, np.full(box.shape, 1, "uint16"))
    monkeypatch.setattr(tissue, "_READ", 2**18)
    coarse_view("a.zarr")
    assert peak_of(lambda: coarse_view("a.zarr")) < 2**23  # a quarter of the array as float64


@pytest.mark.skipif(not MOUSE.exists(), reason="the shared data is absent")
@pytest.mark.slow
def test_a_mouse_brain() -> None:
    mask = sample_mask(coarse_view(str(MOUSE)))
    assert mask.brighter and 0.85 < mask.inside.mean() < 0.92
    corner, middle = mask.inside[:, :40, :60], mask.inside[:, 60:160, 60:200]
    assert corner.mean() < 0.02 and middle.mean() > 0.999
