"""Trainings on a real SLURM of two nodes, which this file starts and ends: see `slurm_cluster`."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.base.config.cluster import SlurmConfig
from penstock.cli import main
from penstock.cluster.slurm_jobs import read_study, submit_steps
from penstock.cluster.slurm_states import JobState, job_states
from penstock.cluster.slurm_steps import Command, Step

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


compared = pytest.mark.xdist_group("whole")
"""One worker of xdist has all tests that look at that study."""


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of one rank and of two, run to its end."""
    folder = tmp_path_factory.mktemp("study") / "it's here"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "SLURM_CONF"):
            patch.setenv(name, cluster.environment[name])
        assert submit(folder, "--study", "1,2", "--job-name", NAME, *ONE_OF_EACH) == 0
        for job in read_study(folder).jobs:
            until(cluster, folder, job.id, "COMPLETED")
    return folder


def submit(folder: Path, *words: str) -> int:
    return main(["slurm", "submit", "--folder", str(folder), *words, *TRAIN])


def newest(folder: Path) -> str:
    return read_study(folder).jobs[-1].id


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
    document: dict[str, Any] = json.loads((folder / job / "training_results.json").read_text())
    return document


def weights(folder: Path, job: str) -> dict[str, Any]:
    import torch

    path = folder / job / "checkpoints" / "last.pt"
    state_dict: dict[str, Any] = torch.load(path, weights_only=True)["model"]
    return state_dict


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


@compared
def test_a_study_ends_and_leaves_its_results(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = read_study(whole).jobs
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


@compared
def test_torchrun_on_each_of_two_machines_trains_the_same(
    cluster: Cluster, whole: Path, tmp_path: Path
) -> None:
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


@compared
def test_a_job_that_is_told_to_save_requeues_itself_and_goes_on(
    cluster: Cluster, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


@compared
def test_a_job_that_is_preempted_comes_back_and_goes_on(
    cluster: Cluster, whole: Path, tmp_path: Path
) -> None:
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


def test_what_slurm_does_not_know_or_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "cancel", "99999"]) == 2
    assert capsys.readouterr().err == "penstock slurm: SLURM knows no job 99999\n"
    assert submit(tmp_path / "out", "--partition", "nosuch") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "SLURM refused the job penstock: " in line and "partition" in line
    assert not (tmp_path / "out" / "study.json").exists()


def test_jobs_are_cancelled(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = ["--array", "0-3%2", "--dependency", "singleton", "--job-name", "held"]
    cluster.say("sbatch", "--job-name=held", "--output=/dev/null", "--wrap=sleep 60")
    assert submit(tmp_path, *held) == 0
    job = newest(tmp_path)
    cluster.wait("reason", lambda: job_states([job])[job][0].reason is not None)
    assert main(["slurm", "status", str(tmp_path)]) == 3
    assert "[0-3%2]  held  1             PENDING, Dependency\n" in capsys.readouterr().out
    assert main(["slurm", "cancel", str(tmp_path)]) == 0
    cluster.say("scancel", "--name=held")
    cluster.wait("end", lambda: all(row.ended for row in job_states([job])[job]))
    assert main(["slurm", "status", job]) == 1
    assert "CANCELLED" in capsys.readouterr().out


def run_program(folder: Path, *words: str, flags: Sequence[str] = ()) -> str:
    asked = ["slurm", "submit", "--folder", str(folder), *ONE_OF_EACH, *flags, "--", *words]
    assert main(asked) == 0
    return newest(folder)


def until_ended(cluster: Cluster, *jobs: str) -> dict[str, list[JobState]]:
    def ended() -> bool:
        rows = [row for states in job_states(jobs).values() for row in states]
        return bool(rows) and all(row.ended for row in rows)

    cluster.wait(f"end of {jobs}", ended)
    return job_states(jobs)


def test_an_array_of_a_program_with_an_element_that_dies(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say = 'echo "$SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT"; '
    die = "[ $SLURM_ARRAY_TASK_ID != 3 ] || kill -9 $$"
    out = tmp_path / "out"
    job = run_program(out, "bash", "-c", say + die, flags=["--array", "6%4"])
    assert f"job {job}: penstock, 6 elements of 1 node\n" in capsys.readouterr().out
    cluster.wait("elements that wait", lambda: "[" in job_states([job])[job][0].id)
    until_ended(cluster, job)
    assert main(["slurm", "status", str(out)]) == 1
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[1], row[-1]) for row in sorted(rows)] == [
        (f"{job}_3", "penstock", "FAILED, killed by signal 9, JobLaunchFailure"),
        (f"{job}_[1-2,4-6]", "penstock", "COMPLETED"),
    ]
    assert main(["slurm", "status", f"{job}_2"]) == 0
    for n in range(1, 7):
        assert (out / f"slurm-{job}_{n}.out").read_text().startswith(f"{n} of 6\n")


def test_a_chain_whose_first_job_fails_runs_its_last_and_nothing_waits_for_ever(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SlurmConfig(folder=str(tmp_path), ntasks_per_node=1, time="10", signal=0)
    asked = ("exit 2", f"touch {tmp_path}/part", f"ls {tmp_path}")
    fails, touches, lists = (Command(("bash", "-c", line), "program") for line in asked)
    array = config.model_copy(update={"array": "1-3"})
    steps = [Step(config, fails), Step(array, touches, "afterok"), Step(config, lists, "afterany")]
    begin, parts, last = submit_steps(steps, sys.executable)
    ended = until_ended(cluster, begin.id, parts.id, last.id)
    (row,) = ended[parts.id]
    assert (row.state, row.reason) == ("CANCELLED", "DependencyNeverSatisfied")
    assert state(begin.id).exit_code == 2 and state(last.id).state == "COMPLETED"
    assert "part" not in (tmp_path / f"slurm-{last.id}.out").read_text().split()
    assert main(["slurm", "status", str(tmp_path)]) == 1
    assert "CANCELLED, DependencyNeverSatisfied" in capsys.readouterr().out


def test_a_chain_of_which_slurm_refuses_a_job_is_cancelled(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "infer --model-type identity --in-spec a --out-spec b --normalize percentile".split()
    folder = ["--folder", str(tmp_path)]
    assert main(["slurm", "submit", *folder, *ONE_OF_EACH, "--array", "5000", "--", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    first = newest(tmp_path)
    assert said[0] == "1 of 3 jobs were submitted"
    assert "SLURM refused the job penstock-parts: " in said[1]
    assert said[1].endswith(
        f"Invalid job array specification; the jobs before it ({first}) are cancelled again"
    )
    (row,) = until_ended(cluster, first)[first]
    assert row.state in ("CANCELLED", "FAILED")


def test_a_job_that_a_job_submits_is_no_element_and_no_restart(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch hands on the variables of the job in which it runs."""
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.setenv(name, "9")
    ask = "from penstock.cluster.place import job_of; import os; print(job_of(os.environ), os.environ.get('SLURM_RESTART_COUNT'))"  # noqa: E501
    job = run_program(tmp_path, sys.executable, "-c", ask)
    until(cluster, tmp_path, job, "COMPLETED")
    assert (tmp_path / f"slurm-{job}.out").read_text() == f"{job} None\n"


def test_an_infer_that_is_stopped_says_so_and_one_that_is_restarted_goes_on(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(
        "import time, torch\n"
        "class Slow(torch.nn.Module):\n"
        "    def forward(self, x):\n        time.sleep(0.2)\n        return x\n"
        "def make(): return Slow()\n"
    )
    volume, out = str(tmp_path / "in.zarr"), tmp_path / "out.zarr"
    assert main(["generate", "volume", volume, "--shape", "48", "48", "64"]) == 0
    words = ["infer", "--model-type", f"{tmp_path}/slow.py:make", "--in-spec", volume]
    words += ["--out-spec", str(out), "--patch", "16", "--overlap", "0", "--in-channels", "1"]
    words += [
        "--chunks",
        "16",
        "16",
        "16",
        "--block",
        "16",
        "16",
        "16",
        "--devices",
        "cpu",
        "--normalize",
        "percentile",
    ]
    folder, done = tmp_path / "jobs", tmp_path / "out.zarr.penstock" / "done.log"

    def written() -> int:
        return len(done.read_text().splitlines()) if done.exists() else 0

    job = run_program(folder, *words)
    cluster.wait("units", lambda: written() > 4 or state(job).ended)
    cluster.say("scancel", "--batch", "--signal=TERM", job)
    cluster.wait("end", lambda: state(job).ended)
    capsys.readouterr()
    assert main(["slurm", "status", str(folder)]) == 1
    said = "FAILED, exit code 3: it was stopped, and --resume continues it"
    assert said in capsys.readouterr().out and 4 < written() < 36
    assert run_program(folder, *words, "--resume") != job
    job, before = newest(folder), written()
    cluster.wait("units", lambda: written() > before or state(job).ended)
    cluster.say("scontrol", "requeue", job)
    until(cluster, folder, job, "COMPLETED")
    assert state(job).restarts == 1
    said = (folder / f"slurm-{job}.out").read_text()
    counts = re.search(r"Blocks written: (\d+) of 36 planned, (\d+) by an earlier run", said)
    assert counts and int(counts[1]) + int(counts[2]) == 36 and int(counts[2]) > before


def test_an_infer_in_parts_of_which_one_dies_is_done_again(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zarr = pytest.importorskip("zarr")
    (tmp_path / "model.py").write_text(
        "import os, pathlib, sys, torch\n"
        "class Dies(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        f"        again = pathlib.Path({str(tmp_path / 'again')!r}).exists()\n"
        "        if '2/3' in sys.argv and '--part' in sys.argv and not again:\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return x * 2\n"
        "def make(): return Dies()\n"
    )
    volume = str(tmp_path / "in.zarr")
    assert main(["generate", "volume", volume, "--shape", "48", "64", "64"]) == 0

    def infer(out: str) -> list[str]:
        words = ["infer", "--model-type", f"{tmp_path}/model.py:make", "--in-spec", volume]
        words += ["--out-spec", str(tmp_path / out), "--patch", "16", "--overlap", "4"]
        words += ["--chunks", "16", "32", "32", "--block", "16", "32", "32", "--devices", "cpu"]
        return [*words, "--in-channels", "1", "--normalize", "global", "--threads", "1"]

    folder, words = tmp_path / "jobs", infer("parts.zarr")
    run_program(folder, *words, flags=["--array", "3"])
    begin, *counting, parts, finish = [job.id for job in read_study(folder).jobs]
    assert len(counting) == 2
    ended = until_ended(cluster, begin, *counting, parts, finish)
    assert {row.id: row.signal for row in ended[parts]} == {
        f"{parts}_1": 0, f"{parts}_2": 9, f"{parts}_3": 0,
    }  # fmt: skip
    capsys.readouterr()
    assert main(["slurm", "status", str(folder)]) == 1
    assert "exit code 3: parts are missing, and its log names them" in capsys.readouterr().out
    assert "--part 2/3" in (folder / f"slurm-{finish}.out").read_text()

    (tmp_path / "again").touch()
    again = run_program(folder, *words, "--part", "%a/3", flags=["--array", "2-2"])
    last = run_program(folder, *words, "--finish", flags=["--dependency", f"afterok:{again}"])
    until_ended(cluster, again, last)
    assert state(last).state == "COMPLETED", (folder / f"slurm-{last}.out").read_text()
    assert main(infer("whole.zarr")) == 0
    one, other = (
        zarr.open_group(str(tmp_path / f"{name}.zarr"), mode="r")["0"][:]
        for name in ("parts", "whole")
    )
    assert (one == other).all() and one.any()
