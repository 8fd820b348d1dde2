"""Logs as runs: real ones, the seed's and our own."""

import math
from typing import Any

import pytest

from penstock.base import UsageError
from penstock.scaling.advice import exposed
from penstock.scaling.runs import plain, settings_of
from penstock.scaling.sources.read import read_runs
from penstock.scaling.sources.slurm_log import raw_lines, read_log, text_of
from penstock.scaling.study import Configuration, studies
from penstock.scaling.tables import run_mark

from ..places import SHARED
from .kit import MEASURED, log, one, our_log, read_text, results, run_folder, write

REAL = SHARED / "slurm-logs"


real_logs = pytest.mark.skipif(not REAL.is_dir(), reason=f"there are no real logs in {REAL.name}")


@real_logs
def test_a_real_log_of_one_rank() -> None:
    run = one(REAL / "slurm-12.out")
    assert (run.job, run.name, run.devices, run.nodes) == ("12", "mlp_single_gpu", 1, 1)
    assert (run.seconds, run.per_epoch, run.val_loss) == (4.33, 1.44, 0.6752)
    assert (run.epochs, run.planned_epochs, run.steps) == (3, 3, 219)
    assert (run.samples, run.batch, run.global_batch) == (10000, 32, 32)
    assert run.val_acc == pytest.approx(0.553)
    assert run.device == "cpu"
    assert run.complete
    assert run.settings["workload"] == "spiral_mlp"


@real_logs
def test_a_real_log_of_two_ranks_that_both_print() -> None:
    """Each says WORLD_SIZE: 1; the slower counts."""
    run = one(REAL / "slurm-13.out")
    assert (run.devices, run.nodes, run.global_batch, run.steps) == (2, 2, 64, 110)
    assert run.rank_seconds == (7.40, 7.77)
    assert (run.seconds, run.per_epoch, run.val_loss) == (7.77, 2.59, 0.6781)
    (study,) = studies(read_runs([REAL]), False)
    assert study.kind == "hybrid"
    assert study.points[1].speedup.value == pytest.approx(4.33 / 7.77)


BAR = "100%|███| 219/219 [00:07<00:00, 29.13it/s, loss=0.1, val_acc=0.953]"
CUT = "Job ID: 9\nNumber of tasks: 2\nMax epochs: 3\nBatch size (per GPU): 32\n"
TOLD: dict[str, tuple[str, dict[str, object]]] = {
    "fields that share a line": (
        ("Job ID: 5              Job Name: a b    Node(s): raven[0123,0124]\n"
        "Number of nodes: 2          Number of tasks: 8            Total GPUs: 8\n"
        "Max epochs: 50 | Batch size (per GPU): 32 | Learning rate: 0.0001 | "
        "Hidden dimensions: [64, 32, 16] | Number of samples: 10000\n"
        "Number of GPUs: 4 /   GPU 0: NVIDIA A100-SXM4-40GB\n"
        "WORLD_SIZE: 4 GPUs on 1 node | Batch size per GPU: 32 | "
        "Effective batch size: 32 × 8 = 256\n"
        "Total training time: 57.14 seconds (0.95 minutes)\n"),
        {"job": "5", "name": "a b", "devices": 8, "nodes": 2, "batch": 32, "global_batch": 256,
         "samples": 10000, "device": "NVIDIA A100-SXM4-40GB", "complete": True},
    ),
    "epochs from one": (
        (f"Job ID: 1\nMax epochs: 2\nEpoch 1/2: {BAR}\rEpoch 2/2: {BAR}\n"
        "Total training time: 14.0 seconds\n"),
        {"epochs": 2, "val_acc": 0.953, "complete": True},
    ),
    "the slowest rank": (
        log("7", 4, 95.23, ranks=4),
        {"seconds": 95.23, "rank_seconds": (95.23, 95.13, 95.03, 94.93), "val_loss": 0.1187,
         "val_acc": 0.949},
    ),
    "GPUs by a table and a CSV": (
        ("Job ID: 1\n| Fan Temp Perf Pwr:Usage/Cap | Memory-Usage | GPU-Util Compute M. |\n"
        "| N/A 30C P0 55W / 400W | 0MiB / 40960MiB | 7% Default |\n0, 97 %, 41 %, 55\n"),
        {"utilisation": (7.0, 97.0)},
    ),
    "GPUs by the names of columns": (
        ("Job ID: 1\ntimestamp, index, name, memory.used [MiB], utilization.gpu [%]\n"
        "2025/09/05 10:00:01.123, 0, NVIDIA A10G, 1234 MiB, 40 %\n"
        "2025/09/05 10:00:01.125, 1, NVIDIA A10G, 1234 MiB, [N/A]\nGPU-Util: 50%\n"
        "# gpu    pwr  gtemp     sm    mem\n# Idx      W      C      %      %\n"
        "    0     61     35     60     45\n    1     61     35      -     45\n"
        "# gpu    pid   type     sm    mem\n    0   4711      C     12     45\n"),
        {"utilisation": (40.0, 50.0, 60.0)},
    ),
    "aligned fields": (
        ("Job ID:\t8\nMax epochs      : 50\nBatch size:      32\tLearning rate:  0.1\n"
        "Total training time:     0:06:40\n"),
        {"job": "8", "epochs": 50, "batch": 32, "seconds": 400, "complete": True},
    ),
    "the bar that Lightning draws where rich is installed": (
        ("Job ID: 5\nBatch size (per GPU): 4\n"
        "Epoch 1/2  ━━━━━╸━━ 6/10 0:00:00 • 0:00:00 75.88it/s train_loss: nan\n"
        "Epoch 2/2  ━━━━━━━━ 10/10 0:00:00 • 0:00:00 75.88it/s train_loss: 0.020\n"
        "                                                   val_loss: 0.016  \n"
        "                                                   val_acc: 0.900   \n"
        "Total training time: 0.51 seconds\n"),
        {"epochs": None, "steps": 10, "val_loss": 0.016, "val_acc": 0.9, "diverged": True},
    ),
    "seff below it": (
        ("Job ID: 1\nMax epochs: 5\nTotal training time: 3.0 seconds\n"
        "Job ID: 1\nCluster: raven\nState: COMPLETED (exit code 0)\nNodes: 1\n"),
        {"job": "1", "complete": True},
    ),
    "our own, below the header of its script": (
        ("Job ID: 31\nJob ID: 31\nJob Name: study\nNode(s): n1\nRestarts: 1\nNumber of nodes: 1\n"
        "Number of tasks: 2\nWorkload: spiral\nMax epochs: 3\nBatch size (per GPU): 32\n"
        "Effective batch size (batch_size x num_gpus): 64\nLearning rate: 0.001\n"
        "Total training time: 7.40 seconds (0.12 minutes)\nBest validation loss: 0.5\n"
        "Best validation accuracy: 0.8125\n"),
        {"job": "31", "devices": 2, "restarts": 1, "val_acc": 0.8125, "complete": True},
    ),
    "numbers with commas": (
        ("Job ID: 1\nBatch size (per GPU): 1,024\n"
        "Effective batch size (b × n): 1,024 × 8 = 8,192\nNumber of samples: 1,281,167\n"
        "Total training time: 1,295.23 seconds (21.59 minutes)\n"),
        {"seconds": 1295.23, "samples": 1_281_167, "batch": 1024, "global_batch": 8192,
         "devices": 8},
    ),
    "decimal commas": (
        ("Job ID: 1\n"
        "Epoch 0: 100%|##########| 5/5 [00:01<00:00, 5.00it/s, val_loss=0,7, val_acc=0,812]\n"
        "Total training time: 362,45 seconds\nBest validation loss: 0,118\n"),
        {"seconds": 362.45, "val_loss": 0.118, "val_acc": 0.812},
    ),
    "no count has twenty digits": (
        f"Number of tasks: {'9' * 20}\nTotal training time: 3.0 seconds\n", {"devices": 1},
    ),
    "its device as a logger prints it": (
        f"{CUT}2026-01-01 10:00:00,123 - INFO - CUDA available: True\n", {"unit": "GPU"},
    ),
    "no header": ("Max epochs: 2\nTotal training time: 3.0 seconds\n", {"job": "77"}),
    "no device": (CUT, {"device": None, "unit": "device"}),
    "some GPU": (f"{CUT}CUDA available: True\n", {"unit": "GPU"}),
    "orders to a terminal": (
        "Job ID: 5\x1b]0;owned\x07\x1b[2J\x00\nJob Name: a\x9bb\n",
        {"job": "5]0;owned", "name": "ab"},
    ),
    "a name without an end": (f"Job ID: {'9' * 5000}\n", {"job": "9" * 40}),
}  # fmt: skip
DEVICES = {
    "WORLD_SIZE: 4 GPUs on 1 node": 4,
    "WORLD_SIZE: 1\n  SLURM_NTASKS: 8": 8,
    "Number of tasks: 2\nBatch size (per GPU): 16\nEffective batch size (a × b): 128": 8,
    "Total GPUs: 4": 4,
    "Batch size (per GPU): 8\nEffective batch size (b x n x 4 accumulated): 64": 2,
    "  SLURM_NTASKS: Not set": 1,
    "Num processes: 4\nProcess index: 0": 4,
    "World size: 2": 2,
    "Number of tasks: 1\nWorld size: 4": 4,
}
TIMES = {
    ": 1.5 hours": 5400, ": N/A": None, " (minutes): 6.5": 390, " [in hours]: 1,5": 5400,
    " (h:mm:ss): 0:06:40": 400, " (min): 400 s": 400, " (rank 0): 400": 400,
    " (wall clock): 400": 400,
}  # fmt: skip
TOLD |= {lines: (f"Job ID: 1\n{lines}\n", {"devices": n}) for lines, n in DEVICES.items()}
TOLD |= {
    total: (f"Job ID: 1\nMax epochs: 5\nTotal training time{total}\n", {"seconds": seconds})
    for total, seconds in TIMES.items()
}


@pytest.mark.parametrize(("text", "values"), TOLD.values(), ids=TOLD)
def test_what_a_log_tells(tmp_path, text: str, values: dict[str, object]) -> None:
    (run,) = read_text(tmp_path, text)
    assert {name: getattr(run, name) for name in values} == values


def test_our_own_log_tells_its_device_and_its_phases(tmp_path) -> None:
    (run,) = read_text(tmp_path, MEASURED + our_log(results(2, 5.0), {"SLURM_JOB_ID": "31"}))
    assert run.on_cpu and run.settings["device"] == "cpu"
    assert [rank.rank for rank in run.ranks] == [0, 1]
    first, second = (rank.totals for rank in run.ranks)
    assert first["communication"] == pytest.approx(0.5 * 0.005 * 132)
    assert first["step"] == pytest.approx(sum(first.values()) / 2) == pytest.approx(0.66)
    assert second == pytest.approx({"data_wait": 82.5, "communication": 82.5, "step": 165})
    assert exposed(Configuration((run,))) == pytest.approx((0.33 + 82.5) / 165.66)


def test_a_file_without_an_end_of_line_costs_no_square(tmp_path) -> None:
    path = tmp_path / "long.out"
    path.write_bytes(b"x" * 5_000_000 + b"\rJob ID: 3\r" + b"\xff\x1b[A" * 500_000)
    assert max(len(text_of(line)) for line in raw_lines(path)) <= 1 << 14
    assert [run.job for run in read_log(path)] == ["3"]


def test_settings_are_exact() -> None:
    """Six digits would call models of 20 million parameters equal that differ by one."""
    assert plain(20_123_456) == plain("20123456.0") != plain(20_123_457)
    assert plain(0.1234567) != plain("0.1234568")


def test_logs_knobs_and_trackers_are_compared_by_one_list() -> None:
    log_ = {"max epochs": "50", "learning rate": "1e-3", "hidden dimensions": "[64, 32]"}
    knobs = {"epochs": 50, "learning_rate": 0.001, "hidden_dims": [64, 32]}
    tracked = {"max_epochs": "50", "lr": "0.001", "hidden_dims": "[64, 32]"}
    settings = settings_of(log_)
    assert settings == settings_of(knobs) == settings_of(tracked)
    assert settings == {
        "number of epochs": "50", "learning rate": "0.001", "hidden layers": "[64, 32]",
    }  # fmt: skip


@pytest.mark.parametrize(
    "glued",
    [
        "Total training time: 95.23 secondsTotal training time: 95.40 seconds (1.59 minutes)\n",
        "Total training time: 95.23 seconds (1.59 minutes)Total training time: 95.40 seconds\n",
        "=====Total training time: 95.40 seconds (1.59 minutes)\n",
        "Epoch 49: 100%|██████████| 55/55 [00:02<00:00, val_acc=0.95]Total training time: 95.4 s\n",
    ],
)
def test_a_total_within_the_line_of_another_rank_is_found(tmp_path, glued: str) -> None:
    (run,) = read_text(tmp_path, log("7", 4, 95.23) + glued)
    assert run.rank_seconds[-1] == run.seconds == 95.40
    assert run.complete


def test_fields_within_the_line_of_another_rank_are_found(tmp_path) -> None:
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
    (run,) = read_text(tmp_path, text)
    (plainly,) = read_text(tmp_path, log("7", 4, 95.23))
    assert run == plainly


def test_a_log_in_which_srun_names_the_tasks(tmp_path) -> None:
    (plainly,) = read_text(tmp_path, log("7", 4, 95.23))
    lines = log("7", 4, 95.23).replace("\r", "\n").split("\n")
    for width in (1, 2):
        text = "\n".join(f"{i % 4:{width}}: {line}" for i, line in enumerate(lines))
        (run,) = read_text(tmp_path, text)
        assert run == plainly


@pytest.mark.parametrize(
    "before",
    [
        "[default0]:",
        "[rank3]: ",
        "[1,0]<stdout>:",
        "INFO:root:",
        "12:04:05 | INFO | ",
        "2026-11-29 10:00:00,123 - train.py - INFO - ",
        "[2026-11-29 10:00:00,123][__main__][INFO] - ",
        "2026-11-29 10:00:00.123 | INFO     | __main__:main:10 - ",
        "INFO     ",
        "I1129 10:00:00.123456 140 train.py:10] ",
    ],
)
def test_a_log_with_a_label_before_each_line(tmp_path, before: str) -> None:
    (plainly,) = read_text(tmp_path, log("7", 1, 95.23))
    lines = log("7", 1, 95.23).replace("\r", "\n").split("\n")
    (run,) = read_text(tmp_path, "\n".join(before + line for line in lines))
    same = "job devices nodes batch global_batch samples seconds epochs val_loss complete".split()
    assert {name: getattr(run, name) for name in same} == {
        name: getattr(plainly, name) for name in same
    }


@pytest.mark.parametrize("total", ["09:15", "~362 s"])
def test_a_total_of_several_meanings_is_refused_with_its_line(tmp_path, total: str) -> None:
    with pytest.raises(UsageError, match=f"slurm-77.out: Total training time: {total}: '{total}'"):
        read_text(tmp_path, f"Job ID: 1\nMax epochs: 5\nTotal training time: {total}\n")


def test_a_job_of_an_array_and_its_folder_are_one_run(tmp_path) -> None:
    environ = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    document = results(2, 6.90312, job="12_3")
    run_folder(tmp_path / "run", document)
    write(tmp_path, {"slurm-12_3.out": our_log(document, environ)})
    (run,) = read_runs([tmp_path])
    assert (run.job, run.seconds) == ("12_3", pytest.approx(7.40312))


def test_our_log_and_our_folder_tell_the_same(tmp_path) -> None:
    document = results(2, 6.90312, job="31")
    folder = run_folder(tmp_path / "run", document, hidden_dims=[64, 32, 16], num_samples=10000)
    (path,) = write(tmp_path, {"slurm-31.out": our_log(document, {"SLURM_JOB_ID": "31"})})
    logged, (kept,) = one(path), read_runs([folder])
    names = "job devices samples batch global_batch steps epochs complete"
    for name in names.split():
        assert getattr(logged, name) == getattr(kept, name), name
    assert logged.samples == 7008  # of 10,000, which the seed counts
    both = logged.settings.keys() & kept.settings.keys()
    assert {name: logged.settings[name] for name in both} == {n: kept.settings[n] for n in both}
    # So a study may be of both.
    run_folder(tmp_path / "alone", results(1, 12.3456), hidden_dims=[64, 32, 16])
    (study,) = studies(read_runs([path, tmp_path / "alone"]), False)
    assert (study.kind, len(study.points)) == ("hybrid", 2)


def test_steps_that_were_limited_do_not_claim_all_epochs(tmp_path) -> None:
    document = results(1, 5.4321, epochs=2)
    folder = run_folder(tmp_path / "run", document, epochs=50, max_steps=400)
    text = our_log(document, {"SLURM_JOB_ID": "31"}, epochs=50, max_steps=400)
    (path,) = write(tmp_path, {"slurm-31.out": text})
    logged, (kept,) = one(path), read_runs([folder])
    assert logged.epochs == kept.epochs == 2
    assert logged.planned_epochs is kept.planned_epochs is None
    assert logged.complete and kept.complete
    assert logged.settings["number of steps"] == kept.settings["number of steps"] == "400"


@pytest.mark.parametrize(
    ("finite", "nan"),
    [
        ("val_loss=0.151,", "val_loss=nan,"),
        ("Best validation loss: 0.1187", "Best validation loss: nan"),
        ("v_num=1, val_loss=0.151,", "v_num=1, train_loss_step=nan, val_loss=0.151,"),
    ],
)
def test_a_loss_that_is_nan_is_told(tmp_path, finite: str, nan: str) -> None:
    text = log("7", 2, 50.0)
    (run,), (fine,) = read_text(tmp_path, text.replace(finite, nan)), read_text(tmp_path, text)
    assert run.diverged and run.complete and not fine.diverged
    assert run.val_loss is not None and math.isfinite(run.val_loss)


def test_a_loss_of_ours_that_is_null_was_nan(tmp_path) -> None:
    """JSON has no NaN."""
    document = results(1, 5.0)
    document["history"][1]["val_loss"] = None
    (run,) = read_runs([run_folder(tmp_path / "run", document)])
    assert run.diverged


BARS = "".join(
    f"Epoch {e}: {n:3}%|█| {n}/100 [00:01<00:00, 9it/s]\n" for e in range(5) for n in (0, 100)
)
LIGHTNING = (
    "GPU available: True (cuda), used: True\nTPU available: False, using: 0 TPU cores\n"
    "{members}You are using a CUDA device ('NVIDIA A100-SXM4-40GB') that has Tensor Cores.\n"
    f"{BARS}`Trainer.fit` stopped: `max_epochs=5` reached.\n{BARS[-40:]}"
)
MEMBERS = "".join(
    f"Initializing distributed: GLOBAL_RANK: {r}, MEMBER: {r + 1}/4\n" for r in range(4)
)


def test_a_plain_log_of_lightning_is_of_its_members_and_finished(tmp_path) -> None:
    (run,) = read_text(tmp_path, LIGHTNING.format(members=MEMBERS))
    assert (run.devices, run.status, run.epochs, run.planned_epochs) == (4, "complete", 5, 5)
    assert (run.device, run.seconds, run.complete) == ("NVIDIA A100-SXM4-40GB", None, False)
    assert run_mark(run) == "* 77: finished, but its training time is not known; not compared."
    (timed,) = read_text(
        tmp_path, LIGHTNING.format(members=MEMBERS) + "Total training time: 90 s\n"
    )
    assert timed.complete and timed.seconds == 90


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("MEMBER 1/4\nEpoch 0:  50%|█| 5/10 [", {"devices": 4, "status": "unfinished"}),
        (
            ("distributed_backend=nccl\nAll distributed processes registered. Starting with 16 "
            "processes\n`Trainer.fit` stopped: `max_steps=900` reached.\n"),
            {"devices": 16, "status": "complete", "planned_epochs": None},
        ),
        (
            ("GPU available: True (cuda), used: False\n"
             "`Trainer.fit` stopped: `max_epochs=2` reached."),
            {"devices": 1, "device": "cpu", "epochs": 2},
        ),
        (
            ("GPU available: False, used: False\nTPU available: True, using: 8 TPU cores\n"
            "MEMBER: 1/8\n"),
            {"devices": 8, "device": "TPU"},
        ),
        (
            ("Number of tasks: 1\nMEMBER: 1/4\nEpoch 1: 100%|█| 9/9 [0<0]`Trainer.fit` stopped: "
            "`max_epochs=2` reached.\n"),
            {"devices": 4, "status": "complete"},
        ),
        (
            ("Restored all states from the checkpoint at /a/epoch=29-step=9.ckpt\n"
            "`Trainer.fit` stopped: `max_epochs=50` reached.\nTotal training time: 40 s\n"),
            {"epochs": 20, "planned_epochs": 50, "per_epoch": 2.0, "complete": False},
        ),
        (
            ("Restoring states from the checkpoint path at /a/hpc_ckpt_1.ckpt\n"
            "`Trainer.fit` stopped: `max_epochs=50` reached.\nTotal training time: 40 s\n"),
            {"epochs": None, "status": "unknown", "per_epoch": None},
        ),
    ],
)  # fmt: skip
def test_what_lightning_says(tmp_path, text: str, values: dict[str, object]) -> None:
    (run,) = read_text(tmp_path, f"Job ID: 1\n{text}")
    assert {name: getattr(run, name) for name in values} == values


def test_what_lightning_prints_to_the_error_file_counts(tmp_path) -> None:
    err = f"{MEMBERS}`Trainer.fit` stopped: `max_epochs=5` reached.\n"
    out, _ = write(tmp_path, {"slurm-7.out": BARS, "slurm-7.err": err})
    run = one(out)
    assert (run.devices, run.status, run.epochs) == (4, "complete", 5)


def body(devices: int, seconds: float, ranks: int = 1) -> str:
    """What a training prints below the header of its job."""
    return log("5", devices, seconds, ranks=ranks).partition("=" * 70)[2]


BAR_OF_10 = "Epoch {}: 100%|██| 10/10 [00:01<00:00, 9it/s]\n"
TOTAL = "Total training time: {} seconds\n"
FIRST, ALONE = (LIGHTNING.format(members=members) for members in (MEMBERS, ""))
SEVERAL: dict[str, tuple[str, list[Any]]] = {
    "as many devices, and each rank prints its total": (
        f"{body(1, 400)}{body(4, 110, ranks=4)}{body(4, 108, ranks=4)}",
        [(1, 400, (400,), 50), (4, 110, (110, 109.9, 109.8, 109.7), 50),
         (4, 108, (108, 107.9, 107.8, 107.7), 50)],
    ),
    "each rank keeps its lines until its end": (
        "".join(body(3, seconds) for seconds in (95, 97, 96)), [(3, 97, (95, 97, 96), 50)],
    ),
    "an epoch 0 after a total": (
        "Batch size: 8\n" + "".join(
            BAR_OF_10.format(0) + BAR_OF_10.format(1) + TOTAL.format(s) for s in (40, 20)
        ),
        [(1, 40, (40,), 2), (1, 20, (20,), 2)],
    ),
    "a world size after a total": (
        "".join(
            f"World size: {n}\n{BAR_OF_10.format('1/1')}{TOTAL.format(s)}"
            for n, s in ((1, 40), (4, 11))
        ),
        [(1, 40, (40,), 1), (4, 11, (11,), 1)],
    ),
    "of Lightning, only the first is distributed": (
        FIRST + TOTAL.format(9) + ALONE, [(4, 9, (9,), 5), (1, None, (), 5)],
    ),
    "of Lightning, a test follows on one device": (
        f"{FIRST}GPU available: True (cuda), used: True\n{TOTAL.format(9)}", [(4, 9, (9,), 5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "runs"), SEVERAL.values(), ids=SEVERAL)
def test_trainings_of_one_job_are_told_apart(tmp_path, text: str, runs: Any) -> None:
    read = read_text(tmp_path, f"Job ID: 5\n{text}")
    assert [(run.devices, run.seconds, run.rank_seconds, run.epochs) for run in read] == runs


def test_the_time_of_a_requeued_job_is_divided_by_the_epochs_that_it_did(tmp_path) -> None:
    """The seed's script divides it by all of them; without a bar nobody knows how many it did."""
    end = "*** JOB 9 ON n1 CANCELLED AT 2026-01-01 DUE TO PREEMPTION ***\n"
    first = log("9", 4, None, done=20, end=end)
    _, again = read_text(tmp_path, first + log("9", 4, 60.0, first=20))
    assert (again.seconds, again.epochs, again.per_epoch) == (60, 30, 2.0)
    _, quiet = read_text(tmp_path, first + log("9", 4, 60.0, done=0))
    assert (quiet.epochs, quiet.per_epoch, quiet.complete) == (None, None, False)
    assert run_mark(quiet) == ("* 9: does not say how many epochs it did; not compared.")
