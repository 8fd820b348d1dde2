"""Every command block of README and docs: parsed by the real parsers, and run in order; every link
of them leads somewhere."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import penstock
from penstock.cli import VERBS, spelled

from .preloaded import forked_commands

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.md"))
"""Each runs in a folder of its own, and its output is compared with what it shows."""
BEGUN = [ROOT / f"docs/{name}.md" for name in "infer measure load train scale install".split()]
"""These go on with what the commands of README made, and others with what theirs made."""
PAGES = [
    ROOT / "README.md",
    *BEGUN,
    *sorted({*(ROOT / "docs").glob("*.md")} - {*BEGUN}),
    *sorted((ROOT / "docs" / "background").glob("*.md")),
    ROOT / "training" / "README.md",
]
FOLLOWED = "extending.md"
"""Its commands need what its steps make, and its code may be lines of a file: test_extending
follows them."""
ELSEWHERE = {
    "make demo": "it makes an environment; CI runs it",
    "make test": "it is what runs this",
    "pip install": "it changes the environment; test_packaging builds the wheel",
    "mlflow ui": "it serves until it is stopped; test_mlflow starts it",
    "tensorboard": "it serves until it is stopped; test_tracking reads its files",
    "comet upload": "it needs a key; test_comet uploads to a cloud of ours",
    "wandb": "it needs a key, or a terminal; test_wandb has W&B read what it wrote",
    "nvidia-smi": "it needs a GPU, and never ends",
    "penstock plot gpu_metrics.csv": "nvidia-smi has not written it; test_figures has such a log",
    "penstock dashboard outputs logs": "it never ends; test_runs_server starts it",
    "penstock dashboard outputs --port": "it never ends; test_runs_server starts it",
    "penstock label cells.ome.zarr nuclei.ome.zarr": "test_instances has such a decoder",
    "penstock slurm submit": "it needs sbatch; test_slurm_cluster starts a SLURM",
    "penstock slurm status": "it needs squeue; test_slurm_cluster asks a SLURM that it starts",
    "penstock slurm cancel": "it needs scancel; test_slurm_arrays cancels jobs of its SLURM",
    "penstock bench model --tile-sizes 64 --mode train": "test_limits finds where memory ends",
    "penstock bench queue data/ufs": "tutorial 3 runs one",
    "penstock tune loader data/ufs": "tutorial 3 runs one",
    "penstock train --train_chips_path": "tutorial 4 runs one, with these and the next two",
    "penstock predict run/": "tutorial 4 runs it",
    "penstock score xview3": "tutorial 4 runs it",
    "penstock generate volume many.zarr": "tutorial 5 runs it, and the next two",
    "penstock infer --in-spec many.zarr": "tutorial 5 runs it",
    "penstock verify by-two.zarr": "tutorial 5 runs it",
    "penstock scaling slurm-": "no job of SLURM has run; test_logs has such logs",
}
"""What is not run with the pages of README and guides, and why."""
MAY_SAY = {"penstock compare": (0, 1, 3, 4)}
"""Exit codes of commands that may find something; the others end with 0."""

QUICKER = {
    "penstock train spiral --epochs 2 --output-dir tracked": "--num-samples 3000 "
    "--track tensorboard",  # test_mlflow trains with both
    "penstock train spiral": "--num-samples 3000",
    "torchrun": "--num-samples 3000",
    "penstock train --train": "--epochs 1 --max-steps 6",
    "penstock generate ufs-p1 data/ufs": "--grid 48 96",
    "penstock bench loader": "--loaders penstock --no-ladder --batches 4",
    "penstock bench queue": "--workers 2 --iterations 8",
    "penstock tune loader": "--launches 1 --batches 6",
    "penstock bench model --tile-sizes 64": "--tile-sizes 32 --batch-sizes 1 --effort quick "
    "--launch-seconds 0.2",
    "penstock bench model": "--batch-sizes 1 --effort quick --launch-seconds 0.2",
    "penstock generate xview3 scenes --scenes 4 --size 1024": "--size 256 256 --objects 8",
    "penstock preprocess --data_root": "--chip-size 128 --overlap 32",
    "penstock generate volume": "--shape 48 96 96",
    "python training/denoise_tiny.py": "--steps 2 --volumes 1",
    "penstock tune infer": "--most-seconds 2 --launch-seconds 0.2",
}
"""What is added to commands that measure much, or often, for the sake of an interval, that train
until something is learnt, and that make what several commands read."""
QUICK_PRESET = ROOT / "src" / "penstock" / "bench" / "suite" / "presets" / "quick.json"
OF_A_SUITE = ("./run_benchmark.sh quick", "./run_benchmark.sh benchmark --config one.json")
"""Of the four trainings of its preset one is run, of a few steps."""
LONGEST_S = 600
"""Most seconds of a command, so that one that hangs is named."""


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    fence = re.compile(r"^```([\w{}]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    pages = [*PAGES, *TUTORIALS]
    return [Block(page.name, *parts) for page in pages for parts in fence.findall(page.read_text())]


def make_outputs() -> ModuleType:
    """The script that runs tutorials, which is no module of a package."""
    spec = spec_from_file_location("make_outputs", ROOT / "docs" / "make_outputs.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(text: str) -> list[str]:
    """Lines of a shell block, continued ones joined, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := re.sub(r"(^|\s)#.*$", "", line).strip())]


def elsewhere(command: str) -> bool:
    return any(command.startswith(prefix) for prefix in ELSEWHERE)


def quicker(command: str) -> str:
    more = next((words for start, words in QUICKER.items() if command.startswith(start)), "")
    return f"{command.replace(*OF_A_SUITE)} {more}"


def quicker_block(text: str) -> str:
    """Of a tutorial, whose Python reads planes of the whole volume."""
    whole = "penstock generate volume"
    return "\n".join(c if c.startswith(whole) else quicker(c) for c in commands(text))


SHELL = [
    line
    for block in blocks()
    if block.language == "sh" and block.page != FOLLOWED
    for line in commands(block.text)
]


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in blocks()} <= {
        "sh",
        "python",
        "yaml",
        "json",
        "toml",
        "text",
        "{toctree}",
    }
    assert len(SHELL) > 20
    unused = [prefix for prefix in ELSEWHERE if not any(c.startswith(prefix) for c in SHELL)]
    assert not unused
    named = {name for why in ELSEWHERE.values() for name in re.findall(r"\btest_\w+", why)}
    assert named <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


@cache
def parser_of(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"penstock {verb}", allow_abbrev=False)
    import_module(f"penstock.cli.{verb}").add_arguments(parser)
    return parser


def refusal(command: str) -> str:
    """Why it is no command; nothing if it is one."""
    words = shlex.split(command.partition(" || ")[0])
    if words[0] == "./run_benchmark.sh":
        words = ["penstock", "suite", *words[1:]]
    if words[0] == "torchrun":  # what each rank runs
        words = words[words.index("-m") + 1 :]
    if words[0] == "python":
        return "" if (ROOT / words[1]).is_file() else "there is no such script"
    if words[0] != "penstock":
        return "" if elsewhere(command) else f"{words[0]} is neither ours nor in the table"
    if words[1] not in VERBS:
        return "there is no such verb"
    dashed = [re.sub("_", "-", w) if w.startswith("--") else w for w in words[2:]]
    try:
        parser_of(words[1]).parse_args(spelled([words[1], *dashed])[1:])
    except SystemExit:
        return "its parser refuses it, as printed"
    return ""


def test_every_command_is_one_that_the_parsers_take() -> None:
    assert {command: why for command in SHELL if (why := refusal(command))} == {}
    assert refusal("penstock infer --nonesuch") and refusal("penstock nonesuch")
    assert refusal("python nonesuch.py") and refusal("nonesuch")


@pytest.mark.parametrize(
    "block", [b for b in blocks() if b.language == "python" and b.page != FOLLOWED]
)
def test_every_block_of_python_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec")


@pytest.fixture
def tools(tmp_path) -> Iterator[Path]:
    """A folder for programs, with those that need not load torch each time."""
    folder = tmp_path / "bin"
    folder.mkdir()
    with forked_commands(folder):
        yield folder


@pytest.mark.docs
def test_every_block_runs_in_order(tools: Path, tmp_path) -> None:
    """In one folder, as who reads from the first line to the last."""
    here = tmp_path / "clone"
    (here / "src" / "penstock" / "models").mkdir(parents=True)
    shutil.copy(ROOT / "run_benchmark.sh", here)
    shutil.copytree(ROOT / "training", here / "training")
    preset = json.loads(QUICK_PRESET.read_text()) | {"batch_sizes": [1], "num_workers_list": [0]}
    preset["train"]["max_steps"] = 2
    (here / "one.json").write_text(json.dumps(preset))
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(tools / "python"),
        "PYTHONPATH": str(Path(penstock.__file__).parent.parent),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    failed = []
    tutorials = [page.name for page in TUTORIALS]
    for block in blocks():
        if block.page in (FOLLOWED, *tutorials):
            continue
        if block.language == "python":
            jobs = [["python", "-W", "error", "-c", block.text]]
        elif block.language == "yaml":
            named = re.match(r"# (\S+\.yaml)\n", block.text)
            assert named, f"{block.page}: a YAML block begins with # and the name of its file"
            (here / named[1]).write_text(block.text)
            continue
        elif block.language == "sh":
            lines = [quicker(line) for line in commands(block.text) if not elsewhere(line)]
            jobs = [["bash", "-c", line] for line in lines]
        else:
            continue
        for job in jobs:
            done = subprocess.run(
                job, cwd=here, env=environment, capture_output=True, text=True, timeout=LONGEST_S
            )
            allowed = next((c for p, c in MAY_SAY.items() if job[-1].startswith(p)), (0,))
            if done.returncode not in allowed:
                said = (done.stdout + done.stderr)[-1500:]
                failed.append(f"{block.page}: {job[-1]}\nexit {done.returncode}: {said}")
    assert not failed, "\n\n".join(failed)


WORD = re.compile(r"[A-Za-z]{4,}")


@pytest.mark.docs
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_shows_what_its_commands_say(page: Path, tmp_path) -> None:
    """In the same words, most of them: times, and what they lead to, differ between machines."""
    outputs, text = make_outputs(), page.read_text()
    steps = []
    for step in outputs.run(text, tmp_path, quicker_block):
        assert step.exit_code == 0, f"{step.text}exit {step.exit_code}: {step.error[-1500:]}"
        steps.append(step)
    now = outputs.OUTPUT.finditer(outputs.filled(text, steps))
    for before, after in zip(outputs.OUTPUT.finditer(text), now, strict=True):
        words = WORD.findall(before["shown"])
        gone = [word for word in words if word not in WORD.findall(after["shown"])]
        assert words and len(gone) < len(words) / 2, (
            f"{page.name} shows words that are not said (python docs/make_outputs.py {page.name} "
            f"writes what is): {' '.join(gone)}\n{after['shown']}"
        )
    for picture in outputs.PICTURE.finditer(text):
        assert (tmp_path / "here" / picture["file"]).is_file()


LINKED = [*PAGES, *TUTORIALS, *(ROOT / "docs" / "tutorials").glob("index.md")]
LINKED += [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")]
LINKED += [ROOT / "benchmarks" / "README.md", *(ROOT / "docs" / "decisions").glob("*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """Links into docs/reference, which the site makes, are checked where the site is built."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)", text):
        place = (page.parent / target).resolve() if target else page
        if place.is_relative_to(ROOT / "docs" / "reference"):
            continue
        assert place.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(place), f"{page.name} links to {target}#{anchor}"
    for name in re.findall(r"\bdocs/[\w/-]+\.md\b", text):
        assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_every_guide_begins_with_its_task_and_is_on_the_start_page() -> None:
    """The list of guides on the site is made from these first sentences."""
    guides = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    start = guides.pop("index.md")
    listed = re.findall(r"^\| .* \| \[[^\]]+\]\(([\w-]+\.md)\) \|$", start, re.MULTILINE)
    assert sorted(listed) == sorted(guides)
    opening = re.compile(r"# [^\n]+\n\nThis guide [^.]*\S")
    assert [name for name, text in guides.items() if not opening.match(text)] == []
