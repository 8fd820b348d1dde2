"""A job in any parts, in any order, by any processes, cut off anywhere: one process's bytes."""

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.base import InferConfig, PenstockError, StageError, build
from penstock.cli import main
from penstock.cluster import UnfitWorker, WorkerLeaves
from penstock.data import OutputLock, indices
from penstock.inference import EndRequest, Job
from penstock.inference.opening import identity
from penstock.inference.planning import cuts
from penstock.inference.run_folder.folder import LogFile, folder_at
from penstock.inference.run_folder.journal import Journal, Prepared
from penstock.inference.sharing import on_worker as worker_side
from penstock.inference.sharing.on_worker import JobOrder, compute_share_of, count_share_of
from penstock.inference.stages import statistics
from penstock.inference.stages.beginning import begun
from penstock.inference.stages.pipeline import Pipeline, compute
from penstock.inference.stages.reading import wanted_bricks
from penstock.inference.stages.run import Run
from penstock.inference.stages.statistics import find_scalings
from penstock.inference.stages.summary import summaries_of
from penstock.inference.tiling.geometry import Brick, Geometry
from penstock.inference.tiling.parts import Parts

from ..geometries import geometries
from ..parameters import mainly
from ..preloaded import forked_workers, started
from .cluster_kit import HANGS, eventually
from .kit import Array, conv, values

VOLUME = np.random.default_rng(0).normal(900, 200, (21, 34, 40)).astype("float32")
KNOBS: dict[str, Any] = {
    "in_spec": VOLUME, "patch": 9, "overlap": 3, "block": 12, "devices": "cpu", "threads": 1,
    "normalize": "global", "head_kind": "intensity",
}  # fmt: skip


def in_parts(seam: str, part: tuple[int, ...] | None, draw: random.Random) -> Array:
    """What a job writes whose parts have a shape and are done in a random order, some twice."""
    source = VOLUME[:14, :22, :20]
    out = np.zeros_like(source)
    given = KNOBS | {"in_spec": source, "out_spec": out, "model_type": conv(), "seam_mode": seam}
    job = Job(build(InferConfig, given), part)
    run = Run(job, Journal(None, {}), OutputLock())
    run.open_outputs()
    numbers = [*range(len(run.parts))]
    draw.shuffle(numbers)
    scalings = find_scalings(run)
    with run.at_work():
        for number in [*numbers, *numbers[:2]]:
            if number in numbers[:2]:  # as another process, which does not know that it was done
                run.journal.done.clear()
            compute(run, [number], scalings)
    return out


@pytest.mark.parametrize("seam", mainly(["trim", "blend"], 0))
def test_any_cut_into_parts_gives_the_bytes_of_one_process(seam: str, monkeypatch) -> None:
    monkeypatch.setattr(cuts, "BRICK_VOXELS", 20**3)
    draw = random.Random(2)
    alone = in_parts(seam, None, draw)
    for _ in range(2):
        part = tuple(12 * draw.randrange(1, 4) for _ in range(3))
        assert np.array_equal(in_parts(seam, part, draw), alone), part


@pytest.fixture
def place(tmp_path, here) -> Path:
    np.save("in.npy", VOLUME)
    return tmp_path


WORDS = ("--in-spec in.npy --patch 8 --overlap 3 --block 12 --chunks 12 --devices cpu --threads 1 "
         "--normalize none").split()  # fmt: skip


@pytest.mark.slow
def test_two_processes_that_do_the_same_part_at_once_write_its_bytes(place: Path) -> None:
    words = [*WORDS, "--model-type", "identity"]
    assert main(["infer", *words, "--out-spec", "alone.zarr"]) == 0
    words += ["--out-spec", "out.zarr"]
    assert main(["infer", *words, "--prepare", "--workers", "2", "--parts", "4"]) == 0
    (place / "a").mkdir(), (place / "b").mkdir()
    absolute = [str(place / word) if word in ("in.npy", "out.zarr") else word for word in words]
    both = [started(place / name, ["infer", *absolute, "--part", "1/2"]) for name in "ab"]
    for process in both:
        process.join()
        assert process.exitcode == 0
    assert main(["infer", *words, "--part", "2/2"]) == 0
    assert main(["infer", *words, "--finish"]) == 0
    assert np.array_equal(values("out.zarr"), values("alone.zarr"))


TWO_HEADS = """
from torch import nn

class Two(nn.Module):
    def forward(self, x):
        return {"half": x * 0.5, "large": (x > 900).int()}
"""


@pytest.mark.slow
def test_two_heads_go_into_two_stores_on_a_cluster_too(place: Path) -> None:
    pytest.importorskip("distributed")
    Path("two.py").write_text(TWO_HEADS)
    words = ["infer", *WORDS, "--model-type", "two.py:Two", "--head-kind", "half=intensity"]
    assert main([*words, "--out-spec", "half.zarr", "large.zarr"]) == 0
    with forked_workers():
        shared = ["--out-spec", "h.zarr", "l.zarr", "--cluster", "local:2"]
        assert main([*words, *shared]) == 0
    assert np.array_equal(values("h.zarr"), values("half.zarr"))
    assert np.array_equal(values("l.zarr"), values("large.zarr"))
    assert values("l.zarr").dtype == "int32"


class Removes(nn.Module):
    """Removes the output while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and x.device.type == "cpu":
            shutil.rmtree("out.zarr", ignore_errors=True)
        return x


def test_an_output_that_is_removed_while_a_job_runs_is_not_complete(place: Path) -> None:
    with pytest.raises(PenstockError, match=r"out\.zarr was removed while this run wrote it"):
        penstock.run_inference(
            "in.npy", "out.zarr", model=Removes(), patch=12, overlap=3, block=12, chunks=12,
            devices="cpu", normalize="none", head_kind="intensity",
        )  # fmt: skip
    assert main(["status", "out.zarr.penstock"]) == 3


@pytest.mark.parametrize("step", mainly(["--part 2/2", "--finish"], 0))
def test_an_output_removed_between_steps_is_not_made_anew(step: str, place: Path, capsys) -> None:
    words = (
        "infer --in-spec in.npy --out-spec out.zarr --model-type identity --patch 12 --overlap 3 "
    )
    words += "--block 12 --chunks 12 --devices cpu --normalize none"
    for done in ("--prepare --workers 2", "--part 1/2"):
        assert main([*words.split(), *done.split()]) == 0
    shutil.rmtree("out.zarr")
    assert main([*words.split(), *step.split()]) == 1
    assert "was removed after this run had begun" in capsys.readouterr().err
    assert not Path("out.zarr").exists()


Key = tuple[int, ...]


def least(geometry: Geometry, missing: Collection[Key]) -> Counter[tuple[int, Key]]:
    """The patches that a fresh plan of only the missing blocks would compute: in each part those
    that contribute to any of them."""
    needed = set()
    for volume, *block in missing:
        cell = geometry.blocks.cell(block)
        part = geometry.parts.touching(cell).start
        needed |= {(volume, part, index) for index in indices(geometry.patches_for(cell))}
    return Counter((volume, index) for volume, _, index in needed)


def patches_in(bricks: Iterable[Brick]) -> Counter[tuple[int, Key]]:
    return Counter((brick.volume, index) for brick in bricks for index in brick.each_patch())


def all_blocks(geometry: Geometry, volumes: int) -> list[Key]:
    return [
        (volume, *block) for volume in range(volumes) for block in indices(geometry.blocks.cells)
    ]


def job_of(geometry: Geometry, volumes: int) -> Job:
    """All that `wanted_bricks` looks at."""
    plan = SimpleNamespace(parts=Parts(geometry, volumes))
    return cast("Job", SimpleNamespace(geometry=geometry, plan=plan))


@given(geometries(), st.integers(1, 2), st.data())
def test_any_blocks_that_are_missing_take_their_patches_and_no_others(
    geometry: Geometry, volumes: int, data: st.DataObject
) -> None:
    blocks = all_blocks(geometry, volumes)
    written = data.draw(st.sets(st.sampled_from(blocks)))
    bricks = [*wanted_bricks(job_of(geometry, volumes), written)]
    assert patches_in(bricks) == least(geometry, {*blocks} - written)
    assert [brick.number for brick in bricks] == [*range(len(bricks))]
    for brick in bricks:
        assert brick.num_patches == len([*brick.each_patch()]) > 0
        assert brick.read == geometry.read_of(brick.patches)


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """The patches of each batch that is run."""
    count, before = list[int](), Pipeline._before_batch

    def counted(self: Pipeline, patches: int) -> None:
        count.append(patches)
        before(self, patches)

    monkeypatch.setattr(Pipeline, "_before_batch", counted)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("seam", [pytest.param("trim", marks=pytest.mark.slow), "blend"])
def test_a_run_that_was_cut_off_anywhere_computes_what_is_missing_and_no_more(
    seam: str, computed: list[int], tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(cuts, "BRICK_VOXELS", 20**3)
    draw = random.Random(0)
    source = np.random.default_rng(0).normal(900, 200, (13, 13, 28)).astype("float32")
    knobs: dict[str, Any] = {"patch": 8, "overlap": 3, "block": 12, "chunks": 12, "devices": "cpu",
                             "seam_mode": seam, "head_kind": "intensity",
                             "normalize": "none", "threads": 1}  # fmt: skip

    def run(**more: Any) -> penstock.Summary:
        out = tmp_path / "out.zarr"
        return penstock.run_inference(source, out, model=conv(), **knobs, **more)

    alone = np.zeros_like(source)
    penstock.run_inference(source, alone, model=conv(), **{**knobs, "chunks": None})
    whole, note, last = sum(computed), Journal.note, draw.randrange(1, 12)

    def killed(self: Journal, *args: Any) -> None:
        note(self, *args)
        if self.written == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "note", killed)
        run(writer_workers=1)
    journal = Journal.open(tmp_path / "out.zarr.penstock", {}, resume=True)
    lost = draw.sample(sorted(journal.done), min(2, len(journal.done) - 1))
    journal.folder.forget(journal.run, lost)  # type: ignore[union-attr]
    computed.clear()
    summary = run(resume=True)
    assert np.array_equal(values(tmp_path / "out.zarr")[0, 0], alone)
    geometry = geometry_of(tmp_path, source, **knobs)
    missing = {*all_blocks(geometry, 1)} - (journal.done - {*lost})
    assert summary.blocks_written == len(missing)
    assert sum(computed) == least(geometry, missing).total() <= whole


def geometry_of(place: Path, source: Array, **knobs: Any) -> Geometry:
    given_ = {"in_spec": source, "out_spec": place / "planned.zarr", "model_type": conv()}
    return Job(build(InferConfig, given_ | knobs)).geometry


Begin = Callable[..., JobOrder]
FOLDER = Path("out.zarr.penstock")


@pytest.fixture
def volume(here) -> Array:
    array = np.random.default_rng(0).normal(0, 1, (16, 32, 32)).astype("float32")
    array[-1, -1, -1] = 9
    np.save("in.npy", array)
    return array


@pytest.fixture(autouse=True)
def left(monkeypatch) -> Iterator[list[str]]:
    """Why a worker asked Dask to close it."""
    reasons: list[str] = []
    monkeypatch.setattr(worker_side, "close_after_item", reasons.append)
    yield reasons
    for kept in [*worker_side._KEPT.values()]:
        kept.close("the test")
    worker_side._KEPT.clear()


@pytest.fixture
def order(volume: Array) -> Iterator[Begin]:
    """Begins a job as a client does."""
    with contextlib.ExitStack() as clients:

        def begin(**knobs: Any) -> JobOrder:
            given = {"in_spec": "in.npy", "out_spec": "out.zarr", "model_type": "identity",
                     "patch": 8, "overlap": 2, "block": 16, "chunks": 16, "devices": "cpu",
                     "normalize": "none", "threads": 1, "cluster": "local:2", "workers": 2,
                     "parts": 4, "head_kind": "intensity"}  # fmt: skip
            job = Job(build(InferConfig, given | knobs))
            part = job.geometry.part
            journal, _ = clients.enter_context(begun(job, Prepared(part, 1)))
            for sink in job.sinks:
                sink.create()
            config = job.config.model_copy(update={"resume": True, "run_dir": FOLDER.absolute()})
            return JobOrder("topic", config, part, journal.run, 1)

        yield begin


@pytest.mark.slow
def test_a_worker_whose_stage_hangs_leaves_and_other_shares_are_not_judged_by_it(
    left: list[str], order: Begin, volume: Array
) -> None:
    Path("hangs.py").write_text(HANGS)
    Path("hangs").touch()
    given = order(model_type="hangs.py:net", stall_timeout=600)
    run = worker_side._kept(given).run
    run.watch.watchdog.clock = lambda: 1000.0 if Path("hung").exists() else 0.0
    with pytest.raises(StageError, match="no progress for 10 min"):
        for number in range(1, 5):
            compute_share_of((given, f"{number}/4"))
    assert left == ["a stage that hangs"]
    with pytest.raises(WorkerLeaves, match="a stage that hangs"):
        compute_share_of((given, "1/4"))
    run.watch.request = EndRequest()  # as if it did not leave: the thread still hangs
    compute(run, range(len(run.parts)), {})
    assert np.allclose(values("out.zarr")[0, 0], volume, atol=0.01)
    Path("hangs").unlink()


@pytest.mark.slow
def test_a_run_that_gets_no_share_is_closed_and_opened_again(order: Begin, monkeypatch) -> None:
    given = order()
    monkeypatch.setattr(worker_side, "IDLE_S", 0.05)
    compute_share_of((given, "1/4"))
    for _ in eventually(30):
        if not any(map(is_held, FOLDER.glob("done-*.log"))):
            break
    assert not worker_side._KEPT
    monkeypatch.setattr(worker_side, "IDLE_S", 60)
    compute_share_of((given, "2/4"))
    each = summaries_of(folder_at(FOLDER), "*-topic")
    assert len(each) == 2 and all(summary.blocks_written for summary in each.values())
    assert {log.name for log in FOLDER.glob("done-*.log")} == {f"done-{n}.log" for n in each}


def test_a_worker_reads_what_was_counted_in_a_round_once(order: Begin, monkeypatch) -> None:
    """Each share would read all that was counted before it."""
    given, read, merge = order(normalize="global"), [], statistics._merge

    def noted(packed: bytes | None, histograms: Any) -> None:
        read.append(packed)
        merge(packed, histograms)

    monkeypatch.setattr(statistics, "_merge", noted)
    complete = [count_share_of((given, f"{each}/2")) for each in (1, 2, 1, 2)]
    assert complete == [False, False, False, True], "float32 is counted in two rounds"
    compute_share_of((given, "1/4"))
    (summary,) = summaries_of(folder_at(FOLDER), "*-topic").values()
    assert summary.blocks_written > 0 and len(read) == 4


def is_held(log: Path) -> bool:
    """Whether a process, maybe this one, writes a log."""
    try:
        LogFile(log).close()
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("name", ["torch", "threads"])
def test_a_worker_of_another_maker_is_left_out(name: str, order: Begin, monkeypatch) -> None:
    given, ours = order(), identity.maker
    other = {"torch": "1.13.0", "threads": 7}[name]
    monkeypatch.setattr(identity, "maker", lambda *args: {**ours(*args), name: other})
    differs = f"had {name} .*, and here it is {other!r}; go on with"
    with pytest.raises(UnfitWorker, match=differs):
        compute_share_of((given, "1/4"))
    with pytest.raises(UnfitWorker, match=differs):
        worker_side.open_job((given.config, 1, ""))
