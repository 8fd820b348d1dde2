"""Every command block of README and docs: parsed by the real parsers, and run in order."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
from penstock.cli import VERBS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLLOWED = "extending.md"
"""Its commands need what its steps make, and its code may be lines of a file: test_extending
follows them."""
ELSEWHERE = {
    "make demo": "it makes an environment; CI runs it",
    "make test": "it is what runs this",
    "pip install": "it changes the environment; test_packaging builds the wheel",
    "nvidia-smi": "it needs a GPU, and never ends",
    "penstock plot gpu_metrics.csv": "nvidia-smi has not written it; test_plots has such a log",
    "penstock slurm submit": "it needs sbatch; test_slurm_cluster starts a SLURM",
    "penstock infer --cluster slurm": "it needs sbatch; test_slurm_workers starts a SLURM",
    "penstock slurm status": "it needs squeue",
    "penstock slurm collect": "it needs squeue",
    "penstock slurm cancel": "it needs scancel",
    "penstock scaling slurm-": "no job of SLURM has run; test_scaling_logs has such logs",
}
"""What is not run here, and why."""
MAY_SAY = {"penstock compare": (0, 1, 4)}
"""Exit codes of commands that may find something; the others end with 0."""

QUICKER = {
    "penstock bench loader": "--loaders penstock torch",
    "penstock bench model --tile-sizes 64 --mode train": "--limit-tolerance 0.5",
    "penstock bench model": "--effort quick",
}
"""What is added to commands that measure much, or often, for the sake of an interval."""


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(page.name, *found) for page in PAGES for found in fence.findall(page.read_text())]


def commands(block: Block) -> list[str]:
    """Lines of a shell block, continued ones joined, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := re.sub(r"(^|\s)#.*$", "", line).strip())]


def elsewhere(command: str) -> bool:
    return any(command.startswith(prefix) for prefix in ELSEWHERE)


def quicker(command: str) -> str:
    more = next((words for start, words in QUICKER.items() if command.startswith(start)), "")
    return f"{command} {more}"


SHELL = [
    line
    for block in blocks()
    if block.language == "sh" and block.page != FOLLOWED
    for line in commands(block)
]


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in blocks()} <= {
        "sh",
        "python",
        "yaml",
        "json",
        "toml",
        "text",
    }
    assert len(SHELL) > 20
    unused = [prefix for prefix in ELSEWHERE if not any(c.startswith(prefix) for c in SHELL)]
    assert not unused


@pytest.mark.parametrize("command", SHELL)
def test_every_command_is_one_that_the_parsers_take(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "./run_benchmark.sh":
        words = ["penstock", "suite", *words[1:]]
    if words[0] != "penstock":
        assert elsewhere(command), f"{words[0]} is neither ours nor in the table"
        return
    assert words[1] in VERBS
    verb = import_module(f"penstock.cli.{words[1]}")
    parser = argparse.ArgumentParser(prog=f"penstock {words[1]}", allow_abbrev=False)
    verb.add_arguments(parser)
    parser.parse_args([re.sub("_", "-", w) if w.startswith("--") else w for w in words[2:]])


@pytest.mark.parametrize(
    "block", [b for b in blocks() if b.language == "python" and b.page != FOLLOWED]
)
def test_every_block_of_python_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec")


@pytest.mark.docs
def test_every_block_runs_in_order(tmp_path: Path) -> None:
    """In one folder, as who reads from the first line to the last."""
    tools = tmp_path / "bin"
    tools.mkdir()
    ours = tools / "penstock"
    ours.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    ours.chmod(0o755)
    here = tmp_path / "clone"
    here.mkdir()
    (here / "run_benchmark.sh").write_bytes((ROOT / "run_benchmark.sh").read_bytes())
    (here / "run_benchmark.sh").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(Path(penstock.__file__).parent.parent),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    failed = []
    for block in blocks():
        if block.page == FOLLOWED:
            continue
        if block.language == "python":
            jobs = [[sys.executable, "-W", "error", "-c", block.text]]
        elif block.language == "yaml":
            named = re.match(r"# (\S+\.yaml)\n", block.text)
            assert named, f"{block.page}: a YAML block begins with # and the name of its file"
            (here / named[1]).write_text(block.text)
            continue
        elif block.language == "sh":
            lines = [quicker(line) for line in commands(block) if not elsewhere(line)]
            jobs = [["bash", "-c", line] for line in lines]
        else:
            continue
        for job in jobs:
            done = subprocess.run(job, cwd=here, env=environment, capture_output=True, text=True)
            allowed = next((c for p, c in MAY_SAY.items() if job[-1].startswith(p)), (0,))
            if done.returncode not in allowed:
                said = (done.stdout + done.stderr)[-1500:]
                failed.append(f"{block.page}: {job[-1]}\nexit {done.returncode}: {said}")
    assert not failed, "\n\n".join(failed)
