"""Processes of their own that need not load torch again: forks of one that has loaded it, and has
done nothing else."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

PENSTOCK = "from penstock.cli import entry; entry()"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    "tests.unsearched penstock.cli.infer penstock.inference.run "
    "penstock.inference.sharing.on_worker penstock.inference.sharing.steps "
    "penstock.inference.opening.job penstock.data.stores.omezarr "
    "penstock.data.stores.tensorstore_open distributed.nanny distributed.http.worker rasterio "
    "contourpy numcodecs penstock.data.scenes.cluster_cut tests.looked_up".split()
)


def started(folder: Path, words: Sequence[str] = (), code: str = PENSTOCK) -> ForkServerProcess:
    """A process that runs ``code`` in this folder, by default the command ``penstock``.

    What it says goes to ``said`` there.
    """
    process = _CONTEXT.Process(target=_run, args=(folder, words, code, dict(os.environ)))
    _ready()
    process.start()
    return process


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Within it the nannies of Dask fork their workers, too. These know the variables of now."""
    import dask
    import distributed.utils as of_dask
    import pytest  # here, as each fork imports this file

    _ready()  # before Dask says what is to be loaded there
    knobs = {"worker.multiprocessing-method": "forkserver", "nanny.environ": dict(os.environ)}
    settings = {f"distributed.{name}": value for name, value in knobs.items()}
    with pytest.MonkeyPatch.context() as patch, dask.config.set(settings):
        patch.setattr(of_dask, "_forkserver_preload_set", True)
        yield


def _ready() -> None:
    """Start the process that is forked, where it finds these tests."""
    with contextlib.chdir(Path(__file__).parents[1]):
        forkserver.ensure_running()


def _run(folder: Path, words: Sequence[str], code: str, environment: Mapping[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with Path("said").open("w") as said:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(said.fileno(), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = ["penstock", *words]
    exec(code, {"__name__": "__main__"})
