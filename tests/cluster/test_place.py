"""Which rank a process is, what a launcher adds to a training, and what its log says."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.base import TRAIN_DEFAULTS, TrainConfig, UsageError, build
from penstock.cli import main
from penstock.cluster.place import Place, find_place, first_host, tasks_elsewhere
from penstock.training import first_lines, last_lines, slurm_step

SPIRAL = ("train", "spiral")
JOB = {
    "SLURM_JOB_ID": "123456", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip
"""What a batch script sees: a job's counts, and the numbers of a rank that it is not."""
STEP = {
    **JOB, "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "raven[0123,0124]",
}  # fmt: skip
"""What a task sees of a step that was started on fewer tasks than its job has."""
AGAIN = {**JOB, "SLURM_RESTART_COUNT": "1"}


def config_of(**settings: Any) -> TrainConfig:
    return build(TrainConfig, TRAIN_DEFAULTS["spiral"], settings)


def test_a_step_is_believed_and_not_its_job() -> None:
    place = find_place(STEP)
    assert place == Place(5, 6, 1, 1, 2, "raven0123", 15_000 + 3456, started=True)
    assert place.variables() == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "raven0123", "MASTER_PORT": "18456",
    }  # fmt: skip
    assert find_place(place.variables()) == place
    # Other tools take a job of the name bash or interactive for none.
    assert find_place({**STEP, "SLURM_JOB_NAME": "bash"}) == place


def test_a_batch_script_is_no_rank() -> None:
    assert find_place(JOB) == Place()
    assert tasks_elsewhere(JOB) == 8
    assert tasks_elsewhere(STEP) == tasks_elsewhere({}) == 0
    # Nor is the shell of an interactive job, a step of one task.
    shell = {**JOB, "SLURM_STEP_NUM_TASKS": "1"}
    assert find_place(shell).world_size == 1 and tasks_elsewhere(shell) == 8


def test_torchrun_inside_a_step_wins() -> None:
    elastic = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "4321"}
    assert find_place({**STEP, **elastic}) == Place(1, 2, 1, port=4321, started=True)
    assert tasks_elsewhere({**JOB, **elastic}) == 0


def test_where_ranks_meet() -> None:
    one = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "raven0123"}
    assert find_place(one).address == "127.0.0.1"
    chosen = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
    place = find_place({**STEP, **chosen})
    assert (place.address, place.port) == ("10.0.0.1", 5000)
    with pytest.raises(UsageError, match="2 nodes, and neither MASTER_ADDR nor SLURM_STEP_NOD"):
        find_place({name: text for name, text in STEP.items() if name != "SLURM_STEP_NODELIST"})
    with pytest.raises(UsageError, match="SLURM_PROCID is 'five'"):
        find_place({**STEP, "SLURM_PROCID": "five"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"), ("n1,n2", "n1"), ("n[1-2]", "n1"), ("n[01,03-07]", "n01"), ("n[7]", "n7"),
        ("gpu-a[0123,0124],cpu[1-9]", "gpu-a0123"), ("r[1-2]n[3-4]", "r1n3"),
        ("a-1.b-2", "a-1.b-2"),
    ],
)  # fmt: skip
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_rank_has_the_device_of_its_number_or_the_one_it_sees() -> None:
    pytest.importorskip("torch")
    from penstock.training.ranks import own_device

    third = Place(rank=6, world_size=8, local_rank=2, started=True)
    assert own_device(third, visible=4) == 2
    assert own_device(third, visible=1) == 0  # SLURM shows each task its own
    with pytest.raises(UsageError, match="rank 6 is number 2 of its node, which has 2 GPUs"):
        own_device(third, visible=2)


def test_an_element_of_an_array_has_one_number(monkeypatch) -> None:
    """In its log and in its results: scaling takes the two together by it."""
    pytest.importorskip("torch")
    from penstock.training.ranks import job_facts

    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert job_facts(["n1", "n1"])["job_id"] is None
    element = {**STEP, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    for name, text in element.items():
        monkeypatch.setenv(name, text)
    facts = job_facts(["n1", "n1", "n2"])
    assert (facts["job_id"], facts["nodes"], facts["hosts"]) == ("7_3", 2, ["n1", "n2"])
    assert first_lines("spiral", config_of(), find_place(STEP), element)[0] == "Job ID: 7_3"


def test_a_job_whose_tasks_are_not_started_is_refused(monkeypatch, tmp_path, capsys) -> None:
    pytest.importorskip("lightning_fabric")
    for name, text in JOB.items():
        monkeypatch.setenv(name, text)
    assert main([*SPIRAL, "--distributed", "--output-dir", str(tmp_path / "out")]) == 2
    assert "the 8 tasks of SLURM's job are not started; say penstock launch slurm" in (
        capsys.readouterr().err
    )
    for name, text in STEP.items():
        monkeypatch.setenv(name, text)
    assert main([*SPIRAL, "--output-dir", str(tmp_path / "out")]) == 2
    assert "6 ranks were started, and without --distributed each" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_a_job_adds_to_its_training(tmp_path) -> None:
    config = config_of(output_dir=str(tmp_path / "%j"))
    out = ["--distributed", "--output-dir", str(tmp_path / "123456")]
    assert slurm_step.added(config, JOB) == out
    assert slurm_step.added(config_of(output_dir=tmp_path), JOB) == ["--distributed"]
    # Killed before it had begun a run, it begins; before it had saved, again; later it goes on.
    assert slurm_step.added(config, AGAIN) == out
    begun_by("123456", tmp_path / "123456")
    assert slurm_step.added(config, AGAIN) == [*out, "--no-resume", "--overwrite"]
    saved_in(tmp_path / "123456")
    assert slurm_step.added(config, AGAIN) == [*out, "--resume", "--no-overwrite"]
    array = {**AGAIN, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert slurm_step.added(config, array) == [*out[:2], str(tmp_path / "7_3")]
    begun_by("7_3", tmp_path / "7_3")
    assert slurm_step.added(config, array)[3:] == ["--no-resume", "--overwrite"]


def begun_by(job: str | None, out: Path) -> None:
    out.mkdir(exist_ok=True)
    (out / "args.json").write_text(json.dumps({"workload": "spiral", "launch": {"job_id": job}}))


def saved_in(out: Path) -> None:
    (out / "checkpoints").mkdir(exist_ok=True)
    (out / "checkpoints" / "last.pt").touch()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    ("text", "whose"),
    [('{"launch": {"job_id": "77"}}', "job 77"), ('{"launch": {"job_id": null}}', "no job"),
     ("{}", "no job"), ("[3]", "no job")],
)  # fmt: skip
def test_a_job_goes_on_with_its_own_run_alone(text: str, whose: str, saved: bool, tmp_path) -> None:
    """Its first life may have ended before it had begun; what lies there is another's then."""
    (tmp_path / "args.json").write_text(text)
    if saved:
        saved_in(tmp_path)
    with pytest.raises(UsageError) as refusal:
        slurm_step.added(config_of(output_dir=tmp_path), AGAIN)
    assert f"--output-dir {tmp_path} holds a run of {whose}, and job 123456 had not" in (
        str(refusal.value)
    )
    # Unless it was asked to.
    for knob in ("resume", "overwrite"):
        asked = config_of(output_dir=tmp_path, **{knob: True})
        assert slurm_step.added(asked, AGAIN) == ["--distributed"]


@pytest.fixture
def in_a_job(tmp_path, monkeypatch) -> Callable[[str], list[str]]:
    """The words that begin a life of a job whose srun does what it is told; `requeued` is how
    often it was put back."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, text in JOB.items():
        monkeypatch.setenv(name, text)

    def life(text: str) -> list[str]:
        (tmp_path / "bin" / "srun").write_text(f"#!/bin/sh\n{text}\n")
        for name in ("srun", "scontrol"):
            (tmp_path / "bin" / name).chmod(0o755)
        return ["launch", "slurm", "--requeue", "--", *SPIRAL, "--output-dir", str(tmp_path / "o")]

    return life


@pytest.mark.slow
def test_a_job_that_gets_nowhere_is_not_put_back_for_ever(
    in_a_job: Callable[[str], list[str]], tmp_path, capsys,
    monkeypatch,
) -> None:  # fmt: skip
    last = tmp_path / "o" / "checkpoints" / "last.pt"
    too_early = "kill -USR1 $PPID; exec sleep 60"  # which the signal ends, and nobody hears
    while_it_began = "trap 'exit 3' USR1; kill -USR1 $PPID; while :; do sleep 0.02; done"
    saves = f"mkdir -p {last.parent}; echo >> {last}; {while_it_began}"

    def lived(text: str) -> tuple[int, str, int]:
        """Its exit code, what it said, and how often the job was put back so far."""
        code = main(in_a_job(text))
        said = capsys.readouterr().err
        received = tmp_path / "requeued"
        return code, said, len(received.read_text().splitlines()) if received.exists() else 0

    nothing = "penstock launch: job 123456 was stopped before it had saved anything new"
    assert lived(too_early) == (138, f"{nothing} and goes back into the queue\n", 1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for text in (too_early, while_it_began):
        code, said, times = lived(text)
        assert (code, times) == (1, 1)
        assert said.startswith(f"{nothing}, though it was started again: it is not put back")
    # What it saves is new in each life.
    begun_by("123456", tmp_path / "o")
    for times in (2, 3):
        time.sleep(0.01)  # of a clock of files that is coarse
        line = "penstock launch: job 123456 has saved and goes back into the queue\n"
        assert lived(saves) == (3, line, times)
    assert lived(while_it_began)[::2] == (1, 3)
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 123456"] * 3


def test_the_end_of_a_requeued_life_is_told_though_slurm_ends_it(
    in_a_job: Callable[[str], list[str]], tmp_path, capsys
) -> None:
    """`scontrol requeue` has SLURM send SIGTERM to the batch script and to scontrol itself."""
    last = tmp_path / "o" / "checkpoints" / "last.pt"
    words = in_a_job(
        f"mkdir -p {last.parent}; echo >> {last}; trap 'exit 3' USR1; kill -USR1 $PPID; "
        "while :; do sleep 0.02; done"
    )
    ends = "kill -TERM $PPID; kill -USR1 $PPID; kill -TERM $$"
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\n{ends}\nsleep 0.1\n")
    assert main(words) == 3
    line = "penstock launch: job 123456 has saved and goes back into the queue\n"
    assert capsys.readouterr().err == line

    refused = f"#!/bin/sh\n{ends}\necho 'scontrol: error: no such job' >&2; exit 1\n"
    (tmp_path / "bin" / "scontrol").write_text(refused)
    assert main(words) == 1
    assert capsys.readouterr().err.endswith(
        "job 123456 has saved and was not requeued: no such job\n"
    )


def test_srun_is_told_what_it_would_forget() -> None:
    assert "--cpus-per-task=18" in slurm_step.srun({**JOB, "SLURM_CPUS_PER_TASK": "18"})
    assert not any("cpus" in word for word in slurm_step.srun(JOB))


@pytest.mark.parametrize(
    ("environ", "words", "sentence"),
    [
        ({}, ["slurm"], "SLURM_JOB_ID is not set; penstock slurm submit makes a job"),
        (STEP, ["slurm"], "this is rank 5 of 6 already: leave out srun"),
    ],
)
def test_what_cannot_be_started(environ, words, sentence, monkeypatch, capsys) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert main(["launch", *words, "--", *SPIRAL]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock launch: ") and sentence in line


def test_the_lines_of_the_seed() -> None:
    environ = {**JOB, "SLURM_JOB_NAME": "mlp", "SLURM_JOB_NODELIST": "raven[0123,0124]"}
    lines = first_lines("spiral", config_of(epochs=50), find_place(STEP), environ)
    assert lines == [
        "Job ID: 123456",
        "Job Name: mlp",
        "Node(s): raven[0123,0124]",
        "Restarts: 0",
        "Number of nodes: 2",
        "Number of tasks: 6",
        "Workload: spiral",
        "Max epochs: 50",
        "Batch size (per GPU): 32",
        "Effective batch size (batch_size x num_gpus): 192",
        "Learning rate: 0.001",
        "Hidden dimensions: [64, 32, 16]",
        "Number of samples: 10000",
        "Output directory: outputs",
    ]
    alone = first_lines("emulator", config_of(batch_size=4, grad_accum_steps=2), Place(), {})
    assert alone[0] == "Number of nodes: 1"
    assert "Effective batch size (batch_size x num_gpus x 2 accumulated): 8" in alone
    assert not any(line.startswith("Number of samples") for line in alone)


def test_the_last_lines_are_of_all_the_lives_of_a_run() -> None:
    results = {
        "training_s": 360.0, "validation_s": 2.45, "session_s": 100.0, "epochs": 50,
        "samples": 50 * 7008, "steps": 50 * 219,
        "best": {"score": 0.953, "epoch": 42},
        "history": [{"val_loss": 0.1187, "val_acc": 0.95}, {"val_loss": 0.2, "val_acc": 0.953}],
    }  # fmt: skip
    assert last_lines(results, Path("out")) == [
        "Total training time: 362.45 seconds (6.04 minutes)",
        "Time per epoch: 7.25 seconds",
        "Epochs done: 50",
        "Samples per epoch: 7008",
        "Steps per epoch: 219",
        "Best checkpoint: out/best_model.pth",
        "Best validation loss: 0.1187",
        "Best validation accuracy: 0.9530",
    ]
    cut = last_lines(results | {"steps_per_epoch": 220}, Path("out"))
    assert cut[5] == "Last epoch: 170 of 220 steps, counted as one"
    nothing = {"training_s": 0.0, "validation_s": 0.0, "epochs": 0, "best": None, "history": []}
    assert last_lines(nothing, Path("out")) == ["Total training time: 0.00 seconds (0.00 minutes)"]
