"""Objects of a decoder: each once, whatever blocks and workers, and those of the whole volume."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from penstock.base import LabelConfig, UsageError, build
from penstock.cli import main
from penstock.data import Box, Grid, open_source
from penstock.inference import Labelling, LabelSummary
from penstock.inference.objects.object_table import ends_at_planes
from penstock.reports.infer.report import report_of_labels

DECODER = """
import cc3d
import numpy as np
from scipy import ndimage

def nearest(scores):
    seeds = cc3d.connected_components(scores[0] > 0.45, connectivity=6)
    place = ndimage.distance_transform_edt(seeds == 0, return_distances=False, return_indices=True)
    return seeds[tuple(place)] * (scores[0] > 0)

def of_a_plane(scores):
    assert scores.ndim == 3
    return (scores[0] > 0).astype(int)

def narrow(scores):
    return np.zeros((1, 2, 3), int)

def with_floats(scores):
    return scores[0]

def middle(scores):
    labels = np.zeros(scores.shape[1:], np.uint8)
    at = scores.shape[-1] // 2
    labels[..., at - 3 : at + 3] = scores[0, ..., at - 3 : at + 3] > 0
    return labels


def leaving(scores):
    raise SystemExit(3)

def raising(scores):
    raise ValueError("a decoder of the user's")
"""

NET = """
from torch import nn

class Distances(nn.Module):
    def forward(self, patch):
        return -4 * patch

def distances():
    return Distances()
"""


def spheres(side: int, count: int, seed: int, axes: int = 3) -> tuple[NDArray[Any], NDArray[Any]]:
    """Spheres of radius 4 to 7 that touch, or discs: their numbers, and how deep each voxel lies
    in one."""
    rng = np.random.default_rng(seed)
    truth, depth = np.zeros((side,) * axes, np.int32), np.full((side,) * axes, -1.0, np.float32)
    number = 0
    for _ in range(4 * count):
        centre, radius = rng.uniform(0, side, axes), rng.uniform(4, 7)
        low = np.maximum(0, np.floor(centre - radius - 1)).astype(int)
        high = np.minimum(side, np.ceil(centre + radius + 2)).astype(int)
        box = tuple(map(slice, low, high))
        places = np.moveaxis(np.indices(high - low), 0, -1) + low
        deep = 1 - np.linalg.norm(places - centre, axis=-1) / radius
        if (depth[box][deep > 0.35] > 0).any():  # touching, and not one in another
            continue
        number += 1
        nearer = deep > depth[box]
        depth[box] = np.where(nearer, deep, depth[box])
        truth[box][nearer & (deep > 0)] = number
        if number == count:
            break
    return truth, depth


def f1(a: NDArray[Any], b: NDArray[Any], least: float) -> float:
    """The F1 of objects that match at an IoU."""
    both, width = (a > 0) & (b > 0), int(b.max()) + 1
    keys, shared = np.unique(a[both].astype(np.int64) * width + b[both], return_counts=True)
    here, there = np.divmod(keys, width)
    union = np.bincount(a.ravel())[here] + np.bincount(b.ravel())[there] - shared
    objects = sum(len(np.unique(each[each > 0])) for each in (a, b))
    return float(2 * (shared > least * union).sum() / objects)


def decode(folder: Path, scores: NDArray[Any], **knobs: Any) -> tuple[NDArray[Any], LabelSummary]:
    (folder / "mine.py").write_text(DECODER)
    place, out = folder / "in.npy", folder / "out.zarr"
    if not place.exists():
        np.save(place, scores)
    asked: dict[str, Any] = {
        "in_spec": str(place), "out_spec": str(out), "overwrite": True, "workers": 1,
        "decoder": f"{folder / 'mine.py'}:nearest", "object_size": (15,), "levels": "none",
        "chunks": (16, 16, 16), **knobs,
    }  # fmt: skip
    summary = Labelling(build(LabelConfig, asked)).run()
    labels = open_source(str(out))
    return labels.read(labels.domain)[0, 0], summary


def check_tiled(folder: Path, side: int, count: int, blocks: Iterable[int], **knobs: Any) -> None:
    truth, scores = spheres(side, count, 1)
    whole, _ = decode(folder, scores, instance_block=(side,), **knobs)
    assert f1(truth, whole, 0.5) > 0.95
    for block in blocks:
        tiled, summary = decode(folder, scores, instance_block=(block,), **knobs)
        assert summary.joined is not None and summary.joined > 0
        assert np.array_equal(tiled > 0, whole > 0)
        for least in (0.5, 0.75, 0.9):
            alike = f1(truth, whole, least), f1(truth, tiled, least)
            assert abs(alike[0] - alike[1]) <= 0.002, (block, least, alike)
        places = [np.flatnonzero(tiled == n)[0] for n in range(1, min(summary.objects, 50) + 1)]
        assert places == sorted(places)


def test_objects_of_blocks_are_those_of_the_whole(tmp_path) -> None:
    check_tiled(tmp_path, 48, 30, [24])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "count"), [(100, 300), pytest.param(250, 5000, marks=pytest.mark.long)]
)
def test_watershed_of_blocks_is_that_of_the_whole(side: int, count: int, tmp_path) -> None:
    pytest.importorskip("skimage")
    knobs = {"decoder": "watershed", "threshold": 0.0, "seed_threshold": 0.45}
    check_tiled(tmp_path, side, count, [45, 30], **knobs)


@pytest.mark.slow
def test_no_object_of_many_is_lost(tmp_path) -> None:
    """The decoder gives pieces at the edges of views to the wrong object."""
    check_tiled(tmp_path, 120, 550, [45])


@pytest.mark.slow
def test_blocks_and_workers_change_no_byte(tmp_path) -> None:
    _, scores = spheres(60, 60, 2)
    one, _ = decode(tmp_path, scores, instance_block=(20,))
    for workers, block in ((1, (16, 32, 64)), (3, (64, 16, 16))):
        more, _ = decode(tmp_path, scores, instance_block=(20,), workers=workers, block=block)
        np.testing.assert_array_equal(one, more)


@pytest.mark.parametrize("rule", ["iou", "overlap", "touch", "owner"])
def test_an_object_in_two_blocks_is_one(tmp_path, rule: str) -> None:
    """Its centroid lies at the plane between them. By ``owner`` it is one as one view owns it."""
    scores = np.full((10, 10, 40), -1, np.float32)
    scores[3:7, 3:7, 16:24] = 1
    labels, summary = decode(
        tmp_path, scores, object_size=(10,), instance_block=(20,), join_rule=rule
    )
    assert summary.objects == 1 and np.array_equal(labels > 0, scores > 0)


@pytest.mark.slow
def test_what_the_owner_sees_as_two_stays_two(tmp_path) -> None:
    """Pieces at the edges of other blocks are alike to both, and would join them."""
    truth, scores = spheres(36, 14, 38, 2)
    knobs = {"axes": "cyx", "object_size": (10,)}
    whole, _ = decode(tmp_path, scores[None], instance_block=(36,), **knobs)
    tiled, _ = decode(tmp_path, scores[None], instance_block=(18,), **knobs)
    assert tiled.max() == whole.max() == len(np.unique(truth)) - 1


def test_an_object_larger_than_the_halo_is_told(tmp_path) -> None:
    """It is listed and cut out, and it ends where its blocks do."""
    scores = np.full((6, 6, 60), -1, np.float32)
    scores[2:4, 2:4, 2:58] = 1
    labels, summary = decode(tmp_path, scores, object_size=(8,), instance_block=(20,))
    assert summary.cut is not None and summary.cut >= 1
    assert labels.max() == summary.objects
    assert summary.ends is not None and summary.ends.planes == 6  # 20 and 40, 8 on either side
    assert summary.ends.at_planes > summary.ends.at_controls == 0 and summary.ends.ratio is None
    rows = (tmp_path / "out.zarr.penstock" / "ambiguous.csv").read_text().splitlines()
    assert summary.ambiguous == len(rows) - 1 == len(summary.cutouts) > 0
    worst = summary.cutouts[0]
    assert worst.body.sum() == (labels == worst.number).any(axis=0).sum()
    report = report_of_labels(tmp_path / "out.zarr.penstock")
    assert f"the halo cuts {summary.cut}," in " ".join(report.verdict)
    assert len(report.chapters[0].sections[0].table) == len(rows)
    said = (tmp_path / "out.zarr.penstock" / "summary.json").read_bytes()
    more = {"object_size": (8,), "instance_block": (20,), "overwrite": False, "resume": True}
    _, again = decode(tmp_path, scores, **more)  # what is complete says the same
    assert again == replace(summary, cutouts=())
    assert (tmp_path / "out.zarr.penstock" / "summary.json").read_bytes() == said


@pytest.mark.slow
def test_a_chain_of_merges_is_ambiguous(tmp_path) -> None:
    """No view sees more of it than an object that fits, and more views see it."""
    scores = np.full((6, 6, 80), -1, np.float32)
    for stop, ambiguous in ((80, 1), (20, 0)):
        scores[2:4, 2:4] = -1
        scores[2:4, 2:4, :stop] = 1
        np.save(tmp_path / "in.npy", scores)
        _, summary = decode(
            tmp_path, scores, object_size=(6,), instance_block=(4,), join_rule="touch",
            decoder=f"{tmp_path / 'mine.py'}:middle", table=tmp_path / "t.csv",
        )  # fmt: skip
        assert (summary.objects, summary.ambiguous) == (1, ambiguous)
        rows = (tmp_path / "t.csv").read_text().splitlines()
        assert rows[1].endswith(("false", "true")[ambiguous])
        assert summary.largest == (1,) * ambiguous == tuple(c.number for c in summary.cutouts)


def test_ends_are_counted_at_planes_and_between() -> None:
    low = np.array([[0, 0, 4], [0, 0, 5], [0, 0, 10]])
    measures = {"low": low, "high": low + 5}  # 4 to 9, 5 to 10, 10 to 15, of 20 voxels along x
    grid = Grid(Box((0,) * 5, (1, 1, 9, 9, 20)), (1, 1, 9, 9, 10))
    ends = ends_at_planes(measures, grid, (0, 0, 0))
    assert ends == (1, 2, 2, 2) and ends.ratio == 2  # at 10; at 5 and 15
    sentence = ends.sentence()
    assert (
        sentence.startswith("2 sides of objects at 1 plane of blocks, 2 at")
        and "2.00 times" in sentence
    )
    assert ends._replace(at_planes=0).sentence().endswith("between: blocks cut nothing")
    assert ends._replace(at_controls=0).sentence().endswith("as none ends between")
    assert ends._replace(at_planes=0, at_controls=0).sentence().endswith("0 at 2 planes between")


def test_a_plane_goes_to_the_decoder_as_a_plane(tmp_path) -> None:
    scores = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    labels, _ = decode(
        tmp_path, scores, decoder=f"{tmp_path / 'mine.py'}:of_a_plane", object_size=(4,),
        join_rule="touch",
    )  # fmt: skip
    assert np.array_equal(labels[0] > 0, scores > 0)


def inferred(folder: Path, *words: str, out: str = "cells.zarr") -> int:
    scores = np.random.default_rng(4).random((12, 13, 14)).astype(np.float32)
    if not (folder / "in.npy").exists():
        np.save(folder / "in.npy", scores)
    plain = "--normalize none --overlap 0 --devices cpu"
    model = [] if "--model" in words else ["--model", "identity", "--head-kind", "scores"]
    place = [str(folder / "in.npy"), str(folder / out)]
    return main(["infer", *place, *plain.split(), *model, *words])


@pytest.mark.slow
def test_infer_writes_objects_and_a_table(tmp_path, capsys) -> None:
    table = str(tmp_path / "cells.csv")
    words = ["--instances", "components", "--threshold", "0.6", "--table", table]
    assert inferred(tmp_path, *words) == 0
    labels = open_source(str(tmp_path / "cells.zarr"))
    wanted, count = ndimage.label(np.load(tmp_path / "in.npy") > 0.6)
    np.testing.assert_array_equal(labels.read(labels.domain)[0, 0], wanted)
    assert len(Path(table).read_text().splitlines()) == count + 1
    assert not [*tmp_path.glob("*.scores.zarr*"), *tmp_path.glob("*.labels")]
    assert (tmp_path / "cells.zarr.penstock" / "summary.json").is_file()
    (rest := tmp_path / "cells.zarr.scores.zarr" / "0").mkdir(parents=True)
    (rest / "zarr.json").touch()  # of a start that was killed as it removed it
    capsys.readouterr()
    assert inferred(tmp_path, *words, "--resume") == 0
    assert capsys.readouterr().out == "Complete: all objects are written\n"
    for other in (["--threshold", "0.7"], ["--min-size", "2"], ["--tta", "flips"]):
        assert inferred(tmp_path, *words, "--resume", *other) == 2
        assert "go on with the same, or --overwrite" in capsys.readouterr().err
    assert not [*tmp_path.glob("*.scores.zarr*")]


@pytest.mark.slow
def test_steps_of_an_array_write_the_objects_of_one_process(tmp_path, capsys) -> None:
    """Scores are the first round. A step that comes twice changes nothing."""
    contents = []
    for name in ("one", "many"):
        folder = tmp_path / name
        folder.mkdir()
        table = str(folder / "cells.csv")
        words = ["--instances", "components", "--threshold", "0.6", "--table", table]
        words += ["--patch", "8", "--block", "8", "--chunks", "8"]

        def step(*more: str, folder: Path = folder, words: list[str] = words) -> tuple[int, str]:
            return inferred(folder, *words, *more), "".join(capsys.readouterr())

        if name == "one":
            assert step()[0] == 0
        else:
            assert step("--prepare", "--workers", "2")[0] == 0
            assert step("--finish")[0] == 3
            for said in (
                "All blocks are inferred",
                "All blocks are counted",
                "Complete: all blocks",
            ):
                for part in ("2/2", "1/2", "1/2"):
                    assert step("--part", part)[0] == 0
                code, first = step("--finish")
                assert code == 0 and said in first
                code, again = step("--finish")
                assert code == (0 if "Complete" in said else 3), again
            assert "Complete: all objects are written" in step("--finish")[1]
        assert not [*folder.glob("*.scores.zarr*")]
        files = [Path(table), *(folder / "cells.zarr").rglob("*")]
        contents.append({f.relative_to(folder): f.read_bytes() for f in files if f.is_file()})
    assert contents[0] == contents[1]


def test_outputs_of_an_unknown_kind_go_to_the_decoder_as_they_are(tmp_path) -> None:
    (tmp_path / "net.py").write_text(NET)
    words = f"--instances components --threshold -2 --model {tmp_path}/net.py:distances --patch 8"
    assert inferred(tmp_path, *words.split()) == 0
    labels = open_source(str(tmp_path / "cells.zarr"))
    wanted, _ = ndimage.label(np.load(tmp_path / "in.npy") < 0.5)
    np.testing.assert_array_equal(labels.read(labels.domain)[0, 0], wanted)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--threshold 0.5", "--threshold has no effect without --instances"),
        ("--instances components", "needs --threshold X"),
        ("--instances watershed --threshold 1", "needs --threshold X and --seed-threshold Y"),
        ("--instances components --threshold 1 --part 1/2", "no run is prepared in"),
        ("--instances components --threshold 1 --connectivity 8", "does not fit the axes z y x"),
        ("--instances components --threshold 1 --chunks 4 --shards 6", "not multiples of chunks"),
        ("--instances components --threshold 1 --join 0.3", "--join has no effect"),
    ],
)
def test_impossible_instances_are_refused(tmp_path, words: str, sentence: str, capsys) -> None:
    assert inferred(tmp_path, *words.split()) == 2
    assert sentence in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["in.npy"]


def test_an_output_that_cannot_be_written_is_refused_before_scores_are_computed(
    tmp_path, capsys
) -> None:
    words = ["--instances", "components", "--threshold", "0.6"]
    for out, sentence in (("cells.h5", "cannot write .h5"), ("cells.tif", "writes an OME-Zarr")):
        assert inferred(tmp_path, *words, out=out) == 2
        assert sentence in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["in.npy"]


@pytest.mark.slow
def test_scores_of_an_earlier_start_stay(tmp_path, capsys) -> None:
    (tmp_path / "mine.py").write_text(DECODER)
    words = ["--instances", f"{tmp_path / 'mine.py'}:raising", "--object-size", "4"]
    assert inferred(tmp_path, *words) == 2
    assert "a decoder of the user's" in capsys.readouterr().err
    words[1] = f"{tmp_path / 'mine.py'}:nearest"
    assert inferred(tmp_path, *words) == 2
    said = capsys.readouterr().err
    assert "holds the scores of an earlier start" in said and "penstock label" in said
    scores = str(tmp_path / "cells.zarr.scores.zarr")
    asked = ["label", scores, str(tmp_path / "cells.zarr"), "--decoder", *words[1:]]
    assert main(asked) == 0


def test_what_the_input_lacks_is_in_no_object(tmp_path) -> None:
    scores = np.random.default_rng(4).random((12, 13, 14)).astype(np.float32)
    scores[3:6, 4:9, 2:] = np.nan
    np.save(tmp_path / "in.npy", scores)
    assert inferred(tmp_path, "--instances", "components", "--threshold", "0.6") == 0
    labels = open_source(str(tmp_path / "cells.zarr"))
    wanted, _ = ndimage.label(scores > 0.6)
    np.testing.assert_array_equal(labels.read(labels.domain)[0, 0], wanted)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"decoder": "mine.py:narrow"}, "gives int64 of shape .1, 2, 3."),
        ({"decoder": "mine.py:with_floats"}, "gives float32 of shape"),
        ({"decoder": "mine.py:raising"}, "ValueError: a decoder of the user's .*mine.py, line"),
        ({"decoder": "mine.py:leaving"}, "SystemExit: 3 .*mine.py, line"),
        ({"decoder": "mine.py:absent"}, "mine.py has no attribute 'absent'"),
        ({"decoder": "not.py:there"}, "there is no file"),
        ({"decoder": "voronoi"}, "give components, watershed, .*, affinities or FILE.py:FUNCTION"),
        ({"decoder": "watershed"}, "needs --threshold X and --seed-threshold Y"),
        ({"object_size": None}, "needs --object-size N"),
        ({"fill_holes": True}, "--fill-holes has no effect with --decoder"),
        ({"threshold": 0.5}, "--threshold has no effect with --decoder .*mine.py:nearest"),
    ],
)
def test_a_decoder_that_does_not_fit_is_refused(tmp_path, here, knobs, sentence) -> None:
    with pytest.raises(UsageError, match=sentence):
        decode(tmp_path, np.zeros((4, 4, 4), np.float32), **knobs)
    assert not (tmp_path / "out.zarr").exists()


def test_scores_that_are_nan_are_refused(tmp_path) -> None:
    scores = np.ones((4, 4, 9), np.float32)
    scores[..., 4] = np.nan
    with pytest.raises(UsageError, match="is NaN; --nan-background takes it for background"):
        decode(tmp_path, scores)
    labels, summary = decode(tmp_path, scores, nan_background=True)
    assert summary.objects == 2 and np.array_equal(labels > 0, ~np.isnan(scores))
