"""A volume on the workers of a cluster: real processes; who is killed, who differs, who fits."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest

from penstock.base import InferConfig, UsageError, build
from penstock.cli import main
from penstock.inference.run_folder.folder import Notes, folder_at
from penstock.inference.sharing.client import settled

from ..preloaded import forked_workers, started
from .cluster_kit import (
    QUICK,
    SMALL,
    WORDS,
    Scheduler,
    eventually,
    infer,
    place,
    scheduler,
    write_input,
    written,
    written_alone,
)
from .kit import values

__all__ = ["place", "scheduler"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def workers_of(client: int) -> list[psutil.Process]:
    """The processes of a local cluster that compute: those that have a log of their own open."""
    return [
        process
        for process in psutil.Process(client).children(recursive=True)
        if any("done-" in file.path for file in _files(process))
    ]


def _files(process: psutil.Process) -> list[Any]:
    try:
        return process.open_files()
    except psutil.Error:
        return []


class Killer:
    """Kills a worker at a random moment, after some progress."""

    def __init__(self) -> None:
        self.killed, self.random = False, random.Random(0)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._kill)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _kill(self) -> None:
        while not self.killed and not self.ended.wait(0.1 * (0.5 + self.random.random())):
            workers = workers_of(os.getpid())
            if workers and [*written(Path("out.zarr.penstock"))]:
                self.random.choice(workers).kill()
                self.killed = True
        Path("hold").unlink()


@pytest.mark.parametrize(
    "times", [pytest.param(1, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.long)]
)
def test_a_worker_that_is_killed_at_random_changes_no_byte(times: int, capsys) -> None:
    write_input(SMALL)
    alone = written_alone(*QUICK)
    before = dict(os.environ)  # torch may have added to it by now
    for _ in range(times):
        for folder in ("out.zarr", "out.zarr.penstock"):
            shutil.rmtree(folder, ignore_errors=True)
        # All would else be done before one is killed. So two make 4 of 6 blocks.
        Path("hold").write_text("8")
        with forked_workers(), Killer() as killer:
            code = infer("--cluster", "local:2", *QUICK)
        said = capsys.readouterr()
        assert code == 0, said.err
        assert killer.killed
        assert np.array_equal(values("out.zarr"), alone)
        assert " died " in said.out + said.err
        assert len(list(Path("out.zarr.penstock").glob("done-*.log"))) >= 2
        summary = json.loads(Path("out.zarr.penstock/summary.json").read_text())
        assert summary["voxels"] == alone.size, "those of the worker that died among them"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("workers", "run_dir"),
    [
        ("one of a scheduler", "out.zarr.penstock"),
        pytest.param("local:2", "s3://test-bucket/runs/shared", marks=pytest.mark.slow),
    ],
)
def test_a_client_that_is_killed_is_taken_over_by_another(
    workers: str, run_dir: str, capsys,
    monkeypatch, request,
) -> None:  # fmt: skip
    if "://" in run_dir:
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
    folder = folder_at(run_dir if "://" in run_dir else Path(run_dir))
    write_input(SMALL)
    alone = written_alone(*QUICK)
    with contextlib.ExitStack() as stack:
        if workers == "one of a scheduler":
            scheduler = stack.enter_context(contextlib.closing(Scheduler()))
            scheduler.worker()
            workers = scheduler.address
        more = (*QUICK, "--cluster", workers, "--run-dir", run_dir)
        if "://" not in run_dir:
            assert infer(*more, "--overlap", "99") == 2  # it is a worker that says so
            assert "--overlap 99 must be less than" in capsys.readouterr().err
            assert not Path("out.zarr").exists()
        words = ["infer", *WORDS, "--out-spec", "out.zarr", *more]
        # It cannot end before it is killed, however busy the machine.
        Path("hold").write_text("8" if workers == "local:2" else "12")
        client = started(Path.cwd(), words)
        for _ in eventually():
            run = json.loads(folder.read("run.json") or b"{}")
            if run and len(Notes(folder, run).fresh()) >= 2:
                break
        client.kill()
        client.join()
        Path("hold").unlink()
        stack.enter_context(forked_workers())
        assert infer(*more, "--resume") == 0, capsys.readouterr().err
        summary = json.loads(folder.read("summary.json") or b"")
        assert infer(*more, "--resume") == 0, "nothing is left to do"
    assert np.array_equal(values("out.zarr"), alone)
    assert summary["blocks_skipped"] >= 2
    assert main(["verify", "out.zarr", "--run-dir", run_dir]) == 0
    assert main(["status", run_dir]) == 0
    assert Path("out.zarr.penstock").exists() == (run_dir == "out.zarr.penstock")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "nowhere"), "is none of local, local:N and an address"),
        (("--cluster", "local:1", "--part", "1/2"), "--part is a step of an array"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], said: str, capsys) -> None:
    assert infer(*words) == 2
    assert said in capsys.readouterr().err
    assert not Path("out.zarr").exists()


def test_workers_get_absolute_paths_of_all_that_they_read() -> None:
    named = {"in_spec": "in.zarr", "out_spec": "out.zarr", "model_type": "identity"}
    given = settled(build(InferConfig, named, {"mask": "mask.zarr", "trace": "t.json"}))
    assert given.mask == str(Path("mask.zarr").absolute())
    assert given.trace == Path("t.json").absolute()
    store = {"driver": "file", "path": "in.zarr/0/"}
    for spec in (
        {"driver": "zarr", "kvstore": store},
        json.dumps({"driver": "zarr", "kvstore": store}),
    ):
        inline = settled(
            build(InferConfig, named, {"in_spec": spec, "out_spec": ["s3://b/o", spec]})
        )
        placed = {"driver": "zarr", "kvstore": store | {"path": f"{Path.cwd()}/in.zarr/0/"}}
        assert inline.in_spec == placed and inline.out_spec == ("s3://b/o", placed)
    with pytest.raises(UsageError, match="not arrays"):
        settled(build(InferConfig, named, {"mask": np.ones((4, 4))}))


@pytest.mark.slow
def test_the_client_of_a_cluster_does_not_import_torch() -> None:
    write_input(SMALL)
    words = ["infer", *WORDS, *QUICK, "--out-spec", "out.zarr", "--cluster", "local:1"]
    words += ["--trace", "trace.json", "--metrics-json", "metrics.json"]
    code = (
        "import sys; from penstock.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    assert [*Path("out.zarr.penstock").glob("done-*.log")]
    for name in ("trace", "metrics"):  # of each worker
        (file,) = Path().glob(f"{name}*.json")
        assert file.stem != name and json.loads(file.read_text())
