"""Trainings on a real SLURM of two nodes, which this file starts and ends: see `slurm_cluster`."""

import csv
import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.cluster.slurm_jobs import read_study
from penstock.cluster.slurm_states import JobState, job_states

from .slurm_cluster import NODES, Cluster, missing

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=f"no SLURM here: {missing()}"),
    pytest.mark.usefixtures("used"),
]

NAME = "a b'$(touch x)\"&;#--nodes=9 é`"
SLOWED = f"{Path(__file__).parents[1]}/training/spirals.py:Slowed"
TRAIN = [
    "--", "train", SLOWED, "--num-samples", "800", "--batch-size", "8", "--epochs", "6",
    "--device", "cpu", "--threads", "1", "--num-workers", "0",
]  # fmt: skip
LIMITS = ["--time", "10", "--env", "OMP_NUM_THREADS=1"]
TWO_NODES = ["--nodes", "2", "--exclusive", *LIMITS]
ONE_OF_EACH = ["--ntasks-per-node", "1", *LIMITS]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory) -> Path:
    """The folder of a study of one rank and of two, run to its end."""
    folder = tmp_path_factory.mktemp("study") / "it's here"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "SLURM_CONF"):
            patch.setenv(name, cluster.environment[name])
        assert submit(folder, "--study", "1,2", "--job-name", NAME, *ONE_OF_EACH) == 0
        for job in read_study(folder):
            until(cluster, folder, job.id, "COMPLETED")
    return folder


def submit(folder: Path, *words: str) -> int:
    return main(["slurm", "submit", "--folder", str(folder), *words, *TRAIN])


def newest(folder: Path) -> str:
    return read_study(folder)[-1].id


def state(job: str) -> JobState:
    (job_state,) = job_states([job])[job]
    return job_state


def until(cluster: Cluster, folder: Path, job: str, word: str) -> None:
    def reached() -> bool:
        now = state(job)
        log = folder / f"slurm-{job}.out"
        said = log.read_text()[-3000:] if log.exists() else "(no log)"
        assert now.state == word or not now.ended, f"{now.words()}\n{said}"
        return now.state == word

    cluster.wait(f"{word} of job {job}", reached)


def results(folder: Path, job: str) -> dict[str, Any]:
    return json.loads((folder / job / "training_results.json").read_text())


def weights(folder: Path, job: str) -> dict[str, Any]:
    import torch

    path = folder / job / "checkpoints" / "last.pt"
    return torch.load(path, weights_only=True)["model"]


def assert_same_training(whole: Path, folder: Path, job: str) -> None:
    """As the job of two ranks that nobody disturbed, to the last bit."""
    import torch

    undisturbed = newest(whole)
    one, other = weights(whole, undisturbed), weights(folder, job)
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    assert results(folder, job)["status"] == "complete"
    assert results(folder, job)["best"] == results(whole, undisturbed)["best"]
    for rank in (0, 1):
        with (folder / job / "steps" / f"rank{rank}.csv").open() as file:
            taken = [int(row["step"]) for row in csv.DictReader(file)]
        assert taken == list(range(1, results(folder, job)["steps"] + 1))


def start_training(cluster: Cluster, folder: Path, *words: str) -> str:
    """A job of two nodes that is an epoch into its training, and slow while there is a file."""
    (folder / "hold").touch()
    assert submit(folder, *TWO_NODES, *words) == 0
    job = newest(folder)
    path = folder / job / "training_results.json"
    cluster.wait("an epoch", lambda: path.exists() or state(job).ended)
    assert results(folder, job)["status"] == "running"
    return job


def test_ranks_on_nodes_of_unequal_shares(cluster: Cluster) -> None:
    ask = (
        "from penstock.cluster.place import find_place as find; import os; print(find(os.environ))"
    )
    said = cluster.say("srun", "--nodes=2", "--ntasks=3", sys.executable, "-c", ask)
    places = sorted(re.findall(r"rank=(\d), world_size=(\d), local_rank=(\d), node=(\d)", said))
    assert places == [tuple("0300"), tuple("1310"), tuple("2301")]
    assert said.count("nodes=2, address='n1', port=150") == 3


def test_a_study_ends_and_leaves_its_results(whole: Path, capsys) -> None:
    one, two = read_study(whole)
    assert (one.name, one.ranks, one.nodes) == (f"{NAME}-1", 1, 1)
    assert (two.name, two.ranks, two.nodes) == (f"{NAME}-2", 2, 2)
    shown = subprocess.run(
        ["squeue", "--noheader", "--states=all", "--format=%j", f"--jobs={two.id}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.strip() == f"{NAME}-2"
    assert not Path("x").exists()

    assert main(["slurm", "status", str(whole)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == ["job", "name", "ranks", "nodes", "state"]
    assert said.count("COMPLETED") == 2

    for job in (one, two):
        log = (whole / f"slurm-{job.id}.out").read_text()
        document = results(whole, job.id)
        assert document["world_size"] == job.ranks and document["status"] == "complete"
        assert sorted(rank["rank"] for rank in document["ranks"]) == list(range(job.ranks))
        assert len(list((whole / job.id / "steps").glob("rank*.csv"))) == job.ranks
        for line in (
            f"Job ID: {job.id}", f"Number of nodes: {job.nodes}", f"Number of tasks: {job.ranks}",
            f"Effective batch size (batch_size x num_gpus): {8 * job.ranks}", "Restarts: 0",
        ):  # fmt: skip
            assert log.splitlines().count(line) == 1, line
        assert log.count("Total training time: ") == log.count("Best validation loss: ") == 1
    # Two ranks take half the steps for the same samples.
    halves = results(whole, one.id), results(whole, two.id)
    assert halves[0]["steps"] == 2 * halves[1]["steps"]


def test_torchrun_on_two_machines_trains_the_same(cluster: Cluster, whole: Path, tmp_path) -> None:
    output = tmp_path / "out" / "whole"
    line = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:29500", "--rdzv-id", "penstock",
        "-m", "penstock", *TRAIN[1:], "--distributed", "--output-dir", str(output),
    ]  # fmt: skip
    environment = cluster.environment | {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        started = []
        for node in NODES:
            log = stack.enter_context((tmp_path / node).open("w"))
            words = [*cluster.on(node), *line]
            started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            stack.callback(started[-1].kill)
        cluster.wait("end", lambda: None not in [process.poll() for process in started])
    said = [(tmp_path / node).read_text() for node in NODES]
    assert [process.returncode for process in started] == [0, 0], said
    assert [text.count("Best validation loss: ") for text in said] in ([1, 0], [0, 1])
    assert_same_training(whole, output.parent, output.name)


def test_a_job_that_is_told_to_save_requeues_itself_and_goes_on(
    cluster: Cluster, whole: Path, tmp_path, capsys
) -> None:
    job = start_training(cluster, tmp_path)
    # As SLURM does it before the time is up: --signal=B:USR1@120.
    cluster.say("scancel", "--batch", "--signal=USR1", job)
    until(cluster, tmp_path, job, "PENDING")
    (tmp_path / "hold").unlink()
    assert main(["slurm", "status", job]) == 3
    until(cluster, tmp_path, job, "COMPLETED")
    assert state(job).restarts == 1
    assert_same_training(whole, tmp_path, job)
    (resumed,) = results(tmp_path, job)["resumed_at_steps"]
    assert 0 < resumed < results(tmp_path, job)["steps"]
    log = (tmp_path / f"slurm-{job}.out").read_text()
    assert f"stopped by SIGUSR1 after step {resumed} of" in log
    assert f"job {job} has saved and goes back into the queue" in log
    assert "interrupted" not in log and "Traceback" not in log
    assert log.count(f"Job ID: {job}\n") == 2 and "Restarts: 1\n" in log
    assert log.count("Total training time: ") == 1
    capsys.readouterr()
    assert main(["slurm", "status", str(tmp_path)]) == 0
    assert "COMPLETED, 1 restart" in capsys.readouterr().out


def test_a_preempted_job_comes_back_and_goes_on(cluster: Cluster, whole: Path, tmp_path) -> None:
    job = start_training(cluster, tmp_path)
    ended = cluster.say(
        "sbatch", "--parsable", "--partition=high", "--exclusive", "--nodes=2",
        "--output=/dev/null", "--wrap=sleep 1",
    )  # fmt: skip
    until(cluster, tmp_path, ended.strip(), "COMPLETED")
    (tmp_path / "hold").unlink()
    until(cluster, tmp_path, job, "COMPLETED")
    assert state(job).restarts == 1
    assert_same_training(whole, tmp_path, job)
    # SLURM told the ranks by SIGTERM, and the launcher by SIGUSR1; they saved before they were
    # killed.
    (resumed,) = results(tmp_path, job)["resumed_at_steps"]
    log = (tmp_path / f"slurm-{job}.out").read_text()
    assert "DUE TO PREEMPTION" in log
    assert re.search(rf"stopped by SIG(TERM|USR1) after step {resumed} of", log)
    assert "back into the queue" not in log and "Traceback" not in log


def test_what_slurm_does_not_know_or_refuses(tmp_path, capsys) -> None:
    assert main(["slurm", "cancel", "99999"]) == 2
    assert capsys.readouterr().err == "penstock slurm: SLURM knows no job 99999\n"
    assert submit(tmp_path / "out", "--partition", "nosuch") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "SLURM refused the job penstock: " in line and "partition" in line
    assert not (tmp_path / "out" / "study.json").exists()
