"""Completion: what argcomplete is told, and what bash and zsh make of it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import argcomplete
import pytest

import penstock
from penstock.cli import parser_of
from penstock.cli.completion import offering

from ..anew import WAYS

REGISTER = Path(sys.executable).parent / "register-python-argcomplete"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user is: a file, and a folder."""
    here = tmp_path / "here"
    (here / "volume.zarr").mkdir(parents=True)
    (here / "model.py").touch()
    monkeypatch.chdir(here)
    return here


CASES = [
    ("penstock in", ["infer "]),
    ("penstock t", ["train", "tune"]),
    ("penstock infer --seam-m", ["--seam-mode "]),
    ("penstock infer --seam-mode ", ["blend", "trim"]),
    ("penstock bench mo", ["model "]),
    ("penstock bench model --mode t", ["train "]),
    ("penstock bench model --tf32 --dtype b", ["bfloat16 "]),
    ("penstock plan --patch ", []),
    ("penstock plan --denormalize --no-tf", ["--no-tf32 "]),
    ("penstock train sp", ["spiral "]),
    ("penstock infer --model-type denoise-t", ["denoise-tiny "]),
    ("penstock infer --model-type mod", ["model.py "]),
    ("penstock infer --in-spec vol", ["volume.zarr/"]),
    ("penstock report vol", ["volume.zarr/"]),
    ("penstock slurm submit --preset raven", ["raven-1gpu", "raven-4gpu"]),
]


@pytest.mark.parametrize(("line", "offered"), CASES)
def test_what_is_offered(line: str, offered: list[str], folder: Path) -> None:
    finder = argcomplete.CompletionFinder(offering(parser_of(line.split()[1:])))
    quote, prefix, _, before, last_break = argcomplete.split_line(line)
    words = finder._get_completions(before, prefix, quote, last_break)
    assert set(offered) <= set(words) if len(offered) > 1 else words == offered


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize(
    ("line", "verbs"), [("penstock in", []), ("penstock bench model --mode ", ["bench"])]
)
def test_only_the_verb_in_the_line_is_imported(
    run: Callable[..., str], line: str, verbs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing heavy: it happens at each press of the key."""
    code = (
        "import argcomplete, sys; from penstock.cli import VERBS, entry\n"
        "verbs = {f'penstock.cli.{verb}' for verb in VERBS}\n"
        "def offered(parser): print(*sorted(verbs & set(sys.modules))); raise SystemExit\n"
        "argcomplete.autocomplete = offered\n"
        "try: entry()\nexcept SystemExit as end: assert not end.code"
    )
    monkeypatch.setattr(argcomplete, "autocomplete", argcomplete.autocomplete)  # put back
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setenv("COMP_LINE", line)
    heavy = {"torch", "tensorstore", "zarr", "dask", "pandas", "matplotlib"}
    assert run(code, without=heavy).split() == [f"penstock.cli.{verb}" for verb in verbs]


def typed(shell: list[str], keys: str, until: str, folder: Path) -> str:
    """What a terminal shows of a shell in which keys are pressed, up to some words."""
    tools = folder.parent / "bin"
    tools.mkdir()
    ours = tools / "penstock"
    ours.write_text(
        f"#!{sys.executable}\n# PYTHON_ARGCOMPLETE_OK\nfrom penstock.cli import entry\nentry()\n"
    )
    ours.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{REGISTER.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(penstock.__file__).parent.parent),
        "PS1": "ready> ",
        "TERM": "dumb",
        "INPUTRC": os.devnull,
    }
    ours_end, theirs = pty.openpty()
    process = subprocess.Popen(
        shell, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 300
    begin = "autoload -U compinit; compinit -u; " if shell[0] == "zsh" else ""
    steps = [begin + 'eval "$(register-python-argcomplete penstock)"; echo set"up"\n', keys]
    marks = ["\nsetup", until]
    try:
        for step, mark in zip(steps, marks, strict=True):
            os.write(ours_end, step.encode())
            seen = len(shown)
            while mark not in shown[seen:].replace("\r", ""):
                assert time.monotonic() < deadline, shown
                if select.select([ours_end], [], [], 1.0)[0]:
                    shown += os.read(ours_end, 2**16).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours_end)
    return shown


@pytest.mark.slow
@pytest.mark.skipif(not REGISTER.exists(), reason="argcomplete's script is not beside this Python")
@pytest.mark.parametrize(
    ("shell", "keys", "shown"),
    [
        ("bash --norc --noprofile -i", "penstock infer --seam-mode tr\t", "--seam-mode trim "),
        ("bash --norc --noprofile -i", "penstock report vol\t", "report volume.zarr/"),
        ("zsh -f -i", "penstock inf\t", "penstock infer "),
    ],
)
def test_a_shell_completes(shell: str, keys: str, shown: str, folder: Path) -> None:
    if shutil.which(shell.split()[0]) is None:
        pytest.skip("this shell is not installed")
    typed(shell.split(), keys, shown, folder)
