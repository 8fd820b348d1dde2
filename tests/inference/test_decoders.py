"""The decoders that are built in: their own libraries' result on the whole, whatever the blocks."""

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from penstock.base import LabelConfig, UsageError, build
from penstock.inference.objects import label_job
from penstock.inference.objects.decoders import check_decoder

from .test_instances import decode, f1, spheres

OFFSETS = {2: "-1,0/0,-1/-3,0/0,-3/-3,3/3,3",
           3: "-1,0,0/0,-1,0/0,0,-1/-3,0,0/0,-3,0/0,0,-3/-5,0,0/0,-5,0/0,0,-5"}  # fmt: skip
NOISE = np.random.default_rng(5)


def affinities(truth: NDArray[Any], depth: NDArray[Any]) -> NDArray[Any]:
    """A network's scores: is this in an object, and is this neighbour in the same."""
    offsets = [tuple(map(int, each.split(","))) for each in OFFSETS[truth.ndim].split("/")]
    axes = tuple(range(truth.ndim))
    moved = [np.roll(truth, [-n for n in offset], axes) for offset in offsets]
    scores = np.stack([truth > 0, *((truth == each) & (truth > 0) for each in moved)])
    return (scores + NOISE.normal(0, 0.15, scores.shape)).astype(np.float32)


def flows(truth: NDArray[Any], depth: NDArray[Any]) -> NDArray[Any]:
    """A network's flows towards the centre, and the logit of an object."""
    places = np.indices(truth.shape).reshape(truth.ndim, -1)
    voxels = np.maximum(1, np.bincount(truth.ravel()))
    centres = [np.bincount(truth.ravel(), each) / voxels for each in places]
    ways = np.stack(centres, -1)[truth] - np.moveaxis(np.indices(truth.shape), 0, -1)
    ways = 5 * ways / np.maximum(1, np.linalg.norm(ways, axis=-1, keepdims=True))
    ways = np.where(truth[..., None] > 0, ways, 0) + NOISE.normal(0, 0.3, ways.shape)
    inside = np.where(truth > 0, 5, -5)[None]
    return np.concatenate([np.moveaxis(ways, -1, 0), inside]).astype(np.float32)


def stars(truth: NDArray[Any], depth: NDArray[Any]) -> NDArray[Any]:
    """A network's probability of a centre, and distances along 32 rays."""
    stardist = pytest.importorskip("stardist")
    if truth.ndim == 2:
        distances = stardist.star_dist(truth.astype(np.uint16), 32)
    else:
        distances = stardist.star_dist3D(truth.astype(np.uint16), stardist.Rays_GoldenSpiral(32))
    return np.concatenate([depth[None], np.moveaxis(distances, -1, 0)]).astype(np.float32)


def mutex_watershed(scores: NDArray[Any]) -> NDArray[Any]:
    """The whole by bioimage-cpp."""
    segmentation = pytest.importorskip("bioimage_cpp.segmentation")
    axes = scores.ndim - 1
    offsets = [tuple(map(int, each.split(","))) for each in OFFSETS[axes].split("/")]
    weights = np.concatenate([scores[1 : axes + 1], 1 - scores[axes + 1 :]])
    return np.asarray(segmentation.mutex_watershed(weights, offsets, axes, mask=scores[0] > 0.5))


def dynamics(scores: NDArray[Any]) -> NDArray[Any]:
    """The whole by cellpose."""
    from penstock.models import import_torchvision

    import_torchvision()
    compute = pytest.importorskip("cellpose.dynamics").compute_masks
    flat = scores.ndim == 3
    with pytest.importorskip("torch.sparse").check_sparse_tensor_invariants(False):
        masks = compute(scores[:-1], scores[-1], niter=60, do_3D=not flat, max_size_fraction=1.0)
    return np.asarray(masks)


def polygons(scores: NDArray[Any]) -> NDArray[Any]:
    """The whole by stardist."""
    stardist = pytest.importorskip("stardist")
    distances, shape = np.maximum(1e-3, np.moveaxis(scores[1:], 0, -1)), scores.shape[1:]
    if scores.ndim == 3:
        points, likely, distances = stardist.non_maximum_suppression(
            distances, scores[0], prob_thresh=0.6, nms_thresh=0.3
        )
        return np.asarray(stardist.polygons_to_label(distances, points, shape, likely))
    rays = stardist.Rays_GoldenSpiral(32)
    points, likely, distances = stardist.non_maximum_suppression_3d(
        distances, scores[0], rays, prob_thresh=0.6, nms_thresh=0.3
    )
    return np.asarray(
        stardist.polyhedron_to_label(distances, points, rays, shape, likely, verbose=False)
    )


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "affinities": (affinities, mutex_watershed, {"threshold": 0.5}),
    "cellpose": (flows, dynamics, {"decoder_option": "niter=60"}),
    "stardist": (stars, polygons, {"threshold": 0.6, "decoder_option": ["nms=0.3"]}),
}


def of_kind(name: str, axes: int, **knobs: Any) -> dict[str, Any]:
    more = {"decoder_option": {"offsets": OFFSETS[axes]}} if name == "affinities" else {}
    return {"decoder": name, "axes": "czyx"[:1] + "zyx"[-axes:], **KINDS[name][2], **more, **knobs}


def check_kind(folder: Path, name: str, axes: int, side: int, count: int) -> None:
    """Blocks of three object sizes find what the library finds in the whole: of fewer than 500
    objects one may differ, as cellpose reads flows at places that depend on the input's size."""
    make, whole_by, _ = KINDS[name]
    truth, depth = spheres(side, count, 1, axes)
    scores = make(truth, depth)
    whole = whole_by(scores).astype(np.int64)
    whole[np.bincount(whole.ravel())[whole] < 5] = 0
    knobs = of_kind(name, axes, instance_block=(45,), min_size=5, chunks=(64,) * 3)
    tiled, summary = decode(folder, scores, **knobs)
    tiled = tiled.reshape(truth.shape)
    assert summary.joined is not None and summary.joined > count / 5
    assert f1(whole, tiled, 0.75) > 0.998
    assert f1(truth, whole, 0.5) > 0.95
    for least in (0.5, 0.75, 0.9):
        alike = f1(truth, whole, least), f1(truth, tiled, least)
        print(name, axes, truth.max(), summary.objects, least, *alike, f1(whole, tiled, least))
        assert abs(alike[0] - alike[1]) <= max(0.002, 1.01 / count), (least, alike)
    if side < 400:
        more = {"workers": 2, "block": (64, 64, 64)}
        again, _ = decode(folder, scores, **knobs, **more)
        np.testing.assert_array_equal(again.reshape(truth.shape), tiled)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_blocks_give_what_the_library_gives_for_the_whole(name: str, axes: int, tmp_path) -> None:
    check_kind(tmp_path, name, axes, *((230, 250) if axes == 2 else (80, 150)))


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_five_thousand_objects_are_those_of_the_whole(name: str, tmp_path) -> None:
    check_kind(tmp_path, name, 2, 1000, 5000)


def test_a_plane_of_affinities_is_that_of_the_library(tmp_path) -> None:
    scores = affinities(*spheres(60, 15, 1, 2))
    whole = mutex_watershed(scores)
    tiled, _ = decode(tmp_path, scores, **of_kind("affinities", 2, instance_block=(30,)))
    assert f1(whole, tiled[0], 0.9) == 1


def test_strides_of_other_axes_are_refused(tmp_path) -> None:
    pytest.importorskip("bioimage_cpp")
    knobs = of_kind("affinities", 2, threshold=None)
    knobs["decoder_option"] = {"offsets": "-1,0/0,-1", "strides": "1,2,2"}
    with pytest.raises(UsageError, match="strides for 3 axes, and the input has 2"):
        decode(tmp_path, np.zeros((2, 9, 9), np.float32), **knobs)


def refused(knobs: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        given = {"in_spec": "in", "out_spec": "out", "object_size": 9, **knobs}
        check_decoder(build(LabelConfig, given))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("stardist", [], "--decoder stardist needs --threshold X, the least probability"),
        ("stardist", ["nms=much"], "--decoder-option of stardist: nms 'much': input should be a"),
        ("stardist", ["size=3"], "--decoder-option of stardist: there is no setting 'size'"),
        ("affinities", [], "--decoder-option of affinities: offsets is required"),
        ("affinities", ["offsets"], "--decoder-option: 'offsets' is not KEY=VALUE"),
        ("affinities", ["offsets=-1,0/x"], "--decoder-option of affinities: offsets"),
        ("mine.py:mine", ["a=1"], "--decoder-option of mine.py:mine: there is no setting 'a'"),
    ],
)
def test_a_foreign_option_is_refused(name: str, options: list[str], sentence: str) -> None:
    assert refused({"decoder": name, "decoder_option": options}).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "library", "install"),
    [
        ("stardist", "stardist", "stardist is not installed; run: pip install stardist"),
        ("watershed", "skimage", "skimage is not installed; run: pip install 'penstock-dl[label]'"),
    ],
)
def test_a_missing_library_is_named(name: str, library: str, install: str, monkeypatch) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    seeds = {"seed_threshold": 0.6} if name == "watershed" else {}
    assert refused({"decoder": name, "threshold": 0.5, **seeds}) == install


@pytest.mark.slow
def test_a_stardist_model_says_rays_and_thresholds(tmp_path) -> None:
    """Its rays are looked up, and never evaluated as StarDist does it."""
    stardist = pytest.importorskip("stardist")
    truth, depth = spheres(40, 20, 1)
    rays = stardist.Rays_Octo(n_level=3)
    distances = stardist.star_dist3D(truth.astype(np.uint16), rays)
    scores = np.concatenate([depth[None], np.moveaxis(distances, -1, 0)]).astype(np.float32)
    config = {"rays_json": rays.to_json(), "grid": [1, 1, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "thresholds.json").write_text('{"prob": 0.6, "nms": 0.3}')
    knobs = {"decoder": "stardist", "axes": "czyx", "decoder_option": f"model={tmp_path}"}
    labels, _ = decode(tmp_path, scores, **knobs)
    assert f1(truth, labels, 0.5) > 0.9
    with pytest.raises(UsageError, match="the model has 66 rays, and the input distances along 33"):
        decode(tmp_path / "..", scores[:34], **knobs)
    config["rays_json"] = {"name": "print('evaluated')", "kwargs": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "there are no rays print('evaluated')" in refused(knobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_found_where_nothing_is(name: str, tmp_path) -> None:
    KINDS[name][1](KINDS[name][0](*spheres(40, 6, 1, 2)))  # skipped without its library
    for axes in (2, 3):
        channels = {"affinities": 1 + OFFSETS[axes].count("/") + 1, "cellpose": axes + 1}
        scores = np.full((channels.get(name, 9), *(30,) * axes), -1, np.float32)
        (folder := tmp_path / str(axes)).mkdir()
        labels, summary = decode(folder, scores, **of_kind(name, axes))
        assert summary.objects == 0 and not labels.any()


def nuclei(folder: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Images of the wheel of stardist (BSD), which pip fetches, or a reason to skip."""
    import tifffile

    words = "-m pip download --quiet --no-deps --only-binary :all: stardist==0.9.2 -d".split()
    done = subprocess.run([sys.executable, *words, folder], capture_output=True, text=True)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        pytest.skip(f"pip fetches no stardist: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        files = [wheel.read(f"stardist/data/images/{name}.tif") for name in names]
    return [np.asarray(tifffile.imread(io.BytesIO(file))) for file in files]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "size", "block"), [("2d", 40, 80), ("3d", 24, 32)])
@pytest.mark.parametrize("name", ["watershed", "stardist"])
def test_real_nuclei_of_blocks_are_those_of_the_whole(name, kind, size, block, tmp_path) -> None:
    """The scores are those of a network that knows the nuclei that people marked."""
    pytest.importorskip("skimage")
    (marked,) = nuclei(tmp_path, [f"mask{kind}"])
    truth = marked.astype(np.int32)
    border = ndimage.grey_dilation(truth, (3,) * truth.ndim) != truth
    depth = ndimage.distance_transform_edt((truth > 0) & ~border)
    deepest = ndimage.maximum(depth, truth, range(truth.max() + 1))
    depth = np.float32(depth / np.maximum(1, deepest)[truth] - (truth == 0))
    depth += NOISE.uniform(0, 1e-3, depth.shape).astype(np.float32)
    scores = stars(truth, depth) if name == "stardist" else depth[None]
    knobs = {"decoder": name, "threshold": 0.6, "object_size": (size,)}
    knobs |= {"axes": "c" + "zyx"[-truth.ndim :]}
    if name == "watershed":
        knobs |= {"threshold": -0.5, "seed_threshold": 0.6}
    whole, _ = decode(tmp_path, scores, **knobs, instance_block=(max(truth.shape),))
    tiled, summary = decode(tmp_path, scores, **knobs, instance_block=(block,))
    assert summary.joined is not None and summary.joined > 5
    for least in (0.5, 0.75, 0.9):
        alike = [f1(truth, each.reshape(truth.shape), least) for each in (whole, tiled)]
        print(name, kind, len(np.unique(truth)) - 1, summary.objects, least, *alike)
        assert abs(alike[0] - alike[1]) <= 0.002, (least, alike)


def test_a_decoder_is_told_apart_by_what_its_file_imports(tmp_path) -> None:
    """So a resumed labelling does not go on with other code."""
    mine, helper = tmp_path / "mine.py", tmp_path / "helper.py"
    mine.write_text("import helper\n\ndef of(scores):\n    return scores > helper.LEAST\n")
    facts = []
    for least in (1, 2):
        helper.write_text(f"LEAST = {least}\n")
        facts.append(label_job._decoder_facts(f"{mine}:of"))
    assert facts[0][0] == facts[1][0] == "mine.py:of" and facts[0][1] != facts[1][1]
    assert label_job._decoder_facts("watershed") == ["watershed"]
