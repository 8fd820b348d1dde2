"""Workers that spill what is on the borders of their parts, in one process and on a cluster."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import build
from penstock.base.errors import PenstockError, UsageError
from penstock.cli import main
from penstock.data.grid import indices
from penstock.inference.opening.job import Job
from penstock.inference.planning import cuts, scratch
from penstock.inference.planning.scratch import scratch_rate
from penstock.inference.planning.spill_room import lying
from penstock.inference.run_folder.ending import EndRequest
from penstock.inference.run_folder.journal import Journal, Prepared
from penstock.inference.sharing.station import open_task
from penstock.inference.sharing.statistics import shared_scalings
from penstock.inference.sharing.turns import Turns, turn_of
from penstock.inference.sharing.worker import Worker
from penstock.inference.stages.beginning import begun

from .kit import Array

SHAPE = (8, 16, 28)


@pytest.fixture(autouse=True)
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Array:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cuts, "BLOCK_VOXELS", 16**3)  # blocks of 2 x 2 x 2 patches
    monkeypatch.setattr(scratch, "PROBE_BYTES", 2**22)
    array = np.random.default_rng(0).normal(900, 200, SHAPE).astype("float32")
    np.save("in.npy", array)
    Path("net.py").write_text(NET)
    return array


NET = """
import torch
from torch import nn

def conv():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.GELU(), nn.Conv3d(4, 1, 3, padding=1)
    )
"""


def settings(seam: str = "blend", out: str = "out.zarr", **knobs: Any) -> InferConfig:
    given = {"in_spec": "in.npy", "out_spec": out, "model_type": "net.py:conv", "patch": 8,
             "overlap": 2, "block": 8, "chunks": 8, "devices": "cpu", "threads": 1, "batch": 2,
             "seam_mode": seam, "head_kind": "intensity", "normalize": "none"}  # fmt: skip
    return build(InferConfig, given | knobs)


def opened(parts: int = 4, **knobs: Any) -> Job:
    """A job whose parts spill."""
    shared = {"cluster": "local:2", "workers": 2, "parts": parts, "spill": "always"}
    return Job(settings(**shared | knobs))


@functools.cache
def alone(seam: str) -> Array:
    """What one process writes, of the one volume of these tests."""
    config = settings(seam, "alone.zarr")
    penstock.inference.run_job(Job(config))
    return values("alone.zarr")


def values(path: str) -> Array:
    source = penstock.open_source(path)
    return source.read(source.domain)


def run(job: Job, tasks: Iterable[int] | None = None) -> tuple[Worker, list[int]]:
    """Do tasks of a job, all of them by default, in the order in which a client gives them out."""
    done = []
    prepared = Prepared(job.plan.parts.step, 2, True)  # type: ignore[union-attr]
    with begun(job, prepared) as (journal, claims):
        worker = Worker(job, journal, claims, EndRequest())
        worker.watch.create_sinks()
        scalings = shared_scalings(job, journal, 2)
        given = Turns(worker.parts, None, lambda: False)
        with worker.at_work():
            for task in given if tasks is None else tasks:
                journal.refresh()
                done.append(task)
                turn = turn_of(task, worker.parts)
                if turn.kind == "part":
                    worker.compute([turn.part], scalings)
                else:
                    worker.join(turn.part, scalings, whole=turn.kind == "join")
                given.done(task)
    return worker, done


def files() -> list[Path]:
    return sorted(path for path in Path("out.zarr.penstock/spill").rglob("*") if path.is_file())


@pytest.mark.parametrize("seam", ["blend", "trim"])
def test_parts_that_spill_write_what_one_process_writes_and_compute_no_patch_twice(
    seam: str,
) -> None:
    job = opened(seam=seam)
    worker, tasks = run(job)
    assert len(tasks) == len(set(tasks)) > len(worker.parts)
    assert tasks != sorted(tasks), "parts are joined as soon as they can be"
    assert np.array_equal(values("out.zarr"), alone(seam))
    assert sum(worker.watch.patches_done) == job.geometry.cores.cells.size
    assert not files()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_run_that_was_cut_off_anywhere_goes_on_in_other_parts(seed: int) -> None:
    """Its pieces are of use whatever the parts; one that is damaged or lost is made again."""
    draw = random.Random(seed)
    job = opened()
    worker, _ = run(job, range(draw.randrange(3, 8)))
    before, spilled = sum(worker.watch.patches_done), files()
    for path in draw.sample(spilled, 2):
        path.write_bytes(path.read_bytes()[:-4] + b"lost")
    draw.choice(spilled).unlink()
    again = opened(parts=(8, 2, 30)[seed], resume=True)
    worker, _ = run(again)
    assert np.array_equal(values("out.zarr"), alone("blend"))
    if seed == 0:
        count = job.geometry.cores.cells.size
        assert sum(worker.watch.patches_done) < count - before / 2
    worker, _ = run(opened(resume=True))
    assert not sum(worker.watch.patches_done)


def test_what_can_be_joined_without_a_part_is_joined_and_the_rest_when_it_is_done() -> None:
    job = opened()
    parts = job.plan.parts
    assert parts is not None
    count, lost = len(parts), len(parts) // 2
    others = [number for number in range(count) if number != lost]
    spoilt = parts.targets(parts[lost])
    salvage = [2 * count + number for number in spoilt]
    worker, _ = run(job, [*others, *(count + n for n in others if n not in spoilt), *salvage])
    reached = {
        (0, *index)
        for block in parts.blocks(parts[lost])
        for index in indices(parts.geometry.units.touching(block.support))
    }
    every = {(0, *index) for index in indices(parts.geometry.units.cells)}
    journal = Journal.open(job.run_dir, {}, resume=True)
    assert journal.done == every - reached and reached
    pieces = worker.pieces
    assert pieces is not None
    assert {*map(pieces_of, files())} <= {".".join(map(str, key)) for key in reached}
    left = lying(pieces.folder, parts)
    assert sum(left.values()) == sum(path.stat().st_size for path in files()) > 0
    before = sum(worker.watch.patches_done)
    worker, _ = run(opened(resume=True))
    assert np.array_equal(values("out.zarr"), alone("blend"))
    assert sum(worker.watch.patches_done) + before == job.geometry.cores.cells.size
    assert not files()


def pieces_of(piece: Path) -> str:
    return piece.parent.name


def test_pieces_that_never_come_back_whole_end_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.inference.stages.spill import Pieces

    monkeypatch.setattr(Pieces, "read", lambda *_: None)
    job = opened()
    with pytest.raises(PenstockError, match="cannot be read back; check the disk, or give --spill"):
        run(job)


def test_a_new_run_in_the_folder_keeps_no_pieces_of_the_old_one() -> None:
    run(opened(), range(3))
    assert files()
    penstock.inference.run_job(Job(settings(overwrite=True)))
    assert not Path("out.zarr.penstock/spill").exists()


def test_a_worker_times_a_patch_and_settles_what_is_done_with_borders() -> None:
    shared: dict[str, Any] = {"cluster": "local:2", "workers": 2}
    plan = open_task((settings(**shared, parts=8), 1, "here"), 0).plan
    ways = plan.ways
    assert ways is not None and ways.recomputed.seconds and ways.spilled.seconds
    assert plan.geometry.spills == ways.spills == (ways.spilled.seconds < ways.recomputed.seconds)
    measured = (
        r".* a patch \(measured on a worker\), .*/s of scratch for each worker \(measured on a"
    )
    assert re.match(measured, dict(plan.lines())["  rates"])
    plan = open_task((settings(**shared, parts=8, spill_rate="1kB"), 2, "here"), 0).plan
    assert not plan.geometry.spills, "too slow"
    assert dict(plan.lines())["  rates"].endswith(
        "1000 B/s of scratch for each worker (--spill-rate)"
    )
    worker, _ = run(opened(), range(3))
    resumed = {**shared, "workers": 5, "resume": True}
    plan = open_task((settings(**resumed), 1, "here"), 0).plan
    assert plan.geometry.spills and plan.parts is not None and plan.parts.step == worker.parts.step
    assert not open_task((settings(**resumed, spill="never"), 1, "here"), 0).plan.geometry.spills


def test_a_scratch_that_takes_nothing_has_no_rate(tmp_path: Path) -> None:
    rate = scratch_rate(tmp_path / "not" / "there")
    assert rate is not None and rate > 1e5
    assert not [*tmp_path.glob("not*"), *tmp_path.glob("tmp*")]
    if Path("/proc/self").exists():
        assert scratch_rate(Path("/proc/self")) is None


@pytest.mark.slow
def test_nothing_is_spilled_into_a_bucket(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    shared = {"cluster": "local:2", "workers": 2, "run_dir": "s3://test-bucket/runs/spilling"}
    with pytest.raises(UsageError, match="workers cannot spill to s3://test-bucket/runs/spilling;"):
        open_task((settings(**shared, spill="always"), 1, "here"), 0)
    assert not open_task((settings(**shared), 1, "here"), 0).plan.geometry.spills


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--spill always --part 1/2", "--spill always belongs to --cluster"),
        ("--max-spill 1GB", "--max-spill has no effect without --cluster"),
        ("--spill always --cluster local:1 --normalize percentile", "nothing that two parts sha"),
    ],
)
def test_bad_input_is_one_sentence(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["infer", "--in-spec", "in.npy", "--out-spec", "out.zarr", "--model-type",
               "identity", *words.split()]  # fmt: skip
    assert main(command) == 2
    assert said in capsys.readouterr().err
