"""Job scripts that nothing can be smuggled into, studies, ranks, and SLURM's words as recorded.

What needs a running SLURM stands in `test_slurm_cluster`.
"""

import json
import os
import shlex
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base import PenstockError, SlurmConfig, UsageError, array_ranges, build
from penstock.base.config import cluster
from penstock.cli import main
from penstock.cluster import Command, batch_script, slurm_preset, slurm_states
from penstock.cluster import slurm_jobs as slurm
from penstock.cluster.slurm_states import JobState

from ..places import DATA

RECORDED = DATA / "slurm"
SPIRAL = ("train", "spiral")


def config_of(*layers: dict[str, Any], **settings: Any) -> SlurmConfig:
    return build(SlurmConfig, *layers, settings)


def directives(text: str) -> dict[str, str]:
    """What sbatch reads: lines up to the first command, quotes taken off."""
    values = {}
    for line in text.split("\n")[1:]:
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            (word,) = shlex.split(line.removeprefix("#SBATCH"))
            name, _, value = word.partition("=")
            values[name] = value
    return values


@pytest.mark.parametrize(
    ("name", "nodes", "tasks", "gres", "memory"),
    [
        ("raven-1gpu", "1", "1", "gpu:a100:1", "125000"),
        ("raven-4gpu", "1", "4", "gpu:a100:4", "500000"),
        ("raven-8gpu", "2", "4", "gpu:a100:4", "500000"),
    ],
)
def test_the_three_jobs_of_the_seed(name, nodes, tasks, gres, memory, capsys) -> None:
    words = ["--preset", name, "--venv", "/u/me/env", "--", "train", "spiral", "--noise", "0.06"]
    assert main(["slurm", "render", *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash -l\n")
    assert directives(text) == {
        "--job-name": "penstock",
        "--nodes": nodes,
        "--ntasks-per-node": tasks,
        "--cpus-per-task": "18",
        "--mem": memory,
        "--time": "00:10:00",
        "--constraint": "gpu",
        "--gres": gres,
        "--output": "outputs/slurm-%j.out",
        "--open-mode": "append",
        "--requeue": "",
        "--signal": "B:USR1@120",
    }
    *body, last = text.splitlines()[-5:]
    assert body == [
        "set -e",
        "module purge",
        "module load gcc/13 cuda/12.6",
        "source /u/me/env/bin/activate",
    ]
    assert last == (
        "exec python -m penstock launch slurm --requeue -- "
        "train spiral --noise 0.06 --output-dir outputs/%j"
    )


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"time": "99:99:99"}, "--time: '99:99:99' has 99 minutes beside a larger unit"),
        ({"time": "5:75"}, "--time: '5:75' has 75 seconds beside a larger unit"),
        ({"time": "1-30:00"}, "--time: '1-30:00' has 30 hours beside a larger unit"),
        ({"time": "1-2:3:400"}, "--time: '1-2:3:400' has 400 seconds beside a larger unit"),
        ({"time": "99999999"}, "--time: '99999999' is longer than any job"),
        ({"time": "2h"}, "--time: '2h' is not a time such as 30 (minutes), 12:00:00 or"),
        ({"array": "7-0"}, "--array: '7-0': 7-0 counts no elements"),
        ({"array": "1,0-9:0"}, "--array: '1,0-9:0': 0-9:0 counts no elements"),
        ({"array": "1-4,3-8"}, "--array: '1-4,3-8' names element 3 twice"),
        ({"array": "5,5%2"}, "--array: '5,5%2' names element 5 twice"),
        ({"array": "64%0"}, "--array: '64%0' lets no element run"),
        ({"array": "4000001"}, "--array: '4000001' goes beyond element 4,000,000, SLURM's last"),
        ({"array": "0-99999999:9"}, "--array: '0-99999999:9' goes beyond element 4,000,000"),
        ({"array": "1--4"}, "--array: '1--4' is not an array such as"),
    ],
)
def test_arrays_and_times_are_checked(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        config_of(setting)
    assert sentence in str(refused.value)


@given(st.lists(st.tuples(*[st.integers(0, 30)] * 2, st.integers(0, 4)), min_size=1, max_size=3))
def test_an_array_that_is_taken_counts_each_element_once(parts: list[tuple[int, int, int]]) -> None:
    """By Python's own counting."""
    text = ",".join(f"{a}-{b}:{step}" for a, b, step in parts)
    numbers = [n for a, b, step in parts if step for n in range(a, b + 1, step)]
    good = all(step and a <= b for a, b, step in parts) and len({*numbers}) == len(numbers)
    try:
        taken = config_of(array=text).array
    except UsageError as refused:
        assert not good and "--array" in str(refused)
        return
    assert good and taken is not None
    assert [n for each in array_ranges(taken) for n in each] == numbers


@given(*[st.integers(0, most) for most in (20, 30, 70, 70)])
def test_a_time_that_is_taken_is_that_of_the_clock(d: int, h: int, m: int, s: int) -> None:
    for text, good, seconds in (
        (f"{d}-{h}:{m}:{s}", h < 24 and m < 60 and s < 60, ((d * 24 + h) * 60 + m) * 60 + s),
        (f"{h}:{m}:{s}", m < 60 and s < 60, (h * 60 + m) * 60 + s),
        (f"{m}:{s}", s < 60, m * 60 + s),
        (f"{m + 1}", True, m * 60 + 60),
        (f"{d}-{h}", h < 24, (d * 24 + h) * 3600),
    ):
        try:
            time = config_of(time=text, signal=0).time
        except UsageError:
            assert not good
            continue
        assert good and time is not None
        assert timedelta(seconds=seconds) == timedelta(seconds=cluster._seconds(time))


def test_every_resource_has_its_line() -> None:
    config = config_of(
        partition="gpudev", account="a.b", qos="normal", array="0-3%2", dependency="afterok:1:2",
        exclusive=True, requeue=False, signal=0, error="e-%a", output="o-%A_%a", gpus_per_node="2",
    )  # fmt: skip
    assert directives(batch_script.slurm_script(config, Command(SPIRAL), "python")) == {
        "--job-name": "penstock", "--nodes": "1", "--ntasks-per-node": "2", "--gres": "gpu:2",
        "--partition": "gpudev", "--account": "a.b", "--qos": "normal", "--array": "0-3%2",
        "--dependency": "afterok:1:2", "--exclusive": "", "--output": "o-%A_%a", "--error": "e-%a",
        "--open-mode": "append", "--no-requeue": "",
    }  # fmt: skip


@pytest.fixture(scope="module")
def recorder(tmp_path_factory) -> Path:
    """A program that notes its arguments and the variable VALUE, each ended by a NUL."""
    path = tmp_path_factory.mktemp("recorder") / "python"
    path.write_text('#!/bin/sh\nprintf "%s\\0" "$VALUE" "$@" > "$0.received"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20)
HOSTILE = TEXT | st.sampled_from(
    ["$(touch /tmp/x)", "`id`", "'; id; '", '"', "\\", "a b", "--", "-x", "#SBATCH --x", "*", "~",
     "$HOME", "\u2028#SBATCH --nodes=9", "&& id", "|", ">x", "{a,b}", "!!", "", "%j"]
)  # fmt: skip


@given(
    st.lists(HOSTILE, max_size=4),
    HOSTILE,
    HOSTILE.filter(lambda t: t and t[0] != "-" and not {"\\", "%"} & set(t.replace("%j", ""))),
)
def test_what_is_asked_is_run(recorder: Path, words: list[str], value: str, name: str) -> None:
    """Bash itself is asked: nothing is expanded, split or run."""
    config = config_of(env=(f"VALUE={value}",), job_name=name, output=f"out/{name}")
    text = batch_script.slurm_script(config, Command((*SPIRAL, *words)), str(recorder))
    plain = batch_script.slurm_script(config_of(), Command(SPIRAL), "python")
    assert directives(text).keys() == directives(plain).keys()
    assert directives(text)["--job-name"] == name
    assert directives(text)["--output"] == f"out/{name}"
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)
    ended = subprocess.run(["bash"], input=text.encode(), capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b"", b"")
    received = Path(f"{recorder}.received").read_bytes().decode().split("\0")[:-1]
    launch = ["-m", "penstock", "launch", "slurm", "--requeue", "--"]
    assert received == [value, *launch, *SPIRAL, *words]


def test_an_environment_with_a_hostile_name_is_activated(tmp_path, recorder: Path) -> None:
    home = tmp_path / "a b'$(touch x)\"#;"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "activate").write_text('PATH="$HERE:$PATH"\n')
    config = config_of(venv=str(home), env={"VALUE": 1})
    text = batch_script.slurm_script(config, Command((*SPIRAL, "--epochs", "2")), "elsewhere")
    subprocess.run(
        ["bash"], input=text.encode(), cwd=tmp_path, check=True,
        env={"PATH": os.environ["PATH"], "HERE": str(recorder.parent)},
    )  # fmt: skip
    assert Path(f"{recorder}.received").read_bytes().endswith(b"spiral\0--epochs\x002\0")
    assert [path.name for path in tmp_path.iterdir()] == [home.name]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"job_name": "a\n#SBATCH --nodes=99"}, "--job-name: 'a\\n#SBATCH --nodes=99' is not text"),
        ({"job_name": "-rf"}, "'-rf' is not text in one line without \\ and no dash first"),
        ({"job_name": "a\\' --nodes=99"}, "is not text in one line without \\"),
        ({"partition": "a b"}, "--partition: 'a b' is not a name of SLURM's"),
        ({"constraint": "gpu;id"}, "--constraint: 'gpu;id' is not a constraint"),
        ({"gpus_per_node": "a100:0"}, "--gpus-per-node: 'a100:0' is not a number of GPUs"),
        ({"gpus_per_node": "4", "ntasks_per_node": 2}, "--ntasks-per-node 2 does not go with"),
        ({"mem": "lots"}, "--mem: 'lots' is not memory such as"),
        ({"time": 3600}, "--time: write 3600 in quotes, or YAML makes a number of hours"),
        ({"time": "3"}, "--signal 120: a job of --time 3 would be told to save, and go back"),
        ({"time": "0-0:02", "signal": 60}, "--signal 60: a job of --time 0-0:02 would be told"),
        ({"dependency": "afterok:x"}, "--dependency: 'afterok:x' is not a dependency"),
        ({"modules": ("$(id)",)}, "--modules: '$(id)' is not a module"),
        ({"venv": "a\rb"}, "--venv: 'a\\rb' is not a path"),
        ({"output": "a\nb"}, "--output: 'a\\nb' is not a path"),
        ({"output": "%x.out"}, "--output %x.out: a job's log is found by %j, and no other"),
        ({"output": "%j", "array": "0-3"}, "--output %j: a job's log is found by %A and %a"),
        ({"folder": "50%"}, "--folder: '50%' is not a folder in one line without"),
        ({"env": {"A": "1\nid"}}, "--env: 'A=1\\nid' is not NAME=VALUE in one line"),
        ({"env": ("COMET_API_KEY=x",)}, "--env: COMET_API_KEY does not belong in a job script"),
        ({"env": {"URI": "https://me:word@host"}}, "--env: the login in URI does not belong in a"),
        ({"nodes": 0}, "--nodes 0: input should be greater than or equal to 1"),
        ({"shell": "id"}, "there is no setting 'shell'"),
    ],
)
def test_a_hostile_value_is_refused_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        config_of(settings)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("word", ["a\n#SBATCH --nodes=9", "a\0b", "\x1b[2J", "\x7f"])
def test_a_word_with_a_control_character_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="control character"):
        batch_script.slurm_script(config_of(), Command((*SPIRAL, word)), "python")


def test_a_login_enters_no_script_and_no_message(capsys) -> None:
    words = ["train", "pairs", "--in-spec", "https://me:word@host/a", "--target-spec", "b"]
    for how in (["render"], ["submit", "--dry-run"]):
        assert main(["slurm", *how, "--", *words]) == 2
        said = capsys.readouterr()
        assert "https://host/a was given with a login, which does not belong in" in said.err
        assert "word" not in said.out + said.err


def test_the_shell_s_sign_for_home_is_a_path(tmp_path, monkeypatch, capsys) -> None:
    """In YAML no shell sees it, and none expands what stands between quotes."""
    monkeypatch.setenv("HOME", "/u/me")
    (tmp_path / "job.yaml").write_text("venv: ~/env\nfolder: ~/runs\noutput: ~/logs/%j\n")
    assert main(["slurm", "render", "--config", str(tmp_path / "job.yaml"), "--", *SPIRAL]) == 0
    text = capsys.readouterr().out
    assert "source /u/me/env/bin/activate\n" in text
    assert "--output-dir /u/me/runs/%j" in text
    assert directives(text)["--output"] == "/u/me/logs/%j"


def test_a_study_is_sized_from_its_nodes() -> None:
    node = config_of(slurm_preset("raven-4gpu"), job_name="spiral")
    assert batch_script.parse_sizes("4,4") == [4, 4], "a size may be repeated"
    sizes = batch_script.parse_sizes("1,2,4,8,12")
    jobs = [batch_script.with_ranks(node, ranks) for ranks in sizes]
    assert [(j.nodes, j.tasks, j.gpus_per_node, j.mem) for j in jobs] == [
        (1, 1, "a100:1", "125000"),
        (1, 2, "a100:2", "250000"),
        (1, 4, "a100:4", "500000"),
        (2, 4, "a100:4", "500000"),
        (3, 4, "a100:4", "500000"),
    ]
    assert [j.job_name for j in jobs] == [f"spiral-{n}" for n in (1, 2, 4, 8, 12)]
    of_preset = build(SlurmConfig, slurm_preset("raven-1gpu"), {"job_name": "spiral-1"})
    assert jobs[0] == of_preset.model_copy(update={"ntasks_per_node": 1})


def test_a_study_without_gpus(capsys) -> None:
    assert main(["slurm", "submit", "--dry-run", "--study", "1,2", "--", *SPIRAL]) == 0
    said = capsys.readouterr()
    first, second = (directives(f"\n{text}") for text in said.out.split("#!/bin/bash\n")[1:])
    of = [(job["--nodes"], job["--ntasks-per-node"]) for job in (first, second)]
    assert of == [("1", "1"), ("1", "2")]
    assert second["--job-name"] == "penstock-2" and "--gres" not in second
    assert said.out.count("--output-dir outputs/%j") == 2
    assert "--study 1,2: each job has all its ranks on one node, and no GPU; " in said.err
    # Where something says how many a node takes, nodes are filled, and nothing needs to be said.
    words = ["--study", "1,2,4", "--ntasks-per-node", "2", "--", *SPIRAL]
    assert main(["slurm", "render", *words]) == 0
    said = capsys.readouterr()
    jobs = [directives(f"\n{text}") for text in said.out.split("#!/bin/bash\n")[1:]]
    assert [(job["--nodes"], job["--ntasks-per-node"]) for job in jobs] == [
        ("1", "1"), ("1", "2"), ("2", "2"),
    ]  # fmt: skip
    assert said.err == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--study 0", "--study '0' is not a list of numbers of devices such as 1,4,8"),
        ("--study 6 --preset raven-4gpu", "6 ranks do not fill 2 nodes of 4 each"),
        ("--study 1,2 --array 0-1", "does not go with --array"),
        ("--study 1,2 --output log", "--output log: the jobs of --study need a file"),
        ("--preset raven-3gpu", "--preset 'raven-3gpu': no such preset; there are "),
        ("--config absent.yaml", "--config absent.yaml: No such file"),
        ("-- bench model --model identity", "--study needs a training; bench is none"),
        ("-- train sprial", "there is no workload 'sprial'; there are spiral, "),
        ("-- train spiral --epochs 0", "--epochs '0'"),
        ("-- train spiral --latent-size 4", "--latent-size belongs to emulator, but"),
        ("-- train spiral --output-dir a", "--output-dir a: the jobs of --study need"),
    ],
)
def test_what_cannot_be_submitted(words: str, sentence: str, capsys) -> None:
    flags = ["render", *words.split(), "--", *SPIRAL]
    if words.startswith("-- "):
        flags = ["submit", "--dry-run", "--study", "1,2", *words.split()]
    assert main(["slurm", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock slurm: ") and sentence in line


@pytest.mark.parametrize("name", ["sbatch", "squeue", "srun"])
def test_without_slurm_it_says_so(name: str, tmp_path, monkeypatch, capsys) -> None:
    words = {
        "sbatch": ["slurm", "submit", "--folder", str(tmp_path / "out"), "--", *SPIRAL],
        "squeue": ["slurm", "status", "12"],
        "srun": ["launch", "slurm", "--", *SPIRAL],
    }
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert main(words[name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"SLURM's {name} is not on PATH" in line
    assert line.endswith("; --dry-run prints the script") == (name == "sbatch")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            None,
            "No such file.*; give a folder that jobs were submitted from, its study.json",
        ),
        ("{", "is not a list of jobs that penstock slurm submit wrote"),
        ('[{"id": 1}]', "is not a list of jobs"),
        ("{}", "is not a list of jobs"),
    ],
)
def test_what_is_no_study(tmp_path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "study.json").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        slurm.read_study(tmp_path)


@pytest.mark.parametrize("kind", ["status", "cancel"])
def test_jobs_are_named(kind: str, capsys) -> None:
    assert main(["slurm", kind]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock slurm: no job is named; give a folder that jobs were")


def job(number: str = "12", **changes: Any) -> slurm.SlurmJob:
    settings = {
        "id": number, "name": "spiral-2", "ranks": 2, "nodes": 2, "log": "slurm-%j.out",
        "command": SPIRAL,
    }  # fmt: skip
    return slurm.SlurmJob.model_validate({**settings, **changes})


def test_jobs_that_are_submitted_at_once_are_all_in_the_list(tmp_path, monkeypatch) -> None:
    """Each is still with sbatch when all others have begun."""
    number, path = 4, tmp_path / "sbatch"
    path.write_text(
        f"#!/bin/sh\ncat > /dev/null; : > {tmp_path}/$$.in\n"
        f"until [ $(ls {tmp_path}/*.in | wc -l) = {number} ]; do sleep 0.01; done\necho $$\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = config_of(folder=str(tmp_path / "out"))
    with ThreadPoolExecutor(number) as pool:
        asked = (config, Command(SPIRAL), "python")
        jobs = [pool.submit(slurm.submit_job, *asked) for _ in range(number)]
        numbers = {job.result().id for job in jobs}
    assert len(numbers) == number
    assert {job.id for job in slurm.read_study(tmp_path / "out")} == numbers


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "expected", "words"),
    [
        ("running", JobState("1", "RUNNING", None, 0, 0, 0, "n[1-2]"), "RUNNING"),
        ("preempted", JobState("1", "PENDING", "BeginTime", 0, 0, 1), "PENDING, BeginTime, 1 restart"),  # noqa: E501
        ("several", JobState("7_0", "COMPLETED", None, 0, 0, 0, "n2"), "COMPLETED"),
        ("several", JobState("3", "FAILED", "NonZeroExitCode", 7, 0, 0, "n2"), "FAILED, exit code 7"),  # noqa: E501
        ("several", JobState("4", "FAILED", "JobLaunchFailure", 0, 9, 0, "n2"),
         "FAILED, killed by signal 9, JobLaunchFailure"),
        ("several", JobState("5", "CANCELLED", "DependencyNeverSatisfied", 0, 0, 0),
         "CANCELLED, DependencyNeverSatisfied"),
        ("cancelled", JobState("7_3", "COMPLETING", None, 0, 0, 0, "n2"), "COMPLETING"),
    ],
)  # fmt: skip
def test_the_queue_is_read(name: str, expected: JobState, words: str) -> None:
    rows = {row.id: row for row in slurm_states._rows(recorded(f"squeue-{name}"))}
    assert rows[expected.id] == expected
    assert expected.words() == words
    assert expected.ended == (expected.state in ("COMPLETED", "FAILED", "CANCELLED"))


def test_the_last_life_of_a_job_tells() -> None:
    """The rows of a job that was preempted, and then ran to its end."""
    accounted = list(slurm_states._rows(recorded("sacct-duplicates")))
    assert [row.state for row in accounted] == ["PREEMPTED", "REQUEUED", "COMPLETED"]
    assert [row.ended for row in accounted] == [False, False, True]
    assert slurm_states._of_each(["1"], accounted) == {"1": [accounted[-1]]}


@pytest.mark.parametrize("noise", ["", "\n", "error: x\n", "|||\n", "JobId=\n", "1|\n", "=\n"])
def test_what_is_no_state_is_none(noise: str) -> None:
    assert list(slurm_states._rows(noise)) == []


@pytest.fixture
def spoken(tmp_path, monkeypatch) -> Callable[..., None]:
    """Commands that say what the real ones said, in their place on PATH."""

    def speak(**said: tuple[int, str]) -> None:
        for name in ("squeue", "sacct"):
            code, text = said.get(name, (1, "slurm_load_jobs error: Invalid job id specified\n"))
            received = tmp_path / f"{name}.txt"
            received.write_text(text)
            stream = "2" if code else "1"
            (tmp_path / name).write_text(
                f"#!/bin/sh\n/bin/cat {shlex.quote(str(received))} >&{stream}\nexit {code}\n"
            )
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return speak


def test_accounting_is_asked_for_what_the_controller_does_not_know(spoken, capsys) -> None:
    spoken(squeue=(0, recorded("squeue-running") + recorded("squeue-several").partition("\n")[2]))
    states = slurm_states.job_states(["1", "3", "77"])
    assert states["1"] == [JobState("1", "RUNNING", None, 0, 0, 0, "n[1-2]")]
    assert states["3"] == [JobState("3", "FAILED", "NonZeroExitCode", 7, 0, 0, "n2")]
    assert states["77"] == []
    # Of an array, some wait and some have ended.
    spoken(squeue=(0, recorded("squeue-several")))
    elements = slurm_states.job_states(["7"])["7"]
    assert sorted(row.id for row in elements) == [f"7_{n}" for n in range(8)]
    assert [row.exit_code for row in slurm_states.job_states(["7_1"])["7_1"]] == [1]
    assert main(["slurm", "status", "7"]) == 3
    shown = capsys.readouterr().out
    assert "n2     FAILED, exit code 1" in shown and "7_[4-7]                      PENDING" in shown
    # One that waits, by its own number.
    assert main(["slurm", "status", "7_5"]) == 3
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["7_5", "PENDING,"]
    assert main(["slurm", "status", "7_8"]) == 2
    assert capsys.readouterr().err == "penstock slurm: SLURM knows no job 7_8\n"
    # Long ago: only accounting knows.
    spoken(sacct=(0, recorded("sacct-duplicates")))
    assert slurm_states.job_states(["1"])["1"] == [
        JobState("1", "COMPLETED", None, 0, 0, 2, "n[1-2]")
    ]
    spoken(sacct=(0, recorded("sacct-all")))
    assert slurm_states.job_states(["4"])["4"] == [JobState("4", "CANCELLED", None, 0, 0, 0, "n2")]
    assert [row.exit_code for row in slurm_states.job_states(["5"])["5"]] == [0, 1, 2]
    spoken(sacct=(1, recorded("sacct-disabled")))
    assert slurm_states.job_states(["12"]) == {"12": []}


def test_a_controller_that_is_gone_is_told(spoken: Callable[..., None]) -> None:
    complaint = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    spoken(squeue=(1, complaint))
    with pytest.raises(PenstockError, match="squeue: Unable to contact slurm controller"):
        slurm_states.job_states(["1"])


def test_a_job_that_slurm_forgot_is_named(spoken: Callable[..., None], tmp_path, capsys) -> None:
    spoken()
    listed = [each.model_dump() for each in (job("12"), job("13"))]
    (tmp_path / "study.json").write_text(json.dumps(listed))
    assert main(["slurm", "status", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("unknown to SLURM: its log says how it ended\n") == 2
    assert main(["slurm", "cancel", str(tmp_path)]) == 0
    assert "none of them is waiting or running" in capsys.readouterr().out
