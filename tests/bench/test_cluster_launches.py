"""Launches on the workers of a cluster: what a worker does with one, and whole benchmarks."""

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.base import BenchModelConfig, PenstockError, UsageError, build
from penstock.bench.launch import on_cluster, supervisor
from penstock.bench.launch.on_cluster import RemoteLaunch, launch_here
from penstock.bench.launch.sweep import Launch
from penstock.cli import main
from penstock.cli.benchmarks import launcher_of
from penstock.cluster import UnfitWorker
from penstock.instruments import Ledger, Record, case_key, environment, parse_record

from ..dask_threads import threads_of_this_process
from ..preloaded import forked_workers, started

if not find_spec("distributed"):
    pytest.skip("distributed is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
ZOO = str(Path(__file__).parent / "zoo.py")


@pytest.fixture
def _zoo(monkeypatch, tmp_path_factory) -> None:
    """Launches are those of the zoo, which takes no torch. No other test's lie beside them."""
    locks = str(tmp_path_factory.mktemp("locks"))
    monkeypatch.setattr(on_cluster.tempfile, "gettempdir", lambda: locks)
    monkeypatch.setattr(supervisor, "WORKER", (sys.executable, ZOO))
    monkeypatch.setattr(environment, "WATCH_S", 0.0)


def asked(animal: str, *needs: Path, folder: Path = Path("/nowhere"), **case: Any) -> RemoteLaunch:
    launch = Launch(f"zoo:{animal}", case, 60.0, 3, 7)
    return RemoteLaunch(launch, needs, folder, {"OMP_NUM_THREADS": "5"}, None)


def wanted() -> bool:
    return True


@pytest.mark.usefixtures("_zoo")
def test_a_launch_runs_where_the_client_began_and_says_where_it_ran(tmp_path, monkeypatch) -> None:
    for name, number in {"OMP": 1, "MKL": 4, "OPENBLAS": 1}.items():  # those of the worker
        monkeypatch.setenv(f"{name}_NUM_THREADS", str(number))
    (tmp_path / "data.txt").write_text("of the client")
    work = asked("Placed", tmp_path, folder=tmp_path, data="data.txt")
    line, draft = launch_here(work, "tcp://somewhere", wanted)
    record = parse_record(line)
    assert record.ok, record.error
    assert (record.launch, record.order, record.case) == (3, 7, {"data": "data.txt"})
    assert record.key == case_key("zoo:Placed", {"data": "data.txt"})
    assert record.facts["folder"] == str(tmp_path.resolve())
    assert record.facts["data"] == "of the client"
    threads = {"OMP_NUM_THREADS": "5"}  # what the client has
    assert {n: record.facts[n] for n in threads} == threads
    assert record.facts["MKL_NUM_THREADS"] is record.facts["OPENBLAS_NUM_THREADS"] is None
    seen = {n: v for n, v in record.environment["variables"].items() if n.endswith("_THREADS")}
    assert seen == threads
    worker = record.environment["worker"]
    assert worker["address"] == "tcp://somewhere"
    assert worker["host"] == os.uname().nodename
    assert record.environment["machine_key"] and draft is None


@pytest.mark.usefixtures("_zoo", "zoo_here")
def test_a_worker_of_another_kind_is_left_out() -> None:
    work = asked("Animal")
    kind = on_cluster.kind_of(environment.collect_environment())
    same = RemoteLaunch(work.launch, (), work.folder, {}, kind)
    assert parse_record(launch_here(same, "tcp://a", wanted)[0]).ok
    other = RemoteLaunch(work.launch, (), work.folder, {}, {**kind, "affinity": 99})
    with pytest.raises(UnfitWorker, match=r"is not like the first \(affinity \d+\), and times of"):
        launch_here(other, "tcp://a", wanted)


@pytest.mark.usefixtures("_zoo")
def test_a_launch_that_nobody_waits_for_is_killed() -> None:
    began = time.monotonic()
    launch_here(asked("Hang", bytes=0), "tcp://a", lambda: time.monotonic() < began + 0.3)
    assert not [
        child for child in psutil.Process().children(recursive=True)
        if any("zoo.py" in word for word in child.cmdline())
    ]  # fmt: skip


def test_a_folder_that_workers_do_not_share_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(on_cluster, "SEEN_S", 0.0)
    with pytest.raises(PenstockError, match="--output-dir must be a folder that all workers share"):
        on_cluster._move(tmp_path / "elsewhere", tmp_path / "run")


@pytest.mark.usefixtures("_zoo", "zoo_here")
def test_the_client_keeps_what_workers_bring(tmp_path, here) -> None:
    """A record, a folder and a failure, by workers of Dask that live on."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("Animal", {"n": 1}), ("Writes", {"output_dir": str(tmp_path / "run")}), ("Raises", {}),
    ]  # fmt: skip
    launches = [
        Launch(f"zoo:{animal}", case, 60.0, 0, order) for order, (animal, case) in enumerate(cases)
    ]
    draft_of_another_client = tmp_path / ".penstock-0123456789abcdef.part"
    draft_of_another_client.mkdir()
    with threads_of_this_process() as address:
        config = build(BenchModelConfig, {"cluster": address})
        ledger = Ledger(tmp_path / "ledger")
        with launcher_of(config, [tmp_path], ledger) as run:
            brought = {launch.order: record for launch, record in run(launches)}
            assert run._kind == on_cluster.kind_of(brought[0].environment), "of the first"
        with (
            launcher_of(config, [tmp_path / "none"], ledger) as run,
            pytest.raises(UsageError, match=rf"does not see {tmp_path}/none"),
        ):
            list(run(launches[:1]))
        first = brought[0].environment
        unlike = first | {"limits": {**first["limits"], "affinity": 99}}
        with (
            launcher_of(config, [tmp_path], ledger) as run,
            pytest.raises(UsageError, match="is not like the first"),
        ):
            run.like([brought[0].model_copy(update={"environment": unlike})])
            list(run(launches[:1]))
    assert [brought[n].status for n in range(3)] == ["ok", "ok", "crash"]
    assert [brought[n].order for n in range(3)] == [0, 1, 2]
    assert (tmp_path / "run" / "result").read_text() == "done"
    left = {tmp_path / "run", draft_of_another_client}
    assert {*tmp_path.iterdir()} == left, "drafts are removed, but not another client's"


def test_one_launch_at_a_time_is_made_on_a_host(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(on_cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    hold = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from penstock.bench.launch.on_cluster import host_held\n"
        "with host_held(lambda: True):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        nobody = pytest.raises(PenstockError, match="no client waits")
        with nobody, on_cluster.host_held(lambda: False):
            raise AssertionError
        other.kill()  # and what it held is free
        other.wait()
        with on_cluster.host_held(lambda: False):
            pass


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--find-limit", "--cluster", "local"], "--find-limit chooses each trial after the one"),
        (["--device", "cuda:1", "--cluster", "local"], "--device cuda:1 does not go with"),
        (["--cluster", "nowhere"], "--cluster nowhere is none of local, local:N"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: list[str], sentence: str, tmp_path, capsys) -> None:
    out = tmp_path / "out.csv"
    assert main(["bench", "model", "--model", "denoise-tiny", "--output", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


NETS = """
import os, pathlib, signal, time
import torch

class Killer(torch.nn.Conv2d):
    def forward(self, x):
        left, sleeps = pathlib.Path(f"kills{x.shape[0]}"), pathlib.Path("sleeps")
        if x.device.type != "meta" and sleeps.exists():
            pathlib.Path("draft").write_text(str(os.getpid()))
            pathlib.Path("draft").rename("sleeper")
            time.sleep(600)
        if x.device.type != "meta" and left.exists() and left.read_text():
            left.write_text(left.read_text()[1:])
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return super().forward(x)

def killer():
    return Killer(1, 1, 3, padding=1)
"""
"""A network of which a batch of N kills the worker, as often as the file ``killsN`` has letters."""


BENCH = """model --model nets.py:killer --trust-model --batch-sizes 1 2 --tile-sizes 16
    --channels 1 --device cpu --threads 1 --launch-seconds 0.05 --effort quick""".split()


def bench(out: str, *more: str) -> int:
    return main(["bench", *BENCH, "--output", out, *more])


def records(out: str) -> list[Record]:
    return Ledger(Path(out).with_suffix(".ledger")).records()


@pytest.fixture
def place(tmp_path, here) -> Path:
    Path("nets.py").write_text(NETS)
    return tmp_path


@pytest.mark.slow
def test_a_benchmark_on_workers(place: Path, capsys) -> None:
    """Of which a batch of 1 kills one worker, and a batch of 2 three."""
    Path("kills1").write_text("x")
    Path("kills2").write_text("xxx")
    with forked_workers():
        code = bench("out.csv", "--cluster", "local:2")
    said = capsys.readouterr()
    assert code == 1, said.err
    ran = records("out.csv")
    assert {r.case["batch"]: r.ok for r in ran} == {1: True, 2: False}
    assert "4 workers died on the way" in said.out
    here = environment.collect_environment()
    for record in ran:
        assert record.environment["machine_key"] == here["machine_key"]
        if record.ok:
            assert record.environment["worker"]["host"] == os.uname().nodename
        else:
            assert record.status == "crash" and record.error is not None
            assert record.error.message.startswith("3 workers died on it")
    assert {record.launch for record in ran} == {0} and {r.order for r in ran} == {0, 1}


@pytest.mark.slow
def test_a_launch_ends_when_its_client_is_gone(place: Path) -> None:
    """On a cluster that lives on: its worker is free for the next client."""
    from distributed import LocalCluster

    Path("sleeps").touch()
    where = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with forked_workers(), LocalCluster(n_workers=1, threads_per_worker=1, **where) as cluster:
        words = ["bench", *BENCH, "--output", "out.csv", "--cluster", cluster.scheduler_address]
        client = started(place, words)
        while client.is_alive() and not Path("sleeper").exists():
            time.sleep(0.05)
        sleeper = psutil.Process(int(Path("sleeper").read_text()))
        client.kill()
        client.join()
        assert not psutil.wait_procs([sleeper], timeout=300)[1]
        assert not records("out.csv")
