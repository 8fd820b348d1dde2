"""Logs of jobs that broke off or came back, and thousands of broken ones."""

import random

import pytest

from penstock.base.errors import UsageError
from penstock.scaling.runs import Status
from penstock.scaling.sources.slurm_log import read_log
from penstock.scaling.study import studies

from .kit import MEASURED, log, one, our_log, read_text, results, write
from .mutated import mutated

ENDS: list[tuple[str, Status]] = [
    ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T10:00:00 ***", "cancelled"),
    ("*** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO TIME LIMIT ***", "timeout"),
    ("*** JOB 7 ON n1 CANCELLED AT 2026-01-01 DUE TO PREEMPTION ***", "preempted"),
    ("*** JOB 5 ON n1 CANCELLED AT 2026-11-22T01:48:59 DUE TO JOB REQUEUE ***", "preempted"),
    ("*** JOB 7 ON a CANCELLED AT 2026-03-03 DUE TO NODE FAILURE, SEE SLURMCTLD ***", "preempted"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "out_of_memory"),
    ("*** STEP 7.0 ON n1 CANCELLED AT 2026 ***\nn1: task 0: Out Of Memory", "out_of_memory"),
    ("Detected 1 oom_kill event\nn1: task 1: Exited with exit code 137", "out_of_memory"),
    ("oom-kill event(s) in step 7.0\n*** STEP 7.0 ON n1 CANCELLED AT 2026 ***", "out_of_memory"),
    ("n1: task 0: Exited with exit code 1\nState: OUT_OF_MEMORY (exit code 0)", "out_of_memory"),
    ("W cuda: CUDA_ERROR_OUT_OF_MEMORY, tries again", "unfinished"),
    ("Traceback (most recent call last):\nRuntimeError: CUDA out of memory", "crashed"),
    ("srun: error: n1: task 0: Exited with exit code 1", "crashed"),
    (
        "penstock train: stopped by SIGUSR1 after step 9\nn1: task 0: Exited with exit code 3",
        "stopped",
    ),
    ("", "unfinished"),
]
"""The last words of a job, and what became of it."""


@pytest.mark.parametrize("where", ["out", "err"])
@pytest.mark.parametrize("end, status", ENDS)
def test_partial_results_are_kept_and_marked(tmp_path, end: str, status: str, where: str) -> None:
    text = log("7", 4, None, done=20)
    files = {"slurm-7.out": text + end * (where == "out"), "slurm-7.err": end * (where == "err")}
    run = one(write(tmp_path, files)[0])
    assert (run.status, run.epochs, run.planned_epochs) == (status, 20, 50)
    assert (run.val_loss, run.val_acc) == (0.181, 0.919)
    assert not run.complete


def test_what_a_cancelled_job_broke_is_not_its_end(tmp_path) -> None:
    end = "Traceback (most recent call last):\n*** JOB 7 ON n1 CANCELLED AT 2026-01-01 ***\n"
    assert read_text(tmp_path, log("7", 4, None, done=2, end=end))[0].status == "cancelled"


@pytest.mark.parametrize("first, epochs, complete", [(20, 30, False), (0, 50, True)])
def test_a_requeued_job_without_a_header_is_an_attempt_each(
    tmp_path, first: int, epochs: int, complete: bool
) -> None:
    """The total is of what the last attempt did, and the preemption that of the first."""
    end = "*** JOB 9 ON n1 CANCELLED AT 2026-01-01 DUE TO PREEMPTION ***\n"
    before = log("9", 4, None, nodes=2, done=20, end=end)
    again = log("9", 4, 57.0, nodes=2, ranks=2, first=first)
    again = again[again.index("Max epochs") :].replace("  SLURM_JOB_ID: 9\n", "")
    gone, after = read_text(tmp_path, before + again)
    assert (gone.status, gone.restarts, gone.epochs) == ("preempted", 0, 20)
    assert (after.status, after.restarts, after.epochs) == ("complete", 1, epochs)
    assert after.complete is complete
    assert (after.job, after.devices, after.nodes, after.device) == (
        "9", 4, 2, "NVIDIA A100-SXM4-40GB",
    )  # fmt: skip


@pytest.mark.parametrize("gloo", [True, False])
def test_a_stopped_job_of_ours_that_is_requeued(tmp_path, gloo: bool) -> None:
    """The device is named by the last attempt alone, or known by what ranks talk through."""
    document = results(2, 5.0)
    end = (
        "penstock train: stopped by SIGUSR1 after step 2939 of 22000; --resume goes on from x\n"
        "srun: error: n2: task 1: Exited with exit code 3\n"
        "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-22 DUE TO JOB REQUEUE ***\n"
    )
    whole = our_log(document, {"SLURM_JOB_ID": "5"})
    begun = whole[: whole.index("Total training")]
    begun += "distributed_backend=gloo\n" * gloo
    epochs = [
        f"epoch {e}, step 9 of 27: loss 0.6; val_loss 0.{9 - e}, val_acc 0.5\n" for e in range(3)
    ]
    text = begun + epochs[0] + epochs[1] + end
    if not gloo:
        text += whole.replace("Total train", epochs[2] + MEASURED + "Total train")
    first, *others = read_text(tmp_path, text)
    assert (first.status, first.epochs, first.planned_epochs) == ("preempted", 2, 3)
    assert (first.val_loss, first.val_acc) == (0.8, 0.5)
    assert first.on_cpu
    for other in others:  # whose times are of both
        assert other.complete and other.on_cpu and other.epochs == 3


def test_several_jobs_in_one_file(tmp_path) -> None:
    text = log("1", 1, 362.45) + log("2", 4, 95.23)
    assert [(r.job, r.devices, r.restarts) for r in read_text(tmp_path, text)] == [
        ("1", 1, 0), ("2", 4, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", ["0.00", "-3.5", "nan"])
def test_zero_and_negative_times_are_refused(tmp_path, seconds: str) -> None:
    text = f"Job ID: 1\nTotal training time: {seconds} seconds\n"
    with pytest.raises(UsageError, match=r"slurm-77.out: the training time is .* above 0"):
        read_text(tmp_path, text)


@pytest.mark.parametrize("rounds", [60, pytest.param(2_000, marks=pytest.mark.long)])
def test_of_mutated_logs_only_a_usage_error_is_raised(tmp_path, rounds: int) -> None:
    """By who reads them and by the study."""
    whole = [
        log("5", 4, 95.23, ranks=2, epochs=6).encode(),
        (log("5", 4, None, done=3, epochs=6) + log("5", 4, 60.0, first=3, epochs=6)).encode(),
        (MEASURED + our_log(results(2, 5.0), {"SLURM_JOB_ID": "31"})).encode(),
    ]
    path, kept = tmp_path / "fuzz.out", 0
    for seed in range(rounds):
        rng = random.Random(seed)
        path.write_bytes(mutated(rng.choice(whole), rng))
        try:
            runs = read_log(path)
            kept += bool(runs)
            studies(runs, anyway=True)
        except UsageError:
            continue
    assert kept > rounds / 2
