"""Jobs that hang, and jobs that are asked to end: what is whole is kept, and the run resumes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import penstock
from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import build
from penstock.base.errors import Incomplete, StageError
from penstock.cli import main
from penstock.data.stores import claim
from penstock.inference import run as infer
from penstock.inference.opening.job import Job
from penstock.inference.planning import cuts
from penstock.inference.run_folder import ending
from penstock.inference.stages import watch
from penstock.inference.stages.watchdog import Watchdog
from penstock.instruments import Clock

from ..parameters import crossed
from ..preloaded import started
from .faulty_s3 import distinct, door_to, get, new, put, write_model
from .kit import job

SLOW = "if x.device.type != 'meta':\n    time.sleep(float(os.environ.get('NAP', 0)))\nreturn x"
"""A model that is slow where the environment says so."""
ALONE = ("--patch", 16, "--batch", 1)
"""Each block is one forward."""
STUCK = (
    "import pathlib\n"
    "if x.device.type != 'meta' and len(x) == 2 and (x == 0).any():\n"
    "    while pathlib.Path({0!r}).exists():\n"
    "        time.sleep(0.1)\n"
    "return x"
)


def words(folder: Path, model: str, *more: Any, side: int = 32) -> list[str]:
    """A job of so many units as blocks of 16 are in the volume; each is one block to compute."""
    if not (folder / "in.npy").exists():
        np.save(folder / "in.npy", distinct(side))
    given = ["--in-spec", folder / "in.npy", "--out-spec", folder / "out.zarr", "--model-type",
             model, "--patch", 8, "--overlap", 0, "--block", 16, "--chunks", 16, "--devices", "cpu",
             "--normalize", "percentile", "--head-kind", "intensity", "--metrics-interval", 0.1,
             *more]  # fmt: skip
    return ["infer", *map(str, given)]


def units(folder: Path) -> int:
    """How many units are noted."""
    log = folder / "out.zarr.penstock/done.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def until(ready: Callable[[], bool], process: BaseProcess, folder: Path) -> None:
    while not ready():
        assert process.is_alive(), (folder / "said").read_text()
        time.sleep(0.01)


def ended(process: BaseProcess, folder: Path) -> str:
    """The last line of what a process said that ended with 3."""
    process.join(300)
    said = (folder / "said").read_text()
    assert process.exitcode == 3, said
    return said.strip().splitlines()[-1]


def result(folder: Path) -> Any:
    written = penstock.open_source(folder / "out.zarr")
    return written.read(written.domain)[0, 0]


# --- asked to end ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_what_is_whole_is_written_after_a_signal_and_the_run_resumes(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = words(tmp_path, write_model(tmp_path, "slow", SLOW), *ALONE, side=48)
    with monkeypatch.context() as patch:
        patch.setenv("NAP", "0.05")
        process = started(tmp_path, command)
    until(lambda: units(tmp_path) >= 2, process, tmp_path)
    os.kill(process.pid or 0, number)
    before = units(tmp_path)
    error = ended(process, tmp_path)
    assert before < units(tmp_path) < 27  # those whose blocks had been read, and no more
    assert error == (
        f"penstock infer: {units(tmp_path)} of 27 blocks were written when {number.name} ended the "
        "job; run again with --resume"
    )
    noted = json.loads((tmp_path / "out.zarr.penstock/ended.json").read_text())
    assert noted["error"].startswith(f"{units(tmp_path)} of 27 blocks were written")
    assert main([*command, "--resume"]) == 0
    assert (result(tmp_path) == distinct(48)).all()
    assert not (tmp_path / "out.zarr.penstock/ended.json").exists()


def test_what_takes_longer_than_the_grace_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = words(tmp_path, write_model(tmp_path, "slow", SLOW), *ALONE, "--grace", "500ms")
    assert main(command) == 2  # no such time
    monkeypatch.setenv("NAP", "0.3")
    process = started(tmp_path, [*command[:-1], "0.2s"])
    until(lambda: units(tmp_path) >= 1, process, tmp_path)
    os.kill(process.pid or 0, signal.SIGTERM)
    assert ended(process, tmp_path) == (
        "penstock infer: SIGTERM ended the job; run again with --resume"
    )


def test_a_request_before_the_first_block_reads_none(tmp_path: Path) -> None:
    started_job, request = job(tmp_path, normalize="global"), ending.EndRequest()
    request.ask("SIGTERM")
    with pytest.raises(Incomplete, match=r"SIGTERM ended the job; run again with --resume$"):
        infer.run_job(started_job, request=request)
    assert infer.run_job(job(tmp_path, normalize="global")).units_written == 27


@pytest.mark.parametrize(
    ("seam", "normalize"), crossed(("trim", "blend"), ("percentile", "global"))
)
def test_units_that_are_half_done_are_made_again(
    seam: str, normalize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "BLOCK_VOXELS", 2000)
    source = np.random.default_rng(0).normal(size=(40, 40, 6)).astype("float32")
    slow = write_model(tmp_path, "slow", SLOW)

    def begun(out: str, **more: Any) -> Job:
        knobs = {"in_spec": source, "out_spec": tmp_path / out, "model_type": slow, "patch": 8,
                 "overlap": 2, "block": 16, "chunks": 16, "devices": "cpu", "seam_mode": seam,
                 "normalize": normalize, "head_kind": "intensity", "prep_workers": 1,
                 "max_inflight_batches": 1}  # fmt: skip
        return Job(build(InferConfig, knobs | more))

    def read(out: str) -> Any:
        written = penstock.open_source(tmp_path / out)
        return written.read(written.domain)

    infer.run_job(begun("whole.zarr"))
    request = ending.EndRequest()

    def ask(progress: penstock.Progress) -> None:
        if progress.units_done >= 2:
            request.ask("SIGTERM")

    monkeypatch.setenv("NAP", "0.01")
    with pytest.raises(Incomplete, match=r"^\d+ of 9 blocks were written when SIGTERM ended"):
        infer.run_job(begun("out.zarr"), ask, request)
    monkeypatch.delenv("NAP")
    assert 2 <= infer.run_job(begun("out.zarr", resume=True)).units_skipped < 9
    assert (read("out.zarr") == read("whole.zarr")).all()


def test_a_request_after_the_last_block_ends_nothing(tmp_path: Path) -> None:
    request = ending.EndRequest()

    def ask(progress: penstock.Progress) -> None:
        if progress.units_done == progress.units_planned:
            request.ask("SIGTERM")

    assert infer.run_job(job(tmp_path), ask, request).units_written == 27


# --- hanging --------------------------------------------------------------------------------------


def test_a_model_that_never_returns_ends_the_job_and_the_run_resumes(tmp_path: Path) -> None:
    stuck, folder = tmp_path / "stuck", tmp_path / "out.zarr.penstock"
    stuck.touch()
    volume = distinct(32)
    volume[20, 20, 20] = 0
    np.save(tmp_path / "in.npy", volume)
    model = write_model(tmp_path, "stuck_model", STUCK.format(str(stuck)))
    command = words(
        tmp_path, model, "--patch", 16, "--normalize", "none", "--stall-timeout", "0.5s"
    )
    last = ended(started(tmp_path, command), tmp_path)
    assert last.startswith("penstock infer: forward failed at block ")
    assert "no progress for 500 ms (--stall-timeout)" in last
    assert last.endswith(
        f"{folder}/stacks.txt has the stack of each thread; run again with --resume"
    )
    stacks = (folder / "stacks.txt").read_text()
    assert "stuck_model.py" in stacks and stacks.count("hread 0x") > 3
    stuck.unlink()
    assert main([*command, "--resume", "--stall-timeout", "0"]) == 0
    assert (result(tmp_path) == volume).all()
    assert not (folder / "stacks.txt").exists()


@pytest.mark.parametrize("method", ["GET", pytest.param("PUT", marks=pytest.mark.slow)])
def test_a_store_that_does_not_answer_ends_the_job_and_the_run_resumes(
    method: str, s3_endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(claim, "RELEASE_WITHIN_S", 0.1)
    array, reads = distinct(16), method == "GET"
    np.save(tmp_path / "in.npy", array)
    with door_to(s3_endpoint) as door:
        source = json.dumps(put(door, "in", array, 16)) if reads else tmp_path / "in.npy"
        out = tmp_path / "out.zarr" if reads else json.dumps(new(door, "out", array, 8))
        given = ["--in-spec", source, "--out-spec", out, "--run-dir", tmp_path / "run",
                 "--model-type", "identity", "--patch", 8, "--overlap", 0, "--block", 16,
                 "--devices", "cpu", "--normalize", "none"]  # fmt: skip
        command = ["infer", *map(str, given)]
        door.silent, door.answers = threading.Event(), {method: (503, "")}
        try:
            assert main([*command, "--stall-timeout", "0.4s"]) == 3
        finally:
            door.silent.set()
        error = capsys.readouterr().err
        stage = "read" if reads else "write"
        assert error.startswith(f"penstock infer: {stage} failed at block ")
        assert "--stall-timeout" in error and len(error.strip().splitlines()) == 1
        door.silent, door.answers = None, {}
        assert main([*command, "--resume"]) == 0
        assert ((result(tmp_path) if reads else get(door, "out")) == array).all()


def test_progress_within_a_block_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of many batches takes longer than the watchdog waits; no batch does."""
    now, dogs = [0.0], list["Watchdog"]()

    class Timed(Watchdog):
        """It looks at the forwards alone, and goes by their clock."""

        def __init__(self, limit_s: float, stacks: Path | None, clock: Clock) -> None:
            super().__init__(limit_s, stacks, lambda: now[0])
            dogs.append(self)

        def working(self, stage: str, where: object) -> Any:
            return super().working(stage, where) if stage == "forward" else nullcontext()

    def takes_long(net: nn.Identity, x: Tensor) -> Tensor:
        now[0] += 0.4
        for dog in dogs:
            dog.check()
        return x

    monkeypatch.setattr(watch, "Watchdog", Timed)
    monkeypatch.setattr(nn.Identity, "forward", takes_long)
    assert infer.run_job(job(tmp_path, stall_timeout=1, batch=1)).units_written == 27
    monkeypatch.setattr(Timed, "progressed", lambda dog: None)
    with pytest.raises(StageError, match=r"no progress for 1\.00 s"):
        infer.run_job(job(tmp_path, stall_timeout=1, batch=1, overwrite=True))


def test_a_stall_names_the_oldest_work(tmp_path: Path) -> None:
    now = [0.0]
    dog = Watchdog(10, None, lambda: now[0])
    with dog.working("forward", "block 3"):
        now[0] = 8
        dog.progressed()
        now[0] = 15
        dog.check()
        with dog.working("note", "a part of it"):
            now[0] = 24
            dog.check()
        now[0] = 33
        dog.check()
        now[0] = 35
        with pytest.raises(StageError, match=r"^forward failed at block 3: no progress for 10.0 s"):
            dog.check()
    dog.check()
    patient = Watchdog(0, None, lambda: now[0])
    with patient.working("read", "x"):
        now[0] = 1e9
        patient.check()
