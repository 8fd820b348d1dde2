"""Launches on the workers of a cluster: what a worker does with one, and whole benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.base.config.bench import BenchModelConfig
from penstock.base.config.knobs import build
from penstock.base.errors import PenstockError, UsageError
from penstock.bench.launch import alone, on_cluster, supervisor
from penstock.bench.launch.launcher import Launch
from penstock.bench.launch.on_cluster import RemoteLaunch, launch_here
from penstock.bench.launch.supervisor import LaunchRequest
from penstock.cli import main
from penstock.cli.sweep import launcher_of
from penstock.cluster import TaskFailure, UnfitWorker
from penstock.cluster.worker_side import client_variables, variables_of_client
from penstock.instruments import environment
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Record, case_key, parse_record

from ..dask_threads import threads_of_this_process
from ..preloaded import forked_workers

if not find_spec("distributed"):
    pytest.skip("distributed is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
ZOO = str(Path(__file__).parent / "zoo.py")


@pytest.fixture
def _zoo(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Launches are those of the zoo, which takes no torch. No other test's lie beside them."""
    locks = str(tmp_path_factory.mktemp("locks"))
    monkeypatch.setattr(alone.tempfile, "gettempdir", lambda: locks)
    monkeypatch.setattr(supervisor, "WORKER", (sys.executable, ZOO))
    monkeypatch.setattr(environment, "WATCH_S", 0.0)


def asked(animal: str, *needs: Path, folder: Path = Path("/nowhere"), **case: Any) -> RemoteLaunch:
    launch = Launch(LaunchRequest(f"zoo:{animal}", case), 3, 7, 60.0)
    return RemoteLaunch(launch, needs, folder, {"OMP_NUM_THREADS": "5"}, None)


def wanted() -> bool:
    return True


# --- one launch on a worker -----------------------------------------------------------------------


@pytest.mark.usefixtures("_zoo")
def test_a_launch_runs_where_the_client_was_started_and_says_where_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in {"OMP": 1, "MKL": 4, "OPENBLAS": 1}.items():  # 1 is what Dask's nanny sets
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
    threads = {"OMP_NUM_THREADS": "5", "MKL_NUM_THREADS": "4"}
    assert {n: record.facts[n] for n in threads} == threads
    assert record.facts["OPENBLAS_NUM_THREADS"] is None
    seen = {n: v for n, v in record.environment["variables"].items() if n.endswith("_THREADS")}
    assert seen == threads
    worker = record.environment["worker"]
    assert (worker["address"], worker["beside"]) == ("tcp://somewhere", 0)
    assert worker["host"] == os.uname().nodename
    assert record.environment["machine_key"] and draft is None


@pytest.mark.usefixtures("_zoo")
def test_a_worker_that_does_not_see_a_file_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(UnfitWorker, match=rf"^the worker on .* does not see {tmp_path}/none$"):
        launch_here(asked("Animal", tmp_path, tmp_path / "none"), "tcp://a", wanted)


@pytest.mark.usefixtures("_zoo", "zoo_here")
def test_a_worker_of_another_kind_is_left_out() -> None:
    work = asked("Animal")
    kind = on_cluster.kind_of(environment.collect_environment())
    assert kind is not None
    same = RemoteLaunch(work.launch, (), work.folder, {}, kind)
    assert parse_record(launch_here(same, "tcp://a", wanted)[0]).ok
    other = RemoteLaunch(work.launch, (), work.folder, {}, {**kind, "affinity": 99})
    with pytest.raises(UnfitWorker, match=r"is not like the first \(affinity \d+\), and times of"):
        launch_here(other, "tcp://a", wanted)


@pytest.mark.usefixtures("_zoo")
def test_a_launch_that_nobody_waits_for_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ASK_EVERY_S", 0.01)
    began = time.monotonic()
    launch_here(asked("Hang", bytes=0), "tcp://a", lambda: time.monotonic() < began + 0.3)
    assert not [
        child for child in psutil.Process().children(recursive=True)
        if any("zoo.py" in word for word in child.cmdline())
    ]  # fmt: skip


@pytest.mark.usefixtures("_zoo", "zoo_here")
def test_what_a_launch_writes_comes_in_a_folder_of_its_own(tmp_path: Path) -> None:
    line, draft = launch_here(asked("Writes", output_dir=str(tmp_path / "run")), "tcp://a", wanted)
    assert parse_record(line).ok and draft is not None
    assert [path.name for path in tmp_path.iterdir()] == [Path(draft).name]
    on_cluster._move(Path(draft), tmp_path / "run")
    assert (tmp_path / "run" / "result").read_text() == "done"


def test_a_folder_that_workers_do_not_share_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cluster, "SEEN_S", 0.0)
    with pytest.raises(PenstockError, match="--output-dir must be a folder that all workers share"):
        on_cluster._move(tmp_path / "elsewhere", tmp_path / "run")


def test_what_workers_could_not_do_is_a_row_or_ends_the_benchmark() -> None:
    launch = Launch(LaunchRequest("model", {"batch": 2}), 1, 4, 60.0)
    died = TaskFailure("3 workers died on it", True, 1)
    record = on_cluster._failed(launch, died, {"machine": "k"})
    assert (record.status, record.launch, record.order) == ("crash", 1, 4)
    assert record.error is not None and record.error.message == "3 workers died on it"
    assert record.key == case_key("model", {"batch": 2})
    assert record.environment == {"machine_key": "k"}, "else it would be a case of its own"
    unseen = TaskFailure("the worker on a does not see x", False, 1, unfit="tcp://a")
    for failure in (unseen, TaskFailure("no such device", True, UsageError.exit_code)):
        with pytest.raises(UsageError, match=r"^(the worker on a|no such device)"):
            on_cluster._failed(launch, failure, None)


@pytest.mark.usefixtures("_zoo", "zoo_here")
def test_the_client_keeps_what_workers_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record, a folder and a failure, by workers of Dask that live on."""
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("Animal", {"n": 1}), ("Writes", {"output_dir": str(tmp_path / "run")}), ("Raises", {}),
    ]  # fmt: skip
    launches = [
        Launch(LaunchRequest(f"zoo:{animal}", case), 0, order, 60.0)
        for order, (animal, case) in enumerate(cases)
    ]
    with threads_of_this_process() as address:
        config = build(BenchModelConfig, {"cluster": address, "part_retries": 0})
        with launcher_of(config, [tmp_path]) as run:
            brought = {launch.order: record for launch, record in run(launches)}
        with (
            launcher_of(config, [tmp_path / "none"]) as run,
            pytest.raises(UsageError, match=rf"does not see {tmp_path}/none"),
        ):
            list(run(launches[:1]))
    assert [brought[n].status for n in range(3)] == ["ok", "ok", "crash"]
    assert [brought[n].order for n in range(3)] == [0, 1, 2]
    assert (tmp_path / "run" / "result").read_text() == "done"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "drafts are removed"
    assert f"Launches: 3 on {os.uname().nodename}" in capsys.readouterr().out


# --- what it holds --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "device", "visible", "gpu", "cores"),
    [
        ("model", "cpu", "2,3", None, True),
        ("model", "cuda", "2,3", "gpu-2", False),
        ("model", "auto", "", None, True),
        ("train", "auto", "GPU-ab/1", "gpu-GPU-ab_1", True),  # it reads, so it takes cores too
        ("loader", None, "0", None, True),
    ],
)
def test_what_a_case_takes(
    scenario: str, device: str | None, visible: str, gpu: str | None, cores: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = alone.taken_by(scenario, {"device": device} if device else {})
    assert [name for name in names if name.startswith("gpu")] == [gpu] * bool(gpu)
    assert bool([name for name in names if name.startswith("core")]) == cores
    words = alone.taken_words(names)
    assert words[:1] == [gpu] if gpu else words[0].endswith(("core", "cores"))


def test_no_two_cases_hold_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(alone, "LOOK_EVERY_S", 0.001)
    running, together = set[str](), list[set[str]]()

    def work(name: str, cores: list[str]) -> None:
        for _ in range(20):
            with alone.held(cores, wanted):
                running.add(name)
                together.append(set(running))
                time.sleep(0.001)
                running.remove(name)

    cores = {"a": ["core-0", "core-1"], "b": ["core-1", "core-2"]}
    threads = [threading.Thread(target=work, args=item) for item in cores.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 40 and {"a", "b"} not in together
    with alone.held(["core-0"], wanted), alone.held(["core-1"], lambda: False):
        pass  # cores of their own: neither waits
    assert not list(tmp_path.rglob("case-*"))


def test_cases_of_other_workers_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone.tempfile, "gettempdir", lambda: str(tmp_path))
    assert alone.running_beside() == 0
    hold = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from penstock.bench.launch import alone\n"
        "with alone.held(['gpu-1'], lambda: True):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with alone.held(["gpu-0"], wanted):
            assert alone.running_beside() == 1
        with pytest.raises(PenstockError), alone.held(["gpu-1"], lambda: False):
            raise AssertionError
        other.kill()  # and what it held is free
        other.wait()
        with alone.held(["gpu-1"], lambda: False):
            assert alone.running_beside() == 0


def test_a_worker_that_nobody_waits_for_waits_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(alone, "LOOK_EVERY_S", 0.001)
    with alone.held(["gpu-0"], wanted):
        assert alone.running_beside() == 0
        with (
            pytest.raises(PenstockError, match="no client waits"),
            alone.held(["gpu-0"], lambda: False),
        ):
            raise AssertionError
    with alone.held(["gpu-0"], wanted):
        pass


def test_variables_of_a_worker_are_those_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_variables({"OMP_NUM_THREADS": "8", "HOME": "/home/me"})
    assert client == {"OMP_NUM_THREADS": "8"}, "nothing else travels"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    variables = variables_of_client(client)
    assert variables["OMP_NUM_THREADS"] == "8" and variables["CUDA_VISIBLE_DEVICES"] == "3"
    assert "MALLOC_TRIM_THRESHOLD_" not in variables
    monkeypatch.setenv("OMP_NUM_THREADS", "6")  # which somebody gave this worker
    assert variables_of_client(client)["OMP_NUM_THREADS"] == "6"


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--find-limit", "--cluster", "local"], "--find-limit chooses each trial after the one"),
        (
            ["--device", "cuda:1", "--cluster", "local"],
            "--device cuda:1 does not go with --cluster",
        ),
        (["--cluster", "nowhere"], "--cluster nowhere is none of local, local:N"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    assert main(["bench", "model", "--model", "denoise-tiny", "--output", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- whole benchmarks -----------------------------------------------------------------------------

NETS = """
import os, pathlib, signal, time
import torch

class Killer(torch.nn.Conv2d):
    def forward(self, x):
        left, sleeps = pathlib.Path("kills"), pathlib.Path("sleeps")
        if x.device.type != "meta" and sleeps.exists():
            pathlib.Path("draft").write_text(str(os.getpid()))
            pathlib.Path("draft").rename("sleeper")
            time.sleep(600)
        if x.device.type != "meta" and x.shape[0] == 2 and left.exists() and left.read_text():
            left.write_text(left.read_text()[1:])
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return super().forward(x)

def killer():
    return Killer(1, 1, 3, padding=1)
"""
"""A network of which a batch of 2 kills the worker, as often as a file has letters."""


BENCH = """model --model nets.py:killer --trust-model --batch-sizes 1 2 --tile-sizes 16
    --channels 1 --device cpu --threads 1 --launch-seconds 0.05 --effort quick""".split()


def bench(out: str, *more: str) -> int:
    return main(["bench", *BENCH, "--output", out, *more])


def records(out: str) -> list[Record]:
    return Ledger(Path(out).with_suffix(".ledger")).records()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "died"), [("", 0), ("x", 1), ("xxx", 3)])
def test_a_benchmark_on_workers(
    kills: str, died: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("kills").write_text(kills)
    with forked_workers():
        code = bench("out.csv", "--cluster", "local:2")
    said = capsys.readouterr()
    assert code == int(died == 3), said.err
    ran = records("out.csv")
    assert {r.case["batch"]: r.ok for r in ran} == {1: True, 2: died < 3}
    assert f"Launches: {2 - (died == 3)} on {os.uname().nodename}" in said.out
    deaths = f"{died} worker{'s' * (died > 1)} died on the way"
    assert (deaths in said.out) == bool(died)
    here = environment.collect_environment()
    for record in ran:
        assert record.environment["machine_key"] == here["machine_key"]
        if record.ok:
            assert record.environment["worker"]["alone_on"] == alone.taken_words(alone._cores())
        else:
            assert record.status == "crash" and record.error is not None
            assert record.error.message.startswith("3 workers died on it")
    if not died:
        first, second = sorted(ran, key=lambda record: record.time)
        assert first.warmup.setup_s is not None
        seconds = first.warmup.setup_s + sum(first.samples_s["step"])
        began = datetime.fromisoformat(first.time)
        assert began + timedelta(seconds=seconds) <= datetime.fromisoformat(second.time)
        assert bench("alone.csv") == 0
        launches = [
            {(r.key, r.launch, r.order) for r in each} for each in (ran, records("alone.csv"))
        ]
        assert launches[0] == launches[1]


@pytest.mark.slow
def test_a_client_that_is_killed_is_taken_over(place: Path) -> None:
    """And no launch of its workers outlives it."""
    words = ["bench", *BENCH, "--output", "out.csv", "--cluster", "local:1"]
    client = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while client.poll() is None and not records("out.csv"):
        time.sleep(0.01)
    below = psutil.Process(client.pid).children(recursive=True) if client.poll() is None else []
    client.send_signal(signal.SIGKILL)
    client.wait()
    _, left = psutil.wait_procs(below, timeout=300)
    assert below and not left
    before = records("out.csv")
    assert main([*words, "--resume"]) == 0
    assert records("out.csv")[: len(before)] == before
    assert sorted(r.case["batch"] for r in records("out.csv")) == [1, 2]


@pytest.mark.slow
def test_a_launch_ends_when_its_client_is_gone(place: Path) -> None:
    """On a cluster that lives on: its worker is free for the next client."""
    from distributed import LocalCluster

    Path("sleeps").touch()
    with LocalCluster(
        n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:  # fmt: skip
        words = ["bench", *BENCH, "--output", "out.csv", "--cluster", cluster.scheduler_address]
        client = subprocess.Popen(
            [sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL
        )
        while client.poll() is None and not Path("sleeper").exists():
            time.sleep(0.05)
        sleeper = psutil.Process(int(Path("sleeper").read_text()))
        client.kill()
        client.wait()
        assert not psutil.wait_procs([sleeper], timeout=300)[1]
        assert not records("out.csv")


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(alone._cores()) < 2,
    reason="no core can be taken away here",
)
def test_workers_of_other_cores_measure_nothing_together(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        one, *_ = client.scheduler_info()["workers"]
        client.run(os.sched_setaffinity, 0, {min(os.sched_getaffinity(0))}, workers=[one])
        assert bench("out.csv", "--cluster", cluster.scheduler_address) == 0
    ran = records("out.csv")
    assert len({record.environment["limits"]["affinity"] for record in ran}) == 1
    said = capsys.readouterr().out
    addresses = {record.environment["worker"]["address"] for record in ran}
    assert len(ran) == 2 and len(addresses) == 1
    assert "Left out" not in said or "is not like the first (affinity" in said


@pytest.mark.slow
def test_data_that_workers_do_not_see_ends_it(
    data: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that was started elsewhere, where there is no folder of this name."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:  # fmt: skip

        def hide() -> None:
            from penstock.bench.launch import on_cluster

            on_cluster.Path.exists = lambda self: "gone" not in str(self)  # type: ignore[method-assign]

        from distributed import Client

        with Client(cluster) as client:
            client.run(hide)
        here = place / "gone"
        here.symlink_to(data)
        words = ["bench", "loader", "gone", "--effort", "quick", "--batch-sizes", "2"]
        words += ["--threads", "1", "--loaders", "penstock", "--output", "out.csv"]
        assert main([*words, "--cluster", cluster.scheduler_address]) == 2
    assert f"does not see {here}" in capsys.readouterr().err
