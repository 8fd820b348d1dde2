"""Systems that are not Linux, as far as one that is can show it: what they lack is hidden."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from .anew import forked, imported_anew

HIDE = """
import os, signal, sys, sysconfig, time
sysconfig.get_config_vars()
# What Penstock stands on knows the true system, and it does not.
import asyncio, ctypes, gzip, importlib.metadata, importlib.resources, lzma, platform, sqlite3
import subprocess, tempfile, uuid, xml.etree.ElementTree, zipfile, zoneinfo
import numpy, psutil, pydantic, pytest, yaml
{first}
LACKS = {{
    "win32": (
        "fcntl grp pwd resource termios",
        "SIGUSR1 SIGUSR2 SIGHUP SIGKILL SIGALRM SIGQUIT pause alarm setitimer",
        "fork forkpty killpg getuid geteuid getgid getloadavg mkfifo nice register_at_fork waitid "
        "sched_getaffinity sched_setaffinity sysconf uname posix_fadvise statvfs O_NOFOLLOW",
    ),
    "darwin": ("", "", "sched_getaffinity sched_setaffinity posix_fadvise waitid"),
}}
CLOCKS = "CLOCK_BOOTTIME CLOCK_MONOTONIC_RAW"
if {system!r} == "win32":
    CLOCKS += " CLOCK_MONOTONIC CLOCK_REALTIME clock_gettime"
modules, signals, calls = LACKS[{system!r}]
for name in modules.split():
    sys.modules[name] = None
for place, names in ((signal, signals), (os, calls), (time, CLOCKS)):
    for name in names.split():
        if hasattr(place, name):
            delattr(place, name)
sys.platform = {system!r}
"""
VERBS = """
import contextlib, importlib, io, pkgutil
import penstock, penstock.cli
for found in pkgutil.iter_modules(penstock.cli.__path__):
    importlib.import_module(f"penstock.cli.{found.name}")
for verb in penstock.cli.VERBS:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            penstock.cli.main([verb, "--help"])
        except SystemExit as end:
            assert end.code == 0, verb
    assert "usage: penstock" in printed.getvalue()
"""


REFUSED = """
assert penstock.cli.main(["launch", "slurm", "--", "train", "spiral"]) == 2
words = "--model denoise-tiny --tile-sizes 8 --batch-sizes 1 --device cpu --output bench.csv"
assert penstock.cli.main(["bench", "model", *words.split()]) == 2
"""


def run_forked(system: str, code: str, folder: Path) -> tuple[int, str, str]:
    """In a fork of this process, which has imported Penstock's libraries and imports it anew."""
    program = HIDE.format(system=system, first="") + code

    def work() -> None:
        with imported_anew():
            exec(program, {"__name__": "__main__"})

    return forked(work, folder)


def run(system: str, code: str, folder: Path, first: str = "") -> tuple[int, str, str]:
    """In a fresh interpreter; ``first`` is imported before anything is hidden."""
    program = HIDE.format(system=system, first=first) + code
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("run", "system"), [(run_forked, "win32"), pytest.param(run, "darwin", marks=pytest.mark.slow)]
)
def test_every_verb_is_imported_and_helps_and_what_windows_cannot_is_said_in_a_sentence(
    run: Callable[[str, str, Path], tuple[int, str, str]], system: str, tmp_path
) -> None:
    code, _, said = run(system, VERBS + (REFUSED if system == "win32" else ""), tmp_path)
    assert code == 0, said
    if system == "darwin":
        assert said == ""
        return
    launch, bench = said.strip().splitlines()
    assert launch.startswith("penstock launch: penstock launch needs signals that this system")
    assert bench.startswith("penstock bench: what is measured runs in a process group of its own")


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.long)])
def test_a_job_is_planned_and_run_and_a_net_is_trained(system: str, tmp_path) -> None:
    np.save(tmp_path / "in.npy", np.arange(24**3, dtype=np.uint16).reshape(24, 24, 24))
    code = """
from penstock.cli import main
job = ["--in-spec", "in.npy", "--model-type", "identity", "--patch", "16", "--normalize", "none"]
job += ["--overlap", "4", "--devices", "cpu", "--out-spec", "out.zarr"]
train = "train spiral --num-samples 203 --epochs 1 --device cpu --num-workers 0".split()
assert main(["plan", *job]) == 0
assert main(["infer", *job]) == 0
assert main([*train, "--output-dir", "run"]) == 0
"""
    first = "sys.modules['torchmetrics'] = None  # Fabric asks for its version, a second's work\n"
    first += "import torch, tensorstore, zarr, lightning_fabric, torch.utils.data"
    code, _, error = run(system, code, tmp_path, first)
    assert code == 0, error
    assert (tmp_path / "run" / "best_model.pth").exists()
