"""What may be submitted: any command, arrays, the steps of an infer in parts, and presets in files.

What needs a running SLURM stands in `test_slurm_cluster`.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.base import SlurmConfig, UsageError
from penstock.cli import main
from penstock.cluster import Command, batch_script
from penstock.cluster import slurm_jobs as slurm
from penstock.cluster.slurm_states import UNKNOWN, job_states, job_statuses, table_of

from .test_slurm_jobs import HOSTILE, config_of, directives, recorder, spoken

__all__ = ["recorder", "spoken"]  # fixtures

INFER = ["infer", "--model-type", "identity", "--in-spec", "in.zarr", "--out-spec", "out.zarr"]
LAUNCH = "launch slurm --requeue --max-requeues 10 -- "
ENVIRONMENT = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def rendered(capsys, *words: str) -> list[str]:
    assert main(["slurm", "render", *words]) == 0
    text = capsys.readouterr().out
    return ["#!" + script for script in text.split("#!")[1:]]


def refused(capsys, *words: str) -> str:
    assert main(["slurm", "submit", "--dry-run", *words]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    return line.removeprefix("penstock slurm: ")


def last_line(script: str) -> str:
    return script.rstrip().splitlines()[-1]


def test_a_preset_is_a_file_of_ours_or_the_users(tmp_path, home: Path, monkeypatch, capsys) -> None:
    home.mkdir()
    for folder in (home, tmp_path):
        settings = "partition: fat\ncpus-per-task: 3\ntime: '1:00:00'\nmodules: [gcc/13]\n"
        (folder / "mine.yaml").write_text(settings)
    ask = ["--", "true"]
    monkeypatch.chdir(tmp_path)
    for name in ("./mine.yaml", "mine.yaml", str(tmp_path / "mine.yaml"), "~/mine.yaml"):
        (text,) = rendered(capsys, "--preset", name, *ask)
        got = directives(text)
        asked = [got[flag] for flag in ("--partition", "--cpus-per-task", "--time")]
        assert asked == ["fat", "3", "1:00:00"]
        assert "module load gcc/13" in text.splitlines()
    assert directives(rendered(capsys, "--preset", "raven", *ask)[0])["--gres"] == "gpu:a100:1"
    assert refused(capsys, "--preset", "mine", *ask) == (
        "--preset 'mine': no such preset; there are raven, raven-1gpu, raven-4gpu, raven-8gpu, and "
        "any YAML file by its path, such as ./mine.yaml"
    )


def test_flags_win_over_a_config_and_that_over_a_preset(tmp_path, capsys) -> None:
    (tmp_path / "a.yaml").write_text("mem: 1G\nnodes: 2\nqos: a\n")
    (tmp_path / "b.yaml").write_text("mem: 2G\nqos: b\n")
    layers = ["--preset", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    got = directives(rendered(capsys, *layers, "--mem", "3G", "--", "true")[0])
    assert (got["--mem"], got["--qos"], got["--nodes"]) == ("3G", "b", "2")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mem: lots", "mem: 'lots' is not memory such as 125000 (MB) or 64G"),
        ("partition: |\n  a\n  #SBATCH --nodes=9", "partition: 'a\\n#SBATCH --nodes=9"),
        ("a: [", "is not YAML: "),
        ("", "holds no settings"),
    ],
)
def test_a_wrong_preset_is_refused_with_place(text: str, sentence: str, tmp_path, capsys) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    for flag in ("--preset", "--config"):
        line = refused(capsys, flag, str(path), "--", "true")
        assert line.startswith(f"{flag} {path}") and sentence in line


def test_a_preset_that_cannot_be_read(tmp_path, capsys) -> None:
    gone = str(tmp_path / "gone.yaml")
    assert refused(capsys, "--preset", gone, "--", "true") == (
        f"--preset {gone}: No such file or directory"
    )
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not YAML" in refused(capsys, "--preset", str(tmp_path / "b.yaml"), "--", "true")
    for name in ("..", "a b", "-", "", "a\nb"):
        assert "no such preset; there are" in refused(capsys, f"--preset={name}", "--", "true")


def test_what_lacks_in_a_preset_a_flag_may_bring(tmp_path, capsys) -> None:
    """Alone it would be refused: a job of 2 minutes would be told to save as it begins."""
    path = tmp_path / "short.yaml"
    path.write_text("time: '2'\nsignal: 120\n")
    assert "--signal 120: a job of --time 2" in refused(capsys, "--preset", str(path), "--", "true")
    (text,) = rendered(capsys, "--preset", str(path), "--signal", "10", "--", "true")
    assert directives(text)["--signal"] == "B:TERM@10"


@given(
    st.sampled_from(sorted(SlurmConfig.model_fields)),
    HOSTILE | st.lists(HOSTILE, max_size=2) | st.dictionaries(HOSTILE, HOSTILE, max_size=2),
    st.sampled_from(["", "\n", "\r", "\n#SBATCH --nodes=9\n", ";id;", "\0", "\u2028"]),
)
def test_no_value_of_a_preset_is_a_line(tmp_path_factory, key: str, value: Any, more: str) -> None:
    """Each line of the script is one of those that stand in it, and each directive one word."""
    path = tmp_path_factory.getbasetemp() / "hostile.yaml"
    value = value + more if isinstance(value, str) else value
    path.write_text(yaml.safe_dump({key: value}, allow_unicode=True))
    try:
        config = config_of(dict(batch_script.slurm_preset(str(path))))
    except UsageError as error:
        assert "\n" not in str(error)
        return
    text = batch_script.slurm_script(config, Command(("true",), "program"), "python")
    first, *lines = text.split("\n")
    assert first in ("#!/bin/bash", "#!/bin/bash -l")
    for line in lines:
        if line.startswith("#SBATCH "):
            assert len(shlex.split(line.removeprefix("#SBATCH "))) == 1
        elif line:
            words = shlex.split(line)
            assert (words[0], line[:4]) in {
                ("set", "set "), ("module", "modu"), ("source", "sour"), ("export", "expo"),
                ("exec", "exec"),
            }  # fmt: skip
            assert words[0] != "source" or len(words) == 2
            assert words[0] != "export" or len(words) == 2
    count = sum(line.startswith("#SBATCH --") for line in lines)
    assert len(set(directives(text))) == count  # none stands there twice
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)


@pytest.mark.parametrize(
    ("words", "received", "resumes"),
    [
        (INFER, INFER, True),
        (["penstock", *INFER], INFER, True),
        (["predict", "w.pth", "--data-root", "d", "--output", "o.csv"], None, True),
        (["suite", "quick", "--train-chips", "a", "--val_chips", "b"],
         ["suite", "quick", "--train-chips", "a", "--val-chips", "b"], True),
        (["bench", "model", "--model", "identity"], None, True),
        (["preprocess", "--data-root", "a", "--train-label-file", "b", "--val-label-file", "c",
          "--output-dir", "d"], None, False),
        (["penstock", "plan", *INFER[1:]], ["plan", *INFER[1:]], True),
    ],
)  # fmt: skip
def test_a_verb_takes_the_place_of_the_script(words, received, resumes, capsys) -> None:
    (text,) = rendered(capsys, "--venv", "/env", "--", *words)
    got = directives(text)
    received, again = received or words, " ${SLURM_RESTART_COUNT:+--resume}" if resumes else ""
    goes_back = received[0] != "plan"
    assert got["--signal"] == f"B:{'USR1' if goes_back else 'TERM'}@120" and "--requeue" in got
    launch = LAUNCH if goes_back else ""
    assert last_line(text) == f"exec python -u -m penstock {launch}{shlex.join(received)}{again}"
    for flags in (["--no-requeue"], ["--max-requeues", "0"]):
        (text,) = rendered(capsys, "--venv", "/env", *flags, "--", *words)
        assert directives(text)["--signal"] == "B:TERM@120"
        assert last_line(text) == f"exec python -u -m penstock {shlex.join(received)}{again}"


def test_a_program_gets_its_words_as_they_are(capsys) -> None:
    """A second start, or a signal before its time is up, might harm it: only who asks gets them."""
    words = ["python", "a b.py", "--my_flag", "--debug", "%j", "$HOME", "--", "--x_y=1"]
    (text,) = rendered(capsys, "--time", "1", "--", *words)
    assert last_line(text) == f"exec {shlex.join(words)}"
    assert "--no-requeue" in directives(text) and "--signal" not in directives(text)
    (text,) = rendered(capsys, "--time", "9", "--requeue", "--signal", "60", "--", "true")
    assert "--requeue" in directives(text) and directives(text)["--signal"] == "B:TERM@60"
    (text,) = rendered(capsys, "--nodes", "3", "--", "srun", "mine")
    assert directives(text)["--nodes"] == "3"


def test_a_second_variable_does_not_take_the_place_of_the_first(capsys) -> None:
    (text,) = rendered(capsys, "--env", "A=1", "B=2", "--env", "C=3", "--", "true")
    exported = [line for line in text.splitlines() if line.startswith("export ")]
    assert exported == ["export A=1", "export B=2", "export C=3"]


@given(st.lists(HOSTILE, max_size=4), st.booleans())
def test_a_verb_hears_what_it_is_given(recorder: Path, words: list[str], restarted: bool) -> None:
    """Bash itself is asked. Only %j, and %a as a number of a part, stand for something."""
    command = Command(("infer", *words, "--part", "%a/64"), "verb", resumes=True)
    text = batch_script.slurm_script(config_of(array="64"), command, str(recorder))
    again = {"SLURM_RESTART_COUNT": "1"} if restarted else {}
    environment = {**os.environ, **ENVIRONMENT, **again}
    ended = subprocess.run(
        ["bash"], input=text.encode(), capture_output=True, check=True, env=environment
    )
    assert (ended.stdout, ended.stderr) == (b"", b"")
    received = Path(f"{recorder}.received").read_bytes().decode().split("\0")[1:-1]
    numbered = [word.replace("%j", "70_7") for word in words]
    more = ["--resume"] if restarted else []
    assert received == ["-u", "-m", "penstock", "infer", *numbered, "--part", "7/64", *more]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--"], "put the command to run after the flags: -- train WORKLOAD ..., -- infer ..., or"),
        (["--", "penstock", "infre"], "penstock has no verb 'infre'; penstock --help lists them"),
        (["--", "compare", "a", "b"], "compare is not among the verbs that run work (infer, "),
        (["python", "x.py"], "put -- before the command: -- python ..."),
        (["--", *INFER[:-2]], "--out-spec is required"),
        (["--", "predict", "w.pth", "--data-root", "d", "--score-threshold", "lots"],
         "--score-threshold"),
        (["--preset", "raven-8gpu", "--", *INFER],
         "--nodes 2: penstock infer runs on one node; --array N cuts it into N jobs"),
        (["--array", "0-7", "--", *INFER], "--array 0-7: the parts of infer are counted from 1"),
        (["--array", "4", "--", *INFER, "--run-dir", "run-%j"],
         "run-%j: the parts of infer are several jobs"),
        (["--", *INFER, "--weights", "%a/64"],
         "%a/64: %a is the number of an array's element; give --array, such as --array 3,7"),
        (["--array", "0", "--", "true"], "--array: '0' has no elements; 0-0 has one"),
        (["--array", "4", "--output", "log-%j", "--", *INFER], "--output log-%j: a job's log is"),
        (["--array", "2", "--", "train", "spiral", "--output-dir", "x"],
         "--output-dir x: the jobs of --array need a folder each"),
    ],
)  # fmt: skip
def test_what_is_refused_before_it_waits(words: list[str], sentence: str, capsys) -> None:
    line = refused(capsys, *words)
    assert sentence in line and "word" not in line.replace("--password", "")


@pytest.mark.parametrize(
    ("asked", "directive"),
    [("64", "1-64"), ("64%8", "1-64%8"), ("1", "1-1"), ("0-7", "0-7"), ("1,4,8", "1,4,8"),
     ("0-98:2%4", "0-98:2%4"), ("5-5", "5-5")],
)  # fmt: skip
def test_a_number_is_the_elements_of_an_array(asked: str, directive: str, capsys) -> None:
    for words in (["true"], ["train", "spiral"]):
        (text,) = rendered(capsys, "--array", asked, "--", *words)
        got = directives(text)
        assert (got["--array"], got["--output"]) == (directive, "outputs/slurm-%A_%a.out")


def test_an_array_of_infer_is_a_chain(capsys) -> None:
    flags = ["--array", "64%8", "--gpus-per-node", "1", "--dependency", "afterok:5",
             "--output", "logs/%A-%a.txt", "--error", "%a.err", "--venv", "/env"]  # fmt: skip
    infer = [*INFER, "--normalize", "percentile"]
    scripts = rendered(capsys, *flags, "--", *infer)
    begin, parts, finish = map(directives, scripts)
    named = [job["--job-name"] for job in (begin, parts, finish)]
    assert named == ["penstock-prepare", "penstock-parts", "penstock-finish"]
    assert [job["--dependency"] for job in (begin, parts, finish)] == [
        "afterok:5", "afterok:JOB_1", "afterany:JOB_2",
    ]  # fmt: skip
    assert "--array" not in begin and "--array" not in finish and parts["--array"] == "1-64%8"
    assert "--kill-on-invalid-dep" not in begin and parts["--kill-on-invalid-dep"] == "yes"
    # The plan depends on the kind of device, so all have the same.
    assert begin["--gres"] == parts["--gres"] == finish["--gres"] == "gpu:1"
    assert [job["--output"] for job in (begin, parts, finish)] == [
        "logs/%j-prepare.txt", "logs/%A-%a.txt", "logs/%j-finish.txt",
    ]  # fmt: skip
    assert [job["--error"] for job in (begin, parts, finish)] == [
        "prepare.err", "%a.err", "finish.err",
    ]  # fmt: skip
    line = f"exec python -u -m penstock {LAUNCH}{shlex.join(infer)}"
    assert list(map(last_line, scripts)) == [
        f"{line} --prepare --workers 64 ${{SLURM_RESTART_COUNT:+--resume}}",
        f'{line} --part "${{SLURM_ARRAY_TASK_ID}}/64"',
        f"{line} --finish",
    ]


def test_a_step_that_is_asked_for_is_a_job_of_its_own(capsys) -> None:
    (text,) = rendered(capsys, "--array", "3,7", "--", *INFER, "--part", "%a/64")
    assert directives(text)["--array"] == "3,7"
    assert f'{shlex.join(INFER)} --part "${{SLURM_ARRAY_TASK_ID}}/64"' in last_line(text)
    (text,) = rendered(capsys, "--dependency", "afterok:5", "--", *INFER, "--finish")
    assert f"{shlex.join(INFER)} --finish" in last_line(text)
    assert "'9/8' is not an element" in refused(capsys, "--", *INFER, "--part", "9/8")
    (text,) = rendered(capsys, "--", "infer", "in.zarr", "out.zarr", "--model", "identity")
    assert "infer --in-spec in.zarr --out-spec out.zarr --model-type identity" in last_line(text)


def test_percentiles_of_the_whole_volume_are_counted_by_arrays(capsys) -> None:
    """In as many rounds as wide values need; the dtype of the input is not looked at here."""
    scripts = rendered(capsys, "--array", "9%3", "--", *INFER, "--normalize", "global")
    jobs = list(map(directives, scripts))
    waits = ["afterok:JOB_1", "afterok:JOB_2", "afterok:JOB_3", "afterany:JOB_4"]
    assert [job.get("--dependency") for job in jobs] == [None, *waits]
    assert [job["--job-name"].partition("-")[2] for job in jobs] == [
        "prepare", "statistics", "statistics", "parts", "finish",
    ]  # fmt: skip
    counting = 'infer {} --statistics "${{SLURM_ARRAY_TASK_ID}}/9"'.format(
        shlex.join([*INFER[1:], "--normalize", "global"])
    )
    for job, script in zip(jobs[1:3], scripts[1:3], strict=True):
        assert last_line(script).endswith(counting) and job["--array"] == "1-9%3"


def test_an_array_labels_a_volume_in_rounds(capsys) -> None:
    words = ["label", "scores.zarr", "cells.zarr", "--threshold", "0.5", "--fill-holes"]
    scripts = rendered(capsys, "--array", "9", "--", *words)
    jobs = [directives(each)["--job-name"].partition("-")[2] for each in scripts]
    assert jobs == ["prepare", *["parts", "finish"] * 3]
    assert last_line(scripts[-1]).endswith(f"{shlex.join(words)} --finish")


def test_an_array_infers_objects_in_rounds(capsys) -> None:
    """Scores are the first round; a decoder has one more than components."""
    plain = [*INFER, "--normalize", "none", "--threshold", "0.5"]
    for decoder, rounds in (("components", 3), ("watershed", 4)):
        scripts = rendered(capsys, "--array", "9", "--", *plain, "--instances", decoder)
        jobs = [directives(each)["--job-name"].partition("-")[2] for each in scripts]
        assert jobs == ["prepare", *["parts", "finish"] * rounds]


def test_steps_that_compute_no_block_ask_for_one_gpu(capsys) -> None:
    flags = ["--array", "9", "--gpus-per-node", "a100:4", "--mem", "64G", "--cpus-per-task", "8"]
    jobs = [*map(directives, rendered(capsys, *flags, "--", *INFER, "--normalize", "global"))]
    gpus = [job["--gres"].strip("'") for job in jobs]
    assert gpus == ["gpu:a100:1"] * 3 + ["gpu:a100:4", "gpu:a100:1"]
    assert {job["--mem"] for job in jobs} == {"64G"}
    assert [job["--ntasks-per-node"] for job in jobs] == ["1", "1", "1", "4", "1"]


def told(job: str, state: str, reason: str = "None") -> str:
    """A line of squeue on a job, or on an element of an array."""
    return f"{job}|{state}|0||0|{reason}|\n"


def test_elements_the_controller_forgot_are_in_the_accounts(spoken: Callable[..., None]) -> None:
    """It forgets an element some minutes after its end, while others still run or wait."""
    accounts = (
        "5_0|COMPLETED|0:0|n1\n5_1|FAILED|1:0|n1\n5_[4-5%2]|PENDING|0:0|\n5_2|RUNNING|0:0|n1\n"
    )
    waiting = [told(f"5_{n}", "PENDING", "JobArrayTaskLimit") for n in (4, 5)]
    spoken(squeue=(0, "".join([told("5_2", "RUNNING"), *waiting])), sacct=(0, accounts))
    rows = job_states(["5"])["5"]
    assert [(row.id, row.state) for row in rows] == [
        ("5_2", "RUNNING"), ("5_4", "PENDING"), ("5_5", "PENDING"), ("5_0", "COMPLETED"),
        ("5_1", "FAILED"),
    ]  # fmt: skip
    # What was cancelled while it waited has no row of its own, and in the accounts they share one.
    cancelled = "5_[2-5%2]|CANCELLED by 0|0:0|\n"
    spoken(squeue=(0, told("5", "CANCELLED") + told("5_1", "FAILED")), sacct=(0, cancelled))
    rows = job_states(["5"])["5"]
    assert [row.id for row in rows] == ["5", "5_1", "5_2", "5_3", "5_4", "5_5"]
    assert [line.split()[0] for line in table_of(job_statuses(["5"]))] == ["job", "5", "5_1"]


def submitted(**changes: Any) -> slurm.SlurmJob:
    settings = {
        "id": "5", "name": "parts", "ranks": 1, "nodes": 1, "log": "slurm-%A_%a.out",
        "command": ["infer", "--part", "%a/6"], "kind": "verb", "array": "0-5%2",
    }  # fmt: skip
    return slurm.SlurmJob.model_validate({**settings, **changes})


def test_an_array_is_a_table_of_the_like(tmp_path, spoken: Callable[..., None], capsys) -> None:
    first = submitted(id="4", name="prepare", array=None, command=["infer", "--prepare"])
    last = submitted(id="6", name="finish", array=None, command=["infer", "--finish"],
                     waits_for="afterany:5")  # fmt: skip
    other = submitted(id="7", name="mine", array="1-2", kind="program", command=["true"])
    listed = [each.model_dump() for each in (first, submitted(), last, other)]
    (tmp_path / "study.json").write_text("[]")
    assert job_statuses([str(tmp_path)]) == []  # SLURM is not asked
    (tmp_path / "study.json").write_text(json.dumps(listed))
    shown = told("5_4", "PENDING", "JobArrayTaskLimit") + told("6", "PENDING", "Dependency")
    shown += told("5_5", "PENDING", "JobArrayTaskLimit")
    said = "5_0|COMPLETED|0:0|n1\n5_1|FAILED|3:0|n2\n5_2|COMPLETED|0:0|n2\n"
    spoken(squeue=(0, shown), sacct=(0, said + "4|COMPLETED|0:0|n1\n7_2|FAILED|3:0|n1\n"))
    table = table_of(job_statuses([str(tmp_path)]))
    assert [re.split(r"  +", line) for line in table] == [
        ["job", "name", "ranks", "nodes", "state"],
        ["4", "prepare", "1", "n1", "COMPLETED"],
        ["5_[4-5]", "parts", "1", "PENDING, JobArrayTaskLimit"],
        ["5_[0,2]", "parts", "1", "2 different", "COMPLETED"],
        ["5_1", "parts", "1", "n2", "FAILED, exit code 3: its log says how to go on"],
        ["5_3", "parts", "1", UNKNOWN],
        ["6", "finish", "1", "PENDING, Dependency afterany:5"],
        ["7_2", "mine", "1", "n1", "FAILED, exit code 3"],
        ["7_1", "mine", "1", UNKNOWN],
    ]  # fmt: skip
    assert main(["slurm", "status", str(tmp_path)]) == 3
    spoken(sacct=(0, "6|FAILED|3:0|n1\n"))
    table = "\n".join(table_of(job_statuses([str(tmp_path)])))
    assert "exit code 3: its log says how to go on" in table


def test_neither_jobs_nor_their_logs_lie_inside_an_array(tmp_path, here, capsys) -> None:
    (tmp_path / "in.zarr").mkdir()
    (tmp_path / "in.zarr" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    for flag, name in (("--folder", "jobs"), ("--output", "log-%j.out"), ("--error", "%j/a.err")):
        flags = [flag, f"in.zarr/{name}"]
        said = refused(capsys, *flags, "--", "true")
        assert re.match(f"{flag} .* lies inside the array {tmp_path / 'in.zarr'}", said)
        assert main(["slurm", "submit", *flags, "--", "true"]) == 2
        assert "lies inside the array" in capsys.readouterr().err
    assert len(list(tmp_path.rglob("*"))) == 2
