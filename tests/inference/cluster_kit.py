"""A cluster of real processes for a test: a scheduler of the user's own, workers, and a volume."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from penstock.cli import main

from ..preloaded import started
from .kit import Array, values

QUICK = ("--model-type", "net.py:quick", "--parts", "6")
"""Of the six blocks of `SMALL`, each of four forwards. While there is a file "hold", a process runs
no more forwards than the file says."""
SHAPE, SMALL = (48, 64, 80), (16, 32, 48)
WORDS = ("--in-spec in.npy --model-type net.py:slow --patch 16 --overlap 4 --block 16 --chunks 16 "
         "--devices cpu --threads 1 --batch 1 --seam-mode blend --head-kind intensity "
         "--normalize global").split()  # fmt: skip
NET = """
import itertools
import math
import time
from pathlib import Path
import torch
from torch import nn

class SqueezeExcite(nn.Module):
    # Its sums over a whole patch differ with the number of threads.
    def __init__(self, seconds):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.gate = nn.Conv3d(1, 8, 3, padding=1), nn.Linear(8, 8)
        self.out, self.seconds = nn.Conv3d(8, 1, 1), seconds

    def forward(self, x):
        time.sleep(0 if HURRY.exists() else self.seconds)
        y = self.conv(x)
        gate = torch.sigmoid(self.gate(y.mean((2, 3, 4))))
        return self.out(y * gate[:, :, None, None, None])

def slow():
    return SqueezeExcite(0.002)

class Held(nn.Module):
    # A process runs no more than some forwards while there is a file.
    def forward(self, x):
        while next(FORWARDS) > most():
            time.sleep(0.05)
        return x

FORWARDS, HOLD = itertools.count(), Path(__file__).with_name("hold")
HURRY = HOLD.with_name("hurry")

def most():
    try:
        return int(HOLD.read_text())
    except FileNotFoundError:
        return math.inf

def quick():
    # The mean of the other net has each worker import the compiler of torch, for a second.
    torch.manual_seed(0)
    return nn.Sequential(Held(), nn.Conv3d(1, 1, 3, padding=1))

def slower():
    return SqueezeExcite(0.25)  # so that a signal comes in time where the machine is busy
"""

HANGS = """
import time
from pathlib import Path
import torch

class Hangs(torch.nn.Module):
    # Once, as long as there is a file.
    def forward(self, x):
        if x.device.type != "meta" and (x > 5).any() and not Path("hung").exists():
            Path("hung").touch()
            while Path("hangs").exists():
                time.sleep(0.05)
        return x

net = Hangs
"""


@pytest.fixture(autouse=True)
def place(here) -> None:
    write_input(SHAPE)
    Path("net.py").write_text(NET)


def write_input(shape: tuple[int, ...]) -> None:
    np.save("in.npy", np.random.default_rng(0).normal(900, 200, shape).astype("float32"))


def written_alone(*words: str) -> Array:
    assert infer(*words, out="alone.zarr") == 0
    return values("alone.zarr")


def infer(*words: str, out: str = "out.zarr") -> int:
    return main(["infer", *WORDS, "--out-spec", out, *words])


def eventually(seconds: float = 300) -> Iterator[None]:
    """Again and again until something holds. Fails where it never does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.05)
    pytest.fail(f"it did not happen within {seconds} s")


def written(folder: Path) -> Iterator[str]:
    for log in folder.glob("done-*.log"):
        yield from (line for line in log.read_text().splitlines() if line[0] not in "#?")


def hidden_from(folder: str) -> tuple[str, ...]:
    """The words that start a worker on a host ``n9`` of its own, where a folder is empty."""
    script = f'hostname n9 && mount -t tmpfs tmpfs {folder} && exec "$@"'
    words = ("unshare", "--mount", "--uts", "sh", "-c", script, "sh")
    if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("it takes the rights of root to mount a disk")
    return words


FORKED = """
import dask
from distributed.cli.{} import main
dask.config.set({{"distributed.worker.profile.enabled": False}})  # as in workers of Penstock's own
dask.config.set({{"distributed.admin.tick.interval": "500ms"}})
main()
"""


class Scheduler:
    """A scheduler of Dask and its workers, each a process of its own. It is forked, unless it has
    variables that are read as a library is loaded."""

    def __init__(self) -> None:
        self.file = Path("scheduler.json").absolute()
        self.processes: list[psutil.Process] = []
        words = ("--port", "0", "--dashboard-address", "127.0.0.1:0", "--no-dashboard")
        self._start("dask_scheduler", *words)
        for _ in eventually():
            if self.file.exists() and self.file.read_text().endswith("}"):
                break
        self.address = str(json.loads(self.file.read_text())["address"])

    def worker(
        self, within: Sequence[str] = (), nanny: bool = False, path: str = ""
    ) -> psutil.Process:
        """A worker with one thread of Dask.

        It is started by the words ``within``, below a process that starts it again if ``nanny``.
        ``path`` are folders that its imports look at first.
        """
        words = ["--nthreads", "1", "--nanny" if nanny else "--no-nanny", "--no-dashboard",
                 "--memory-limit", "0"]  # fmt: skip
        variables = {}
        if path:
            paths = [path, os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return self._start("dask_worker", *words, within=within, **variables)

    def _start(
        self, command: str, *words: str, within: Sequence[str] = (), **variables: str
    ) -> psutil.Process:
        given = ["--host", "127.0.0.1", "--scheduler-file", str(self.file), *words]
        if not variables and not within:
            folder = Path(f"{command} {len(self.processes)}")
            folder.mkdir()
            process = psutil.Process(started(folder, given, FORKED.format(command)).pid)
        else:
            process = psutil.Popen(
                [*within, sys.executable, "-m", f"distributed.cli.{command}", *given],
                env={**os.environ, **variables}, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # workers end without a scheduler
                process.kill()
            process.wait()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    started = Scheduler()
    yield started
    started.close()
