"""An infer on SLURM: elements of an array that go back into the queue by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.cluster.slurm_jobs import read_study
from penstock.cluster.slurm_states import JobState, job_states

from .slurm_cluster import NETWORK, SLOW_NET, Cluster, missing, values, words

on_slurm = pytest.mark.skipif(missing() is not None, reason=f"no SLURM here: {missing()}")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


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


@pytest.mark.slurm
@on_slurm
def test_workers_of_dask_that_slurm_starts_do_a_volume(used: Cluster) -> None:
    """As docs/slurm.md has it, with a scheduler on the nodes' network."""
    np.save("in.npy", np.random.default_rng(0).normal(900, 200, (48, 64, 64)).astype("float32"))
    Path("net.py").write_text(SLOW_NET)
    address = f"tcp://{NETWORK}.254:8786"
    python = [sys.executable, "-m"]
    host = ["--host", f"{NETWORK}.254", "--port", "8786", "--no-dashboard"]
    worker = [*python, "distributed.cli.dask_worker", address, "--nthreads", "1", "--no-dashboard"]
    worker += ["--preload-nanny", "penstock.cluster.leaving", "--death-timeout", "60"]
    with subprocess.Popen([*python, "distributed.cli.dask_scheduler", *host]) as scheduler:
        asked = ["slurm", "submit", "--folder", str(JOBS), "--array", "2", "--time", "10"]
        assert main([*asked, "--", "srun", *worker]) == 0
        try:
            assert main(words("out.zarr", "--cluster", address, "--workers", "2")) == 0
        finally:
            used.say("scancel", read_study(JOBS).jobs[-1].id)
            scheduler.terminate()
    assert json.loads(Path("out.zarr.penstock/summary.json").read_text())["workers"]
    assert main(words("alone.zarr")) == 0
    assert np.array_equal(values("out.zarr"), values("alone.zarr"))
