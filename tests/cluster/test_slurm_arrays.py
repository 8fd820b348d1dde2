"""Jobs of one core on a real SLURM: arrays, chains and what is cancelled: see `slurm_cluster`."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.base.config.cluster import SlurmConfig
from penstock.cli import main
from penstock.cluster.slurm_jobs import read_study, submit_steps
from penstock.cluster.slurm_states import JobState, job_states
from penstock.cluster.slurm_steps import Command, Step

from .slurm_cluster import Cluster, missing
from .test_slurm_cluster import ONE_OF_EACH, newest, state, submit, until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=f"no SLURM here: {missing()}"),
    pytest.mark.usefixtures("used"),
]


def test_jobs_are_cancelled(cluster: Cluster, tmp_path, capsys) -> None:
    held = ["--array", "0-3%2", "--dependency", "singleton", "--job-name", "held"]
    cluster.say("sbatch", "--job-name=held", "--output=/dev/null", "--wrap=sleep 60")
    assert submit(tmp_path, *held) == 0
    job = newest(tmp_path)
    cluster.wait("reason", lambda: job_states([job])[job][0].reason is not None)
    assert main(["slurm", "status", str(tmp_path)]) == 3
    assert f"{job}_[0-3]  held  1             PENDING, Dependency\n" in capsys.readouterr().out
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


def test_an_array_of_a_program_whose_element_dies(cluster: Cluster, tmp_path, capsys) -> None:
    say = 'echo "$SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT"; '
    die = "[ $SLURM_ARRAY_TASK_ID != 3 ] || kill -9 $$"
    out = tmp_path / "out"
    job = run_program(out, "bash", "-c", say + die, flags=["--array", "6%4"])
    assert f"job {job}: penstock, 6 elements of 1 node\n" in capsys.readouterr().out
    cluster.wait("all elements", lambda: len(job_states([job])[job]) == 6)
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


def test_a_chain_whose_first_job_fails_runs_its_last(cluster: Cluster, tmp_path, capsys) -> None:
    config = SlurmConfig(folder=str(tmp_path), ntasks_per_node=1, time="10", signal=0)
    asked = ("exit 2", f"touch {tmp_path}/part", f"ls {tmp_path}")
    fails, touches, lists = (Command(("bash", "-c", line), "program") for line in asked)
    array = config.model_copy(update={"array": "1-3"})
    steps = [Step(config, fails), Step(array, touches, "afterok"), Step(config, lists, "afterany")]
    begin, parts, last = submit_steps(steps, sys.executable)
    ended = until_ended(cluster, begin.id, parts.id, last.id)
    (reason,) = {(row.state, row.reason) for row in ended[parts.id]}
    assert reason == ("CANCELLED", "DependencyNeverSatisfied")
    assert state(begin.id).exit_code == 2 and state(last.id).state == "COMPLETED"
    assert "part" not in (tmp_path / f"slurm-{last.id}.out").read_text().split()
    assert main(["slurm", "status", str(tmp_path)]) == 1
    assert "CANCELLED, DependencyNeverSatisfied" in capsys.readouterr().out


def test_a_chain_whose_job_slurm_refuses_is_cancelled(cluster: Cluster, tmp_path, capsys) -> None:
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
    cluster: Cluster, tmp_path, monkeypatch
) -> None:
    """sbatch hands on the variables of the job in which it runs."""
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.setenv(name, "9")
    ask = "from penstock.cluster.place import job_of; import os; print(job_of(os.environ), os.environ.get('SLURM_RESTART_COUNT'))"  # noqa: E501
    job = run_program(tmp_path, sys.executable, "-c", ask)
    until(cluster, tmp_path, job, "COMPLETED")
    assert (tmp_path / f"slurm-{job}.out").read_text() == f"{job} None\n"


def test_an_infer_of_which_a_part_dies_is_done_again(cluster: Cluster, tmp_path, capsys) -> None:
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
    begin, *counting, parts, finish = [job.id for job in read_study(folder)]
    assert len(counting) == 2
    ended = until_ended(cluster, begin, *counting, parts, finish)
    assert {row.id: row.signal for row in ended[parts]} == {
        f"{parts}_1": 0, f"{parts}_2": 9, f"{parts}_3": 0,
    }  # fmt: skip
    capsys.readouterr()
    assert main(["slurm", "status", str(folder)]) == 1
    assert "exit code 3: its log says how to go on" in capsys.readouterr().out
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
