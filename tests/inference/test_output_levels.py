"""The levels of an output: the same whoever made the blocks, and in how many goes."""

import contextlib
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base import InferConfig, from_flags
from penstock.base.errors import Incomplete, StageError, UsageError
from penstock.cli import main, parser_of
from penstock.data import (
    Grid,
    LevelBelow,
    OutputLock,
    add_levels,
    open_source,
    open_written,
    reduced,
)
from penstock.data.stores import pyramid
from penstock.data.stores.in_memory import MemorySink
from penstock.inference.opening import outputs
from penstock.inference.opening.job import Job
from penstock.inference.run_folder.journal import Journal
from penstock.inference.stages import output_levels
from penstock.inference.stages.beginning import begun
from penstock.inference.stages.output_levels import FirstLevel, completed
from penstock.inference.stages.pipeline import compute
from penstock.inference.stages.run import Run

from ..parameters import mainly
from .kit import Array

pytest.importorskip("tensorstore")
VOLUME = np.random.default_rng(0).integers(0, 4000, (6, 270, 40), "uint16")
WORDS = "--in-spec in.npy --model-type identity --normalize none --devices cpu".split()
WORDS += "--patch 8 64 48 --overlap 2 --chunks 4 64 64 --block 8 128 128".split()
WORDS += ["--head-kind", "intensity"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", VOLUME)


def infer(out: str, *more: str) -> int:
    return main(["infer", *WORDS, "--out-spec", out, *more])


def levels(path: str) -> list[Array]:
    """All levels of an image."""
    read: list[Array] = []
    while True:
        try:
            source = open_source(path, level=len(read))
        except UsageError:
            return read
        read.append(source.read(source.domain)[0, 0])


def check(path: str, count: int, rule: Any = "mean") -> None:
    """Each level is that of the one above, by the whole array."""
    read = levels(path)
    assert len(read) == count
    for above, below in itertools.pairwise(read):
        assert (below == reduced(above, (2, 2, 2), rule)).all()


def test_an_image_gets_levels(capsys) -> None:
    assert infer("a.zarr") == 0 and infer("b.zarr", "--levels", "3") == 0
    assert "Levels: 1 level below a.zarr, in " in capsys.readouterr().out
    check("a.zarr", 2)
    check("b.zarr", 3)
    assert infer("c.zarr", "--levels", "none") == 0 and len(levels("c.zarr")) == 1
    assert infer("d.n5") == 0 and len(levels("d.n5")) == 1
    assert infer("e.zarr", "--levels", "0") == 2


@pytest.mark.parametrize(
    ("blocks", "room", "later"),
    mainly(
        [
            (["--chunks", "4", "64", "64", "--block", "8", "128", "128"], 2**27, False),
            (["--chunks", "3", "27", "20", "--block", "6", "54", "20"], 2**27, False),
            (
                ["--chunks", "3", "15", "20", "--block", "3", "45", "20"],
                2**27,
                True,
            ),  # not in pairs
            (["--chunks", "4", "64", "64", "--block", "4", "64", "64"], 1000, True),
        ],
        1,
        2,
        3,
    ),
)
def test_the_first_level_is_made_of_blocks_as_they_come(blocks, room, later, monkeypatch) -> None:
    """What does not line up with blocks, or has no room, is made at the end."""
    made, make = [], pyramid._make

    def noted(above: Any, halved: Any, sink: Any, rule: Any, cell: Any) -> int:
        made.append(cell)
        return make(above, halved, sink, rule, cell)

    monkeypatch.setattr(pyramid, "_make", noted)
    monkeypatch.setattr(outputs, "_MOST_LEVEL_BYTES", room)
    assert infer("a.zarr", *blocks, "--patch", "3", "45", "20") == 0
    check("a.zarr", 2)
    assert bool(made) == later


@pytest.mark.parametrize("room", [8, 0])
def test_nothing_is_kept_of_cells_that_are_whole_or_have_no_room(room: int) -> None:
    image, below = np.zeros((1, 1, 2, 2, 80), "uint8"), np.zeros((1, 1, 1, 1, 40), "uint8")
    above, sink = (MemorySink("", each, each.dtype, "") for each in (image, below))
    sink.write_grid = (1, 1, 1, 1, 2)  # of two blocks
    halved = LevelBelow(below.shape, (1, 1, 2, 2, 2), (1, 1, 2, 2, 2))
    level = FirstLevel(above, halved, sink, "mean", room)
    for box in Grid(above.domain, (1, 1, 2, 2, 2)):
        level.add(box, np.ones(box.shape, "uint8"), sink.write)
    assert below.all() if room else not below.any()
    assert not level._missing and not level._open, "a volume may have a thousand million cells"


def test_a_share_that_is_done_again_leaves_no_hole_in_a_level(monkeypatch) -> None:
    """Its blocks go into the level once more, and must not pass for others of a cell."""
    note, calls = Journal.note, itertools.count()

    def fails_once(*words: Any) -> None:
        if next(calls) == 1:
            raise OSError("of the second block")
        note(*words)

    monkeypatch.setattr(Journal, "note", fails_once)
    more = "--block 4 64 64 --out-spec a.zarr --writer-workers 1".split()
    args = parser_of(["infer"]).parse_args(["infer", *WORDS, *more])
    job = Job(from_flags(InferConfig, args))
    with begun(job) as (journal, lock):
        run = Run(job, journal, lock)
        run.open_outputs()
        with run.at_work():
            with pytest.raises(StageError, match="of the second block"):
                compute(run, range(len(run.parts)), {})
            compute(run, range(len(run.parts)), {})
        completed(job, journal, lock, run.watch.summary(), run.request)
    check("a.zarr", 2)


def shown(path: str) -> list[dict[str, Any]]:
    """The channels of a group as viewers show them; none for labels."""
    ome = json.loads(Path(path, "zarr.json").read_text())["attributes"]["ome"]
    return ome.get("omero", {}).get("channels", [])


@pytest.mark.slow
def test_channels_get_windows_by_their_values() -> None:
    """Whoever wrote the blocks, and of whatever size; those of the input stay, labels have none."""
    assert infer("a.zarr") == 0
    (channel,) = shown("a.zarr")
    low, high = np.percentile(levels("a.zarr")[-1], (0.5, 99.8))
    right = {"min": 0, "max": 65535, "start": int(low), "end": -int(-high // 1)}
    assert channel == {"color": "FFFFFF", "active": True, "window": right}
    block = ["--block", "16", "64", "64"]
    for step in ("--prepare --workers 2", "--part 1/2", "--part 2/2"):
        assert infer("b.zarr", *block, *step.split()) == 0
    assert not shown("b.zarr") and infer("b.zarr", *block, "--finish") == 0
    assert shown("b.zarr") == [channel]
    np.save("in.npy", VOLUME // 2)
    assert infer("b.zarr", "--in-spec", "a.zarr", "--overwrite") == 0 and shown("b.zarr") == [
        channel
    ]
    assert infer("c.zarr", "--head-kind", "labels", "--out-dtype", "uint16") == 0
    assert not shown("c.zarr")


def test_a_run_that_begins_looks_for_no_levels(monkeypatch) -> None:
    """To take them away lists the store, which not everybody may do."""
    monkeypatch.setattr(pyramid, "_remove", interrupt)
    assert infer("a.zarr") == 0
    check("a.zarr", 2)


def test_a_level_that_lost_a_chunk_is_repaired(capsys) -> None:
    assert infer("a.zarr", "--levels", "3") == 0
    Path("a.zarr/1/c/0/0/0").unlink()
    assert main(["verify", "a.zarr"]) == 1
    assert "penstock repair a.zarr makes all levels anew" in capsys.readouterr().out
    with contextlib.closing(OutputLock.take([open_written("a.zarr", "")], "another")):
        assert main(["repair", "a.zarr", "--take-over"]) == 2
    assert "is writing it for run another" in capsys.readouterr().err
    assert main(["repair", "a.zarr"]) == 0 and main(["verify", "a.zarr"]) == 0
    check("a.zarr", 3)
    shutil.rmtree("a.zarr/1")
    assert main(["verify", "a.zarr"]) == 1
    assert "Level 1 of a.zarr is gone" in capsys.readouterr().out
    assert main(["repair", "a.zarr"]) == 0
    check("a.zarr", 3)
    assert main(["repair", "a.zarr"]) == 0
    assert "Nothing is to be repaired" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["0/c/0/0/0", "1/c/0/0/0"])
def test_a_repair_takes_over_an_output_that_was_never_released(lost: str, capsys) -> None:
    assert infer("a.zarr") == 0
    Path("a.zarr", lost).write_bytes(b"damaged")
    OutputLock.take([open_written("a.zarr", "")], "another").hand_over()
    assert main(["repair", "a.zarr"]) == 2
    assert "--take-over takes the output" in capsys.readouterr().err
    assert main(["repair", "a.zarr", "--take-over"]) == 0 == main(["verify", "a.zarr"])
    check("a.zarr", 2)


def test_levels_of_an_output_that_only_the_run_names_are_not_written(capsys) -> None:
    Path("heads.py").write_text("def net():\n    return lambda x: {'a': x, 'b': 2 * x}\n")
    assert infer("a.zarr", "b.zarr", "--model-type", "heads.py:net") == 0
    Path("b.zarr/1/c/0/0/0").unlink()
    before = {path for path in Path("b.zarr").rglob("*") if path.is_file()}
    assert main(["repair", "a.zarr"]) == 2
    assert "name all of them: a.zarr, b.zarr" in capsys.readouterr().err
    assert {path for path in Path("b.zarr").rglob("*") if path.is_file()} == before
    assert main(["repair", "a.zarr", "b.zarr"]) == 0
    check("b.zarr", 2)


@pytest.mark.slow
def test_a_plain_output_is_an_array_alone(capsys) -> None:
    assert infer("a.zarr", "--ome-zarr", "0.6") == 2
    assert "--ome-zarr '0.6': input should be '0.4' or '0.5'" in capsys.readouterr().err
    assert infer("a.zarr", "--plain", "--ome-zarr", "0.4") == 2
    assert infer("a.zarr", "--plain") == 0
    assert json.loads(Path("a.zarr/zarr.json").read_text())["dimension_names"] == ["z", "y", "x"]
    assert (levels("a.zarr")[0] == VOLUME).all() and main(["verify", "a.zarr"]) == 0
    assert infer("a.zarr", "--resume") == 0 and not Path("a.zarr/0").exists()
    assert infer("a.zarr", "--overwrite", "--ome-zarr", "0.4") == 0
    assert Path("a.zarr/.zgroup").exists()
    check("a.zarr", 2)
    assert infer("a.zarr", "--resume", "--plain") == 0 and not Path("a.zarr/zarr.json").exists()


def test_labels_are_never_averaged() -> None:
    np.save("in.npy", (VOLUME // 1000).astype("uint16"))
    assert infer("a.zarr", "--head-kind", "labels", "--out-dtype", "uint16") == 0
    check("a.zarr", 2, "mode")


@pytest.mark.slow
def test_elements_make_what_lies_in_their_blocks_and_the_end_the_rest(monkeypatch) -> None:
    made, make = [], pyramid._make
    monkeypatch.setattr(pyramid, "_make", lambda *words: (made.append(words[-1]), make(*words))[1])
    small = ["--chunks", "2", "64", "64", "--block", "2", "64", "64", "--levels", "3"]
    for step in ("--prepare --workers 2 --parts 2", "--part 1/2", "--part 2/2", "--part 2/2"):
        assert infer("one/a.zarr", *small, *step.split()) == 0
        assert len(levels("one/a.zarr")) == 1 and not made
    assert infer("one/a.zarr", *small, "--finish") == 0
    assert 2 < len(made) < 8, made
    check("one/a.zarr", 3)
    assert infer("two/a.zarr", *small) == 0
    files = [{file.relative_to(out): file.read_bytes() for file in Path(out).rglob("*")
              if file.is_file()} for out in ("one/a.zarr", "two/a.zarr")]  # fmt: skip
    assert files[0] == files[1]


def test_a_job_that_ends_among_levels_goes_on(monkeypatch, capsys) -> None:
    def asked_to_end() -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        return 1

    with monkeypatch.context() as patched:
        patched.setattr(output_levels, "usable_cores", asked_to_end)
        assert infer("a.zarr", "--levels", "3") == Incomplete.exit_code
    assert "levels are not, when SIGUSR1 ended the job" in capsys.readouterr().err
    assert len(levels("a.zarr")) == 1
    assert infer("a.zarr", "--levels", "3", "--resume") == 0
    check("a.zarr", 3)


@pytest.mark.slow
def test_levels_that_were_begun_of_other_blocks_are_made_anew() -> None:
    """A run is killed among its levels; then a chunk of a block is lost, and computed again."""
    assert infer("a.zarr", "--levels", "none") == 0
    chunk = max(Path("a.zarr/0/c").rglob("*"), key=lambda file: file.stat().st_size)
    right = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises(KeyboardInterrupt):
        add_levels("a.zarr", rule="mean", progress=interrupt)
    assert [*Path("a.zarr/1/c").rglob("*")] and len(levels("a.zarr")) == 1
    assert main(["verify", "a.zarr", "--forget"]) == 1
    assert infer("a.zarr", "--resume") == 0
    assert chunk.read_bytes() == right
    check("a.zarr", 2)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("version", mainly(["0.4", "0.5"], 1))
def test_an_output_among_the_labels_of_an_image_is_listed_there(version: str) -> None:
    models = pytest.importorskip("ome_zarr_models")
    zarr = pytest.importorskip("zarr")
    assert infer("image.ome.zarr") == 0
    if version == "0.4":
        like = zarr.open_group("old.zarr", mode="w", zarr_format=2)
        like.create_array("0", data=VOLUME, chunks=(4, 64, 64))
        (multiscale,) = dict(zarr.open_group("image.ome.zarr").attrs["ome"])["multiscales"]
        like.attrs["multiscales"] = [
            {**multiscale, "version": "0.4", "datasets": multiscale["datasets"][:1]}
        ]
    image = {"0.4": "old.zarr", "0.5": "image.ome.zarr"}[version]
    how = ["--head-kind", "labels", "--out-dtype", "uint16"]
    for name in ("cells", "nuclei"):
        words = ["infer", *WORDS, "--in-spec", image, "--out-spec", f"{image}/labels/{name}"]
        assert main([*words, *how]) == 0
    assert main([*words, *how, "--overwrite"]) == 0
    group = models.open_ome_zarr(zarr.open_group(f"{image}/labels/cells", mode="r"))
    assert "ImageLabel" in type(group).__name__
    attributes = zarr.open_group(f"{image}/labels", mode="r").attrs
    listed = attributes["labels"] if version == "0.4" else attributes["ome"]["labels"]
    assert listed == ["cells", "nuclei"]
    assert infer("elsewhere/labels/cells") == 0 and not list(
        Path("elsewhere/labels").glob("*.json")
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["mean", pytest.param("mode", marks=pytest.mark.slow)])
def test_an_array_that_is_no_image_gets_its_levels_beside_it(rule: str, capsys) -> None:
    before = Path("in.npy").read_bytes()
    assert main(["pyramid", "in.npy"]) == 2
    assert "penstock pyramid in.npy OUT.ome.zarr writes one of it" in capsys.readouterr().err
    words = ["pyramid", "in.npy", "a.zarr", "--rule", rule, "--levels", "3"]
    assert main(words) == 0 and main(words) == 2 and main([*words, "--resume"]) == 0
    assert (levels("a.zarr")[0] == VOLUME).all()
    check("a.zarr", 3, rule)
    assert Path("in.npy").read_bytes() == before


@pytest.mark.parametrize("kind", ["intensity", "labels"])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_all_digits_of_64_bits_are_converted(dtype: str, kind: str) -> None:
    """Numbers of segments are as large: a float64 holds 53 bits."""
    span = np.iinfo(dtype)
    ids = np.random.default_rng(0).integers(span.min, span.max, (3, 20, 20), dtype, endpoint=True)
    np.save("ids.npy", ids)
    assert main(["convert", "ids.npy", "ids.zarr", "--head-kind", kind]) == 0
    (written,) = levels("ids.zarr")
    assert written.dtype == dtype and (written == ids).all()


@pytest.mark.slow
def test_labels_stay_labels_when_they_are_converted() -> None:
    """Also without levels; and those of others, which say so by ``image-label``."""
    np.save("in.npy", (VOLUME // 1000).astype("uint16"))
    words = ["--levels", "none", "--head-kind"]
    of_input = "--model identity --normalize none --devices cpu".split()
    assert main(["convert", "in.npy", "one.zarr", *words, "labels"]) == 0
    assert main(["convert", "one.zarr", "other.zarr"]) == 0
    assert main(["infer", "one.zarr", "a.zarr", *of_input]) == 0
    check("other.zarr", 2, "mode")
    check("a.zarr", 2, "mode")
    assert (levels("a.zarr")[0] == levels("one.zarr")[0]).all()
    assert main(["convert", "other.zarr/0", "level.zarr"]) == 0
    check("level.zarr", 2, "mode")
    assert main(["convert", "in.npy", "theirs.zarr", *words, "intensity"]) == 0
    document = json.loads(Path("theirs.zarr/zarr.json").read_text())
    document["attributes"]["ome"]["image-label"] = {}
    Path("theirs.zarr/zarr.json").write_text(json.dumps(document))
    assert main(["pyramid", "theirs.zarr"]) == 0
    check("theirs.zarr", 2, "mode")
