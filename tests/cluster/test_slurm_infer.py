"""An infer on SLURM: workers as its jobs, what is refused, and elements that go back."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import Incomplete, UsageError
from penstock.cli import main
from penstock.cluster import slurm_workers
from penstock.cluster.slurm_jobs import read_study
from penstock.cluster.slurm_states import JobState, job_states
from penstock.cluster.slurm_workers import WorkerJobs

from .slurm_cluster import NODES, SLOW_NET, Cluster, missing, values, words

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
    """The cluster, with a preset of its workers and something to infer."""
    _needs_jobqueue()
    Path("net.py").write_text(SLOW_NET)
    preset("cpus_per_task: 2\ntime: '10'\nenv: {OMP_NUM_THREADS: 1}")
    np.save("in.npy", np.random.default_rng(0).normal(900, 200, (48, 64, 80)).astype("float32"))
    return used


@pytest.fixture
def started(ready: Cluster) -> Cluster:
    """The same, and what one process writes."""
    assert main(words("alone.zarr")) == 0
    return ready


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
    ready: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    never = ready.say("sbatch", "--parsable", "--hold", "--wrap=true").strip()
    preset(f"cpus_per_task: 2\ndependency: 'afterok:{never}'\nnodes: 1")
    assert main(words("out.zarr", *SLURM[:2], "--worker-timeout", "12")) == 3
    said = capsys.readouterr().err
    assert "waiting for a worker of slurm:./mine.yaml" in said
    assert "no worker of slurm:./mine.yaml was there for 12" in said
    ready.say("scancel", never)
    ready.wait("no job", lambda: not ready.say("squeue", "--noheader").strip())
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
    ready: Cluster, settings: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    preset(settings)
    assert main(words("out.zarr", *SLURM[:2])) == code
    assert said in capsys.readouterr().err


JOBS = Path("jobs")
EACH = ("--normalize", "percentile", "--max-inflight-batches", "4")


def submit(*flags: str, more: Sequence[str] = ()) -> list[str]:
    """Submit steps of the job on one core each, and their numbers."""
    before = len(read_study(JOBS).jobs) if JOBS.exists() else 0
    limits = "--ntasks-per-node 1 --time 10 --env OMP_NUM_THREADS=1 --max-requeues 1".split()
    asked = ["slurm", "submit", "--folder", str(JOBS), *limits, *flags]
    assert main([*asked, "--", *words("out.zarr", *EACH, *more)]) == 0
    return [job.id for job in read_study(JOBS).jobs][before:]


def element(job: str, number: int) -> JobState | None:
    """The state of an element, None while it shares a row with others that wait."""
    return next((row for row in job_states([job])[job] if row.id == f"{job}_{number}"), None)


def written(number: int) -> int:
    """The blocks in the logs of an element: each of its lives has one."""
    logs = Path("out.zarr.penstock").glob(f"done-part-{number}-of-*.log")
    return sum(line[0].isdigit() for log in logs for line in log.read_text().splitlines())


def tell(cluster: Cluster, job: str, number: int) -> None:
    """Once an element has written a few blocks more, tell it as SLURM does before the end."""
    before = written(number)
    cluster.wait("blocks of an element", lambda: written(number) > before + 2)
    cluster.say("scancel", "--batch", "--signal=USR1", f"{job}_{number}")


def said(job: str) -> str:
    return "".join(log.read_text() for log in JOBS.glob(f"slurm-{job}*.out"))


@pytest.mark.slurm
@on_slurm
def test_elements_go_back_into_the_queue_by_themselves_and_not_for_ever(
    used: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first is told once and ends its share; the second is told twice, which is once too
    often."""
    np.save("in.npy", np.random.default_rng(0).normal(900, 200, (48, 64, 64)).astype("float32"))
    Path("net.py").write_text(SLOW_NET)
    *_, parts, finish = submit("--array", "2")
    back = "has written its complete blocks and goes back into the queue"
    tell(used, parts, 2)
    tell(used, parts, 1)
    used.wait("the end of a life", lambda: back in said(f"{parts}_2"))
    tell(used, parts, 2)
    used.wait("the end", lambda: job_states([finish])[finish][0].ended)

    one, two = element(parts, 1), element(parts, 2)
    assert one is not None and (one.state, one.restarts) == ("COMPLETED", 1)
    assert two is not None and (two.state, two.exit_code, two.restarts) == ("FAILED", 3, 1)
    assert said(f"{parts}_1").count(f"penstock launch: job {parts}_1 {back}") == 1
    assert said(f"{parts}_2").count(back) == 1
    assert "blocks were written when SIGUSR1 ended the job" in said(f"{parts}_2")
    assert f"job {parts}_2 was started again 1 time and does not go back" in said(f"{parts}_2")
    assert "Traceback" not in said(parts) and "interrupted" not in said(parts)
    assert "run again with --part 2/2 (in SLURM penstock slurm submit --array 2-2" in said(finish)
    capsys.readouterr()
    assert main(["slurm", "status", str(JOBS)]) == 1
    assert "COMPLETED, 1 restart" in capsys.readouterr().out

    before = written(2)
    (again,) = submit("--array", "2-2", more=["--part", "%a/2"])
    (last,) = submit("--dependency", f"afterok:{again}", more=["--finish"])
    used.wait("the end", lambda: job_states([last])[last][0].ended)
    assert job_states([last])[last][0].state == "COMPLETED", said(last)
    assert written(1) + written(2) == 48 and written(2) > before, "no block twice"
    assert main(words("alone.zarr", *EACH)) == 0
    assert np.array_equal(values("out.zarr"), values("alone.zarr"))


def test_a_verb_in_a_job_goes_back_only_if_it_was_told_and_has_stopped_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """scontrol is a script of this test, which notes that it was asked."""
    asked = tmp_path / "asked"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    signals = [signal.SIGUSR1]

    def verb(args: Any) -> int:
        for number in signals:
            os.kill(os.getpid(), number)
        time.sleep(0.01)
        return 0

    monkeypatch.setattr("penstock.cli.plan.run", verb)
    launch = ["launch", "slurm", "--requeue", "--max-requeues", "2", "--"]
    launch += words("out.zarr", *EACH)
    launch[launch.index("infer")] = "plan"
    assert main(launch) == 3 and asked.read_text() == "requeue 12\n"
    assert (
        "job 12 has written its complete blocks and goes back into the queue"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert main(launch) == 3
    assert "job 12 was started again 2 times and does not go back" in capsys.readouterr().err
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    signals[:] = [signal.SIGTERM]  # SLURM ends the job by itself
    assert main(launch) == 3
    signals.clear()
    assert main(launch) == 0
    launch.remove("--requeue")
    signals[:] = [signal.SIGUSR1]
    assert main(launch) == 3
    assert asked.read_text() == "requeue 12\n"
