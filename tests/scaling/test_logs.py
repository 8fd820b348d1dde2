"""Logs, folders, ledgers and trackers as runs: real ones, invented ones, and 10,000 broken ones."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.config.knobs import build
from penstock.base.config.train import TRAIN_DEFAULTS, TrainConfig
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.cluster.place import Place
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Record, case_key
from penstock.scaling.advice import exposed
from penstock.scaling.laws import Amdahl, Usl, peak
from penstock.scaling.runs import TrainingRun
from penstock.scaling.sources.read import read_runs
from penstock.scaling.sources.settings import plain, settings_of
from penstock.scaling.sources.slurm_log import lines_of, read_log
from penstock.scaling.study import Configuration, Study, studies
from penstock.scaling.tables import run_mark
from penstock.training.log_lines import first_lines, last_lines
from penstock.training.workloads.spiral import Spiral

from ..places import SHARED
from ..training.kit import torchrun
from .zoo import log, results, write

REAL = SHARED / "slurm-logs"
real_logs = pytest.mark.skipif(not REAL.is_dir(), reason=f"there are no real logs in {REAL.name}")


def one(path: Path) -> TrainingRun:
    (found,) = read_log(path)
    return found


def read_text(folder: Path, text: str, name: str = "slurm-77.out") -> list[TrainingRun]:
    (path,) = write(folder, {name: text})
    return read_log(path)


# --- real logs ----------------------------------------------------------------------------------


@real_logs
def test_a_real_log_of_one_rank() -> None:
    found = one(REAL / "slurm-12.out")
    assert (found.job, found.name, found.devices, found.nodes) == ("12", "mlp_single_gpu", 1, 1)
    assert (found.seconds, found.per_epoch, found.val_loss) == (4.33, 1.44, 0.6752)
    assert (found.epochs, found.planned_epochs, found.steps) == (3, 3, 219)
    assert (found.samples, found.batch, found.global_batch) == (10000, 32, 32)
    assert found.val_acc == pytest.approx(0.553)
    assert found.device == "cpu"
    assert found.complete
    assert found.settings["workload"] == "spiral_mlp"


@real_logs
def test_a_real_log_of_two_ranks_that_both_print() -> None:
    """Each says WORLD_SIZE: 1; the slower counts."""
    found = one(REAL / "slurm-13.out")
    assert (found.devices, found.nodes, found.global_batch, found.steps) == (2, 2, 64, 110)
    assert found.rank_seconds == (7.40, 7.77)
    assert (found.seconds, found.per_epoch, found.val_loss) == (7.77, 2.59, 0.6781)


@real_logs
def test_real_logs_are_one_hybrid_study() -> None:
    (study,) = studies(read_runs([REAL]), None, False)
    assert study.kind == "hybrid"
    assert study.points[1].speedup.value == pytest.approx(4.33 / 7.77)


# --- the lines ----------------------------------------------------------------------------------


def test_fields_that_share_a_line(tmp_path: Path) -> None:
    text = (
        "Job ID: 5              Job Name: a b    Node(s): raven[0123,0124]\n"
        "Number of nodes: 2          Number of tasks: 8            Total GPUs: 8\n"
        "Max epochs: 50 | Batch size (per GPU): 32 | Learning rate: 0.0001 | "
        "Hidden dimensions: [64, 32, 16] | Number of samples: 10000\n"
        "Number of GPUs: 4 /   GPU 0: NVIDIA A100-SXM4-40GB\n"
        "WORLD_SIZE: 4 GPUs on 1 node | Batch size per GPU: 32 | "
        "Effective batch size: 32 × 8 = 256\n"
        "Total training time: 57.14 seconds (0.95 minutes)\n"
    )
    (found,) = read_text(tmp_path, text)
    assert (found.job, found.name, found.devices, found.nodes) == ("5", "a b", 8, 2)
    assert (found.batch, found.global_batch, found.samples) == (32, 256, 10000)
    assert found.device == "NVIDIA A100-SXM4-40GB"
    assert found.settings["learning rate"] == "0.0001"
    assert found.settings["hidden layers"] == "[64, 32, 16]"
    assert found.complete


@pytest.mark.parametrize(
    "lines, devices",
    [
        ("WORLD_SIZE: 4 GPUs on 1 node", 4),
        ("WORLD_SIZE: 1\n  SLURM_NTASKS: 8", 8),
        ("Number of tasks: 2\nBatch size (per GPU): 16\nEffective batch size (a × b): 128", 8),
        ("Total GPUs: 4", 4),
        ("Batch size (per GPU): 8\nEffective batch size (b x n x 4 accumulated): 64", 2),
        ("  SLURM_NTASKS: Not set", 1),
    ],
)
def test_devices_by_what_tells_best(tmp_path: Path, lines: str, devices: int) -> None:
    (found,) = read_text(tmp_path, f"Job ID: 1\n{lines}\n")
    assert found.devices == devices


def test_epochs_counted_from_one_and_from_zero(tmp_path: Path) -> None:
    bar = "100%|███| 219/219 [00:07<00:00, 29.13it/s, loss=0.1, val_acc=0.953]"
    text = f"Job ID: 1\nMax epochs: 2\nEpoch 1/2: {bar}\rEpoch 2/2: {bar}\n"
    (found,) = read_text(tmp_path, text + "Total training time: 14.0 seconds\n")
    assert (found.epochs, found.val_acc, found.complete) == (2, 0.953, True)


def test_the_slowest_rank_counts_and_all_are_kept(tmp_path: Path) -> None:
    (found,) = read_text(tmp_path, log("7", 4, 95.23, ranks=4))
    assert found.seconds == 95.23
    assert found.rank_seconds == (95.23, 95.13, 95.03, 94.93)
    assert (found.val_loss, found.val_acc) == (0.1187, 0.949)


def test_gpu_utilisation_of_a_table_and_of_a_csv(tmp_path: Path) -> None:
    text = (
        "Job ID: 1\n| Fan Temp Perf Pwr:Usage/Cap | Memory-Usage | GPU-Util Compute M. |\n"
        "| N/A 30C P0 55W / 400W | 0MiB / 40960MiB | 7% Default |\n0, 97 %, 41 %, 55\n"
    )
    (found,) = read_text(tmp_path, text)
    assert found.utilisation == (7.0, 97.0)


def test_the_lines_of_our_own_training(tmp_path: Path) -> None:
    text = (
        "Job ID: 31\nJob ID: 31\nJob Name: study\nNode(s): n1\nRestarts: 1\nNumber of nodes: 1\n"
        "Number of tasks: 2\nWorkload: spiral\nMax epochs: 3\nBatch size (per GPU): 32\n"
        "Effective batch size (batch_size x num_gpus): 64\nLearning rate: 0.001\n"
        "Total training time: 7.40 seconds (0.12 minutes)\nBest validation loss: 0.5\n"
        "Best validation accuracy: 0.8125\n"
    )
    (found,) = read_text(tmp_path, text)  # the script's header and the program's are one
    assert (found.job, found.devices, found.restarts, found.val_acc) == ("31", 2, 1, 0.8125)
    assert found.complete


MEASURED = (
    "spiral: 2,834 parameters, 2 x cpu, 132 steps of 64 samples\n"
    "8,360 samples/s: 8,400 samples in 1.00 s, and 90.1 ms of validation\n"
    "rank 0: 5.00 ms a step: data_wait 11%, transfer 1%, forward 11%, backward 17%, "
    "communication 50%, optimizer 10%\n"
    "rank 0: at most 421 MiB of host memory\n"
    "rank 1: 1.25 s a step: data_wait 40%, communication 40%, unheard 20%\n"
)
"""What our own training prints before its times."""


def test_our_own_log_tells_its_device_and_its_phases(tmp_path: Path) -> None:
    (found,) = read_text(tmp_path, MEASURED + our_log(results(2, 5.0), {"SLURM_JOB_ID": "31"}))
    assert found.on_cpu and found.settings["device"] == "cpu"
    assert [rank.rank for rank in found.ranks] == [0, 1]
    first, second = (rank.totals for rank in found.ranks)
    assert first["communication"] == pytest.approx(0.5 * 0.005 * 132)
    assert first["step"] == pytest.approx(sum(first.values()) / 2) == pytest.approx(0.66)
    assert second == pytest.approx({"data_wait": 82.5, "communication": 82.5, "step": 165})
    assert exposed(Configuration((found,))) == pytest.approx((0.33 + 82.5) / 165.66)
    # Percents of all steps name no straggler.
    assert not any(rank.local or rank.waits for rank in found.ranks)


def test_a_log_without_a_header_is_named_by_its_file(tmp_path: Path) -> None:
    (found,) = read_text(tmp_path, "Max epochs: 2\nTotal training time: 3.0 seconds\n")
    assert found.job == "77"
    (found,) = read_text(tmp_path, "Max epochs: 2\n", "mine.log")
    assert found.job == "mine"


def test_a_file_without_an_end_of_line_costs_no_square(tmp_path: Path) -> None:
    path = tmp_path / "long.out"
    path.write_bytes(b"x" * 5_000_000 + b"\rJob ID: 3\r" + b"\xff\x1b[A" * 500_000)
    assert max(map(len, lines_of(path))) <= 1 << 14
    assert [found.job for found in read_log(path)] == ["3"]


def test_a_log_gives_no_orders_to_a_terminal(tmp_path: Path) -> None:
    (found,) = read_text(tmp_path, "Job ID: 5\x1b]0;owned\x07\x1b[2J\x00\nJob Name: a\x9bb\n")
    assert (found.job, found.name) == ("5]0;owned", "ab")
    (found,) = read_text(tmp_path, f"Job ID: {'9' * 5000}\n")
    assert found.job == "9" * 40


def test_settings_have_one_spelling() -> None:
    assert plain("1e-3") == plain(0.001) == "0.001"
    assert plain("adam") == "adam"
    assert plain("nan") == "nan"


def test_settings_are_exact() -> None:
    """Six digits would call models of 20 million parameters equal that differ by one."""
    assert plain(20_123_456) == plain("20123456.0") != plain(20_123_457)
    assert plain(0.1234567) != plain("0.1234568")


def test_logs_knobs_and_trackers_are_compared_by_one_list() -> None:
    log_ = {"max epochs": "50", "learning rate": "1e-3", "hidden dimensions": "[64, 32]"}
    knobs = {"epochs": 50, "learning_rate": 0.001, "hidden_dims": [64, 32]}
    tracked = {"max_epochs": "50", "lr": "0.001", "hidden_dims": "[64, 32]"}
    found = settings_of(log_)
    assert found == settings_of(knobs) == settings_of(tracked)
    assert found == {
        "number of epochs": "50", "learning rate": "0.001", "hidden layers": "[64, 32]",
    }  # fmt: skip


# --- two ranks that write at once ----------------------------------------------------------------


@pytest.mark.parametrize(
    "glued",
    [
        "Total training time: 95.23 secondsTotal training time: 95.40 seconds (1.59 minutes)\n",
        "Total training time: 95.23 seconds (1.59 minutes)Total training time: 95.40 seconds\n",
        "=====Total training time: 95.40 seconds (1.59 minutes)\n",
        "Epoch 49: 100%|██████████| 55/55 [00:02<00:00, val_acc=0.95]Total training time: 95.4 s\n",
    ],
)
def test_a_total_within_the_line_of_another_rank_is_found(tmp_path: Path, glued: str) -> None:
    (found,) = read_text(tmp_path, log("7", 4, 95.23) + glued)
    assert found.rank_seconds[-1] == found.seconds == 95.40
    assert found.complete


def test_fields_within_the_line_of_another_rank_are_found(tmp_path: Path) -> None:
    text = log("7", 4, 95.23)
    for line in (
        "Max epochs: 50",
        "Learning rate: 0.001",
        "Number of samples: 10000",
        "Batch size (per GPU): 32",
        "Effective batch size (batch_size × num_gpus): 128",
    ):
        assert line + "\n" in text
        text = text.replace(line + "\n", f"{line}{line}\n\n")
    (found,) = read_text(tmp_path, text)
    (plainly,) = read_text(tmp_path, log("7", 4, 95.23))
    assert found == plainly


def test_a_log_in_which_srun_names_the_tasks(tmp_path: Path) -> None:
    (plainly,) = read_text(tmp_path, log("7", 4, 95.23))
    lines = log("7", 4, 95.23).replace("\r", "\n").split("\n")
    for width in (1, 2):
        text = "\n".join(f"{i % 4:{width}}: {line}" for i, line in enumerate(lines))
        (found,) = read_text(tmp_path, text)
        assert found == plainly


def test_numbers_with_commas(tmp_path: Path) -> None:
    text = (
        "Job ID: 1\nBatch size (per GPU): 1,024\nEffective batch size (b × n): 1,024 × 8 = 8,192\n"
        "Number of samples: 1,281,167\nTotal training time: 1,295.23 seconds (21.59 minutes)\n"
    )
    (found,) = read_text(tmp_path, text)
    assert (found.seconds, found.samples) == (1295.23, 1_281_167)
    assert (found.batch, found.global_batch, found.devices) == (1024, 8192, 8)


# --- our own log ---------------------------------------------------------------------------------


def our_log(told: dict[str, Any], environ: dict[str, str], **knobs: Any) -> str:
    """What `penstock train spiral` prints where no terminal is."""
    given = {"epochs": told["epochs"], "batch_size": told["batch_size"], "learning_rate": 0.001}
    config = build(TrainConfig, TRAIN_DEFAULTS["spiral"], given, knobs)
    place = Place(world_size=told["world_size"], nodes=told["launch"]["nodes"])
    lines = first_lines("spiral", config, place, environ)
    return "\n".join([*lines, *last_lines({**told, "best": None}, Path("out"))]) + "\n"


def test_a_job_of_an_array_and_its_folder_are_one_run(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    told = results(2, 6.90312, job="12_3")
    run_folder(tmp_path / "run", told)
    write(tmp_path, {"slurm-12_3.out": our_log(told, environ)})
    (found,) = read_runs([tmp_path])
    assert (found.job, found.seconds) == ("12_3", pytest.approx(7.40312))


def test_our_log_and_our_folder_tell_the_same(tmp_path: Path) -> None:
    told = results(2, 6.90312, job="31")
    folder = run_folder(tmp_path / "run", told, hidden_dims=[64, 32, 16], num_samples=10000)
    (path,) = write(tmp_path, {"slurm-31.out": our_log(told, {"SLURM_JOB_ID": "31"})})
    logged, (kept,) = one(path), read_runs([folder])
    for name in (
        "job",
        "devices",
        "samples",
        "batch",
        "global_batch",
        "steps",
        "epochs",
        "complete",
    ):
        assert getattr(logged, name) == getattr(kept, name), name
    assert logged.samples == 7008  # of 10,000, which the seed counts
    both = logged.settings.keys() & kept.settings.keys()
    assert {name: logged.settings[name] for name in both} == {n: kept.settings[n] for n in both}
    # So a study may be of both.
    run_folder(tmp_path / "alone", results(1, 12.3456), hidden_dims=[64, 32, 16])
    (study,) = studies(read_runs([path, tmp_path / "alone"]), None, False)
    assert (study.kind, len(study.points)) == ("hybrid", 2)


def test_steps_that_were_limited_do_not_claim_all_epochs(tmp_path: Path) -> None:
    told = results(1, 5.4321, epochs=2)
    folder = run_folder(tmp_path / "run", told, epochs=50, max_steps=400)
    text = our_log(told, {"SLURM_JOB_ID": "31"}, epochs=50, max_steps=400)
    (path,) = write(tmp_path, {"slurm-31.out": text})
    logged, (kept,) = one(path), read_runs([folder])
    assert logged.epochs == kept.epochs == 2
    assert logged.planned_epochs is kept.planned_epochs is None
    assert logged.complete and kept.complete
    assert logged.settings["number of steps"] == kept.settings["number of steps"] == "400"


@pytest.mark.parametrize("told", ["bar", "best", "both", "training"])
def test_a_loss_that_is_nan_is_told(tmp_path: Path, told: str) -> None:
    text = log("7", 2, 50.0)
    if told in ("bar", "both"):
        text = text.replace("val_loss=0.151,", "val_loss=nan,")
    if told in ("best", "both"):
        text = text.replace("Best validation loss: 0.1187", "Best validation loss: nan")
    if told == "training":
        text = text.replace(
            "v_num=1, val_loss=0.151,", "v_num=1, train_loss_step=nan, val_loss=0.151,"
        )
    assert "nan" in text
    found = one(write(tmp_path, {"slurm-7.out": text})[0])
    assert found.diverged and found.complete
    assert found.val_loss is not None and math.isfinite(found.val_loss)
    (fine,) = write(tmp_path, {"slurm-8.out": log("8", 2, 50.0)})
    assert not one(fine).diverged


def test_a_loss_of_ours_that_is_null_was_nan(tmp_path: Path) -> None:
    """JSON has no NaN."""
    told = results(1, 5.0)
    told["history"][1]["val_loss"] = None
    (found,) = read_runs([run_folder(tmp_path / "run", told)])
    assert found.diverged


def test_a_log_that_was_cut_before_its_device_names_none(tmp_path: Path) -> None:
    head = "Job ID: 9\nNumber of tasks: 2\nMax epochs: 3\nBatch size (per GPU): 32\n"
    (path,) = write(tmp_path, {"slurm-9.out": head})
    assert (one(path).device, one(path).unit) == (None, "device")
    (path,) = write(tmp_path, {"slurm-9.out": head + "CUDA available: True\n"})
    assert one(path).unit == "GPU"
    assert "device" not in one(path).settings


# --- known laws, by way of the logs --------------------------------------------------------------


def study_of_logs(folder: Path, speedup: Callable[[float], float], sizes: tuple[int, ...]) -> Study:
    """Five logs of each size, their times as noisy as runs are and rounded as logs are."""
    rng = np.random.default_rng(3)
    jobs = [(n, 1000 / speedup(n) * rng.lognormal(0, 0.005)) for n in sizes for _ in range(5)]
    texts = {
        f"slurm-{i}.out": log(str(i), n, seconds, nodes=-(-n // 4), epochs=2, ranks=min(n, 2))
        for i, (n, seconds) in enumerate(jobs)
    }
    write(folder, texts)
    (study,) = studies(read_runs([folder]), None, False)
    assert [len(point.at.runs) for point in study.points] == [5] * len(sizes)
    return study


def test_amdahls_law_is_recovered_from_logs(tmp_path: Path) -> None:
    study = study_of_logs(tmp_path, lambda p: 1 / (0.04 + 0.96 / p), (1, 2, 4, 8))
    assert isinstance(study.amdahl, Amdahl)
    serial = study.amdahl.serial
    assert serial.low is not None and serial.high is not None
    assert 0.03 < serial.low <= 0.04 <= serial.high < 0.05


def test_the_usl_is_recovered_from_logs(tmp_path: Path) -> None:
    sigma, kappa = 0.03, 0.002

    def speedup(p: float) -> float:
        return p / (1 + sigma * (p - 1) + kappa * p * (p - 1))

    study = study_of_logs(tmp_path, speedup, (1, 2, 4, 8, 16))
    assert isinstance(study.usl, Usl) and study.usl.peak is not None
    turn = float(peak(sigma, kappa))
    for found, truth in (
        (study.usl.sigma, sigma),
        (study.usl.kappa, kappa),
        (study.usl.peak, turn),
    ):
        assert found.low is not None and found.high is not None
        assert found.low <= truth <= found.high
        assert 0.5 * truth < found.low and found.high < 1.5 * truth


# --- what broke off -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end, status",
    [
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T10:00:00 ***", "cancelled"),
        ("*** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO TIME LIMIT ***", "timeout"),
        ("*** JOB 7 ON n1 CANCELLED AT 2026-01-01 DUE TO PREEMPTION ***", "preempted"),
        ("*** JOB 5 ON n1 CANCELLED AT 2026-11-22T01:48:59 DUE TO JOB REQUEUE ***", "preempted"),
        (
            "*** JOB 7 ON a CANCELLED AT 2026-03-03 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
            "preempted",
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "crashed"),
        ("Traceback (most recent call last):\nRuntimeError: CUDA out of memory", "crashed"),
        ("srun: error: n1: task 0: Exited with exit code 1", "crashed"),
        (
            "penstock train: stopped by SIGUSR1 after step 9\nn1: task 0: Exited with exit code 3",
            "stopped",
        ),
        ("", "unfinished"),
    ],
)
@pytest.mark.parametrize("where", ["out", "err"])
def test_partial_results_are_kept_and_marked(
    tmp_path: Path, end: str, status: str, where: str
) -> None:
    text = log("7", 4, None, done=20)
    files = {"slurm-7.out": text + end * (where == "out"), "slurm-7.err": end * (where == "err")}
    found = one(write(tmp_path, files)[0])
    assert (found.status, found.epochs, found.planned_epochs) == (status, 20, 50)
    assert (found.val_loss, found.val_acc) == (0.181, 0.919)
    assert not found.complete


def test_what_a_cancelled_job_broke_is_not_its_end(tmp_path: Path) -> None:
    end = "Traceback (most recent call last):\n*** JOB 7 ON n1 CANCELLED AT 2026-01-01 ***\n"
    assert read_text(tmp_path, log("7", 4, None, done=2, end=end))[0].status == "cancelled"


def test_a_requeued_job_in_one_file_is_an_attempt_each(tmp_path: Path) -> None:
    end = "*** JOB 9 ON n1 CANCELLED AT 2026-01-01 DUE TO PREEMPTION ***\n"
    first, second = log("9", 4, None, done=20, end=end), log("9", 4, 60.0, first=20)
    before, after = read_text(tmp_path, first + second)
    assert (before.status, before.restarts, before.epochs) == ("preempted", 0, 20)
    assert (after.status, after.restarts, after.epochs) == ("complete", 1, 30)
    assert not after.complete  # its time is of 30 epochs
    _, anew = read_text(tmp_path, first + log("9", 4, 95.0))
    assert anew.complete


@pytest.mark.parametrize("first, epochs, complete", [(20, 30, False), (0, 50, True)])
def test_a_requeued_job_without_a_header_is_an_attempt_each(
    tmp_path: Path, first: int, epochs: int, complete: bool
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
def test_a_stopped_job_of_ours_that_is_requeued(tmp_path: Path, gloo: bool) -> None:
    """The device is named by the last attempt alone, or known by what ranks talk through."""
    told = results(2, 5.0)
    end = (
        "penstock train: stopped by SIGUSR1 after step 2939 of 22000; --resume goes on from x\n"
        "srun: error: n2: task 1: Exited with exit code 3\n"
        "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-22 DUE TO JOB REQUEUE ***\n"
    )
    whole = our_log(told, {"SLURM_JOB_ID": "5"})
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


def test_several_jobs_in_one_file(tmp_path: Path) -> None:
    text = log("1", 1, 362.45) + log("2", 4, 95.23)
    assert [(r.job, r.devices, r.restarts) for r in read_text(tmp_path, text)] == [
        ("1", 1, 0), ("2", 4, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", ["0.00", "-3.5", "nan"])
def test_zero_and_negative_times_are_refused(tmp_path: Path, seconds: str) -> None:
    text = f"Job ID: 1\nTotal training time: {seconds} seconds\n"
    with pytest.raises(UsageError, match=r"slurm-77.out: the training time is .* above 0"):
        read_text(tmp_path, text)


# --- fuzz ---------------------------------------------------------------------------------------


def mutated(text: bytes, rng: random.Random) -> bytes:
    """A log that a bad disk, two writers or a joker got at."""
    data = bytearray(text)
    for _ in range(rng.randint(1, 12)):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 5, 40, 400))
        kind = rng.randrange(6)
        if kind == 0:
            del data[at : at + size]
        elif kind == 1:
            data[at:at] = rng.randbytes(size)
        elif kind == 2:
            data[at:at] = data[rng.randrange(len(data) + 1) :][:size]
        elif kind == 3:
            data[at:at] = rng.choice(JOKES)
        elif kind == 4 and (digits := [i for i, b in enumerate(data) if 48 <= b < 58]):
            data[rng.choice(digits)] = rng.choice(b"0123456789-.e")
        else:
            data = data[: max(at, 1)]
    return bytes(data)


JOKES = (
    b"\rJob ID:", b"9" * 400, b"Effective batch size: 0\n", b"Max epochs: -1\n", b"\x1b[A" * 9,
    b"Total training time: 1e999 seconds\n", b"Batch size (per GPU): 0\n", b"(" * 300, b" " * 3000,
    b"Epoch 999999999/0: 1/1 [", b"Number of tasks: 99999999999999999999\n", b"\n" * 40, b"| | |",
    b"Total training time: nan\n", b"val_acc=--e..1", b"MiB / 1MiB | 999% ", b"Restarts: x\n",
    b"SLURM_JOB_ID:    \n", b"a-" * 200 + b"-epoch=", b"Best checkpoint: " + b"-epoch" * 50 + b"\n",
)  # fmt: skip


def fuzz(folder: Path, rounds: range) -> None:
    """Read whatever comes; only `UsageError` may be raised, here and by the study."""
    whole = [
        log("5", 4, 95.23, ranks=2, epochs=6).encode(),
        (log("5", 4, None, done=3, epochs=6) + log("5", 4, 60.0, first=3, epochs=6)).encode(),
        (MEASURED + our_log(results(2, 5.0), {"SLURM_JOB_ID": "31"})).encode(),
    ]
    path, kept = folder / "fuzz.out", 0
    for seed in rounds:
        rng = random.Random(seed)
        path.write_bytes(mutated(rng.choice(whole), rng))
        try:
            found = read_log(path)
            kept += bool(found)
            studies(found, None, anyway=True)
        except UsageError:
            continue
    assert kept > len(rounds) / 2


def test_five_hundred_mutated_logs(tmp_path: Path) -> None:
    fuzz(tmp_path, range(500))


@pytest.mark.slow
def test_ten_thousand_mutated_logs(tmp_path: Path) -> None:
    fuzz(tmp_path, range(10_000))


# --- folders, ledgers ---------------------------------------------------------------------------


def run_folder(path: Path, told: dict[str, Any], epochs: int = 3, **args: Any) -> Path:
    path.mkdir(parents=True)
    (path / "training_results.json").write_text(json.dumps(told))
    asked = {"epochs": epochs, "learning_rate": 0.001, "max_steps": None} | args
    (path / "args.json").write_text(json.dumps(asked))
    return path


def test_run_folders_below_a_folder(tmp_path: Path) -> None:
    phases = {"forward": 0.004, "backward": 0.006, "communication": 0.002}
    run_folder(tmp_path / "a" / "one", results(1, 9.123))
    two = run_folder(tmp_path / "a" / "two", results(2, 5.456, nodes=2, phases=phases))
    steps = two / "steps"
    steps.mkdir()
    header = "step,epoch,samples,loss,step_s,forward_s,backward_s,communication_s\n"
    for rank in range(2):
        (steps / f"rank{rank}.csv").write_text(header + "1,0,32,0.7,0.012,0.004,0.006,0.002\n2,0,3")
    first, second = read_runs([tmp_path])
    assert (first.job, first.devices, first.seconds) == ("one", 1, pytest.approx(9.623))
    assert (first.samples, first.batch, first.steps) == (7008, 32, 219)
    assert first.val_loss == pytest.approx(0.68)
    assert (second.devices, second.nodes, second.global_batch) == (2, 2, 64)
    assert second.ranks[1].local == (pytest.approx(0.01),)
    assert second.ranks[1].host == "n1"
    assert second.settings["learning rate"] == "0.001"
    (study,) = studies([first, second], None, False)
    assert study.kind == "hybrid"
    assert read_runs([two, tmp_path / "a" / "one" / "training_results.json"])[0].devices == 1


def test_phases_without_steps_are_medians(tmp_path: Path) -> None:
    told = results(2, 5.0, phases={"forward": 0.004, "communication": 0.002})
    (found,) = read_runs([run_folder(tmp_path / "two", told)])
    assert found.ranks[0].local == (0.004,)
    assert found.ranks[0].waits == (0.002,)


def test_a_run_that_was_stopped_is_partial(tmp_path: Path) -> None:
    (found,) = read_runs([run_folder(tmp_path / "x", results(2, 5.0, status="stopped"), epochs=9)])
    assert (found.status, found.epochs, found.planned_epochs) == ("stopped", 3, 9)
    assert not found.complete


def test_a_run_and_its_log_are_one(tmp_path: Path) -> None:
    run_folder(tmp_path / "run", results(2, 6.9031, job="31"))
    write(tmp_path, {"slurm-31.out": log("31", 2, 7.40, epochs=3, samples=7008)})
    (found,) = read_runs([tmp_path])
    assert found.seconds == pytest.approx(7.4031)
    # Two trainings of one job are two.
    run_folder(tmp_path / "again", results(2, 6.8031, job="31"))
    assert len(read_runs([tmp_path])) == 2


def test_a_run_that_was_tracked_tells_how_busy_its_gpus_were(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", results(2, 5.0123))
    lines = [
        {"event": "begin", "time": 0, "step": 0},
        {"event": "system", "time": 1, "step": 5,
         "metrics": {"system/gpu0_util_percent": 90, "system/gpu1_util_percent": 80.5,
                     "system/gpu0_memory_bytes": 7, "system/cpu_percent": 100}},
        {"event": "step", "time": 2, "step": 6, "metrics": {"train_loss_step": 0.1}},
        {"event": "system", "time": 3, "step": 9, "metrics": {"system/gpu0_util_percent": 70}},
    ]  # fmt: skip
    events = folder / "events.jsonl"
    events.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "sys')
    (found,) = read_runs([folder])
    assert found.utilisation == (90.0, 80.5, 70.0)
    # Of GPUs that others may have used, nothing.
    (folder / "training_results.json").write_text(json.dumps(results(1, 5.0123)))
    assert read_runs([folder])[0].utilisation == ()


def test_how_busy_gpus_were_is_kept_whoever_knew_it(tmp_path: Path) -> None:
    told = results(2, 5.0123, job="31")
    run_folder(tmp_path / "run", told)
    told.pop("history")
    known = record(told, 0).model_copy(
        update={"facts": {"training": told, "utilisation": {"gpu_percent": 71.5}}}
    )
    Ledger(tmp_path / "study.ledger").append(known)
    (found,) = read_runs([tmp_path])
    assert (found.source, found.utilisation) == (str(tmp_path / "run"), (71.5,))
    seen = log("31", 2, 5.51) + "\n0, 64 %, 41 %, 55\n"
    (path,) = write(tmp_path, {"slurm-31.out": seen})
    (found,) = read_runs([tmp_path / "run", path])
    assert (found.seconds, found.utilisation) == (5.5123, (64.0,))


def record(told: dict[str, Any], launch: int, status: str = "ok") -> Record:
    case = {"workload": "spiral", "preset": None, "epochs": 3, "world_size": told["world_size"]}
    given = {
        "id": f"r{launch}",
        "time": "2026-01-01T00:00:00+00:00",
        "scenario": "train",
        "case": case,
        "key": case_key("train", case),
        "launch": launch,
        "status": status,
        "facts": {"training": told} if status == "ok" else {},
    }
    return Record.model_validate(given)


def test_a_ledger_of_trainings(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "study.ledger")
    for launch, (devices, seconds) in enumerate([(1, 9.1), (1, 9.2), (2, 5.3)]):
        told = results(devices, seconds + 0.0123)
        del told["history"]
        ledger.append(record(told, launch))
    ledger.append(record(results(2, 5.3), 3, "crash"))
    ledger.append(record(results(1, 1.0), 4).model_copy(update={"scenario": "model"}))
    found = read_runs([tmp_path / "study.ledger"])
    assert [(r.devices, r.status) for r in found] == [
        (1, "complete"), (1, "complete"), (2, "crashed"), (2, "complete"),
    ]  # fmt: skip
    again = read_runs([tmp_path / "study.ledger" / "records.jsonl"])
    assert [(r.job, r.seconds) for r in again] == [(r.job, r.seconds) for r in found]
    (study,) = studies(found, None, False)
    assert [len(p.at.runs) for p in study.points] == [2, 1]


# --- trackers -----------------------------------------------------------------------------------

SCHEMA = """
create table runs (run_uuid text, name text, status text, start_time int, end_time int,
                   lifecycle_stage text);
create table metrics (key text, value real, timestamp int, run_uuid text, step int, is_nan int);
create table params (key text, value text, run_uuid text);
create table tags (key text, value text, run_uuid text);
"""


def mlflow_database(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA)
        for n, seconds in ((1, 100.5), (4, 30.25)):
            run = f"run{n}" * 8
            db.execute(
                "insert into runs values (?,?,?,?,?,?)",
                (run, f"spiral_{n}gpu", "FINISHED", 0, 1, "active"),
            )
            params = {
                "world_size": n,
                "batch_size": 32,
                "epochs": 2,
                "num_samples": 10000,
                "learning_rate": 0.001,
            }
            db.executemany(
                "insert into params values (?,?,?)", [(k, str(v), run) for k, v in params.items()]
            )
            db.execute("insert into tags values ('launch.job_id', ?, ?)", (str(40 + n), run))
            rows = [("train_s", seconds / 2, 0, run, e, 0) for e in range(2)]
            rows += [("val_loss", 0.5 - e / 10, 0, run, e, 0) for e in range(2)]
            rows += [("val_acc", 0.5 + e / 10, 0, run, e, 0) for e in range(2)]
            rows += [("system/gpu0_util_percent", 90.0, 0, run, 0, 0), ("x", 0.0, 0, run, 0, 1)]
            db.executemany("insert into metrics values (?,?,?,?,?,?)", rows)
        db.execute("insert into runs values ('gone', 'gone', 'FINISHED', 0, 1, 'deleted')")
    db.close()


def check_tracked(found: list[TrainingRun]) -> None:
    assert [(r.devices, r.epochs, r.batch, r.global_batch) for r in found] == [
        (1, 2, 32, 32), (4, 2, 32, 128),
    ]  # fmt: skip
    assert [r.seconds for r in found] == [100.5, 30.25]
    assert [(r.val_loss, r.val_acc) for r in found] == [(0.4, 0.6)] * 2
    (study,) = studies(found, None, False)
    assert study.kind == "hybrid"


def test_a_database_of_mlflow(tmp_path: Path) -> None:
    mlflow_database(tmp_path / "mlflow.db")
    found = read_runs([tmp_path / "mlflow.db"])
    check_tracked(found)
    assert [r.job for r in found] == ["41", "44"]
    assert found[0].utilisation == (90.0,)
    assert found == read_runs([tmp_path])


def test_a_loss_that_mlflow_keeps_as_nan_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    mlflow_database(path)
    with sqlite3.connect(path) as db:
        db.execute("update metrics set value = 0, is_nan = 1 where key = 'val_loss' and step = 1")
    db.close()
    found = read_runs([path])
    assert [(r.diverged, r.epochs, r.val_loss, r.complete) for r in found] == [
        (True, 2, 0.5, True)
    ] * 2


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("create table songs (name text)")
    db.close()
    with pytest.raises(UsageError, match=r"other.db is not a database of MLflow: no such table"):
        read_runs([path])


def test_files_of_mlflow(tmp_path: Path) -> None:
    for n, seconds in ((1, 100.5), (4, 30.25)):
        home = tmp_path / "mlruns" / "0" / f"run{n}"
        for kind in ("params", "metrics", "tags"):
            (home / kind).mkdir(parents=True)
        (home / "meta.yaml").write_text(
            f"run_name: spiral_{n}\nstatus: 3\nstart_time: 0\nend_time: {seconds * 1000}\n"
            "lifecycle_stage: active\n"
        )
        told = {"world_size": n, "batch_size": 32, "epochs": 2, "num_samples": 10000}
        for name, value in told.items():
            (home / "params" / name).write_text(str(value))
        (home / "metrics" / "val_loss").write_text("1 0.5 0\n2 0.4 1\ntorn")
        (home / "metrics" / "val_acc").write_text("1 0.5 0\n2 0.6 1\n")
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("name: Default\n")
    check_tracked(read_runs([tmp_path / "mlruns"]))


def comet_rows(key: str, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{
        "experimentKey": key, "metricName": "train_loss_step", "metricValue": "0.7",
        "timestamp": 1_700_000_000_000, "step": 0, "epoch": 0,
    }]  # fmt: skip
    for epoch in range(2):
        time = 1_700_000_000_000 + 1000 * (epoch + 1) / 2 * seconds
        for name, value in (("val_loss", 0.5 - epoch / 10), ("val_acc", 0.5 + epoch / 10)):
            rows.append({
                "experimentKey": key, "metricName": name, "metricValue": str(value),
                "timestamp": time, "step": epoch, "epoch": epoch,
            })  # fmt: skip
    return rows


PARAMETERS = {"batch_size": 32, "max_epochs": 2, "num_samples": 10000, "learning_rate": 0.001}


def test_metrics_of_comet_as_json(tmp_path: Path) -> None:
    """As its API gives them, with an experiment's parameters beside them."""
    told = [
        {
            "experimentKey": f"key{n}",
            "parameters": [{"name": k, "valueCurrent": str(v)}
                           for k, v in {**PARAMETERS, "num_gpus": n}.items()],
            "metrics": comet_rows(f"key{n}", seconds),
        }
        for n, seconds in ((1, 100.5), (4, 30.25))
    ]  # fmt: skip
    (path,) = write(tmp_path, {"comet.json": json.dumps(told)})
    check_tracked(read_runs([path]))


def test_metrics_of_comet_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = [
        {**row, **PARAMETERS, "num_gpus": n}
        for n, seconds in ((1, 100.5), (4, 30.25))
        for row in comet_rows(f"key{n}", seconds)
    ]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    check_tracked(read_runs([path]))


def test_experiments_of_comet_as_rows(tmp_path: Path) -> None:
    text = (
        "Name,num_gpus,batch_size,max_epochs,num_samples,duration,val_loss,val_acc\n"
        "spiral_1gpu,1,32,2,10000,00:01:40,0.4,0.6\nspiral_4gpu,4,32,2,10000,30.25,0.4,0.6\n"
    )
    (path,) = write(tmp_path, {"experiments.csv": text})
    found = read_runs([path])
    assert [(r.name, r.devices, r.seconds) for r in found] == [
        ("spiral_1gpu", 1, 100.0), ("spiral_4gpu", 4, 30.25),
    ]  # fmt: skip


def test_an_offline_archive_of_comet(tmp_path: Path) -> None:
    for n, seconds in ((1, 100.5), (4, 30.25)):
        messages: list[dict[str, Any]] = [
            {"type": "log_other", "payload": {"key": "launch.nodes", "value": 1}},
            *(
                {"type": "parameter_msg", "payload": {"param": {"paramName": k, "paramValue": v}}}
                for k, v in {**PARAMETERS, "world_size": str(n)}.items()
            ),
        ]
        for row in comet_rows("x", seconds):
            metric = {k: row[k] for k in ("metricName", "metricValue", "step")}
            told = {"metric": metric, "local_timestamp": row["timestamp"]}
            messages.append({"type": "metric_msg", "payload": told})
        with zipfile.ZipFile(tmp_path / f"{n}.zip", "w") as archive:
            archive.writestr("experiment.json", json.dumps({"offline_id": f"key{n}"}))
            archive.writestr("messages.json", "\n".join(map(json.dumps, messages)))
    found = read_runs([tmp_path])
    check_tracked(found)
    assert [r.nodes for r in found] == [1, 1]
    (tmp_path / "training_results.json").write_text(json.dumps(results(1, 9.123)))
    assert [r.seconds for r in read_runs([tmp_path])] == [9.623]


def archive(path: Path, key: str, told: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """As Comet writes it offline: messages, a line each."""
    messages: list[dict[str, Any]] = [
        {"type": "parameter_msg", "payload": {"param": {"paramName": k, "paramValue": str(v)}}}
        for k, v in told.items()
    ]
    for row in rows:
        metric = {"metricName": row["name"], "metricValue": row["value"], "step": row["step"]}
        payload = {"metric": metric, "local_timestamp": row["time"]}
        messages.append({"type": "metric_msg", "payload": payload})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("experiment.json", json.dumps({"offline_id": key}))
        file.writestr("messages.json", "\n".join(map(json.dumps, messages)))


def epochs_told(first: int, last: int) -> list[dict[str, Any]]:
    """Of our own training: seconds of each epoch and its score."""
    times = {"train_s": 10.25, "val_s": 1.0}
    return [
        {"name": name, "value": value, "step": 10 * epoch, "time": 1e12 + 1000 * epoch}
        for epoch in range(first, last)
        for name, value in {**times, "val_loss": 0.5}.items()
    ]


def test_an_experiment_of_comet_that_was_stopped_is_partial(tmp_path: Path) -> None:
    archive(tmp_path / "a.zip", "k1", {"world_size": 2, "epochs": 4}, epochs_told(0, 3))
    (found,) = read_runs([tmp_path / "a.zip"])
    assert (found.epochs, found.planned_epochs, found.status) == (3, 4, "unfinished")
    assert found.seconds == pytest.approx(3 * 11.25)
    assert not found.complete
    archive(tmp_path / "b.zip", "k2", {"world_size": 2}, [])
    (found,) = read_runs([tmp_path / "b.zip"])
    assert found.status == "unknown" and not found.complete
    assert run_mark(found) == "* k2: does not tell how far it came; not compared."


@pytest.mark.parametrize("by_name", [True, False])
def test_the_parts_of_an_experiment_that_went_on_are_one(tmp_path: Path, by_name: bool) -> None:
    """The second has no parameters; it takes an epoch again that the first had told."""
    archive(tmp_path / "1.zip", "k1", {"world_size": 2, "epochs": 4}, epochs_told(0, 3))
    archive(tmp_path / "2.zip", "k1", {}, epochs_told(2, 4))
    paths = sorted(tmp_path.glob("*.zip"), reverse=True) if by_name else [tmp_path]
    (found,) = read_runs(paths)
    assert (found.devices, found.epochs, found.status) == (2, 4, "complete")
    assert found.seconds == pytest.approx(4 * 11.25)
    # The own end of a run that could not count its epochs.
    rows = [{"name": "session_s", "value": 1.0, "step": 9, "time": 2e12}]
    archive(tmp_path / "3.zip", "k1", {"max_steps": 9}, rows)
    (found,) = read_runs([tmp_path])
    assert (found.planned_epochs, found.complete) == (None, True)


def test_runs_of_an_unknown_number_of_devices_are_left_out_with_a_word(tmp_path: Path) -> None:
    archive(tmp_path / "1.zip", "k1", {"world_size": 2, "epochs": 3}, epochs_told(0, 3))
    archive(tmp_path / "2.zip", "k2", {"epochs": 3}, epochs_told(0, 3))
    mlflow_database(tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as db:
        db.execute("delete from params where key = 'world_size' and value = '1'")
    db.close()
    said: list[str] = []
    assert [run.devices for run in read_runs([tmp_path], said.append)] == [2, 4]
    assert said == [
        f"{tmp_path / 'mlflow.db'}: 1 run without a number of devices, left out",
        f"{tmp_path / '2.zip'}: 1 run without a number of devices, left out",
    ]


def test_a_run_of_mlflow_that_stopped_early_is_not_whole(tmp_path: Path) -> None:
    mlflow_database(tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as db:
        db.execute("update params set value = '5' where key = 'epochs'")
    db.close()
    found = read_runs([tmp_path / "mlflow.db"])
    assert [(run.epochs, run.complete) for run in found] == [(2, False)] * 2


@pytest.mark.slow
def test_a_real_training_is_the_same_run_wherever_it_is_read(tmp_path: Path) -> None:
    """Its folder, its log, a real database of MLflow and a real archive of Comet."""
    pytest.importorskip("torch")
    words = "train spiral --epochs 2 --num-samples 1000 --device cpu --track".split()
    trackers = [
        name
        for name, package in (("mlflow", "mlflow"), ("comet", "comet_ml"))
        if find_spec(package)
    ]
    told = subprocess.run(
        [sys.executable, "-m", "penstock", *words, *trackers, "--output-dir", tmp_path / "run"],
        check=True, capture_output=True, text=True, env={**os.environ, "SLURM_JOB_ID": "31"},
    )  # fmt: skip
    (folder,) = read_runs([tmp_path / "run"])
    others = [*tmp_path.glob("run/**/*.db"), *tmp_path.glob("run/**/*.zip")]
    assert len(others) == len(trackers)
    assert folder.complete and folder.ranks[0].local
    for other in others:
        (tracked,) = read_runs([other])
        for name in ("devices", "seconds", "epochs", "samples", "batch", "val_loss", "val_acc"):
            assert getattr(tracked, name) == pytest.approx(getattr(folder, name)), (name, other)
        assert len(read_runs([tmp_path / "run", other])) == 1
    (path,) = write(tmp_path, {"slurm-31.out": told.stdout})
    log_run = one(path)
    assert folder.seconds is not None
    assert log_run.seconds == pytest.approx(folder.seconds, abs=0.006)
    assert (log_run.job, log_run.devices, log_run.epochs, log_run.batch) == ("31", 1, 2, 32)
    assert (log_run.samples, log_run.steps) == (folder.samples, folder.steps)
    assert len(read_runs([tmp_path / "run", path])) == 1
    assert log_run.val_acc == pytest.approx(folder.val_acc, abs=1e-4)


@pytest.mark.slow
def test_a_real_experiment_of_comet_that_went_on_is_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("comet_ml")
    out = tmp_path / "run"
    words = "train spiral --epochs 80 --num-samples 3000 --device cpu --track comet".split()
    command = [sys.executable, "-m", "penstock", *words, "--output-dir", str(out)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    until = time.monotonic() + 60
    with subprocess.Popen(command, **quiet) as first:
        while not (out / "training_results.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        first.terminate()
    assert first.returncode == 3
    # A run that a signal stops waits for its trackers but briefly; this sends what they lack.
    subprocess.run([*command[:3], "track", "sync", str(out)], check=True, **quiet)
    (stopped,) = read_runs([*out.glob("track/comet/*.zip")])
    assert stopped.status == "unfinished" and 0 < (stopped.epochs or 0) < 80
    subprocess.run([*command, "--resume"], check=True, **quiet)
    parts = [*out.glob("track/comet/*.zip")]
    assert len(parts) == 2
    (whole,), (folder,) = read_runs(parts), read_runs([out])
    assert (whole.epochs, whole.complete, whole.devices) == (80, True, 1)
    assert whole.seconds == pytest.approx(folder.seconds)


# --- none of these ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.out", "a.err", "a.log", "a.txt", "job.o123"])
@pytest.mark.parametrize("first", ["[rank: 0] Seed set to 42", "{'world_size': 4}"])
def test_a_log_that_begins_as_json_does_is_a_log(tmp_path: Path, name: str, first: str) -> None:
    (path,) = write(tmp_path, {name: f"{first}\n{log('7', 4, 95.23)}"})
    (found,) = read_runs([path])
    assert (found.job, found.seconds) == ("7", 95.23)
    (empty,) = write(tmp_path, {name: f"{first}\n"})
    with pytest.raises(UsageError, match="holds no run"):
        read_runs([empty])
    (told,) = write(tmp_path, {"results.txt": json.dumps(results(2, 5.0123))})
    assert read_runs([told])[0].devices == 2


def test_what_else_lies_in_a_folder_is_passed_over_with_a_word(tmp_path: Path) -> None:
    write(tmp_path, {"slurm-7.out": log("7", 4, 95.23)})
    with sqlite3.connect(tmp_path / "songs.db") as db:
        db.execute("create table songs (name text)")
    db.close()
    (tmp_path / "thumbs.db").write_bytes(b"\x00\x01 nothing of SQLite")
    (tmp_path / "torn.zip").write_bytes(b"PK\x03\x04" + b"x" * 100)
    with zipfile.ZipFile(tmp_path / "sources.zip", "w") as other:
        other.writestr("readme", "nothing of Comet")
    said: list[str] = []
    (found,) = read_runs([tmp_path], said.append)
    assert found.job == "7"
    assert [sentence.partition(": ")[0] for sentence in said] == [
        f"{tmp_path / 'songs.db'} is not a database of MLflow",
        f"{tmp_path / 'thumbs.db'} is not a database of MLflow",
        f"{tmp_path / 'torn.zip'} is not an archive of Comet",
    ]
    assert all(sentence.endswith("; it is passed over") for sentence in said)


@pytest.mark.parametrize(
    "name, content",
    [
        ("empty.out", b""),
        ("poem.txt", b"Shall I compare thee\nto a summer's day?\n"),
        ("numbers.csv", b"a,b\n1,2\n"),
        ("list.json", b"[1, 2]"),
        ("picture.png", b"\x89PNG\r\n\x1a\n\x00\x00"),
    ],
)
def test_what_holds_no_run_is_said_in_a_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"{name} holds no run: it is neither the output of"):
        read_runs([path])


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("torn.json", b'{"world_size": 1,', "torn.json is not JSON"),
        ("odd.json", b'{"world_size": "many"}', "odd.json is not what a training left"),
        ("odd.json", b'{"world_size": 1, "ranks": [3]}', "odd.json is not what a training left"),
        ("records.jsonl", b"{}\n", "records.jsonl, line 1"),
        ("bad.zip", b"PK\x03\x04" + b"x" * 100, "bad.zip is not an archive of Comet"),
        ("bad.db", b"SQLite format 3\0" + b"x" * 100, "bad.db is not a database of MLflow"),
    ],
)
def test_what_is_broken_is_said_in_a_sentence(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_runs([path])


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing cannot be read: No such file"):
        read_runs([tmp_path / "nothing"])
    with pytest.raises(UsageError, match="holds no run"):
        read_runs([tmp_path])


class Slowed(Spiral):
    """Two spirals, on whose second rank every step takes 50 ms more."""

    def loss(self, model: Any, batch: Any) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(0.05)
        return super().loss(model, batch)


@pytest.mark.slow
def test_a_rank_slowed_by_50_ms_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tests.scaling.test_logs:Slowed", "--num-samples", "200", "--batch-size", "4"]
    done = torchrun(tmp_path / "run", *words, "--epochs", "2", "--optimizer", "adam")
    assert done.returncode == 0, done.stderr
    assert main(["scaling", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"rank 1\b[^.]* holds the others up: [4-9]\d\.?\d* ms", said), said
