"""Workers as jobs of SLURM: their scripts, what is refused, and a volume on a real SLURM."""

from __future__ import annotations

import importlib.util
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base.errors import Incomplete, UsageError
from penstock.cli import main
from penstock.cluster import slurm_workers
from penstock.cluster.absence import Absence
from penstock.cluster.slurm_states import JobState
from penstock.cluster.slurm_workers import WorkerJobs
from penstock.instruments.ledger import Ledger

from .slurm_cluster import NODES, SLOW_NET, Cluster, missing

on_slurm = pytest.mark.skipif(missing() is not None, reason=f"no SLURM here: {missing()}")
NASTY = "a b'$(touch x)\"&;# é`"


def preset(text: str) -> str:
    Path("mine.yaml").write_text(text)
    return "./mine.yaml"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def script(jobs: WorkerJobs) -> tuple[set[str], list[str]]:
    """The options of sbatch, and the lines of shell."""
    lines = jobs.script("tcp://10.0.0.1:8786", "penstock-0").splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    return options, [line for line in lines if line and not line.startswith("#")]


def test_a_node_of_four_gpus_is_four_jobs_of_one() -> None:
    jobs = WorkerJobs.of("raven-8gpu", None, Path("logs"))
    options, lines = script(jobs)
    assert (jobs.count, jobs.per_node) == (8, 4)
    assert {"--gres=gpu:a100:1", "--nodes=1", "--ntasks-per-node=1", "--mem=125000"} <= options
    assert {"--no-requeue", "--job-name=penstock-worker", "--output=logs/slurm-%j.out"} <= options
    assert "--signal=B:TERM@120" in options
    assert lines[:3] == ["set -e", "module purge", "module load gcc/13 cuda/12.6"]
    assert " tcp://10.0.0.1:8786 " in lines[-1] and lines[-1].endswith("--resources GPU=1")


def test_what_the_preset_sets_is_quoted_for_the_shell() -> None:
    name = preset(json.dumps({"env": {"MINE": NASTY, "GOMP_SPINCOUNT": "1"}, "venv": "/my env"}))
    options, lines = script(WorkerJobs.of(name, 3, Path("my logs")))
    assert "--output='my logs/slurm-%j.out'" in options and "source '/my env/bin/activate'" in lines
    said = subprocess.run(
        ["bash", "-c", "\n".join([*(line for line in lines if line.startswith("export")), "env"])],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert {f"MINE={NASTY}", "GOMP_SPINCOUNT=1", "OMP_WAIT_POLICY=PASSIVE"} <= {*said}
    assert not Path("x").exists()
    assert lines[-1].startswith("exec python -m distributed.cli.dask_worker")
    assert "GPU" not in lines[-1]


@pytest.mark.parametrize(
    ("settings", "workers", "said"),
    [
        (None, None, "--cluster slurm needs --workers N"),
        ("time: '30'", None, r"--cluster slurm:\./mine.yaml needs --workers N"),
        ("array: 4", 2, "a preset with an array is not a preset of workers"),
        ("exclusive: true\ngpus_per_node: 4", 2, "has room for 4"),
        ("nodes: none", 2, "mine.yaml: nodes"),
    ],
)
def test_a_preset_that_is_none_of_workers_is_refused(
    settings: str | None, workers: int | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        WorkerJobs.of(None if settings is None else preset(settings), workers, Path("logs"))


def test_without_slurm_it_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _needs_jobqueue()
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("PATH", "")
    np.save("in.npy", np.zeros((8, 8, 8), "float32"))
    words = "infer --in-spec in.npy --out-spec out.zarr --model-type identity --workers 1".split()
    assert main([*words, "--cluster", "slurm"]) == 2
    assert "SLURM's scontrol is not on PATH" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["in.npy"]
    assert signal.getsignal(signal.SIGINT) is before


def _needs_jobqueue() -> None:
    """Skip where it is absent. Imported plainly it would change what Ctrl-C does here."""
    if importlib.util.find_spec("dask_jobqueue") is None:
        pytest.skip("dask-jobqueue is not installed")


def test_a_worker_that_never_comes_is_waited_for_so_long_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    absence = Absence(300, said.append)
    absence.note(0, "slurm", None)
    now[0] = 250
    absence.note(0, "slurm", "PENDING, Resources")
    absence.note(1, "slurm", None)
    now[0] = 500
    absence.note(0, "slurm", None)
    assert said == ["waiting for a worker of slurm, 4 min 10 s so far (PENDING, Resources)"]
    now[0] = 801
    with pytest.raises(Incomplete, match="was there for 5 min 1 s"):
        absence.note(0, "slurm", None)


def test_jobs_that_all_end_at_once_are_replaced_before_the_run_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    over = {"7": [JobState("7", "TIMEOUT")]}
    monkeypatch.setattr(slurm_workers, "job_states", lambda jobs: over)
    jobs = WorkerJobs.of(None, 1, Path("logs"))
    scaled = SimpleNamespace(scale=lambda count: None)
    kept = slurm_workers.SlurmWorkers(jobs, scaled, ["7"], tended=0.0)
    for seconds, lanes in ((30, 1), (60, 0), (100, 0)):
        now[0] = seconds
        kept.tend(lanes)
    now[0] = 200
    with pytest.raises(Incomplete, match="job 7: TIMEOUT"):
        kept.tend(0)


@pytest.fixture
def ready(used: Cluster) -> Cluster:
    """The cluster, with a preset of its workers."""
    _needs_jobqueue()
    Path("net.py").write_text(SLOW_NET)
    preset("cpus_per_task: 2\ntime: '10'\nenv: {OMP_NUM_THREADS: 1}")
    return used


@pytest.fixture
def started(ready: Cluster) -> Cluster:
    """The cluster, and something to infer."""
    array = np.random.default_rng(0).normal(900, 200, (48, 64, 80)).astype("float32")
    np.save("in.npy", array)
    assert main(words("alone.zarr")) == 0
    return ready


def words(out: str, *more: str) -> list[str]:
    asked = ("infer --in-spec in.npy --model-type net.py:slow --patch 16 --overlap 4 --block 16 "
             "--chunks 16 --devices cpu --threads 1 --batch 1 --seam-mode blend "
             "--head-kind intensity --normalize global")  # fmt: skip
    return [*asked.split(), "--out-spec", out, *more]


def values(path: str) -> Any:
    source = penstock.open_source(path)
    return source.read(source.domain)


def jobs_of(cluster: Cluster) -> Sequence[str]:
    return cluster.say("squeue", "--noheader", "--format=%i %N", "--states=R").split("\n")[:-1]


SLURM = ("--cluster", "slurm:./mine.yaml", "--workers", "2", "--parts", "30")


@pytest.mark.slurm
@on_slurm
@pytest.mark.parametrize("what", ["drained", "down"])
def test_a_volume_on_two_nodes_of_which_one_is_lost(what: str, started: Cluster) -> None:
    """A job that is cancelled, here on a node that is drained and takes no other, ends with notice;
    one on a node that goes down does not."""
    Path("hold").touch()  # neither ends before the other begins
    client = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words("out.zarr", *SLURM)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    folder = Path("out.zarr.penstock")

    def at_work() -> bool:
        assert client.poll() is None, client.communicate()[1]
        return len([log for log in folder.glob("done-*.log") if log.read_text()]) == 2

    started.wait("two workers at work", at_work)
    jobs = dict(line.split() for line in jobs_of(started))
    assert sorted(jobs.values()) == [*NODES]
    node = f"nodename={jobs[min(jobs)]}"
    state = "drain" if what == "drained" else what
    started.say("scontrol", "update", node, f"state={state}", "reason=test")
    if what == "drained":
        started.say("scancel", min(jobs))
    Path("hold").unlink()
    try:
        said = client.communicate(timeout=500)[1]
    finally:
        started.say("scontrol", "update", node, "state=resume")
    assert client.returncode == 0, said
    assert np.array_equal(values("out.zarr"), values("alone.zarr"))
    summary = json.loads((folder / "summary.json").read_text())
    if what == "drained":
        assert "died on the way" not in " ".join(summary["notes"]), "it left with notice"
    assert len([*Path("out.zarr.penstock.workers").glob("slurm-*.out")]) >= 2
    started.wait("no job", lambda: not started.say("squeue", "--noheader").strip())


@pytest.mark.slurm
@on_slurm
def test_a_benchmark_on_the_workers_of_two_nodes(
    ready: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case at a time on each, and each record says where it ran."""
    asked = ("bench model --model net.py:slow --trust-model --tile-sizes 16 --channels 1 "
             "--batch-sizes 1 2 3 4 --device cpu --threads 1 --launch-seconds 0.2 "
             "--effort quick --output out.csv")  # fmt: skip
    preset("nodes: 2\ncpus_per_task: 2\ntime: '10'\nenv: {OMP_NUM_THREADS: 1}")
    code = main([*asked.split(), *SLURM[:2]])
    said = capsys.readouterr()
    assert code == 0, said.err
    records = Ledger(Path("out.ledger")).records()
    assert sorted(record.case["batch"] for record in records) == [1, 2, 3, 4]
    on_node: dict[str, list[tuple[datetime, timedelta]]] = {node: [] for node in NODES}
    for record in records:
        assert record.ok, record.error
        worker = record.environment["worker"]
        assert worker["address"].startswith("tcp://198.18.0.") and worker["alone_on"]
        seconds = (record.warmup.setup_s or 0) + sum(record.samples_s["step"])
        began = datetime.fromisoformat(record.time)
        on_node[worker["host"]].append((began, timedelta(seconds=seconds)))
    for node, launches in on_node.items():
        assert launches, f"{node} took none"
        for (began, took), (later, _) in itertools.pairwise(sorted(launches)):
            assert began + took <= later
    counted = ", ".join(f"{len(launches)} on {node}" for node, launches in on_node.items())
    assert f"Launches: {counted}, all of one kind of machine" in said.out
    ready.wait("no job", lambda: not ready.say("squeue", "--noheader").strip())


@pytest.mark.slurm
@on_slurm
def test_a_suite_on_the_workers_of_two_nodes(ready: Cluster) -> None:
    """The command of docs/cluster.md, on two runs: each node trains one of them."""
    make = "generate xview3 scenes --scenes 2 --size 256 256 --objects 8"
    cut = ("suite preprocess --data-root scenes --train-labels scenes/labels/train.csv "
           "--val-labels scenes/labels/validation.csv --output-dir chips "
           "--chip-size 128 --overlap 32")  # fmt: skip
    assert [main(words.split()) for words in (make, cut)] == [0, 0]
    runs = {"name": "small", "batch_sizes": [1, 2], "num_workers_list": [0], "epochs": 1,
            "train": {"backbone": "mobilenet", "device": "cpu"}}  # fmt: skip
    Path("small.json").write_text(json.dumps(runs))
    preset("nodes: 2\ncpus_per_task: 2\ntime: '10'\nenv: {OMP_NUM_THREADS: 1}")
    asked = ("suite benchmark --config small.json --data-root scenes --train-chips chips/train "
             "--val-chips chips/val --output-dir suite")  # fmt: skip
    assert main([*asked.split(), *SLURM[:2]]) == 0
    records = Ledger(Path("suite/suite.ledger")).records()
    assert all(record.ok for record in records), [record.error for record in records]
    assert {record.environment["worker"]["host"] for record in records} == {*NODES}
    report = json.loads(Path("suite/benchmark_report.json").read_text())
    assert [(run["batch_size"], run["status"]) for run in report["runs"]] == [(1, "ok"), (2, "ok")]
    for run in report["runs"]:
        assert Path("suite", run["folders"][0], "training_results.json").is_file()
    ready.wait("no job", lambda: not ready.say("squeue", "--noheader").strip())


@pytest.mark.slurm
@on_slurm
def test_the_only_worker_is_lost_and_replaced(
    started: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A job that is not replaced within LOST_S + 2 * TEND_S ends the run; SLURM may take long.
    monkeypatch.setattr(slurm_workers, "LOST_S", 25)
    monkeypatch.setattr(slurm_workers, "TEND_S", 5)
    lost = []

    def cancel() -> None:
        logs = Path("out.zarr.penstock").glob
        begun = 300  # bytes of a log that has more than the line of its maker
        started.wait(
            "units", lambda: any(len(log.read_text()) > begun for log in logs("done-*.log"))
        )
        lost.extend(line.split()[0] for line in jobs_of(started))
        started.say("scancel", *lost)

    with ThreadPoolExecutor(1) as aside:
        ended = aside.submit(cancel)
        code = main(words("out.zarr", *SLURM[:2], "--workers", "1", "--parts", "30"))
        ended.result()
    assert code == 0, capsys.readouterr().err
    assert np.array_equal(values("out.zarr"), values("alone.zarr"))
    assert len(lost) == 1
    assert len(json.loads(Path("out.zarr.penstock/summary.json").read_text())["workers"]) == 2


@pytest.mark.slurm
@on_slurm
def test_workers_that_never_come_are_cancelled(
    started: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    never = started.say("sbatch", "--parsable", "--hold", "--wrap=true").strip()
    preset(f"cpus_per_task: 2\ndependency: 'afterok:{never}'\nnodes: 1")
    assert main(words("out.zarr", *SLURM[:2], "--worker-timeout", "12")) == 3
    said = capsys.readouterr().err
    assert "waiting for a worker of slurm:./mine.yaml" in said
    assert "no worker of slurm:./mine.yaml was there for 12" in said
    started.say("scancel", never)
    started.wait("no job", lambda: not started.say("squeue", "--noheader").strip())
    assert not Path("out.zarr").exists()


@pytest.mark.slurm
@on_slurm
@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ("partition: nowhere\nnodes: 1", 1, "sbatch refused the job of a worker"),
        ("venv: /nowhere\nnodes: 1", 3, "all jobs of SLURM have ended"),
    ],
)
def test_jobs_that_cannot_run_are_one_sentence(
    started: Cluster, settings: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    preset(settings)
    assert main(words("out.zarr", *SLURM[:2])) == code
    assert said in capsys.readouterr().err
