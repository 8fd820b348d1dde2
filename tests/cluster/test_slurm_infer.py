"""An infer on SLURM: elements of an array that go back into the queue by themselves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.cluster.slurm_jobs import read_study

from .slurm_cluster import NETWORK, SLOW_NET, Cluster, missing, values, words

pytestmark = pytest.mark.usefixtures("here")
on_slurm = pytest.mark.skipif(missing() is not None, reason=f"no SLURM here: {missing()}")


JOBS = Path("jobs")
EACH = ("--normalize", "percentile", "--max-inflight-batches", "4")


def test_a_verb_in_a_job_goes_back_only_if_it_was_told_and_has_stopped_whole(
    monkeypatch, capsys, tmp_path
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
            used.say("scancel", read_study(JOBS)[-1].id)
            scheduler.terminate()
    assert json.loads(Path("out.zarr.penstock/summary.json").read_text())["workers"]
    assert main(words("alone.zarr")) == 0
    assert np.array_equal(values("out.zarr"), values("alone.zarr"))
